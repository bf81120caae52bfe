//! Transfers: each holds blocks and a slot in its own right, so that aborting a sequence is immediate in every status.
//!
//! A save keeps what a sequence had, past its end. A load fills blocks for a sequence that waits for KV; what arrives in
//! part is a miss. Chains that go to a store or come from one are transfers too (see `store`). Closing twice, late, or for a
//! sequence that is gone does nothing but count.

use crate::error::TransferError;
use crate::kv::Holding;
use crate::pool::Status;
use crate::scheduler::Scheduler;
use crate::store::{Fetching, Saving};
use deepinfer_kvindex::{Block, Fence, Owner, Seq, StateSlot, StepId, TransferId};

/// What a save may read until it is closed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Save {
    /// To be closed.
    pub transfer: TransferId,
    /// Blocks of the sequence, first block first.
    pub blocks: Vec<Block>,
    /// Positions whose KV is valid.
    pub tokens: u32,
    /// State slot.
    pub slot: StateSlot,
}

/// What a load must write before it is closed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Load {
    /// To be closed.
    pub transfer: TransferId,
    /// Blocks of the sequence, first block first.
    pub blocks: Vec<Block>,
    /// Leading positions that are in place already.
    pub present: u32,
    /// Positions in all.
    pub tokens: u32,
    /// State slot.
    pub slot: StateSlot,
    /// Newest launched step, 0 when none is in flight: whoever wrote or reads these blocks before does so in it at the
    /// latest. The mover writes after it has completed, or behind it in the device's order.
    pub after: StepId,
}

pub(crate) enum Kind {
    /// Reference on the published chain as it was at the start; null if there was none.
    Save(Block),
    Load {
        row: Vec<Block>,
        present: u32,
        leaf: Block,
        slot: StateSlot,
        tokens: u32,
    },
    /// Blocks for the index, from a store.
    Fetch(Fetching),
    /// A chain of the index, to a store.
    Chain(Saving),
}

pub(crate) struct Open {
    pub seq: Seq,
    pub kind: Kind,
}

/// Open transfers by index, and the sequences whose load was delivered and who wait for a lane.
#[derive(Default)]
pub(crate) struct Transfers {
    table: Vec<(u32, Option<Open>)>,
    delivered: Vec<Seq>,
}

impl Transfers {
    pub fn open(&self) -> usize {
        self.table.iter().filter(|(_, open)| open.is_some()).count()
    }

    /// Slots that loads hold.
    pub fn slots(&self) -> u32 {
        let loads = self.table.iter().filter(|(_, o)| o.as_ref().is_some_and(|o| matches!(o.kind, Kind::Load { .. })));
        loads.count() as u32
    }

    #[inline]
    pub fn delivered(&self) -> u32 {
        self.delivered.len() as u32
    }

    /// The sequence left the queue.
    #[inline]
    pub fn taken(&mut self, seq: Seq) {
        if !self.delivered.is_empty() {
            self.delivered.retain(|&s| s != seq);
        }
    }

    /// Fetches with their ids.
    pub fn fetches(&self) -> impl Iterator<Item = (TransferId, &Fetching)> {
        (0..).zip(&self.table).filter_map(|(index, (generation, open))| match &open.as_ref()?.kind {
            Kind::Fetch(fetching) => Some((TransferId { index, generation: *generation }, fetching)),
            _ => None,
        })
    }

    /// Appends every reference that open transfers hold, one entry a reference.
    pub fn holders(&self, refs: &mut Vec<(Block, Owner)>) {
        for open in self.table.iter().filter_map(|(_, open)| open.as_ref()) {
            let (leaf, own) = match &open.kind {
                Kind::Save(cursor) => (*cursor, &[][..]),
                Kind::Load { row, present, leaf, .. } => (*leaf, &row[*present as usize..]),
                Kind::Fetch(fetching) => (fetching.leaf, &*fetching.blocks),
                Kind::Chain(saving) => (saving.leaf, &[][..]),
            };
            let leaf = Some(&leaf).filter(|leaf| !leaf.is_null());
            refs.extend(own.iter().chain(leaf).map(|&block| (block, Owner::Transfer)));
        }
    }

    pub fn insert(&mut self, open: Open) -> TransferId {
        let index = self.table.iter().position(|(_, o)| o.is_none()).unwrap_or_else(|| {
            self.table.push((0, None));
            self.table.len() - 1
        });
        let (generation, place) = &mut self.table[index];
        *generation = generation.wrapping_add(1).max(1);
        *place = Some(open);
        TransferId { index: index as u32, generation: *generation }
    }

