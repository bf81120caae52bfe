//! Tests that need what is not there.

/// Says why a test does nothing: on stderr, and in the file that whoever counts has named.
pub fn skip(why: &str) {
    eprintln!("skipped: {why}");
    if let Some(path) = std::env::var_os("DEEPINFER_TEST_SKIPS") {
        let mut file = std::fs::OpenOptions::new().create(true).append(true).open(path).unwrap();
        std::io::Write::write_all(&mut file, format!("{why}\n").as_bytes()).unwrap();
    }
}
