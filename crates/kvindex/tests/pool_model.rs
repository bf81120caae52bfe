//! Property test: random histories of sequences and transfers, the pool against the naive model after every call.

#![allow(clippy::unwrap_used, clippy::panic)]

mod model;

use std::cell::Cell;
use std::collections::VecDeque;

use deepinfer_kvindex::{
    Block, BlockHash, BlockPool, ChainHasher, Fence, Owner, Part, PoolConfig, PoolGroup, PoolStats, Root, StepId, Tier,
    TransferId,
};
use model::{Further, Model, Replica};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

/// Tokens in a block.
const BLOCK: usize = 2;

#[derive(Clone, Debug)]
enum Op {
    /// A sequence with a prompt from a small alphabet: match, pin.
    Start {
        tenant: usize,
        tokens: Vec<u32>,
    },
    /// A second sequence on the cursor of a first.
    Fork {
        seq: usize,
    },
    Grow {
        seq: usize,
        token: u32,
        blocks: u32,
    },
    /// The step that filled the oldest private block completes.
    Publish {
        seq: usize,
    },
    Finish {
        seq: usize,
        fence: u8,
    },
    /// A transfer takes a reference on a block of a sequence.
    Save {
        seq: usize,
        private: bool,
    },
    /// A transfer allocates, and later publishes or drops.
    Load {
        tenant: usize,
        tokens: Vec<u32>,
    },
    DropLease {
        lease: usize,
        fence: u8,
    },
    OpenTransfer,
    CloseTransfer {
        which: usize,
    },
    Advance,
    Retire,
    Find {
        tenant: usize,
        tokens: Vec<u32>,
    },
    SetPart {
        block: u32,
        present: bool,
    },
    Misuse {
        block: u32,
        other: u32,
        what: u8,
    },
    Drain,
    Clear,
}

fn tokens(longest: usize) -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(0..2u32, 1..=longest)
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (0..2usize, tokens(6)).prop_map(|(tenant, tokens)| Op::Start { tenant, tokens }),
        1 => any::<usize>().prop_map(|seq| Op::Fork { seq }),
        12 => (any::<usize>(), 0..2u32, 1..4u32).prop_map(|(seq, token, blocks)| Op::Grow { seq, token, blocks }),
        14 => any::<usize>().prop_map(|seq| Op::Publish { seq }),
        6 => (any::<usize>(), 0..4u8).prop_map(|(seq, fence)| Op::Finish { seq, fence }),
        2 => (any::<usize>(), any::<bool>()).prop_map(|(seq, private)| Op::Save { seq, private }),
        2 => (0..2usize, tokens(4)).prop_map(|(tenant, tokens)| Op::Load { tenant, tokens }),
        4 => (any::<usize>(), 0..4u8).prop_map(|(lease, fence)| Op::DropLease { lease, fence }),
        1 => Just(Op::OpenTransfer),
        2 => any::<usize>().prop_map(|which| Op::CloseTransfer { which }),
        6 => Just(Op::Advance),
        1 => Just(Op::Retire),
        3 => (0..2usize, tokens(8)).prop_map(|(tenant, tokens)| Op::Find { tenant, tokens }),
        1 => (0..30u32, any::<bool>()).prop_map(|(block, present)| Op::SetPart { block, present }),
        3 => (0..30u32, 0..30u32, 0..6u8).prop_map(|(block, other, what)| Op::Misuse { block, other, what }),
        2 => Just(Op::Drain),
        1 => Just(Op::Clear),
    ]
}

struct Sequence {
    tenant: usize,
    /// Hash of the cursor, or the root.
    hash: BlockHash,
    cursor: Block,
    unpublished: VecDeque<(Block, u32)>,
    duplicates: Vec<Block>,
}

struct World {
    pool: BlockPool,
    model: Model,
    replica: Replica,
    tenants: [ChainHasher; 2],
    now: StepId,
    seqs: Vec<Sequence>,
    leases: Vec<Block>,
    next_transfer: u32,
}

type Outcome = Result<(), String>;

