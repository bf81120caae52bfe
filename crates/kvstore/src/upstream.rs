//! What engines read and write through, whichever way they reach a store.
//!
//! Owns: the calls that an embedded store, entry points and the agent of a host have in common ([`Upstream`]), and the embedded store as one
//! of them. Never touches: sockets, shared memory, how objects are kept.
//!
//! Each [`Upstream`] speaks for one tenant. Whatever fails behind it is a miss, or an outcome of the object concerned: never more.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::checksum::Sum;
use crate::error::Error;
use crate::key::{Key, Kind, ObjectId};
use crate::media::Record;
use crate::object::{Class, Meta, TenantId};
use crate::store::{Got, Put, Rule, Store, Want};
use crate::wire::{Hello, Outcome};

/// What is there of a chain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Blocks from the first on.
    pub blocks: usize,
    /// Positions of blocks among them that have a slice, deepest first.
    pub slices: Vec<usize>,
    /// Blocks from the first on that lie in memory of this host already.
    pub near: usize,
}

/// A whole object to be read.
pub struct Load<'a> {
    /// Which object.
    pub id: ObjectId,
    /// As long as the object: otherwise it is a miss. On a miss it may hold anything.
    pub into: &'a mut [u8],
}

/// An object of a chain to be written.
#[derive(Clone, Copy)]
pub struct Save<'a> {
    /// Block or slice.
    pub kind: Kind,
    /// Where in the chain its key stands.
    pub at: usize,
    /// Its bytes, one piece after the other.
    pub pieces: &'a [&'a [u8]],
    /// XXH3-64 of its bytes, where it was taken when they were made: bytes that lack it are refused. Otherwise it is taken now.
    pub checksum: Option<u64>,
}

impl Save<'_> {
    /// Its name, if it stands in the chain.
    pub fn id(&self, chain: &[Key]) -> Option<ObjectId> {
        chain.get(self.at).map(|&key| ObjectId { kind: self.kind, key })
    }
}

/// A store, as an engine has it: for one tenant, from any thread.
pub trait Upstream: Send + Sync {
    /// Blocks of a chain that are there from its first on, and up to `slices` slices among them, the deepest first.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a chain that is too long, [`Error::Unavailable`] where the one store there is does not answer.
    fn check(&self, chain: &[Key], slices: usize) -> Result<Found, Error>;