    fn remove(&mut self, id: TransferId) -> Option<Open> {
        self.remove_if(id, |_| true)
    }

    /// Takes a transfer out if it is open and of the right kind.
    pub fn remove_if(&mut self, id: TransferId, right: impl FnOnce(&Kind) -> bool) -> Option<Open> {
        let (generation, place) = self.table.get_mut(id.index as usize)?;
        if *generation == id.generation { place.take_if(|open| right(&open.kind)) } else { None }
    }
}

impl Scheduler {
    /// Starts reading the KV and state of a running or handed-over sequence whose first step since its admission has
    /// completed. They stay as they are, past its end, until
    /// [`Scheduler::close_transfer`].
    ///
    /// # Errors
    /// [`TransferError`].
    pub fn begin_save(&mut self, seq: Seq) -> Result<Save, TransferError> {
        let status = self.seqs.status(seq).ok_or(TransferError::Stale(seq))?;
        let lane = self.seqs.lane(seq);
        // Rows below a hit make up state: until they are through, there is none worth reading.
        let makes_up = |lane| self.seqs.get(seq).is_some_and(|cold| self.lanes.confirmed[lane] < cold.begin.hit);
        let readable = matches!(status, Status::Running | Status::Handover) && !lane.is_some_and(makes_up);
        if !readable || !self.has_arrived(seq) {
            return Err(TransferError::Status(seq));
        }
        if let Some(lane) = lane {
            self.publish_filled(lane);
        }
        let Some(cold) = self.seqs.get(seq) else { return Err(TransferError::Stale(seq)) };
        if cold.save.is_some() {
            return Err(TransferError::Busy(seq));
        }
        let (tokens, slot, row) = match (lane, &cold.holding) {
            (Some(lane), _) => {
                let slot = self.lanes.state[lane];
                (self.lanes.confirmed[lane], slot, self.kv.tables.row(slot))
            }
            (None, Some(holding)) => (holding.computed, holding.slot.0, &*holding.row),
            (None, None) => return Err(TransferError::Status(seq)),
        };
        let blocks = row[..tokens.div_ceil(self.geometry.block_tokens) as usize].to_vec();
        let cursor = cold.cursor;
        if !cursor.is_null() {
            let pinned = self.kv.blocks.pin(cursor, Owner::Transfer);
            self.kv.misuse += u64::from(pinned.is_err());
        }
        let transfer = self.transfers.insert(Open { seq, kind: Kind::Save(cursor) });
        self.kv.blocks.open_transfer(transfer);
        self.kv.states.open_transfer(transfer);
        if let Some(cold) = self.seqs.get_mut(seq) {
            cold.save = Some(transfer);
        }
        Ok(Save { transfer, blocks, tokens, slot: StateSlot(slot) })
    }

    /// Reserves blocks and a slot for the first `tokens` positions of a sequence that waits for KV. What the index has of
    /// them is taken from there. At least one position stays to be computed.
    ///
    /// # Errors
    /// [`TransferError`]; `NoRoom` also where the oldest waiting sequence would no longer fit.
    pub fn begin_load(&mut self, seq: Seq, tokens: u32) -> Result<Load, TransferError> {
        match self.seqs.status(seq) {
            None | Some(Status::Finished) => return Err(TransferError::Stale(seq)),
            Some(Status::WaitKv) => {}
            Some(_) => return Err(TransferError::Status(seq)),
        }
        let Some(cold) = self.seqs.get(seq) else { return Err(TransferError::Stale(seq)) };
        if !cold.flags.wait_kv {
            return Err(TransferError::Status(seq));
        }
        if cold.load.is_some() {
            return Err(TransferError::Busy(seq));
        }
        let most = cold.history.len() as u32 - 1;
        if tokens == 0 || tokens > most {
            return Err(TransferError::Length { tokens, most });
        }
        let full = ((tokens >> self.geometry.shift) as usize).min(cold.hashes.len());
        let hit = self.kv.blocks.find_prefix(&cold.hashes[..full]);
        let need = tokens.div_ceil(self.geometry.block_tokens) - hit.blocks as u32;
        let kept_slot = u32::from(!self.waiting.is_empty());
        let cost = need + self.kv.blocks.pin_cost(hit.leaf) + self.kept_for_head();
        if cost > self.kv.available() || self.kv.states.available(self.kv.now) <= kept_slot {
            return Err(TransferError::NoRoom { need });
        }
        let Some(slot) = self.kv.states.alloc(self.kv.now) else { return Err(TransferError::NoRoom { need }) };
        self.drop_snapshots_of(slot.0);
        let mut row = Vec::new();
        if !hit.leaf.is_null() {
            self.kv.pin_chain(hit.leaf, Owner::Transfer, &mut row);
        }
        self.kv.blocks.alloc_many(self.kv.now, Owner::Transfer, need, &mut row);
        let blocks = row.clone();
        let present = hit.blocks as u32;
        let kind = Kind::Load { row, present, leaf: hit.leaf, slot, tokens };
        let transfer = self.transfers.insert(Open { seq, kind });
        if let Some(cold) = self.seqs.get_mut(seq) {
            cold.load = Some(transfer);
        }
        let after = self.newest_in_flight();
        Ok(Load { transfer, blocks, present: present << self.geometry.shift, tokens, slot, after })
    }

