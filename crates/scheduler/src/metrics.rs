//! Counters of the core, plain integers on the step thread; a snapshot copies them.

use crate::histogram::{Histogram, Shares};
use crate::pool::Status;
use crate::scheduler::Scheduler;
use crate::waiting::Class;
use deepinfer_kvindex::{Counts, StepId};

/// Draft rows of a sequence that are told apart; more count as this many.
pub const DRAFT_POSITIONS: usize = 16;

/// What was drafted and what was taken of it, by length. Only sequences with drafts in a completed step count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drafts {
    /// Sequences and steps with `n` draft rows.
    pub asked: [u64; DRAFT_POSITIONS + 1],
    /// Of these, those of which `n` drafts were accepted.
    pub taken: [u64; DRAFT_POSITIONS + 1],
}

impl Drafts {
    /// Counts a sequence of a step.
    #[inline]
    pub(crate) fn note(&mut self, asked: usize, taken: usize) {
        self.asked[asked.min(DRAFT_POSITIONS)] += 1;
        self.taken[taken.min(DRAFT_POSITIONS)] += 1;
    }

    /// How often a draft stood at each position (0 = the first) and how often it was accepted there.
    pub fn at_positions(&self) -> ([u64; DRAFT_POSITIONS], [u64; DRAFT_POSITIONS]) {
        (longer(&self.asked), longer(&self.taken))
    }
}

/// `result[p]`: how many lengths are above `p`.
fn longer(lengths: &[u64; DRAFT_POSITIONS + 1]) -> [u64; DRAFT_POSITIONS] {
    let mut result = [0; DRAFT_POSITIONS];
    let mut sum = 0;
    for position in (0..DRAFT_POSITIONS).rev() {
        sum += lengths[position + 1];
        result[position] = sum;
    }
    result
}

/// What the rounds of a rank group led to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VoteOutcome {
    /// Nobody has anything to run.
    Idle,
    /// The group decodes.
    Decode,
    /// The group computes prompts.
    Prefill,
    /// It agreed on prompts, nobody could take one, it decodes.
    Fallback,
    /// A rank failed.
    Error,
}

/// Outcomes of a rank group's rounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Votes {
    /// First rounds read.
    pub rounds: u64,
    /// Second rounds.
    pub second_rounds: u64,
    /// By [`VoteOutcome`].
    pub outcomes: [u64; 5],
}

impl Votes {
    /// Counts a first round and, if there was one, the second, with what they led to.
    #[inline]
    pub fn note(&mut self, outcome: VoteOutcome, second_round: bool) {
        self.rounds += 1;
        self.second_rounds += u64::from(second_round);
        self.outcomes[outcome as usize] += 1;
    }
}

/// Times of completed steps, as the caller measured them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTimes {
    /// Newest step they are known of.
    pub last: u64,
    /// What the device worked on a step.
    pub device: Histogram,
    /// What the host worked on a step: schedule, launch, complete.
    pub host: Histogram,
    /// Time that the device stood still before a step although there was work.
    pub idle_ns: u64,
    /// Host work during which the device was busy.
    pub hidden_ns: u64,
}