    /// Reads whole objects: of each the XXH3-64 that its bytes were held to, or none for a miss.
    fn get(&self, loads: &mut [Load<'_>]) -> Vec<Option<u64>>;

    /// Writes objects of a chain. `chain` begins with the first block, so that whoever cuts it by owner finds the nearest ancestor of each;
    /// for slices alone it may be any list of keys.
    fn put(&self, chain: &[Key], objects: &[Save<'_>], class: Class) -> Vec<Outcome>;

    /// Waits until what was put is in the store; `false` if it is not in time, or some of it never will be.
    fn flush(&self, patience: Duration) -> bool {
        let _ = patience;
        true
    }

    /// The reader of an object found that its bytes are not those of the checksum that came with them.
    fn damaged(&self, id: ObjectId) {
        let _ = id;
    }

    /// Another size of blocks under which engines of this fingerprint write; what they write cannot be found from here. 0: none known.
    fn other_block_tokens(&self) -> u32 {
        0
    }

    /// What the latest read or write that failed failed with, for whoever wonders about misses.
    fn trouble(&self) -> Option<String> {
        None
    }

    /// How often something has failed: whenever it grows, [`Upstream::trouble`] says why.
    fn failures(&self) -> u64 {
        0
    }

    /// Counters and sizes by name.
    fn stats(&self) -> Vec<(String, u64)>;
}

/// Where engines of different tenants get their [`Upstream`].
pub trait Source: Send + Sync {
    /// The store for whoever says this of itself.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::Full`] for one tenant too many, [`Error::Io`].
    fn open(&self, who: &Hello) -> Result<Arc<dyn Upstream>, Error>;
}

/// What reads and writes gave, as every kind of [`Upstream`] counts them.
#[derive(Debug, Default)]
pub struct Tally {
    hits: AtomicU64,
    hit_bytes: AtomicU64,
    misses: AtomicU64,
    stored: AtomicU64,
    stored_bytes: AtomicU64,
    exists: AtomicU64,
    refused: AtomicU64,
    failed: AtomicU64,
}

impl Tally {
    /// Counts what became of `loads`.
    pub fn loads(&self, loads: &[Load<'_>], sums: &[Option<u64>]) {
        let hits = || loads.iter().zip(sums).filter(|(_, sum)| sum.is_some());
        let count = hits().count() as u64;
        self.hits.fetch_add(count, Ordering::Relaxed);
        self.hit_bytes.fetch_add(hits().map(|(load, _)| load.into.len() as u64).sum(), Ordering::Relaxed);
        self.misses.fetch_add(loads.len() as u64 - count, Ordering::Relaxed);
    }

    /// Counts what became of `objects`.
    pub fn saves(&self, objects: &[Save<'_>], outcomes: &[Outcome]) {
        for (object, outcome) in objects.iter().zip(outcomes) {
            let counter = match outcome {
                Outcome::Stored => &self.stored,
                Outcome::Exists => &self.exists,
                Outcome::Conflict | Outcome::NoParent | Outcome::Invalid => &self.refused,
                Outcome::Full | Outcome::Failed => &self.failed,
            };
            counter.fetch_add(1, Ordering::Relaxed);
            if *outcome == Outcome::Stored {
                let bytes: u64 = object.pieces.iter().map(|piece| piece.len() as u64).sum();
                self.stored_bytes.fetch_add(bytes, Ordering::Relaxed);
            }
        }
    }

    /// Names and values.
    pub fn each(&self) -> Vec<(String, u64)> {
        [
            ("hits", &self.hits),
            ("hit_bytes", &self.hit_bytes),
            ("misses", &self.misses),
            ("stored", &self.stored),
            ("stored_bytes", &self.stored_bytes),
            ("exists", &self.exists),
            ("refused", &self.refused),
            ("failed", &self.failed),
        ]
        .into_iter()
        .map(|(name, counter)| (name.to_owned(), counter.load(Ordering::Relaxed)))
        .collect()
    }
}

/// The store of this process, for one tenant.
pub struct Embedded {
    store: Arc<Store>,
    tenant: TenantId,
    rule: Rule,
    tally: Tally,
}

impl Embedded {
    /// For the tenant of this name; empty: the public one.
    ///
    /// # Errors
    /// As [`Store::tenant`].
    pub fn new(store: Arc<Store>, tenant: &str, rule: Rule) -> Result<Self, Error> {
        let tenant = if tenant.is_empty() { TenantId(0) } else { store.tenant(tenant)?.id };
        Ok(Self { store, tenant, rule, tally: Tally::default() })
    }

    /// The store itself.
    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }
}

impl Upstream for Embedded {
    fn check(&self, chain: &[Key], slices: usize) -> Result<Found, Error> {
        let found = self.store.check(self.tenant, chain, slices)?;
        Ok(Found { blocks: found.blocks, slices: found.slices, near: 0 })
    }

    fn get(&self, loads: &mut [Load<'_>]) -> Vec<Option<u64>> {
        let mut wants: Vec<Want<'_>> =
            loads.iter_mut().map(|load| Want { id: load.id, start: 0, into: &mut *load.into }).collect();
        let got = self.store.get(self.tenant, &mut wants);
        let sums: Vec<Option<u64>> = got
            .iter()
            .zip(loads.iter())
            .map(|(got, load)| match *got {
                // A part of a longer object was not held to its checksum.
                Got::Hit { len, checksum } if len as usize == load.into.len() => Some(checksum),
                _ => None,
            })
            .collect();
        self.tally.loads(loads, &sums);
        sums
    }

    fn put(&self, chain: &[Key], objects: &[Save<'_>], class: Class) -> Vec<Outcome> {
        let mut outcomes = vec![Outcome::Invalid; objects.len()];
        let mut records = Vec::with_capacity(objects.len());
        let mut places = Vec::with_capacity(objects.len());
        for (place, object) in objects.iter().enumerate() {
            let len: usize = object.pieces.iter().map(|piece| piece.len()).sum();
            let (Some(id), Ok(len)) = (object.id(chain), u32::try_from(len)) else { continue };
            let parent = match object.kind {
                Kind::Slice => Some(id.key),
                Kind::Block => object.at.checked_sub(1).map(|before| chain[before]),
            };
            let checksum = object.checksum.unwrap_or_else(|| Sum::of(object.pieces));
            let meta = Meta { id, parent, tenant: self.tenant, class, len, checksum, written: self.store.now() };
            records.push(Record { meta, pieces: object.pieces });
            places.push(place);
        }
        let done = self.store.put(&records, self.rule);
        for (place, put) in places.into_iter().zip(&done) {
            outcomes[place] = outcome(put);
        }
        self.tally.saves(objects, &outcomes);
        outcomes
    }

    fn trouble(&self) -> Option<String> {
        self.store.trouble().latest()
    }

    fn failures(&self) -> u64 {
        self.store.trouble().count()
    }

    fn stats(&self) -> Vec<(String, u64)> {
        let stats = self.store.stats();
        let mut all = self.tally.each();
        all.extend(
            [("blocks", stats.blocks), ("slices", stats.slices), ("bytes", stats.bytes)]
                .map(|(name, value)| (format!("store_{name}"), value)),
        );
        all.extend(stats.counts.each().map(|(name, value)| (format!("store_{name}"), value)));
        all
    }
}

impl Source for Arc<Store> {
    fn open(&self, who: &Hello) -> Result<Arc<dyn Upstream>, Error> {
        let rule = if who.first_stays { Rule::FirstStays } else { Rule::Exact };
        Ok(Arc::new(Embedded::new(Self::clone(self), &who.tenant, rule)?))
    }
}

/// What a client is told of a put.
pub(crate) fn outcome(put: &Put) -> Outcome {
    match put {
        Put::Stored => Outcome::Stored,
        Put::Exists => Outcome::Exists,
        Put::Conflict => Outcome::Conflict,
        Put::NoParent => Outcome::NoParent,
        Put::Failed(Error::Full(_)) => Outcome::Full,
        Put::Failed(Error::Invalid(_) | Error::Damaged(..)) => Outcome::Invalid,
        Put::Failed(_) => Outcome::Failed,
    }
}
