//! Swapping victims to host memory instead of computing them again, where that is the cheaper way back.
//!
//! The copy out is the first command of the step being planned when the victim is chosen: pages released for others are read
//! before anything writes them. It covers confirmed positions only. Readmission takes what the index still has and copies the
//! rest back, in the step that admits.

use crate::admit::Try;
use crate::host_pool::HostId;
use crate::layout::{F, header};
use crate::pool::Status;
use crate::scheduler::Scheduler;
use deepinfer_kvindex::{Fence, Seq, StepId};
use std::ops::Range;

/// What a sequence has in host memory.
#[derive(Debug)]
pub(crate) struct Swap {
    /// One host block for each leading block of the row.
    pub blocks: Vec<HostId>,
    /// Null without per-sequence state.
    pub slot: HostId,
    /// Positions that are there.
    pub computed: u32,
    /// Newest step with a copy of it, out or back.
    pub step: u64,
}

/// Measured rates that the choice rests on; 0 = not known.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Rates {
    swap_bytes: f64,
    prefill_tokens: f64,
}

impl Rates {
    /// Whether copying `bytes` out takes less time than computing `tokens` again.
    pub fn prefer_swap(self, bytes: u64, tokens: u32) -> bool {
        // bytes / swap < tokens / prefill, without dividing: an unknown rate never swaps.
        self.swap_bytes > 0.0
            && self.prefill_tokens > 0.0
            && bytes as f64 * self.prefill_tokens < f64::from(tokens) * self.swap_bytes
    }
}

/// Copies of the step being planned, and the sequences whose copy out has not completed.
#[derive(Default)]
pub(crate) struct Swaps {
    pub rates: Rates,
    /// (group, device page, host page)
    out: Vec<[i32; 3]>,
    /// (group, host page, device page)
    back: Vec<[i32; 3]>,
    /// (state slot, host slot)
    out_states: Vec<[i32; 2]>,
    /// (host slot, state slot)
    back_states: Vec<[i32; 2]>,
    /// In the order in which they were preempted.
    leaving: Vec<Seq>,
    /// Running sequences whose copy back is in flight. What they have in host memory stays theirs until it has arrived.
    arriving: Vec<Seq>,
    /// Lanes without a row in the step being planned, so that they can be swapped for the next one, and their blocks.
    resting: Vec<Seq>,
    resting_blocks: u32,
}

impl Swaps {
    pub fn with_capacity(seqs: usize, pages: usize) -> Self {
        Self {
            out: Vec::with_capacity(pages),
            back: Vec::with_capacity(pages),
            out_states: Vec::with_capacity(seqs),
            back_states: Vec::with_capacity(seqs),
            leaving: Vec::with_capacity(seqs),
            arriving: Vec::with_capacity(seqs),
            resting: Vec::with_capacity(seqs),
            ..Self::default()
        }
    }

    /// Copies back of a step that will not be.
    pub fn drop_back(&mut self) {
        self.back.clear();
        self.back_states.clear();
    }

    pub fn leaving(&self) -> &[Seq] {
        &self.leaving
    }

    /// Whether the copy back of a sequence may be in flight.
    pub fn arrives(&self, seq: Seq) -> bool {
        self.arriving.contains(&seq)
    }

    #[inline]
    pub fn rests(&self, seq: Seq) -> bool {
        !self.resting.is_empty() && self.resting.contains(&seq)
    }

    /// Blocks that come back when the resting lanes are swapped.
    pub fn resting_blocks(&self) -> u32 {
        self.resting_blocks
    }

    /// A new plan: whoever rested goes on, unless its blocks are needed still.
    pub fn wake(&mut self) {
        self.resting.clear();
        self.resting_blocks = 0;
    }
}

/// What a swap takes.
struct SwapCost {
    computed: u32,
    blocks: u32,
    pages: usize,
}

/// First page of a host block in a group whose blocks own `1 << shift` pages.
fn host_page(id: HostId, shift: u32) -> u32 {
    (id.0 - 1) << shift
}

