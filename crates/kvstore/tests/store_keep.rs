//! What stays: eviction, quotas, times to live, collection, quarantine, scrubbing, jumping clocks.
#![allow(clippy::unwrap_used)]

mod kit;

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use deepinfer_kvstore::media::local::{Local, LocalConfig};
use deepinfer_kvstore::root::Root;
use deepinfer_kvstore::store::{Put, Store, Upkeep};
use deepinfer_kvstore::{Class, Error, Kind, Meta, TenantId};
use kit::*;

/// What is present of a chain is a prefix of it.
fn closed_prefix(store: &Store, chain_number: u64, length: u64, bytes: usize) -> usize {
    let prefix = found(store, &chain(chain_number, length));
    for at in 0..length {
        assert_eq!(has(store, &block(chain_number, at, bytes)), (at as usize) < prefix, "{at} of {prefix}");
    }
    prefix
}

fn flip(kit: &Kit, store: &Store, object: &Object) {
    let place = store.place(object.meta.id.kind, object.meta.id.key).unwrap();
    let file = OpenOptions::new().read(true).write(true).open(kit.segment(place.segment)).unwrap();
    let at = u64::from(place.offset) * 64 + 128 + u64::from(object.meta.len) / 2;
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
}

#[test]
fn above_the_capacity_the_oldest_leaves_go() {
    let mut kit = Kit::new();
    kit.config.capacity = 100 * 1152;
    let store = kit.open();
    for number in 0..10 {
        store_all(&store, &blocks(number, 0, 10, 1024));
        kit.hands.pass(1);
    }
    assert_eq!(store.stats().blocks, 100);
    kit.hands.pass(1000);
    assert_eq!(found(&store, &chain(3, 10)), 10, "a check is a use");
    kit.hands.pass(1);
    store_all(&store, &blocks(20, 0, 35, 1024));
    assert!(store.stats().live <= kit.config.capacity);
    let lengths: Vec<usize> = (0..10).map(|number| closed_prefix(&store, number, 10, 1024)).collect();
    assert_eq!(lengths[3], 10);
    assert_eq!(lengths.iter().sum::<usize>(), 65);
    assert_eq!(lengths[..5], [0, 0, 0, 10, 5], "leaves of the oldest first: {lengths:?}");
    let counts = store.stats().counts;
    assert_eq!((counts.evicted, counts.evicted_bytes), (35, 35 * 1024));
    // A batch that can never fit evicts nothing it need not.
    let refused = put(&store, &blocks(21, 0, 1, 32 << 10));
    assert!(refused[0].is_there());
}

#[test]
fn what_is_larger_than_the_capacity_is_refused() {
    let mut kit = Kit::new();
    kit.config.capacity = 40 << 10;
    let store = kit.open();
    store_all(&store, &blocks(1, 0, 10, 3 << 10));
    let done = put(&store, &blocks(2, 0, 20, 3 << 10));
    assert!(done.iter().any(|put| matches!(put, Put::Failed(Error::Full(_)) | Put::NoParent)), "{done:?}");
    assert!(store.stats().live <= 40 << 10);
    closed_prefix(&store, 2, 20, 3 << 10);
}

#[test]
fn slices_go_before_blocks() {
    let mut kit = Kit::new();
    kit.config.capacity = 64 * 1152;
    let store = kit.open();
    store_all(&store, &blocks(1, 0, 40, 1024));
    let slices: Vec<Object> = (30..40).map(|at| slice(1, at, 1024)).collect();
    store_all(&store, &slices);
    kit.hands.pass(5);
    store_all(&store, &blocks(2, 0, 24, 1024));
    assert_eq!((store.stats().blocks, store.stats().slices), (64, 0));
    assert_eq!(closed_prefix(&store, 1, 40, 1024), 40);
}

