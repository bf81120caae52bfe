//! What an agent counts.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Counters since the start.
        #[derive(Debug, Default)]
        pub struct Counters { $($(#[$doc])* pub $name: AtomicU64),* }

        impl Counters {
            /// Names and values, for metrics.
            pub fn each(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name.load(Ordering::Relaxed))),*].into_iter()
            }
        }
    };
}

counters! {
    /// Connections let in.
    connections,
    /// Connections turned away: no place, another version, another user, no greeting.
    turned_away,
    /// Requests that made no sense.
    malformed,
    /// Objects found in shared memory.
    hits,
    /// Objects that the store was asked for.
    fetches,
    /// Those of them it had.
    fetched,
    /// Their bytes.
    fetched_bytes,
    /// Objects not fetched, or not taken, because everything was pinned or the queue was full.
    no_room,
    /// Objects put.
    put,
    /// Their bytes.
    put_bytes,
    /// Puts of what was there already.
    exists,
    /// Puts of other bytes under a name that is there: an alarm.
    conflicts,
    /// The same where bytes may differ between writers: the first stays.
    differs,
    /// Objects put that the store has now.
    written,
    /// Objects put that the store did not take.
    unwritten,
    /// Objects whose bytes in shared memory were found to lack their checksum: out of sight since.
    quarantined,
    /// Readers' reports of wrong bytes that were right here.
    false_reports,
    /// Connections ended because they held a pin for too long.
    leases_over,
}

pub fn add(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}
