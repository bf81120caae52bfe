//! What a call of the step loop can answer instead.

use crate::vote::GroupError;
use deepinfer_kvindex::{Seq, StepId, TransferId};
use thiserror::Error;

/// Why a step call was refused; the scheduler is unchanged.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum StepError {
    /// There is no memory to write a step into.
    #[error("no step ring is registered: call register_ring first")]
    NoRing,
    /// As many steps as allowed have been planned and not completed; this is the oldest.
    #[error("step {} is in flight: complete it before the next schedule", .0.0)]
    InFlight(StepId),
    /// The step is not in flight.
    #[error("step {} is not in flight", .0.0)]
    NotInFlight(StepId),
    /// Steps complete in the order they were planned, and an older one is in flight.
    #[error("step {} completes after step {}, which is in flight: complete that one first", .step.0, .oldest.0)]
    OutOfOrder {
        /// The step.
        step: StepId,
        /// Oldest step in flight.
        oldest: StepId,
    },
    /// The ring slot is used by a step that has not been completed.
    #[error("ring slot {slot} still belongs to step {}", .step.0)]
    RingBusy {
        /// The slot.
        slot: usize,
        /// The step that uses it.
        step: StepId,
    },
    /// `begin_schedule` opened a second round.
    #[error("a step is planned by half: call finish_schedule first")]
    HalfPlanned,
    /// There is no step that waits for its second round.
    #[error("no step is planned by half: call begin_schedule first")]
    NotBegun,
    /// The rank group did not agree on a step; every rank is told the same.
    #[error(transparent)]
    Group(#[from] GroupError),
    /// The configuration and the pools disagree; the text says where.
    #[error("the pools could not be built: {0}")]
    Pool(&'static str),
}

/// Why a transfer could not be opened; nothing was taken.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum TransferError {
    /// The handle names nothing any more.
    #[error("sequence {} of generation {} has ended", .0.index, .0.generation)]
    Stale(Seq),
    /// The sequence is in a status that has no such transfer.
    #[error("sequence {} cannot start this transfer in its present status", .0.index)]
    Status(Seq),
    /// The sequence has a transfer of this kind already.
    #[error("sequence {} has such a transfer open already", .0.index)]
    Busy(Seq),
    /// More tokens than the sequence has, or none.
    #[error("{tokens} tokens cannot be loaded: between 1 and {most}")]
    Length {
        /// Tokens asked for.
        tokens: u32,
        /// Most that can be loaded.
        most: u32,
    },
    /// The pool, a slot, or what is kept for the oldest waiting sequence does not allow it now.
    #[error("{need} blocks, and for a load a slot, are not free for inbound KV now: try again after a step")]
    NoRoom {
        /// Blocks needed.
        need: u32,
    },
    /// No whole block, or more of them than the chain of the sequence has.
    #[error("{tokens} tokens cannot be fetched: between {least} and {most}, in whole blocks")]
    NoBlocks {
        /// Tokens asked for.
        tokens: u32,
        /// Tokens of a block.
        least: u32,
        /// Tokens of the full blocks that are hashed.
        most: u32,
    },
    /// An open fetch is bringing the next block already.
    #[error("transfer {} is bringing these blocks already: ask again when it has ended", .transfer.index)]
    UnderWay {
        /// It.
        transfer: TransferId,
        /// Leading positions that are in place.
        present: u32,
    },
}
