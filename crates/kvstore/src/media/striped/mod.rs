//! Stripes over twelve back ends: any ten of them give everything back.
//!
//! Owns: how a batch becomes one object in each failure domain, how many must hold it before it counts, which are asked on a read, and how
//! what a domain lost is made again. Never touches: what a domain is (see [`crate::backend`]), which objects are kept.
//!
//! A batch is a segment. Each of its objects is cut into ten shards and two of parity ([`crate::erasure`]); domain `(position + rotation)
//! mod 12` has the one of a position, rotated by key so that every domain has its share of parity. Shards of one object are of one length,
//! so an object lies at the same offset in all domains:
//!
//! `<segment>.seg` in each domain = (header of 64 B · shard) for each object · footer (see [`super::footer`]).
//!
//! A stored batch is one that at least `min_domains` hold when [`Media::append`] returns; fewer than ten are what is left of one that did
//! not come to its end, and are removed. What is wrong or absent in a domain counts as lost there and is queued for repair.

mod quiet;
mod read;
mod repair;
mod shard;
#[cfg(test)]
mod tests;
mod write;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub use repair::{Repaired, Scrubbed};

use super::{Media, Place, Read, Record};
use crate::Error;
use crate::backend::Backend;
use crate::erasure::{DATA, SHARDS};
use crate::key::Key;
use crate::media::waiter::Waiter;
use crate::object::Meta;
use quiet::Quiet;

/// The twelve failure domains.
pub type Domains = [Arc<dyn Backend>; SHARDS];

/// How stripes are written and read.
#[derive(Clone, Debug)]
pub struct Config {
    /// Id of the store, in every header: shards of another one are not taken for its own.
    pub media: u64,
    /// Domains that must hold a batch before it counts: 10 to 12. At 10 nothing may be lost until repair, at 11 one may.
    pub min_domains: usize,
    /// After so long a read asks the domains that it had left out.
    pub hedge: Duration,
    /// A domain that has not answered a read after so long is counted as away.
    pub read_timeout: Duration,
    /// The same for a write.
    pub write_timeout: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            media: 0,
            min_domains: 11,
            hedge: Duration::from_millis(100),
            read_timeout: Duration::from_secs(5),
            write_timeout: Duration::from_secs(30),
        }
    }
}

/// Counters since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Objects read.
    pub reads: u64,
    /// Of these, whose data shards had to be computed.
    pub rebuilt: u64,
    /// Of these, for which the domains left out at first were asked too.
    pub hedged: u64,
    /// Shards found wrong or absent.
    pub damaged: u64,
    /// Domains that a stored batch did not reach in time.
    pub short: u64,
    /// Objects of domains that wait for repair or deletion.
    pub backlog: u64,
}

#[derive(Debug, Default)]
struct Counters {
    reads: AtomicU64,
    rebuilt: AtomicU64,
    hedged: AtomicU64,
    damaged: AtomicU64,
    short: AtomicU64,
}

/// A segment that counts.
#[derive(Clone, Copy, Debug, Default)]
struct Segment {
    /// Bytes of its object in one domain.
    size: u64,
    /// Reads that have begun.
    readers: u32,
    /// Being deleted: no more reads begin.
    gone: bool,
    /// Domains, by bit, to which its object is still on its way.
    pending: u16,
}

/// What a domain is behind with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Debt {
    /// Its object of this segment is to be made again.
    Repair(u32),
    /// And this one deleted.
    Delete(u32),
}

#[derive(Debug, Default)]
struct State {
    segments: BTreeMap<u32, Segment>,
    debts: BTreeSet<(Debt, usize)>,
}

/// What the calls and the work behind them share.
#[derive(Debug)]
struct Core {
    domains: Domains,
    config: Config,
    state: Mutex<State>,
    /// Told when the last reader of a segment leaves.
    left: Condvar,
    next: AtomicU32,
    counters: Counters,
    quiet: Quiet,
}

/// [`Media`] over twelve back ends.
#[derive(Debug)]
pub struct Striped {
    core: Arc<Core>,
    waiter: Waiter,
}

impl Striped {
    /// Over these domains, whose order may not change. [`Media::recover`] must be called before anything else. One process at a time may
    /// write to them.
    ///
    /// # Errors
    /// [`Error::Invalid`]: the configuration makes no sense; [`Error::Io`]: no threads.
    pub fn new(domains: Domains, config: Config) -> Result<Self, Error> {
        if !(DATA..=SHARDS).contains(&config.min_domains) {
            return Err(Error::Invalid(format!(
                "min_domains is {}: 10 to 12 of the 12 must hold a batch",
                config.min_domains
            )));
        }
        if let Some(domain) =
            domains.iter().find(|domain| !domain.capabilities().conditional_put || !domain.capabilities().range)
        {
            return Err(Error::Invalid(format!(
                "{} cannot be a failure domain: it lacks conditional writes or reads of ranges",
                domain.place()
            )));
        }
        let (state, left, counters) = Default::default();
        let core = Core { domains, config, state, left, next: AtomicU32::new(1), counters, quiet: Quiet::new() };
        Ok(Self { core: Arc::new(core), waiter: Waiter::new()? })
    }

    /// Counters since the start, and what waits for [`Striped::repair_step`].
    pub fn stats(&self) -> Stats {
        let of = |counter: &AtomicU64| counter.load(Relaxed);
        let counters = &self.core.counters;
        Stats {
            reads: of(&counters.reads),
            rebuilt: of(&counters.rebuilt),
            hedged: of(&counters.hedged),
            damaged: of(&counters.damaged),
            short: of(&counters.short),
            backlog: self.core.state().debts.len() as u64,
        }
    }

