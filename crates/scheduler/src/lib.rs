//! The engine's scheduler.
//!
//! Owns: the sequences and their order, which rows a step has, which blocks and state slots a sequence holds, the step
//! buffers (caller-owned memory, written in place), what a completed step means (append, stop, publish, release), outputs.
//!
//! Never touches: Python, tensors, streams, kernels, text, tokenisers, grammar matching, sampling arithmetic, sockets,
//! files, threads of its own, wall clocks (time is an argument), names of models. What a model needs of KV is its list of
//! [`GroupSpec`]s.
//!
//! One owner calls [`Scheduler`] with `&mut self`; every other thread talks to it through its [`Inbox`].

mod admit;
mod agreed;
mod chunk_policy;
mod complete;
mod config;
mod end;
mod error;
mod fill;
mod fill_ragged;
mod fork;
mod group;
mod histogram;
mod hits;
mod host_pool;
mod inbox;
mod kv;
mod lanes;
mod layout;
mod mail;
mod metrics;
mod mtp;
mod ngram;
mod output;
mod plan;
mod pool;
mod preempt;
mod prepared;
mod publish;
mod ring;
mod roles;
mod scheduler;
mod slices;
mod snapshots;
mod spans;
mod step_type;
mod store;
mod swap;
mod sync;
mod thread_vote;
mod transfers;
mod vote;
mod waiting;
mod wide;

pub use chunk_policy::{ChunkCost, ChunkPolicy, MAX_TIMED_ROWS};
pub use config::{Config, ConfigError, GroupSpec, HitRule, Limits, Policy, Section, SlotMap, Source};
pub use error::{StepError, TransferError};
pub use group::Begun;
pub use histogram::{Histogram, SHARE_BUCKETS, Shares, TIME_BUCKETS};
pub use hits::{StartKind, WindowRule};
pub use inbox::{Inbox, Outcome};
pub use layout::{Field, HEADER_WORDS, header, seq_flag};
pub use metrics::{DRAFT_POSITIONS, Drafts, Metrics, StepTimes, VoteOutcome, Votes};
pub use mtp::{MtpConfig, MtpRuntime};
pub use ngram::{NgramConfig, NgramIndex};
pub use output::{FIRST, OUTPUT_WORDS, Outputs, STREAMS, out};
pub use plan::{Plan, StepKind};
pub use pool::{Finish, Status, Times};
pub use prepared::{PrepFlags, Prepared, Reject};
pub use ring::{FieldView, LayoutError, POISON, RingView};
pub use roles::EngineType;
pub use scheduler::{Counters, Info, Scheduler};
pub use slices::SliceCut;
pub use step_type::{StepPolicy, StepType};
pub use store::{ChainSave, Fetch, Saves};
pub use thread_vote::ThreadVote;
pub use transfers::{Load, Save};
pub use vote::{GroupError, OneRank, StepVote, VOTE_WORDS, VoteWords};

pub use deepinfer_kvindex::{
    Block, BlockHash, Counts, Event, Extra, ExtraKind, Part, Root, Seq, StateSlot, StepId, Tier, TransferId,
};
