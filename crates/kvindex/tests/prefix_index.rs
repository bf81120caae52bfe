//! Matching, collisions and events of the pool, each behaviour by name.

#![allow(clippy::unwrap_used)]

use std::collections::HashMap;

use deepinfer_kvindex::{
    Block, BlockHash, BlockPool, ChainHasher, Event, Fence, Hit, Owner, Part, PoolConfig, PoolGroup, Root, StepId, Tier,
};

const NOW: StepId = StepId(1);

fn pool_with(blocks: u32, prefix_caching: bool, event_capacity: usize) -> BlockPool {
    let groups = vec![PoolGroup { num_pages: blocks, pages_per_block: 1 }];
    BlockPool::new(&PoolConfig { groups, prefix_caching, event_capacity }).unwrap()
}

fn pool(blocks: u32) -> BlockPool {
    pool_with(blocks, true, 0)
}

/// Publishes a chain and leaves it cached.
fn cache_chain(pool: &mut BlockPool, hashes: &[BlockHash], namespace: BlockHash) -> Vec<Block> {
    let mut cursor = Block::NULL;
    let mut blocks = Vec::new();
    for &hash in hashes {
        let block = pool.alloc(NOW, Owner::Sequence).unwrap();
        cursor = pool.publish(block, hash, cursor, namespace).unwrap().cursor;
        blocks.push(block);
    }
    pool.unpin(cursor, Owner::Sequence, Fence::Open).unwrap();
    blocks
}

#[test]
fn a_block_is_matchable_only_after_it_is_published() {
    let mut pool = pool(8);
    let hashes = [BlockHash(11), BlockHash(12)];
    let first = pool.alloc(NOW, Owner::Sequence).unwrap();
    assert_eq!(pool.find_prefix(&hashes), Hit::default());
    let cursor = pool.publish(first, hashes[0], Block::NULL, BlockHash(1)).unwrap().cursor;
    assert_eq!(pool.find_prefix(&hashes), Hit { blocks: 1, leaf: first });
    // Filled by a step that failed: released unpublished, never matchable.
    let second = pool.alloc(NOW, Owner::Sequence).unwrap();
    pool.release_private(second, Owner::Sequence, Fence::Step(StepId(1))).unwrap();
    pool.unpin(cursor, Owner::Sequence, Fence::Open).unwrap();
    assert_eq!(pool.find_prefix(&hashes), Hit { blocks: 1, leaf: first });
    pool.check_holders([]).unwrap();
}

#[test]
fn a_hash_that_collides_in_its_low_64_bits_never_returns_the_wrong_block() {
    let mut pool = pool(64);
    let low = 0xdead_beef_0000_0001_u128;
    let hashes: Vec<_> = (1..=20u128).map(|high| BlockHash(high << 64 | low)).collect();
    let mut blocks = HashMap::new();
    for &hash in &hashes {
        blocks.insert(hash, cache_chain(&mut pool, &[hash], BlockHash(1))[0]);
    }
    for &hash in &hashes {
        assert_eq!(pool.find_prefix(&[hash]), Hit { blocks: 1, leaf: blocks[&hash] });
    }
    assert_eq!(pool.find_prefix(&[BlockHash(21 << 64 | low)]), Hit::default());
    pool.check_holders([]).unwrap();
}

