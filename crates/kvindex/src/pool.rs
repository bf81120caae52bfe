//! Block pool and prefix index: who holds which block, what is matchable, what may be reused.

use crate::cached::CachedQueue;
use crate::counts::{Counts, PoolStats};
use crate::error::PoolError;
use crate::events::{Event, EventLog};
use crate::ids::{Block, BlockHash, Fence, Owner, StepId, TransferId};
use crate::index::PrefixIndex;
use crate::node::Node;
use crate::pages::PageGroup;
use crate::parked::Parked;
use crate::parts::{Part, PartSet, Tier};

/// One paged group as the pool sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolGroup {
    /// Pages, the null page included.
    pub num_pages: u32,
    /// Pages that a block owns in this group; 1 for group 0, whose pages are the blocks.
    pub pages_per_block: u32,
}

/// What a pool is made from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolConfig {
    /// Paged groups; group 0 is the hash block.
    pub groups: Vec<PoolGroup>,
    /// False: `publish` leaves every block private and nothing ever matches.
    pub prefix_caching: bool,
    /// Events kept between two drains; 0 turns the log off.
    pub event_capacity: usize,
}

/// Result of [`BlockPool::find_prefix`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hit {
    /// Length of the longest indexed prefix, in blocks.
    pub blocks: usize,
    /// Its last block; null if there is none.
    pub leaf: Block,
}

/// Result of [`BlockPool::publish`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Published {
    /// The chain's new cursor, on which the reference now lies.
    pub cursor: Block,
    /// The block stays private and its holder's: the hash was indexed already, or nothing is cached. Its holder keeps
    /// using it and drops it with `release_private`.
    pub duplicate: bool,
}

/// A transfer that fences may name, with the references handed to it.
#[derive(Debug)]
pub(crate) struct OpenTransfer {
    pub(crate) id: TransferId,
    pub(crate) handed: Vec<Block>,
}

/// Pool of blocks. Rules:
///
/// - A reference on a block pins its whole prefix: raising a block's pins from zero raises its parent's, and lowering
///   mirrors it. Sequences and transfers are counted apart.
/// - A released prefix is queued leaf first, so the oldest cached block never has an indexed child, and what is indexed is
///   closed under prefixes.
/// - Fences never go back: a release opens no earlier than any released before it, so a block shared by several holders
///   waits for the latest step that any of them named. `now` in every call is the step being planned (or, on a device that
///   does not run steps in order, one past the last completed); `Step(n)` is open when `n < now`.
/// - A release behind a transfer hands the reference to that transfer: the block stays held until the transfer closes.
/// - Copy on write: a writer that shares a private block ([`BlockPool::is_shared`]) allocates another, has the device copy the
///   content, and drops its reference on the shared one. Indexed blocks are full and never written.
/// - An error changes nothing.
#[derive(Debug)]
pub struct BlockPool {
    pub(crate) nodes: Box<[Node]>,
    /// Direct references by owner kind; what tells a double release from the release of a child's pin.
    pub(crate) refs: Box<[[u32; 2]]>,
    pub(crate) parts: Box<[PartSet]>,
    /// Salt namespace of each block; empty unless events are on.
    pub(crate) namespaces: Box<[BlockHash]>,
    pub(crate) index: PrefixIndex,
    pub(crate) cached: CachedQueue,
    pub(crate) parked: Parked,
    pub(crate) free_head: Block,
    pub(crate) free: u32,
    pub(crate) held: u32,
    pub(crate) held_by_transfers: u32,
    pub(crate) ref_totals: [u64; 2],
    pub(crate) further: Box<[PageGroup]>,
    pub(crate) transfers: Vec<OpenTransfer>,
    events: Option<EventLog>,
    prefix_caching: bool,
    /// Newest step that any release named.
    last_fence: u64,
    /// Steps below this are open.
    opened: u64,
    stats: PoolStats,
}

