//! The scheduler's side of KV: master block-table rows, open tokens, and every call into the block pool.

use crate::wide::{WIDE, copy_few};
use deepinfer_kvindex::{
    Block, BlockHash, BlockPool, Fence, Owner, Published, StateSlot, StateSlots, StepId, TransferId,
};

/// Master rows of the block table and the newest tokens, by state slot.
pub(crate) struct Tables {
    rows: Vec<Block>,
    row_blocks: usize,
    /// Two blocks of tokens per slot: position `p` lies at `p mod (2 × block)`.
    open: Vec<u32>,
    /// Proposed tokens per slot, `WIDE` words more behind the last: they are read in whole vectors.
    drafts: Vec<u32>,
    max_draft: usize,
    block_tokens: usize,
    mask: usize,
}

impl Tables {
    pub fn new(slots: usize, row_blocks: usize, block_tokens: usize, max_draft: usize, device_drafts: bool) -> Self {
        let mut drafts = vec![0; slots * max_draft + WIDE];
        if device_drafts {
            // Nobody proposes: every slot has the placeholders -2, -3, ... for good.
            for of_slot in drafts[..slots * max_draft].chunks_exact_mut(max_draft) {
                of_slot.iter_mut().zip(2_i32..).for_each(|(to, nth)| *to = -nth as u32);
            }
        }
        Self {
            rows: vec![Block::NULL; slots * row_blocks],
            row_blocks,
            open: vec![0; slots * 2 * block_tokens],
            drafts,
            max_draft,
            block_tokens,
            mask: 2 * block_tokens - 1,
        }
    }

    #[inline]
    pub fn row(&self, slot: u32) -> &[Block] {
        let at = slot as usize * self.row_blocks;
        &self.rows[at..at + self.row_blocks]
    }

    #[inline]
    pub fn block(&self, slot: u32, index: u32) -> Block {
        self.rows[slot as usize * self.row_blocks + index as usize]
    }

    #[inline]
    pub fn set(&mut self, slot: u32, index: u32, block: Block) {
        self.rows[slot as usize * self.row_blocks + index as usize] = block;
    }

    #[inline]
    pub fn put_token(&mut self, slot: u32, position: u32, token: u32) {
        let at = slot as usize * (self.mask + 1) + (position as usize & self.mask);
        self.open[at] = token;
    }

    /// The first `n` of `tokens` at consecutive positions. Within a block a few more may be written behind them: those places
    /// have the tokens of two blocks ago, which the history has.
    #[inline]
    pub fn put_tokens(&mut self, slot: u32, position: u32, tokens: &[i32], n: usize) {
        if (position as usize & (self.block_tokens - 1)) + WIDE.max(n) <= self.block_tokens {
            let at = slot as usize * (self.mask + 1) + (position as usize & self.mask);
            copy_few(&mut self.open[at..], tokens, n, |token| token as u32);
            return;
        }
        for (&token, position) in tokens[..n].iter().zip(position..) {
            self.put_token(slot, position, token as u32);
        }
    }

    /// What was proposed for a slot, and what lies behind it; the lane knows how much of it counts.
    #[inline]
    pub fn drafts(&self, slot: u32) -> &[u32] {
        &self.drafts[slot as usize * self.max_draft..]
    }

    #[inline]
    pub fn set_drafts(&mut self, slot: u32, drafts: &[u32]) {
        let at = slot as usize * self.max_draft;
        self.drafts[at..at + drafts.len()].copy_from_slice(drafts);
    }

    /// Appends positions `history.len()..len` to the history.
    pub fn flush(&self, slot: u32, history: &mut Vec<u32>, len: u32) {
        let start = slot as usize * (self.mask + 1);
        let row = &self.open[start..=start + self.mask];
        while history.len() < len as usize {
            let from = history.len() & self.mask;
            let to = row.len().min(from + len as usize - history.len());
            history.extend_from_slice(&row[from..to]);
        }
    }

    /// Loads the tokens of the block that position `len` lies in, up to `len`.
    pub fn load(&mut self, slot: u32, history: &[u32], len: u32) {
        let start = len as usize & !(self.block_tokens - 1);
        for (position, &token) in history.iter().enumerate().take(len as usize).skip(start) {
            self.put_token(slot, position as u32, token);
        }
    }
}

/// Blocks and slot that a sequence owns while it has no lane.
#[derive(Debug)]
pub(crate) struct Holding {
    /// The row, first block first.
    pub row: Vec<Block>,
    /// Positions whose KV is valid.
    pub computed: u32,
    pub slot: StateSlot,
}

/// Pools, tables, and the epoch that releases are stamped with.
pub(crate) struct Kv {
    pub blocks: BlockPool,
    pub states: StateSlots,
    pub tables: Tables,
    /// Fences of steps before this one are open.
    pub now: StepId,
    /// Newest launched step: what is released now may still be used by it.
    pub launched: StepId,
    /// Calls that a pool refused; 0 unless there is a fault.
    pub misuse: u64,
}

impl Kv {
    pub fn fence(&self, save: Option<TransferId>) -> Fence {
        save.map_or(Fence::Step(self.launched), Fence::Transfer)
    }

    #[inline]
    pub fn available(&self) -> u32 {
        self.blocks.available(self.now)
    }

    pub fn retire(&mut self) {
        self.blocks.retire(self.now);
        self.states.retire(self.now);
    }

    #[inline]
    pub fn alloc(&mut self, owner: Owner) -> Option<Block> {
        self.blocks.alloc(self.now, owner)
    }

    pub fn release_private(&mut self, block: Block, owner: Owner, fence: Fence) {
        let done = self.blocks.release_private(block, owner, fence);
        self.misuse += u64::from(done.is_err());
    }

    pub fn unpin(&mut self, leaf: Block, owner: Owner, fence: Fence) {
        let done = self.blocks.unpin(leaf, owner, fence);
        self.misuse += u64::from(done.is_err());
    }

    pub fn pin_chain(&mut self, leaf: Block, owner: Owner, into: &mut Vec<Block>) {
        let done = self.blocks.pin_chain(leaf, owner, into);
        self.misuse += u64::from(done.is_err());
    }

    pub fn release_slot(&mut self, slot: StateSlot, fence: Fence) {
        if !slot.is_null() {
            let done = self.states.release(slot, fence);
            self.misuse += u64::from(done.is_err());
        }
    }

    /// Enters a private block into the index below `cursor`.
    pub fn publish(&mut self, block: Block, hash: BlockHash, cursor: Block, root: BlockHash) -> Option<Published> {
        let done = self.blocks.publish(block, hash, cursor, root);
        self.misuse += u64::from(done.is_err());
        done.ok()
    }
}
