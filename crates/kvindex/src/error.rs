//! Typed errors. An error leaves the pool exactly as it was.

use std::fmt;

use crate::ids::{Block, StateSlot, TransferId};

/// A call that the pool or the slots refused. Nothing was changed; the refusal is counted as misuse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolError {
    /// The configuration cannot work; the text says what to change.
    Config(&'static str),
    /// The id is null or outside the pool.
    BadBlock(Block),
    /// No reference of that owner kind is held on the block (a double release, for one).
    NotHeld(Block),
    /// The block is in the index; its holder drops it with `unpin`.
    NotPrivate(Block),
    /// The block is not in the index; its holder drops it with `release_private`.
    NotIndexed(Block),
    /// The cursor is neither the root nor an indexed block on which the block's owner holds a reference.
    BadCursor(Block),
    /// The hash is already indexed under another parent than the cursor.
    ParentMismatch(Block),
    /// Zero is not a hash.
    ZeroHash,
    /// The fence names a transfer that was never opened or is closed already.
    UnknownTransfer(TransferId),
    /// The slot is null or outside the table.
    BadSlot(StateSlot),
    /// The slot is not held.
    SlotNotHeld(StateSlot),
}

impl fmt::Display for PoolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config(why) => write!(f, "invalid pool configuration: {why}"),
            Self::BadBlock(b) => write!(f, "block {} is not a block of this pool", b.0),
            Self::NotHeld(b) => write!(f, "block {} carries no reference of that owner", b.0),
            Self::NotPrivate(b) => write!(f, "block {} is in the prefix index, not private", b.0),
            Self::NotIndexed(b) => write!(f, "block {} is not in the prefix index", b.0),
            Self::BadCursor(b) => write!(f, "block {} cannot be the cursor of this block's owner", b.0),
            Self::ParentMismatch(b) => write!(f, "the hash is indexed as block {} under another parent", b.0),
            Self::ZeroHash => write!(f, "zero is not a block hash"),
            Self::UnknownTransfer(t) => write!(f, "transfer {}.{} is not open", t.index, t.generation),
            Self::BadSlot(s) => write!(f, "state slot {} is not a slot of this table", s.0),
            Self::SlotNotHeld(s) => write!(f, "state slot {} is not held", s.0),
        }
    }
}

impl std::error::Error for PoolError {}