impl BlockPool {
    /// Takes all memory the pool will use on its steady paths.
    ///
    /// # Errors
    /// [`PoolError::Config`] if a group cannot hold one block beside the null page.
    pub fn new(config: &PoolConfig) -> Result<Self, PoolError> {
        let Some((first, further)) = config.groups.split_first() else {
            return Err(PoolError::Config("declare at least one paged group"));
        };
        if first.pages_per_block != 1 {
            return Err(PoolError::Config("group 0 is the hash block: its pages_per_block must be 1"));
        }
        if config.groups.iter().any(|g| g.pages_per_block == 0) {
            return Err(PoolError::Config("pages_per_block must be at least 1"));
        }
        if config.groups.iter().any(|g| g.num_pages <= g.pages_per_block) {
            return Err(PoolError::Config("num_pages must hold the null page and the pages of one block"));
        }
        if first.num_pages >= i32::MAX as u32 {
            return Err(PoolError::Config("num_pages must be below 2^31 - 1"));
        }
        let count = first.num_pages as usize;
        let mut nodes = vec![Node::default(); count].into_boxed_slice();
        for (id, node) in nodes.iter_mut().enumerate().skip(1) {
            node.parent = Block(if id + 1 < count { id as u32 + 1 } else { 0 });
        }
        let events = (config.event_capacity > 0 && config.prefix_caching).then(|| EventLog::new(config.event_capacity));
        Ok(Self {
            nodes,
            refs: vec![[0; 2]; count].into_boxed_slice(),
            parts: vec![PartSet::EMPTY; count].into_boxed_slice(),
            namespaces: vec![BlockHash::NONE; if events.is_some() { count } else { 0 }].into_boxed_slice(),
            index: PrefixIndex::new(if config.prefix_caching { count } else { 0 }),
            cached: CachedQueue::new(count),
            parked: Parked::new(),
            free_head: Block(1),
            free: first.num_pages - 1,
            held: 0,
            held_by_transfers: 0,
            ref_totals: [0; 2],
            further: further.iter().map(|g| PageGroup::new(first.num_pages, g.num_pages, g.pages_per_block)).collect(),
            transfers: Vec::new(),
            events,
            prefix_caching: config.prefix_caching,
            last_fence: 0,
            opened: 1,
            stats: PoolStats::default(),
        })
    }

    // ---- how much there is -------------------------------------------------------------------------------------------

    /// Blocks an empty pool can hand out, over all groups.
    pub fn capacity(&self) -> u32 {
        let further = self.further.iter().map(|g| (g.total - 1) / g.per_block).min().unwrap_or(u32::MAX);
        further.min(self.nodes.len() as u32 - 1)
    }

    /// Blocks that [`BlockPool::alloc`] can hand out now: free, plus cached and parked ones whose fence is open.
    #[inline]
    pub fn available(&self, now: StepId) -> u32 {
        self.free_blocks() + self.cached.open_at(now.0) + self.parked.open_at(now.0)
    }

    /// Blocks that will be available without taking anything from a sequence: behind a later step, or held by transfers
    /// only.
    #[inline]
    pub fn coming_back(&self, now: StepId) -> u32 {
        let cached = self.cached.len() - self.cached.open_at(now.0);
        cached + (self.parked.len() - self.parked.open_at(now.0)) + self.held_by_transfers
    }

    /// By how much taking a reference on `leaf` lowers what is available or coming back: the unreferenced blocks of its
    /// prefix. Lets admission be decided without disturbing the eviction order.
    pub fn pin_cost(&self, leaf: Block) -> u32 {
        let mut cost = 0;
        let mut at = leaf;
        while let Some(node) = self.nodes.get(at.index())
            && !at.is_null()
            && node.is_cached()
        {
            cost += 1;
            at = node.parent;
        }
        cost
    }

    /// States of the pages of a group (`pages_per_block` a block in groups after the first). All zero for a group that is
    /// not there.
    pub fn counts(&self, group: usize) -> Counts {
        let (per_block, total, free) = if group == 0 {
            (1, self.nodes.len() as u32, self.free)
        } else if let Some(g) = self.further.get(group - 1) {
            (g.per_block, g.total, g.free.len() as u32)
        } else {
            return Counts::default();
        };
        Counts {
            total,
            free,
            cached: self.cached.len() * per_block,
            held: self.held * per_block,
            parked: self.parked.len() * per_block,
            reserved: 1,
            held_by_transfers: self.held_by_transfers * per_block,
            cached_fenced: self.cached.fenced() * per_block,
            sequence_refs: self.ref_totals[0],
            transfer_refs: self.ref_totals[1],
        }
    }

