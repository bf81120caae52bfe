//! Forks (n > 1): the other samples of a request wait for its prompt, then share it.
//!
//! A fork pins the parent's chain up to the block of the last prompt token, which it computes again to draw its own first
//! token. That block is cloned in every paged group when it holds anything before that token. Models with per-sequence
//! state clone it as it stood before that token: the parent stops one token short of its prompt for one step, and only a
//! fork made right then can share. When the parent is gone or has moved on, a fork is admitted like any other request.

use crate::pool::Status;
use crate::scheduler::Scheduler;
use deepinfer_kvindex::{Block, Seq};

/// What a fork takes over from its parent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sharing {
    /// Lane of the parent.
    pub lane: usize,
    /// Whole blocks shared through the index.
    pub blocks: u32,
    /// Last of them.
    pub leaf: Block,
    /// Block to clone into the fork's next one; null when nothing in it is needed.
    pub tail: Block,
    /// Positions that the fork does not compute.
    pub computed: u32,
}

impl Scheduler {
    /// Whether forks of this lane still wait for its prompt.
    pub(crate) fn has_waiting_forks(&self, lane: usize) -> bool {
        self.seqs.get(self.lanes.seq[lane]).is_some_and(|c| !c.children.is_empty())
    }

    /// Queues a fork whose parent's prompt is done or will never be.
    pub(crate) fn wait_for_parent(&mut self, seq: Seq) {
        let parent = self.seqs.get(seq).and_then(|c| c.parent);
        let waits = parent.is_some_and(|p| self.seqs.get(p).is_some_and(|c| c.children.contains(&seq)));
        if !waits {
            self.enqueue(seq);
        }
    }

    /// Queues forks that were waiting for their parent.
    pub(crate) fn release_forks(&mut self, children: &[Seq]) {
        for &child in children {
            if self.seqs.status(child) == Some(Status::WaitFork) {
                self.enqueue(child);
            }
        }
    }

    /// The prompt of a lane is computed as far as its forks need it: they may be admitted.
    pub(crate) fn release_forks_of(&mut self, seq: Seq) {
        let children = self.seqs.get_mut(seq).map(|c| std::mem::take(&mut c.children)).unwrap_or_default();
        self.release_forks(&children);
    }

    /// Last position of the parent's prompt that it computes before its forks are made; the whole prompt without state. It
    /// stands there until the step that reached it has completed.
    pub(crate) fn fork_stop(&self, lane: usize) -> Option<u32> {
        if !self.geometry.has_state || !self.has_waiting_forks(lane) {
            return None;
        }
        let prompt = self.seqs.get(self.lanes.seq[lane])?.prompt;
        (self.lanes.confirmed[lane] < prompt - 1).then_some(prompt - 1)
    }

    /// What `seq` can share with its parent now, if anything.
    pub(crate) fn sharing(&self, seq: Seq) -> Option<Sharing> {
        let cold = self.seqs.get(seq)?;
        // A preempted fork has tokens of its own; the index serves it.
        if cold.history.len() as u32 != cold.prompt || !self.prefix_caching {
            return None;
        }
        let parent = cold.parent?;
        // What is copied back to a parent arrives after the clones of that step.
        let lane = self.seqs.lane(parent).filter(|_| self.has_arrived(parent))?;
        let computed = cold.prompt - 1;
        // State that a row in flight goes on to change is not the state before it.
        let (confirmed, planned) = (self.lanes.confirmed[lane], self.lanes.planned[lane]);
        if confirmed < computed || (self.geometry.has_state && planned != computed) {
            return None;
        }
        let shift = self.geometry.shift;
        let blocks = computed >> shift;
        let of_parent = self.seqs.get(parent)?;
        if of_parent.published < blocks {
            return None;
        }
        let mut leaf = of_parent.cursor;
        for _ in blocks..of_parent.published {
            leaf = self.kv.blocks.parent(leaf);
        }
        let tail = if computed & self.geometry.mask == 0 {
            Block::NULL
        } else {
            self.kv.tables.block(self.lanes.state[lane], blocks)
        };
        Some(Sharing { lane, blocks, leaf: if blocks == 0 { Block::NULL } else { leaf }, tail, computed })
    }
}
