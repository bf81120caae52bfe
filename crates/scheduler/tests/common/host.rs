//! Host memory of the toy device, and the copies between the two.

use super::Rig;
use deepinfer_scheduler::{Config, Scheduler, header};

/// What victims are swapped to.
pub struct Host {
    /// By slot map, then slot.
    kv: Vec<Vec<u64>>,
    /// With what they have seen.
    states: Vec<(u64, u32)>,
}

impl Host {
    pub fn new(scheduler: &Scheduler, config: &Config) -> Self {
        let entries = |m: &deepinfer_scheduler::SlotMap| {
            (config.host_blocks << scheduler.sections()[m.group].pages_shift) * m.entries
        };
        Self {
            kv: scheduler.slot_maps().iter().map(|m| vec![0; entries(m) as usize]).collect(),
            states: vec![(0, 0); config.host_slots as usize],
        }
    }
}

impl Rig {
    fn copies(&self, slot: usize, name: &str, n: i32, each: usize) -> Vec<Vec<usize>> {
        let words = &self.memory.get(slot, name)[..n as usize * each];
        words.chunks(each).map(|c| c.iter().map(|&w| w as usize).collect()).collect()
    }

    /// The first commands of a step after it resolved its placeholders.
    pub fn swap_out(&mut self, slot: usize, head: &[i32]) {
        for page in self.copies(slot, "swap_out", head[header::SWAP_OUT], 3) {
            self.copy_page(page[0], page[1], page[2], true);
        }
        for state in self.copies(slot, "swap_out_states", head[header::SWAP_OUT_STATES], 2) {
            assert!(state[0] > 0, "the null slot is nobody's");
            self.host.states[state[1]] = (self.device.states[state[0]], self.device.seen[state[0]]);
            if let Some(windows) = &mut self.windows {
                windows.host[state[1]] = windows.slots[state[0]].clone();
            }
        }
    }

    /// After tables, zeroes and clones, before what is restored.
    pub fn swap_in(&mut self, slot: usize, head: &[i32]) {
        for page in self.copies(slot, "swap_in", head[header::SWAP_IN], 3) {
            self.copy_page(page[0], page[2], page[1], false);
        }
        for state in self.copies(slot, "swap_in_states", head[header::SWAP_IN_STATES], 2) {
            assert!(state[1] > 0, "the null slot is nobody's");
            (self.device.states[state[1]], self.device.seen[state[1]]) = self.host.states[state[0]];
            if let Some(windows) = &mut self.windows {
                windows.slots[state[1]] = windows.host[state[0]].clone();
            }
        }
    }

    /// A step that failed copied nonsense.
    pub fn spoil_swaps(&mut self, slot: usize) {
        let head = self.memory.get(slot, "header").to_vec();
        let maps = self.scheduler.slot_maps().to_vec();
        let spoil = |kv: &mut [Vec<u64>], group, page| {
            for (m, map) in maps.iter().enumerate().filter(|(_, map)| map.group == group) {
                let e = map.entries as usize;
                kv[m][page * e..(page + 1) * e].fill(0xBAD);
            }
        };
        for page in self.copies(slot, "swap_out", head[header::SWAP_OUT], 3) {
            spoil(&mut self.host.kv, page[0], page[2]);
        }
        for page in self.copies(slot, "swap_in", head[header::SWAP_IN], 3) {
            spoil(&mut self.device.kv, page[0], page[2]);
        }
        for state in self.copies(slot, "swap_out_states", head[header::SWAP_OUT_STATES], 2) {
            self.host.states[state[1]] = (0xBAD, 0);
            if let Some(windows) = &mut self.windows {
                windows.host[state[1]] = super::window::State::default();
            }
        }
    }

    fn copy_page(&mut self, group: usize, device: usize, host: usize, out: bool) {
        assert!(device > 0, "the null page is nobody's");
        let maps = self.scheduler.slot_maps().to_vec();
        for (m, map) in maps.iter().enumerate().filter(|(_, map)| map.group == group) {
            let e = map.entries as usize;
            let (there, here) = (&mut self.host.kv[m], &mut self.device.kv[m]);
            let (there, here) = (&mut there[host * e..(host + 1) * e], &mut here[device * e..(device + 1) * e]);
            if out {
                there.copy_from_slice(here);
            } else {
                here.copy_from_slice(there);
            }
        }
    }
}
