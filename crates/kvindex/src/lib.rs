//! Chain hash, block pool, prefix index and state slots.
//!
//! Owns: which block is free, cached, held or parked; who holds it (sequences and transfers, counted apart); which prefix is
//! matchable; the order of eviction; which blocks have a snapshot of a sequence's state, which boundaries a
//! slice of it; when a released block or slot may be reused; the identity of a prefix; the bounded log
//! of changes to the index.
//!
//! Never touches: KV bytes, tokens' meaning, sequences and their order, clocks, threads, locks, files, sockets, Python.
//! Time is the step number that the caller passes. One owner calls it with `&mut self`. Steady paths allocate nothing; no
//! call panics on bad arguments: a refused call returns a [`PoolError`], is counted, and changes nothing.

mod cached;
mod check;
mod counts;
mod error;
mod events;
mod hash;
mod ids;
mod index;
mod node;
mod pages;
mod parked;
mod parts;
mod pool;
mod publish;
mod refs;
mod reservation;
mod side_by_side;
mod slices;
mod snapshots;
mod state_slots;

pub use counts::{Counts, PoolStats};
pub use error::PoolError;
pub use events::Event;
pub use hash::{ChainHasher, Extra, ExtraKind, HASH_FORMAT, Root};
pub use ids::{Block, BlockHash, Fence, Owner, Seq, StateSlot, StepId, TransferId};
pub use parts::{Part, PartSet, Tier};
pub use pool::{BlockPool, Hit, PoolConfig, PoolGroup, Published};
pub use reservation::{Need, reserve};
pub use snapshots::SnapshotPlace;
pub use state_slots::StateSlots;