    /// Totals since the pool was made.
    pub fn stats(&self) -> PoolStats {
        self.stats
    }

    /// Number of paged groups.
    pub fn groups(&self) -> usize {
        1 + self.further.len()
    }

    // ---- taking -------------------------------------------------------------------------------------------------------

    /// A private block with one reference and its pages in every group; evicts the oldest leaf if nothing is free. `None`
    /// exactly when [`BlockPool::available`] is 0.
    pub fn alloc(&mut self, now: StepId, owner: Owner) -> Option<Block> {
        self.retire(now);
        let block = if self.free_blocks() > 0 {
            let block = self.free_head;
            self.free_head = self.nodes[block.index()].parent;
            self.free -= 1;
            for group in &mut self.further {
                group.take(block);
            }
            block
        } else {
            let block = self.cached.pop(&self.nodes)?;
            self.unindex(block);
            self.stats.evicted += 1;
            block
        };
        self.nodes[block.index()].parent = Block::NULL;
        self.held += 1;
        self.raise_private(block, owner);
        Some(block)
    }

    /// All or nothing: appends `count` blocks to `out`, or returns false and changes nothing.
    pub fn alloc_many(&mut self, now: StepId, owner: Owner, count: u32, out: &mut Vec<Block>) -> bool {
        if self.available(now) < count {
            return false;
        }
        out.extend((0..count).map_while(|_| self.alloc(now, owner)));
        true
    }

    /// Longest indexed prefix of a chain of hashes. Takes no reference.
    #[inline]
    pub fn find_prefix(&self, hashes: &[BlockHash]) -> Hit {
        let (blocks, leaf) = self.index.longest_prefix(&self.nodes, hashes);
        Hit { blocks, leaf }
    }

    /// The indexed block with this hash.
    pub fn find(&self, hash: BlockHash) -> Option<Block> {
        self.index.find(&self.nodes, hash)
    }

    /// Takes a reference on an indexed block and appends its prefix to `out`, first block first. Returns the length.
    ///
    /// # Errors
    /// [`PoolError::BadBlock`], [`PoolError::NotIndexed`].
    pub fn pin_chain(&mut self, leaf: Block, owner: Owner, out: &mut Vec<Block>) -> Result<usize, PoolError> {
        self.indexed(leaf)?;
        let start = out.len();
        self.refs[leaf.index()][owner.slot()] += 1;
        self.ref_totals[owner.slot()] += 1;
        let kind = owner.slot();
        let mut at = leaf;
        // Counters of blocks that were cached stay in registers over the walk; most of a cold prefix is.
        let mut left_cached = 0;
        loop {
            out.push(at);
            let node = &mut self.nodes[at.index()];
            let before = node.pins;
            node.pins[kind] += 1;
            let (parent, stamp) = (node.parent, node.stamp);
            if before == [0, 0] {
                self.cached.leave(stamp);
                left_cached += 1;
            } else if before[kind] == 0 {
                self.mixed_raised(owner);
            }
            at = parent;
            if at.is_null() || before[kind] != 0 {
                break;
            }
        }
        self.held += left_cached;
        if owner == Owner::Transfer {
            self.held_by_transfers += left_cached;
        }
        while !at.is_null() {
            out.push(at);
            at = self.nodes[at.index()].parent;
        }
        out[start..].reverse();
        Ok(out.len() - start)
    }

    /// Takes another reference on a block that is indexed, or private and held.
    ///
    /// # Errors
    /// [`PoolError::BadBlock`]; [`PoolError::NotHeld`] for a block that is free or parked.
    pub fn pin(&mut self, block: Block, owner: Owner) -> Result<(), PoolError> {
        let node = self.node(block)?;
        if !node.hash.is_some() && !node.is_held() {
            return Err(self.misuse(PoolError::NotHeld(block)));
        }
        self.add_ref(block, owner);
        Ok(())
    }

