//! Benches of the crate.
fn main() {}
