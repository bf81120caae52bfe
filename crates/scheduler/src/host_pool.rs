//! The bounded pool of host memory that swapped sequences lie in: ids only, the bytes are the worker's.
//!
//! A host block has room for the pages that a block owns in every group. Page `j` of host block `b` in a group is host page
//! `b * pages_per_block + j` of that group, counted from 0.

use deepinfer_kvindex::{Counts, Fence, StateSlot, StateSlots, StepId};

/// One id of either kind; the pools count from 1 and so does this.
pub(crate) type HostId = StateSlot;

/// Host blocks and host slots, each with the fences of the device's pools. `None` where there are none.
pub(crate) struct HostPool {
    blocks: Option<StateSlots>,
    slots: Option<StateSlots>,
    /// Calls that a pool refused; 0 unless there is a fault.
    pub misuse: u64,
}

impl HostPool {
    pub fn new(blocks: u32, slots: u32) -> Self {
        let pool = |n: u32| if n == 0 { None } else { StateSlots::new(n + 1).ok() };
        Self { blocks: pool(blocks), slots: pool(slots), misuse: 0 }
    }

    /// Appends `blocks` ids to `into` and gives a slot if one is wanted (else null): all or nothing.
    pub fn take(&mut self, now: StepId, blocks: u32, slot: bool, into: &mut Vec<HostId>) -> Option<HostId> {
        let pool = self.blocks.as_mut()?;
        if pool.available(now) < blocks {
            return None;
        }
        let slot = if slot { self.slots.as_mut()?.alloc(now)? } else { HostId::NULL };
        into.extend((0..blocks).map_while(|_| pool.alloc(now)));
        Some(slot)
    }

    /// Whether that much could be taken now.
    pub fn has_room(&self, now: StepId, blocks: u32, slot: bool) -> bool {
        let has = |pool: &Option<StateSlots>, n| n == 0 || pool.as_ref().is_some_and(|p| p.available(now) >= n);
        has(&self.blocks, blocks) && has(&self.slots, u32::from(slot))
    }

    /// Gives ids back behind `fence`; the null slot is nobody's.
    pub fn give_back(&mut self, blocks: &[HostId], slot: HostId, fence: Fence) {
        let released = |pool: &mut Option<StateSlots>, id| pool.as_mut().is_some_and(|p| p.release(id, fence).is_ok());
        for &block in blocks {
            self.misuse += u64::from(!released(&mut self.blocks, block));
        }
        if !slot.is_null() {
            self.misuse += u64::from(!released(&mut self.slots, slot));
        }
    }

    pub fn retire(&mut self, now: StepId) {
        for pool in [&mut self.blocks, &mut self.slots].into_iter().flatten() {
            pool.retire(now);
        }
    }

    /// States of host blocks and host slots; all zero where there are none.
    pub fn counts(&self) -> [Counts; 2] {
        [&self.blocks, &self.slots].map(|pool| pool.as_ref().map(StateSlots::counts).unwrap_or_default())
    }

    pub fn check(&self) -> Result<(), String> {
        [&self.blocks, &self.slots].into_iter().flatten().try_for_each(StateSlots::check)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_need_is_taken_whole_or_not_at_all() {
        let mut pool = HostPool::new(3, 1);
        let mut ids = Vec::new();
        assert_eq!(pool.take(StepId(1), 4, true, &mut ids), None);
        assert!(ids.is_empty());
        let slot = pool.take(StepId(1), 2, true, &mut ids).unwrap_or_default();
        assert!(!slot.is_null() && ids.len() == 2);
        assert_eq!(pool.take(StepId(1), 1, true, &mut Vec::new()), None, "no slot is left");
        assert_eq!(pool.counts()[0].held, 2, "and no block was taken for it");
        pool.give_back(&ids, slot, Fence::Step(StepId(4)));
        assert_eq!(pool.take(StepId(4), 3, false, &mut Vec::new()), None, "behind the step that reads them");
        let mut again = Vec::new();
        assert_eq!(pool.take(StepId(5), 3, false, &mut again), Some(HostId::NULL));
        assert_eq!((pool.counts().map(|c| c.adds_up()), pool.misuse), ([true, true], 0));
        pool.give_back(&ids[..1], HostId::NULL, Fence::Open);
        pool.give_back(&ids[..1], HostId::NULL, Fence::Open);
        assert_eq!(pool.misuse, 1, "twice is a fault");
    }

    #[test]
    fn without_host_memory_nothing_is_taken() {
        let mut pool = HostPool::new(0, 0);
        assert_eq!(pool.take(StepId(1), 0, false, &mut Vec::new()), None);
        assert!(pool.counts().iter().all(Counts::adds_up));
    }
}
