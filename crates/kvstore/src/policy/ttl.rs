//! Times to live by class.

use super::queue::Queue;
use super::{Entries, Facts, Policy, Scope, Why};
use crate::index::Slot;
use crate::object::Class;

const DAY: u32 = 24 * 3600;

/// How long an object stays after it was last touched, seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lifetimes {
    /// [`Class::Chat`].
    pub chat: u32,
    /// [`Class::Agent`].
    pub agent: u32,
    /// [`Class::Other`].
    pub other: u32,
}

impl Default for Lifetimes {
    fn default() -> Self {
        Self { chat: 7 * DAY, agent: 3 * DAY, other: 3 * DAY }
    }
}

impl Lifetimes {
    /// Of a class.
    pub fn of(self, class: Class) -> u32 {
        match class {
            Class::Chat => self.chat,
            Class::Agent => self.agent,
            Class::Other => self.other,
        }
    }

    /// The same with another one for a class.
    #[must_use]
    pub fn with(mut self, class: Class, seconds: u32) -> Self {
        match class {
            Class::Chat => self.chat = seconds,
            Class::Agent => self.agent = seconds,
            Class::Other => self.other = seconds,
        }
        self
    }

    /// Whether an object last touched at `touched` has no time left.
    pub fn is_over(self, class: Class, touched: u32, now: u32) -> bool {
        now.saturating_sub(touched) > self.of(class)
    }
}

/// The entry with the least time left goes first, and goes by itself when it has none.
#[derive(Debug)]
pub struct Ttl {
    lifetimes: Lifetimes,
    queue: Queue,
}

impl Ttl {
    /// An empty one.
    pub fn new(lifetimes: Lifetimes) -> Self {
        Self { lifetimes, queue: Queue::default() }
    }

    fn put(&mut self, slot: Slot, facts: &Facts, now: u32) {
        self.queue.park(slot, facts);
        self.queue.push(slot, facts, now);
    }

    // The order within a class is that of the last touches, so that other times to live move nothing.
    fn first(&mut self, scope: Scope, entries: &dyn Entries) -> Option<(u64, Slot)> {
        let ends = |class: Class, touched: u32| u64::from(touched) + u64::from(self.lifetimes.of(class));
        let firsts = Class::ALL.into_iter().filter_map(|class| {
            let (touched, slot) = self.queue.first_leaf(class, scope, entries)?;
            Some((ends(class, touched), slot))
        });
        firsts.min_by_key(|&(end, _)| end)
    }
}

impl Policy for Ttl {
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
        self.first(scope, entries).map(|(_, slot)| slot)
    }

    fn expired(&mut self, now: u32, entries: &dyn Entries) -> Option<Slot> {
        self.first(Scope::All, entries).filter(|&(end, _)| end < u64::from(now)).map(|(_, slot)| slot)
    }

    fn set_lifetimes(&mut self, lifetimes: Lifetimes) {
        self.lifetimes = lifetimes;
    }

    fn memory(&self) -> usize {
        self.queue.memory()
    }
}