impl World {
    fn new(blocks: u32, further: &[Further], event_capacity: usize) -> Self {
        let mut groups = vec![PoolGroup { num_pages: blocks, pages_per_block: 1 }];
        groups.extend(further.iter().map(|g| PoolGroup { num_pages: g.total, pages_per_block: g.per_block }));
        let hasher = ChainHasher::new(&Root { model: "m".into(), block_tokens: BLOCK as u32, ..Root::default() });
        Self {
            pool: BlockPool::new(&PoolConfig { groups, prefix_caching: true, event_capacity }).unwrap(),
            model: Model::new(blocks, further.to_vec()),
            replica: Replica::default(),
            tenants: [hasher.clone(), hasher.with_salt(b"tenant")],
            now: StepId(1),
            seqs: Vec::new(),
            leases: Vec::new(),
            next_transfer: 0,
        }
    }

    /// Hash of a block all of whose tokens are `token`.
    fn extend(&self, tenant: usize, parent: BlockHash, token: u32) -> BlockHash {
        self.tenants[tenant].extend(parent, &[token; BLOCK], &[])
    }

    fn chain(&self, tenant: usize, tokens: &[u32]) -> Vec<BlockHash> {
        let mut parent = self.tenants[tenant].root();
        tokens
            .iter()
            .map(|&t| {
                parent = self.extend(tenant, parent, t);
                parent
            })
            .collect()
    }

    fn fence(&self, kind: u8) -> Fence {
        match (kind, self.model.open_transfers.last()) {
            (0, _) => Fence::Open,
            (1, Some(&id)) => Fence::Transfer(id),
            (2, _) => Fence::Step(StepId(self.now.0 - 1)),
            _ => Fence::Step(self.now),
        }
    }

    fn alloc(&mut self, owner: Owner) -> Result<Option<Block>, String> {
        let got = self.pool.alloc(self.now, owner);
        self.model.alloc(self.now, owner, got)?;
        Ok(got)
    }

    /// Releases through the call that fits and follows in the model.
    fn release(&mut self, block: Block, owner: Owner, fence: Fence) -> Outcome {
        let result = if self.model.indexed.contains_key(&block) {
            self.pool.unpin(block, owner, fence)
        } else {
            self.pool.release_private(block, owner, fence)
        };
        result.map_err(|e| e.to_string())?;
        self.model.release(block, owner, fence);
        Ok(())
    }

    fn find(&self, tenant: usize, tokens: &[u32]) -> Result<(usize, Block), String> {
        let hashes = self.chain(tenant, tokens);
        let hit = self.pool.find_prefix(&hashes);
        let want = self.model.linear_scan(&hashes);
        if hit.blocks != want {
            return Err(format!("gallop found {} blocks, a linear scan {want}", hit.blocks));
        }
        let leaf = if want == 0 { Block::NULL } else { self.model.by_hash[&hashes[want - 1]] };
        if hit.leaf != leaf {
            return Err(format!("hit ends at {:?}, want {leaf:?}", hit.leaf));
        }
        let short = self.pool.truncate(hit, want / 2);
        let want_leaf = if want / 2 == 0 { Block::NULL } else { self.model.by_hash[&hashes[want / 2 - 1]] };
        if (short.blocks, short.leaf) != (want / 2, want_leaf) {
            return Err(format!("truncated hit is {short:?}"));
        }
        Ok((want, leaf))
    }

    fn start(&mut self, tenant: usize, tokens: &[u32]) -> Outcome {
        let (blocks, leaf) = self.find(tenant, tokens)?;
        let mut hash = self.tenants[tenant].root();
        if blocks > 0 {
            let before = self.pool.available(self.now) + self.pool.coming_back(self.now);
            let cost = self.pool.pin_cost(leaf);
            let mut ids = Vec::new();
            let length = self.pool.pin_chain(leaf, Owner::Sequence, &mut ids).map_err(|e| e.to_string())?;
            let hashes = self.chain(tenant, &tokens[..blocks]);
            let want: Vec<_> = hashes.iter().map(|h| self.model.by_hash[h]).collect();
            if length != blocks || ids != want {
                return Err(format!("pinned {ids:?}, want {want:?}"));
            }
            let shared = self.model.held_by_transfers_only();
            self.model.add_holder(leaf, Owner::Sequence);
            let taken_over = shared - self.model.held_by_transfers_only();
            let after = self.pool.available(self.now) + self.pool.coming_back(self.now);
            if before - after != cost + taken_over {
                return Err(format!("pin cost said {cost}, {} went", before - after));
            }
            hash = hashes[blocks - 1];
        }
        self.seqs.push(Sequence { tenant, hash, cursor: leaf, unpublished: VecDeque::new(), duplicates: Vec::new() });
        Ok(())
    }

