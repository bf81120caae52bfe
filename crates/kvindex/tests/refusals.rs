//! Misuse is refused, counted, and changes nothing; no id makes the pool panic.

#![allow(clippy::unwrap_used)]

use deepinfer_kvindex::{
    Block, BlockHash, BlockPool, Counts, Fence, Owner, Part, PoolConfig, PoolError, PoolGroup, StepId, Tier, TransferId,
};
use proptest::prelude::*;

const NOW: StepId = StepId(5);
const SEQ: Owner = Owner::Sequence;

fn pool() -> BlockPool {
    let groups = vec![PoolGroup { num_pages: 8, pages_per_block: 1 }, PoolGroup { num_pages: 15, pages_per_block: 2 }];
    BlockPool::new(&PoolConfig { groups, prefix_caching: true, event_capacity: 8 }).unwrap()
}

#[test]
fn a_double_release_is_refused_even_when_a_child_still_pins_the_block() {
    let mut pool = pool();
    let parent = pool.alloc(NOW, SEQ).unwrap();
    pool.publish(parent, BlockHash(1), Block::NULL, BlockHash(9)).unwrap();
    let child = pool.alloc(NOW, SEQ).unwrap();
    pool.publish(child, BlockHash(2), parent, BlockHash(9)).unwrap();
    // The reference moved to the child: what is left on the parent is the child's pin.
    assert_eq!(pool.pins(parent), [1, 0]);
    assert_eq!(pool.unpin(parent, SEQ, Fence::Open), Err(PoolError::NotHeld(parent)));
    pool.unpin(child, SEQ, Fence::Open).unwrap();
    assert_eq!(pool.unpin(child, SEQ, Fence::Open), Err(PoolError::NotHeld(child)));
    let private = pool.alloc(NOW, SEQ).unwrap();
    assert_eq!(pool.release_private(private, Owner::Transfer, Fence::Open), Err(PoolError::NotHeld(private)));
    pool.release_private(private, SEQ, Fence::Step(NOW)).unwrap();
    assert_eq!(pool.release_private(private, SEQ, Fence::Open), Err(PoolError::NotHeld(private)));
    assert_eq!(pool.stats().misuse, 4);
    pool.check_holders([]).unwrap();
}

#[test]
fn a_fence_on_a_closed_transfer_is_refused_and_the_holder_keeps_its_reference() {
    let mut pool = pool();
    let id = TransferId { index: 3, generation: 1 };
    let block = pool.alloc(NOW, SEQ).unwrap();
    assert_eq!(pool.release_private(block, SEQ, Fence::Transfer(id)), Err(PoolError::UnknownTransfer(id)));
    pool.check_holders([(block, SEQ)]).unwrap();
    assert!(pool.open_transfer(id));
    pool.release_private(block, SEQ, Fence::Transfer(id)).unwrap();
    assert_eq!((pool.counts(0).held_by_transfers, pool.coming_back(NOW)), (1, 1));
    assert!(pool.close_transfer(id) && !pool.close_transfer(id));
    assert_eq!(pool.counts(0).free, 7);
}

/// Preempting a holder of shared blocks: what comes back is counted at once, at the step it comes back.
#[test]
fn released_blocks_count_as_coming_back_until_their_fence_opens() {
    let mut pool = pool();
    let blocks: Vec<_> = (0..7).map(|_| pool.alloc(NOW, SEQ).unwrap()).collect();
    pool.publish(blocks[0], BlockHash(1), Block::NULL, BlockHash(9)).unwrap();
    assert_eq!((pool.available(NOW), pool.coming_back(NOW), pool.alloc(NOW, SEQ)), (0, 0, None));
    pool.unpin(blocks[0], SEQ, Fence::Step(NOW)).unwrap();
    for &block in &blocks[1..3] {
        pool.release_private(block, SEQ, Fence::Step(NOW)).unwrap();
    }
    assert_eq!((pool.available(NOW), pool.coming_back(NOW), pool.alloc(NOW, SEQ)), (0, 3, None));
    assert_eq!((pool.counts(0).parked, pool.counts(0).cached, pool.counts(0).cached_fenced), (2, 1, 1));
    assert_eq!(pool.find(BlockHash(1)), Some(blocks[0]));
    let next = StepId(NOW.0 + 1);
    assert_eq!((pool.available(next), pool.coming_back(next)), (3, 0));
    assert!((0..3).all(|_| pool.alloc(next, SEQ).is_some()));
    assert_eq!(pool.find(BlockHash(1)), None);
}

