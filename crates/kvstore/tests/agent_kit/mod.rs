//! An agent over a store that can be slow, held up or refuse, and what engines ask of it.
#![allow(dead_code, clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use deepinfer_kvstore::agent::{Agent, AgentConfig, Client, ClientConfig};
use deepinfer_kvstore::checksum::checksum;
use deepinfer_kvstore::media::local::{Local, LocalConfig};
use deepinfer_kvstore::root::Root;
use deepinfer_kvstore::store::{Rule, Store, StoreConfig};
use deepinfer_kvstore::upstream::{Embedded, Found, Load, Save, Source, Upstream};
use deepinfer_kvstore::wire::{Hello, Outcome};
use deepinfer_kvstore::{Class, Error, Key, Kind, ObjectId};

use crate::kit::bytes;

pub const LEN: usize = 50_000;
pub const MAX: usize = 1 << 20;
pub const ARENA: u64 = 32 << 20;
pub const WAIT: Duration = Duration::from_secs(20);

/// A store whose temper can be set.
pub struct Over {
    pub store: Arc<Store>,
    pub gets: AtomicU64,
    pub objects: AtomicU64,
    pub damaged: AtomicU64,
    under_way: AtomicU64,
    pub peak: AtomicU64,
    temper: Mutex<Temper>,
    changed: Condvar,
}

#[derive(Clone, Copy, Default)]
struct Temper {
    delay: Duration,
    held: bool,
    refuses: bool,
}

