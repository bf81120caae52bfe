//! `complete`: what a finished step means.
//!
//! Results are matched by the launch record: each lane carries its index in the steps in flight. Decoding lanes go through
//! one pass over the arrays; the rest (ends, long stop lists, prompts that end) goes lane by lane afterwards.

use crate::error::StepError;
use crate::lanes::{NOT_SENT, flag};
use crate::layout::F;
use crate::output::{FIRST, OUTPUT_WORDS, Outputs, STREAMS, out};
use crate::plan::{Launch, parity};
use crate::pool::Finish;
use crate::scheduler::Scheduler;
use crate::wide::any_stop;
use deepinfer_kvindex::{Counts, Seq, StepId};

impl Scheduler {
    /// Reads the results of a step from its ring slot: appends tokens, ends sequences, publishes filled blocks, releases
    /// what is no longer needed. `now` is the caller's clock in nanoseconds.
    ///
    /// # Errors
    /// [`StepError::NotInFlight`], [`StepError::OutOfOrder`]; nothing has changed then.
    pub fn complete(&mut self, step: StepId, now: u64) -> Result<Outputs<'_>, StepError> {
        let launch = self.take_step(step)?;
        self.now = now;
        self.begin_outputs();
        self.end_arriving(step.0);
        self.end_snapshots(step.0, true);
        let mut settle = false;
        if launch.decoding > 0 {
            if !launch.uniform {
                self.ragged_pass::<false>(&launch);
            } else if launch.version == self.lanes.version {
                self.plain_pass(&launch);
            } else {
                self.ragged_pass::<true>(&launch);
            }
            settle |= self.finish_irregular(&launch);
        }
        if launch.seqs.len() > launch.decoding {
            settle |= self.prefill_pass(&launch);
        }
        self.drain_hash_queue(launch.samples);
        self.end_leaving(step.0, true);
        self.end_step(launch, now, settle);
        Ok(self.outputs.view(step))
    }

    /// Ends every sequence that had rows in the step with an error and keeps the rest. What the step wrote counts for
    /// nothing, and so do the rows that these sequences have in a step launched after it.
    ///
    /// # Errors
    /// [`StepError::NotInFlight`], [`StepError::OutOfOrder`]; nothing has changed then.
    pub fn fail_step(&mut self, step: StepId, now: u64) -> Result<Outputs<'_>, StepError> {
        let launch = self.take_step(step)?;
        self.now = now;
        self.begin_outputs();
        for index in 0..launch.seqs.len() {
            // Whoever lost its lane since then computes those rows again anyway.
            if self.lane_of(&launch, index).is_some() {
                self.end_outside(launch.seqs[index], Finish::Error);
            }
        }
        self.metrics.failed_steps += 1;
        self.end_leaving(step.0, false);
        self.end_snapshots(step.0, false);
        self.fail_group();
        self.end_step(launch, now, true);
        Ok(self.outputs.view(step))
    }

    /// Takes the record of the oldest step in flight, which `step` must be.
    fn take_step(&mut self, step: StepId) -> Result<Launch, StepError> {
        if step.0 <= self.completed || step.0 > self.step {
            return Err(StepError::NotInFlight(step));
        }
        if self.is_half_planned() {
            return Err(StepError::HalfPlanned);
        }
        let oldest = StepId(self.completed + 1);
        if step != oldest {
            return Err(StepError::OutOfOrder { step, oldest });
        }
        Ok(std::mem::take(&mut self.launches[parity(step.0)]))
    }

    fn end_step(&mut self, launch: Launch, now: u64, settle: bool) {
        if settle {
            self.lanes.settle(&mut self.seqs);
        }
        self.report_ended();
        self.ring.give_back(launch.slot);
        self.completed = launch.step;
        self.metrics.last_step = launch.step;
        self.metrics.last_step_ns = now;
        let place = parity(launch.step);
        self.launches[place] = launch;
        let sound = self.kv.blocks.counts(0).adds_up()
            && self.kv.states.counts().adds_up()
            && self.host.counts().iter().all(Counts::adds_up);
        self.metrics.count_faults += u64::from(!sound);
    }

    // Bitwise on purpose: five conditions that nearly always hold cost one branch.
    #[allow(clippy::needless_bitwise_bool)]
    /// One token for each of the first `decoding` lanes, which are where they were at the launch. Lanes that need more than an
    /// append are noted.
    fn plain_pass(&mut self, launch: &Launch) {
        let n = launch.decoding;
        let Self { lanes, kv, ring, outputs, hash_queue, irregular, metrics, .. } = self;
        let slot = launch.slot;
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
        let planned = &lanes.planned[..n];
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
                irregular.push([lane as u32; 2]);
                continue;
            }
            if position & mask == 0 {
                let filled = (position >> shift) - 1;
                // The new token overwrites the open page before this one: its tokens must be in the history by now.
                if filled > 0 && flushed[lane] < filled << shift {
                    irregular.push([lane as u32; 2]);
                    continue;
                }
                hash_queue.push(seq[lane], filled);
            }
            confirmed[lane] = position;
            // With a later row in flight the newest token is one that the host does not know.
            last[lane] = if planned[lane] == position { token } else { last[lane] };
            kv.tables.put_token(state[lane], position, token as u32);
        }
        metrics.output_tokens += (n - irregular.len()) as u64;
    }

    /// The output rows of every decoding lane that had rows in the step, wherever it is by now.
    fn ragged_rows<const UNIFORM: bool>(&mut self, launch: &Launch) {
        let n = launch.decoding;
        let Self { lanes, ring, outputs, .. } = self;
        let tokens = ring.get(launch.slot, F::Tokens);
        let accepted = &ring.get(launch.slot, F::Accepted)[..n];
        let (rows, notify) = outputs.parts();
        rows.resize(n * OUTPUT_WORDS, 0);
        let to = rows.as_chunks_mut::<OUTPUT_WORDS>().0;
        let here = lanes.decoding;
        let (seq, state, flags) = (&lanes.seq[..here], &lanes.state[..here], &lanes.flags[..here]);
        let mut at = 0;
        for (lane, &index) in lanes.sent[parity(launch.step)][..here].iter().enumerate() {
            let Some(&got) = accepted.get(index as usize) else { continue };
            let first = if UNIFORM { index } else { launch.sample_off[index as usize] };
            let (seq, streams) = (seq[lane], i32::from(flags[lane] & flag::STREAM != 0));
            let token = tokens[first as usize];
            to[at] =
                [seq.index as i32, seq.generation as i32, state[lane] as i32, token, got, 0, streams, index as i32];
            if streams != 0 {
                notify.push(at as u32);
            }
            at += 1;
        }
        rows.truncate(at * OUTPUT_WORDS);
        self.metrics.ghost_rows += (n - at) as u64;
    }

    // Bitwise on purpose, as above.
    #[allow(clippy::needless_bitwise_bool)]
    /// The tokens of every decoding lane that had rows in the step. Lanes that need more than an append are noted.
    fn ragged_pass<const UNIFORM: bool>(&mut self, launch: &Launch) {
        let n = launch.decoding;
        self.ragged_rows::<UNIFORM>(launch);
        let Self { lanes, kv, ring, hash_queue, irregular, metrics, .. } = self;
        let tokens = ring.get(launch.slot, F::Tokens);
        let accepted = &ring.get(launch.slot, F::Accepted)[..n];
        let verified = &ring.get(launch.slot, F::Verified)[..n];
        irregular.clear();
        let vocab = self.limits.vocab_size;
        // Asked of all at once; where there is one, each sequence is looked at.
        let beyond = tokens[..launch.samples].iter().fold(0, |any, &token| any | i32::from(token as u32 >= vocab)) != 0;
        let shift = self.geometry.shift;
        let here = lanes.decoding;
        let sent = &lanes.sent[parity(launch.step)][..here];
        let (seq, state, limit) = (&lanes.seq[..here], &lanes.state[..here], &lanes.limit[..here]);
        let (stops, flags, flushed) = (&lanes.stops[..here], &lanes.flags[..here], &lanes.flushed[..here]);
        let (planned, confirmed) = (&mut lanes.planned[..here], &mut lanes.confirmed[..here]);
        let (last, open, blocks) = (&mut lanes.last[..here], &mut lanes.open[..here], &lanes.blocks[..here]);
        let (mut row, mut made, mut kept_drafts) = (0, 0, 0);
        for (lane, &index) in sent.iter().enumerate() {
            let Some(&got) = accepted.get(index as usize) else { continue };
            row += 1;
            let (asked, first) = if UNIFORM { (1, index) } else { launch.shape_of(index) };
            let tokens = &tokens[first as usize..];
            let (got, start) = (got as u32, confirmed[lane]);
            let end = start.wrapping_add(got);
            let usual =
                (got.wrapping_sub(1) < asked) & (end.wrapping_add(1) < limit[lane]) & (flags[lane] & flag::SLOW == 0);
            let kept = got as usize;
            if !usual
                || any_stop(tokens, kept, &stops[lane])
                || (beyond && tokens[..kept].iter().any(|&token| token as u32 >= vocab))
            {
                irregular.push([lane as u32, row - 1]);
                continue;
            }
            let (before, after) = (start >> shift, end >> shift);
            if before != after {
                // As in the plain pass; more than one block at once goes the slow way.
                if after != before + 1 || (before > 0 && flushed[lane] < before << shift) {
                    irregular.push([lane as u32, row - 1]);
                    continue;
                }
                hash_queue.push(seq[lane], before);
            }
            kv.tables.put_tokens(state[lane], start + 1, tokens, kept);
            confirmed[lane] = end;
            let (bound, next) = (planned[lane], planned[lane] - (asked - got));
            planned[lane] = next;
            if next >> shift != bound >> shift && next >> shift < blocks[lane] {
                open[lane] = kv.tables.block(state[lane], next >> shift).0;
            }
            // With a later row in flight the newest token is one that the host does not know.
            last[lane] = if next == end { tokens[kept - 1] } else { last[lane] };
            made += got;
            kept_drafts += got - 1;
            if !UNIFORM && asked > 1 {
                let verified = if launch.chosen { verified[index as usize] as usize } else { asked as usize - 1 };
                metrics.drafts.note(verified, kept - 1);
            }
        }
        metrics.output_tokens += u64::from(made);
        metrics.accepted += u64::from(kept_drafts);
    }

    /// Lane that sequence `index` of a step still has. None once it ended or lost it, whatever it has got since.
    fn lane_of(&self, launch: &Launch, index: usize) -> Option<usize> {
        let lane = self.seqs.lane(launch.seqs[index])?;
        (self.lanes.sent[parity(launch.step)][lane] == index as u32).then_some(lane)
    }

    fn push_row(&mut self, seq: Seq, lane: usize, index: usize) {
        let streams = self.lanes.flags[lane] & flag::STREAM != 0;
        let state = self.lanes.state[lane] as i32;
        let flags = if streams { STREAMS } else { 0 };
        self.outputs.push([seq.index as i32, seq.generation as i32, state, 0, 0, 0, flags, index as i32]);
    }

    /// Handles the noted lanes. True if one ended.
    fn finish_irregular(&mut self, launch: &Launch) -> bool {
        let mut ended = false;
        let irregular = std::mem::take(&mut self.irregular);
        for &[lane, row] in &irregular {
            ended |= self.advance(launch, lane as usize, row as usize);
        }
        self.irregular = irregular;
        ended
    }

    /// Appends what a decoding sequence produced. True if it ended.
    fn advance(&mut self, launch: &Launch, lane: usize, row: usize) -> bool {
        let index = self.lanes.sent[parity(launch.step)][lane];
        debug_assert_ne!(index, NOT_SENT, "only lanes with rows are noted");
        let (asked, sample) = launch.shape(index as usize);
        let seq = self.lanes.seq[lane];
        let (count, finish) = if self.read_tokens(launch, index as usize, sample, asked) {
            let rejected = asked - self.produced.len() as u32;
            self.append(seq, lane, true, rejected)
        } else {
            (0, Some(Finish::Error))
        };
        self.metrics.accepted += u64::from(count.saturating_sub(1));
        if asked > 1 {
            let verified = self.ring.get(launch.slot, F::Verified)[index as usize];
            let drafts = if launch.chosen { verified as usize } else { asked as usize - 1 };
            self.metrics.drafts.note(drafts, count.saturating_sub(1) as usize);
        }
        let token = self.ring.get(launch.slot, F::Tokens)[sample];
        self.close_row(seq, row, token, count, finish, lane)
    }

    /// Copies the tokens of a sequence to `produced`. False if the worker left an impossible result.
    fn read_tokens(&mut self, launch: &Launch, index: usize, sample: usize, rows: u32) -> bool {
        let accepted = self.ring.get(launch.slot, F::Accepted)[index];
        self.produced.clear();
        if accepted < 1 || accepted > rows as i32 {
            return false;
        }
        let tokens = &self.ring.get(launch.slot, F::Tokens)[sample..sample + accepted as usize];
        self.produced.extend_from_slice(tokens);
        true
    }

    /// Appends the copied tokens one by one until one ends the sequence, and takes back what was planned for `rejected` ones.
    /// Returns how many were kept and the end, if any.
    fn append(&mut self, seq: Seq, lane: usize, advance: bool, rejected: u32) -> (u32, Option<Finish>) {
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
        self.lanes.planned[lane] -= rejected;
        if self.lanes.planned[lane] == self.lanes.confirmed[lane]
            && let Some(&token) = self.produced.last()
        {
            self.lanes.last[lane] = token;
        }
        let index = self.lanes.planned[lane] >> shift;
        if index < self.lanes.blocks[lane] {
            self.lanes.open[lane] = self.kv.tables.block(state, index).0;
        }
        (count, finish)
    }

    /// Completes an output row and ends its sequence if it must.
    fn close_row(&mut self, seq: Seq, row: usize, token: i32, count: u32, finish: Option<Finish>, lane: usize) -> bool {
        self.metrics.output_tokens += u64::from(count);
        let token = if count > 0 { token } else { 0 };
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
    fn prefill_pass(&mut self, launch: &Launch) -> bool {
        let mut changed = false;
        for index in launch.decoding..launch.seqs.len() {
            // Lanes that ended in this step are still in place: they move in `settle`.
            let Some(lane) = self.lane_of(launch, index) else {
                self.metrics.ghost_rows += 1;
                continue;
            };
            let seq = launch.seqs[index];
            let (rows, sample) = launch.shape(index);
            let confirmed = self.lanes.confirmed[lane] + rows;
            let target = self.lanes.target[lane];
            self.lanes.confirmed[lane] = confirmed;
            if self.prefix_caching {
                self.publish_through(lane, confirmed >> self.geometry.shift);
            }
            self.note_prompt_boundary(lane, rows);
            let prompt = self.seqs.get(seq).map_or(0, |c| c.prompt);
            if confirmed + u32::from(self.geometry.has_state) >= prompt {
                self.release_forks_of(seq);
            }
            if confirmed < target {
                continue;
            }
            changed = true;
            self.note_chain(lane);
            let state = self.lanes.state[lane];
            if let Some(cold) = self.seqs.get(seq) {
                self.kv.tables.load(state, &cold.history, target);
            }
            if lane >= self.lanes.decoding {
                self.lanes.flags[lane] |= flag::PROMOTE;
            }
            let row = self.outputs.rows().len() / OUTPUT_WORDS;
            self.push_row(seq, lane, index);
            let (count, finish) = if self.read_tokens(launch, index, sample, 1) {
                self.append(seq, lane, false, 0)
            } else {
                (0, Some(Finish::Error))
            };
            if count == 0 {
                // Nothing was drawn: there is no newest token to keep.
                self.lanes.flags[lane] &= !flag::PROMOTE;
                self.lanes.target[lane] = u32::MAX;
            }
            let token = self.ring.get(launch.slot, F::Tokens)[sample];
            self.close_row(seq, row, token, count, finish, lane);
        }
        changed
    }
}
