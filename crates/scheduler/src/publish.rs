//! Hashing and publishing filled blocks, spread evenly over steps.
//!
//! Only `complete` and the end of a sequence publish, and only blocks whose every position is confirmed. A block of a
//! decoding sequence may become matchable a few steps late, never early.

use crate::scheduler::Scheduler;
use deepinfer_kvindex::{BlockHash, Extra, Seq};
use std::collections::VecDeque;

/// Filled blocks of decoding sequences, oldest first.
#[derive(Default)]
pub(crate) struct HashQueue {
    queue: VecDeque<(Seq, u32)>,
}

impl HashQueue {
    pub fn with_capacity(n: usize) -> Self {
        Self { queue: VecDeque::with_capacity(n) }
    }

    #[inline]
    pub fn push(&mut self, seq: Seq, block: u32) {
        self.queue.push_back((seq, block));
    }
}

/// Extras whose position lies in block `index`.
fn extras_of(extras: &[Extra], index: u32, block_tokens: u32) -> &[Extra] {
    let start = u64::from(index) * u64::from(block_tokens);
    let end = start + u64::from(block_tokens);
    let from = extras.partition_point(|e| u64::from(e.position) < start);
    let to = extras.partition_point(|e| u64::from(e.position) < end);
    &extras[from..to]
}

impl Scheduler {
    /// Handles as many queued blocks as keeps the queue short: a quarter more than fill in an average step.
    pub(crate) fn drain_hash_queue(&mut self, sampled: usize) {
        if self.hash_queue.queue.is_empty() {
            return;
        }
        let shift = self.geometry.shift;
        let mut budget = (sampled + sampled / 4) >> shift;
        budget += usize::from(((sampled + sampled / 4) & self.geometry.mask as usize) != 0);
        while budget > 0
            && let Some((seq, block)) = self.hash_queue.queue.pop_front()
        {
            let Some(lane) = self.seqs.lane(seq) else { continue };
            let published = self.seqs.get(seq).map_or(u32::MAX, |c| c.published);
            if self.lanes.flushed[lane] < (block + 1) << shift || (self.prefix_caching && published <= block) {
                self.flush_block(lane, block);
                budget -= 1;
            }
        }
    }

    /// Moves the tokens of blocks up to `block` into the history, and publishes them.
    pub(crate) fn flush_block(&mut self, lane: usize, block: u32) {
        let end = (block + 1) << self.geometry.shift;
        let seq = self.lanes.seq[lane];
        if let Some(cold) = self.seqs.get_mut(seq) {
            self.kv.tables.flush(self.lanes.state[lane], &mut cold.history, end);
            self.lanes.flushed[lane] = cold.history.len() as u32;
        }
        if self.prefix_caching {
            self.publish_through(lane, block + 1);
        }
    }

    /// Publishes every filled block of a lane.
    pub(crate) fn publish_filled(&mut self, lane: usize) {
        let filled = self.lanes.confirmed[lane] >> self.geometry.shift;
        if filled == 0 {
            return;
        }
        let end = filled << self.geometry.shift;
        if self.lanes.flushed[lane] < end {
            self.flush_block(lane, filled - 1);
        } else if self.prefix_caching {
            self.publish_through(lane, filled);
        }
    }

    /// Publishes the leading `blocks` blocks of a lane, as far as they are confirmed; their tokens are in the history.
    pub(crate) fn publish_through(&mut self, lane: usize, blocks: u32) {
        let seq = self.lanes.seq[lane];
        let slot = self.lanes.state[lane];
        let bt = self.geometry.block_tokens;
        // A queued block may belong to a life before a preemption, and not be computed again yet.
        let blocks = blocks.min(self.lanes.confirmed[lane] >> self.geometry.shift);
        // Nor while blocks of it are being copied back: the step that does that may fail.
        let Some(cold) = self.seqs.get_mut(seq).filter(|cold| cold.swap.is_none()) else { return };
        let hasher = cold.hasher.as_ref().unwrap_or(self.shared.hasher());
        while cold.published < blocks {
            let index = cold.published;
            if cold.hashes.len() as u32 <= index {
                let start = (index * bt) as usize;
                let parent: BlockHash = cold.hashes.last().copied().unwrap_or_else(|| hasher.root());
                let Some(tokens) = cold.history.get(start..start + bt as usize) else { return };
                let hash = hasher.extend(parent, tokens, extras_of(&cold.extras, index, bt));
                cold.hashes.push(hash);
            }
            let block = self.kv.tables.block(slot, index);
            let hash = cold.hashes[index as usize];
            let Some(done) = self.kv.publish(block, hash, cold.cursor, hasher.root()) else { return };
            cold.cursor = done.cursor;
            if done.duplicate {
                cold.duplicates.push(block);
            }
            cold.published += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use deepinfer_kvindex::ExtraKind;

    #[test]
    fn each_extra_enters_the_block_of_its_position() {
        let extra = |position| Extra { kind: ExtraKind::Image, position, data: vec![1] };
        let extras = [extra(0), extra(15), extra(16), extra(40)];
        assert_eq!(extras_of(&extras, 0, 16).len(), 2);
        assert_eq!(extras_of(&extras, 1, 16).len(), 1);
        assert_eq!(extras_of(&extras, 2, 16).len(), 1);
        assert!(extras_of(&extras, 3, 16).is_empty());
    }
}
