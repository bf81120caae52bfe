//! `schedule`: which rows the next step has.
//!
//! Decoding lanes come first, one row each; drafts share what is left with the chunks of lanes in prefill, which always
//! get at least one row each; then sequences are admitted.

use crate::error::StepError;
use crate::lanes::flag;
use crate::preempt::Taken;
use crate::scheduler::Scheduler;
use deepinfer_kvindex::{Owner, Seq, StepId};

/// What a step is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[repr(i32)]
pub enum StepKind {
    /// Nothing to run.
    #[default]
    Idle = 0,
    /// Prefill rows only.
    Prefill = 1,
    /// Decode rows only.
    Decode = 2,
    /// Both.
    Mixed = 3,
    /// One row that belongs to nobody.
    Dummy = 4,
}

/// A planned step; everything else is in its ring slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Number of the step, to be given to `complete`.
    pub step: StepId,
    /// Ring slot.
    pub slot: usize,
    /// What it is made of.
    pub kind: StepKind,
    /// Token rows.
    pub rows: u32,
    /// Sequences.
    pub seqs: u32,
    /// Decoding sequences among them.
    pub decoding: u32,
    /// Sampling rows.
    pub samples: u32,
}

/// What a step was launched with: results are matched by this, never by what is current.
#[derive(Default)]
pub(crate) struct Launch {
    pub slot: usize,
    pub kind: StepKind,
    pub seqs: Vec<Seq>,
    /// Lane of each sequence while `version` is that of the lanes.
    pub lanes: Vec<u32>,
    pub rows: Vec<u32>,
    /// First sampling row of each sequence.
    pub sample_off: Vec<u32>,
    pub decoding: usize,
    /// Every decoding lane has one row and lane `i` is sequence `i`.
    pub uniform: bool,
    pub version: u64,
    pub samples: usize,
}

impl Launch {
    pub fn with_capacity(seqs: usize) -> Self {
        Self {
            seqs: Vec::with_capacity(seqs),
            lanes: Vec::with_capacity(seqs),
            rows: Vec::with_capacity(seqs),
            sample_off: Vec::with_capacity(seqs + 1),
            ..Self::default()
        }
    }
}

impl Scheduler {
    /// Plans the next step and writes it into its ring slot. `None`: nothing can run now; the slot then holds a dummy row.
    /// `now` is the caller's clock in nanoseconds.
    ///
    /// # Errors
    /// [`StepError`]; nothing has changed then.
    pub fn schedule(&mut self, now: u64) -> Result<Option<Plan>, StepError> {
        if let Some(error) = self.step_error() {
            return Err(error);
        }
        self.begin_step(now);
        let mut budget = self.limits.max_num_batched_tokens;
        budget = self.plan_running(budget);
        self.admit(budget);
        if self.lanes.rows.iter().all(|&rows| rows == 0) {
            let slot = self.ring.slot_of(self.step + 1).0;
            self.fill_dummy(slot, StepKind::Idle, 0);
            return Ok(None);
        }
        Ok(Some(self.fill()))
    }

    /// Plans a full step of one row that belongs to nobody: null page, null slot. It is completed like any other.
    ///
    /// # Errors
    /// [`StepError`]; nothing has changed then.
    pub fn plan_dummy(&mut self, now: u64) -> Result<Plan, StepError> {
        if let Some(error) = self.step_error() {
            return Err(error);
        }
        self.begin_step(now);
        self.lanes.rows.fill(0);
        self.step += 1;
        let slot = self.ring.slot_of(self.step).0;
        self.fill_dummy(slot, StepKind::Dummy, self.step);
        self.launch.seqs.clear();
        self.launch.lanes.clear();
        self.launch.rows.clear();
        self.launch.sample_off.clear();
        self.launch.slot = slot;
        self.launch.kind = StepKind::Dummy;
        self.launch.decoding = 0;
        self.launch.samples = 0;
        self.launch.uniform = true;
        self.launch.version = self.lanes.version;
        self.launched(slot);
        let (step, kind) = (StepId(self.step), StepKind::Dummy);
        Ok(Plan { step, slot, kind, rows: 1, seqs: 1, decoding: 1, samples: 0 })
    }

    /// Everything that comes before the first scan.
    fn begin_step(&mut self, now: u64) {
        self.now = now;
        let ordered_after = if self.device_ordered { self.step } else { self.completed };
        self.kv.now = StepId(ordered_after + 1);
        self.kv.launched = StepId(self.step);
        self.kv.retire();
        self.read_mail();
    }

    pub(crate) fn launched(&mut self, slot: usize) {
        self.ring.take(slot, self.step);
        self.in_flight = true;
        self.kv.launched = StepId(self.step);
        self.metrics.steps += 1;
    }

    /// Rows of the running lanes. Returns what is left of the budget.
    fn plan_running(&mut self, budget: u32) -> u32 {
        let decoding = self.lanes.decoding;
        let mut waits = 0;
        let mut gone = false;
        self.lanes.rows[..decoding].fill(1);
        let mask = self.geometry.mask;
        for lane in 0..decoding {
            if self.lanes.confirmed[lane] & mask == 0 {
                gone |= self.open_block(lane, &mut waits, true);
            }
        }
        if waits > 0 && self.lanes.len() == decoding && self.lanes.rows.iter().all(|&rows| rows == 0) {
            gone |= self.force_one(&mut waits);
        }
        let decode_rows = self.lanes.rows[..decoding].iter().sum::<u32>();
        let mut left = budget - decode_rows;
        if self.limits.max_draft > 0 {
            left = self.plan_drafts(left);
        }
        left = self.plan_chunks(left);
        if gone {
            self.lanes.settle(&mut self.seqs);
        }
        left
    }

