//! Naive model of the pool: everything is recomputed from the list of holders.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use deepinfer_kvindex::{Block, BlockHash, BlockPool, Event, Fence, Owner, StepId, TransferId};

/// What an indexed block is, by the model.
#[derive(Clone, Copy, Debug)]
pub struct Indexed {
    pub hash: BlockHash,
    pub parent: Block,
    pub namespace: BlockHash,
}

/// A page group after the first.
#[derive(Clone, Copy, Debug)]
pub struct Further {
    pub total: u32,
    pub per_block: u32,
}

#[derive(Debug)]
pub struct Model {
    pub blocks: u32,
    pub further: Vec<Further>,
    pub free: BTreeSet<Block>,
    /// Oldest first, with the step of the fence (0: open).
    pub cached: Vec<(Block, u64)>,
    pub parked: Vec<(Block, u64)>,
    pub private: BTreeSet<Block>,
    pub indexed: BTreeMap<Block, Indexed>,
    pub by_hash: HashMap<BlockHash, Block>,
    /// Every reference, one entry each.
    pub holders: Vec<(Block, Owner)>,
    /// References released behind a transfer that is still open.
    pub handed: Vec<(TransferId, Block)>,
    pub open_transfers: Vec<TransferId>,
    last_fence: u64,
    opened: u64,
}

impl Model {
    pub fn new(blocks: u32, further: Vec<Further>) -> Self {
        Self {
            blocks,
            further,
            free: (1..blocks).map(Block).collect(),
            cached: Vec::new(),
            parked: Vec::new(),
            private: BTreeSet::new(),
            indexed: BTreeMap::new(),
            by_hash: HashMap::new(),
            holders: Vec::new(),
            handed: Vec::new(),
            open_transfers: Vec::new(),
            last_fence: 0,
            opened: 1,
        }
    }

    /// All references of one kind, handed ones included.
    fn references(&self, owner: Owner) -> Vec<Block> {
        let own = self.holders.iter().filter(|h| h.1 == owner).map(|h| h.0);
        let handed = self.handed.iter().filter(|_| owner == Owner::Transfer).map(|h| h.1);
        own.chain(handed).collect()
    }

    /// Blocks that carry a reference of that kind, and their whole prefixes.
    pub fn held_by(&self, owner: Owner) -> BTreeSet<Block> {
        let mut held = BTreeSet::new();
        for mut at in self.references(owner) {
            while !at.is_null() && held.insert(at) {
                at = self.indexed.get(&at).map_or(Block::NULL, |i| i.parent);
            }
        }
        held
    }

    pub fn held(&self) -> BTreeSet<Block> {
        &self.held_by(Owner::Sequence) | &self.held_by(Owner::Transfer)
    }

    /// Pins by definition: references plus children that the kind holds.
    pub fn pins(&self, block: Block) -> [u32; 2] {
        [Owner::Sequence, Owner::Transfer].map(|owner| {
            let direct = self.references(owner).iter().filter(|&&b| b == block).count();
            let held = self.held_by(owner);
            let children = self.indexed.iter().filter(|(b, i)| i.parent == block && held.contains(b)).count();
            (direct + children) as u32
        })
    }

    fn depth(&self, block: Block) -> usize {
        let (mut depth, mut at) = (0, block);
        while let Some(i) = self.indexed.get(&at) {
            depth += 1;
            at = i.parent;
        }
        depth
    }

    fn used(&self) -> u32 {
        (self.cached.len() + self.parked.len() + self.held().len()) as u32
    }

    pub fn free_blocks(&self) -> u32 {
        let used = self.used();
        self.further.iter().map(|g| (g.total - 1) / g.per_block - used).fold(self.free.len() as u32, u32::min)
    }

    fn is_open(&self, fence: u64, now: StepId) -> bool {
        fence == 0 || fence < self.opened.max(now.0)
    }

    pub fn available(&self, now: StepId) -> u32 {
        let open = |list: &[(Block, u64)]| list.iter().filter(|e| self.is_open(e.1, now)).count() as u32;
        self.free_blocks() + open(&self.cached) + open(&self.parked)
    }

    pub fn held_by_transfers_only(&self) -> u32 {
        self.held_by(Owner::Transfer).difference(&self.held_by(Owner::Sequence)).count() as u32
    }

    pub fn coming_back(&self, now: StepId) -> u32 {
        let closed = |list: &[(Block, u64)]| list.iter().filter(|e| !self.is_open(e.1, now)).count() as u32;
        closed(&self.cached) + closed(&self.parked) + self.held_by_transfers_only()
    }