impl Scheduler {
    /// Feeds the measured rates that decide between swapping a victim and computing it again. What is not a positive finite
    /// number counts as unknown, and then nothing is swapped.
    pub fn set_rates(&mut self, swap_bytes_per_s: f64, prefill_tokens_per_s: f64) {
        let known = |rate: f64| if rate.is_finite() && rate > 0.0 { rate } else { 0.0 };
        self.swaps.rates = Rates { swap_bytes: known(swap_bytes_per_s), prefill_tokens: known(prefill_tokens_per_s) };
    }

    /// Pages and bytes that a copy of these blocks of a row takes.
    fn swap_size(&self, blocks: Range<u32>, computed: u32) -> (usize, u64) {
        let (mut pages, mut bytes) = (0, 0);
        let Some(last) = blocks.clone().last() else { return (0, 0) };
        for (group, page_bytes) in self.geometry.page_bytes.iter().enumerate() {
            let full = (last - blocks.start) << self.geometry.sections[group].pages_shift;
            let n = full + self.geometry.pages_of(group, last, computed);
            pages += n as usize;
            bytes += u64::from(n) * page_bytes;
        }
        (pages, bytes)
    }

    /// What swapping a lane out would take, if that is cheaper than computing it again.
    fn swap_cost(&self, lane: usize) -> Option<SwapCost> {
        let computed = self.lanes.confirmed[lane];
        // Rows below its hit write no KV: it would come back without knowing so.
        if self.seqs.get(self.lanes.seq[lane]).is_some_and(|cold| computed < cold.begin.hit) {
            return None;
        }
        let blocks = computed.div_ceil(self.geometry.block_tokens);
        let (pages, bytes) = self.swap_size(0..blocks, computed);
        let cheaper = self.swaps.rates.prefer_swap(bytes + self.geometry.state_bytes, computed);
        cheaper.then_some(SwapCost { computed, blocks, pages })
    }

    /// Whether a victim is to be swapped, but not now: its state is what the newest launched row made of it, and with rows in
    /// flight that is ahead of what is confirmed. Without a row in this step it is not, in the next one.
    pub(crate) fn rests_first(&self, lane: usize) -> bool {
        self.geometry.has_state
            && self.lanes.planned[lane] != self.lanes.confirmed[lane]
            && self.swap_cost(lane).is_some_and(|cost| self.host.has_room(self.kv.now, cost.blocks, true))
    }

    /// Takes a lane's row out of the step being planned.
    pub(crate) fn rest(&mut self, lane: usize) {
        self.lanes.rows[lane] = 0;
        self.swaps.resting.push(self.lanes.seq[lane]);
        self.swaps.resting_blocks += self.lanes.blocks[lane];
    }

    /// Orders the copy of a victim's confirmed pages and state, if that is cheaper than computing them again and there is
    /// room. The victim still has its lane.
    pub(crate) fn swap_out(&mut self, lane: usize) -> Option<Swap> {
        let SwapCost { computed, blocks, pages } = self.swap_cost(lane)?;
        let state = self.geometry.has_state;
        let ahead = state && self.lanes.planned[lane] != computed;
        if ahead || !self.has_arrived(self.lanes.seq[lane]) || self.swaps.out.len() + pages > self.layout.deltas {
            self.metrics.swaps_refused += 1;
            return None;
        }
        let mut ids = Vec::with_capacity(blocks as usize);
        let Some(slot) = self.host.take(self.kv.now, blocks, state, &mut ids) else {
            self.metrics.swaps_refused += 1;
            return None;
        };
        let row = self.lanes.state[lane];
        let Self { kv, geometry, swaps, .. } = self;
        for (index, &id) in (0..blocks).zip(&ids) {
            let block = kv.tables.block(row, index);
            for (group, section) in geometry.sections.iter().enumerate() {
                for j in 0..geometry.pages_of(group, index, computed) {
                    let from = kv.blocks.page(group, block, j as usize);
                    let to = host_page(id, section.pages_shift) + j;
                    swaps.out.push([group as i32, from as i32, to as i32]);
                }
            }
        }
        if state {
            self.swaps.out_states.push([row as i32, slot.0 as i32 - 1]);
        }
        self.metrics.swapped_out += 1;
        self.metrics.swap_out_pages += pages as u64;
        Some(Swap { blocks: ids, slot, computed, step: self.step + 1 })
    }

