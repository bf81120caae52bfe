//! Writing a planned step into its ring slot.
//!
//! The decoding lanes of a plain step are written array by array from the lanes; whatever has
//! several rows is in [`crate::fill_ragged`] and below.

use crate::config::{Geometry, SlotMap};
use crate::kv::Kv;
use crate::lanes::{Lanes, NOT_SENT, flag};
use crate::layout::{F, Layout, header, seq_flag};
use crate::plan::{Launch, Plan, StepKind, parity};
use crate::scheduler::Scheduler;
use deepinfer_kvindex::StepId;

/// Commands of the step being planned.
#[derive(Default)]
pub(crate) struct Commands {
    pub clone_blocks: Vec<[i32; 3]>,
    pub clone_states: Vec<[i32; 2]>,
    pub zero_states: Vec<i32>,
    pub admitted: Vec<[i32; 6]>,
    /// Table deltas that the planned lanes will need.
    pub deltas: u32,
}

impl Commands {
    pub fn with_capacity(seqs: usize, clones: usize) -> Self {
        Self {
            clone_blocks: Vec::with_capacity(clones),
            clone_states: Vec::with_capacity(seqs),
            zero_states: Vec::with_capacity(seqs),
            admitted: Vec::with_capacity(seqs),
            deltas: 0,
        }
    }

    pub fn clear(&mut self) {
        self.clone_blocks.clear();
        self.clone_states.clear();
        self.zero_states.clear();
        self.admitted.clear();
        self.deltas = 0;
    }

    /// Whether another sequence with that many pages still fits the lists.
    pub fn has_room(&self, pages: u32, layout: &Layout, geometry: &Geometry) -> bool {
        (self.deltas + pages) as usize <= layout.deltas
            && self.clone_blocks.len() + geometry.pages_per_block as usize <= layout.clones
    }
}

/// Running totals while rows are written.
#[derive(Default)]
pub(crate) struct Totals {
    pub rows: usize,
    pub seqs: usize,
    pub samples: usize,
    pub longest_query: u32,
    pub longest_context: u32,
    pub grammar: i32,
    logprobs: bool,
    prefill_rows: u64,
    pub drafts: i32,
    placeholders: i32,
}

pub(crate) fn iota(to: &mut [i32]) {
    for (index, word) in to.iter_mut().enumerate() {
        *word = index as i32;
    }
}

impl Scheduler {
    /// Writes the planned rows and commands; the step is in flight from here on.
    pub(crate) fn fill(&mut self) -> Plan {
        let ahead = self.in_flight() > 0;
        self.place_snapshots();
        self.step += 1;
        let slot = self.ring.slot_of(self.step).0;
        let decoding = self.lanes.decoding;
        let mut launch = std::mem::take(&mut self.launches[parity(self.step)]);
        launch.clear();
        launch.step = self.step;
        launch.slot = slot;
        launch.version = self.lanes.version;
        launch.uniform = self.lanes.rows[..decoding].iter().fold(0, |odd, &rows| odd | (rows ^ 1)) == 0;
        let mut totals = Totals::default();
        self.fill_previous(slot, ahead, launch.uniform, &mut totals);
        if launch.uniform {
            self.fill_plain(&mut launch, &mut totals);
        } else {
            self.fill_ragged(&mut launch, &mut totals);
        }
        launch.decoding = totals.seqs;
        let (decode_seqs, decode_rows) = (totals.seqs, totals.rows);
        for lane in decoding..self.lanes.len() {
            self.fill_chunk(&mut launch, lane, &mut totals);
        }
        self.ring.get_mut(slot, F::CuQ)[totals.seqs] = totals.rows as i32;
        self.ring.get_mut(slot, F::SampleOff)[totals.seqs] = totals.samples as i32;
        let deltas = self.fill_deltas(slot);
        let kind = match (decode_seqs, totals.seqs - decode_seqs) {
            (_, 0) => StepKind::Decode,
            (0, _) => StepKind::Prefill,
            _ => StepKind::Mixed,
        };
        self.fill_commands(slot);
        self.fill_header(slot, kind, &totals, decode_seqs, deltas);
        self.fill_swaps(slot);
        self.fill_snapshots(slot);
        launch.samples = totals.samples;
        launch.chosen = totals.drafts as u32 > self.verified;
        self.verified = 0;
        self.launches[parity(self.step)] = launch;
        self.commands.clear();
        self.launched(slot);
        match kind {
            StepKind::Decode => self.metrics.decode_steps += 1,
            StepKind::Prefill => self.metrics.prefill_steps += 1,
            _ => self.metrics.mixed_steps += 1,
        }
        self.metrics.decode_rows += decode_rows as u64;
        self.metrics.prefill_tokens += totals.prefill_rows;
        if totals.prefill_rows > 0 {
            let room = u64::from(self.limits.max_num_batched_tokens) - decode_rows as u64;
            self.metrics.chunk_fill.record(totals.prefill_rows, room);
        }
        Plan {
            step: StepId(self.step),
            slot,
            kind,
            rows: totals.rows as u32,
            seqs: totals.seqs as u32,
            decoding: decode_seqs as u32,
            samples: totals.samples as u32,
        }
    }

