//! `schedule`: which rows the next step has.
//!
//! Decoding lanes come first, one row each; drafts share what is left with the chunks of lanes in prefill, which always
//! get at least one row each; then sequences are admitted.

use crate::error::StepError;
use crate::lanes::{Lanes, NOT_SENT, flag};
use crate::preempt::Taken;
use crate::scheduler::Scheduler;
use crate::spans;
use crate::vote::GroupError;
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

/// Which rows a step may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rows {
    Both,
    Prefill,
    Decode,
}

/// What a step was launched with: results are matched by this, never by what is current.
#[derive(Default)]
pub(crate) struct Launch {
    pub step: u64,
    pub slot: usize,
    pub seqs: Vec<Seq>,
    /// Rows of each sequence; of a uniform step only of its chunks.
    pub rows: Vec<u32>,
    /// First sampling row of each sequence, as `rows`.
    pub sample_off: Vec<u32>,
    pub decoding: usize,
    /// Every decoding sequence has one row, and sequence `i` was lane `i`.
    pub uniform: bool,
    /// That of the lanes at the launch.
    pub version: u64,
    pub samples: usize,
    /// Of its draft rows the worker chooses those that are verified.
    pub chosen: bool,
}

impl Launch {
    pub fn with_capacity(seqs: usize) -> Self {
        Self {
            seqs: Vec::with_capacity(seqs),
            rows: Vec::with_capacity(seqs),
            sample_off: Vec::with_capacity(seqs),
            ..Self::default()
        }
    }

    pub fn clear(&mut self) {
        self.seqs.clear();
        self.rows.clear();
        self.sample_off.clear();
        self.decoding = 0;
        self.samples = 0;
        self.chosen = false;
        self.uniform = true;
    }

    /// Rows of a decoding sequence of a step that is not uniform, and the first of them that samples.
    #[inline]
    pub fn shape_of(&self, index: u32) -> (u32, u32) {
        (self.rows[index as usize], self.sample_off[index as usize])
    }

    /// Rows of a sequence and the first of them that samples.
    #[inline]
    pub fn shape(&self, index: usize) -> (u32, usize) {
        if self.uniform && index < self.decoding {
            return (1, index);
        }
        let at = if self.uniform { index - self.decoding } else { index };
        (self.rows[at], self.sample_off[at] as usize)
    }
}

/// Where the record of a step lies, and its place in `sent`.
#[inline]
pub(crate) const fn parity(step: u64) -> usize {
    (step & 1) as usize
}

impl Scheduler {
    /// Decode rows and prompt rows in one step.
    pub(crate) fn plan_mixed(&mut self) -> Option<Plan> {
        self.plan_rows(Rows::Both, u32::MAX);
        if self.lanes.rows.iter().all(|&rows| rows == 0) {
            return self.plan_nothing();
        }
        Some(self.fill())
    }

    /// Rows of one kind or both, at most `most` of them.
    pub(crate) fn plan_rows(&mut self, kind: Rows, most: u32) {
        let budget = self.limits.max_num_batched_tokens.min(most);
        match kind {
            Rows::Decode => {
                self.plan_running(budget, kind);
            }
            Rows::Prefill => {
                let decoding = self.lanes.decoding;
                self.lanes.rows[..decoding].fill(0);
                let left = self.plan_chunks(budget);
                self.admit(left);
            }
            Rows::Both => {
                let left = self.plan_running(budget, kind);
                self.admit(left);
            }
        }
    }

    /// Plans a full step of one row that belongs to nobody: null page, null slot. It is completed like any other.
    ///
    /// # Errors
    /// [`StepError`]; nothing has changed then.
    pub fn plan_dummy(&mut self, now: u64) -> Result<Plan, StepError> {
        if let Some(error) = self.step_error() {
            return Err(error);
        }
        if self.in_group() {
            return Err(StepError::Group(GroupError::Order(
                "the group decides which steps are dummies: call schedule",
            )));
        }
        self.begin_step(now);
        self.lanes.rows.fill(0);
        Ok(self.fill_dummy_step())
    }

