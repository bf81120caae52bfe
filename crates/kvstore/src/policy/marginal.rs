//! Marginal hit per byte: the entry goes first whose bytes are expected to bring the fewest hits.
//!
//! The expected rate of hits is that of the past, older touches counting less: every touch counts 1, halved each half-life (LRFU: Lee et al.,
//! "LRFU: A Spectrum of Policies that Subsumes the LRU and LFU Policies", IEEE Trans. Computers 50(12), 2001). Divided by size and taken as a
//! logarithm this is, but for a term that is the same for all entries of a class,
//!
//! ```text
//! rank = last touch + half-life · (log2(decayed count) − log2(bytes))        [seconds]
//! ```
//!
//! so it is the order of LRU with a bonus for touches that came before and a malus for size, it changes only when the entry is touched, and
//! it costs one move in the queue. Where entries stay for many half-lives the bonus is small beside their age: a large store is LRU.
//!
//! What is evicted is remembered by its rank, so that an entry that comes back goes on from its count ([`super::ghosts`]).
//! Each class has its own half-life, order and ghosts; between classes the rates themselves are compared.

use super::ghosts::Ghosts;
use super::queue::Queue;
use super::{Entries, Facts, Policy, Scope, Why};
use crate::index::Slot;
use crate::object::Class;

/// Ranks are this much later than the times they stand for, so that size and a clock near 0 leave them above 0.
const OFFSET: f64 = (1 << 20) as f64;

/// Size whose logarithm counts as 0.
const UNIT_BYTES: f64 = 131_072.0;

/// How fast a touch loses weight, by class, seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HalfLives {
    /// [`Class::Chat`].
    pub chat: f64,
    /// [`Class::Agent`].
    pub agent: f64,
    /// [`Class::Other`].
    pub other: f64,
}

impl Default for HalfLives {
    /// 300 s: the best of 75, 150, 300, 600 and 1,200 s on the first half of a trace of conversations; how it does on the second half
    /// is a test (`tests/policy_on_trace.rs`).
    fn default() -> Self {
        Self::all(300.0)
    }
}

impl HalfLives {
    /// The same for every class.
    pub fn all(seconds: f64) -> Self {
        Self { chat: seconds, agent: seconds, other: seconds }
    }

    /// Of a class; at least a second.
    pub fn of(self, class: Class) -> f64 {
        let seconds = match class {
            Class::Chat => self.chat,
            Class::Agent => self.agent,
            Class::Other => self.other,
        };
        seconds.max(1.0)
    }
}

#[derive(Debug, Default)]
struct Partition {
    ghosts: Ghosts,
    live: usize,
}

/// The policy.
#[derive(Debug)]
pub struct MarginalHit {
    half_lives: HalfLives,
    queue: Queue,
    partitions: [Partition; Class::ALL.len()],
}

impl MarginalHit {
    /// An empty one.
    pub fn new(half_lives: HalfLives) -> Self {
        Self { half_lives, queue: Queue::default(), partitions: Default::default() }
    }

    /// Seconds that the size of an entry takes from its rank.
    fn malus(&self, facts: &Facts) -> f64 {
        self.half_lives.of(facts.class) * (f64::from(facts.bytes.max(1)) / UNIT_BYTES).log2()
    }

    /// The rank after a touch now, `before` being the one until now.
    fn rank(&self, facts: &Facts, before: Option<u32>, now: u32) -> u32 {
        let (half_life, malus) = (self.half_lives.of(facts.class), self.malus(facts));
        let count = before.map_or(0.0, |rank| {
            let virtual_touch = f64::from(rank) - OFFSET + malus;
            ((virtual_touch - f64::from(now)) / half_life).exp2()
        });
        let rank = f64::from(now) + half_life * (1.0 + count).log2() - malus + OFFSET;
        // 0 is a ghost's empty place. Beyond u32 only with a half-life of years.
        rank.round().clamp(1.0, f64::from(u32::MAX)) as u32
    }

    fn put(&mut self, slot: Slot, facts: &Facts, before: Option<u32>, now: u32) {
        let rank = self.rank(facts, before, now);
        self.queue.park(slot, facts);
        self.queue.push(slot, facts, rank);
    }

    /// log2 of the hits per second and byte that a rank of a class stands for.
    fn rate(&self, class: Class, rank: u32, now: u32) -> f64 {
        let half_life = self.half_lives.of(class);
        (f64::from(rank) - OFFSET - f64::from(now)) / half_life - half_life.log2()
    }
}

impl Policy for MarginalHit {
    fn inserted(&mut self, slot: Slot, facts: &Facts, now: u32) {
        let partition = &mut self.partitions[facts.class as usize];
        partition.live += 1;
        // A slice has its block's key, and a count of its own.
        let before = partition.ghosts.take(facts.name());
        self.put(slot, facts, before, now);
    }

    fn touched(&mut self, slot: Slot, facts: &Facts, now: u32) {
        self.put(slot, facts, Some(self.queue.rank(slot)), now);
    }

    fn removed(&mut self, slot: Slot, facts: &Facts, why: Why, _now: u32) {
        let partition = &mut self.partitions[facts.class as usize];
        if why == Why::Evicted {
            partition.ghosts.add(facts.name(), self.queue.rank(slot), partition.live);
        }
        partition.live = partition.live.saturating_sub(1);
        self.queue.park(slot, facts);
    }

    fn uncovered(&mut self, slot: Slot, facts: &Facts) {
        self.queue.unpark(slot, facts);
    }

    fn victim(&mut self, scope: Scope, now: u32, entries: &dyn Entries) -> Option<Slot> {
        let mut lowest: Option<(f64, Slot)> = None;
        for class in Class::ALL {
            if let Some((rank, slot)) = self.queue.first_leaf(class, scope, entries) {
                let rate = self.rate(class, rank, now);
                if lowest.is_none_or(|(least, _)| rate < least) {
                    lowest = Some((rate, slot));
                }
            }
        }
        lowest.map(|(_, slot)| slot)
    }

    fn memory(&self) -> usize {
        self.queue.memory() + self.partitions.iter().map(|partition| partition.ghosts.memory()).sum::<usize>()
    }
}
