//! Hashing and publishing filled blocks, spread evenly over steps.
//!
//! Only `complete` and the end of a sequence publish, and only blocks whose every position is confirmed. A block of a
//! decoding sequence may become matchable a few steps late, never early.

use crate::scheduler::Scheduler;
use deepinfer_kvindex::{BlockHash, Extra, Seq};
use std::collections::VecDeque;

/// Filled blocks of decoding sequences, oldest first, and those being hashed side by side.
#[derive(Default)]
pub(crate) struct HashQueue {
    queue: VecDeque<(Seq, u32)>,
    batch: Vec<(Seq, u32)>,
    side_by_side: Vec<(Seq, u32)>,
    hashes: Vec<BlockHash>,
}

impl HashQueue {
    pub fn with_capacity(n: usize) -> Self {
        Self { queue: VecDeque::with_capacity(n), ..Self::default() }
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
        let mut batch = std::mem::take(&mut self.hash_queue.batch);
        batch.clear();
        while budget > 0
            && let Some((seq, block)) = self.hash_queue.queue.pop_front()
        {
            let Some(lane) = self.seqs.lane(seq) else { continue };
            let published = self.seqs.get(seq).map_or(u32::MAX, |c| c.published);
            if self.lanes.flushed[lane] < (block + 1) << shift || (self.prefix_caching && published <= block) {
                self.flush_through(lane, block);
                batch.push((seq, block));
                budget -= 1;
            }
        }
        if self.prefix_caching {
            let mut side_by_side = std::mem::take(&mut self.hash_queue.side_by_side);
            side_by_side.clone_from(&batch);
            self.hash_batch(&mut side_by_side);
            self.hash_queue.side_by_side = side_by_side;
            for &(seq, block) in &batch {
                if let Some(lane) = self.seqs.lane(seq) {
                    self.publish_through(lane, block + 1);
                }
            }
        }
        self.hash_queue.batch = batch;
    }

    /// Hashes blocks of different sequences at once, as far as each is the next one of its chain and nothing but tokens enters
    /// it. Publishing hashes whatever is left.
    fn hash_batch(&mut self, batch: &mut Vec<(Seq, u32)>) {
        let bt = self.geometry.block_tokens as usize;
        let Self { seqs, shared, hash_queue: HashQueue { hashes, .. }, .. } = self;
        let hasher = shared.hasher();
        let next = |&(seq, block): &(Seq, u32)| {
            let cold = seqs.get(seq)?;
            let usual = cold.hasher.is_none() && cold.extras.is_empty() && cold.hashes.len() == block as usize;
            let tokens = cold.history.get(block as usize * bt..(block as usize + 1) * bt)?;
            usual.then(|| (cold.hashes.last().copied().unwrap_or_else(|| hasher.root()), tokens))
        };
        batch.retain(|entry| next(entry).is_some());
        hashes.clear();
        hasher.extend_many(batch.iter().filter_map(next), hashes);
        for (&(seq, block), &hash) in batch.iter().zip(hashes.iter()) {
            // A block may be queued twice; the second time it is not the next one any more.
            if let Some(cold) = seqs.get_mut(seq).filter(|cold| cold.hashes.len() == block as usize) {
                cold.hashes.push(hash);
            }
        }
    }

    /// Moves the tokens of blocks up to `block` into the history, and publishes them.
    pub(crate) fn flush_block(&mut self, lane: usize, block: u32) {
        self.flush_through(lane, block);
        if self.prefix_caching {
            self.publish_through(lane, block + 1);
        }
    }

    /// Moves the tokens of blocks up to `block` into the history.
    fn flush_through(&mut self, lane: usize, block: u32) {
        let end = (block + 1) << self.geometry.shift;
        if let Some(cold) = self.seqs.get_mut(self.lanes.seq[lane]) {
            self.kv.tables.flush(self.lanes.state[lane], &mut cold.history, end);
            self.lanes.flushed[lane] = cold.history.len() as u32;
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
        let before = cold.published;
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
        let after = cold.published;
        self.note_grains(lane, before, after);
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
