//! Slots for per-sequence state that does not page: the pool's verbs without hashes.

use std::collections::VecDeque;

use crate::counts::Counts;
use crate::error::PoolError;
use crate::ids::{Fence, StateSlot, StepId, TransferId};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    Held,
    Parked,
}

/// Table of state slots. Slot 0 is null and never handed out.
///
/// Fences follow the pool's rules: they never go back, and `Step(n)` is open when `n < now`.
#[derive(Debug)]
pub struct StateSlots {
    states: Box<[State]>,
    free: Vec<StateSlot>,
    parked: VecDeque<(u64, StateSlot)>,
    behind_transfers: Vec<(TransferId, StateSlot)>,
    transfers: Vec<TransferId>,
    held: u32,
    last_fence: u64,
    opened: u64,
    misuse: u64,
}

impl StateSlots {
    /// A table with `total` slots, the null slot included.
    ///
    /// # Errors
    /// [`PoolError::Config`] if no slot is left beside the null slot.
    pub fn new(total: u32) -> Result<Self, PoolError> {
        if total < 2 {
            return Err(PoolError::Config("state slots must hold the null slot and one more"));
        }
        Ok(Self {
            states: vec![State::Free; total as usize].into_boxed_slice(),
            free: (1..total).rev().map(StateSlot).collect(),
            parked: VecDeque::with_capacity(total as usize),
            behind_transfers: Vec::new(),
            transfers: Vec::new(),
            held: 0,
            last_fence: 0,
            opened: 1,
            misuse: 0,
        })
    }

    /// Slots an empty table can hand out.
    pub fn capacity(&self) -> u32 {
        self.states.len() as u32 - 1
    }

    /// Slots that [`StateSlots::alloc`] can hand out now.
    #[inline]
    pub fn available(&self, now: StepId) -> u32 {
        self.free.len() as u32 + self.parked.iter().take_while(|p| p.0 < now.0).count() as u32
    }

    /// Released slots whose fence is still closed.
    #[inline]
    pub fn coming_back(&self, now: StepId) -> u32 {
        (self.free.len() + self.parked.len() + self.behind_transfers.len()) as u32 - self.available(now)
    }

    /// A slot with one holder.
    pub fn alloc(&mut self, now: StepId) -> Option<StateSlot> {
        self.retire(now);
        let slot = self.free.pop()?;
        self.states[slot.index()] = State::Held;
        self.held += 1;
        Some(slot)
    }

    /// Gives a slot back behind a fence.
    ///
    /// # Errors
    /// [`PoolError::BadSlot`], [`PoolError::SlotNotHeld`] (a double release), [`PoolError::UnknownTransfer`]. Nothing is
    /// changed.
    pub fn release(&mut self, slot: StateSlot, fence: Fence) -> Result<(), PoolError> {
        let error = match self.states.get(slot.index()) {
            None => Some(PoolError::BadSlot(slot)),
            Some(_) if slot.is_null() => Some(PoolError::BadSlot(slot)),
            Some(State::Free | State::Parked) => Some(PoolError::SlotNotHeld(slot)),
            Some(State::Held) => match fence {
                Fence::Transfer(id) if !self.transfers.contains(&id) => Some(PoolError::UnknownTransfer(id)),
                _ => None,
            },
        };
        if let Some(error) = error {
            self.misuse += 1;
            return Err(error);
        }
        self.held -= 1;
        match fence {
            Fence::Open => self.park(slot),
            Fence::Step(step) => {
                self.last_fence = self.last_fence.max(step.0);
                self.park(slot);
            }
            Fence::Transfer(id) => {
                self.states[slot.index()] = State::Parked;
                self.behind_transfers.push((id, slot));
            }
        }
        Ok(())
    }

    fn park(&mut self, slot: StateSlot) {
        if self.last_fence < self.opened {
            self.states[slot.index()] = State::Free;
            self.free.push(slot);
        } else {
            self.states[slot.index()] = State::Parked;
            self.parked.push_back((self.last_fence, slot));
        }
    }

    /// Opens fences up to `now`.
    #[inline]
    pub fn retire(&mut self, now: StepId) {
        self.opened = self.opened.max(now.0);
        while let Some(&(step, slot)) = self.parked.front()
            && step < self.opened
        {
            self.parked.pop_front();
            self.states[slot.index()] = State::Free;
            self.free.push(slot);
        }
    }

    /// From now on fences may name this transfer. False if it is open already.
    pub fn open_transfer(&mut self, id: TransferId) -> bool {
        let fresh = !self.transfers.contains(&id);
        if fresh {
            self.transfers.push(id);
        }
        fresh
    }

    /// Frees the slots released behind the transfer. False, and no effect, if it is not open.
    pub fn close_transfer(&mut self, id: TransferId) -> bool {
        let Some(at) = self.transfers.iter().position(|&t| t == id) else {
            return false;
        };
        self.transfers.swap_remove(at);
        let mut at = 0;
        while at < self.behind_transfers.len() {
            if self.behind_transfers[at].0 == id {
                let (_, slot) = self.behind_transfers.swap_remove(at);
                self.park(slot);
            } else {
                at += 1;
            }
        }
        true
    }

    /// True while the slot has a holder.
    pub fn is_held(&self, slot: StateSlot) -> bool {
        !slot.is_null() && self.states.get(slot.index()) == Some(&State::Held)
    }

    /// States of the slots. Slots are never cached.
    pub fn counts(&self) -> Counts {
        Counts {
            total: self.states.len() as u32,
            free: self.free.len() as u32,
            held: self.held,
            parked: (self.parked.len() + self.behind_transfers.len()) as u32,
            reserved: 1,
            ..Counts::default()
        }
    }

    /// Refused calls.
    pub fn misuse(&self) -> u64 {
        self.misuse
    }

    /// Full recount, for tests.
    ///
    /// # Errors
    /// What disagrees.
    pub fn check(&self) -> Result<(), String> {
        let number = |state| self.states.iter().skip(1).filter(|&&s| s == state).count() as u32;
        let counts = self.counts();
        let seen = (number(State::Free), number(State::Held), number(State::Parked));
        if seen != (counts.free, counts.held, counts.parked) || !counts.adds_up() {
            return Err(format!("recounted (free, held, parked) = {seen:?}, kept {counts:?}"));
        }
        let mut listed = vec![None; self.states.len()];
        let parked = self.parked.iter().map(|p| p.1).chain(self.behind_transfers.iter().map(|p| p.1));
        let all = self.free.iter().map(|&s| (s, State::Free)).chain(parked.map(|s| (s, State::Parked)));
        for (slot, state) in all {
            if slot.is_null() || listed[slot.index()].replace(state).is_some() || self.states[slot.index()] != state {
                return Err(format!("slot {} is listed twice or under the wrong state", slot.0));
            }
        }
        Ok(())
    }
}