    /// Blocks that stopped being held go to the end of the eviction order, deepest first, or are parked.
    fn settle(&mut self, before: &BTreeSet<Block>) {
        let after = self.held();
        let fence = if self.last_fence < self.opened { 0 } else { self.last_fence };
        let mut dropped: Vec<_> = before.difference(&after).copied().collect();
        dropped.sort_by_key(|&b| std::cmp::Reverse(self.depth(b)));
        for block in dropped {
            if self.indexed.contains_key(&block) {
                self.cached.push((block, fence));
            } else {
                self.private.remove(&block);
                if fence == 0 {
                    self.free.insert(block);
                } else {
                    self.parked.push((block, fence));
                }
            }
        }
        self.cached.retain(|e| !after.contains(&e.0));
    }

    pub fn retire(&mut self, now: StepId) {
        self.opened = self.opened.max(now.0);
        let opened = self.opened;
        for entry in &mut self.cached {
            if entry.1 < opened {
                entry.1 = 0;
            }
        }
        let (open, closed) = self.parked.iter().partition(|e| e.1 < opened);
        self.parked = closed;
        let open: Vec<(Block, u64)> = open;
        self.free.extend(open.iter().map(|e| e.0));
    }

    fn forget(&mut self, block: Block) {
        if let Some(i) = self.indexed.remove(&block) {
            self.by_hash.remove(&i.hash);
        }
    }

    /// Follows an allocation; says what was wrong with it.
    pub fn alloc(&mut self, now: StepId, owner: Owner, got: Option<Block>) -> Result<(), String> {
        self.retire(now);
        let possible = self.available(now) > 0;
        match got {
            None if possible => return Err("alloc refused although something is available".into()),
            None => return Ok(()),
            Some(_) if !possible => return Err("alloc succeeded although nothing is available".into()),
            Some(block) if self.free_blocks() > 0 => {
                if !self.free.remove(&block) {
                    return Err(format!("{block:?} is not free"));
                }
            }
            Some(block) => {
                let oldest = self.cached.first().filter(|e| e.1 == 0).map(|e| e.0);
                if oldest != Some(block) {
                    return Err(format!("evicted {block:?}, the oldest is {oldest:?}"));
                }
                if let Some((child, _)) = self.indexed.iter().find(|(_, i)| i.parent == block) {
                    return Err(format!("evicted {block:?}, whose child {child:?} is indexed"));
                }
                self.cached.remove(0);
                self.forget(block);
            }
        }
        if let Some(block) = got {
            self.private.insert(block);
            self.holders.push((block, owner));
        }
        Ok(())
    }

    pub fn add_holder(&mut self, block: Block, owner: Owner) {
        self.holders.push((block, owner));
        let held = self.held();
        self.cached.retain(|e| !held.contains(&e.0));
    }

    pub fn has_holder(&self, block: Block, owner: Owner) -> bool {
        self.holders.contains(&(block, owner)) || (owner == Owner::Transfer && self.handed.iter().any(|h| h.1 == block))
    }

    fn take_holder(&mut self, block: Block, owner: Owner) {
        if let Some(at) = self.holders.iter().position(|&h| h == (block, owner)) {
            self.holders.swap_remove(at);
        }
    }

    pub fn release(&mut self, block: Block, owner: Owner, fence: Fence) {
        let before = self.held();
        self.take_holder(block, owner);
        match fence {
            Fence::Open => {}
            Fence::Step(step) => self.last_fence = self.last_fence.max(step.0),
            Fence::Transfer(id) => self.handed.push((id, block)),
        }
        self.settle(&before);
    }

    pub fn close_transfer(&mut self, id: TransferId) {
        self.open_transfers.retain(|&t| t != id);
        // One at a time, in the order in which they were handed over, as the eviction order depends on it.
        while let Some(at) = self.handed.iter().position(|h| h.0 == id) {
            let before = self.held();
            self.handed.remove(at);
            self.settle(&before);
        }
    }

    pub fn publish(
        &mut self,
        block: Block,
        hash: BlockHash,
        cursor: Block,
        namespace: BlockHash,
        owner: Owner,
    ) -> Block {
        if let Some(&other) = self.by_hash.get(&hash) {
            self.take_holder(cursor, owner);
            self.add_holder(other, owner);
            return other;
        }
        self.private.remove(&block);
        self.indexed.insert(block, Indexed { hash, parent: cursor, namespace });
        self.by_hash.insert(hash, block);
        self.take_holder(cursor, owner);
        block
    }