    // ---- publishing ---------------------------------------------------------------------------------------------------

    /// Makes a private block matchable. Call it only once the step that filled the block has completed.
    ///
    /// `cursor` is the deepest published block of the holder's chain (null: none yet), on which the holder has a reference;
    /// that reference moves to the new cursor. `namespace` is [`crate::ChainHasher::root`] of the chain. If the hash is
    /// indexed already the block stays private, a duplicate, and the cursor moves to the indexed one.
    ///
    /// # Errors
    /// [`PoolError::BadBlock`], [`PoolError::ZeroHash`], [`PoolError::NotHeld`], [`PoolError::NotPrivate`],
    /// [`PoolError::BadCursor`], [`PoolError::ParentMismatch`].
    pub fn publish(
        &mut self,
        block: Block,
        hash: BlockHash,
        cursor: Block,
        namespace: BlockHash,
    ) -> Result<Published, PoolError> {
        let node = self.node(block)?;
        if !hash.is_some() {
            return Err(self.misuse(PoolError::ZeroHash));
        }
        if node.hash.is_some() {
            return Err(self.misuse(PoolError::NotPrivate(block)));
        }
        let owner = match self.refs[block.index()] {
            [0, 0] => return Err(self.misuse(PoolError::NotHeld(block))),
            [0, _] => Owner::Transfer,
            _ => Owner::Sequence,
        };
        if !self.prefix_caching {
            return Ok(Published { cursor, duplicate: true });
        }
        let kind = owner.slot();
        let cursor_held = cursor.is_null()
            || (cursor != block
                && self.nodes.get(cursor.index()).is_some_and(|n| n.hash.is_some())
                && self.refs[cursor.index()][kind] > 0);
        if !cursor_held {
            return Err(self.misuse(PoolError::BadCursor(cursor)));
        }
        if let Some(other) = self.index.find(&self.nodes, hash) {
            return self.publish_duplicate(other, cursor, owner);
        }

        // The holder's reference on the cursor becomes the new child's pin: the cursor's pins do not change.
        if !cursor.is_null() {
            self.refs[cursor.index()][kind] -= 1;
            self.ref_totals[kind] -= 1;
        }
        let node = &mut self.nodes[block.index()];
        node.hash = hash;
        node.parent = cursor;
        let mixed = node.pins[1 - kind] > 0;
        self.parts[block.index()] = PartSet::PUBLISHED;
        self.index.insert(&self.nodes, block);
        if mixed && !cursor.is_null() {
            self.raise(cursor, if kind == 0 { Owner::Transfer } else { Owner::Sequence });
        }
        self.stats.published += 1;
        if self.events.is_some() {
            self.namespaces[block.index()] = namespace;
            self.log(block, true);
        }
        Ok(Published { cursor: block, duplicate: false })
    }

    fn publish_duplicate(&mut self, other: Block, cursor: Block, owner: Owner) -> Result<Published, PoolError> {
        if self.nodes[other.index()].parent != cursor {
            return Err(self.misuse(PoolError::ParentMismatch(other)));
        }
        self.stats.duplicates += 1;
        self.add_ref(other, owner);
        if !cursor.is_null() {
            // `other` pins the cursor, so this never releases it.
            let kind = owner.slot();
            self.refs[cursor.index()][kind] -= 1;
            self.ref_totals[kind] -= 1;
            self.nodes[cursor.index()].pins[kind] -= 1;
        }
        Ok(Published { cursor: other, duplicate: true })
    }

    /// Notes that a part of an indexed block is, or is no longer, in a tier.
    ///
    /// # Errors
    /// [`PoolError::BadBlock`], [`PoolError::NotIndexed`].
    pub fn set_part(&mut self, block: Block, part: Part, tier: Tier, present: bool) -> Result<(), PoolError> {
        self.indexed(block)?;
        let parts = &mut self.parts[block.index()];
        *parts = parts.with(part, tier, present);
        Ok(())
    }

    /// Parts of an indexed block; empty for any other.
    pub fn parts(&self, block: Block) -> PartSet {
        self.parts.get(block.index()).copied().unwrap_or_default()
    }

