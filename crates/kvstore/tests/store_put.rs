//! Puts: what is visible when, what is refused, what comes back after a restart.
#![allow(clippy::unwrap_used)]

mod kit;

use std::sync::atomic::Ordering;

use deepinfer_kvstore::store::{Found, Got, Put, Rule, Started, Want};
use deepinfer_kvstore::{Error, Kind, ObjectId, TenantId};
use kit::*;

#[test]
fn chains_with_slices_are_found_and_read_now_and_after_a_restart() {
    let kit = Kit::new();
    let mut objects = blocks(1, 0, 40, 3000);
    objects.extend([slice(1, 9, 9000), slice(1, 30, 100)]);
    objects.push(block(2, 0, 0));
    let mut store = kit.open();
    store_all(&store, &objects);
    for _ in 0..2 {
        let mut asked = chain(1, 50);
        assert_eq!(store.check(TENANT, &asked, 9).unwrap(), Found { blocks: 40, slices: vec![30, 9] });
        assert_eq!(store.check(TENANT, &asked, 1).unwrap(), Found { blocks: 40, slices: vec![30] });
        asked.truncate(20);
        assert_eq!(store.check(TENANT, &asked, 9).unwrap(), Found { blocks: 20, slices: vec![9] });
        assert_eq!(found(&store, &chain(3, 4)), 0);
        assert!(objects.iter().all(|object| has(&store, object)));
        assert_eq!(store.length(TENANT, objects[40].meta.id), Some(9000));
        assert!(!has(&store, &block(1, 40, 10)));
        let stats = store.stats();
        assert_eq!((stats.blocks, stats.slices, stats.bytes), (41, 2, 40 * 3000 + 9100));
        drop(store);
        store = kit.open();
    }
}

#[test]
fn ranges_and_whole_objects_in_one_call() {
    let kit = Kit::new();
    let store = kit.open();
    let objects = blocks(1, 0, 3, 5000);
    store_all(&store, &objects);
    let (mut whole, mut part, mut absent, mut beyond) = (vec![0; 5000], vec![0; 70], vec![0; 10], vec![0; 10]);
    let mut wants = [
        Want { id: objects[0].meta.id, start: 0, into: &mut whole },
        Want { id: block(1, 7, 1).meta.id, start: 0, into: &mut absent },
        Want { id: objects[1].meta.id, start: 4995, into: &mut beyond },
        Want { id: objects[2].meta.id, start: 100, into: &mut part },
    ];
    let got = store.get(TENANT, &mut wants);
    assert!(
        matches!(got[..], [Got::Hit { .. }, Got::Miss, Got::Refused(Error::Invalid(_)), Got::Hit { .. }]),
        "{got:?}"
    );
    assert_eq!(whole, objects[0].bytes);
    assert_eq!(part, objects[2].bytes[100..170]);
    let counts = store.stats().counts;
    assert_eq!((counts.hits, counts.hit_bytes, counts.misses), (2, 5070, 2));
}

#[test]
fn nothing_is_visible_before_its_commit() {
    let kit = Kit::new();
    let store = kit.open();
    let objects = blocks(1, 0, 2, 5000);
    let metas: Vec<_> = objects.iter().map(|object| object.meta).collect();
    let started = store.start(&metas, Rule::Exact);
    let ids: Vec<_> =
        started.iter().map(|started| if let Started::Write(id) = started { *id } else { unreachable!() }).collect();
    for (id, object) in ids.iter().zip(&objects) {
        store.write(*id, 0, &object.bytes[..2000]).unwrap();
        assert!(matches!(store.write(*id, 1000, &object.bytes[1000..]), Err(Error::Invalid(_))));
        assert!(matches!(store.write(*id, 2000, &vec![0; 3001]), Err(Error::Invalid(_))));
        store.write(*id, 2000, &object.bytes[2000..]).unwrap();
    }
    assert_eq!(found(&store, &chain(1, 2)), 0);
    assert!(!has(&store, &objects[0]));
    assert_eq!(store.stats().pending, 10_000);
    assert!(store.commit(&ids, Rule::Exact).iter().all(|put| matches!(put, Put::Stored)));
    assert_eq!(found(&store, &chain(1, 2)), 2);
    assert_eq!(store.stats().pending, 0);
    let twice = store.commit(&ids, Rule::Exact);
    assert!(twice.iter().all(|put| matches!(put, Put::Failed(Error::Invalid(_)))), "{twice:?}");
    assert!(matches!(store.write(ids[0], 0, &[1]), Err(Error::Invalid(_))));
    let again = store.start(&metas, Rule::Exact);
    assert!(again.iter().all(|started| matches!(started, Started::Not(Put::Exists))));
}

