//! Taking blocks back from running sequences, no more than needed.
//!
//! Victims go by lowest priority, then newest; waiting sequences that hold loaded KV are among them and give it up. What is
//! coming back counts: a row waits for it rather than take another victim.

use crate::end::Leave;
use crate::lanes::flag;
use crate::scheduler::Scheduler;
use crate::waiting::Class;
use deepinfer_kvindex::{Block, Fence, Owner, Seq};

/// Answer to a running lane that needs a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    Block(Block),
    /// Blocks are coming back: wait a step.
    Wait,
    /// The lane itself was the next victim.
    Gone,
}

impl Scheduler {
    /// A block for `lane`, if need be from a victim. `promised` counts the rows that wait for blocks coming back.
    pub(crate) fn take_or_preempt(&mut self, lane: usize, promised: &mut u32, patient: bool) -> Taken {
        loop {
            if let Some(block) = self.kv.alloc(Owner::Sequence) {
                return Taken::Block(block);
            }
            if self.limits.max_draft > 0 && self.take_surplus() {
                continue;
            }
            let coming = self.kv.blocks.coming_back(self.kv.now) + self.swaps.resting_blocks();
            if patient && (*promised < coming || *promised < coming + self.ending_blocks()) {
                *promised += 1;
                return Taken::Wait;
            }
            let victim = self.victim();
            if let Some(held) = self.last_held()
                && victim.is_none_or(|lane| self.order_of(held) > Some(self.order(lane)))
            {
                self.drop_delivered(held);
                continue;
            }
            match victim {
                Some(victim) if patient && self.rests_first(victim) => {
                    self.rest(victim);
                    *promised += 1;
                    return Taken::Wait;
                }
                // It would lose what is in flight, come back without it, and want the block again: for ever, if it is alone.
                Some(victim) if victim == lane && self.lanes.planned[lane] > self.lanes.confirmed[lane] => {
                    return Taken::Wait;
                }
                Some(victim) if victim != lane => self.preempt(victim),
                Some(_) if self.kv.blocks.coming_back(self.kv.now) > 0 && self.alone() => return Taken::Wait,
                _ => {
                    self.preempt(lane);
                    return Taken::Gone;
                }
            }
        }
    }

    /// Blocks of their own of lanes that the step in flight may end by length: what they give up comes back without a victim.
    fn ending_blocks(&self) -> u32 {
        if self.in_flight() == 0 {
            return 0;
        }
        let lanes = &self.lanes;
        (0..lanes.len())
            .filter(|&lane| lanes.flags[lane] & flag::DEAD == 0 && lanes.planned[lane] > lanes.confirmed[lane])
            .filter(|&lane| lanes.planned[lane] + 1 >= lanes.limit[lane])
            .map(|lane| {
                let published = self.seqs.get(lanes.seq[lane]).map_or(u32::MAX, |c| c.published);
                lanes.blocks[lane].saturating_sub(published)
            })
            .sum()
    }

    /// True if one lane is left.
    fn alone(&self) -> bool {
        self.lanes.flags.iter().filter(|&&f| f & flag::DEAD == 0).count() == 1
    }

    /// Next victim: lowest priority, then newest.
    fn victim(&self) -> Option<usize> {
        (0..self.lanes.len())
            .filter(|&lane| self.lanes.flags[lane] & flag::DEAD == 0 && !self.swaps.rests(self.lanes.seq[lane]))
            .max_by_key(|&lane| self.order(lane))
    }

    fn order(&self, lane: usize) -> (i32, u64, u32) {
        let fork = self.seqs.get(self.lanes.seq[lane]).map_or(0, |c| c.fork);
        (self.lanes.priority[lane], self.lanes.arrival[lane], fork)
    }

    fn order_of(&self, seq: Seq) -> Option<(i32, u64, u32)> {
        self.seqs.get(seq).map(|c| (c.priority, c.arrival, c.fork))
    }

    /// Takes back one block that rejected drafts left with a lane.
    fn take_surplus(&mut self) -> bool {
        for lane in 0..self.lanes.decoding {
            let blocks = self.lanes.blocks[lane];
            let needed = (self.lanes.planned[lane] >> self.geometry.shift) + 1;
            if blocks > needed && self.lanes.flags[lane] & flag::DEAD == 0 {
                let block = self.kv.tables.block(self.lanes.state[lane], blocks - 1);
                self.kv.release_private(block, Owner::Sequence, Fence::Step(self.kv.launched));
                self.lanes.blocks[lane] = blocks - 1;
                self.lanes.told[lane] = self.lanes.told[lane].min(blocks - 1);
                return true;
            }
        }
        false
    }

    /// Puts a running sequence back into the queue, with its history, hashes and place; at once, or when its KV has been
    /// copied to host memory.
    pub(crate) fn preempt(&mut self, lane: usize) {
        let seq = self.lanes.seq[lane];
        // What is on its way back from host memory is there still.
        let there = self.seqs.get(seq).is_some_and(|cold| cold.swap.is_some());
        let swap = if there { None } else { self.swap_out(lane) };
        if !there && swap.is_none() {
            self.note_snapshot(lane, false);
        }
        self.leave_lane(lane, Leave::Release);
        if let Some(cold) = self.seqs.get_mut(seq) {
            cold.class = Class::Preempted;
            cold.preemptions += 1;
            cold.passed = 0;
        }
        match swap {
            Some(swap) => self.begin_leaving(seq, swap),
            None => self.enqueue(seq),
        }
        self.metrics.preemptions += 1;
    }
}
