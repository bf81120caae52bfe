//! Counters that a caller reads: states of pages and slots, and totals since the start.

/// How many pages (or state slots) are in each state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// All pages of the group.
    pub total: u32,
    /// On the free list.
    pub free: u32,
    /// Unreferenced, matchable, evictable once their fence is open.
    pub cached: u32,
    /// Referenced.
    pub held: u32,
    /// Unhashed and released, waiting for a fence.
    pub parked: u32,
    /// The null page.
    pub reserved: u32,
    /// Of `held`: pages that only transfers hold, so that they come back when those close.
    pub held_by_transfers: u32,
    /// Of `cached`: pages whose fence is still closed.
    pub cached_fenced: u32,
    /// References held by sequences (per block, not per page).
    pub sequence_refs: u64,
    /// References held by transfers (per block, not per page).
    pub transfer_refs: u64,
}

impl Counts {
    /// The counts identity: every page is in exactly one state.
    #[inline]
    pub const fn adds_up(&self) -> bool {
        self.free as u64 + self.cached as u64 + self.held as u64 + self.parked as u64 + self.reserved as u64
            == self.total as u64
    }
}

/// Totals since the pool was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Blocks entered into the index.
    pub published: u64,
    /// Published hashes that were indexed already.
    pub duplicates: u64,
    /// Cached blocks given up for an allocation.
    pub evicted: u64,
    /// Refused calls.
    pub misuse: u64,
    /// Snapshots given up for others.
    pub snapshots_evicted: u64,
    /// Events lost to a full log.
    pub events_lost: u64,
}