impl Over {
    pub fn new(path: &Path) -> Arc<Self> {
        Arc::new(Self {
            store: open(path),
            gets: AtomicU64::new(0),
            objects: AtomicU64::new(0),
            damaged: AtomicU64::new(0),
            under_way: AtomicU64::new(0),
            peak: AtomicU64::new(0),
            temper: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    fn set(&self, change: impl FnOnce(&mut Temper)) {
        change(&mut self.temper.lock().unwrap());
        self.changed.notify_all();
    }

    /// Every call takes so long; a change of it wakes those that wait.
    pub fn delay(&self, delay: Duration) {
        self.set(|temper| temper.delay = delay);
    }

    /// Puts wait.
    pub fn hold(&self) {
        self.set(|temper| temper.held = true);
    }

    pub fn go_on(&self) {
        self.set(|temper| temper.held = false);
    }

    /// Puts fail.
    pub fn refuse(&self, refuses: bool) {
        self.set(|temper| temper.refuses = refuses);
    }

    fn wait(&self, put: bool) -> bool {
        let begun = Instant::now();
        let mut temper = self.temper.lock().unwrap();
        loop {
            let left = temper.delay.saturating_sub(begun.elapsed());
            if left.is_zero() && !(put && temper.held) {
                return !(put && temper.refuses);
            }
            let left = if left.is_zero() { Duration::from_secs(1) } else { left };
            temper = self.changed.wait_timeout(temper, left).unwrap().0;
        }
    }

    fn public(&self) -> Embedded {
        Embedded::new(Arc::clone(&self.store), "", Rule::Exact).unwrap()
    }

    pub fn found(&self, keys: &[Key]) -> usize {
        self.public().check(keys, 0).unwrap().blocks
    }

    /// Puts blocks where no agent knows of them.
    pub fn fill(&self, keys: &[Key]) {
        assert!(put(&self.public(), keys, Kind::Block, 0..keys.len()).iter().all(|outcome| outcome.is_there()));
    }
}

/// What an agent opens a tenant's store from.
pub struct Handle(pub Arc<Over>);

struct One {
    over: Arc<Over>,
    inner: Embedded,
}

impl Source for Handle {
    fn open(&self, who: &Hello) -> Result<Arc<dyn Upstream>, Error> {
        let rule = if who.first_stays { Rule::FirstStays } else { Rule::Exact };
        let inner = Embedded::new(Arc::clone(&self.0.store), &who.tenant, rule)?;
        Ok(Arc::new(One { over: Arc::clone(&self.0), inner }))
    }
}

impl Upstream for One {
    fn check(&self, chain: &[Key], slices: usize) -> Result<Found, Error> {
        self.inner.check(chain, slices)
    }

    fn get(&self, loads: &mut [Load<'_>]) -> Vec<Option<u64>> {
        self.over.gets.fetch_add(1, Ordering::Relaxed);
        self.over.objects.fetch_add(loads.len() as u64, Ordering::Relaxed);
        let under_way = self.over.under_way.fetch_add(1, Ordering::Relaxed) + 1;
        self.over.peak.fetch_max(under_way, Ordering::Relaxed);
        self.over.wait(false);
        self.over.under_way.fetch_sub(1, Ordering::Relaxed);
        self.inner.get(loads)
    }

    fn put(&self, chain: &[Key], objects: &[Save<'_>], class: Class) -> Vec<Outcome> {
        if self.over.wait(true) { self.inner.put(chain, objects, class) } else { vec![Outcome::Failed; objects.len()] }
    }

    fn damaged(&self, _: ObjectId) {
        self.over.damaged.fetch_add(1, Ordering::Relaxed);
    }

    fn stats(&self) -> Vec<(String, u64)> {
        self.inner.stats()
    }
}

pub fn open(path: &Path) -> Arc<Store> {
    let root = Root::open(path).unwrap();
    let media =
        Arc::new(Local::open(&root, LocalConfig { segment_bytes: 16 << 20, ..LocalConfig::default() }).unwrap());
    let config = StoreConfig { max_object: 2 << 20, batch_bytes: 8 << 20, ..StoreConfig::default() };
    Arc::new(Store::open(root, media, config).unwrap())
}

pub fn small(socket: impl Into<PathBuf>) -> AgentConfig {
    AgentConfig {
        arena_bytes: ARENA,
        max_object: MAX as u32,
        at_once: 4 << 20,
        backlog_bytes: 16 << 20,
        drain: Duration::from_secs(10),
        ..AgentConfig::new(socket)
    }
}

/// A host with its agent, its store and a place for its socket.
pub struct Host {
    pub over: Arc<Over>,
    pub config: AgentConfig,
    agent: Option<Agent>,
    _base: tempfile::TempDir,
}

impl Host {
    pub fn new() -> Self {
        Self::with(|_| {})
    }

    pub fn with(change: impl FnOnce(&mut AgentConfig)) -> Self {
        let base = tempfile::tempdir().unwrap();
        let over = Over::new(&base.path().join("store"));
        let mut config = small(base.path().join("agent/sock"));
        change(&mut config);
        let mut host = Self { over, config, agent: None, _base: base };
        host.start();
        host
    }

    pub fn start(&mut self) {
        self.agent = Some(Agent::start(Arc::new(Handle(Arc::clone(&self.over))), self.config.clone()).unwrap());
    }

    pub fn stop(&mut self) {
        self.agent = None;
    }

    pub fn drain(&mut self) -> Result<(), Error> {
        self.agent.take().unwrap().drain()
    }

    /// Another agent over the same store.
    pub fn again(mut self) -> Self {
        self.stop();
        self.start();
        self
    }

    pub fn agent(&self) -> &Agent {
        self.agent.as_ref().unwrap()
    }

    pub fn socket(&self) -> &Path {
        &self.config.socket
    }

    pub fn engine(&self) -> ClientConfig {
        let patient = Duration::from_secs(10);
        ClientConfig { stage_bytes: 8 << 20, connect: patient, silence: patient, ..ClientConfig::new(self.socket()) }
    }

    pub fn client(&self) -> Client {
        Client::new(self.engine()).unwrap()
    }

    /// Pins are let go of without an answer: a moment later.
    pub fn all_unpinned(&self) {
        until("something stays pinned", || self.agent().sizes().pinned == 0);
    }

    pub fn stat(&self, name: &str) -> u64 {
        self.agent().stats().into_iter().find(|(known, _)| known == name).unwrap().1
    }
}

pub fn put(store: &dyn Upstream, keys: &[Key], kind: Kind, positions: impl Iterator<Item = usize>) -> Vec<Outcome> {
    let positions: Vec<usize> = positions.collect();
    let all: Vec<Vec<u8>> = positions.iter().map(|&at| bytes(ObjectId { kind, key: keys[at] }, LEN)).collect();
    let pieces: Vec<[&[u8]; 2]> = all.iter().map(|bytes| [&bytes[..LEN / 3], &bytes[LEN / 3..]]).collect();
    let objects: Vec<Save<'_>> =
        positions.iter().zip(&pieces).map(|(&at, pieces)| Save { kind, at, pieces, checksum: None }).collect();
    store.put(keys, &objects, Class::Agent)
}

/// Which of the objects are there; those that are have the right bytes.
pub fn get(store: &dyn Upstream, kind: Kind, keys: &[Key]) -> Vec<bool> {
    let ids: Vec<ObjectId> = keys.iter().map(|&key| ObjectId { kind, key }).collect();
    let mut room = vec![vec![0; LEN]; ids.len()];
    let mut loads: Vec<Load<'_>> = ids.iter().zip(&mut room).map(|(&id, into)| Load { id, into }).collect();
    let sums = store.get(&mut loads);
    for ((sum, id), into) in sums.iter().zip(&ids).zip(&room) {
        assert!(sum.is_none() || (*into == bytes(*id, LEN) && *sum == Some(checksum(into))), "wrong bytes of {id}");
    }
    sums.iter().map(Option::is_some).collect()
}

pub fn stat(store: &dyn Upstream, name: &str) -> u64 {
    store.stats().into_iter().find(|(known, _)| known == name).unwrap().1
}

pub fn until(what: &str, mut is: impl FnMut() -> bool) {
    let end = Instant::now() + WAIT;
    while !is() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Changes a bit of these bytes wherever an agent of this process has them in its arena: as a fault of the memory would.
pub fn flip_in_memory(wanted: &[u8]) {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mut flipped = 0;
    for line in maps.lines().filter(|line| line.contains("rw-s") && line.contains("deepinfer-kv-arena")) {
        let (range, _) = line.split_once(' ').unwrap();
        let (start, end) = range.split_once('-').unwrap();
        let (start, end) = (usize::from_str_radix(start, 16).unwrap(), usize::from_str_radix(end, 16).unwrap());
        for place in (start..end - wanted.len()).step_by(4096) {
            // SAFETY: within a writable mapping of this process that stays while its agent lives, which the test holds. Objects begin at pages.
            let found = unsafe { std::slice::from_raw_parts(place as *const u8, wanted.len()) } == wanted;
            if found {
                // SAFETY: as above; nobody reads the object meanwhile.
                unsafe { *((place + wanted.len() / 2) as *mut u8) ^= 4 };
                flipped += 1;
            }
        }
    }
    assert_eq!(flipped, 1, "copies found in memory");
}