#[test]
fn a_tenant_over_its_quota_evicts_its_own() {
    let kit = Kit::new();
    let store = kit.open();
    let small = store.set_quota("small", Some(10 << 10)).unwrap().id;
    let large = store.tenant("large").unwrap().id;
    let mine = |chain, from, to| -> Vec<Object> {
        blocks(chain, from, to, 1024).into_iter().map(|object| of(object, small)).collect()
    };
    let theirs: Vec<Object> = blocks(9, 0, 50, 1024).into_iter().map(|object| of(object, large)).collect();
    store_all(&store, &theirs);
    kit.hands.pass(100);
    store_all(&store, &mine(1, 0, 8));
    kit.hands.pass(1);
    store_all(&store, &mine(2, 0, 6));
    assert_eq!(mine(1, 0, 8).iter().filter(|object| has(&store, object)).count(), 4);
    assert!(mine(2, 0, 6).iter().all(|object| has(&store, object)));
    assert!(theirs.iter().all(|object| has(&store, object)));
    let refused = put(&store, &mine(3, 0, 11));
    assert!(matches!(refused[0], Put::Failed(Error::Full(_))));
    // Kept over a restart, and lowered while open.
    drop(store);
    let store = kit.open();
    assert_eq!(store.tenant("small").unwrap().quota, Some(10 << 10));
    store.set_quota("small", Some(3 << 10)).unwrap();
    let left = (1..3).flat_map(|chain| mine(chain, 0, 8)).filter(|object| has(&store, object)).count();
    assert_eq!(left, 3);
    assert!(theirs.iter().all(|object| has(&store, object)));
    assert_ne!(store.tenant("third").unwrap().id, TenantId(0));
}

#[test]
fn objects_live_as_long_as_their_class_and_no_clock_changes_that() {
    let kit = Kit::new();
    let mut store = kit.open();
    let day = 24 * 3600;
    let agent = |number| {
        let mut object = block(number, 0, 100);
        object.meta.class = Class::Agent;
        object
    };
    store_all(&store, &[block(1, 0, 100), agent(2), agent(3)]);
    kit.hands.pass(2 * day);
    assert!(has(&store, &agent(3)), "a read renews");
    // Jumps while it is open, in both directions.
    for wall in [u32::MAX, 0, 1] {
        kit.hands.wall.store(wall, Ordering::Relaxed);
        assert_eq!(store.tend().expired, 0);
        assert_eq!(found(&store, &chain(1, 1)), 1);
    }
    // And between opens: neither lost nor kept for ever.
    for wall in [u32::MAX, 0] {
        kit.hands.wall.store(wall, Ordering::Relaxed);
        drop(store);
        store = kit.open();
        assert_eq!(store.stats().blocks, 3, "wall clock at {wall}");
    }
    kit.hands.pass(day + 10);
    assert!(!has(&store, &agent(2)), "over, swept or not");
    assert_eq!(found(&store, &chain(2, 1)), 0);
    assert_eq!(store.tend().expired, if has(&store, &agent(3)) { 1 } else { 2 });
    kit.hands.pass(4 * day);
    store.tend();
    assert!(!has(&store, &block(1, 0, 100)));
    // What is over does not come back with an old clock.
    kit.hands.wall.store(1_800_000_000, Ordering::Relaxed);
    drop(store);
    let store = kit.open();
    assert!(!has(&store, &agent(2)));
    assert!(!has(&store, &block(1, 0, 100)));
    // A new write of the same name is new.
    store_all(&store, &[agent(2)]);
    assert!(has(&store, &agent(2)));
}

#[test]
fn damage_is_a_miss_now_and_after_a_restart() {
    let kit = Kit::new();
    let mut store = kit.open();
    let objects = blocks(1, 0, 5, 4000);
    store_all(&store, &objects);
    store_all(&store, &[slice(1, 4, 500)]);
    flip(&kit, &store, &objects[2]);
    flip(&kit, &store, &slice(1, 4, 500));
    for _ in 0..2 {
        assert!(!has(&store, &objects[2]));
        assert!(!has(&store, &slice(1, 4, 500)));
        for at in [0, 1, 3, 4] {
            assert!(has(&store, &objects[at]), "the others of its chain stay: {at}");
        }
        drop(store);
        store = kit.open();
        assert_eq!((store.stats().blocks, store.stats().slices), (4, 0));
    }
    assert_eq!(found(&store, &chain(1, 5)), 5, "a hint");
    // A second write makes it good, for good.
    store_all(&store, &[block(1, 2, 4000), slice(1, 4, 500)]);
    for _ in 0..2 {
        assert_eq!(closed_prefix(&store, 1, 5, 4000), 5);
        assert!(has(&store, &slice(1, 4, 500)));
        drop(store);
        store = kit.open();
    }
}

