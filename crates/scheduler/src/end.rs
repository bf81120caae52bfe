//! How a sequence ends or gives up its lane.

use crate::kv::Holding;
use crate::lanes::flag;
use crate::output::{FIRST, OUTPUT_WORDS, STREAMS};
use crate::pool::{Finish, Status};
use crate::scheduler::Scheduler;
use deepinfer_kvindex::{Owner, Seq, StateSlot};

/// What becomes of a lane's blocks and slot.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Leave {
    Release,
    Hold,
}

impl Scheduler {
    /// Publishes what is filled, moves the newest tokens to the history, marks the lane dead and releases its blocks and
    /// slot behind the newest launched step, or behind the save that reads them.
    pub(crate) fn leave_lane(&mut self, lane: usize, leave: Leave) {
        let seq = self.lanes.seq[lane];
        let slot = self.lanes.state[lane];
        let confirmed = self.lanes.confirmed[lane];
        self.publish_filled(lane);
        if self.lanes.has_newest(lane) {
            let len = confirmed + 1;
            if let Some(cold) = self.seqs.get_mut(seq) {
                self.kv.tables.flush(slot, &mut cold.history, len);
            }
        }
        self.lanes.flags[lane] |= flag::DEAD;
        self.lanes.rows[lane] = 0;
        self.seqs.clear_lane(seq);
        let mut row = std::mem::take(&mut self.scratch);
        row.clear();
        row.extend_from_slice(&self.kv.tables.row(slot)[..self.lanes.blocks[lane] as usize]);
        let holding = Holding { row, computed: confirmed, slot: StateSlot(slot) };
        match leave {
            Leave::Release => self.scratch = self.release_holding(seq, holding),
            Leave::Hold => {
                if let Some(cold) = self.seqs.get_mut(seq) {
                    cold.holding = Some(holding);
                }
            }
        }
    }

    /// Gives back blocks and slot of a sequence. Returns the emptied list for reuse.
    pub(crate) fn release_holding(&mut self, seq: Seq, holding: Holding) -> Vec<deepinfer_kvindex::Block> {
        let Holding { row, slot, .. } = holding;
        let Some(cold) = self.seqs.get_mut(seq) else { return row };
        let fence = self.kv.fence(cold.save);
        let published = std::mem::take(&mut cold.published) as usize;
        let cursor = std::mem::take(&mut cold.cursor);
        for &block in row.iter().skip(published).rev() {
            self.kv.release_private(block, Owner::Sequence, fence);
        }
        for block in cold.duplicates.drain(..) {
            self.kv.release_private(block, Owner::Sequence, fence);
        }
        if !cursor.is_null() {
            self.kv.unpin(cursor, Owner::Sequence, fence);
        }
        self.kv.release_slot(slot, fence);
        row
    }

    /// Ends a sequence in whatever status it is, without a step: its last row waits for the next outputs.
    pub(crate) fn end_outside(&mut self, seq: Seq, finish: Finish) {
        let slot = self.info(seq).map_or(0, |info| info.slot);
        let row = [seq.index as i32, seq.generation as i32, slot as i32, 0, 0, finish as i32, 0, -1];
        if self.end(seq, finish) {
            let mut row = row;
            if let Some(cold) = self.seqs.get(seq) {
                row[6] = if cold.flags.stream { STREAMS } else { 0 };
                if cold.times.first_token == 0 {
                    row[6] |= FIRST;
                }
            }
            self.push_ended(row);
        }
    }

    fn push_ended(&mut self, row: [i32; OUTPUT_WORDS]) {
        self.outputs.pending.push(row);
        self.ended.push(Seq { index: row[0] as u32, generation: row[1] as u32 });
    }

    /// Ends a sequence: releases everything it holds, lets its forks go their own way. False if it had ended already.
    pub(crate) fn end(&mut self, seq: Seq, finish: Finish) -> bool {
        match self.seqs.status(seq) {
            None | Some(Status::Finished) => return false,
            Some(Status::Handover) => {
                // Its end has been reported; only what it holds is given up.
                self.dismiss(seq);
                return false;
            }
            Some(_) => {}
        }
        let natural = matches!(finish, Finish::Stop | Finish::Length);
        let hold = finish == Finish::Handover || natural && self.seqs.get(seq).is_some_and(|c| c.flags.hold);
        self.unqueue(seq);
        if let Some(lane) = self.seqs.lane(seq) {
            if natural || finish == Finish::Handover {
                self.note_snapshot(lane, true);
                self.note_end(lane);
            }
            self.leave_lane(lane, if hold { Leave::Hold } else { Leave::Release });
        }
        if !hold && let Some(holding) = self.seqs.get_mut(seq).and_then(|c| c.holding.take()) {
            self.release_holding(seq, holding);
        }
        self.drop_swap(seq);
        let now = self.now;
        let mut children = Vec::new();
        if let Some(cold) = self.seqs.get_mut(seq) {
            cold.finish = Some(finish);
            cold.times.finished = now;
            children = std::mem::take(&mut cold.children);
        }
        self.stop_lease(seq);
        self.release_remote(seq);
        self.seqs.set_status(seq, if hold { Status::Handover } else { Status::Finished });
        if hold {
            self.start_lease(seq, self.policy.handover_lease_ns);
        }
        self.release_forks(&children);
        self.live -= 1;
        self.metrics.finished[finish as usize - 1] += 1;
        true
    }