    fn publish(&mut self, at: usize) -> Outcome {
        let seq = &self.seqs[at];
        let Some(&(block, token)) = seq.unpublished.front() else { return Ok(()) };
        let (tenant, cursor) = (seq.tenant, seq.cursor);
        let hash = self.extend(tenant, seq.hash, token);
        let namespace = self.tenants[tenant].root();
        let known = self.model.by_hash.get(&hash).copied();
        let got = self.pool.publish(block, hash, cursor, namespace).map_err(|e| e.to_string())?;
        let want = self.model.publish(block, hash, cursor, namespace, Owner::Sequence);
        if (got.cursor, got.duplicate) != (want, known.is_some()) {
            return Err(format!("published {got:?}, want cursor {want:?}"));
        }
        let seq = &mut self.seqs[at];
        seq.unpublished.pop_front();
        if got.duplicate {
            seq.duplicates.push(block);
        }
        (seq.cursor, seq.hash) = (got.cursor, hash);
        Ok(())
    }

    fn finish(&mut self, at: usize, fence: u8) -> Outcome {
        let seq = self.seqs.swap_remove(at);
        let fence = self.fence(fence);
        if !seq.cursor.is_null() {
            self.release(seq.cursor, Owner::Sequence, fence)?;
        }
        for block in seq.duplicates.into_iter().chain(seq.unpublished.into_iter().map(|u| u.0)) {
            self.release(block, Owner::Sequence, fence)?;
        }
        Ok(())
    }

    fn load(&mut self, tenant: usize, tokens: &[u32]) -> Outcome {
        let mut cursor = Block::NULL;
        let namespace = self.tenants[tenant].root();
        for hash in self.chain(tenant, tokens) {
            let Some(block) = self.alloc(Owner::Transfer)? else { break };
            let got = self.pool.publish(block, hash, cursor, namespace).map_err(|e| e.to_string())?;
            cursor = self.model.publish(block, hash, cursor, namespace, Owner::Transfer);
            if got.cursor != cursor {
                return Err(format!("transfer published {got:?}, want {cursor:?}"));
            }
            if got.duplicate {
                self.leases.push(block);
            }
        }
        if !cursor.is_null() {
            self.leases.push(cursor);
        }
        Ok(())
    }

    /// Calls that must be refused when the model says so, and change nothing.
    fn misuse(&mut self, block: Block, other: Block, what: u8) -> Outcome {
        let indexed = self.model.indexed.contains_key(&block);
        let private = self.model.private.contains(&block);
        let owner = if what.is_multiple_of(2) { Owner::Sequence } else { Owner::Transfer };
        let stale = Fence::Transfer(TransferId { index: 0, generation: u32::MAX });
        let refused = self.pool.stats().misuse;
        let result = match what {
            0 | 1 if !(indexed && self.model.has_holder(block, owner)) => self.pool.unpin(block, owner, Fence::Open),
            2 | 3 if !(private && self.model.has_holder(block, owner)) => {
                self.pool.release_private(block, owner, Fence::Open)
            }
            4 if !private => self.pool.publish(block, BlockHash(77), other, BlockHash(1)).map(|_| ()),
            4 if !other.is_null() && !self.model.indexed.contains_key(&other) => {
                self.pool.publish(block, BlockHash(77), other, BlockHash(1)).map(|_| ())
            }
            5 if indexed => self.pool.unpin(block, owner, stale),
            5 if private => self.pool.release_private(block, owner, stale),
            5 => self.pool.pin_chain(block, owner, &mut Vec::new()).map(|_| ()),
            _ => return Ok(()),
        };
        if result.is_ok() || self.pool.stats().misuse != refused + 1 {
            return Err(format!("misuse {what} of {block:?} and {other:?} was not refused and counted"));
        }
        Ok(())
    }

    fn drain(&mut self) -> Outcome {
        let mut events = Vec::new();
        self.pool.drain_events(&mut events);
        self.replica.apply(&events)?;
        self.replica.equals(&self.model)
    }