#[test]
fn what_is_not_whole_is_not_committed() {
    let kit = Kit::new();
    let store = kit.open();
    let begin = |object: &Object, bytes: &[u8]| {
        let Started::Write(id) = store.start(&[object.meta], Rule::Exact).remove(0) else { unreachable!() };
        store.write(id, 0, bytes).unwrap();
        id
    };
    let object = block(1, 0, 100);
    for bytes in [&object.bytes[..99], &[0; 100][..], &[]] {
        let id = begin(&object, bytes);
        assert!(matches!(store.commit(&[id], Rule::Exact)[0], Put::Failed(Error::Invalid(_))));
    }
    let id = begin(&object, &object.bytes);
    store.revoke(&[id]);
    assert!(matches!(store.commit(&[id], Rule::Exact)[0], Put::Failed(Error::Invalid(_))));
    assert!(!has(&store, &object));
    assert_eq!((store.stats().pending, store.stats().counts.revoked), (0, 1));
}

#[test]
fn orphans_go_after_their_time_by_the_monotonic_clock() {
    let kit = Kit::new();
    let store = kit.open();
    let (first, second) = (block(1, 0, 100), block(2, 0, 100));
    let Started::Write(early) = store.start(&[first.meta], Rule::Exact).remove(0) else { unreachable!() };
    // The wall clock may jump as it likes.
    kit.hands.wall.store(4_000_000_000, Ordering::Relaxed);
    assert_eq!(store.tend().orphans, 0);
    kit.hands.wall.store(0, Ordering::Relaxed);
    kit.hands.pass(400);
    let Started::Write(late) = store.start(&[second.meta], Rule::Exact).remove(0) else { unreachable!() };
    kit.hands.pass(201);
    assert_eq!(store.tend().orphans, 1);
    assert!(matches!(store.write(early, 0, &first.bytes), Err(Error::Invalid(_))));
    store.write(late, 0, &second.bytes).unwrap();
    assert!(store.commit(&[late], Rule::Exact)[0].is_there());
    assert_eq!(store.stats().counts.orphans, 1);
}

#[test]
fn the_first_write_stays() {
    let kit = Kit::new();
    let store = kit.open();
    let object = || block(1, 0, 100);
    store_all(&store, &[object()]);
    assert!(matches!(put(&store, &[object()])[0], Put::Exists));
    assert!(matches!(put(&store, &[other_bytes(object())])[0], Put::Conflict));
    assert!(matches!(put_with(&store, &[other_bytes(object())], Rule::FirstStays)[0], Put::Exists));
    let started = store.start(&[other_bytes(object()).meta], Rule::Exact);
    assert!(matches!(started[0], Started::Not(Put::Conflict)));
    // Within one batch, too.
    let twice = put(&store, &[block(2, 0, 50), block(2, 0, 50), other_bytes(block(2, 0, 50))]);
    assert!(matches!(twice[..], [Put::Stored, Put::Exists, Put::Conflict]), "{twice:?}");
    assert!(has(&store, &object()));
    let counts = store.stats().counts;
    assert_eq!((counts.stored, counts.exists, counts.conflicts, counts.differs), (2, 3, 3, 1));
}

#[test]
fn writers_that_race_with_other_bytes_end_as_they_were_answered() {
    let kit = Kit::new();
    kit.disk.slow.store(true, Ordering::Relaxed);
    let store = kit.open();
    let names = 60;
    // Both find the name free while the other one's bytes are on their way to the disk.
    let barrier = std::sync::Barrier::new(2);
    let write = |other: bool| -> Vec<Put> {
        let object = |number| if other { other_bytes(block(number, 0, 100)) } else { block(number, 0, 100) };
        let one = |number| {
            barrier.wait();
            put(&store, &[object(number)]).remove(0)
        };
        (0..names).map(one).collect()
    };
    let (first, second) = std::thread::scope(|scope| {
        let other = scope.spawn(|| write(true));
        (write(false), other.join().unwrap())
    });
    let stored = |put: &Put| matches!(put, Put::Stored);
    for (a, b) in first.iter().zip(&second) {
        let one = matches!((a, b), (Put::Stored, Put::Conflict) | (Put::Conflict, Put::Stored));
        assert!(one, "{a:?}, {b:?}");
    }
    drop(store);
    let store = kit.open();
    for (number, put) in (0..).zip(&first) {
        let kept = if stored(put) { block(number, 0, 100) } else { other_bytes(block(number, 0, 100)) };
        assert!(has(&store, &kept), "{number}");
    }
    // Twice as many records as names: they did race.
    let place = store.place(Kind::Block, key(names - 1, 0)).unwrap();
    assert!(u64::from(place.offset) * 64 > (names + names / 2) * 256, "{place:?}");
}

