//! Pages of the paged groups after the first: taken with a block, shared with it, given back with it.
//!
//! Group 0 needs no map: its page id is the block id.

use crate::ids::Block;

/// Page pool of one further group.
#[derive(Debug)]
pub(crate) struct PageGroup {
    pub(crate) total: u32,
    pub(crate) per_block: u32,
    pub(crate) free: Vec<u32>,
    /// `map[block * per_block + j]`; 0 while the block has no pages.
    pub(crate) map: Box<[u32]>,
}

impl PageGroup {
    pub(crate) fn new(blocks: u32, total: u32, per_block: u32) -> Self {
        Self {
            total,
            per_block,
            free: (1..total).rev().collect(),
            map: vec![0; blocks as usize * per_block as usize].into_boxed_slice(),
        }
    }

    /// Blocks that the free pages suffice for.
    #[inline]
    pub(crate) fn blocks_free(&self) -> u32 {
        self.free.len() as u32 / self.per_block
    }

    #[inline]
    pub(crate) fn pages(&self, block: Block) -> &[u32] {
        let at = block.index() * self.per_block as usize;
        &self.map[at..at + self.per_block as usize]
    }

    /// Gives the block its pages; the caller has checked that they are there.
    pub(crate) fn take(&mut self, block: Block) {
        let at = block.index() * self.per_block as usize;
        for entry in &mut self.map[at..at + self.per_block as usize] {
            *entry = self.free.pop().unwrap_or(0);
        }
    }

    pub(crate) fn give_back(&mut self, block: Block) {
        let at = block.index() * self.per_block as usize;
        for entry in self.map[at..at + self.per_block as usize].iter_mut().rev() {
            self.free.push(std::mem::take(entry));
        }
    }
}
