//! Block pool: which blocks there are, what may be reused, and handing them out. References are in `refs`, the index in
//! `publish`.

use crate::cached::CachedQueue;
use crate::counts::{Counts, PoolStats};
use crate::error::PoolError;
use crate::events::EventLog;
use crate::ids::{Block, BlockHash, Owner, StepId, TransferId};
use crate::index::PrefixIndex;
use crate::node::Node;
use crate::pages::PageGroup;
use crate::parked::Parked;
use crate::parts::PartSet;
use crate::slices::Slices;
use crate::snapshots::Snapshots;

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
///   waits for the latest step that any of them named. A fence names a step that has been planned. `now` in every call is the step being planned (or, on a device that
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
    pub(crate) snapshots: Snapshots,
    pub(crate) slices: Slices,
    pub(crate) events: Option<EventLog>,
    pub(crate) prefix_caching: bool,
    /// Newest step that any release named.
    pub(crate) last_fence: u64,
    /// Steps below this are open.
    pub(crate) opened: u64,
    pub(crate) stats: PoolStats,
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
            snapshots: Snapshots::default(),
            slices: Slices::default(),
            events,
            prefix_caching: config.prefix_caching,
            last_fence: 0,
            opened: 1,
            stats: PoolStats::default(),
        })
    }

    // ---- how much there is ---------------------------------------------------------------------------------------------

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

    /// Unreferenced blocks of the prefix that ends at `leaf`: taking a reference on it lowers what is available by at most
    /// this (exactly, if no fence of theirs is closed). Lets admission be decided without disturbing the eviction order.
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

    // ---- taking and reclaiming -----------------------------------------------------------------------------------------

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

    // ---- looking -------------------------------------------------------------------------------------------------------

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

    // ---- inside --------------------------------------------------------------------------------------------------------

    /// Free blocks for which every group has pages.
    #[inline]
    fn free_blocks(&self) -> u32 {
        self.further.iter().map(PageGroup::blocks_free).fold(self.free, u32::min)
    }

    #[cold]
    pub(crate) fn misuse(&mut self, error: PoolError) -> PoolError {
        self.stats.misuse += 1;
        error
    }

    #[inline]
    pub(crate) fn node(&mut self, block: Block) -> Result<Node, PoolError> {
        match self.nodes.get(block.index()) {
            Some(node) if !block.is_null() => Ok(*node),
            _ => Err(self.misuse(PoolError::BadBlock(block))),
        }
    }

    #[inline]
    pub(crate) fn indexed(&mut self, block: Block) -> Result<(), PoolError> {
        if self.node(block)?.hash.is_some() { Ok(()) } else { Err(self.misuse(PoolError::NotIndexed(block))) }
    }

    pub(crate) fn free_block(&mut self, block: Block) {
        for group in &mut self.further {
            group.give_back(block);
        }
        self.nodes[block.index()].parent = self.free_head;
        self.free_head = block;
        self.free += 1;
    }
}