    /// Blocks that the oldest waiting sequence may need: inbound KV leaves them.
    pub(crate) fn kept_for_head(&self) -> u32 {
        let head = self.waiting.head().and_then(|place| self.seqs.get(place.seq()));
        head.map_or(0, |head| (head.history.len() as u32).div_ceil(self.geometry.block_tokens))
    }

    /// Newest planned step, 0 when none is in flight: what is free by now may still be used by it.
    pub(crate) fn newest_in_flight(&self) -> StepId {
        StepId(if self.in_flight() > 0 { self.step } else { 0 })
    }

    /// Ends a transfer: its mover touches the memory no more. False, and only counted, if it is not open.
    pub fn close_transfer(&mut self, id: TransferId, ok: bool) -> bool {
        let Some(open) = self.transfers.remove(id) else {
            self.metrics.stale += 1;
            return false;
        };
        let fence = Fence::Step(self.kv.launched);
        match open.kind {
            Kind::Save(cursor) => {
                if !cursor.is_null() {
                    self.kv.unpin(cursor, Owner::Transfer, fence);
                }
                self.kv.blocks.close_transfer(id);
                self.kv.states.close_transfer(id);
                if let Some(cold) = self.seqs.get_mut(open.seq) {
                    cold.save = None;
                }
            }
            Kind::Load { row, present, leaf, slot, tokens } => {
                let waits = self.seqs.status(open.seq) == Some(Status::WaitKv);
                let keep = ok && waits;
                if keep {
                    // Take before giving, so that nothing becomes free in between.
                    let mut refused = 0;
                    if !leaf.is_null() {
                        refused += u64::from(self.kv.blocks.pin(leaf, Owner::Sequence).is_err());
                    }
                    for &block in &row[present as usize..] {
                        refused += u64::from(self.kv.blocks.pin(block, Owner::Sequence).is_err());
                    }
                    self.kv.misuse += refused;
                }
                for &block in row[present as usize..].iter().rev() {
                    self.kv.release_private(block, Owner::Transfer, fence);
                }
                if !leaf.is_null() {
                    self.kv.unpin(leaf, Owner::Transfer, fence);
                }
                if !keep {
                    self.kv.release_slot(slot, fence);
                }
                if let Some(cold) = self.seqs.get_mut(open.seq) {
                    cold.load = None;
                    if keep {
                        cold.published = present;
                        cold.cursor = leaf;
                        cold.holding = Some(Holding { row, computed: tokens, slot });
                    }
                }
                if waits {
                    self.stop_lease(open.seq);
                    // It arrived, or what arrived counts for nothing: the other side's copy is not asked for again.
                    self.release_remote(open.seq);
                    if keep {
                        self.transfers.delivered.push(open.seq);
                    }
                    self.enqueue(open.seq);
                }
            }
            Kind::Fetch(fetching) => self.finish_fetch(fetching, if ok { u32::MAX } else { 0 }),
            Kind::Chain(saving) => self.finish_save(&saving, ok),
        }
        true
    }

    /// A waiting sequence gives up the KV that was loaded for it; it computes it when its turn comes.
    pub(crate) fn drop_delivered(&mut self, seq: Seq) {
        self.transfers.taken(seq);
        if let Some(holding) = self.seqs.get_mut(seq).and_then(|c| c.holding.take()) {
            self.release_holding(seq, holding);
        }
    }
}
