//! What failed last, in words: whoever keeps a log, or wonders about misses, asks for it.

use std::fmt::Display;
use std::sync::{Mutex, PoisonError};

/// The latest failure and how many there were. Written to where something fails, never on the way of what goes well.
#[derive(Debug, Default)]
pub struct Trouble(Mutex<(u64, Option<String>)>);

impl Trouble {
    /// Something has failed.
    pub fn note(&self, what: impl Display) {
        let what = what.to_string();
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *kept = (kept.0 + 1, Some(what));
    }

    /// The latest failure.
    pub fn latest(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).1.clone()
    }

    /// Failures so far.
    pub fn count(&self) -> u64 {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).0
    }
}