/// Low 64 bits and the 32-bit tag equal: only bits 64 to 95 differ.
#[test]
fn a_forced_tag_collision_never_returns_the_wrong_block() {
    let mut pool = pool(64);
    let base = 0x7777_7777_u128 << 96 | 0x1234_5678_9abc_def0;
    let hashes: Vec<_> = (0..20u128).map(|middle| BlockHash(base | middle << 64)).collect();
    let mut blocks = HashMap::new();
    for &hash in &hashes {
        blocks.insert(hash, cache_chain(&mut pool, &[hash], BlockHash(1))[0]);
    }
    for &hash in &hashes {
        assert_eq!(pool.find(hash), Some(blocks[&hash]));
    }
    assert_eq!(pool.find(BlockHash(base | 99 << 64)), None);
    // Eviction takes out the right one of them.
    while pool.counts(0).free > 0 {
        pool.alloc(NOW, Owner::Sequence).unwrap();
    }
    let evicted = pool.alloc(NOW, Owner::Sequence).unwrap();
    assert_eq!(evicted, blocks[&hashes[0]]);
    assert_eq!(pool.find(hashes[0]), None);
    assert!(hashes[1..].iter().all(|h| pool.find(*h) == Some(blocks[h])));
    pool.check().unwrap();
}

#[test]
fn prefixes_with_an_equal_tail_and_another_start_share_nothing() {
    let hasher = ChainHasher::new(&Root { block_tokens: 4, ..Root::default() });
    let mut pool = pool(32);
    let chain = |first: u32| {
        let tokens: Vec<u32> = [[first; 4], [7; 4], [8; 4]].concat();
        hasher.hash_all(&tokens, &[])
    };
    cache_chain(&mut pool, &chain(1), hasher.root());
    assert_eq!(pool.find_prefix(&chain(1)).blocks, 3);
    assert_eq!(pool.find_prefix(&chain(2)), Hit::default());
    // A parent that is not the cursor is refused, even if the hash is known.
    let block = pool.alloc(NOW, Owner::Sequence).unwrap();
    assert!(pool.publish(block, chain(1)[1], Block::NULL, hasher.root()).is_err());
    pool.check().unwrap();
}

#[test]
fn one_tenant_never_hits_anothers_blocks_and_events_name_the_namespace_the_index_used() {
    let common = ChainHasher::new(&Root { block_tokens: 4, ..Root::default() });
    let tenants = [common.clone(), common.with_salt(b"a"), common.with_salt(b"b")];
    let tokens: Vec<u32> = (0..16).collect();
    let mut pool = pool_with(32, true, 64);
    for (i, hasher) in tenants.iter().enumerate() {
        let hashes = hasher.hash_all(&tokens, &[]);
        assert_eq!(pool.find_prefix(&hashes), Hit::default(), "tenant {i} hit a block it never stored");
        cache_chain(&mut pool, &hashes, hasher.root());
    }
    let mut events = Vec::new();
    pool.drain_events(&mut events);
    let want: Vec<_> = tenants
        .iter()
        .flat_map(|hasher| {
            let namespace = hasher.root();
            let hashes = hasher.hash_all(&tokens, &[]);
            let parents: Vec<_> = std::iter::once(namespace).chain(hashes.iter().copied()).collect();
            hashes.into_iter().zip(parents).map(move |(hash, parent)| Event::Stored { hash, parent, namespace })
        })
        .collect();
    assert_eq!(events, want);
    for event in &events {
        if let Event::Stored { hash, .. } = event {
            assert!(pool.find(*hash).is_some(), "the event's identity is not the index's");
        }
    }
    events.clear();
    assert_eq!(pool.clear_cached(NOW), 12);
    pool.drain_events(&mut events);
    let removed: Vec<_> = events.iter().filter(|e| matches!(e, Event::Removed { .. })).collect();
    assert_eq!((events.len(), removed.len()), (12, 12));
    assert!(tenants.iter().all(|t| {
        events.iter().filter(|e| matches!(e, Event::Removed { namespace, .. } if *namespace == t.root())).count() == 4
    }));
}