    /// Whether the step that gave a running sequence its lane has completed. Before that its KV may be on the way: cloned, or
    /// copied back.
    pub(crate) fn has_arrived(&self, seq: Seq) -> bool {
        self.seqs.get(seq).is_some_and(|cold| cold.admitted_by <= self.completed)
    }

    /// The copies back of `step` have arrived: host memory is free again.
    pub(crate) fn end_arriving(&mut self, step: u64) {
        if self.swaps.arriving.is_empty() {
            return;
        }
        let mut arriving = std::mem::take(&mut self.swaps.arriving);
        arriving.retain(|&seq| {
            let at = self.seqs.get(seq).and_then(|cold| cold.swap.as_ref()).map_or(0, |swap| swap.step);
            if at == step && self.seqs.status(seq) == Some(Status::Running) {
                self.drop_swap(seq);
            }
            at > step
        });
        self.swaps.arriving = arriving;
    }

    /// A victim whose copy out was ordered waits for it.
    pub(crate) fn begin_leaving(&mut self, seq: Seq, swap: Swap) {
        if let Some(cold) = self.seqs.get_mut(seq) {
            cold.swap = Some(swap);
            self.seqs.set_status(seq, Status::SwappingOut);
            self.swaps.leaving.push(seq);
        }
    }

    /// Gives up what a sequence has in host memory, if anything.
    pub(crate) fn drop_swap(&mut self, seq: Seq) {
        if let Some(swap) = self.seqs.get_mut(seq).and_then(|cold| cold.swap.take()) {
            self.host.give_back(&swap.blocks, swap.slot, Fence::Step(StepId(swap.step)));
        }
    }

    /// No step carries the copies ordered since the last one: their sequences compute again what they lost. True if there
    /// were any.
    pub(crate) fn cancel_swaps(&mut self) -> bool {
        let next = self.step + 1;
        self.swaps.out.clear();
        self.swaps.out_states.clear();
        let before = self.swaps.leaving.len();
        self.end_leaving(next, false);
        before != self.swaps.leaving.len()
    }

    /// The copies out of `step` are done, or count for nothing.
    pub(crate) fn end_leaving(&mut self, step: u64, ok: bool) {
        if self.swaps.leaving.is_empty() {
            return;
        }
        let mut leaving = std::mem::take(&mut self.swaps.leaving);
        leaving.retain(|&seq| {
            let Some(swap) = self.seqs.get(seq).and_then(|cold| cold.swap.as_ref()) else { return false };
            if swap.step != step {
                return true;
            }
            if !ok {
                self.metrics.swaps_refused += 1;
                self.drop_swap(seq);
            }
            self.enqueue(seq);
            false
        });
        self.swaps.leaving = leaving;
    }

