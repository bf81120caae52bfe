//! Unhashed blocks that were released but may not be reused yet: a linked queue, oldest first, one run per fence.

use std::collections::VecDeque;

use crate::ids::Block;
use crate::node::Node;

/// Blocks behind one fence, linked from `first` to `last` through the nodes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    pub(crate) step: u64,
    pub(crate) first: Block,
    pub(crate) last: Block,
    pub(crate) blocks: u32,
}

#[derive(Debug)]
pub(crate) struct Parked {
    runs: VecDeque<Run>,
    blocks: u32,
}

impl Parked {
    pub(crate) fn new() -> Self {
        Self { runs: VecDeque::with_capacity(16), blocks: 0 }
    }

    #[inline]
    pub(crate) fn len(&self) -> u32 {
        self.blocks
    }

    #[inline]
    pub(crate) fn open_at(&self, now: u64) -> u32 {
        self.runs.iter().take_while(|r| r.step < now).map(|r| r.blocks).sum()
    }

    /// Parks a block behind a step that is not smaller than any before it.
    pub(crate) fn push(&mut self, nodes: &mut [Node], block: Block, step: u64) {
        nodes[block.index()].parent = Block::NULL;
        self.blocks += 1;
        match self.runs.back_mut() {
            Some(run) if run.step == step => {
                nodes[run.last.index()].parent = block;
                run.last = block;
                run.blocks += 1;
            }
            _ => self.runs.push_back(Run { step, first: block, last: block, blocks: 1 }),
        }
    }

    /// Takes the oldest run if its fence is open.
    pub(crate) fn pop_open(&mut self, now: u64) -> Option<Run> {
        if self.runs.front().is_some_and(|r| r.step < now) {
            let run = self.runs.pop_front()?;
            self.blocks -= run.blocks;
            Some(run)
        } else {
            None
        }
    }

    pub(crate) fn runs(&self) -> impl Iterator<Item = &Run> {
        self.runs.iter()
    }
}
