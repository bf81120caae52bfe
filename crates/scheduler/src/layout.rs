//! Names and sizes of the step ring's fields; the same table as in `docs/architecture.md`.

use crate::config::{Geometry, Limits};

/// One field of a ring slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    /// Name, stable across versions.
    pub name: String,
    /// Length in 32-bit words.
    pub words: usize,
}

/// Words of the header.
pub const HEADER_WORDS: usize = 64;

/// Positions in the header.
pub mod header {
    /// 0 idle, 1 prefill, 2 decode, 3 mixed, 4 dummy.
    pub const KIND: usize = 0;
    /// Low half of the step.
    pub const STEP_LOW: usize = 1;
    /// High half of the step.
    pub const STEP_HIGH: usize = 2;
    /// Token rows.
    pub const ROWS: usize = 3;
    /// Sequences.
    pub const SEQS: usize = 4;
    /// Decoding sequences, which come first.
    pub const DECODING: usize = 5;
    /// Sampling rows.
    pub const SAMPLES: usize = 6;
    /// Block-table deltas.
    pub const DELTAS: usize = 7;
    /// Block clones.
    pub const CLONE_BLOCKS: usize = 8;
    /// State clones.
    pub const CLONE_STATES: usize = 9;
    /// State slots to clear.
    pub const ZERO_STATES: usize = 10;
    /// Sequences that got a slot.
    pub const ADMITTED: usize = 11;
    /// Longest query.
    pub const LONGEST_QUERY: usize = 12;
    /// Longest context.
    pub const LONGEST_CONTEXT: usize = 13;
    /// Sampling rows with a grammar.
    pub const GRAMMAR_ROWS: usize = 14;
    /// 1 when any row wants prompt logprobs.
    pub const PROMPT_LOGPROBS: usize = 15;
    /// Rows agreed by the rank group, 0 without one.
    pub const GROUP_ROWS: usize = 16;
    /// Pages copied out to the host.
    pub const SWAP_OUT: usize = 17;
    /// Pages copied back.
    pub const SWAP_IN: usize = 18;
    /// State slots copied out to the host.
    pub const SWAP_OUT_STATES: usize = 19;
    /// State slots copied back.
    pub const SWAP_IN_STATES: usize = 20;
    /// Draft rows.
    pub const DRAFT_ROWS: usize = 21;
    /// Sequences whose first token is not known to the host.
    pub const PLACEHOLDERS: usize = 22;
    /// Kind of step that a rank group agreed upon: 0 none or no group, 1 prefill, 2 decode.
    pub const GROUP_TYPE: usize = 23;
    /// States copied from their replica to a snapshot's place.
    pub const SNAPSHOT_OUT: usize = 24;
    /// Snapshots copied back.
    pub const SNAPSHOT_IN: usize = 25;
    /// Draft rows that are verified. Fewer than there are: the worker chooses them.
    pub const VERIFIED: usize = 26;
}

/// Bits of `seq_flags`.
pub mod seq_flag {
    /// Samples in this step.
    pub const SAMPLES: i32 = 1;
    /// Wants prompt logprobs of its rows.
    pub const PROMPT_LOGPROBS: i32 = 2;
    /// Its rows are prompt rows.
    pub const PREFILL: i32 = 4;
    /// Sampling is constrained by a grammar.
    pub const GRAMMAR: i32 = 8;
}

/// Index of each fixed field; slot maps follow `POS` in the layout but have their own numbering.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub(crate) enum F {
    Header,
    Ids,
    Pos,
    CuQ,
    SeqLen,
    StateRow,
    SeqFlags,
    SampleOff,
    SampleRow,
    RngPos,
    GrammarRow,
    TableDelta,
    CloneBlocks,
    CloneStates,
    ZeroStates,
    Admitted,
    PrevSeq,
    SwapOut,
    SwapIn,
    SwapOutStates,
    SwapInStates,
    SnapshotOut,
    SnapshotIn,
    Tokens,
    Accepted,
    Verified,
}

/// Number of fixed fields.
pub(crate) const FIXED: usize = F::Verified as usize + 1;

/// Capacities behind the words.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    pub fields: Vec<Field>,
    /// Position of each fixed field in `fields`.
    pub fixed: [usize; FIXED],
    /// Position of slot map 0 in `fields`.
    pub first_map: usize,
    pub deltas: usize,
    pub clones: usize,
}

impl Layout {
    pub fn new(limits: &Limits, geometry: &Geometry) -> Self {
        let tokens = limits.max_num_batched_tokens as usize;
        let seqs = limits.max_num_seqs as usize;
        let samples = seqs * (limits.max_draft as usize + 1);
        let pages = geometry.pages_per_block as usize;
        // Two full rows, one block for every sequence, and the pages of a full prefill.
        let deltas = 2 * geometry.columns as usize + seqs * pages + tokens;
        let clones = seqs * pages;
        let mut fields = Vec::new();
        let mut fixed = [0; FIXED];
        let mut put = |field: F, name: &str, words: usize, fields: &mut Vec<Field>| {
            fixed[field as usize] = fields.len();
            fields.push(Field { name: name.to_owned(), words });
        };
        put(F::Header, "header", HEADER_WORDS, &mut fields);
        put(F::Ids, "ids", tokens, &mut fields);
        put(F::Pos, "pos", tokens, &mut fields);
        let first_map = fields.len();
        for map in 0..geometry.maps.len() {
            fields.push(Field { name: format!("slots{map}"), words: tokens });
        }
        put(F::CuQ, "cu_q", seqs + 1, &mut fields);
        put(F::SeqLen, "seq_len", seqs, &mut fields);
        put(F::StateRow, "state_row", seqs, &mut fields);
        put(F::SeqFlags, "seq_flags", seqs, &mut fields);
        put(F::SampleOff, "sample_off", seqs + 1, &mut fields);
        put(F::SampleRow, "sample_row", samples, &mut fields);
        put(F::RngPos, "rng_pos", samples, &mut fields);
        put(F::GrammarRow, "grammar_row", samples, &mut fields);
        put(F::TableDelta, "table_delta", 3 * deltas, &mut fields);
        put(F::CloneBlocks, "clone_blocks", 3 * clones, &mut fields);
        put(F::CloneStates, "clone_states", 2 * seqs, &mut fields);
        put(F::ZeroStates, "zero_states", seqs, &mut fields);
        put(F::Admitted, "admitted", 6 * seqs, &mut fields);
        put(F::PrevSeq, "prev_seq", seqs, &mut fields);
        put(F::SwapOut, "swap_out", 3 * deltas, &mut fields);
        put(F::SwapIn, "swap_in", 3 * deltas, &mut fields);
        put(F::SwapOutStates, "swap_out_states", 2 * seqs, &mut fields);
        put(F::SwapInStates, "swap_in_states", 2 * seqs, &mut fields);
        put(F::SnapshotOut, "snapshot_out", 2 * seqs, &mut fields);
        put(F::SnapshotIn, "snapshot_in", 2 * seqs, &mut fields);
        put(F::Tokens, "tokens", samples, &mut fields);
        put(F::Accepted, "accepted", seqs, &mut fields);
        put(F::Verified, "verified", seqs, &mut fields);
        Self { fields, fixed, first_map, deltas, clones }
    }
}
