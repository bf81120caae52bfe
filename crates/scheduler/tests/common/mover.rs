//! What moves KV and state between the devices of two rigs, or makes it up from a prompt.

use super::{Rig, values};
use deepinfer_scheduler::{Block, Load, Save};

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
