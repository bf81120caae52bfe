//! Optional, bounded log of what enters and leaves the prefix index.
//!
//! Replay rule: `Reset` empties the replica, `Stored` inserts, `Removed` deletes. When the log overflows, the next drain
//! starts with `Reset` and is followed by everything that is indexed, parents first, so that a replica is never wrong.

use std::collections::VecDeque;

use crate::ids::BlockHash;

/// A change of the prefix index. Hashes are those the index itself uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A block became matchable.
    Stored {
        /// Its chain hash.
        hash: BlockHash,
        /// Chain hash of the block before it; the namespace for a first block.
        parent: BlockHash,
        /// Salt namespace: root of the chain.
        namespace: BlockHash,
    },
    /// A block is no longer matchable.
    Removed {
        /// Its chain hash.
        hash: BlockHash,
        /// Chain hash of the block before it; the namespace for a first block.
        parent: BlockHash,
        /// Salt namespace: root of the chain.
        namespace: BlockHash,
    },
    /// Events were lost: forget everything; what is indexed follows.
    Reset {
        /// How many were lost since the last drain.
        lost: u64,
    },
}

/// The log. Memory is taken once.
#[derive(Debug)]
pub(crate) struct EventLog {
    queue: VecDeque<Event>,
    capacity: usize,
    lost: u64,
}

impl EventLog {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { queue: VecDeque::with_capacity(capacity), capacity, lost: 0 }
    }

    /// Appends; on overflow drops everything until the next drain. Returns how many events that lost.
    pub(crate) fn push(&mut self, event: Event) -> u64 {
        let lost = if self.lost > 0 {
            1
        } else if self.queue.len() == self.capacity {
            let lost = self.queue.len() as u64 + 1;
            self.queue.clear();
            lost
        } else {
            self.queue.push_back(event);
            0
        };
        self.lost += lost;
        lost
    }

    /// Moves the events out. Returns the number lost; if not zero the caller must append a snapshot.
    pub(crate) fn drain(&mut self, out: &mut Vec<Event>) -> u64 {
        let lost = std::mem::take(&mut self.lost);
        if lost > 0 {
            out.push(Event::Reset { lost });
        }
        out.extend(self.queue.drain(..));
        lost
    }
}
