//! Stores over one mounted directory that find each other's objects through a real Valkey server.

#![cfg(feature = "redis")]
#![allow(clippy::print_stderr, clippy::unwrap_used)]

mod kit;
mod skips;
mod valkey;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use deepinfer_kvstore::backend::MountedDir;
use deepinfer_kvstore::directory::share::Share;
use deepinfer_kvstore::directory::soft::Settings;
use deepinfer_kvstore::media::objects::Objects;
use deepinfer_kvstore::root::Root;
use deepinfer_kvstore::store::{Got, Put, Store, StoreConfig, Want};
use deepinfer_kvstore::{Key, TenantId};
use kit::{blocks, chain, found, has, of, put, slice, store_all};
use valkey::{Server, free_port};

/// One of several stores; what belongs to it ends with it.
struct One {
    share: Share,
    store: Arc<Store>,
}

fn open(folder: &Path, name: &str, url: String) -> One {
    let root = Root::open(&folder.join(name)).unwrap();
    let backend = Arc::new(MountedDir::open(&folder.join("objects")).unwrap());
    let media = Arc::new(Objects::new(backend, root.media()).unwrap());
    let config = StoreConfig { slack: 0, ..StoreConfig::default() };
    let store = Arc::new(Store::open(root, media, config).unwrap());
    // The first tenant of each store that names it so: `kit::TENANT`, wherever a test does not name another one first.
    let settings = Settings { retry: Duration::from_millis(100), ..Settings::new(url) };
    let settings = Settings { timeout: Duration::from_secs(2), ..settings };
    One { share: Share::start(&store, settings).unwrap(), store }
}