    /// Shortens a hit to its deepest block that has `part` in some tier: the rule of models whose state does not page.
    pub fn shorten_to(&self, hit: Hit, part: Part) -> Hit {
        let Hit { mut blocks, mut leaf } = hit;
        while blocks > 0 && !leaf.is_null() && !self.parts(leaf).has_any(part) {
            leaf = self.parent(leaf);
            blocks -= 1;
        }
        if blocks == 0 || leaf.is_null() { Hit::default() } else { Hit { blocks, leaf } }
    }

    /// Shortens a hit to `blocks` blocks (cap of the prompt, tile rounding).
    pub fn truncate(&self, hit: Hit, blocks: usize) -> Hit {
        if blocks == 0 {
            return Hit::default();
        }
        let mut leaf = hit.leaf;
        for _ in blocks..hit.blocks {
            leaf = self.parent(leaf);
        }
        Hit { blocks: hit.blocks.min(blocks), leaf }
    }

    // ---- giving back --------------------------------------------------------------------------------------------------

    /// Drops one reference on an indexed block. Blocks of its prefix that nothing holds any more become cached, leaf first.
    ///
    /// # Errors
    /// [`PoolError::BadBlock`], [`PoolError::NotIndexed`], [`PoolError::NotHeld`], [`PoolError::UnknownTransfer`].
    pub fn unpin(&mut self, block: Block, owner: Owner, fence: Fence) -> Result<(), PoolError> {
        self.indexed(block)?;
        self.release(block, owner, fence)
    }

    /// Drops one reference on a private block. With the last one the block is parked, or free if its fence is open.
    ///
    /// # Errors
    /// [`PoolError::BadBlock`], [`PoolError::NotPrivate`], [`PoolError::NotHeld`], [`PoolError::UnknownTransfer`].
    pub fn release_private(&mut self, block: Block, owner: Owner, fence: Fence) -> Result<(), PoolError> {
        if self.node(block)?.hash.is_some() {
            return Err(self.misuse(PoolError::NotPrivate(block)));
        }
        self.release(block, owner, fence)
    }

    /// Opens fences up to `now`: parked blocks whose fence is open become free.
    #[inline]
    pub fn retire(&mut self, now: StepId) {
        if now.0 <= self.opened {
            return;
        }
        self.opened = now.0;
        self.cached.open_fences(now.0);
        while let Some(run) = self.parked.pop_open(now.0) {
            if !self.further.is_empty() {
                let mut at = run.first;
                while !at.is_null() {
                    for group in &mut self.further {
                        group.give_back(at);
                    }
                    at = self.nodes[at.index()].parent;
                }
            }
            self.nodes[run.last.index()].parent = self.free_head;
            self.free_head = run.first;
            self.free += run.blocks;
        }
    }

    /// Frees every cached block whose fence is open. Returns how many.
    pub fn clear_cached(&mut self, now: StepId) -> u32 {
        self.retire(now);
        let mut cleared = 0;
        while let Some(block) = self.cached.pop(&self.nodes) {
            self.unindex(block);
            self.free_block(block);
            cleared += 1;
        }
        cleared
    }

    // ---- transfers ----------------------------------------------------------------------------------------------------

    /// From now on fences may name this transfer. False if it is open already.
    pub fn open_transfer(&mut self, id: TransferId) -> bool {
        if self.transfers.iter().any(|t| t.id == id) {
            return false;
        }
        self.transfers.push(OpenTransfer { id, handed: Vec::new() });
        true
    }

    /// Drops every reference that was released behind the transfer. False, and no effect, if it is not open. References that
    /// the transfer took itself (`Owner::Transfer`) are its user's to drop.
    pub fn close_transfer(&mut self, id: TransferId) -> bool {
        let Some(at) = self.transfers.iter().position(|t| t.id == id) else {
            return false;
        };
        for block in self.transfers.swap_remove(at).handed {
            self.drop_ref(block, Owner::Transfer);
        }
        true
    }

    // ---- looking ------------------------------------------------------------------------------------------------------