#[test]
fn parents_come_first_in_whatever_order_they_are_given() {
    let kit = Kit::new();
    let store = kit.open();
    assert!(matches!(put(&store, &[block(1, 5, 10)])[0], Put::NoParent));
    assert!(matches!(put(&store, &[slice(1, 5, 10)])[0], Put::NoParent));
    let mut backwards = blocks(1, 0, 30, 9000);
    backwards.push(slice(1, 4, 10));
    backwards.reverse();
    store_all(&store, &backwards);
    assert_eq!(found(&store, &chain(1, 30)), 30);
    let mut circle = blocks(2, 1, 4, 10);
    circle[0].meta.parent = Some(key(2, 3));
    let refused = put(&store, &circle);
    assert!(refused.iter().all(|put| matches!(put, Put::NoParent)), "{refused:?}");
    let mut itself = block(3, 0, 10);
    itself.meta.parent = Some(itself.meta.id.key);
    assert!(matches!(put(&store, &[itself])[0], Put::Failed(Error::Invalid(_))));
    let mut stray = slice(1, 3, 10);
    stray.meta.parent = Some(key(1, 2));
    assert!(matches!(put(&store, &[stray])[0], Put::Failed(Error::Invalid(_))));
    assert!(matches!(put(&store, &[block(4, 0, (32 << 10) + 1)])[0], Put::Failed(Error::Invalid(_))));
}

#[test]
fn a_child_of_a_refused_parent_is_refused() {
    let kit = Kit::new();
    let store = kit.open();
    let mut objects = blocks(1, 0, 3, 100);
    objects[1].bytes[5] ^= 1;
    let done = put(&store, &objects);
    assert!(matches!(done[..], [Put::Stored, Put::Failed(Error::Invalid(_)), Put::NoParent]), "{done:?}");
    drop(store);
    let store = kit.open();
    assert_eq!(found(&store, &chain(1, 3)), 1);
    assert!(!has(&store, &block(1, 2, 100)));
}

#[test]
fn tenants_see_their_own_and_the_public() {
    let kit = Kit::new();
    let store = kit.open();
    let (other, public) = (TenantId(2), TenantId(0));
    store_all(&store, &[of(block(1, 0, 10), public), of(block(1, 1, 10), TENANT), of(block(1, 2, 10), TENANT)]);
    let asked = chain(1, 3);
    let blocks = |tenant| store.check(tenant, &asked, 0).unwrap().blocks;
    assert_eq!((blocks(TENANT), blocks(other), blocks(public)), (3, 1, 1));
    assert!(has(&store, &of(block(1, 0, 10), other)));
    assert!(!has(&store, &of(block(1, 1, 10), other)));
    let id: ObjectId = block(1, 1, 10).meta.id;
    assert_eq!((store.length(other, id), store.length(TENANT, id)), (None, Some(10)));
    assert!(matches!(put(&store, &[of(block(1, 3, 10), other)])[0], Put::NoParent));
}

#[test]
fn memory_for_writing_is_bounded() {
    let kit = Kit::new();
    let store = kit.open();
    let metas: Vec<_> = (0..40).map(|at| block(at, 0, 30_000).meta).collect();
    let started = store.start(&metas, Rule::Exact);
    let open = started.iter().filter(|started| matches!(started, Started::Write(_))).count();
    assert_eq!(open, (1 << 20) / 30_000);
    assert!(matches!(started[39], Started::Not(Put::Failed(Error::Full(_)))));
}

#[test]
fn draining_ends_writes_and_keeps_reads() {
    let kit = Kit::new();
    let store = kit.open();
    store_all(&store, &blocks(1, 0, 3, 100));
    let Started::Write(id) = store.start(&[block(2, 0, 10).meta], Rule::Exact).remove(0) else { unreachable!() };
    store.drain().unwrap();
    assert!(matches!(put(&store, &[block(3, 0, 10)])[0], Put::Failed(Error::Unavailable(_))));
    assert!(matches!(
        store.start(&[block(3, 0, 10).meta], Rule::Exact)[0],
        Started::Not(Put::Failed(Error::Unavailable(_)))
    ));
    assert!(matches!(store.commit(&[id], Rule::Exact)[0], Put::Failed(_)));
    assert!(has(&store, &block(1, 2, 100)));
    assert_eq!(store.stats().segments, 1);
    drop(store);
    assert_eq!(found(&kit.open(), &chain(1, 3)), 3);
}

#[test]
fn a_full_or_failing_disk_is_a_refusal_or_a_miss_and_no_more() {
    let kit = Kit::new();
    let store = kit.open();
    store_all(&store, &blocks(1, 0, 3, 100));
    kit.disk.full.store(true, Ordering::Relaxed);
    assert!(matches!(put(&store, &[block(2, 0, 10)])[0], Put::Failed(Error::Full(_))));
    assert_eq!(found(&store, &chain(1, 3)), 3);
    assert!(has(&store, &block(1, 2, 100)));
    kit.disk.full.store(false, Ordering::Relaxed);
    store_all(&store, &[block(2, 0, 10)]);
    kit.disk.broken.store(true, Ordering::Relaxed);
    assert!(!has(&store, &block(1, 2, 100)));
    kit.disk.broken.store(false, Ordering::Relaxed);
    assert!(has(&store, &block(1, 2, 100)));
    let counts = store.stats().counts;
    assert_eq!((counts.full, counts.read_errors, counts.quarantined), (1, 1, 0));
}