fn eventually(what: &str, mut is: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !is() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn count(store: &Store, name: &str) -> u64 {
    store.elsewhere_counts().unwrap().into_iter().find(|(which, _)| *which == name).unwrap().1
}

#[test]
fn what_one_stores_the_other_finds_reads_and_continues() {
    let Some(server) = Server::start(&[]) else { return };
    let folder = tempfile::tempdir().unwrap();
    let (one, two) = (open(folder.path(), "one", server.url()), open(folder.path(), "two", server.url()));
    for each in [&one, &two] {
        each.store.tenant("a").unwrap();
    }
    let first = blocks(1, 0, 100, 3000);
    store_all(&one.store, &first);
    store_all(&one.store, &[slice(1, 79, 5000), slice(1, 99, 5000)]);
    let keys = chain(1, 200);
    eventually("told", || found(&two.store, &keys) == 100);
    assert_eq!(two.store.check(kit::TENANT, &keys, 4).unwrap().slices, [99, 79]);
    assert!(first.iter().chain([&slice(1, 79, 5000)]).all(|object| has(&two.store, object)));
    let mut into = vec![0; 700];
    let mut part = [Want { id: first[5].meta.id, start: 300, into: &mut into }];
    assert!(two.store.get(kit::TENANT, &mut part)[0].is_hit() && into == first[5].bytes[300..1000]);
    let mut beyond = [Want { id: first[5].meta.id, start: 2500, into: &mut into }];
    assert!(matches!(two.store.get(kit::TENANT, &mut beyond)[0], Got::Refused(_)));
    let counts = two.store.stats().counts;
    assert_eq!((counts.elsewhere_hits_chat, counts.hits, counts.elsewhere_stale), (102, 0, 0));
    assert_eq!(counts.elsewhere_hit_bytes_chat, 100 * 3000 + 5000 + 700);
    // The chain goes on in the other store, and the first one finds that; then in the first one again.
    store_all(&two.store, &blocks(1, 100, 110, 3000));
    store_all(&two.store, &[slice(1, 109, 5000)]);
    eventually("the rest", || found(&one.store, &keys) == 110);
    store_all(&one.store, &blocks(1, 110, 120, 3000));
    eventually("the end", || found(&two.store, &keys) == 120);
    assert!(blocks(1, 90, 120, 3000).iter().all(|object| has(&one.store, object) && has(&two.store, object)));
    assert_eq!(one.store.check(kit::TENANT, &keys, 2).unwrap().slices, [109, 99]);
    // Where no store has the parent there is nothing to hang a block on.
    assert!(matches!(put(&two.store, &blocks(1, 150, 151, 3000))[0], Put::NoParent));
    // A restart loses nothing of this: chains of both are found again, from their own records.
    drop(two);
    let two = open(folder.path(), "two", server.url());
    eventually("again", || found(&two.store, &keys) == 120);
    assert_eq!((two.store.stats().blocks, one.store.stats().blocks), (10, 110));
}

#[test]
fn what_is_gone_is_a_miss_and_taken_back() {
    let Some(server) = Server::start(&[]) else { return };
    let folder = tempfile::tempdir().unwrap();
    let (one, two) = (open(folder.path(), "one", server.url()), open(folder.path(), "two", server.url()));
    for each in [&one, &two] {
        each.store.tenant("a").unwrap();
    }
    let (kept, gone) = (blocks(1, 0, 10, 3000), blocks(2, 0, 10, 3000));
    store_all(&one.store, &kept);
    store_all(&one.store, &gone);
    eventually("told", || found(&two.store, &chain(1, 10)) + found(&two.store, &chain(2, 10)) == 20);
    // Removed where it lies, leaves first: the others hear of it.
    for object in gone.iter().rev() {
        assert_eq!(one.store.remove(&[object.meta.id]).unwrap(), 1);
    }
    eventually("taken back", || found(&two.store, &chain(2, 10)) == 0);
    // What was copied by collection is found where it lies now, what is deleted under a hint is a miss.
    while one.store.collect(true).unwrap() {}
    eventually("moved", || kept.iter().all(|object| has(&two.store, object)));
    for file in std::fs::read_dir(folder.path().join("objects")).unwrap() {
        std::fs::remove_file(file.unwrap().path()).unwrap();
    }
    assert!(!kept.iter().any(|object| has(&two.store, object)));
    assert_eq!(two.store.stats().counts.elsewhere_stale % 10, 0);
    eventually("stale hints go", || found(&two.store, &chain(1, 10)) == 0);
}

#[test]
fn tenants_stay_apart_whatever_their_numbers() {
    let Some(server) = Server::start(&[]) else { return };
    let folder = tempfile::tempdir().unwrap();
    let (one, two) = (open(folder.path(), "one", server.url()), open(folder.path(), "two", server.url()));
    let name = |each: &One, name: &str| each.store.tenant(name).unwrap().id;
    // Numbers are each store's own: here they are exchanged.
    let (a_one, b_one) = (name(&one, "a"), name(&one, "b"));
    let (b_two, a_two) = (name(&two, "b"), name(&two, "a"));
    assert_eq!((a_one, b_one), (b_two, a_two));
    let of_a: Vec<_> = blocks(1, 0, 5, 1000).into_iter().map(|object| of(object, a_one)).collect();
    let public: Vec<_> = blocks(2, 0, 5, 1000).into_iter().map(|object| of(object, TenantId(0))).collect();
    store_all(&one.store, &of_a);
    store_all(&one.store, &public);
    let blocks_of = |tenant, keys: &[Key]| two.store.check(tenant, keys, 0).unwrap().blocks;
    eventually("told", || blocks_of(a_two, &chain(1, 5)) == 5 && blocks_of(a_two, &chain(2, 5)) == 5);
    assert_eq!((blocks_of(b_two, &chain(1, 5)), blocks_of(b_two, &chain(2, 5))), (0, 5));
    assert_eq!(blocks_of(TenantId(0), &chain(1, 5)), 0);
    let mut into = vec![0; 1000];
    for (tenant, hit) in [(a_two, true), (b_two, false), (TenantId(0), false)] {
        let mut wants = [Want { id: of_a[0].meta.id, start: 0, into: &mut into }];
        assert_eq!(two.store.get(tenant, &mut wants)[0].is_hit(), hit);
    }
    // Nor may another's chain be continued.
    let next = |tenant| of(kit::block(1, 5, 1000), tenant);
    assert!(matches!(put(&two.store, &[next(b_two)])[0], Put::NoParent));
    assert!(matches!(put(&two.store, &[next(a_two)])[0], Put::Stored));
}

#[test]
fn a_server_that_dies_hangs_or_forgets_costs_nothing_but_hits_elsewhere() {
    let Some(mut server) = Server::start(&[]) else { return };
    let folder = tempfile::tempdir().unwrap();
    let (one, two) = (open(folder.path(), "one", server.url()), open(folder.path(), "two", server.url()));
    for each in [&one, &two] {
        each.store.tenant("a").unwrap();
        assert!(each.share.is_up());
    }
    let (own, others) = (blocks(1, 0, 20, 2000), blocks(2, 0, 20, 2000));
    store_all(&two.store, &own);
    store_all(&one.store, &others);
    let theirs = || found(&two.store, &chain(2, 20));
    eventually("told", || theirs() == 20);
    server.kill();
    let begin = Instant::now();
    // What is its own is there; nobody waits, nothing fails.
    assert!(theirs() == 0 && others.iter().all(|object| !has(&two.store, object)));
    assert!(found(&two.store, &chain(1, 20)) == 20 && own.iter().all(|object| has(&two.store, object)));
    store_all(&one.store, &blocks(2, 20, 30, 2000));
    assert!(begin.elapsed() < Duration::from_secs(1), "{:?}", begin.elapsed());
    eventually("down", || !one.share.is_up() && !two.share.is_up());
    assert!(count(&two.store, "unanswered") > 0);
    // Back, and empty: it is told all again, what was stored meanwhile too.
    server.start_again();
    eventually("back", || found(&two.store, &chain(2, 30)) == 30);
    // A hang costs one question its time-out, the next ones nothing.
    server.signal("-STOP");
    let begin = Instant::now();
    assert_eq!(theirs(), 0);
    let waited = begin.elapsed();
    assert!(waited < Duration::from_millis(2500), "{waited:?}");
    let begin = Instant::now();
    assert!((0..100).all(|_| theirs() == 0) && found(&two.store, &chain(1, 20)) == 20);
    assert!(begin.elapsed() < Duration::from_millis(500), "{:?}", begin.elapsed());
    server.signal("-CONT");
    eventually("on again", || theirs() == 20);
    // Emptied between two looks, without a failed call.
    redis::cmd("FLUSHALL").exec(&mut server.raw().unwrap()).unwrap();
    eventually("told again", || theirs() == 20);
    // What is there is no entry, or another's: a miss each.
    let name = format!("deepinfer:b:{}", others[3].meta.id.key);
    redis::cmd("SET").arg(&name).arg("junk").exec(&mut server.raw().unwrap()).unwrap();
    assert_eq!(theirs(), 3);
    let swapped: Vec<u8> = redis::cmd("GET")
        .arg(format!("deepinfer:b:{}", others[4].meta.id.key))
        .query(&mut server.raw().unwrap())
        .unwrap();
    redis::cmd("SET").arg(&name).arg(swapped).exec(&mut server.raw().unwrap()).unwrap();
    assert!(theirs() == 20 && !has(&two.store, &others[3]) && has(&two.store, &others[4]));
}

#[test]
fn a_server_that_never_was_is_no_error() {
    let folder = tempfile::tempdir().unwrap();
    let one = open(folder.path(), "one", format!("redis://127.0.0.1:{}", free_port()));
    one.store.tenant("a").unwrap();
    assert!(!one.share.is_up());
    let own = blocks(1, 0, 20, 2000);
    store_all(&one.store, &own);
    assert!(found(&one.store, &chain(1, 30)) == 20 && own.iter().all(|object| has(&one.store, object)));
    assert_eq!(count(&one.store, "up"), 0);
}