/// A block shared by a step still running and a transfer that ends without a fence waits for the step.
#[test]
fn the_latest_fence_of_all_holders_decides() {
    let mut pool = pool();
    let block = pool.alloc(NOW, SEQ).unwrap();
    pool.pin(block, Owner::Transfer).unwrap();
    pool.release_private(block, SEQ, Fence::Step(NOW)).unwrap();
    assert_eq!(pool.counts(0).held_by_transfers, 1);
    pool.release_private(block, Owner::Transfer, Fence::Open).unwrap();
    assert_eq!(pool.counts(0).parked, 1);
    pool.retire(NOW);
    assert_eq!(pool.counts(0).parked, 1);
    pool.retire(StepId(NOW.0 + 1));
    assert_eq!(pool.counts(0).parked, 0);
}

/// Copy on write of a shared tail: the writer takes another block and drops its reference on the shared one.
#[test]
fn a_shared_tail_is_left_to_the_other_holder_by_copy_on_write() {
    let mut pool = pool();
    let tail = pool.alloc(NOW, SEQ).unwrap();
    assert!(!pool.is_shared(tail));
    pool.pin(tail, SEQ).unwrap();
    assert!(pool.is_shared(tail));
    let copy = pool.alloc(NOW, SEQ).unwrap();
    assert!(copy != tail && pool.pages(1, copy) != pool.pages(1, tail));
    pool.release_private(tail, SEQ, Fence::Step(NOW)).unwrap();
    assert!(!pool.is_shared(tail) && !pool.is_shared(copy));
    pool.check_holders([(tail, SEQ), (copy, SEQ)]).unwrap();
}

fn snapshot(pool: &BlockPool) -> (Vec<Counts>, Vec<[u32; 2]>, Vec<BlockHash>) {
    let blocks = || (0..8).map(Block);
    let counts = (0..2).map(|g| pool.counts(g)).collect();
    (counts, blocks().map(|b| pool.pins(b)).collect(), blocks().map(|b| pool.hash(b)).collect())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn ids_outside_the_pool_are_refused_everywhere(
        id in prop_oneof![Just(0u32), 8..20u32, Just(u32::MAX), any::<u32>().prop_map(|i| i | 8)],
        group in prop_oneof![0..4usize, Just(usize::MAX)],
        page in any::<usize>(),
    ) {
        let mut pool = pool();
        let held = pool.alloc(NOW, SEQ).unwrap();
        pool.publish(held, BlockHash(7), Block::NULL, BlockHash(9)).unwrap();
        let private = pool.alloc(NOW, SEQ).unwrap();
        let before = snapshot(&pool);
        let bad = Block(id);
        let error = Some(PoolError::BadBlock(bad));
        prop_assert_eq!(pool.unpin(bad, SEQ, Fence::Open).err(), error);
        prop_assert_eq!(pool.release_private(bad, SEQ, Fence::Step(NOW)).err(), error);
        prop_assert_eq!(pool.pin(bad, Owner::Transfer).err(), error);
        prop_assert_eq!(pool.pin_chain(bad, SEQ, &mut Vec::new()).err(), error);
        prop_assert_eq!(pool.publish(bad, BlockHash(8), Block::NULL, BlockHash(9)).err(), error);
        prop_assert_eq!(pool.set_part(bad, Part::BlockKv, Tier::Host, true).err(), error);
        if id != 0 {
            let cursor = pool.publish(private, BlockHash(8), bad, BlockHash(9)).err();
            prop_assert_eq!(cursor, Some(PoolError::BadCursor(bad)));
        }
        prop_assert_eq!(pool.publish(private, BlockHash::NONE, held, BlockHash(9)).err(), Some(PoolError::ZeroHash));
        prop_assert_eq!(pool.publish(private, BlockHash(8), private, BlockHash(9)).err(), Some(PoolError::BadCursor(private)));
        prop_assert_eq!(pool.pin_cost(bad), 0);
        prop_assert!(!pool.is_shared(bad) && pool.parent(bad).is_null() && !pool.parts(bad).has_any(Part::BlockKv));
        if group != 0 {
            prop_assert_eq!(pool.page(group, bad, page), 0);
        }
        let _ = (pool.page(group, held, page), pool.counts(group));
        prop_assert_eq!(snapshot(&pool), before);
        prop_assert_eq!(pool.check_holders([(held, SEQ), (private, SEQ)]), Ok(()));
    }
}