    /// `prev_seq` of the decoding sequences: their index in the step in flight where that step draws the token they start from.
    fn fill_previous(&mut self, slot: usize, ahead: bool, uniform: bool, totals: &mut Totals) {
        let Lanes { rows, planned, confirmed, sent, decoding, .. } = &self.lanes;
        let to = &mut self.ring.get_mut(slot, F::PrevSeq)[..*decoding];
        if !ahead {
            to.fill(-1);
            return;
        }
        let sent = &sent[parity(self.step - 1)][..*decoding];
        let (rows, planned, confirmed) = (&rows[..*decoding], &planned[..*decoding], &confirmed[..*decoding]);
        if uniform || rows.iter().all(|&rows| rows > 0) {
            let mut drawn = 0;
            for (lane, to) in to.iter_mut().enumerate() {
                let ahead = planned[lane] != confirmed[lane];
                *to = if ahead { sent[lane] as i32 } else { -1 };
                drawn += i32::from(ahead);
            }
            totals.placeholders = drawn;
            return;
        }
        let (mut at, mut known) = (0, 0);
        for (lane, &before) in sent.iter().enumerate() {
            let drawn = planned[lane] != confirmed[lane];
            to[at] = if drawn { before as i32 } else { -1 };
            let here = rows[lane].min(1);
            known += usize::from(!drawn) & here as usize;
            at += here as usize;
            // A lane without a row leaves its place to the next one.
            if at == to.len() {
                break;
            }
        }
        totals.placeholders = (at - known) as i32;
    }