    /// Everyone waits for blocks that may take long: the first in order goes on, at the cost of others.
    fn force_one(&mut self, waits: &mut u32) -> bool {
        let mut gone = false;
        loop {
            let first = (0..self.lanes.decoding)
                .filter(|&lane| self.lanes.flags[lane] & (flag::WAITS | flag::DEAD) == flag::WAITS)
                .min_by_key(|&lane| (self.lanes.priority[lane], self.lanes.arrival[lane]));
            let Some(lane) = first else { return gone };
            gone |= self.open_block(lane, waits, false);
            if self.lanes.flags[lane] & flag::DEAD == 0 {
                return gone;
            }
        }
    }

    /// Gives `lane` the block that its next position lies in. True if a lane was preempted for it.
    fn open_block(&mut self, lane: usize, waits: &mut u32, patient: bool) -> bool {
        if self.lanes.flags[lane] & flag::DEAD != 0 {
            return false;
        }
        self.lanes.flags[lane] &= !flag::WAITS;
        let index = self.lanes.confirmed[lane] >> self.geometry.shift;
        let slot = self.lanes.state[lane];
        if index < self.lanes.blocks[lane] {
            self.lanes.open[lane] = self.kv.tables.block(slot, index).0;
            self.lanes.rows[lane] = 1;
            return false;
        }
        let before = self.metrics.preemptions;
        match self.take_or_preempt(lane, waits, patient) {
            Taken::Block(block) => {
                self.kv.tables.set(slot, index, block);
                self.lanes.blocks[lane] = index + 1;
                self.lanes.open[lane] = block.0;
                self.lanes.rows[lane] = 1;
            }
            Taken::Wait => {
                self.lanes.flags[lane] |= flag::WAITS;
                self.lanes.rows[lane] = 0;
                self.metrics.row_waits += 1;
            }
            Taken::Gone => {}
        }
        self.metrics.preemptions != before
    }

    /// Draft rows, within what is left after one row for each lane in prefill; half of it while there are such lanes.
    fn plan_drafts(&mut self, left: u32) -> u32 {
        let decoding = self.lanes.decoding;
        let prefilling = (self.lanes.len() - decoding) as u32;
        let mut share = left.saturating_sub(prefilling);
        if prefilling > 0 {
            share /= 2;
        }
        let mut used = 0;
        for lane in 0..decoding {
            if self.lanes.flags[lane] & flag::DRAFT == 0 || self.lanes.rows[lane] == 0 {
                continue;
            }
            let seq = self.lanes.seq[lane];
            let proposed = self.seqs.get(seq).map_or(0, |c| c.drafts.len() as u32);
            let confirmed = self.lanes.confirmed[lane];
            let room = self.lanes.limit[lane].saturating_sub(confirmed + 2);
            let mut drafts = proposed.min(room).min(share - used);
            let slot = self.lanes.state[lane];
            while drafts > 0 && (confirmed + drafts) >> self.geometry.shift >= self.lanes.blocks[lane] {
                // Drafts never cost anyone else a block.
                if let Some(block) = self.kv.alloc(Owner::Sequence) {
                    self.kv.tables.set(slot, self.lanes.blocks[lane], block);
                    self.lanes.blocks[lane] += 1;
                } else {
                    let end = self.lanes.blocks[lane] << self.geometry.shift;
                    drafts = drafts.min(end - 1 - confirmed);
                    break;
                }
            }
            if let Some(cold) = self.seqs.get_mut(seq) {
                cold.drafts.truncate(drafts as usize);
            }
            self.lanes.rows[lane] = 1 + drafts;
            used += drafts;
        }
        self.metrics.drafted += u64::from(used);
        left - used
    }

    /// Next chunk of every lane in prefill, in order of admission.
    fn plan_chunks(&mut self, mut left: u32) -> u32 {
        for lane in self.lanes.decoding..self.lanes.len() {
            if self.lanes.flags[lane] & flag::DEAD != 0 {
                continue;
            }
            // One row is kept for each lane behind this one.
            let behind = (self.lanes.len() - 1 - lane) as u32;
            let rows = self.chunk(lane, left.saturating_sub(behind).max(left.min(1)));
            self.lanes.rows[lane] = rows;
            left -= rows;
        }
        left
    }

    /// Rows of the next chunk of a lane in prefill, at least 1 if `most` is.
    pub(crate) fn chunk(&self, lane: usize, most: u32) -> u32 {
        let confirmed = self.lanes.confirmed[lane];
        let target = self.fork_stop(lane).unwrap_or(self.lanes.target[lane]);
        let cap = if self.policy.max_chunk_tokens > 0 { self.policy.max_chunk_tokens } else { u32::MAX };
        let rows = (target - confirmed).min(most).min(cap);
        if confirmed + rows == target {
            return rows;
        }
        // A cut in the middle of the prompt ends on the stated multiple where it can.
        let end = (confirmed + rows) / self.policy.chunk_align * self.policy.chunk_align;
        if end > confirmed { end - confirmed } else { rows }
    }
}
