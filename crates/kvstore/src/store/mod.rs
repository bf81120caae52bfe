//! The store of one machine: puts, reads, eviction and collection over one media.
//!
//! Owns: the three phases of a put, what is visible and when, room and quotas, quarantine, collection of segments, the store's time.
//! Never touches: sockets, what bytes mean. Joins [`Retention`] (index, policy), [`Catalogue`] and a [`Media`].
//!
//! Locks, in this order, each held briefly and none over a disk: collection's own · tickets · `kept` (index, policy, live bytes) · chains
//! found, pending puts.

mod collect;
mod elsewhere;
mod get;
mod live;
mod pending;
mod put;
mod rebuild;
mod scrub;
mod stats;
mod touches;
mod upkeep;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

pub use elsewhere::{Elsewhere, Told};
pub use get::{Found, Got, Want};
pub use pending::{PutId, Started};
pub use put::{Put, Rule};
pub use scrub::Scrubbed;
pub use stats::{Counts, Stats};
pub use upkeep::{Tended, Upkeep};

use crate::catalogue::{Bad, Catalogue, Tenant};
use crate::clock::{Clock, StoreTime, SystemClock};
use crate::directory::Owner;
use crate::error::Error;
use crate::index::Removed;
use crate::key::ObjectId;
use crate::media::{Media, Place, Repaired, Shards};
use crate::object::{Class, Meta, TenantId};
use crate::policy::{Lifetimes, Policy, PolicyKind, Retention};
use crate::record::span;
use crate::root::Root;
use crate::trouble::Trouble;
use collect::Collection;
use live::{Live, Tickets};
use pending::Pending;
use put::same;
use stats::{Counters, add};
use touches::Touches;

/// Sizes and bounds of a store.
#[derive(Clone, Debug)]
pub struct StoreConfig {
    /// Bytes of records that are kept; the policy evicts above it.
    pub capacity: u64,
    /// Bytes of records no longer needed that may stay in sealed segments before these are collected. The media holds at most about
    /// `capacity + slack` and the open segment.
    pub slack: u64,
    /// Order of eviction.
    pub policy: PolicyKind,
    /// Times to live where the catalogue has none.
    pub lifetimes: Lifetimes,
    /// After this time a put that was neither committed nor revoked is dropped.
    pub orphan_after: Duration,
    /// Bytes of memory for puts that are being written.
    pub pending_bytes: u64,
    /// Longest object.
    pub max_object: u32,
    /// Bytes that are appended at once: batches above are cut. No more than what a segment of the media takes.
    pub batch_bytes: u64,
    /// Bytes that collection copies at once: what bounds its pauses.
    pub piece_bytes: u64,
}

impl Default for StoreConfig {
    fn default() -> Self {
        Self {
            capacity: 64 << 30,
            slack: 8 << 30,
            policy: PolicyKind::default(),
            lifetimes: Lifetimes::default(),
            orphan_after: Duration::from_secs(600),
            pending_bytes: 1 << 30,
            max_object: 16 << 20,
            batch_bytes: 32 << 20,
            piece_bytes: 4 << 20,
        }
    }
}

impl StoreConfig {
    fn check(&self) -> Result<(), Error> {
        let most = span(self.max_object);
        for (name, value) in [("capacity", self.capacity), ("batch_bytes", self.batch_bytes)] {
            if value < most {
                return Err(Error::Invalid(format!(
                    "{name} is {value}: give {most} at least, one object of max_object"
                )));
            }
        }
        if self.piece_bytes == 0 {
            return Err(Error::Invalid("piece_bytes is 0: give the bytes to copy at once".to_owned()));
        }
        Ok(())
    }
}

/// What one lock guards.
struct Kept {
    retention: Retention,
    live: Live,
}

impl Kept {
    /// A record of an object that is present was appended behind the one that counts, and would count after a restart: with the same bytes it does
    /// from now on. With others it is a stray to be noted.
    fn is_stray(&mut self, meta: &Meta, place: Place) -> bool {
        let Some((_, entry)) = self.retention.get(meta.id).filter(|(_, entry)| entry.place < place) else {
            return false;
        };
        if !same(&entry, meta) {
            return true;
        }
        if self.retention.relocate(meta.id, entry.place, place) {
            self.live.sub(entry.place, entry.len);
            self.live.add(entry.id, place, entry.len);
        }
        false
    }
}

/// A store. All calls are safe from any thread.
pub struct Store {
    media: Arc<dyn Media>,
    catalogue: Catalogue,
    config: StoreConfig,
    clock: Arc<dyn Clock>,
    time: StoreTime,
    kept: RwLock<Kept>,
    tickets: Mutex<Tickets>,
    pending: Mutex<Pending>,
    collection: Mutex<Collection>,
    touches: Mutex<Touches>,
    upkeep: Mutex<Option<std::thread::Thread>>,
    counters: Counters,
    trouble: Trouble,
    draining: AtomicBool,
    /// Bytes appended since collection last looked.
    appended: AtomicU64,
    scrubbed: Mutex<usize>,
    /// What other stores over the same back end hold, if they tell.
    elsewhere: OnceLock<Arc<dyn Elsewhere>>,
    /// Tenants by number, in the form that other stores know.
    owners: RwLock<HashMap<TenantId, Owner>>,
    root: Root,
}

