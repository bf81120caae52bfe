//! A policy's hit rate on a trace, counted with the store's own index and policy.
//!
//! The rule: for each request, first what has expired goes; then the blocks present from its first on are counted; then its blocks are
//! touched from the last to the first, those that are missing being inserted; then leaves are evicted while there are more blocks than fit.

use super::{Lifetimes, Policy, Retention, Scope};
use crate::error::Error;
use crate::key::{Key, Kind, ObjectId};
use crate::media::Place;
use crate::object::{Class, Meta, TenantId};

/// A request of a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// When it came, milliseconds since the trace began.
    pub millis: u64,
    /// Its blocks; equal ids mean equal prefixes up to there.
    pub blocks: Vec<u32>,
}

/// Requests in the order they came.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    /// Them.
    pub requests: Vec<Request>,
}

/// What was counted over some requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Blocks found.
    pub hits: u64,
    /// Blocks asked for.
    pub blocks: u64,
}

impl Count {
    /// Share of blocks found.
    pub fn rate(self) -> f64 {
        self.hits as f64 / (self.blocks.max(1)) as f64
    }
}

impl std::ops::Add for Count {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { hits: self.hits + other.hits, blocks: self.blocks + other.blocks }
    }
}

/// Blocks a trace may name: more is a slip of the hand.
const MAX_BLOCKS: u32 = 100_000_000;

impl Trace {
    /// Reads lines of `<milliseconds since the line before> <run>…`, a run being `+n` (the next `n` ids never seen before), `i` or `i*n`
    /// (`n` ids from `i` on). Lines that begin with `#` are remarks.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the number of the line.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let mut trace = Self::default();
        let (mut millis, mut next) = (0_u64, 0_u32);
        for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.starts_with('#')) {
            let request = Self::line(line, &mut millis, &mut next);
            trace.requests.push(
                request.ok_or_else(|| Error::Invalid(format!("line {} of the trace is not understood", number + 1)))?,
            );
        }
        Ok(trace)
    }

    fn line(line: &str, millis: &mut u64, next: &mut u32) -> Option<Request> {
        let mut words = line.split(' ');
        *millis = millis.checked_add(words.next()?.parse().ok()?)?;
        let mut blocks = Vec::new();
        for word in words {
            let (first, count) = if let Some(count) = word.strip_prefix('+') {
                (*next, count.parse().ok()?)
            } else if let Some((first, count)) = word.split_once('*') {
                (first.parse().ok()?, count.parse().ok()?)
            } else {
                (word.parse().ok()?, 1)
            };
            let end = first.checked_add(count).filter(|&end: &u32| end <= MAX_BLOCKS)?;
            blocks.extend(first..end);
            *next = end.max(*next);
        }
        Some(Request { millis: *millis, blocks })
    }

    /// The requests from `start` to `end`, as a trace of their own.
    #[must_use]
    pub fn part(&self, range: std::ops::Range<usize>) -> Self {
        Self { requests: self.requests[range].to_vec() }
    }
}

// Ids as hashes would spread them; no two ids share a key.
fn key(id: u32) -> Key {
    let mut word = u128::from(id) + 1;
    for _ in 0..2 {
        word = word.wrapping_mul(0xda94_2042_e4dd_58b5_9e37_79b9_7f4a_7c15);
        word ^= word >> 64;
    }
    Key(word)
}

/// Replays a trace with room for `capacity` blocks and tells what each request found. A unit of the policy's time is `tick` milliseconds:
/// 1,000 as in a store, or fewer where expiry is to be exact.
pub fn replay(trace: &Trace, policy: Box<dyn Policy>, lifetimes: Lifetimes, capacity: usize, tick: u32) -> Vec<Count> {
    let mut kept = Retention::new(policy, lifetimes);
    let mut counts = Vec::with_capacity(trace.requests.len());
    // Away from 0, so that no rank meets the beginning of time.
    let start = 1 << 24;
    for request in &trace.requests {
        let now = start + ((request.millis + u64::from(tick) / 2) / u64::from(tick)) as u32;
        kept.expire(0, now, &mut |_| {});
        let keys: Vec<Key> = request.blocks.iter().map(|&id| key(id)).collect();
        let found = kept.index().longest(&keys);
        counts.push(Count { hits: found as u64, blocks: keys.len() as u64 });
        let missing: Vec<(Meta, Place)> =
            (found..keys.len()).map(|at| (block(&keys, at), Place { segment: 1, offset: 0 })).collect();
        let done = kept.insert(&missing, now);
        debug_assert!(done.iter().all(Result::is_ok), "a block of the trace has two parents");
        kept.touch_chain(&keys[..found], now);
        let over = kept.index().len().saturating_sub(capacity);
        kept.evict(Scope::All, over as u64 * u64::from(BYTES), now, &mut |_| {});
    }
    counts
}

/// Bytes of a simulated block: those of a real one, so that ranks are what they are in a store.
const BYTES: u32 = 113_920;

fn block(keys: &[Key], at: usize) -> Meta {
    let id = ObjectId { kind: Kind::Block, key: keys[at] };
    let parent = at.checked_sub(1).map(|before| keys[before]);
    Meta { id, parent, tenant: TenantId(0), class: Class::Chat, len: BYTES, checksum: 0, written: 0 }
}