    pub fn clear_cached(&mut self, now: StepId) -> u32 {
        self.retire(now);
        let open: Vec<_> = self.cached.iter().filter(|e| e.1 == 0).map(|e| e.0).collect();
        self.cached.retain(|e| e.1 != 0);
        for &block in &open {
            self.forget(block);
            self.free.insert(block);
        }
        open.len() as u32
    }

    pub fn linear_scan(&self, hashes: &[BlockHash]) -> usize {
        hashes.iter().take_while(|h| self.by_hash.contains_key(h)).count()
    }

    /// Compares everything the pool tells with the model, and runs the pool's own recount.
    pub fn compare(&self, pool: &BlockPool, now: StepId) -> Result<(), String> {
        pool.check_holders(self.holders.iter().copied())?;
        let used = self.held().len() as u32;
        for group in 0..=self.further.len() {
            let counts = pool.counts(group);
            if !counts.adds_up() {
                return Err(format!("group {group}: {counts:?} does not add up"));
            }
            let per = if group == 0 { 1 } else { self.further[group - 1].per_block };
            let want = (self.cached.len() as u32 * per, used * per, self.parked.len() as u32 * per, 1);
            let got = (counts.cached, counts.held, counts.parked, counts.reserved);
            if want != got {
                return Err(format!("group {group}: (cached, held, parked, reserved) is {got:?}, want {want:?}"));
            }
            if counts.held_by_transfers != self.held_by_transfers_only() * per {
                return Err(format!("group {group}: held_by_transfers is {}", counts.held_by_transfers));
            }
        }
        let counts = pool.counts(0);
        let want = [Owner::Sequence, Owner::Transfer].map(|o| self.references(o).len() as u64);
        if [counts.sequence_refs, counts.transfer_refs] != want {
            return Err(format!("references by owner: {counts:?}, want {want:?}"));
        }
        for at in [now, StepId(now.0 + 2)] {
            let got = (pool.available(at), pool.coming_back(at));
            let want = (self.available(at), self.coming_back(at));
            if got != want {
                return Err(format!("(available, coming back) at {at:?} is {got:?}, want {want:?}"));
            }
        }
        for id in 1..self.blocks {
            let block = Block(id);
            let hash = self.indexed.get(&block).map_or(BlockHash::NONE, |i| i.hash);
            if pool.hash(block) != hash {
                return Err(format!("{block:?} has hash {:?}, want {hash:?}", pool.hash(block)));
            }
            if pool.pins(block) != self.pins(block) {
                return Err(format!("{block:?} has pins {:?}, want {:?}", pool.pins(block), self.pins(block)));
            }
        }
        Ok(())
    }
}

/// A replica of the index, fed by the event log alone.
#[derive(Debug, Default)]
pub struct Replica {
    pub stored: HashMap<BlockHash, (BlockHash, BlockHash)>,
}

impl Replica {
    pub fn apply(&mut self, events: &[Event]) -> Result<(), String> {
        for &event in events {
            match event {
                Event::Reset { lost } => {
                    if lost == 0 {
                        return Err("reset without loss".into());
                    }
                    self.stored.clear();
                }
                Event::Stored { hash, parent, namespace } => {
                    if parent != namespace && !self.stored.contains_key(&parent) {
                        return Err(format!("{hash:?} stored before its parent"));
                    }
                    if self.stored.insert(hash, (parent, namespace)).is_some() {
                        return Err(format!("{hash:?} stored twice"));
                    }
                }
                Event::Removed { hash, parent, namespace } => {
                    if self.stored.remove(&hash) != Some((parent, namespace)) {
                        return Err(format!("{hash:?} removed but not stored so"));
                    }
                }
            }
        }
        Ok(())
    }

    pub fn equals(&self, model: &Model) -> Result<(), String> {
        if self.stored.len() != model.indexed.len() {
            return Err(format!("replica has {} entries, the index {}", self.stored.len(), model.indexed.len()));
        }
        for i in model.indexed.values() {
            let parent = model.indexed.get(&i.parent).map_or(i.namespace, |p| p.hash);
            if self.stored.get(&i.hash) != Some(&(parent, i.namespace)) {
                return Err(format!("replica disagrees about {:?}", i.hash));
            }
        }
        Ok(())
    }
}