/// Totals since the start and gauges of this moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Metrics {
    /// Steps planned, dummy ones included.
    pub steps: u64,
    /// Steps with decode rows only.
    pub decode_steps: u64,
    /// Steps with prefill rows only.
    pub prefill_steps: u64,
    /// Steps with both.
    pub mixed_steps: u64,
    /// Steps of one row that belongs to nobody.
    pub dummy_steps: u64,
    /// Plans that had nothing to run.
    pub idle_plans: u64,
    /// Rows of prefill chunks against the rows that the step had for them, in steps with chunks.
    pub chunk_fill: Shares,
    /// Rows of prefill chunks.
    pub prefill_tokens: u64,
    /// Of these, rows of tokens that were computed before and lost to preemption.
    pub recomputed_tokens: u64,
    /// Rows of decoding sequences, drafts included.
    pub decode_rows: u64,
    /// Drafts by length, asked and accepted.
    pub drafts: Drafts,
    /// Rounds of the rank group.
    pub votes: Votes,
    /// Times of completed steps.
    pub times: StepTimes,
    /// Draft rows planned.
    pub drafted: u64,
    /// Draft tokens accepted.
    pub accepted: u64,
    /// Output tokens.
    pub output_tokens: u64,
    /// Requests seen (each fork counts).
    pub added: u64,
    /// Admissions, readmissions included.
    pub admitted: u64,
    /// Tokens of admitted sequences found in the index.
    pub hit_tokens: u64,
    /// Of a model with windows: tokens found in the index and computed again.
    pub rerun_tokens: u64,
    /// Of a model with windows: begins with nothing, a snapshot, a slice, rows computed again.
    pub starts: [u64; 4],
    /// Snapshots of states taken.
    pub snapshots_taken: u64,
    /// Snapshots given up for newer ones.
    pub snapshots_evicted: u64,
    /// Begins at a slice that was gone; they count among no other begins.
    pub slices_gone: u64,
    /// Fetches of blocks begun.
    pub fetches: u64,
    /// Fetches ended.
    pub fetches_ended: u64,
    /// Of these, those of which not all has arrived.
    pub fetches_failed: u64,
    /// Fetches refused for want of room.
    pub fetches_no_room: u64,
    /// Fetches refused because another one was bringing the next block.
    pub fetches_under_way: u64,
    /// Tokens of fetched blocks that entered the index.
    pub fetched_tokens: u64,
    /// Fetched blocks that somebody else had published meanwhile.
    pub fetch_duplicates: u64,
    /// Waits for a fetch that the caller ended.
    pub fetch_waits_ended: u64,
    /// Waits for a fetch that lasted until their lease ran out.
    pub fetch_leases_ended: u64,
    /// Chains given to be saved.
    pub saves_given: u64,
    /// Of these, those that were not saved.
    pub saves_failed: u64,
    /// Chains that were worth saving and left the index, or found no place in the list, before anybody took them.
    pub saves_lost: u64,
    /// Tokens of admitted sequences.
    pub asked_tokens: u64,
    /// Preemptions of both kinds.
    pub preemptions: u64,
    /// Of these, victims whose KV was copied to host memory.
    pub swapped_out: u64,
    /// Sequences admitted from host memory.
    pub swapped_in: u64,
    /// Pages copied to host memory.
    pub swap_out_pages: u64,
    /// Pages copied back; what the index still had was not.
    pub swap_in_pages: u64,
    /// Victims computed again although swapping was cheaper: no room in host memory or in the step, or the copy failed.
    pub swaps_refused: u64,
    /// Rows that waited a step for blocks coming back.
    pub row_waits: u64,
    /// Sequences of completed steps that had ended or lost their lane by then.
    pub ghost_rows: u64,
    /// Forks that shared their parent's prompt.
    pub forks: u64,
    /// Ends by stop, length, abort, error, hand-over.
    pub finished: [u64; 5],
    /// Requests that waited for KV until their lease ran out.
    pub kv_leases_ended: u64,
    /// Sequences released because nobody took them over within the lease.
    pub handover_leases_ended: u64,
    /// Steps that failed.
    pub failed_steps: u64,
    /// Messages and calls whose handle named nothing any more.
    pub stale: u64,
    /// Calls that a pool refused; 0 unless there is a fault.
    pub misuse: u64,
    /// Times the counts of a pool did not add up; 0 unless there is a fault.
    pub count_faults: u64,
    /// Running sequences.
    pub running: u64,
    /// Of these, decoding ones.
    pub decoding: u64,
    /// Sequences that lack resources only.
    pub waiting: u64,
    /// Of these, those that ran before and were preempted.
    pub wait_preempted: u64,
    /// Sequences waiting for a grammar.
    pub wait_grammar: u64,
    /// Sequences waiting for inbound KV or for blocks to be fetched.
    pub wait_kv: u64,
    /// Sequences waiting for the prompt they share.
    pub wait_fork: u64,
    /// Sequences being copied to host memory.
    pub swapping_out: u64,
    /// Sequences that lie in host memory; they are among the waiting.
    pub swapped: u64,
    /// Ended sequences kept for whoever takes them over.
    pub wait_handover: u64,
    /// Open transfers.
    pub transfers: u64,
    /// Blocks by state.
    pub blocks: Counts,
    /// State slots by state.
    pub slots: Counts,
    /// Blocks that could be taken now.
    pub available_blocks: u64,
    /// Newest completed step: a heartbeat, together with its time.
    pub last_step: u64,
    /// Time of the newest completed step, in the caller's nanoseconds.
    pub last_step_ns: u64,
}