#[test]
fn damage_is_counted_once_and_never_served() {
    let kit = Kit::new();
    let store = kit.open();
    let objects = blocks(1, 0, 4, 4000);
    store_all(&store, &objects);
    for object in &objects {
        flip(&kit, &store, object);
        assert!(!has(&store, object));
        assert!(!has(&store, object));
    }
    let stats = store.stats();
    assert_eq!((stats.counts.quarantined, stats.counts.misses, stats.blocks, stats.live), (4, 8, 0, 0));
}

#[test]
fn scrubbing_finds_what_nobody_reads() {
    let kit = Kit::new();
    let store = kit.open();
    let objects = blocks(1, 0, 30, 4000);
    store_all(&store, &objects);
    flip(&kit, &store, &objects[29]);
    flip(&kit, &store, &objects[7]);
    let (mut damaged, mut read, mut calls) = (0, 0, 0);
    loop {
        let did = store.scrub(20_000);
        damaged += did.damaged;
        read += did.objects;
        calls += 1;
        if did.done {
            break;
        }
    }
    assert_eq!((damaged, read), (2, 30));
    assert!(calls >= 6);
    assert_eq!(store.stats().blocks, 28);
    assert_eq!(store.scrub(u64::MAX).damaged, 0);
}

#[test]
fn what_somebody_deleted_is_no_longer_there_and_may_be_written_again() {
    let kit = Kit::new();
    let store = kit.open();
    let objects = blocks(1, 0, 6, 1024);
    store_all(&store, &objects);
    for deleted in 1..=2 {
        // Nothing has read it, so that no descriptor keeps the file.
        std::fs::remove_file(kit.segment(deleted)).unwrap();
        if deleted == 1 {
            assert!(!has(&store, &objects[5]));
            assert!(store.trouble().latest().unwrap().contains("gone"));
            assert!(!has(&store, &objects[0]), "a link that others hang off is a miss as well");
        }
        assert!(store.scrub(1 << 30).damaged > 0);
        assert!(!objects.iter().any(|object| has(&store, object)));
        // The first batch finds out that its file is nobody's, the next one has another.
        assert!(put(&store, &objects).iter().all(|put| matches!(put, Put::Failed(_))));
        store_all(&store, &objects);
    }
    assert_eq!(found(&store, &chain(1, 6)), 6);
    assert!(objects.iter().all(|object| has(&store, object)));
    drop(store);
    let store = kit.open();
    assert!(objects.iter().all(|object| has(&store, object)));
}

#[test]
fn what_is_removed_stays_away() {
    let kit = Kit::new();
    let store = kit.open();
    store_all(&store, &blocks(1, 0, 3, 100));
    store_all(&store, &[slice(1, 2, 10)]);
    let id = |at| block(1, at, 0).meta.id;
    assert_eq!(store.remove(&[id(0), id(9)]).unwrap(), 0, "it has children, the other is not there");
    assert_eq!(store.remove(&[id(2), id(1)]).unwrap(), 3);
    drop(store);
    let store = kit.open();
    assert_eq!(closed_prefix(&store, 1, 3, 100), 1);
    assert!(!has(&store, &slice(1, 2, 10)));
    store_all(&store, &blocks(1, 1, 3, 100));
    drop(store);
    assert_eq!(closed_prefix(&kit.open(), 1, 3, 100), 3);
}

