//! Twelve servers, a process each, hold a store's stripes and are killed under it: any two are not missed, a third is a miss and loses
//! nothing, and one that comes back is made whole. Skipped, with the reason on stderr, where their program is not installed.
#![cfg(feature = "s3")]
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)]

mod kit;
mod weed;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use deepinfer_kvstore::ObjectId;
use deepinfer_kvstore::backend::{Backend, Name, S3, S3Config};
use deepinfer_kvstore::media::Media;
use deepinfer_kvstore::media::striped::{Config, Striped};
use deepinfer_kvstore::root::Root;
use deepinfer_kvstore::store::{Got, Put, Rule, Store, StoreConfig, Want};
use kit::{TENANT, block, bytes, chain, key, put_with};
use weed::Weed;

const LENGTH: usize = 114_000;

fn started(program: &Path, folder: &Path) -> Vec<Weed> {
    std::thread::scope(|scope| {
        let start = |at: usize| {
            let folder = folder.join(at.to_string());
            std::fs::create_dir(&folder).unwrap();
            scope.spawn(move || Weed::start(program, &folder))
        };
        let starting: Vec<_> = (0..12).map(start).collect();
        starting.into_iter().map(|one| one.join().unwrap()).collect()
    })
}

fn domain(server: &Weed) -> S3 {
    let (access_key, secret_key) = (weed::ACCESS_KEY.into(), weed::SECRET_KEY.into());
    S3::new(&S3Config {
        endpoint: server.endpoint.clone(),
        bucket: "domain".into(),
        access_key,
        secret_key,
        timeout: Duration::from_secs(3),
        ..S3Config::default()
    })
    .unwrap()
}

/// A server that has just begun to listen refuses writes until its volumes are known.
fn until_ready(server: &Weed) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (backend, probe) = (domain(server), "ffffffff".parse::<Name>().unwrap());
    let end = Instant::now() + Duration::from_secs(60);
    while let Err(error) = runtime.block_on(backend.put_segment(&probe, vec![Bytes::from_static(b"x")])) {
        assert!(Instant::now() < end, "{error}");
        std::thread::sleep(Duration::from_millis(200));
    }
    runtime.block_on(backend.delete_many(&[probe])).unwrap();
}

fn read(store: &Store, id: ObjectId) -> (Got, Vec<u8>) {
    let mut into = vec![0; LENGTH];
    let got = store.get(TENANT, &mut [Want { id, start: 0, into: &mut into }]).pop().unwrap();
    (got, into)
}

fn is_right(store: &Store, at: u64) -> bool {
    let id = block(0, at, 0).meta.id;
    let (got, found) = read(store, id);
    matches!(got, Got::Hit { .. }) && found == bytes(id, LENGTH)
}

#[test]
fn twelve_servers_lose_any_two_and_miss_three() {
    let Some(program) = weed::program() else { return };
    let folder = tempfile::tempdir().unwrap();
    let mut servers = started(&program, folder.path());
    servers.iter().for_each(until_ready);
    let config = Config {
        media: 7,
        min_domains: 10,
        read_timeout: Duration::from_secs(3),
        write_timeout: Duration::from_secs(5),
        ..Config::default()
    };
    let striped = Arc::new(
        Striped::new(std::array::from_fn(|at| Arc::new(domain(&servers[at])) as Arc<dyn Backend>), config).unwrap(),
    );
    let root = Root::open(&folder.path().join("root")).unwrap();
    let store = Store::open(root, Arc::clone(&striped) as Arc<dyn Media>, StoreConfig::default()).unwrap();

    // One writes on and reads what is there, while two servers die.
    let (stored, ends, refused) = (AtomicU64::new(0), AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ends.load(Ordering::Relaxed) {
                let next = stored.load(Ordering::Relaxed);
                match put_with(&store, &[block(0, next, LENGTH)], Rule::Exact)[0] {
                    Put::Stored => _ = stored.fetch_add(1, Ordering::Relaxed),
                    _ => _ = refused.fetch_add(1, Ordering::Relaxed),
                }
            }
        });
        let until = |count: u64| {
            let end = Instant::now() + Duration::from_secs(60);
            while stored.load(Ordering::Relaxed) < count {
                assert!(Instant::now() < end, "{} of {count} stored", stored.load(Ordering::Relaxed));
                std::thread::sleep(Duration::from_millis(20));
            }
        };
        until(5);
        for lost in [2, 9] {
            servers[lost].kill();
            let now = stored.load(Ordering::Relaxed);
            assert!((0..now).all(|at| is_right(&store, at)), "without server {lost}");
            until(now + 5);
        }
        ends.store(true, Ordering::Relaxed);
    });
    let stored = stored.into_inner();
    assert!((0..stored).all(|at| is_right(&store, at)));
    assert_eq!(store.check(TENANT, &chain(0, stored), 0).unwrap().blocks, stored as usize);

    // A third: a miss within the time-out, nothing is concluded, nothing can be acknowledged.
    servers[5].kill();
    let start = Instant::now();
    let id = block(0, 0, 0).meta.id;
    assert!(!matches!(read(&store, id).0, Got::Hit { .. }));
    assert!(start.elapsed() < Duration::from_secs(8), "{:?}", start.elapsed());
    let put = &put_with(&store, &[block(0, stored, LENGTH)], Rule::Exact)[0];
    assert!(!matches!(put, Put::Stored), "{put:?}");

    // It comes back with what it had: everything is there.
    servers[5].again(&program, &folder.path().join("5"));
    until_ready(&servers[5]);
    assert!((0..stored).all(|at| is_right(&store, at)));
    assert!(matches!(put_with(&store, &[block(0, stored, LENGTH)], Rule::Exact)[0], Put::Stored));

    // One of the first two comes back, the other begins anew with nothing: both are made whole, so that any other two may go.
    servers[2].again(&program, &folder.path().join("2"));
    std::fs::remove_dir_all(folder.path().join("9/data")).unwrap();
    servers[9].again(&program, &folder.path().join("9"));
    for at in [2, 9] {
        until_ready(&servers[at]);
    }
    let end = Instant::now() + Duration::from_secs(60);
    let whole = || striped.segments().iter().all(|(segment, _)| striped.scrub(*segment).unwrap().sound == 12);
    loop {
        while striped.repair_step(100).unwrap().made > 0 {}
        if whole() {
            break;
        }
        assert!(Instant::now() < end, "{:?}", striped.stats());
    }
    for lost in [0, 11] {
        servers[lost].kill();
    }
    assert!((0..=stored).all(|at| is_right(&store, at)));
    assert_eq!(store.check(TENANT, &[key(0, 0), key(0, 1)], 0).unwrap().blocks, 2);
}