impl Metrics {
    /// Part of the device's time in which it stood still although there was work, in millionths.
    pub fn bubble_ppm(&self) -> u64 {
        parts_per_million(self.times.idle_ns, self.times.device.sum.saturating_add(self.times.idle_ns))
    }

    /// Part of the host's work that was hidden under the device's, in millionths.
    pub fn overlap_ppm(&self) -> u64 {
        parts_per_million(self.times.hidden_ns, self.times.host.sum)
    }
}

fn parts_per_million(part: u64, whole: u64) -> u64 {
    if whole == 0 { 0 } else { (u128::from(part) * 1_000_000 / u128::from(whole)) as u64 }
}

impl Scheduler {
    /// Takes the measured times of a completed step: how long the device worked on it, how long it stood still before it
    /// although there was work, how long the host worked. False if the step has not completed or is told twice or out of order;
    /// nothing is counted then.
    pub fn note_step_times(&mut self, step: StepId, device_ns: u64, idle_ns: u64, host_ns: u64) -> bool {
        let times = &mut self.metrics.times;
        if step.0 <= times.last || step.0 > self.completed {
            return false;
        }
        times.last = step.0;
        times.device.record(device_ns);
        times.host.record(host_ns);
        times.idle_ns = times.idle_ns.saturating_add(idle_ns);
        times.hidden_ns = times.hidden_ns.saturating_add(host_ns.saturating_sub(idle_ns));
        true
    }

    /// Counters and gauges, all of one moment.
    pub fn snapshot(&self) -> Metrics {
        let mut metrics = self.metrics;
        metrics.running = self.lanes.len() as u64;
        metrics.decoding = self.lanes.decoding as u64;
        metrics.waiting = self.waiting.len() as u64;
        for (_, status, cold) in self.seqs.iter() {
            match status {
                Status::WaitGrammar => metrics.wait_grammar += 1,
                Status::WaitKv => metrics.wait_kv += 1,
                Status::WaitFork => metrics.wait_fork += 1,
                Status::Handover => metrics.wait_handover += 1,
                Status::SwappingOut => metrics.swapping_out += 1,
                Status::Ready | Status::Swapped => {
                    metrics.swapped += u64::from(status == Status::Swapped);
                    metrics.wait_preempted += u64::from(cold.class == Class::Preempted);
                }
                _ => {}
            }
        }
        metrics.transfers = self.transfers.open() as u64;
        metrics.available_blocks = self.kv.available().into();
        metrics.misuse = self.kv.misuse + self.host.misuse;
        metrics.blocks = self.kv.blocks.counts(0);
        metrics.slots = self.kv.states.counts();
        metrics.snapshots_evicted = self.kv.blocks.stats().snapshots_evicted;
        metrics
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drafts_are_told_apart_by_position() {
        let mut drafts = Drafts::default();
        for (asked, taken) in [(3, 3), (3, 1), (1, 0), (40, 20)] {
            drafts.note(asked, taken);
        }
        let (asked, taken) = drafts.at_positions();
        assert_eq!(asked[..4], [4, 3, 3, 1]);
        assert_eq!(taken[..4], [3, 2, 2, 1]);
        assert_eq!((asked[15], taken[15]), (1, 1));
    }

    #[test]
    fn ratios_of_nothing_are_nothing() {
        let mut metrics = Metrics::default();
        assert_eq!((metrics.bubble_ppm(), metrics.overlap_ppm()), (0, 0));
        metrics.times.device.record(900);
        metrics.times.host.record(400);
        metrics.times.idle_ns = 100;
        metrics.times.hidden_ns = 300;
        assert_eq!((metrics.bubble_ppm(), metrics.overlap_ppm()), (100_000, 750_000));
    }
}
