//! A store on a disk that need not wait and a clock that moves when told, and objects whose bytes follow from their names.
#![allow(dead_code, clippy::unwrap_used)]

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use deepinfer_kvstore::checksum::checksum;
use deepinfer_kvstore::clock::Clock;
use deepinfer_kvstore::index::Slot;
use deepinfer_kvstore::media::Record;
use deepinfer_kvstore::media::local::io::{Io, System};
use deepinfer_kvstore::media::local::{Local, LocalConfig};
use deepinfer_kvstore::policy::{Entries, Facts, Lifetimes, Policy, PolicyKind, SLICE_HANDICAP, Scope, Why};
use deepinfer_kvstore::root::Root;
use deepinfer_kvstore::store::{Got, Put, Rule, Store, StoreConfig, Want};
use deepinfer_kvstore::{Class, Key, Kind, Meta, ObjectId, TenantId};

pub const TENANT: TenantId = TenantId(1);

/// Syncs at once, or in a millisecond; full when told.
#[derive(Default)]
pub struct Disk {
    pub slow: AtomicBool,
    pub full: AtomicBool,
    pub broken: AtomicBool,
}

impl Io for Disk {
    fn write(&self, file: &File, pieces: &[io::IoSlice<'_>], offset: u64) -> io::Result<usize> {
        if self.full.load(Ordering::Relaxed) {
            return Err(io::Error::from_raw_os_error(28));
        }
        System.write(file, pieces, offset)
    }

    fn read(&self, file: &File, into: &mut [u8], offset: u64) -> io::Result<usize> {
        if self.broken.load(Ordering::Relaxed) {
            return Err(io::Error::from_raw_os_error(5));
        }
        System.read(file, into, offset)
    }

    fn sync(&self, _: &File) -> io::Result<()> {
        if self.slow.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }
}

/// Moves when told.
pub struct Hands {
    pub wall: AtomicU32,
    pub seconds: AtomicU64,
}

impl Hands {
    pub fn pass(&self, seconds: u32) {
        self.seconds.fetch_add(seconds.into(), Ordering::Relaxed);
        self.wall.fetch_add(seconds, Ordering::Relaxed);
    }
}

impl Clock for Hands {
    fn wall(&self) -> u32 {
        self.wall.load(Ordering::Relaxed)
    }

    fn monotonic(&self) -> Duration {
        Duration::from_secs(self.seconds.load(Ordering::Relaxed))
    }
}

pub struct Kit {
    pub base: tempfile::TempDir,
    pub disk: Arc<Disk>,
    pub hands: Arc<Hands>,
    pub config: StoreConfig,
}

impl Kit {
    pub fn new() -> Self {
        let hands = Hands { wall: AtomicU32::new(1_800_000_000), seconds: AtomicU64::new(1000) };
        let config = StoreConfig {
            capacity: 64 << 20,
            slack: 1 << 20,
            policy: PolicyKind::Lru,
            max_object: 32 << 10,
            batch_bytes: 48 << 10,
            piece_bytes: 16 << 10,
            pending_bytes: 1 << 20,
            ..StoreConfig::default()
        };
        Self { base: tempfile::tempdir().unwrap(), disk: Arc::default(), hands: Arc::new(hands), config }
    }

    pub fn open(&self) -> Store {
        self.open_with(self.config.policy.build(self.config.lifetimes))
    }

    pub fn open_with(&self, policy: Box<dyn Policy>) -> Store {
        let root = Root::open(self.base.path()).unwrap();
        let segments = LocalConfig { segment_bytes: 64 << 10, ..LocalConfig::default() };
        let media = Local::open_with(&root, segments, Arc::clone(&self.disk) as Arc<dyn Io>).unwrap();
        let clock = Arc::clone(&self.hands) as Arc<dyn Clock>;
        Store::open_with(root, Arc::new(media), self.config.clone(), clock, policy).unwrap()
    }

    pub fn segment(&self, number: u32) -> PathBuf {
        self.base.path().join("segments").join(format!("{number:08x}.seg"))
    }
}

/// What a policy was told of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heard {
    /// With the time of its last use.
    In(u32),
    Used(u32),
    Out(Why),
}

/// When it was used: of slices policies are told an earlier time.
fn used(facts: &Facts, told: u32) -> u32 {
    told + if facts.kind == Kind::Slice { SLICE_HANDICAP } else { 0 }
}

/// A policy that tells what comes and goes. It is asked under the lock of the index, before anybody can know of the change.
pub struct Telling<F>(pub Box<dyn Policy>, pub F);

impl<F: FnMut(ObjectId, Heard) + Send + Sync> Policy for Telling<F> {
    fn inserted(&mut self, slot: Slot, facts: &Facts, now: u32) {
        self.1(ObjectId { kind: facts.kind, key: facts.key }, Heard::In(used(facts, now)));
        self.0.inserted(slot, facts, now);
    }

    fn touched(&mut self, slot: Slot, facts: &Facts, now: u32) {
        self.1(ObjectId { kind: facts.kind, key: facts.key }, Heard::Used(used(facts, now)));
        self.0.touched(slot, facts, now);
    }

    fn removed(&mut self, slot: Slot, facts: &Facts, why: Why, now: u32) {
        self.1(ObjectId { kind: facts.kind, key: facts.key }, Heard::Out(why));
        self.0.removed(slot, facts, why, now);
    }