    /// Page `j` of a block in a group; 0, the null page, for anything that is not there.
    #[inline]
    pub fn page(&self, group: usize, block: Block, j: usize) -> u32 {
        if group == 0 { block.0 } else { self.pages(group, block).get(j).copied().unwrap_or(0) }
    }

    /// Pages of a block in a group after the first; empty for anything that is not there.
    #[inline]
    pub fn pages(&self, group: usize, block: Block) -> &[u32] {
        match self.further.get(group.wrapping_sub(1)) {
            Some(g) if block.index() < self.nodes.len() => g.pages(block),
            _ => &[],
        }
    }

    /// Chain hash of an indexed block.
    #[inline]
    pub fn hash(&self, block: Block) -> BlockHash {
        self.nodes.get(block.index()).map_or(BlockHash::NONE, |n| n.hash)
    }

    /// Block before an indexed one; null for a first block and for anything not indexed.
    #[inline]
    pub fn parent(&self, block: Block) -> Block {
        match self.nodes.get(block.index()) {
            Some(n) if n.hash.is_some() => n.parent,
            _ => Block::NULL,
        }
    }

    /// True if more than one reference or child holds the block, so that nobody may write it.
    #[inline]
    pub fn is_shared(&self, block: Block) -> bool {
        self.nodes.get(block.index()).is_some_and(|n| n.pins[0] + n.pins[1] > 1)
    }

    /// References and pinned children of a block, by sequences and by transfers.
    pub fn pins(&self, block: Block) -> [u32; 2] {
        self.nodes.get(block.index()).map_or([0; 2], |n| n.pins)
    }

    /// Indexed blocks.
    pub fn indexed_blocks(&self) -> usize {
        self.index.len()
    }

    /// Moves the events since the last drain to `out`; see [`crate::Event`] for the replay rule.
    pub fn drain_events(&mut self, out: &mut Vec<Event>) {
        let Some(log) = &mut self.events else { return };
        if log.drain(out) > 0 {
            self.snapshot_events(out);
        }
    }

    /// Appends a `Stored` for everything that is indexed, parents first. Nothing unless events are on.
    pub fn snapshot_events(&self, out: &mut Vec<Event>) {
        if self.events.is_none() {
            return;
        }
        let mut seen = vec![false; self.nodes.len()];
        let mut path = Vec::new();
        for id in 1..self.nodes.len() as u32 {
            let mut at = Block(id);
            while !at.is_null()
                && self.nodes[at.index()].hash.is_some()
                && !std::mem::replace(&mut seen[at.index()], true)
            {
                path.push(at);
                at = self.nodes[at.index()].parent;
            }
            while let Some(block) = path.pop() {
                out.push(self.event(block, true));
            }
        }
    }

    // ---- inside -------------------------------------------------------------------------------------------------------

    /// Free blocks for which every group has pages.
    #[inline]
    fn free_blocks(&self) -> u32 {
        self.further.iter().map(PageGroup::blocks_free).fold(self.free, u32::min)
    }

    #[cold]
    fn misuse(&mut self, error: PoolError) -> PoolError {
        self.stats.misuse += 1;
        error
    }

    #[inline]
    fn node(&mut self, block: Block) -> Result<Node, PoolError> {
        match self.nodes.get(block.index()) {
            Some(node) if !block.is_null() => Ok(*node),
            _ => Err(self.misuse(PoolError::BadBlock(block))),
        }
    }

    #[inline]
    fn indexed(&mut self, block: Block) -> Result<(), PoolError> {
        if self.node(block)?.hash.is_some() { Ok(()) } else { Err(self.misuse(PoolError::NotIndexed(block))) }
    }

    #[inline]
    fn raise_private(&mut self, block: Block, owner: Owner) {
        let kind = owner.slot();
        self.refs[block.index()][kind] += 1;
        self.ref_totals[kind] += 1;
        self.nodes[block.index()].pins[kind] += 1;
        if owner == Owner::Transfer {
            self.held_by_transfers += 1;
        }
    }

    /// A block that only the other kind held is now held by `owner` too.
    #[inline]
    fn mixed_raised(&mut self, owner: Owner) {
        if owner == Owner::Sequence {
            self.held_by_transfers -= 1;
        }
    }

