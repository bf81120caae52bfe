//! Where keys are looked up when more than one process can tell.
//!
//! Owns: one logical table cut by key over any number of entry points ([`Members`]), the longest prefix of a chain over all of them
//! ([`Directory`]), and the soft state kept in a Valkey or Redis server for media that every process can read ([`soft`]; [`share`] joins
//! it with a store).
//! Never touches: bytes of objects, what an entry point keeps, sockets of our own protocol (a client implements [`EntryPoint`] with them).
//!
//! What is found here is a hint: a read that finds nothing is a miss, never an error.

mod hint;
mod members;
mod merge;
#[cfg(feature = "redis")]
pub mod share;
#[cfg(feature = "redis")]
pub mod soft;

pub use hint::{Hint, Owner};
pub use members::{Members, Part};
pub use merge::{Directory, Found, Plan};

use crate::error::Error;
use crate::key::Key;

/// One entry point, as a client sees it.
pub trait EntryPoint: Send + Sync {
    /// The longest prefix of `keys` it has. They are its own keys of a chain, in order; positions of the answer count in them.
    ///
    /// # Errors
    /// Any error counts as an answer that did not come.
    fn check(&self, keys: &[Key]) -> Result<Found, Error>;
}