impl Store {
    /// Opens a store over a media of this root: reads what survived and evicts what is too much or too old.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a configuration out of bounds, [`Error::Newer`], [`Error::Io`], [`Error::Unavailable`].
    pub fn open(root: Root, media: Arc<dyn Media>, config: StoreConfig) -> Result<Self, Error> {
        Self::open_at(root, media, config, Arc::new(SystemClock))
    }

    /// The same with another clock.
    ///
    /// # Errors
    /// As [`Store::open`].
    pub fn open_at(
        root: Root,
        media: Arc<dyn Media>,
        config: StoreConfig,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, Error> {
        let policy = config.policy.build(config.lifetimes);
        Self::open_with(root, media, config, clock, policy)
    }

    /// The same with an order of eviction of the caller's own, which thereby hears of every entry that comes and goes, before anybody can tell.
    ///
    /// # Errors
    /// As [`Store::open`].
    pub fn open_with(
        root: Root,
        media: Arc<dyn Media>,
        config: StoreConfig,
        clock: Arc<dyn Clock>,
        policy: Box<dyn Policy>,
    ) -> Result<Self, Error> {
        config.check()?;
        let catalogue = Catalogue::open(&root)?;
        let lifetimes = lifetimes(&catalogue, config.lifetimes)?;
        let mut retention = Retention::new(policy, lifetimes);
        retention.set_lifetimes(lifetimes);
        for tenant in catalogue.tenants()?.into_values() {
            retention.set_quota(tenant.id, tenant.quota);
        }
        let mut kept = Kept { retention, live: Live::default() };
        let rebuilt = rebuild::rebuild(&*media, &catalogue, &mut kept)?;
        let time = StoreTime::begin(&*clock, rebuilt.newest.max(catalogue.time()?.unwrap_or(0)));
        let pending = Pending::new(config.pending_bytes);
        let store = Self {
            media,
            catalogue,
            clock,
            time,
            kept: RwLock::new(kept),
            tickets: Mutex::default(),
            pending: Mutex::new(pending),
            collection: Mutex::default(),
            touches: Mutex::default(),
            upkeep: Mutex::default(),
            counters: Counters::default(),
            trouble: Trouble::default(),
            draining: AtomicBool::new(false),
            appended: AtomicU64::new(0),
            scrubbed: Mutex::new(0),
            elsewhere: OnceLock::new(),
            owners: RwLock::default(),
            config,
            root,
        };
        add(&store.counters.segments_missing, rebuilt.missing);
        store.settle();
        match store.keep_time() {
            // Reading needs no room; upkeep notes the time when there is some.
            Ok(()) | Err(Error::Full(_)) => Ok(store),
            Err(error) => Err(error),
        }
    }

    /// Evicts what a smaller capacity, a smaller quota or time since the last open leave too much.
    fn settle(&self) {
        let now = self.now();
        let mut kept = self.kept_mut();
        let Kept { retention, live } = &mut *kept;
        let rows = retention.index().slots();
        let gone = retention.expire(rows, now, &mut |removed| live.drop_removed(removed));
        add(&self.counters.expired, gone as u64);
        let tenants: Vec<TenantId> = retention.index().tenants().map(|(tenant, _)| tenant).collect();
        for tenant in tenants {
            retention.make_room(tenant, 0, now, &mut |removed| self.evicted_quota(live, removed));
        }
        // Nothing more to evict is as good as room.
        let _ = self.evict_for(retention, live, 0, now);
    }

    fn evicted(&self, live: &mut Live, removed: &Removed) {
        live.drop_removed(removed);
        add(&self.counters.evicted, 1 + u64::from(removed.slice.is_some()));
        add(&self.counters.evicted_bytes, removed.bytes());
    }

    fn evicted_quota(&self, live: &mut Live, removed: &Removed) {
        self.evicted(live, removed);
        add(&self.counters.evicted_quota, 1 + u64::from(removed.slice.is_some()));
    }

    fn kept(&self) -> RwLockReadGuard<'_, Kept> {
        self.kept.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn kept_mut(&self) -> RwLockWriteGuard<'_, Kept> {
        self.kept.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn tickets(&self) -> MutexGuard<'_, Tickets> {
        self.tickets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The store's time, Unix seconds.
    pub fn now(&self) -> u32 {
        self.time.now(&*self.clock)
    }

    fn keep_time(&self) -> Result<(), Error> {
        self.catalogue.set_time(self.now())
    }

    /// The tenant of a name, new if there was none.
    ///
    /// # Errors
    /// As [`Catalogue::tenant`].
    pub fn tenant(&self, name: &str) -> Result<Tenant, Error> {
        self.catalogue.tenant(name)
    }

    /// Whose objects somebody may see who only reads under this name, empty for everybody's: a reader gives no name a number, and under
    /// one that has none there is only what is everybody's.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a name that is none, [`Error::Io`].
    pub fn reader(&self, name: &str) -> Result<TenantId, Error> {
        let known = if name.is_empty() { None } else { self.catalogue.known_tenant(name)? };
        Ok(known.map_or(TenantId(0), |tenant| tenant.id))
    }

    /// Its sizes and bounds.
    pub fn config(&self) -> &StoreConfig {
        &self.config
    }

    /// All tenants by name, with the bytes of their objects.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn tenants(&self) -> Result<Vec<(String, Tenant, u64)>, Error> {
        let named = self.catalogue.tenants()?;
        let kept = self.kept();
        let bytes = |tenant: &Tenant| kept.retention.index().usage(tenant.id).bytes;
        let with_bytes = |(name, tenant): (String, Tenant)| {
            let bytes = bytes(&tenant);
            (name, tenant, bytes)
        };
        Ok(named.into_iter().map(with_bytes).collect())
    }

