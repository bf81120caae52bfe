//! Blocks of all groups and state slots taken together or not at all.

use crate::ids::{Block, Owner, StateSlot, StepId};
use crate::pool::BlockPool;
use crate::state_slots::StateSlots;

/// What a sequence needs at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Need {
    /// Blocks, each with its pages in every group.
    pub blocks: u32,
    /// State slots.
    pub slots: u32,
}

impl Need {
    /// True if an empty pool and table would suffice: false means "never".
    pub fn fits_empty(self, pool: &BlockPool, slots: &StateSlots) -> bool {
        self.blocks <= pool.capacity() && self.slots <= slots.capacity()
    }

    /// True if [`reserve`] would succeed now.
    pub fn fits(self, pool: &BlockPool, slots: &StateSlots, now: StepId) -> bool {
        self.blocks <= pool.available(now) && self.slots <= slots.available(now)
    }
}

/// Takes the whole need, appending to `blocks` and `rows`, or returns false with nothing changed.
pub fn reserve(
    pool: &mut BlockPool,
    slots: &mut StateSlots,
    now: StepId,
    owner: Owner,
    need: Need,
    blocks: &mut Vec<Block>,
    rows: &mut Vec<StateSlot>,
) -> bool {
    if !need.fits(pool, slots, now) || !pool.alloc_many(now, owner, need.blocks, blocks) {
        return false;
    }
    rows.extend((0..need.slots).map_while(|_| slots.alloc(now)));
    true
}
