//! Counters of the core, plain integers on the step thread; a snapshot copies them.

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
    /// Rows of prefill chunks.
    pub prefill_tokens: u64,
    /// Of these, rows of tokens that were computed before and lost to preemption.
    pub recomputed_tokens: u64,
    /// Rows of decoding sequences, drafts included.
    pub decode_rows: u64,
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
    /// Tokens of admitted sequences.
    pub asked_tokens: u64,
    /// Preemptions.
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
    /// Sequences waiting for a grammar.
    pub wait_grammar: u64,
    /// Sequences waiting for inbound KV.
    pub wait_kv: u64,
    /// Sequences waiting for the prompt they share.
    pub wait_fork: u64,
    /// Sequences being copied to host memory.
    pub swapping_out: u64,
    /// Sequences that lie in host memory; they are among the waiting.
    pub swapped: u64,
    /// Open transfers.
    pub transfers: u64,
    /// Blocks that could be taken now.
    pub available_blocks: u64,
    /// Newest completed step: a heartbeat, together with its time.
    pub last_step: u64,
    /// Time of the newest completed step, in the caller's nanoseconds.
    pub last_step_ns: u64,
}