    /// Pays up to `limit` debts of domains: makes objects again that one of them lost or never got, deletes those it should not have.
    /// What a domain that is away owes stays.
    ///
    /// # Errors
    /// [`Error::Newer`].
    pub fn repair_step(&self, limit: usize) -> Result<Repaired, Error> {
        self.waiter.wait(repair::step(self.core.clone(), limit))?
    }

    /// Reads a whole segment from all domains and queues what is wrong for repair.
    ///
    /// # Errors
    /// [`Error::Invalid`]: there is no such segment; [`Error::Newer`].
    pub fn scrub(&self, segment: u32) -> Result<Scrubbed, Error> {
        self.waiter.wait(repair::scrub(self.core.clone(), segment))?
    }
}

impl Core {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn owe(&self, debt: Debt, domain: usize) {
        self.state().debts.insert((debt, domain));
    }

    /// One more reader of a segment; `false` if it is no more.
    fn enter(&self, segment: u32) -> bool {
        match self.state().segments.get_mut(&segment) {
            Some(found) if !found.gone => {
                found.readers += 1;
                true
            }
            _ => false,
        }
    }

    /// Whether a domain's object is still on its way.
    fn pending(&self, segment: u32, domain: usize) -> bool {
        self.state().segments.get(&segment).is_some_and(|found| found.pending & (1 << domain) != 0)
    }

    fn leave(&self, segment: u32) {
        if let Some(found) = self.state().segments.get_mut(&segment) {
            found.readers -= 1;
        }
        self.left.notify_all();
    }

    /// Takes a segment out, once nobody reads it.
    fn remove(&self, segment: u32) -> bool {
        let mut state = self.state();
        match state.segments.get_mut(&segment) {
            Some(found) if !found.gone => found.gone = true,
            _ => return false,
        }
        while state.segments.get(&segment).is_some_and(|found| found.readers > 0) {
            state = self.left.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.segments.remove(&segment);
        state.debts.retain(|(debt, _)| *debt != Debt::Repair(segment));
        true
    }
}

/// The domain that has the shard of a position.
fn domain_of(key: Key, position: usize) -> usize {
    (position + (key.0 % SHARDS as u128) as usize) % SHARDS
}

/// The position whose shard a domain has.
fn position_of(key: Key, domain: usize) -> usize {
    (domain + SHARDS - (key.0 % SHARDS as u128) as usize) % SHARDS
}

impl Media for Striped {
    fn append(&self, batch: &[Record<'_>]) -> Result<Vec<Place>, Error> {
        if batch.is_empty() {
            return Ok(Vec::new());
        }
        let segment = self.core.next.fetch_add(1, Relaxed);
        let encoded = write::encode(batch, segment, self.core.config.media)?;
        let places = encoded.places.clone();
        self.waiter.wait(write::store(self.core.clone(), segment, encoded))??;
        Ok(places)
    }

    fn read(&self, reads: &mut [Read<'_>]) -> Vec<Result<(), Error>> {
        let wanted: Vec<read::Wanted> = reads.iter().map(read::Wanted::of).collect();
        let found = match self.waiter.wait(read::gather(self.core.clone(), wanted)) {
            Ok(found) => found,
            Err(error) => {
                let said = error.to_string();
                return reads.iter().map(|_| Err(Error::Unavailable(said.clone()))).collect();
            }
        };
        let counters = &self.core.counters;
        let filled = reads.iter_mut().zip(found).map(|(read, found)| {
            counters.reads.fetch_add(1, Relaxed);
            let computed = found?.fill(read)?;
            counters.rebuilt.fetch_add(computed.into(), Relaxed);
            Ok(())
        });
        filled.collect()
    }

    fn recover(&self, each: &mut dyn FnMut(Place, Meta)) -> Result<(), Error> {
        for (place, meta) in self.waiter.wait(repair::recover(self.core.clone()))?? {
            each(place, meta);
        }
        Ok(())
    }

    fn records(&self, segment: u32, each: &mut dyn FnMut(Place, Meta)) -> Result<(), Error> {
        for (place, meta) in self.waiter.wait(repair::records(self.core.clone(), segment))?? {
            each(place, meta);
        }
        Ok(())
    }

    fn counts(&self) -> Vec<(&'static str, u64)> {
        let Stats { reads, rebuilt, hedged, damaged, short, backlog } = self.stats();
        vec![
            ("reads", reads),
            ("rebuilt", rebuilt),
            ("hedged", hedged),
            ("damaged", damaged),
            ("short", short),
            ("backlog", backlog),
        ]
    }

    fn repair(&self, limit: usize) -> Result<Option<Repaired>, Error> {
        self.repair_step(limit).map(Some)
    }

    fn scrub_segment(&self, segment: u32) -> Result<Option<Scrubbed>, Error> {
        self.scrub(segment).map(Some)
    }

    /// Does nothing: every batch is a segment, sealed when it counts.
    fn seal(&self) -> Result<(), Error> {
        Ok(())
    }

    fn delete(&self, segment: u32) -> Result<(), Error> {
        if !self.core.remove(segment) {
            return Err(Error::Invalid(format!("there is no segment {segment}")));
        }
        self.waiter.wait(repair::delete(self.core.clone(), segment, (0..SHARDS).collect()))
    }

    fn segments(&self) -> Vec<(u32, u64)> {
        self.core
            .state()
            .segments
            .iter()
            .filter(|(_, found)| !found.gone)
            .map(|(segment, found)| (*segment, found.size * SHARDS as u64))
            .collect()
    }
}
