//! A request as its caller hands it over, and the reasons to turn it away.

use deepinfer_kvindex::Extra;
use std::ops::Range;
use thiserror::Error;

/// Switches of a request.
// Independent switches, named where they are set: no state machine hides in them.
#[allow(clippy::struct_excessive_bools)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrepFlags {
    /// Its tokens are read in every step.
    pub stream: bool,
    /// Logprobs of the prompt are wanted: prefix reuse is skipped, every prompt row is computed.
    pub prompt_logprobs: bool,
    /// Waits until its grammar is ready.
    pub grammar: bool,
    /// Waits for inbound KV, bounded by the lease.
    pub wait_kv: bool,
    /// Waits until blocks of its prompt have been fetched ([`crate::Scheduler::end_wait`]), bounded by a lease of its own.
    pub fetch: bool,
    /// Keeps blocks and slot after the end (status `Handover`) until `release`.
    pub hold: bool,
}

/// A request, complete but for its block hashes, which [`crate::Inbox::add`] computes on the caller's thread.
#[derive(Clone, Debug, Default)]
pub struct Prepared {
    /// Prompt, then what was produced already.
    pub tokens: Vec<u32>,
    /// How many of the last `tokens` are output already, made elsewhere: the rest is the prompt. Below `max_new`.
    pub produced: u32,
    /// Most output tokens, those in `produced` included; at least 1.
    pub max_new: u32,
    /// Fewest output tokens before a stop id counts, those in `produced` included.
    pub min_new: u32,
    /// End-of-sequence ids.
    pub eos: Vec<u32>,
    /// Further ids that end the sequence; they count under `ignore_eos` too.
    pub stop_ids: Vec<u32>,
    /// Go on past `eos`.
    pub ignore_eos: bool,
    /// Smaller is served first and preempted last.
    pub priority: i32,
    /// Place among requests of its priority, smaller first: that of an earlier run keeps it. 0 = behind all that came so far.
    pub arrival: u64,
    /// Tenant salt of the hash chain.
    pub salt: Vec<u8>,
    /// What else the KV of this request depends on, for every block.
    pub extras: Vec<Extra>,
    /// Positions of the prompt that one chunk computes together, in order: the rows of an image.
    pub spans: Vec<Range<u32>>,
    /// Switches.
    pub flags: PrepFlags,
    /// Sequences to sample from this prompt (n), at least 1.
    pub forks: u32,
    /// Caller's own number, returned by `info`.
    pub user: u64,
}

impl Prepared {
    /// A plain request for up to `max_new` tokens.
    pub fn new(tokens: Vec<u32>, max_new: u32) -> Self {
        Self { tokens, max_new, forks: 1, ..Self::default() }
    }
}

/// Why a request was turned away at submit; nothing was queued.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Reject {
    /// Even an empty pool could not hold it.
    #[error(
        "the request needs up to {need} KV blocks and the whole pool has {have}: lower max_tokens or raise num_kv_blocks"
    )]
    NeverFits {
        /// Blocks at its longest.
        need: u32,
        /// Blocks of an empty pool.
        have: u32,
    },
    /// No room for one output token within the model's length.
    #[error("the prompt has {len} tokens; at most {max} leave room for an answer: shorten it or raise max_model_len")]
    TooLong {
        /// Tokens of the prompt.
        len: u32,
        /// Longest prompt.
        max: u32,
    },
    /// No token at all.
    #[error("the prompt is empty: give at least one token")]
    Empty,
    /// A span that no step could be sure to hold.
    #[error(
        "{len} tokens of the prompt are computed in one step, which has room for {most} beside those of the other sequences: \
         raise max_num_batched_tokens or lower max_num_seqs"
    )]
    SpanTooLong {
        /// Tokens of the span.
        len: u32,
        /// Longest span.
        most: u32,
    },
    /// A token id outside the vocabulary.
    #[error("token id {token} is outside the vocabulary of {vocab}")]
    BadToken {
        /// The id.
        token: u32,
        /// Size of the vocabulary.
        vocab: u32,
    },
    /// Two settings exclude each other, or one is out of its range.
    #[error("{0}")]
    Conflict(&'static str),
    /// The scheduler is gone.
    #[error("the engine is closed")]
    Closed,
}