    /// All decoding lanes with one row each.
    fn fill_plain(&mut self, launch: &mut Launch, totals: &mut Totals) {
        let (slot, n) = (launch.slot, self.lanes.decoding);
        let lanes = &self.lanes;
        let ring = &mut self.ring;
        launch.seqs.extend_from_slice(&lanes.seq[..n]);
        ring.get_mut(slot, F::Ids)[..n].copy_from_slice(&lanes.last[..n]);
        let next = &lanes.planned[..n];
        for (to, &p) in ring.get_mut(slot, F::Pos)[..n].iter_mut().zip(next) {
            *to = p as i32;
        }
        for (index, map) in self.geometry.maps.iter().enumerate() {
            let to = &mut ring.slots_mut(slot, index)[..n];
            let (entries, ratio) = (map.entries, map.ratio_shift);
            let within = (1 << map.page_shift) - 1;
            if map.group > 0 {
                for (lane, to) in to.iter_mut().enumerate() {
                    let p = next[lane];
                    let block = deepinfer_kvindex::Block(lanes.open[lane]);
                    let page =
                        self.kv.blocks.page(map.group, block, ((p & self.geometry.mask) >> map.page_shift) as usize);
                    *to = entry(page, p, entries, within, ratio);
                }
            } else if ratio == 0 {
                for ((to, &p), &page) in to.iter_mut().zip(next).zip(&lanes.open[..n]) {
                    *to = (page * entries + (p & within)) as i32;
                }
            } else {
                for ((to, &p), &page) in to.iter_mut().zip(next).zip(&lanes.open[..n]) {
                    *to = entry(page, p, entries, within, ratio);
                }
            }
        }
        let mut longest = 0;
        for (to, &p) in ring.get_mut(slot, F::SeqLen)[..n].iter_mut().zip(next) {
            *to = p as i32 + 1;
            longest = longest.max(p + 1);
        }
        for (to, &p) in ring.get_mut(slot, F::RngPos)[..n].iter_mut().zip(next) {
            *to = p as i32 + 1;
        }
        for (to, &s) in ring.get_mut(slot, F::StateRow)[..n].iter_mut().zip(&lanes.state[..n]) {
            *to = s as i32;
        }
        let mut grammar = 0;
        for (to, &f) in ring.get_mut(slot, F::SeqFlags)[..n].iter_mut().zip(&lanes.flags[..n]) {
            let constrained = i32::from(f & flag::GRAMMAR != 0);
            grammar += constrained;
            *to = seq_flag::SAMPLES | (constrained * seq_flag::GRAMMAR);
        }
        let rows = &mut ring.get_mut(slot, F::GrammarRow)[..n];
        if grammar == 0 {
            rows.fill(-1);
        } else {
            for ((to, &f), &s) in rows.iter_mut().zip(&lanes.flags[..n]).zip(&lanes.state[..n]) {
                *to = if f & flag::GRAMMAR == 0 { -1 } else { s as i32 };
            }
        }
        iota(&mut ring.get_mut(slot, F::CuQ)[..n]);
        iota(&mut ring.get_mut(slot, F::SampleOff)[..n]);
        iota(&mut ring.get_mut(slot, F::SampleRow)[..n]);
        totals.rows = n;
        totals.seqs = n;
        totals.samples = n;
        totals.grammar = grammar;
        totals.longest_context = longest;
        totals.longest_query = u32::from(n > 0);
        let Lanes { planned, last, sent, .. } = &mut self.lanes;
        for planned in &mut planned[..n] {
            *planned += 1;
        }
        for (index, sent) in sent[parity(launch.step)][..n].iter_mut().enumerate() {
            *sent = index as u32;
        }
        if self.max_in_flight > 1 {
            last[..n].fill(-1);
        }
    }