#[test]
fn collection_gives_space_back_and_loses_nothing() {
    let mut kit = Kit::new();
    kit.config.capacity = 1 << 20;
    kit.config.slack = 256 << 10;
    let mut store = kit.open();
    let keep: Vec<Object> = blocks(1000, 0, 60, 1000);
    for (at, object) in keep.iter().enumerate() {
        store_all(&store, std::slice::from_ref(object));
        store_all(&store, &blocks(at as u64, 0, 30, 2000));
        kit.hands.pass(1);
        assert!(keep[..=at].iter().all(|object| has(&store, object)));
        while store.collect(false).unwrap() {}
    }
    let stats = store.stats();
    assert!(stats.counts.segments_deleted > 10 && stats.counts.copied_bytes > 0, "{stats:?}");
    assert!(stats.sealed <= kit.config.capacity + kit.config.slack, "{stats:?}");
    assert!(stats.counts.collect_piece_us > 0 && stats.counts.collect_pause_us <= stats.counts.collect_piece_us);
    for _ in 0..2 {
        assert!(keep.iter().all(|object| has(&store, object)));
        assert_eq!(closed_prefix(&store, 1000, 60, 1000), 60);
        drop(store);
        store = kit.open();
        assert_eq!(store.stats().counts.segments_missing, 0);
    }
    while store.collect(true).unwrap() {}
    assert!(keep.iter().all(|object| has(&store, object)));
    store.drain().unwrap();
    std::fs::remove_file(kit.segment(store.place(Kind::Block, key(1000, 0)).unwrap().segment)).unwrap();
    drop(store);
    let store = kit.open();
    assert_eq!(store.stats().counts.segments_missing, 1);
    assert!(!has(&store, &keep[0]));
    closed_prefix(&store, 1000, 60, 1000);
}

#[test]
fn readers_and_writers_cross_collection_and_eviction() {
    let mut kit = Kit::new();
    kit.config.capacity = 1 << 20;
    kit.config.slack = 128 << 10;
    let store = Arc::new(kit.open());
    let keep: Arc<Vec<Object>> = Arc::new(blocks(1000, 0, 100, 1000));
    store_all(&store, &keep);
    let stop = Arc::new(AtomicBool::new(false));
    let upkeep = Upkeep::start(&store, Duration::from_millis(1)).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..2u64 {
            let (store, stop, keep) = (&store, &stop, &keep);
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    for object in keep.iter().skip(thread as usize).step_by(2) {
                        assert!(has(store, object), "lost {}", object.meta.id);
                    }
                }
            });
        }
        let hands = &kit.hands;
        let store = &store;
        let writers: Vec<_> = (0..2u64)
            .map(|thread| {
                scope.spawn(move || {
                    for round in 0..300 {
                        let number = thread * 10_000 + round;
                        // A use of what is kept, however slow the readers are.
                        assert_eq!(found(store, &chain(1000, 100)), 100);
                        store_all(store, &blocks(number, 0, 10, 2000));
                        hands.pass(1);
                    }
                })
            })
            .collect();
        for writer in writers {
            writer.join().unwrap();
        }
        stop.store(true, Ordering::Relaxed);
    });
    drop(upkeep);
    let stats = store.stats();
    assert!(stats.counts.segments_deleted > 50, "{stats:?}");
    assert_eq!(stats.counts.quarantined, 0);
    assert!(stats.live <= kit.config.capacity);
    assert!(keep.iter().all(|object| has(&store, object)));
}

#[test]
fn the_media_bound_holds_without_a_thread() {
    let mut kit = Kit::new();
    kit.config.capacity = 512 << 10;
    kit.config.slack = 128 << 10;
    let store = kit.open();
    for number in 0..200 {
        store_all(&store, &blocks(number, 0, 10, 2000));
        assert!(store.stats().sealed <= kit.config.capacity + 3 * kit.config.slack, "{:?}", store.stats());
    }
}

#[test]
fn a_smaller_capacity_holds_from_the_next_open_on() {
    let mut kit = Kit::new();
    let store = kit.open();
    store_all(&store, &blocks(1, 0, 100, 1024));
    drop(store);
    kit.config.capacity = 50 * 1152;
    let store = kit.open();
    assert!(store.stats().live <= kit.config.capacity);
    let left = closed_prefix(&store, 1, 100, 1024);
    assert!((45..=50).contains(&left), "{left}");
    drop(store);
    kit.config.capacity = 100;
    let root = Root::open(kit.base.path()).unwrap();
    let media = Arc::new(Local::open(&root, LocalConfig::default()).unwrap());
    assert!(matches!(Store::open(root, media, kit.config.clone()), Err(Error::Invalid(_))));
}

#[test]
fn what_is_written_has_the_time_of_the_store() {
    let kit = Kit::new();
    let store = kit.open();
    let mut object = block(1, 0, 10);
    object.meta = Meta { written: u32::MAX, ..object.meta };
    store_all(&store, &[object]);
    drop(store);
    let store = kit.open();
    assert_eq!(store.now(), 1_800_000_000);
    assert_eq!(found(&store, &chain(1, 1)), 1);
}
