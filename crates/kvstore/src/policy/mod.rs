//! Who goes first when room is needed, and when an object is too old to stay.
//!
//! Owns: the order of eviction ([`Policy`] and its kinds), times to live, quotas of tenants, [`Retention`] which joins them with the index.
//! Never touches: bytes of objects, disks, clocks (every call is told the time, in seconds).
//!
//! Every policy evicts leaves only; it meets entries with children in its order and sets them aside until their last child is gone.
//! Slices go sooner than blocks under each: whoever asks a policy tells it that a slice was used [`SLICE_HANDICAP`] earlier than it was.

mod ghosts;
mod lru;
mod marginal;
mod queue;
mod retention;
pub mod simulate;
mod ttl;

pub use lru::Lru;
pub use marginal::{HalfLives, MarginalHit};
pub use retention::{Inserted, Retention, SLICE_HANDICAP};
pub use ttl::{Lifetimes, Ttl};

use crate::index::{Entry, Slot};
use crate::key::{Key, Kind};
use crate::object::{Class, TenantId};

/// What a policy is told of an entry with every call, so that it keeps no copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Its key.
    pub key: Key,
    /// Block or slice.
    pub kind: Kind,
    /// Traffic it came with.
    pub class: Class,
    /// Whose it is.
    pub tenant: TenantId,
    /// Its bytes.
    pub bytes: u32,
    /// Its parent; for a slice its block.
    pub parent: Option<Slot>,
    /// When it was touched before this call, seconds.
    pub touched: u32,
}

impl Facts {
    /// The key, changed for a slice: a slice is named by its block's.
    pub(crate) fn name(&self) -> Key {
        match self.kind {
            Kind::Block => self.key,
            Kind::Slice => Key(!self.key.0),
        }
    }
}

impl From<&Entry> for Facts {
    fn from(entry: &Entry) -> Self {
        Self {
            key: entry.id.key,
            kind: entry.id.kind,
            class: entry.class,
            tenant: entry.tenant,
            bytes: entry.len,
            parent: entry.parent,
            touched: entry.touched,
        }
    }
}

/// Whose entries are looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Everybody's.
    All,
    /// One tenant's, when it is over its quota.
    Tenant(TenantId),
}

/// Why an entry goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Why {
    /// To make room.
    Evicted,
    /// Its time was up.
    Expired,
    /// Somebody asked, or its bytes are lost.
    Removed,
}

/// What a policy asks of the index while it looks for a victim.
pub trait Entries {
    /// Whether the entry may go now.
    fn is_leaf(&self, slot: Slot) -> bool;
    /// What it would be told of it; `None` for what is not there.
    fn facts(&self, slot: Slot) -> Option<Facts>;
}

/// An order of eviction. It hears of every entry, in this order for a chain: the last block first, so that parents count as used later.
pub trait Policy: Send + Sync {
    /// A new entry.
    fn inserted(&mut self, slot: Slot, facts: &Facts, now: u32);
    /// It was read, or a chain through it was asked for.
    fn touched(&mut self, slot: Slot, facts: &Facts, now: u32);
    /// It is gone; its number may be given again.
    fn removed(&mut self, slot: Slot, facts: &Facts, why: Why, now: u32);
    /// Its last child is gone: it may be a victim from now on.
    fn uncovered(&mut self, slot: Slot, facts: &Facts);
    /// The leaf in scope that may best go. It stays known until `removed`.
    fn victim(&mut self, scope: Scope, now: u32, entries: &dyn Entries) -> Option<Slot>;
    /// A leaf whose time is up, if the policy knows of one.
    fn expired(&mut self, _now: u32, _entries: &dyn Entries) -> Option<Slot> {
        None
    }
    /// Other times to live hold from now on.
    fn set_lifetimes(&mut self, _lifetimes: Lifetimes) {}
    /// Bytes it holds.
    fn memory(&self) -> usize;
}

/// A policy by its name in a configuration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum PolicyKind {
    /// [`Lru`].
    Lru,
    /// [`Ttl`].
    Ttl,
    /// [`MarginalHit`].
    #[default]
    MarginalHit,
}

impl PolicyKind {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Lru, Self::Ttl, Self::MarginalHit];

    /// A fresh one with its default settings.
    pub fn build(self, lifetimes: Lifetimes) -> Box<dyn Policy> {
        match self {
            Self::Lru => Box::new(Lru::new()),
            Self::Ttl => Box::new(Ttl::new(lifetimes)),
            Self::MarginalHit => Box::new(MarginalHit::new(HalfLives::default())),
        }
    }
}
