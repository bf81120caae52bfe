//! Writing a planned step into its ring slot.
//!
//! The decoding lanes of a plain step are written array by array from the lanes; whatever has several rows goes row by row.

use crate::config::Geometry;
use crate::lanes::flag;
use crate::layout::{F, Layout, header, seq_flag};
use crate::plan::{Plan, StepKind};
use crate::scheduler::Scheduler;
use deepinfer_kvindex::StepId;
use std::ops::Range;

/// Commands of the step being planned.
#[derive(Default)]
pub(crate) struct Commands {
    pub clone_blocks: Vec<[i32; 3]>,
    pub clone_states: Vec<[i32; 2]>,
    pub zero_states: Vec<i32>,
    pub admitted: Vec<[i32; 4]>,
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
struct Totals {
    rows: usize,
    seqs: usize,
    samples: usize,
    longest_query: u32,
    longest_context: u32,
    grammar: i32,
    logprobs: bool,
    prefill_rows: u64,
}

fn iota(to: &mut [i32]) {
    for (index, word) in to.iter_mut().enumerate() {
        *word = index as i32;
    }
}

impl Scheduler {
    /// Writes the planned rows and commands; the step is in flight from here on.
    pub(crate) fn fill(&mut self) -> Plan {
        self.step += 1;
        let slot = self.ring.slot_of(self.step).0;
        let decoding = self.lanes.decoding;
        let uniform = self.lanes.rows[..decoding].iter().all(|&rows| rows == 1);
        self.launch.seqs.clear();
        self.launch.lanes.clear();
        self.launch.rows.clear();
        self.launch.sample_off.clear();
        let mut totals = Totals::default();
        if uniform {
            self.fill_plain(slot, &mut totals);
        } else {
            for lane in 0..decoding {
                self.fill_decode(slot, lane, &mut totals);
            }
        }
        let decode_seqs = totals.seqs;
        let decode_rows = totals.rows;
        for lane in decoding..self.lanes.len() {
            self.fill_chunk(slot, lane, &mut totals);
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
        self.launch.slot = slot;
        self.launch.kind = kind;
        self.launch.decoding = decode_seqs;
        self.launch.uniform = uniform;
        self.launch.version = self.lanes.version;
        self.launch.samples = totals.samples;
        self.commands.clear();
        self.launched(slot);
        match kind {
            StepKind::Decode => self.metrics.decode_steps += 1,
            StepKind::Prefill => self.metrics.prefill_steps += 1,
            _ => self.metrics.mixed_steps += 1,
        }
        self.metrics.decode_rows += decode_rows as u64;
        self.metrics.prefill_tokens += totals.prefill_rows;
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

    /// All decoding lanes with one row each.
    fn fill_plain(&mut self, slot: usize, totals: &mut Totals) {
        let n = self.lanes.decoding;
        let lanes = &self.lanes;
        let ring = &mut self.ring;
        self.launch.seqs.extend_from_slice(&lanes.seq[..n]);
        ring.get_mut(slot, F::Ids)[..n].copy_from_slice(&lanes.last[..n]);
        let confirmed = &lanes.confirmed[..n];
        for (to, &c) in ring.get_mut(slot, F::Pos)[..n].iter_mut().zip(confirmed) {
            *to = c as i32;
        }
        for (index, map) in self.geometry.maps.iter().enumerate() {
            let to = &mut ring.slots_mut(slot, index)[..n];
            let (entries, ratio) = (map.entries, map.ratio_shift);
            let within = (1 << map.page_shift) - 1;
            if map.group > 0 {
                for (lane, to) in to.iter_mut().enumerate() {
                    let c = confirmed[lane];
                    let block = deepinfer_kvindex::Block(lanes.open[lane]);
                    let page =
                        self.kv.blocks.page(map.group, block, ((c & self.geometry.mask) >> map.page_shift) as usize);
                    *to = entry(page, c, entries, within, ratio);
                }
            } else if ratio == 0 {
                for ((to, &c), &page) in to.iter_mut().zip(confirmed).zip(&lanes.open[..n]) {
                    *to = (page * entries + (c & within)) as i32;
                }
            } else {
                for ((to, &c), &page) in to.iter_mut().zip(confirmed).zip(&lanes.open[..n]) {
                    *to = entry(page, c, entries, within, ratio);
                }
            }
        }
        let mut longest = 0;
        for (to, &c) in ring.get_mut(slot, F::SeqLen)[..n].iter_mut().zip(confirmed) {
            *to = c as i32 + 1;
            longest = longest.max(c + 1);
        }
        for (to, &c) in ring.get_mut(slot, F::RngPos)[..n].iter_mut().zip(confirmed) {
            *to = c as i32 + 1;
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
        for (planned, &c) in self.lanes.planned[..n].iter_mut().zip(&self.lanes.confirmed[..n]) {
            *planned = c + 1;
        }
    }

    /// One decoding lane with its drafts.
    fn fill_decode(&mut self, slot: usize, lane: usize, totals: &mut Totals) {
        let rows = self.lanes.rows[lane];
        if rows == 0 {
            return;
        }
        let first = totals.rows;
        let sample = totals.samples;
        self.begin_seq(slot, lane, totals);
        let confirmed = self.lanes.confirmed[lane];
        let seq = self.lanes.seq[lane];
        let state = self.lanes.state[lane] as i32;
        let constrained = self.lanes.flags[lane] & flag::GRAMMAR != 0;
        let ids = self.ring.get_mut(slot, F::Ids);
        ids[first] = self.lanes.last[lane];
        if let Some(cold) = self.seqs.get(seq).filter(|_| rows > 1) {
            for (to, &draft) in ids[first + 1..first + rows as usize].iter_mut().zip(&cold.drafts) {
                *to = draft as i32;
            }
        }
        self.fill_run(slot, lane, first, confirmed..confirmed + rows);
        for row in 0..rows {
            let (at, position) = (first + row as usize, confirmed + row);
            let at_sample = sample + row as usize;
            self.ring.get_mut(slot, F::SampleRow)[at_sample] = at as i32;
            self.ring.get_mut(slot, F::RngPos)[at_sample] = position as i32 + 1;
            self.ring.get_mut(slot, F::GrammarRow)[at_sample] = if constrained { state } else { -1 };
        }
        let flags = seq_flag::SAMPLES | if constrained { seq_flag::GRAMMAR } else { 0 };
        totals.grammar += if constrained { rows as i32 } else { 0 };
        totals.samples += rows as usize;
        self.end_seq(slot, lane, flags, rows, totals);
    }

    /// One chunk of a lane in prefill.
    fn fill_chunk(&mut self, slot: usize, lane: usize, totals: &mut Totals) {
        let rows = self.lanes.rows[lane];
        if rows == 0 {
            return;
        }
        let first = totals.rows;
        let sample = totals.samples;
        self.begin_seq(slot, lane, totals);
        let confirmed = self.lanes.confirmed[lane];
        let end = confirmed + rows;
        let samples = end == self.lanes.target[lane];
        let seq = self.lanes.seq[lane];
        if let Some(cold) = self.seqs.get(seq) {
            let ids = &mut self.ring.get_mut(slot, F::Ids)[first..first + rows as usize];
            for (to, &token) in ids.iter_mut().zip(&cold.history[confirmed as usize..end as usize]) {
                *to = token as i32;
            }
        }
        self.fill_run(slot, lane, first, confirmed..end);
        let lane_flags = self.lanes.flags[lane];
        let mut flags = seq_flag::PREFILL;
        if lane_flags & flag::LOGPROBS != 0 {
            flags |= seq_flag::PROMPT_LOGPROBS;
            totals.logprobs = true;
        }
        if samples {
            flags |= seq_flag::SAMPLES;
            let constrained = lane_flags & flag::GRAMMAR != 0;
            let state = self.lanes.state[lane] as i32;
            if constrained {
                flags |= seq_flag::GRAMMAR;
                totals.grammar += 1;
            }
            self.ring.get_mut(slot, F::SampleRow)[sample] = (first + rows as usize) as i32 - 1;
            self.ring.get_mut(slot, F::RngPos)[sample] = end as i32;
            self.ring.get_mut(slot, F::GrammarRow)[sample] = if constrained { state } else { -1 };
            totals.samples += 1;
        }
        totals.prefill_rows += u64::from(rows);
        self.end_seq(slot, lane, flags, rows, totals);
    }

    fn begin_seq(&mut self, slot: usize, lane: usize, totals: &Totals) {
        self.ring.get_mut(slot, F::CuQ)[totals.seqs] = totals.rows as i32;
        self.ring.get_mut(slot, F::SampleOff)[totals.seqs] = totals.samples as i32;
        if self.launch.lanes.len() < totals.seqs {
            // The plain lanes before this one are their own indices.
            for plain in self.launch.lanes.len()..totals.seqs {
                self.launch.lanes.push(plain as u32);
                self.launch.rows.push(1);
                self.launch.sample_off.push(plain as u32);
            }
        }
        self.launch.seqs.push(self.lanes.seq[lane]);
        self.launch.lanes.push(lane as u32);
        self.launch.sample_off.push(totals.samples as u32);
    }

    fn end_seq(&mut self, slot: usize, lane: usize, flags: i32, rows: u32, totals: &mut Totals) {
        let len = self.lanes.confirmed[lane] + rows;
        self.lanes.planned[lane] = len;
        self.launch.rows.push(rows);
        let at = totals.seqs;
        self.ring.get_mut(slot, F::SeqLen)[at] = len as i32;
        self.ring.get_mut(slot, F::StateRow)[at] = self.lanes.state[lane] as i32;
        self.ring.get_mut(slot, F::SeqFlags)[at] = flags;
        totals.rows += rows as usize;
        totals.seqs += 1;
        totals.longest_query = totals.longest_query.max(rows);
        totals.longest_context = totals.longest_context.max(len);
    }

    /// Positions and KV slots of consecutive rows.
    fn fill_run(&mut self, slot: usize, lane: usize, at: usize, positions: Range<u32>) {
        let rows = positions.len();
        for (to, position) in self.ring.get_mut(slot, F::Pos)[at..at + rows].iter_mut().zip(positions.clone()) {
            *to = position as i32;
        }
        let state = self.lanes.state[lane];
        for (index, map) in self.geometry.maps.iter().enumerate() {
            let to = &mut self.ring.slots_mut(slot, index)[at..at + rows];
            let within = (1 << map.page_shift) - 1;
            let mut start = positions.start;
            while start < positions.end {
                // One page at a time.
                let end = ((start | within) + 1).min(positions.end);
                let block = self.kv.tables.block(state, start >> self.geometry.shift);
                let j = (start & self.geometry.mask) >> map.page_shift;
                let page = self.kv.blocks.page(map.group, block, j as usize);
                let from = (start - positions.start) as usize;
                for (to, position) in to[from..].iter_mut().zip(start..end) {
                    *to = entry(page, position, map.entries, within, map.ratio_shift);
                }
                start = end;
            }
        }
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

/// KV slot of `position` on `page`, −1 where the position completes no entry.
#[inline]
fn entry(page: u32, position: u32, entries: u32, within: u32, ratio: u32) -> i32 {
    let last = (1 << ratio) - 1;
    let slot = (page * entries + ((position & within) >> ratio)) as i32;
    if position & last == last { slot } else { -1 }
}