    /// Admits a sequence from host memory: blocks that the index still has are shared, the others copied back.
    pub(crate) fn admit_swapped(&mut self, seq: Seq, all: u32, budget: u32) -> Try {
        let Some(cold) = self.seqs.get(seq) else { return Try::NoRoom };
        let Some(computed) = cold.swap.as_ref().map(|swap| swap.computed) else { return Try::NoRoom };
        let full = ((computed >> self.geometry.shift) as usize).min(cold.hashes.len());
        let hit = self.kv.blocks.find_prefix(&cold.hashes[..full]);
        let shared = hit.blocks as u32;
        let copied = shared..computed.div_ceil(self.geometry.block_tokens);
        let (pages, _) = self.swap_size(copied.clone(), computed);
        if self.swaps.back.len() + pages > self.layout.deltas {
            return Try::Later;
        }
        let mut row = std::mem::take(&mut self.scratch);
        row.clear();
        let Some(slot) = self.reserve(hit.leaf, all - shared, &mut row) else {
            self.scratch = row;
            return Try::NoRoom;
        };
        let step = self.step + 1;
        let Self { seqs, swaps, geometry, kv, .. } = self;
        if let Some(cold) = seqs.get_mut(seq)
            && let Some(swap) = &mut cold.swap
        {
            (cold.published, cold.cursor) = (shared, hit.leaf);
            swap.step = step;
            for index in copied {
                let (id, block) = (swap.blocks[index as usize], row[index as usize]);
                for (group, section) in geometry.sections.iter().enumerate() {
                    for j in 0..geometry.pages_of(group, index, computed) {
                        let from = host_page(id, section.pages_shift) + j;
                        let to = kv.blocks.page(group, block, j as usize);
                        swaps.back.push([group as i32, from as i32, to as i32]);
                    }
                }
            }
            if geometry.has_state {
                swaps.back_states.push([swap.slot.0 as i32 - 1, slot.0 as i32]);
            }
            swaps.arriving.push(seq);
        }
        self.metrics.swapped_in += 1;
        self.metrics.swap_in_pages += pages as u64;
        let begin = self.seqs.get(seq).map(|cold| cold.begin).unwrap_or_default();
        let begin = begin.go_on(computed);
        let rows = self.take_lane(seq, slot, &row, begin, true, budget);
        self.scratch = row;
        Try::In(rows)
    }

    /// Writes the copies of the step being planned into its ring slot.
    pub(crate) fn fill_swaps(&mut self, slot: usize) {
        let Self { ring, swaps, .. } = self;
        if swaps.out.is_empty() && swaps.back.is_empty() && swaps.out_states.is_empty() && swaps.back_states.is_empty()
        {
            return;
        }
        let mut put = |field, word, list: &[i32], each| {
            ring.get_mut(slot, field)[..list.len()].copy_from_slice(list);
            ring.get_mut(slot, F::Header)[word] = (list.len() / each) as i32;
        };
        put(F::SwapOut, header::SWAP_OUT, swaps.out.as_flattened(), 3);
        put(F::SwapIn, header::SWAP_IN, swaps.back.as_flattened(), 3);
        put(F::SwapOutStates, header::SWAP_OUT_STATES, swaps.out_states.as_flattened(), 2);
        put(F::SwapInStates, header::SWAP_IN_STATES, swaps.back_states.as_flattened(), 2);
        swaps.out.clear();
        swaps.back.clear();
        swaps.out_states.clear();
        swaps.back_states.clear();
    }

    /// Host blocks and host slots that sequences have, for `check`.
    pub(crate) fn host_holders(&self) -> [u32; 2] {
        let mut held = [0; 2];
        for (_, _, cold) in self.seqs.iter() {
            if let Some(swap) = &cold.swap {
                held[0] += swap.blocks.len() as u32;
                held[1] += u32::from(!swap.slot.is_null());
            }
        }
        held
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cheaper_way_back_is_taken_and_an_unknown_rate_never_swaps() {
        let rates = |swap_bytes, prefill_tokens| Rates { swap_bytes, prefill_tokens };
        assert!(rates(1e9, 1e3).prefer_swap(1 << 20, 1000), "1 ms against 1 s");
        assert!(!rates(1e6, 1e6).prefer_swap(1 << 20, 1000), "1 s against 1 ms");
        assert!(!rates(1000.0, 10.0).prefer_swap(100_000, 1000), "as long either way");
        for unknown in [rates(0.0, 1e3), rates(1e9, 0.0), Rates::default()] {
            assert!(!unknown.prefer_swap(1, 1 << 20));
        }
    }
}