    fn add_ref(&mut self, block: Block, owner: Owner) {
        self.refs[block.index()][owner.slot()] += 1;
        self.ref_totals[owner.slot()] += 1;
        self.raise(block, owner);
    }

    /// One more holder of that kind: up the chain until a block already had one.
    fn raise(&mut self, block: Block, owner: Owner) {
        let kind = owner.slot();
        let mut at = block;
        while !at.is_null() {
            let node = &mut self.nodes[at.index()];
            let before = node.pins;
            node.pins[kind] += 1;
            let (parent, stamp) = (node.parent, node.stamp);
            if before[kind] != 0 {
                return;
            }
            if before == [0, 0] {
                self.cached.leave(stamp);
                self.held += 1;
                if owner == Owner::Transfer {
                    self.held_by_transfers += 1;
                }
            } else {
                self.mixed_raised(owner);
            }
            at = parent;
        }
    }

    fn release(&mut self, block: Block, owner: Owner, fence: Fence) -> Result<(), PoolError> {
        if self.refs[block.index()][owner.slot()] == 0 {
            return Err(self.misuse(PoolError::NotHeld(block)));
        }
        match fence {
            Fence::Open => self.drop_ref(block, owner),
            Fence::Step(step) => {
                self.last_fence = self.last_fence.max(step.0);
                self.drop_ref(block, owner);
            }
            Fence::Transfer(id) => {
                let Some(at) = self.transfers.iter().position(|t| t.id == id) else {
                    return Err(self.misuse(PoolError::UnknownTransfer(id)));
                };
                self.transfers[at].handed.push(block);
                if owner == Owner::Sequence {
                    self.add_ref(block, Owner::Transfer);
                    self.drop_ref(block, Owner::Sequence);
                }
            }
        }
        Ok(())
    }

    /// One reference less: up the chain until a block keeps one of that kind.
    fn drop_ref(&mut self, block: Block, owner: Owner) {
        let kind = owner.slot();
        self.refs[block.index()][kind] -= 1;
        self.ref_totals[kind] -= 1;
        let fence = if self.last_fence < self.opened { 0 } else { self.last_fence };
        let mut at = block;
        while !at.is_null() {
            let node = &mut self.nodes[at.index()];
            node.pins[kind] -= 1;
            let (pins, parent, hashed) = (node.pins, node.parent, node.hash.is_some());
            if pins[kind] != 0 {
                return;
            }
            if pins == [0, 0] {
                self.held -= 1;
                if owner == Owner::Transfer {
                    self.held_by_transfers -= 1;
                }
                if hashed {
                    self.cached.push(&mut self.nodes, at, fence);
                } else if fence == 0 {
                    self.free_block(at);
                } else {
                    self.parked.push(&mut self.nodes, at, fence);
                }
            } else if owner == Owner::Sequence {
                self.held_by_transfers += 1;
            }
            at = parent;
        }
    }

    fn free_block(&mut self, block: Block) {
        for group in &mut self.further {
            group.give_back(block);
        }
        self.nodes[block.index()].parent = self.free_head;
        self.free_head = block;
        self.free += 1;
    }

    /// Takes a block that has just left the cached queue out of the index.
    fn unindex(&mut self, block: Block) {
        if self.events.is_some() {
            self.log(block, false);
        }
        self.index.remove(&self.nodes, block);
        self.nodes[block.index()].hash = BlockHash::NONE;
        self.nodes[block.index()].parent = Block::NULL;
        self.parts[block.index()] = PartSet::EMPTY;
    }

    fn event(&self, block: Block, stored: bool) -> Event {
        let node = self.nodes[block.index()];
        let namespace = self.namespaces[block.index()];
        let parent = if node.parent.is_null() { namespace } else { self.nodes[node.parent.index()].hash };
        if stored {
            Event::Stored { hash: node.hash, parent, namespace }
        } else {
            Event::Removed { hash: node.hash, parent, namespace }
        }
    }

    fn log(&mut self, block: Block, stored: bool) {
        let event = self.event(block, stored);
        if let Some(log) = &mut self.events {
            self.stats.events_lost += log.push(event);
        }
    }
}