    /// Sets or lifts the bound of bytes of a tenant. What it has above the bound is evicted at once, its own only.
    ///
    /// # Errors
    /// As [`Catalogue::tenant`].
    pub fn set_quota(&self, name: &str, quota: Option<u64>) -> Result<Tenant, Error> {
        let tenant = self.catalogue.set_quota(name, quota)?;
        let now = self.now();
        let mut kept = self.kept_mut();
        let Kept { retention, live } = &mut *kept;
        retention.set_quota(tenant.id, tenant.quota);
        retention.make_room(tenant.id, 0, now, &mut |removed| self.evicted_quota(live, removed));
        Ok(tenant)
    }

    /// Sets the time to live of a class. It holds at once, for what is there too: what is older is a miss from now on.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn set_lifetime(&self, class: Class, seconds: u32) -> Result<(), Error> {
        self.catalogue.set_lifetime(class, seconds)?;
        let mut kept = self.kept_mut();
        let lifetimes = kept.retention.lifetimes().with(class, seconds);
        kept.retention.set_lifetimes(lifetimes);
        Ok(())
    }

    /// What went wrong at the media or the catalogue, and writes of other bytes under a name that is there.
    pub fn trouble(&self) -> &Trouble {
        &self.trouble
    }

    /// Counters and sizes.
    pub fn stats(&self) -> Stats {
        let segments = self.media.segments();
        let pending = self.pending().bytes();
        let kept = self.kept();
        let total = kept.retention.index().total();
        let (index, policy) = kept.retention.memory();
        Stats {
            counts: self.counters.read(),
            blocks: total.blocks,
            slices: total.slices,
            bytes: total.bytes,
            live: kept.live.total(),
            sealed: segments.iter().map(|&(_, bytes)| bytes).sum(),
            segments: segments.len() as u64,
            pending,
            memory: (index + policy) as u64,
        }
    }

    /// What the media counts: see [`Media::counts`].
    pub fn media_counts(&self) -> Vec<(&'static str, u64)> {
        self.media.counts()
    }

    /// Makes up to `limit` parts again that the media has lost: see [`Media::repair`].
    ///
    /// # Errors
    /// Of the media.
    pub fn repair(&self, limit: usize) -> Result<Option<Repaired>, Error> {
        self.media.repair(limit)
    }

    /// Compares all copies and parts of the segment after `after` with their checksums: see [`Media::scrub_segment`]. None: there is no further
    /// one, or nothing to compare.
    ///
    /// # Errors
    /// Of the media.
    pub fn scrub_shards(&self, after: u32) -> Result<Option<(u32, Shards)>, Error> {
        let segment =
            self.media.segments().into_iter().map(|(number, _)| number).filter(|&number| number > after).min();
        let Some(segment) = segment else { return Ok(None) };
        Ok(self.media.scrub_segment(segment)?.map(|shards| (segment, shards)))
    }

    /// Takes no more writes, waits for those on their way, drops what was not committed and seals the open segment. Reads go on.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Unavailable`]: what was acknowledged is safe all the same.
    pub fn drain(&self) -> Result<(), Error> {
        self.draining.store(true, Ordering::SeqCst);
        while !self.tickets().is_idle() {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.pending().clear();
        self.media.seal()?;
        self.note_segments()?;
        self.keep_time()
    }

    fn refuse_when_draining(&self) -> Result<(), Error> {
        if self.draining.load(Ordering::SeqCst) {
            return Err(Error::Unavailable("the store is closing".to_owned()));
        }
        Ok(())
    }
}

impl Store {
    /// Notes later records of names that another writer was faster with, so that none of them counts after a restart.
    fn note_strays(&self, strays: &[(Place, ObjectId)]) {
        if !strays.is_empty() && self.catalogue.add_bad(strays, Bad::Stray, self.now()).is_err() {
            add(&self.counters.write_errors, 1);
        }
    }
}

fn lifetimes(catalogue: &Catalogue, defaults: Lifetimes) -> Result<Lifetimes, Error> {
    let set = catalogue.lifetimes()?;
    let of = |class: Class| set.get(&(class as u8)).copied().unwrap_or(defaults.of(class));
    Ok(Lifetimes { chat: of(Class::Chat), agent: of(Class::Agent), other: of(Class::Other) })
}
