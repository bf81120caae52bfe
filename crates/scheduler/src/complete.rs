//! `complete`: what a finished step means.
//!
//! Results are matched by the launch record. Decoding lanes with one plain token go through one pass over the arrays; the
//! rest (drafts, ends, long stop lists, prompts that end) goes lane by lane afterwards.

use crate::error::StepError;
use crate::lanes::flag;
use crate::layout::F;
use crate::output::{FIRST, OUTPUT_WORDS, Outputs, STREAMS, out};
use crate::pool::Finish;
use crate::scheduler::Scheduler;
use deepinfer_kvindex::{Seq, StepId};

impl Scheduler {
    /// Reads the results of a step from its ring slot: appends tokens, ends sequences, publishes filled blocks, releases
    /// what is no longer needed. `now` is the caller's clock in nanoseconds.
    ///
    /// # Errors
    /// [`StepError::NotInFlight`]; nothing has changed then.
    pub fn complete(&mut self, step: StepId, now: u64) -> Result<Outputs<'_>, StepError> {
        self.take_step(step)?;
        self.now = now;
        self.begin_outputs();
        let mut settle = false;
        if self.launch.decoding > 0 {
            if self.launch.uniform {
                self.plain_pass();
            } else {
                self.ragged_pass();
            }
            settle |= self.finish_irregular();
        }
        if self.launch.seqs.len() > self.launch.decoding {
            settle |= self.prefill_pass();
        }
        self.drain_hash_queue(self.launch.samples);
        self.end_step(now, settle);
        Ok(self.outputs.view(step))
    }

    /// Ends every sequence that had rows in the step with an error and keeps the rest. What the step wrote counts for
    /// nothing.
    ///
    /// # Errors
    /// [`StepError::NotInFlight`]; nothing has changed then.
    pub fn fail_step(&mut self, step: StepId, now: u64) -> Result<Outputs<'_>, StepError> {
        self.take_step(step)?;
        self.now = now;
        self.begin_outputs();
        for index in 0..self.launch.seqs.len() {
            let seq = self.launch.seqs[index];
            self.end_outside(seq, Finish::Error);
        }
        self.metrics.failed_steps += 1;
        self.end_step(now, true);
        Ok(self.outputs.view(step))
    }

    fn take_step(&mut self, step: StepId) -> Result<(), StepError> {
        if !self.in_flight || step.0 != self.step {
            return Err(StepError::NotInFlight(step));
        }
        self.in_flight = false;
        Ok(())
    }

    fn end_step(&mut self, now: u64, settle: bool) {
        if settle {
            self.lanes.settle(&mut self.seqs);
        }
        self.report_ended();
        self.ring.give_back(self.launch.slot);
        self.completed = self.step;
        self.metrics.last_step = self.step;
        self.metrics.last_step_ns = now;
        let sound = self.kv.blocks.counts(0).adds_up() && self.kv.states.counts().adds_up();
        self.metrics.count_faults += u64::from(!sound);
    }

    // Bitwise on purpose: five conditions that nearly always hold cost one branch.
    #[allow(clippy::needless_bitwise_bool)]
    /// One token for each of the first `decoding` lanes. Lanes that need more than an append are noted.
    fn plain_pass(&mut self) {
        let n = self.launch.decoding;
        let Self { lanes, kv, ring, outputs, hash_queue, irregular, metrics, .. } = self;
        let slot = self.launch.slot;
        let tokens = &ring.get(slot, F::Tokens)[..n];
        let accepted = &ring.get(slot, F::Accepted)[..n];
        let (rows, notify) = outputs.parts();
        rows.resize(n * OUTPUT_WORDS, 0);
        irregular.clear();
        let vocab = self.limits.vocab_size;
        let (mask, shift) = (self.geometry.mask, self.geometry.shift);
        let seq = &lanes.seq[..n];
        let state = &lanes.state[..n];
        let limit = &lanes.limit[..n];
        let stops = &lanes.stops[..n];
        let flags = &lanes.flags[..n];
        let flushed = &lanes.flushed[..n];
        let confirmed = &mut lanes.confirmed[..n];
        let last = &mut lanes.last[..n];
        for (lane, row) in rows.chunks_exact_mut(OUTPUT_WORDS).enumerate() {
            let token = tokens[lane];
            let position = confirmed[lane] + 1;
            let flag_bits = flags[lane];
            let stopped = stops[lane].iter().fold(false, |hit, &stop| hit | (stop == token));
            let plain = (accepted[lane] == 1)
                & ((token as u32) < vocab)
                & (position + 1 < limit[lane])
                & (flag_bits & flag::SLOW == 0)
                & !stopped;
            let streams = i32::from(flag_bits & flag::STREAM != 0);
            row.copy_from_slice(&[
                seq[lane].index as i32,
                seq[lane].generation as i32,
                state[lane] as i32,
                token,
                1,
                0,
                streams,
                lane as i32,
            ]);
            if streams != 0 {
                notify.push(lane as u32);
            }
            if !plain {
                irregular.push(lane as u32);
                continue;
            }
            if position & mask == 0 {
                let filled = (position >> shift) - 1;
                // The new token overwrites the open page before this one: its tokens must be in the history by now.
                if filled > 0 && flushed[lane] < filled << shift {
                    irregular.push(lane as u32);
                    continue;
                }
                hash_queue.push(seq[lane], filled);
            }
            confirmed[lane] = position;
            last[lane] = token;
            kv.tables.put_token(state[lane], position, token as u32);
        }
        metrics.output_tokens += (n - irregular.len()) as u64;
    }

    /// Rows for the decoding sequences of a step whose rows are not one each; all of them go lane by lane.
    fn ragged_pass(&mut self) {
        self.irregular.clear();
        for index in 0..self.launch.decoding {
            let seq = self.launch.seqs[index];
            let Some(lane) = self.lane_of(index, seq) else {
                self.metrics.stale += 1;
                continue;
            };
            self.push_row(seq, lane, index);
            self.irregular.push(index as u32);
        }
    }

    fn lane_of(&self, index: usize, seq: Seq) -> Option<usize> {
        if self.launch.version == self.lanes.version {
            Some(self.launch.lanes.get(index).map_or(index, |&lane| lane as usize))
        } else {
            self.seqs.lane(seq)
        }
    }

    fn push_row(&mut self, seq: Seq, lane: usize, index: usize) {
        let streams = self.lanes.flags[lane] & flag::STREAM != 0;
        let state = self.lanes.state[lane] as i32;
        let flags = if streams { STREAMS } else { 0 };
        self.outputs.push([seq.index as i32, seq.generation as i32, state, 0, 0, 0, flags, index as i32]);
    }

    /// Handles the noted sequences. True if a lane ended.
    fn finish_irregular(&mut self) -> bool {
        let mut ended = false;
        let irregular = std::mem::take(&mut self.irregular);
        for (nth, &index) in irregular.iter().enumerate() {
            let index = index as usize;
            let seq = self.launch.seqs[index];
            let Some(lane) = self.lane_of(index, seq) else { continue };
            let row = if self.launch.uniform { index } else { nth };
            let rows = if self.launch.uniform { 1 } else { self.launch.rows[index] };
            let sample = if self.launch.uniform { index } else { self.launch.sample_off[index] as usize };
            ended |= self.advance(seq, lane, row, index, sample, rows);
        }
        self.irregular = irregular;
        ended
    }

    /// Appends what a decoding sequence produced. True if it ended.
    fn advance(&mut self, seq: Seq, lane: usize, row: usize, index: usize, sample: usize, rows: u32) -> bool {
        let (count, finish) =
            if self.read_tokens(index, sample, rows) { self.append(seq, lane, true) } else { (0, Some(Finish::Error)) };
        if rows > 1 {
            self.metrics.accepted += u64::from(count.saturating_sub(1));
        }
        if self.lanes.flags[lane] & flag::DRAFT != 0 {
            self.set_draft_flag(lane, false);
            if let Some(cold) = self.seqs.get_mut(seq) {
                cold.drafts.clear();
            }
        }
        self.close_row(seq, row, sample, count, finish, lane)
    }

    /// Copies the tokens of a sequence to `produced`. False if the worker left an impossible result.
    fn read_tokens(&mut self, index: usize, sample: usize, rows: u32) -> bool {
        let slot = self.launch.slot;
        let accepted = self.ring.get(slot, F::Accepted)[index];
        self.produced.clear();
        if accepted < 1 || accepted > rows as i32 {
            return false;
        }
        let tokens = &self.ring.get(slot, F::Tokens)[sample..sample + accepted as usize];
        self.produced.extend_from_slice(tokens);
        true
    }

    /// Appends the copied tokens one by one until one ends the sequence. Returns how many were kept and the end, if any.
    fn append(&mut self, seq: Seq, lane: usize, advance: bool) -> (u32, Option<Finish>) {
        let state = self.lanes.state[lane];
        let limit = self.lanes.limit[lane];
        let (mask, shift) = (self.geometry.mask, self.geometry.shift);
        let mut count = 0;
        let mut finish = None;
        for nth in 0..self.produced.len() {
            let token = self.produced[nth];
            if token as u32 >= self.limits.vocab_size {
                finish = Some(Finish::Error);
                break;
            }
            let position = self.lanes.confirmed[lane] + u32::from(advance);
            if advance && position & mask == 0 {
                let filled = (position >> shift) - 1;
                if filled > 0 && self.lanes.flushed[lane] < filled << shift {
                    self.flush_block(lane, filled - 1);
                }
                self.hash_queue.push(seq, filled);
            }
            self.lanes.confirmed[lane] = position;
            self.lanes.last[lane] = token;
            self.kv.tables.put_token(state, position, token as u32);
            count += 1;
            let len = position + 1;
            let stopped = self.seqs.get(seq).is_some_and(|cold| cold.stops_at(token as u32, len));
            if stopped {
                finish = Some(Finish::Stop);
                break;
            }
            if len >= limit {
                finish = Some(self.length_reached(seq, len));
                break;
            }
        }
        self.lanes.planned[lane] = self.lanes.confirmed[lane];
        let index = self.lanes.confirmed[lane] >> shift;
        if index < self.lanes.blocks[lane] {
            self.lanes.open[lane] = self.kv.tables.block(state, index).0;
        }
        (count, finish)
    }

    /// Completes an output row and ends its sequence if it must.
    fn close_row(
        &mut self,
        seq: Seq,
        row: usize,
        sample: usize,
        count: u32,
        finish: Option<Finish>,
        lane: usize,
    ) -> bool {
        self.metrics.output_tokens += u64::from(count);
        let token = if count > 0 { self.ring.get(self.launch.slot, F::Tokens)[sample] } else { 0 };
        let (now, mut first) = (self.now, false);
        if let Some(cold) = self.seqs.get_mut(seq) {
            if count > 0 && cold.times.first_token == 0 {
                cold.times.first_token = now.max(1);
                first = true;
            }
            if cold.stops.is_empty() && self.lanes.confirmed[lane] + 1 >= cold.least {
                self.lanes.flags[lane] &= !flag::STOPS;
            }
        }
        let (rows, notify) = self.outputs.parts();
        let words = &mut rows[row * OUTPUT_WORDS..(row + 1) * OUTPUT_WORDS];
        words[out::TOKEN] = token;
        words[out::COUNT] = count as i32;
        words[out::FLAGS] |= if first { FIRST } else { 0 };
        let Some(finish) = finish else { return false };
        words[out::FINISH] = finish as i32;
        if words[out::FLAGS] & STREAMS == 0 {
            notify.push(row as u32);
        }
        if self.end(seq, finish) {
            self.reported.push(seq);
        }
        true
    }

    /// Chunks of the step. True if a lane ended or goes on to decode.
    fn prefill_pass(&mut self) -> bool {
        let mut changed = false;
        for index in self.launch.decoding..self.launch.seqs.len() {
            let seq = self.launch.seqs[index];
            // Lanes that ended in this step are still in place: they move in `settle`.
            let Some(lane) = self.lane_of(index, seq) else {
                self.metrics.stale += 1;
                continue;
            };
            let rows = self.launch.rows[index];
            let confirmed = self.lanes.confirmed[lane] + rows;
            let target = self.lanes.target[lane];
            self.lanes.confirmed[lane] = confirmed;
            if self.prefix_caching {
                self.publish_through(lane, confirmed >> self.geometry.shift);
            }
            let prompt = self.seqs.get(seq).map_or(0, |c| c.prompt);
            if confirmed + u32::from(self.geometry.has_state) >= prompt {
                self.release_forks_of(seq);
            }
            if confirmed < target {
                continue;
            }
            changed = true;
            let state = self.lanes.state[lane];
            if let Some(cold) = self.seqs.get(seq) {
                self.kv.tables.load(state, &cold.history, target);
            }
            self.lanes.flags[lane] |= flag::PROMOTE;
            let row = self.outputs.rows().len() / OUTPUT_WORDS;
            self.push_row(seq, lane, index);
            let sample = self.launch.sample_off[index] as usize;
            let (count, finish) = if self.read_tokens(index, sample, 1) {
                self.append(seq, lane, false)
            } else {
                (0, Some(Finish::Error))
            };
            if count == 0 {
                // Nothing was drawn: there is no newest token to keep.
                self.lanes.flags[lane] &= !flag::PROMOTE;
            }
            self.close_row(seq, row, sample, count, finish, lane);
        }
        changed
    }

    pub(crate) fn set_draft_flag(&mut self, lane: usize, on: bool) {
        if on {
            self.lanes.flags[lane] |= flag::DRAFT;
        } else {
            self.lanes.flags[lane] &= !flag::DRAFT;
        }
    }
}