    /// One chunk of a lane in prefill.
    #[inline(never)]
    fn fill_chunk(&mut self, launch: &mut Launch, lane: usize, totals: &mut Totals) {
        let (slot, rows) = (launch.slot, self.lanes.rows[lane]);
        if rows == 0 {
            self.lanes.sent[parity(launch.step)][lane] = NOT_SENT;
            return;
        }
        let (first, sample, at) = (totals.rows, totals.samples, totals.seqs);
        let (start, state) = (self.lanes.planned[lane], self.lanes.state[lane]);
        let end = start + rows;
        self.lanes.sent[parity(launch.step)][lane] = at as u32;
        launch.seqs.push(self.lanes.seq[lane]);
        launch.rows.push(rows);
        launch.sample_off.push(sample as u32);
        let mut written = start;
        if let Some(cold) = self.seqs.get(self.lanes.seq[lane]) {
            written = cold.begin.hit.clamp(start, end);
            let ids = &mut self.ring.get_mut(slot, F::Ids)[first..first + rows as usize];
            for (to, &token) in ids.iter_mut().zip(&cold.history[start as usize..end as usize]) {
                *to = token as i32;
            }
        }
        for (to, position) in self.ring.get_mut(slot, F::Pos)[first..first + rows as usize].iter_mut().zip(start..) {
            *to = position as i32;
        }
        for (index, map) in self.geometry.maps.iter().enumerate() {
            let to = &mut self.ring.slots_mut(slot, index)[first..first + rows as usize];
            // What the hit has is read, not written.
            let (kept, to) = to.split_at_mut((written - start) as usize);
            kept.fill(-1);
            fill_slots(to, written, state, map, &self.kv, &self.geometry);
        }
        let lane_flags = self.lanes.flags[lane];
        let mut flags = seq_flag::PREFILL;
        if lane_flags & flag::LOGPROBS != 0 {
            flags |= seq_flag::PROMPT_LOGPROBS;
            totals.logprobs = true;
        }
        let samples = end == self.lanes.target[lane];
        let constrained = samples && lane_flags & flag::GRAMMAR != 0;
        if samples {
            flags |= seq_flag::SAMPLES | if constrained { seq_flag::GRAMMAR } else { 0 };
            self.ring.get_mut(slot, F::SampleRow)[sample] = (first + rows as usize) as i32 - 1;
            self.ring.get_mut(slot, F::RngPos)[sample] = end as i32;
            self.ring.get_mut(slot, F::GrammarRow)[sample] = if constrained { state as i32 } else { -1 };
            self.lanes.last[lane] = -1;
        }
        let [cu_q, sample_off, seq_len, state_row, seq_flags, prev_seq] =
            self.ring.many_mut(slot, [F::CuQ, F::SampleOff, F::SeqLen, F::StateRow, F::SeqFlags, F::PrevSeq]);
        cu_q[at] = first as i32;
        sample_off[at] = sample as i32;
        seq_len[at] = end as i32;
        state_row[at] = state as i32;
        seq_flags[at] = flags;
        prev_seq[at] = -1;
        self.lanes.planned[lane] = end;
        totals.rows += rows as usize;
        totals.seqs += 1;
        totals.samples += usize::from(samples);
        totals.grammar += i32::from(constrained);
        totals.prefill_rows += u64::from(rows);
        totals.longest_query = totals.longest_query.max(rows);
        totals.longest_context = totals.longest_context.max(end);
    }

    /// Block-table entries that the device does not know yet, of the lanes in this step.
    fn fill_deltas(&mut self, slot: usize) -> usize {
        let mut at = 0;
        for lane in 0..self.lanes.len() {
            let (told, blocks) = (self.lanes.told[lane], self.lanes.blocks[lane]);
            if told == blocks || self.lanes.rows[lane] == 0 {
                continue;
            }
            self.lanes.told[lane] = blocks;
            let row = self.lanes.state[lane];
            let to = self.ring.get_mut(slot, F::TableDelta);
            for index in told..blocks {
                let block = self.kv.tables.block(row, index);
                for (group, section) in self.geometry.sections.iter().enumerate() {
                    let pages = 1 << section.pages_shift;
                    for j in 0..pages {
                        let page = self.kv.blocks.page(group, block, j as usize);
                        let column = section.column + index * pages + j;
                        to[at..at + 3].copy_from_slice(&[row as i32, column as i32, page as i32]);
                        at += 3;
                    }
                }
            }
        }
        at / 3
    }

    fn fill_commands(&mut self, slot: usize) {
        let Self { ring, commands, .. } = self;
        let copy = |to: &mut [i32], from: &[i32]| to[..from.len()].copy_from_slice(from);
        copy(ring.get_mut(slot, F::CloneBlocks), commands.clone_blocks.as_flattened());
        copy(ring.get_mut(slot, F::CloneStates), commands.clone_states.as_flattened());
        copy(ring.get_mut(slot, F::ZeroStates), &commands.zero_states);
        copy(ring.get_mut(slot, F::Admitted), commands.admitted.as_flattened());
    }