    fn apply(&mut self, op: &Op) -> Outcome {
        let pick = |n: usize, len: usize| (len > 0).then(|| n % len);
        match *op {
            Op::Start { tenant, ref tokens } if self.seqs.len() < 8 => self.start(tenant, tokens),
            Op::Fork { seq } if self.seqs.len() < 8 => {
                let Some(at) = pick(seq, self.seqs.len()) else { return Ok(()) };
                let Sequence { tenant, hash, cursor, .. } = self.seqs[at];
                if !cursor.is_null() {
                    self.pool.pin(cursor, Owner::Sequence).map_err(|e| e.to_string())?;
                    self.model.add_holder(cursor, Owner::Sequence);
                }
                let (unpublished, duplicates) = (VecDeque::new(), Vec::new());
                self.seqs.push(Sequence { tenant, hash, cursor, unpublished, duplicates });
                Ok(())
            }
            Op::Grow { seq, token, blocks } => {
                let Some(at) = pick(seq, self.seqs.len()) else { return Ok(()) };
                let mut got = Vec::new();
                if blocks == 3 {
                    let possible = self.model.available(self.now) >= blocks;
                    if self.pool.alloc_many(self.now, Owner::Sequence, blocks, &mut got) != possible {
                        return Err("alloc_many disagrees with what is available".into());
                    }
                    if got.len() != if possible { 3 } else { 0 } {
                        return Err(format!("alloc_many gave {} blocks", got.len()));
                    }
                    for &block in &got {
                        self.model.alloc(self.now, Owner::Sequence, Some(block))?;
                    }
                } else {
                    got.extend(self.alloc(Owner::Sequence)?);
                }
                self.seqs[at].unpublished.extend(got.into_iter().map(|b| (b, token)));
                Ok(())
            }
            Op::Publish { seq } => pick(seq, self.seqs.len()).map_or(Ok(()), |at| self.publish(at)),
            Op::Finish { seq, fence } => pick(seq, self.seqs.len()).map_or(Ok(()), |at| self.finish(at, fence)),
            Op::Save { seq, private } => {
                let Some(at) = pick(seq, self.seqs.len()) else { return Ok(()) };
                let seq = &self.seqs[at];
                let block = if private { seq.unpublished.back().map_or(seq.cursor, |u| u.0) } else { seq.cursor };
                if !block.is_null() {
                    self.pool.pin(block, Owner::Transfer).map_err(|e| e.to_string())?;
                    self.model.add_holder(block, Owner::Transfer);
                    self.leases.push(block);
                }
                Ok(())
            }
            Op::Load { tenant, ref tokens } if self.leases.len() < 6 => self.load(tenant, tokens),
            Op::DropLease { lease, fence } => {
                let Some(at) = pick(lease, self.leases.len()) else { return Ok(()) };
                let block = self.leases.swap_remove(at);
                self.release(block, Owner::Transfer, self.fence(fence))
            }
            Op::OpenTransfer => {
                self.next_transfer += 1;
                let id = TransferId { index: self.next_transfer % 3, generation: self.next_transfer };
                self.model.open_transfers.push(id);
                if !self.pool.open_transfer(id) || self.pool.open_transfer(id) {
                    return Err("a transfer opens once".into());
                }
                Ok(())
            }
            Op::CloseTransfer { which } => {
                let Some(at) = pick(which, self.model.open_transfers.len()) else { return Ok(()) };
                let id = self.model.open_transfers[at];
                self.model.close_transfer(id);
                if !self.pool.close_transfer(id) || self.pool.close_transfer(id) {
                    return Err("a transfer closes once".into());
                }
                Ok(())
            }
            Op::Advance => {
                self.now.0 += 1;
                Ok(())
            }
            Op::Retire => {
                self.pool.retire(self.now);
                self.model.retire(self.now);
                Ok(())
            }
            Op::Find { tenant, ref tokens } => self.find(tenant, tokens).map(|_| ()),
            Op::SetPart { block, present } => {
                let indexed = self.model.indexed.contains_key(&Block(block));
                let done = self.pool.set_part(Block(block), Part::StateSlice, Tier::Host, present).is_ok();
                if done != indexed
                    || self.pool.parts(Block(block)).has(Part::StateSlice, Tier::Host) != (done && present)
                {
                    return Err(format!("set_part of block {block}: {done}"));
                }
                Ok(())
            }
            Op::Misuse { block, other, what } => self.misuse(Block(block), Block(other), what),
            Op::Drain => self.drain(),
            Op::Clear => {
                let (got, want) = (self.pool.clear_cached(self.now), self.model.clear_cached(self.now));
                if got == want { Ok(()) } else { Err(format!("cleared {got} blocks, want {want}")) }
            }
            _ => Ok(()),
        }
    }

