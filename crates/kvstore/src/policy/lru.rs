//! Least recently used.

use super::queue::Queue;
use super::{Entries, Facts, Policy, Scope, Why};
use crate::index::Slot;
use crate::key::Kind;
use crate::object::Class;

/// A slice goes as if it had last been used this much earlier, seconds: it is many times a block's size and is made again in a second.
pub const SLICE_HANDICAP: u32 = 600;

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
        let handicap = if facts.kind == Kind::Slice { SLICE_HANDICAP } else { 0 };
        self.queue.park(slot, facts);
        self.queue.push(slot, facts, now.saturating_sub(handicap));
    }
}

/// First leaf of a class; what is met before it and has children is set aside.
pub(super) fn first_leaf(queue: &mut Queue, class: Class, scope: Scope, entries: &dyn Entries) -> Option<(u32, Slot)> {
    loop {
        let (rank, slot) = queue.first(class, scope)?;
        if entries.is_leaf(slot) {
            return Some((rank, slot));
        }
        queue.park(slot, &entries.facts(slot)?);
    }
}

/// The leaf of the lowest rank of all classes.
pub(super) fn lowest_leaf(queue: &mut Queue, scope: Scope, entries: &dyn Entries) -> Option<(u32, Slot)> {
    Class::ALL.iter().filter_map(|&class| first_leaf(queue, class, scope, entries)).min_by_key(|&(rank, _)| rank)
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
        lowest_leaf(&mut self.queue, scope, entries).map(|(_, slot)| slot)
    }

    fn memory(&self) -> usize {
        self.queue.memory()
    }
}
