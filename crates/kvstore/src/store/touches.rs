//! Chains found by checks, until the policy hears of them: to move a thousand entries in its order costs a hundred times what finding them does.

use std::collections::VecDeque;
use std::sync::{MutexGuard, PoisonError};

use super::{Kept, Store};
use crate::key::Key;

/// Keys of chains that are remembered. Whoever checks beyond that lets the policy hear of one chain: the oldest.
const MOST: usize = 64 << 10;

/// From so many on upkeep is woken to do it instead.
const MANY: usize = MOST / 4;

/// Keys that the policy hears of at once: some tens of microseconds in which nobody else comes to the index.
const PIECE: usize = 128;

/// Chains asked for last: one that is asked for again within the second was noted already.
const RECENT: usize = 8;

#[derive(Clone, Copy, PartialEq, Eq)]
struct Chain {
    last: Key,
    length: usize,
    when: u32,
    /// The policy heard of its end already.
    begun: bool,
}

/// Keys of one chain in a piece.
struct Part {
    count: usize,
    when: u32,
    is_end: bool,
}

/// In the order in which they were found.
#[derive(Default)]
pub(super) struct Touches {
    keys: VecDeque<Key>,
    chains: VecDeque<Chain>,
    recent: VecDeque<Chain>,
}

impl Touches {
    fn add(&mut self, keys: &[Key], when: u32) {
        let Some(&last) = keys.last() else { return };
        let chain = Chain { last, length: keys.len(), when, begun: false };
        if self.recent.contains(&chain) {
            return;
        }
        if self.recent.len() == RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back(chain);
        self.keys.extend(keys);
        self.chains.push_back(chain);
    }

    /// Chains from the oldest on, a piece at most; a long one from its end on, the slice of its last block with the first part of it.
    fn take(&mut self, into: &mut Vec<Key>) -> Vec<Part> {
        let mut taken = Vec::new();
        while into.len() < PIECE
            && let Some(mut chain) = self.chains.pop_front()
        {
            let count = (PIECE - into.len()).min(chain.length);
            let left = chain.length - count;
            into.extend(self.keys.drain(left..chain.length));
            taken.push(Part { count, when: chain.when, is_end: !chain.begun });
            if left > 0 {
                (chain.length, chain.begun) = (left, true);
                self.chains.push_front(chain);
            } else {
                self.recent.retain(|recent| (recent.last, recent.when) != (chain.last, chain.when));
            }
        }
        taken
    }
}

impl Store {
    fn touches(&self) -> MutexGuard<'_, Touches> {
        self.touches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Remembers that a chain was used.
    pub(super) fn note_touch(&self, chain: &[Key], now: u32) {
        let (before, after) = {
            let mut touches = self.touches();
            let before = touches.keys.len();
            touches.add(chain, now);
            (before, touches.keys.len())
        };
        if after > MOST {
            self.apply_piece();
        }
        if after / MANY > before / MANY {
            self.wake_upkeep();
        }
    }

    /// Tells the policy of some of the chains used since. Whether it did of any.
    fn apply_piece(&self) -> bool {
        let mut kept = self.kept_mut();
        // Taken with the index in hand, so that they are told in their order.
        let mut keys = Vec::new();
        let parts = self.touches().take(&mut keys);
        let mut rest = &keys[..];
        let Kept { retention, .. } = &mut *kept;
        for part in &parts {
            let (chain, behind) = rest.split_at(part.count);
            if part.is_end {
                retention.touch_chain(chain, part.when);
            } else {
                retention.touch_blocks(chain, part.when);
            }
            rest = behind;
        }
        !parts.is_empty()
    }

    /// Tells the policy of all of them, a piece at a time: before it is asked for a victim.
    pub(super) fn apply_touches(&self) {
        // Others may go on finding; what they find meanwhile is theirs to tell.
        for _ in 0..=2 * MOST / PIECE {
            if !self.apply_piece() {
                return;
            }
        }
    }
}
