//! What moves KV and state between the devices of two rigs, or makes it up from a prompt.

use super::{Rig, values};
use deepinfer_scheduler::{Block, Fetch, Load, Save, Seq};

/// A step, and what a copy behind it writes: (slot map, entry, value).
pub type QueuedCopy = (u64, Vec<(usize, usize, u64)>);

impl Rig {
    /// Calls `each(slot map, entry, position)` for every entry that the first `tokens` positions have in a row of blocks.
    pub fn entries(&self, blocks: &[Block], tokens: u32) -> Vec<(usize, usize, u32)> {
        let s = &self.scheduler;
        let bt = s.block_tokens();
        let mut found = Vec::new();
        for (m, map) in s.slot_maps().iter().enumerate() {
            for p in (0..tokens).filter(|p| (p + 1) % (1 << map.ratio_shift) == 0) {
                let page = s.page(map.group, blocks[(p / bt) as usize], ((p % bt) >> map.page_shift) as usize);
                let within = p & ((1 << map.page_shift) - 1);
                found.push((m, (page * map.entries + (within >> map.ratio_shift)) as usize, p));
            }
        }
        found
    }

    /// Fills what a load reserved for a sequence whose tokens are `history`, as a mover that has all of it.
    pub fn fill_load(&mut self, load: &Load, history: &[u32]) {
        let h = values(history);
        for (m, at, p) in self.entries(&load.blocks, load.tokens) {
            if p >= load.present {
                self.device_mut(m)[at] = h[p as usize];
            }
        }
        if self.has_state {
            self.device.states[load.slot.index()] = h[load.tokens as usize - 1];
            self.device.seen[load.slot.index()] = load.tokens;
        }
    }

    /// Puts a copy into the device's queue that brings the first `arrived` positions of a fetch for a sequence whose tokens are `history`;
    /// what lies behind them is nonsense.
    pub fn fill_fetch(&mut self, fetch: &Fetch, history: &[u32], arrived: u32) {
        let h = values(history);
        let entries = self.entries(&fetch.blocks, fetch.tokens - fetch.present).into_iter();
        let value = |p: u32| if p < arrived { h[p as usize] } else { 0xBAD };
        let writes = entries.map(|(m, at, p)| (m, at, value(p + fetch.present))).collect();
        // As early and as late as may be.
        let newest = self.queue.back().map_or(0, |plan| plan.step.0);
        let behind = if fetch.transfer.generation.is_multiple_of(2) { newest } else { fetch.after.0 };
        self.copies.push((behind, writes));
        self.copy_queued(self.executed + 1);
    }

    /// Everything that was queued before step `next`, in order.
    pub fn copy_queued(&mut self, next: u64) {
        let (now, later) = std::mem::take(&mut self.copies).into_iter().partition(|(behind, _)| *behind < next);
        self.copies = later;
        let now: Vec<QueuedCopy> = now;
        for (m, at, value) in now.into_iter().flat_map(|(_, writes)| writes) {
            self.device_mut(m)[at] = value;
        }
    }

    /// Fetches all of what the store would have for a sequence. What it had to write.
    pub fn fetch(&mut self, seq: Seq, tokens: u32) -> Fetch {
        let fetch = self.scheduler.begin_fetch(seq, tokens).unwrap();
        let history = self.requests[&seq].prompt.clone();
        self.fill_fetch(&fetch, &history, fetch.tokens);
        assert!(self.scheduler.end_fetch(fetch.transfer, fetch.tokens));
        self.verify();
        fetch
    }

    /// Copies what `save` of another rig holds into what `load` reserved here.
    pub fn copy_from(&mut self, other: &Rig, save: &Save, load: &Load) {
        let from = other.entries(&save.blocks, load.tokens);
        for ((m, from, p), (_, to, _)) in from.into_iter().zip(self.entries(&load.blocks, load.tokens)) {
            if p >= load.present {
                self.device.kv[m][to] = other.device.kv[m][from];
            }
        }
        if self.has_state {
            self.device.states[load.slot.index()] = other.device.states[save.slot.index()];
            self.device.seen[load.slot.index()] = other.device.seen[save.slot.index()];
            if let (Some(to), Some(from)) = (&mut self.windows, &other.windows) {
                to.slots[load.slot.index()] = from.slots[save.slot.index()].clone();
            }
        }
    }
}