    pub(crate) fn fill_dummy_step(&mut self) -> Plan {
        self.step += 1;
        let slot = self.ring.slot_of(self.step).0;
        self.fill_dummy(slot, StepKind::Dummy, self.step);
        self.metrics.dummy_steps += 1;
        let parity = parity(self.step);
        self.lanes.sent[parity].fill(NOT_SENT);
        let launch = &mut self.launches[parity];
        launch.clear();
        launch.step = self.step;
        launch.slot = slot;
        launch.version = self.lanes.version;
        self.launched(slot);
        Plan { step: StepId(self.step), slot, kind: StepKind::Dummy, rows: 1, seqs: 1, decoding: 1, samples: 0 }
    }

    /// Everything that comes before the first scan.
    pub(crate) fn begin_step(&mut self, now: u64) {
        self.now = now;
        let ordered_after = if self.device_ordered { self.step } else { self.completed };
        self.kv.now = StepId(ordered_after + 1);
        self.kv.launched = StepId(self.step);
        self.kv.retire();
        self.host.retire(self.kv.now);
        self.read_mail();
        self.place_snapshots();
        self.chunks = self.policy.chunk.begin(i64::MAX);
        if self.in_flight() > 0 {
            self.promote_launched();
        }
        self.swaps.wake();
    }

    pub(crate) fn launched(&mut self, slot: usize) {
        self.ring.take(slot, self.step);
        self.kv.launched = StepId(self.step);
        self.metrics.steps += 1;
    }

    /// Lanes whose last chunk is in flight go on to decode: the token that it draws is a placeholder until then. Not those that
    /// end with it.
    fn promote_launched(&mut self) {
        let mut any = false;
        for lane in self.lanes.decoding..self.lanes.len() {
            let planned = self.lanes.planned[lane];
            let last = planned == self.lanes.target[lane] && planned > self.lanes.confirmed[lane];
            if last && planned + 1 < self.lanes.limit[lane] && self.lanes.flags[lane] & flag::ALONE == 0 {
                self.lanes.flags[lane] |= flag::PROMOTE;
                let block = planned >> self.geometry.shift;
                if block < self.lanes.blocks[lane] {
                    self.lanes.open[lane] = self.kv.tables.block(self.lanes.state[lane], block).0;
                }
                any = true;
            }
        }
        if any {
            self.lanes.settle(&mut self.seqs);
        }
    }

    // Bitwise on purpose, so that it goes by vectors.
    #[allow(clippy::needless_bitwise_bool)]
    /// No row for lanes that the step in flight may end by length, nor for those that must not run ahead.
    fn rest_ending(&mut self) {
        let n = self.lanes.decoding;
        let Lanes { rows, planned, confirmed, limit, flags, .. } = &mut self.lanes;
        let (rows, planned, confirmed) = (&mut rows[..n], &planned[..n], &confirmed[..n]);
        let (limit, flags) = (&limit[..n], &flags[..n]);
        for lane in 0..n {
            let ends = planned[lane] + 1 >= limit[lane];
            let alone = (flags[lane] & flag::ALONE != 0) & (planned[lane] != confirmed[lane]);
            rows[lane] = u32::from(!(ends | alone));
        }
    }