    /// Nothing is both writable and matchable.
    fn no_private_block_is_matchable(&self) -> Outcome {
        let private =
            self.seqs.iter().flat_map(|s| s.duplicates.iter().copied().chain(s.unpublished.iter().map(|u| u.0)));
        match private.into_iter().find(|&b| self.pool.hash(b).is_some()) {
            Some(block) => Err(format!("{block:?} is private and in the index")),
            None => Ok(()),
        }
    }

    /// Ends everything; the pool must be as it was at the start.
    fn wind_down(&mut self) -> Outcome {
        while let Some(block) = self.leases.pop() {
            self.release(block, Owner::Transfer, Fence::Open)?;
        }
        while !self.seqs.is_empty() {
            self.finish(0, 3)?;
        }
        while let Some(&id) = self.model.open_transfers.first() {
            self.pool.close_transfer(id);
            self.model.close_transfer(id);
        }
        self.now.0 += 1;
        self.pool.clear_cached(self.now);
        self.model.clear_cached(self.now);
        self.model.compare(&self.pool, self.now)?;
        self.drain()?;
        for group in 0..self.pool.groups() {
            let counts = self.pool.counts(group);
            if counts.free != counts.total - 1 {
                return Err(format!("group {group} did not return to its start: {counts:?}"));
            }
        }
        Ok(())
    }
}

/// Histories and calls in each: over 10⁵ calls in the default run.
const CASES: u32 = 80;
const CALLS: std::ops::Range<usize> = 1300..1500;

fn run(blocks: u32, shape: usize, event_capacity: usize, ops: &[Op]) -> Result<PoolStats, String> {
    let roomy = Further { total: blocks * 2, per_block: 2 };
    let tight = Further { total: blocks / 2 * 3 + 2, per_block: 3 };
    let further = [vec![], vec![roomy], vec![roomy, tight]][shape].clone();
    let mut world = World::new(blocks, &further, event_capacity);
    for (number, op) in ops.iter().enumerate() {
        world
            .apply(op)
            .and_then(|()| world.model.compare(&world.pool, world.now))
            .and_then(|()| world.no_private_block_is_matchable())
            .map_err(|why| format!("call {number}, {op:?}: {why}"))?;
    }
    world.wind_down().map_err(|why| format!("at the end: {why}"))?;
    Ok(world.pool.stats())
}

#[test]
fn pool_agrees_with_the_naive_model_after_every_call() {
    let config =
        ProptestConfig { cases: CASES, failure_persistence: None, max_shrink_iters: 4000, ..Default::default() };
    let history = (8..28u32, 0..3usize, prop_oneof![Just(4usize), Just(256)], prop::collection::vec(op(), CALLS));
    let calls = Cell::new(0);
    let seen = Cell::new(PoolStats::default());
    TestRunner::new(config)
        .run(&history, |(blocks, shape, event_capacity, ops)| {
            let stats = run(blocks, shape, event_capacity, &ops).map_err(TestCaseError::fail)?;
            calls.set(calls.get() + ops.len());
            let mut sum = seen.get();
            sum.published += stats.published;
            sum.duplicates += stats.duplicates;
            sum.evicted += stats.evicted;
            sum.misuse += stats.misuse;
            sum.events_lost += stats.events_lost;
            seen.set(sum);
            Ok(())
        })
        .unwrap();
    // The histories must reach what they are for.
    let (calls, seen) = (calls.get(), seen.get());
    assert!(calls >= 100_000, "only {calls} calls");
    assert!(seen.published > 5000 && seen.evicted > 2000 && seen.duplicates > 1000, "{seen:?}");
    assert!(seen.misuse > 1000 && seen.events_lost > 100, "{seen:?}");
}
