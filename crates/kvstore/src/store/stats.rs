//! What the store counts.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::object::Class;

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Counters while they count.
        #[derive(Debug, Default)]
        pub(super) struct Counters { $(pub(super) $name: AtomicU64),* }

        /// Counters of a store since its open.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Counts { $($(#[$doc])* pub $name: u64),* }

        impl Counters {
            pub(super) fn read(&self) -> Counts {
                Counts { $($name: self.$name.load(Ordering::Relaxed)),* }
            }
        }

        impl Counts {
            /// Names and values, for metrics.
            pub fn each(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name)),*].into_iter()
            }
        }
    };
}

counters! {
    /// Reads that gave bytes.
    hits,
    /// Bytes they gave.
    hit_bytes,
    /// Hits of objects of [`crate::Class::Chat`].
    hits_chat,
    /// Hits of [`crate::Class::Agent`].
    hits_agent,
    /// Hits of [`crate::Class::Other`].
    hits_other,
    /// Bytes of [`crate::Class::Chat`] among them.
    hit_bytes_chat,
    /// Bytes of [`crate::Class::Agent`].
    hit_bytes_agent,
    /// Bytes of [`crate::Class::Other`].
    hit_bytes_other,
    /// Reads that found nothing.
    misses,
    /// Of these, those that another store over the same back end held, of [`crate::Class::Chat`].
    elsewhere_hits_chat,
    /// Of [`crate::Class::Agent`].
    elsewhere_hits_agent,
    /// Of [`crate::Class::Other`].
    elsewhere_hits_other,
    /// Bytes of [`crate::Class::Chat`] that they gave.
    elsewhere_hit_bytes_chat,
    /// Bytes of [`crate::Class::Agent`].
    elsewhere_hit_bytes_agent,
    /// Bytes of [`crate::Class::Other`].
    elsewhere_hit_bytes_other,
    /// What another store was said to hold, and did not.
    elsewhere_stale,
    /// Misses because a disk or a service answered with an error.
    read_errors,
    /// Objects stored.
    stored,
    /// Their bytes.
    stored_bytes,
    /// Writes of what was there already.
    exists,
    /// Writes of other bytes under a name that is there: an alarm.
    conflicts,
    /// The same where bytes may differ between writers: the first stays.
    differs,
    /// Writes refused because their parent is not there.
    no_parent,
    /// Writes refused for want of room: capacity, quota, memory, disk.
    full,
    /// Writes that failed at the media.
    write_errors,
    /// Objects evicted to make room.
    evicted,
    /// Those of them that went because their tenant was over its quota.
    evicted_quota,
    /// Their bytes.
    evicted_bytes,
    /// Objects whose time to live was over.
    expired,
    /// Objects removed on request.
    removed,
    /// Objects whose bytes lacked their checksum, put in quarantine.
    quarantined,
    /// Puts begun and dropped: neither committed nor revoked in time.
    orphans,
    /// Puts revoked.
    revoked,
    /// Segments deleted.
    segments_deleted,
    /// Bytes that collection copied.
    copied_bytes,
    /// Longest time collection kept others from the index, microseconds.
    collect_pause_us,
    /// Longest piece of collection, its disk writes included, microseconds.
    collect_piece_us,
    /// Objects that scrubbing read.
    scrubbed,
    /// Segments the catalogue knows and the media had no more at the open.
    segments_missing,
}

impl Counters {
    /// One read of an object of this class.
    pub(super) fn hit(&self, class: Class, bytes: u64) {
        let (hits, with) = match class {
            Class::Chat => (&self.hits_chat, &self.hit_bytes_chat),
            Class::Agent => (&self.hits_agent, &self.hit_bytes_agent),
            Class::Other => (&self.hits_other, &self.hit_bytes_other),
        };
        add(hits, 1);
        add(with, bytes);
    }

    /// One read of an object of this class that another store holds.
    pub(super) fn hit_elsewhere(&self, class: Class, bytes: u64) {
        let (hits, with) = match class {
            Class::Chat => (&self.elsewhere_hits_chat, &self.elsewhere_hit_bytes_chat),
            Class::Agent => (&self.elsewhere_hits_agent, &self.elsewhere_hit_bytes_agent),
            Class::Other => (&self.elsewhere_hits_other, &self.elsewhere_hit_bytes_other),
        };
        add(hits, 1);
        add(with, bytes);
    }
}

pub(super) fn add(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}

pub(super) fn longest(counter: &AtomicU64, time: Duration) {
    counter.fetch_max(u64::try_from(time.as_micros()).unwrap_or(u64::MAX), Ordering::Relaxed);
}

/// A look at a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Since the open.
    pub counts: Counts,
    /// Blocks present.
    pub blocks: u64,
    /// Slices present.
    pub slices: u64,
    /// Bytes of objects present.
    pub bytes: u64,
    /// Bytes of records present, with their headers: what the capacity bounds.
    pub live: u64,
    /// Bytes of sealed segments on the media.
    pub sealed: u64,
    /// Sealed segments.
    pub segments: u64,
    /// Bytes of puts that are being written.
    pub pending: u64,
    /// Bytes of memory of index and policy.
    pub memory: u64,
}