    fn uncovered(&mut self, slot: Slot, facts: &Facts) {
        self.0.uncovered(slot, facts);
    }

    fn victim(&mut self, scope: Scope, now: u32, entries: &dyn Entries) -> Option<Slot> {
        self.0.victim(scope, now, entries)
    }

    fn expired(&mut self, now: u32, entries: &dyn Entries) -> Option<Slot> {
        self.0.expired(now, entries)
    }

    fn set_lifetimes(&mut self, lifetimes: Lifetimes) {
        self.0.set_lifetimes(lifetimes);
    }

    fn memory(&self) -> usize {
        self.0.memory()
    }
}

/// Spread like a hash.
pub fn key(chain: u64, at: u64) -> Key {
    let mix = |value: u64| value.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (value.wrapping_mul(0xff51_afd7_ed55_8ccd) >> 7);
    Key((u128::from(mix(chain * 1_000_003 + at + 1)) << 64) | u128::from(mix(chain ^ (at << 32) ^ 0x5bd1)))
}

pub fn chain(chain: u64, length: u64) -> Vec<Key> {
    (0..length).map(|at| key(chain, at)).collect()
}

/// The bytes of an object follow from its name.
pub fn bytes(id: ObjectId, length: usize) -> Vec<u8> {
    let mut state = id.key.0 as u64 ^ id.kind as u64;
    let mut out = Vec::with_capacity(length + 8);
    while out.len() < length {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        out.extend_from_slice(&(state ^ (state >> 29)).to_le_bytes());
    }
    out.truncate(length);
    out
}

pub struct Object {
    pub meta: Meta,
    pub bytes: Vec<u8>,
}

pub fn block(chain: u64, at: u64, length: usize) -> Object {
    let id = ObjectId { kind: Kind::Block, key: key(chain, at) };
    let bytes = bytes(id, length);
    let meta = Meta {
        id,
        parent: at.checked_sub(1).map(|before| key(chain, before)),
        tenant: TENANT,
        class: Class::Chat,
        len: length as u32,
        checksum: checksum(&bytes),
        written: 0,
    };
    Object { meta, bytes }
}

pub fn slice(chain: u64, at: u64, length: usize) -> Object {
    let id = ObjectId { kind: Kind::Slice, key: key(chain, at) };
    let bytes = bytes(id, length);
    let parent = Some(id.key);
    let meta = Meta { id, parent, len: length as u32, checksum: checksum(&bytes), ..block(chain, at, 0).meta };
    Object { meta, bytes }
}

pub fn of(mut object: Object, tenant: TenantId) -> Object {
    object.meta.tenant = tenant;
    object
}

pub fn other_bytes(mut object: Object) -> Object {
    object.bytes[0] ^= 1;
    object.meta.checksum = checksum(&object.bytes);
    object
}

pub fn blocks(chain: u64, from: u64, to: u64, length: usize) -> Vec<Object> {
    (from..to).map(|at| block(chain, at, length)).collect()
}

pub fn put_with(store: &Store, objects: &[Object], rule: Rule) -> Vec<Put> {
    let pieces: Vec<[&[u8]; 1]> = objects.iter().map(|object| [&object.bytes[..]]).collect();
    let records: Vec<Record<'_>> =
        objects.iter().zip(&pieces).map(|(object, pieces)| Record { meta: object.meta, pieces }).collect();
    store.put(&records, rule)
}

pub fn put(store: &Store, objects: &[Object]) -> Vec<Put> {
    put_with(store, objects, Rule::Exact)
}

pub fn store_all(store: &Store, objects: &[Object]) {
    for (put, object) in put(store, objects).iter().zip(objects) {
        assert!(matches!(put, Put::Stored), "{}: {put:?}", object.meta.id);
    }
}

/// Whether it is there; if so its bytes are right.
pub fn has(store: &Store, object: &Object) -> bool {
    let mut into = vec![0; object.bytes.len()];
    let mut wants = [Want { id: object.meta.id, start: 0, into: &mut into }];
    let got = store.get(object.meta.tenant, &mut wants).remove(0);
    assert!(!matches!(got, Got::Refused(_)), "{got:?}");
    let hit = got.is_hit();
    assert!(!hit || into == object.bytes, "wrong bytes of {}", object.meta.id);
    hit
}

pub fn found(store: &Store, chain: &[Key]) -> usize {
    store.check(TENANT, chain, 0).unwrap().blocks
}

/// Stops a process as it is; returns when every thread of it has stopped.
pub fn stop(child: &std::process::Child) {
    // SAFETY: a signal to a child that was not waited for yet: its number is nobody else's.
    let sent = unsafe { libc::kill(child.id() as libc::pid_t, libc::SIGSTOP) };
    assert_eq!(sent, 0);
    let tasks = format!("/proc/{}/task", child.id());
    let stopped = |task: io::Result<std::fs::DirEntry>| {
        let stat = std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap_or_default();
        stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('T'))
    };
    let end = std::time::Instant::now() + Duration::from_secs(20);
    while !std::fs::read_dir(&tasks).unwrap().all(stopped) {
        assert!(std::time::Instant::now() < end, "it does not stop");
        std::thread::sleep(Duration::from_millis(1));
    }
}