    /// Rows of the running lanes. Returns what is left of the budget.
    fn plan_running(&mut self, budget: u32, kind: Rows) -> u32 {
        let decoding = self.lanes.decoding;
        let mut waits = 0;
        let mut gone = false;
        let ahead = self.in_flight() > 0;
        self.lanes.rows[..decoding].fill(1);
        if ahead {
            self.rest_ending();
        }
        let mask = self.geometry.mask;
        for lane in 0..decoding {
            // Every block before that of `planned` is in the row.
            if self.lanes.planned[lane] & mask == 0 && self.lanes.rows[lane] > 0 {
                gone |= self.open_block(lane, &mut waits, true);
            }
        }
        // What is in flight changes that by itself when it completes.
        if !ahead && waits > 0 && self.lanes.len() == decoding && self.lanes.rows.iter().all(|&rows| rows == 0) {
            gone |= self.force_one(&mut waits);
        }
        let decode_rows = self.lanes.rows[..decoding].iter().sum::<u32>();
        let mut left = budget.saturating_sub(decode_rows);
        if self.device_drafts > 0 {
            self.want_device_drafts();
            left = self.plan_drafts(left, kind);
        } else if std::mem::take(&mut self.proposed) {
            left = self.plan_drafts(left, kind);
        }
        if kind == Rows::Both {
            left = self.plan_chunks(left);
        } else {
            self.lanes.rows[decoding..].fill(0);
        }
        if gone {
            self.lanes.settle(&mut self.seqs);
        }
        if self.lanes.rows.iter().all(|&rows| rows == 0) {
            self.cancel_swaps();
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
        let index = self.lanes.planned[lane] >> self.geometry.shift;
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

    /// Every decoding lane asks for its drafts, whether or not the device has some by then; masks of a grammar need ids that the
    /// host knows.
    fn want_device_drafts(&mut self) {
        let Lanes { drafts, flags, decoding, .. } = &mut self.lanes;
        for (drafts, flags) in drafts[..*decoding].iter_mut().zip(&flags[..*decoding]) {
            *drafts = if flags & flag::GRAMMAR == 0 { self.device_drafts } else { 0 };
        }
    }

    /// Draft rows, within their budget and what is left after one row for each lane in prefill; half of it while there are such
    /// lanes. Where not all proposals fit, every lane gets as many rows as the others.
    fn plan_drafts(&mut self, left: u32, kind: Rows) -> u32 {
        let decoding = self.lanes.decoding;
        let prefilling = if kind == Rows::Both { (self.lanes.len() - decoding) as u32 } else { 0 };
        let mut share = left.saturating_sub(prefilling);
        if prefilling > 0 {
            share /= 2;
        }
        if self.device_drafts == 0 {
            share = share.min(self.draft_budget);
        }
        let Lanes { rows, drafts, planned, limit, .. } = &mut self.lanes;
        let (rows, drafts) = (&mut rows[..decoding], &mut drafts[..decoding]);
        let (planned, limit) = (&planned[..decoding], &limit[..decoding]);
        let (mut wanted, mut kept) = (0, 0);
        for lane in 0..decoding {
            let room = limit[lane].saturating_sub(planned[lane] + 2);
            let usable = drafts[lane].min(room);
            // A lane without a row stays where it is, and so does what was proposed.
            let has_row = rows[lane] > 0;
            kept |= if has_row { 0 } else { drafts[lane] };
            drafts[lane] = if has_row { usable } else { drafts[lane] };
            wanted += if has_row { usable } else { 0 };
        }
        self.proposed |= kept > 0;
        if wanted > share {
            wanted = self.cut_drafts(share);
        }
        let Lanes { rows, drafts, .. } = &mut self.lanes;
        for (rows, &drafts) in rows[..decoding].iter_mut().zip(&drafts[..decoding]) {
            *rows += if *rows > 0 { drafts } else { 0 };
        }
        for lane in 0..decoding {
            let (next, rows) = (self.lanes.planned[lane], self.lanes.rows[lane]);
            if (next & self.geometry.mask) + rows > self.geometry.block_tokens {
                let drafts = self.draft_blocks(lane, rows - 1);
                self.lanes.drafts[lane] = drafts;
                self.lanes.rows[lane] = 1 + drafts;
                wanted -= rows - 1 - drafts;
            }
        }
        self.verified = wanted.min(self.draft_budget);
        self.metrics.drafted += u64::from(self.verified);
        left - wanted
    }

    /// Leaves `share` draft rows, every lane as many as the others. Returns how many there are now.
    fn cut_drafts(&mut self, share: u32) -> u32 {
        let (level, mut more) = self.draft_level(share);
        let Lanes { rows, drafts, decoding, .. } = &mut self.lanes;
        let mut given = 0;
        for (drafts, _) in drafts[..*decoding].iter_mut().zip(&rows[..*decoding]).filter(|&(_, &rows)| rows > 0) {
            if *drafts > level {
                let extra = more.min(1);
                *drafts = level + extra;
                more -= extra;
            }
            given += *drafts;
        }
        given
    }

    /// How many draft rows each lane may have so that all together have at most `share`, and how many lanes may have one more.
    fn draft_level(&self, share: u32) -> (u32, u32) {
        let lanes = 0..self.lanes.decoding;
        let wants = |level: u32| {
            let more = |&lane: &usize| self.lanes.rows[lane] > 0 && self.lanes.drafts[lane] > level;
            lanes.clone().filter(more).count() as u32
        };
        let (mut level, mut left) = (0, share);
        loop {
            let lanes = wants(level);
            if lanes > left || lanes == 0 {
                return (level, left);
            }
            left -= lanes;
            level += 1;
        }
    }

    /// Blocks for up to `drafts` rows after the next one of a lane; how many rows they hold. Drafts never cost anyone else a
    /// block.
    fn draft_blocks(&mut self, lane: usize, drafts: u32) -> u32 {
        let next = self.lanes.planned[lane];
        while (next + drafts) >> self.geometry.shift >= self.lanes.blocks[lane] {
            let blocks = self.lanes.blocks[lane];
            let Some(block) = self.kv.alloc(Owner::Sequence) else {
                return drafts.min((blocks << self.geometry.shift) - 1 - next);
            };
            self.kv.tables.set(self.lanes.state[lane], blocks, block);
            self.lanes.blocks[lane] = blocks + 1;
        }
        drafts
    }

    /// Next chunk of every lane in prefill, in order of admission.
    fn plan_chunks(&mut self, mut left: u32) -> u32 {
        for lane in self.lanes.decoding..self.lanes.len() {
            if self.lanes.flags[lane] & flag::DEAD != 0 || self.swaps.rests(self.lanes.seq[lane]) {
                continue;
            }
            // One row is kept for each lane behind this one.
            let behind = (self.lanes.len() - 1 - lane) as u32;
            let rows = self.take_chunk(lane, left.saturating_sub(behind).max(left.min(1)));
            self.lanes.rows[lane] = rows;
            left -= rows;
        }
        left
    }

    /// Rows of the next chunk of a lane in prefill, taken from the step's budget of chunks.
    fn take_chunk(&mut self, lane: usize, most: u32) -> u32 {
        let planned = self.lanes.planned[lane];
        let rows = self.chunk(lane, most.min(self.chunks.rows(planned)), most);
        self.chunks.take(rows, planned);
        self.note_uncut(lane, rows);
        rows
    }

    /// The same for a sequence that is just admitted: one row at least, or none if it goes on with a span that has no room.
    pub(crate) fn first_chunk(&mut self, lane: usize, most: u32) -> u32 {
        let planned = self.lanes.planned[lane];
        let rows = self.chunk(lane, most.min(self.chunks.rows(planned).max(1)), most);
        self.chunks.take(rows, planned);
        self.note_uncut(lane, rows);
        rows
    }

    /// A span that holds the last boundary of its prompt is not cut there for the state's sake: no state is kept of that boundary.
    fn note_uncut(&mut self, lane: usize, rows: u32) {
        let (planned, target) = (self.lanes.planned[lane], self.lanes.target[lane]);
        if let Some(last) = self.window().and_then(|rule| rule.passed(planned, rows, target))
            && let Some(cold) = self.seqs.get_mut(self.lanes.seq[lane])
        {
            cold.begin.whole_from = cold.begin.whole_from.max(last + 1);
        }
    }

    /// Rows of the next chunk of a lane in prefill, `most` if they may be cut anywhere and `room` if not; at least 1 if `most` is, not
    /// all of its prefill is in flight, and no span is in the way.
    fn chunk(&self, lane: usize, most: u32, room: u32) -> u32 {
        let planned = self.lanes.planned[lane];
        let target = self.fork_stop(lane).unwrap_or(self.lanes.target[lane]);
        let mut rows = (target - planned).min(most);
        if planned + rows < target {
            // A cut in the middle of the prompt ends on the stated multiple where it can.
            let end = (planned + rows) / self.policy.chunk_align * self.policy.chunk_align;
            rows = if end > planned { end - planned } else { rows };
        }
        if let Some(rule) = self.window() {
            rows = rule.cut_chunk(planned, rows, self.lanes.target[lane]);
        }
        match self.seqs.get(self.lanes.seq[lane]) {
            Some(cold) if !cold.spans.is_empty() => {
                spans::whole(&cold.spans, planned, rows, room.min(self.chunks.span_rows(planned)), target)
            }
            _ => rows,
        }
    }
}
