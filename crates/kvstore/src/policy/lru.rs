//! Least recently used.

use super::queue::Queue;
use super::{Entries, Facts, Policy, Scope, Why};
use crate::index::Slot;

/// The entry whose last touch lies furthest back goes first.
#[derive(Debug, Default)]
pub struct Lru {
    queue: Queue,
}

impl Lru {
    /// An empty one.
    pub fn new() -> Self {
        Self::default()
    }

    fn put(&mut self, slot: Slot, facts: &Facts, now: u32) {
        self.queue.park(slot, facts);
        self.queue.push(slot, facts, now);
    }
}

impl Policy for Lru {
    fn inserted(&mut self, slot: Slot, facts: &Facts, now: u32) {
        self.put(slot, facts, now);
    }

    fn touched(&mut self, slot: Slot, facts: &Facts, now: u32) {
        self.put(slot, facts, now);
    }

    fn removed(&mut self, slot: Slot, facts: &Facts, _why: Why, _now: u32) {
        self.queue.park(slot, facts);
    }

    fn uncovered(&mut self, slot: Slot, facts: &Facts) {
        self.queue.unpark(slot, facts);
    }

    fn victim(&mut self, scope: Scope, _now: u32, entries: &dyn Entries) -> Option<Slot> {
        self.queue.lowest_leaf(scope, entries).map(|(_, slot)| slot)
    }

    fn memory(&self) -> usize {
        self.queue.memory()
    }
}