    /// Frees what a handed-over sequence still holds; its handle names nothing from here on. False if it holds nothing.
    pub fn release(&mut self, seq: Seq) -> bool {
        if self.seqs.status(seq) != Some(Status::Handover) {
            self.metrics.stale += 1;
            return false;
        }
        self.dismiss(seq);
        true
    }

    pub(crate) fn dismiss(&mut self, seq: Seq) {
        self.stop_lease(seq);
        if let Some(holding) = self.seqs.get_mut(seq).and_then(|c| c.holding.take()) {
            self.release_holding(seq, holding);
        }
        self.seqs.set_status(seq, Status::Finished);
        if !self.ended.contains(&seq) && !self.reported.contains(&seq) {
            self.reported.push(seq);
        }
    }

    /// Takes a sequence out of the queue if it is in it.
    pub(crate) fn unqueue(&mut self, seq: Seq) {
        if let Some(cold) = self.seqs.get_mut(seq)
            && std::mem::take(&mut cold.queued)
        {
            let place = cold.place(seq);
            self.waiting.remove(&place);
            self.transfers.taken(seq);
        }
    }

    /// Puts a sequence that lacks nothing but resources into the queue.
    pub(crate) fn enqueue(&mut self, seq: Seq) {
        let swapped = self.seqs.get(seq).is_some_and(|cold| cold.swap.is_some());
        self.seqs.set_status(seq, if swapped { Status::Swapped } else { Status::Ready });
        if let Some(cold) = self.seqs.get_mut(seq)
            && !std::mem::replace(&mut cold.queued, true)
        {
            let place = cold.place(seq);
            self.waiting.insert(place);
        }
    }

    /// Forgets the sequences whose last row has been read, and starts new outputs.
    pub(crate) fn begin_outputs(&mut self) {
        self.outputs.begin();
        for seq in self.reported.drain(..) {
            if self.seqs.status(seq) == Some(Status::Finished) {
                self.seqs.remove(seq);
                self.recycled.push(seq);
            }
        }
        self.shared.recycle(&mut self.recycled);
    }

    /// Appends the rows of sequences that ended outside of a step.
    pub(crate) fn report_ended(&mut self) {
        self.outputs.push_pending();
        self.reported.append(&mut self.ended);
    }

    /// Recounts who holds what from the sequences; for `check`.
    pub(crate) fn check_holders(&self) -> Result<(), String> {
        let mut refs = Vec::new();
        let mut slots = 0u32;
        for (seq, status, cold) in self.seqs.iter() {
            let lane = self.seqs.lane(seq);
            if lane.is_some() != (status == Status::Running) {
                return Err(format!("{seq:?} is {status:?} with lane {lane:?}"));
            }
            let of_lane = |l: usize| &self.kv.tables.row(self.lanes.state[l])[..self.lanes.blocks[l] as usize];
            if let Some(row) = lane.map(of_lane).or(cold.holding.as_ref().map(|h| &*h.row)) {
                let cursor = Some(&cold.cursor).filter(|cursor| !cursor.is_null());
                let own = row.iter().skip(cold.published as usize).chain(&cold.duplicates).chain(cursor);
                refs.extend(own.map(|&block| (block, Owner::Sequence)));
                slots += 1;
            } else if !cold.cursor.is_null() || cold.published > 0 || !cold.duplicates.is_empty() {
                return Err(format!("{seq:?} is {status:?}, holds nothing and has a cursor"));
            }
            if cold.queued != matches!(status, Status::Ready | Status::Swapped) {
                return Err(format!("{seq:?} is {status:?} and queued = {}", cold.queued));
            }
            let away = matches!(status, Status::SwappingOut | Status::Swapped);
            let arrives = status == Status::Running && self.swaps.arrives(seq);
            if cold.swap.is_some() != away && !(arrives && cold.swap.is_some()) {
                return Err(format!("{seq:?} is {status:?} with {:?} in host memory", cold.swap));
            }
        }
        let host = self.host.counts().map(|counts| counts.held);
        if host != self.host_holders() {
            return Err(format!("sequences have {:?} host blocks and slots, {host:?} are held", self.host_holders()));
        }
        slots += self.transfers.slots();
        self.transfers.holders(&mut refs);
        self.kv.blocks.check_holders(refs)?;
        if self.kv.states.counts().held != slots {
            return Err(format!("{slots} slots have an owner, {} are held", self.kv.states.counts().held));
        }
        for lane in 0..self.lanes.len() {
            if self.seqs.lane(self.lanes.seq[lane]) != Some(lane) {
                return Err(format!("lane {lane} is not its sequence's"));
            }
        }
        Ok(())
    }
}