#[test]
fn a_full_event_log_says_how_much_it_lost_and_starts_over_with_what_is_indexed() {
    let mut pool = pool_with(32, true, 4);
    let hashes: Vec<_> = (1..=6).map(BlockHash).collect();
    let blocks = cache_chain(&mut pool, &hashes, BlockHash(99));
    let mut events = Vec::new();
    pool.drain_events(&mut events);
    assert_eq!(events[0], Event::Reset { lost: 6 });
    assert_eq!((events.len(), pool.stats().events_lost), (1 + blocks.len(), 6));
    assert_eq!(events[1], Event::Stored { hash: hashes[0], parent: BlockHash(99), namespace: BlockHash(99) });
    assert_eq!(events[6], Event::Stored { hash: hashes[5], parent: hashes[4], namespace: BlockHash(99) });
    events.clear();
    pool.drain_events(&mut events);
    assert_eq!(events, []);
}

#[test]
fn the_state_rule_ends_a_hit_where_a_state_slice_is_stored() {
    let mut pool = pool(16);
    let hashes: Vec<_> = (1..=5).map(BlockHash).collect();
    let blocks = cache_chain(&mut pool, &hashes, BlockHash(99));
    let hit = pool.find_prefix(&hashes);
    assert_eq!(pool.shorten_to(hit, Part::BlockKv), hit);
    assert_eq!(pool.shorten_to(hit, Part::StateSlice), Hit::default());
    pool.set_part(blocks[2], Part::StateSlice, Tier::Store, true).unwrap();
    pool.set_part(blocks[0], Part::StateSlice, Tier::Host, true).unwrap();
    assert_eq!(pool.shorten_to(hit, Part::StateSlice), Hit { blocks: 3, leaf: blocks[2] });
    assert_eq!(pool.shorten_to(pool.truncate(hit, 2), Part::StateSlice), Hit { blocks: 1, leaf: blocks[0] });
    // A block that is evicted loses its parts.
    assert_eq!(pool.clear_cached(NOW), 5);
    assert!(!pool.parts(blocks[2]).has_any(Part::StateSlice));
}

#[test]
fn without_prefix_caching_every_block_stays_private() {
    let mut pool = pool_with(8, false, 16);
    let block = pool.alloc(NOW, Owner::Sequence).unwrap();
    let published = pool.publish(block, BlockHash(5), Block::NULL, BlockHash(1)).unwrap();
    assert_eq!((published.cursor, published.duplicate), (Block::NULL, true));
    assert_eq!(pool.find_prefix(&[BlockHash(5)]), Hit::default());
    pool.release_private(block, Owner::Sequence, Fence::Open).unwrap();
    assert_eq!(pool.counts(0).free, 7);
    pool.check_holders([]).unwrap();
}

/// Two sequences that compute one block in the same step: the second keeps its copy, the index keeps the first's.
#[test]
fn a_second_copy_of_a_block_stays_private_and_its_chain_goes_on_from_the_first() {
    let mut pool = pool(16);
    let hashes = [BlockHash(21), BlockHash(22), BlockHash(23)];
    let [a, b] = [0; 2].map(|_| pool.alloc(NOW, Owner::Sequence).unwrap());
    let first = pool.publish(a, hashes[0], Block::NULL, BlockHash(1)).unwrap();
    let second = pool.publish(b, hashes[0], Block::NULL, BlockHash(1)).unwrap();
    assert_eq!((second.cursor, second.duplicate), (a, true));
    let c = pool.alloc(NOW, Owner::Sequence).unwrap();
    let next = pool.publish(c, hashes[1], second.cursor, BlockHash(1)).unwrap();
    assert_eq!((next.cursor, pool.parent(c)), (c, a));
    pool.check_holders([(a, Owner::Sequence), (b, Owner::Sequence), (c, Owner::Sequence)]).unwrap();
    pool.unpin(c, Owner::Sequence, Fence::Open).unwrap();
    pool.release_private(b, Owner::Sequence, Fence::Step(StepId(1))).unwrap();
    assert_eq!(pool.counts(0).parked, 1);
    pool.unpin(first.cursor, Owner::Sequence, Fence::Open).unwrap();
    pool.retire(StepId(2));
    assert_eq!((pool.counts(0).parked, pool.counts(0).cached), (0, 2));
    pool.check_holders([]).unwrap();
}
