//! Writing decoding lanes with different numbers of rows: drafts, or lanes that have none.
//!
//! Lanes without a row are few, and what lies between two of them goes array by array, as in a plain step.

use crate::fill::{Totals, fill_slots, iota};
use crate::lanes::{Lanes, NOT_SENT, flag};
use crate::layout::{F, seq_flag};
use crate::plan::{Launch, parity};
use crate::scheduler::Scheduler;
use crate::wide::{copy_few, count_up};
use std::ops::Range;

impl Scheduler {
    /// The decoding lanes that have rows.
    pub(crate) fn fill_ragged(&mut self, launch: &mut Launch, totals: &mut Totals) {
        let (slot, n) = (launch.slot, self.lanes.decoding);
        let mut lane = 0;
        while lane < n {
            let end = self.lanes.rows[lane..n].iter().position(|&rows| rows == 0).map_or(n, |at| lane + at);
            self.fill_run(launch, lane..end, totals);
            if end < n {
                self.lanes.sent[parity(launch.step)][end] = NOT_SENT;
            }
            lane = end + 1;
        }
        let (seqs, rows) = (totals.seqs, totals.rows);
        let [pos, rng_pos, sample_row, grammar_row] =
            self.ring.many_mut(slot, [F::Pos, F::RngPos, F::SampleRow, F::GrammarRow]);
        for (to, &position) in rng_pos[..rows].iter_mut().zip(&pos[..rows]) {
            *to = position + 1;
        }
        iota(&mut sample_row[..rows]);
        grammar_row[..rows].fill(-1);
        if self.lanes.flags[..n].iter().any(|f| f & flag::GRAMMAR != 0) {
            self.fill_grammars(launch, totals);
        }
        totals.samples = rows;
        totals.drafts = (rows - seqs) as i32;
    }

    /// Lanes that all have rows, behind those that were written.
    fn fill_run(&mut self, launch: &mut Launch, run: Range<usize>, totals: &mut Totals) {
        let (slot, n) = (launch.slot, run.len());
        let Self { lanes, ring, kv, geometry, .. } = self;
        let (rows, next, state) = (&lanes.rows[run.clone()], &lanes.planned[run.clone()], &lanes.state[run.clone()]);
        let (index, first) = (totals.seqs, totals.rows);
        launch.seqs.extend_from_slice(&lanes.seq[run.clone()]);
        launch.rows.extend_from_slice(rows);
        for (sent, index) in lanes.sent[parity(launch.step)][run.clone()].iter_mut().zip(index as u32..) {
            *sent = index;
        }
        let [cu_q, sample_off, seq_len, state_row, seq_flags, ids, pos] =
            ring.many_mut(slot, [F::CuQ, F::SampleOff, F::SeqLen, F::StateRow, F::SeqFlags, F::Ids, F::Pos]);
        let here = index..index + n;
        let (cu_q, seq_len) = (&mut cu_q[here.clone()], &mut seq_len[here.clone()]);
        let mut end = first;
        for (to, &rows) in cu_q.iter_mut().zip(rows) {
            *to = end as i32;
            end += rows as usize;
        }
        sample_off[here.clone()].copy_from_slice(cu_q);
        launch.sample_off.extend(cu_q.iter().map(|&at| at as u32));
        let (mut longest_query, mut longest_context) = (totals.longest_query as i32, totals.longest_context as i32);
        for ((to, &rows), &next) in seq_len.iter_mut().zip(rows).zip(next) {
            *to = (next + rows) as i32;
            longest_query = longest_query.max(rows as i32);
            longest_context = longest_context.max(*to);
        }
        for (to, &state) in state_row[here.clone()].iter_mut().zip(state) {
            *to = state as i32;
        }
        seq_flags[here].fill(seq_flag::SAMPLES);
        let mut at = first;
        for (((&rows, &next), &state), &last) in rows.iter().zip(next).zip(state).zip(&lanes.last[run.clone()]) {
            let n = rows as usize;
            count_up(&mut pos[at..], n, next as i32);
            let ids = &mut ids[at..];
            copy_few(&mut ids[1..], kv.tables.drafts(state), n - 1, |draft| draft as i32);
            ids[0] = last;
            at += n;
        }
        for (map_index, map) in geometry.maps.iter().enumerate() {
            let to = ring.slots_mut(slot, map_index);
            let in_page = (1 << map.page_shift) - 1;
            let plain = map.group == 0 && map.ratio_shift == 0;
            let mut at = first;
            for (((&rows, &next), &state), &open) in rows.iter().zip(next).zip(state).zip(&lanes.open[run.clone()]) {
                let within = next & in_page;
                let to = &mut to[at..];
                at += rows as usize;
                if plain && within + rows <= map.entries {
                    // All in the block that is open.
                    count_up(to, rows as usize, (open * map.entries + within) as i32);
                } else {
                    fill_slots(&mut to[..rows as usize], next, state, map, kv, geometry);
                }
            }
        }
        totals.rows = end;
        totals.seqs = index + n;
        totals.longest_query = longest_query as u32;
        totals.longest_context = longest_context as u32;
        self.pass_rows(run);
    }

    /// Moves the lanes of a run behind the rows that were written.
    fn pass_rows(&mut self, run: Range<usize>) {
        let (mask, shift) = (self.geometry.mask, self.geometry.shift);
        let Lanes { rows, planned, last, drafts, open, blocks, state, .. } = &mut self.lanes;
        let rows = &rows[run.clone()];
        drafts[run.clone()].fill(0);
        last[run.clone()].fill(-1);
        for (planned, &rows) in planned[run.clone()].iter_mut().zip(rows) {
            *planned += rows;
        }
        for (lane, &rows) in run.clone().zip(rows) {
            // The next row may lie in a block that the drafts entered.
            if planned[lane] & mask < rows {
                let block = planned[lane] >> shift;
                if block < blocks[lane] {
                    open[lane] = self.kv.tables.block(state[lane], block).0;
                }
            }
        }
    }

    /// Marks the rows of sequences that a grammar constrains.
    fn fill_grammars(&mut self, launch: &Launch, totals: &mut Totals) {
        let lanes = &self.lanes;
        let [seq_flags, sample_off, grammar_row] =
            self.ring.many_mut(launch.slot, [F::SeqFlags, F::SampleOff, F::GrammarRow]);
        for lane in (0..lanes.decoding).filter(|&lane| lanes.rows[lane] > 0 && lanes.flags[lane] & flag::GRAMMAR != 0) {
            let index = lanes.sent[parity(launch.step)][lane] as usize;
            let (first, rows) = (sample_off[index] as usize, lanes.rows[lane]);
            seq_flags[index] |= seq_flag::GRAMMAR;
            grammar_row[first..first + rows as usize].fill(lanes.state[lane] as i32);
            totals.grammar += rows as i32;
        }
    }
}
