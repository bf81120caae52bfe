//! Domains that did not answer a moment ago.
//!
//! Owns: until when each of them counts as one. Never touches: requests; a domain that is quiet is asked all the same.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use crate::erasure::SHARDS;

/// How long nobody waits for a domain that was late or away.
pub const QUIET: Duration = Duration::from_secs(1);

/// See the module's note. Times are milliseconds since it was made; 0: it answers.
#[derive(Debug)]
pub struct Quiet {
    made: Instant,
    until: [AtomicU64; SHARDS],
}

impl Quiet {
    /// All answer.
    pub fn new() -> Self {
        Self { made: Instant::now(), until: Default::default() }
    }

    fn now(&self) -> u64 {
        self.made.elapsed().as_millis() as u64
    }

    /// A domain was late, or away.
    pub fn missed(&self, domain: usize) {
        self.until[domain].store(self.now() + QUIET.as_millis() as u64, Relaxed);
    }

    /// It answered.
    pub fn answered(&self, domain: usize) {
        self.until[domain].store(0, Relaxed);
    }

    /// Whether it was late or away a moment ago.
    pub fn is(&self, domain: usize) -> bool {
        self.now() < self.until[domain].load(Relaxed)
    }
}
