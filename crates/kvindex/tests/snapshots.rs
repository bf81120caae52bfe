//! The directory of snapshots against a plain list, under random use.

// A test that meets an error stops there.
#![allow(clippy::unwrap_used)]

use deepinfer_kvindex::{
    Block, BlockHash, BlockPool, ChainHasher, Fence, Owner, PoolConfig, PoolGroup, Root, SnapshotPlace, StepId,
};
use proptest::prelude::*;

const NOW: StepId = StepId(1);

fn pool(blocks: u32, places: u32) -> BlockPool {
    let groups = vec![PoolGroup { num_pages: blocks + 1, pages_per_block: 1 }];
    let mut pool = BlockPool::new(&PoolConfig { groups, prefix_caching: true, event_capacity: 0 }).unwrap();
    pool.set_snapshot_places(places);
    pool
}

fn hash(i: u32) -> BlockHash {
    ChainHasher::new(&Root::default()).extend(BlockHash(1), &[i], &[])
}

/// A cached block of its own chain.
fn cached(pool: &mut BlockPool, i: u32) -> Option<Block> {
    let block = pool.alloc(NOW, Owner::Sequence)?;
    Some(published(pool, block, i))
}

fn published(pool: &mut BlockPool, block: Block, i: u32) -> Block {
    let done = pool.publish(block, hash(i), Block::NULL, BlockHash(1)).unwrap();
    if done.duplicate {
        pool.release_private(block, Owner::Sequence, Fence::Open).unwrap();
    }
    pool.unpin(done.cursor, Owner::Sequence, Fence::Open).unwrap();
    done.cursor
}

#[test]
fn the_one_used_longest_ago_goes_first_and_one_in_use_stays() {
    let mut pool = pool(8, 2);
    let blocks: Vec<Block> = (0..4).map(|i| cached(&mut pool, i).unwrap()).collect();
    let first = pool.begin_snapshot(blocks[0]).unwrap();
    assert_eq!(pool.begin_snapshot(blocks[0]), None, "once");
    assert!(pool.has_snapshot(blocks[0]) && pool.snapshot_of(blocks[0]).is_none(), "not ready yet");
    let second = pool.begin_snapshot(blocks[1]).unwrap();
    assert_eq!(pool.begin_snapshot(blocks[2]), None, "both are being filled");
    pool.end_snapshot(first, true);
    pool.end_snapshot(second, true);
    assert_eq!(pool.pin_snapshot(blocks[0]), Some(first));
    assert_eq!(pool.begin_snapshot(blocks[2]), Some(second), "the first one is being read");
    assert_eq!(pool.begin_snapshot(blocks[3]), None);
    pool.unpin_snapshot(first);
    pool.end_snapshot(second, false);
    assert_eq!((pool.snapshot_of(blocks[1]), pool.snapshot_of(blocks[2])), (None, None), "given up, and failed");
    let counts = pool.snapshot_counts();
    assert_eq!((counts.total, counts.free, counts.cached, counts.held), (2, 1, 1, 0));
    pool.unpin_snapshot(first);
    pool.end_snapshot(SnapshotPlace(9), true);
    assert_eq!(pool.stats().misuse, 2, "nobody uses them");
    pool.check().unwrap();
}

#[test]
fn a_block_that_leaves_the_index_drops_its_snapshot_once_no_copy_uses_it() {
    let mut pool = pool(3, 3);
    let blocks: Vec<Block> = (0..3).map(|i| cached(&mut pool, i).unwrap()).collect();
    let places: Vec<SnapshotPlace> = blocks.iter().map(|&b| pool.begin_snapshot(b).unwrap()).collect();
    pool.end_snapshot(places[0], true);
    pool.end_snapshot(places[1], true);
    pool.pin_snapshot(blocks[1]).unwrap();
    assert_eq!(pool.clear_cached(NOW), 3);
    let counts = pool.snapshot_counts();
    assert_eq!((counts.free, counts.cached, counts.held), (1, 0, 2));
    let again = cached(&mut pool, 0).unwrap();
    assert!(!pool.has_snapshot(again), "the same prefix, and nothing of what was kept for it");
    pool.unpin_snapshot(places[1]);
    pool.end_snapshot(places[2], true);
    assert_eq!(pool.snapshot_counts().free, 3);
    pool.check().unwrap();
}