    fn fill_header(&mut self, slot: usize, kind: StepKind, totals: &Totals, decoding: usize, deltas: usize) {
        let commands = &self.commands;
        let to = self.ring.get_mut(slot, F::Header);
        to.fill(0);
        to[header::KIND] = kind as i32;
        to[header::STEP_LOW] = self.step as u32 as i32;
        to[header::STEP_HIGH] = (self.step >> 32) as i32;
        to[header::ROWS] = totals.rows as i32;
        to[header::SEQS] = totals.seqs as i32;
        to[header::DECODING] = decoding as i32;
        to[header::SAMPLES] = totals.samples as i32;
        to[header::DELTAS] = deltas as i32;
        to[header::CLONE_BLOCKS] = commands.clone_blocks.len() as i32;
        to[header::CLONE_STATES] = commands.clone_states.len() as i32;
        to[header::ZERO_STATES] = commands.zero_states.len() as i32;
        to[header::ADMITTED] = commands.admitted.len() as i32;
        to[header::LONGEST_QUERY] = totals.longest_query as i32;
        to[header::LONGEST_CONTEXT] = totals.longest_context as i32;
        to[header::GRAMMAR_ROWS] = totals.grammar;
        to[header::PROMPT_LOGPROBS] = i32::from(totals.logprobs);
        to[header::DRAFT_ROWS] = totals.drafts;
        to[header::VERIFIED] = totals.drafts.min(self.verified as i32);
        to[header::PLACEHOLDERS] = totals.placeholders;
    }

    /// A full step of one row: null page, null slot, position 0, nothing written to KV of anybody.
    pub(crate) fn fill_dummy(&mut self, slot: usize, kind: StepKind, step: u64) {
        let ring = &mut self.ring;
        ring.get_mut(slot, F::Ids)[0] = 0;
        ring.get_mut(slot, F::Pos)[0] = 0;
        for (index, map) in self.geometry.maps.iter().enumerate() {
            let within = (1 << map.page_shift) - 1;
            ring.slots_mut(slot, index)[0] = entry(0, 0, map.entries, within, map.ratio_shift);
        }
        ring.get_mut(slot, F::CuQ)[..2].copy_from_slice(&[0, 1]);
        ring.get_mut(slot, F::SeqLen)[0] = 1;
        ring.get_mut(slot, F::StateRow)[0] = 0;
        ring.get_mut(slot, F::SeqFlags)[0] = 0;
        ring.get_mut(slot, F::SampleOff)[..2].copy_from_slice(&[0, 0]);
        ring.get_mut(slot, F::PrevSeq)[0] = -1;
        let to = ring.get_mut(slot, F::Header);
        to.fill(0);
        to[header::KIND] = kind as i32;
        to[header::STEP_LOW] = step as u32 as i32;
        to[header::STEP_HIGH] = (step >> 32) as i32;
        to[header::ROWS] = 1;
        to[header::SEQS] = 1;
        to[header::DECODING] = 1;
        to[header::LONGEST_QUERY] = 1;
        to[header::LONGEST_CONTEXT] = 1;
    }
}

/// KV slots of consecutive rows from position `first` on, a page at a time.
#[inline]
pub(crate) fn fill_slots(to: &mut [i32], first: u32, state: u32, map: &SlotMap, kv: &Kv, geometry: &Geometry) {
    let within = (1 << map.page_shift) - 1;
    let end = first + to.len() as u32;
    let mut start = first;
    while start < end {
        let stop = ((start | within) + 1).min(end);
        let block = kv.tables.block(state, start >> geometry.shift);
        let page = if map.group == 0 {
            block.0
        } else {
            kv.blocks.page(map.group, block, ((start & geometry.mask) >> map.page_shift) as usize)
        };
        let run = &mut to[(start - first) as usize..(stop - first) as usize];
        if map.ratio_shift == 0 {
            let base = page * map.entries + (start & within);
            for (to, slot) in run.iter_mut().zip(base..) {
                *to = slot as i32;
            }
        } else {
            for (to, position) in run.iter_mut().zip(start..stop) {
                *to = entry(page, position, map.entries, within, map.ratio_shift);
            }
        }
        start = stop;
    }
}

/// KV slot of `position` on `page`, −1 where the position completes no entry.
#[inline]
fn entry(page: u32, position: u32, entries: u32, within: u32, ratio: u32) -> i32 {
    let last = (1 << ratio) - 1;
    let slot = (page * entries + ((position & within) >> ratio)) as i32;
    if position & last == last { slot } else { -1 }
}
