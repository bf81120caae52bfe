//! Steady paths allocate nothing: counted by the allocator, in a full pool that evicts, matches, parks and logs events.

#![allow(clippy::unwrap_used)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use deepinfer_kvindex::{
    Block, BlockHash, BlockPool, ChainHasher, Event, Fence, Owner, PoolConfig, PoolGroup, Root, StateSlots, StepId,
};

thread_local! {
    static TAKEN: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: every call is passed on to the system allocator unchanged; the counter is a plain thread-local cell without a
// destructor, so touching it allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        TAKEN.with(|t| t.set(t.get() + 1));
        // SAFETY: same contract as ours.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: `ptr` came from `System` with this layout.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        TAKEN.with(|t| t.set(t.get() + 1));
        // SAFETY: `ptr` came from `System` with this layout.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const BLOCK: usize = 16;
const LENGTH: usize = 24;

struct World {
    pool: BlockPool,
    slots: StateSlots,
    hasher: ChainHasher,
    now: StepId,
    tokens: Vec<u32>,
    hashes: Vec<BlockHash>,
    ids: Vec<Block>,
    events: Vec<Event>,
    hits: usize,
}

impl World {
    /// One sequence from match to release.
    fn sequence(&mut self, number: u32) {
        let slot = self.slots.alloc(self.now).unwrap();
        for (i, token) in self.tokens.iter_mut().enumerate() {
            // The first half is one of three known ones, the second half is always new.
            *token = if i < BLOCK * LENGTH / 2 { number % 3 } else { number };
        }
        self.hashes.clear();
        self.hasher.hash_into(&self.tokens, &[], &mut self.hashes);
        let hit = self.pool.find_prefix(&self.hashes);
        self.hits += hit.blocks;
        self.ids.clear();
        if hit.blocks > 0 {
            self.pool.pin_chain(hit.leaf, Owner::Sequence, &mut self.ids).unwrap();
        }
        let mut cursor = hit.leaf;
        for &hash in &self.hashes[hit.blocks..] {
            self.now.0 += 1;
            let block = self.pool.alloc(self.now, Owner::Sequence).unwrap();
            cursor = self.pool.publish(block, hash, cursor, self.hasher.root()).unwrap().cursor;
        }
        let tail = self.pool.alloc(self.now, Owner::Sequence).unwrap();
        self.pool.unpin(cursor, Owner::Sequence, Fence::Step(self.now)).unwrap();
        self.pool.release_private(tail, Owner::Sequence, Fence::Step(self.now)).unwrap();
        self.slots.release(slot, Fence::Step(self.now)).unwrap();
        self.now.0 += 1;
        self.pool.retire(self.now);
        self.slots.retire(self.now);
        self.events.clear();
        self.pool.drain_events(&mut self.events);
    }
}

#[test]
fn match_publish_evict_and_release_allocate_nothing() {
    let groups =
        vec![PoolGroup { num_pages: 256, pages_per_block: 1 }, PoolGroup { num_pages: 511, pages_per_block: 2 }];
    let mut world = World {
        pool: BlockPool::new(&PoolConfig { groups, prefix_caching: true, event_capacity: 128 }).unwrap(),
        slots: StateSlots::new(4).unwrap(),
        hasher: ChainHasher::new(&Root { block_tokens: BLOCK as u32, ..Root::default() }),
        now: StepId(1),
        tokens: vec![0; BLOCK * LENGTH],
        hashes: Vec::with_capacity(LENGTH),
        ids: Vec::with_capacity(LENGTH),
        events: Vec::with_capacity(512),
        hits: 0,
    };
    (0..50).for_each(|i| world.sequence(i));
    let before = TAKEN.with(Cell::get);
    (50..2000).for_each(|i| world.sequence(i));
    assert_eq!(TAKEN.with(Cell::get) - before, 0);
    let stats = world.pool.stats();
    assert!(world.hits > 10_000 && stats.evicted > 10_000 && stats.events_lost == 0, "{} hits, {stats:?}", world.hits);
    world.pool.check_holders([]).unwrap();
}