#[test]
fn without_places_or_a_prefix_cache_nothing_is_kept() {
    let mut none = pool(4, 0);
    let block = cached(&mut none, 1).unwrap();
    assert_eq!((none.begin_snapshot(block), none.pin_snapshot(block), none.has_snapshot(block)), (None, None, false));
    let groups = vec![PoolGroup { num_pages: 5, pages_per_block: 1 }];
    let mut uncached = BlockPool::new(&PoolConfig { groups, prefix_caching: false, event_capacity: 0 }).unwrap();
    uncached.set_snapshot_places(4);
    assert_eq!(uncached.snapshot_counts().total, 0);
    let private = none.alloc(NOW, Owner::Sequence).unwrap();
    none.set_snapshot_places(4);
    assert_eq!(none.begin_snapshot(private), None, "not in the index");
    assert_eq!(none.begin_snapshot(Block(77)), None);
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Cache(u32),
    Begin(u32),
    End(usize, bool),
    Pin(u32),
    Unpin(usize),
}

/// What the directory should say.
#[derive(Default)]
struct Model {
    /// (hash number, place, ready), least recently used first.
    kept: Vec<(u32, SnapshotPlace, bool)>,
    filling: Vec<SnapshotPlace>,
    reading: Vec<SnapshotPlace>,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (0..14u32).prop_map(Op::Cache),
        4 => (0..14u32).prop_map(Op::Begin),
        4 => (any::<usize>(), prop::bool::weighted(0.8)).prop_map(|(k, ok)| Op::End(k, ok)),
        3 => (0..14u32).prop_map(Op::Pin),
        3 => any::<usize>().prop_map(Op::Unpin),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn it_keeps_what_a_plain_list_keeps(blocks in 2..9u32, places in 0..5u32, ops in prop::collection::vec(op(), 200)) {
        let mut pool = pool(blocks, places);
        let mut model = Model::default();
        for op in ops {
            match op {
                Op::Cache(i) => {
                    let Some(block) = pool.alloc(NOW, Owner::Sequence) else { continue };
                    // It may have taken the place of the very one that comes back.
                    model.kept.retain(|k| pool.find(hash(k.0)).is_some());
                    published(&mut pool, block, i);
                }
                Op::Begin(i) => {
                    let Some(block) = pool.find(hash(i)) else { continue };
                    let known = model.kept.iter().position(|k| k.0 == i);
                    let idle = |m: &Model, place| !m.filling.contains(&place) && !m.reading.contains(&place);
                    let oldest = model.kept.iter().position(|k| k.2 && idle(&model, k.1));
                    let used = model.kept.len() + model.filling.iter().chain(&model.reading)
                        .collect::<std::collections::BTreeSet<_>>().into_iter()
                        .filter(|&&place| model.kept.iter().all(|k| k.1 != place)).count();
                    let begun = pool.begin_snapshot(block);
                    if let Some(at) = known {
                        prop_assert_eq!(begun, None);
                        let entry = model.kept.remove(at);
                        model.kept.push(entry);
                    } else if used < places as usize {
                        prop_assert!(begun.is_some_and(|place| idle(&model, place) && model.kept.iter().all(|k| k.1 != place)));
                    } else {
                        prop_assert_eq!(begun, oldest.map(|at| model.kept[at].1));
                        if let Some(at) = oldest { model.kept.remove(at); }
                    }
                    if let Some(place) = begun {
                        model.kept.push((i, place, false));
                        model.filling.push(place);
                    }
                }
                Op::End(k, ok) if !model.filling.is_empty() => {
                    let place = model.filling.swap_remove(k % model.filling.len());
                    pool.end_snapshot(place, ok);
                    match model.kept.iter().position(|k| k.1 == place) {
                        Some(at) if ok => model.kept[at].2 = true,
                        Some(at) => { model.kept.remove(at); }
                        None => {}
                    }
                }
                Op::Pin(i) => {
                    let Some(block) = pool.find(hash(i)) else { continue };
                    let known = model.kept.iter().position(|k| k.0 == i);
                    prop_assert_eq!(pool.pin_snapshot(block), known.map(|at| model.kept[at].1));
                    if let Some(at) = known {
                        let entry = model.kept.remove(at);
                        model.reading.push(entry.1);
                        model.kept.push(entry);
                    }
                }
                Op::Unpin(k) if !model.reading.is_empty() => {
                    let place = model.reading.swap_remove(k % model.reading.len());
                    pool.unpin_snapshot(place);
                }
                Op::End(..) | Op::Unpin(_) => {}
            }
            // What left the index has no snapshot.
            model.kept.retain(|k| pool.find(hash(k.0)).is_some());
            for i in 0..14 {
                let of = pool.find(hash(i)).and_then(|block| pool.snapshot_of(block));
                let known = model.kept.iter().find(|k| k.0 == i && k.2).map(|k| k.1);
                prop_assert_eq!(of, known);
            }
            prop_assert_eq!(pool.snapshot_users(), model.filling.len() + model.reading.len());
            pool.check().unwrap();
        }
        prop_assert_eq!(pool.stats().misuse, 0);
    }
}
