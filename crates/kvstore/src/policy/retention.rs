//! The index with its policy and quotas: what the store keeps behind one lock.

use std::collections::BTreeMap;

use super::{Entries, Facts, Lifetimes, Policy, Scope, Why};
use crate::index::{Added, Entry, Index, Recovery, Refused, Removed, Slot};
use crate::key::{Key, Kind, ObjectId};
use crate::media::Place;
use crate::object::{Meta, TenantId};

/// A slice goes as if it had last been used this much earlier than it was, seconds, under every policy: it is many times a block's size and is
/// made again in a second.
pub const SLICE_HANDICAP: u32 = 600;

/// When the policy is told that an entry was used.
fn told(facts: &Facts, when: u32) -> u32 {
    match facts.kind {
        Kind::Block => when,
        Kind::Slice => when.saturating_sub(SLICE_HANDICAP),
    }
}

/// What became of an object of a batch.
pub type Inserted = Result<Slot, Refused>;

/// Index, policy, times to live and quotas. Every change of what is kept goes through here, so that they agree.
pub struct Retention {
    index: Index,
    policy: Box<dyn Policy>,
    lifetimes: Lifetimes,
    quotas: BTreeMap<TenantId, u64>,
    // Where the next look for entries whose time is up begins.
    swept: usize,
    now: u32,
}

impl Entries for Index {
    fn is_leaf(&self, slot: Slot) -> bool {
        Index::is_leaf(self, slot)
    }

    fn facts(&self, slot: Slot) -> Option<Facts> {
        self.entry(slot).map(|entry| Facts::from(&entry))
    }
}

impl Retention {
    /// Nothing kept yet.
    pub fn new(policy: Box<dyn Policy>, lifetimes: Lifetimes) -> Self {
        Self { index: Index::new(), policy, lifetimes, quotas: BTreeMap::new(), swept: 0, now: 0 }
    }

    /// The table, to read.
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// Bytes of memory of the index and of the policy.
    pub fn memory(&self) -> (usize, usize) {
        (self.index.memory(), self.policy.memory())
    }

    // Time goes forward, whatever the clock does.
    fn at(&mut self, now: u32) -> u32 {
        self.now = self.now.max(now);
        self.now
    }

    /// Adds objects, parents before their children; the policy hears of them from the last to the first, as of a chain that is read.
    pub fn insert(&mut self, batch: &[(Meta, Place)], now: u32) -> Vec<Inserted> {
        let now = self.at(now);
        let done: Vec<Inserted> = batch.iter().map(|(meta, place)| self.index.insert(meta, *place)).collect();
        for &slot in done.iter().rev().flatten() {
            self.index.touch(slot, now);
            if let Some(facts) = self.index.facts(slot) {
                self.policy.inserted(slot, &facts, told(&facts, now));
            }
        }
        done
    }

    /// Adds a record found on the media at a start, with the time of its writing. Call in the order of the media.
    pub fn recover(&mut self, recovery: &mut Recovery, meta: Meta, place: Place) -> Added {
        self.now = self.now.max(meta.written);
        let mut fresh = Vec::new();
        let added = recovery.add(&mut self.index, meta, place, &mut |slot, _| fresh.push(slot));
        for slot in fresh {
            if let Some(facts) = self.index.facts(slot) {
                self.policy.inserted(slot, &facts, told(&facts, facts.touched));
            }
        }
        // The copy says when it was last used.
        if let (Added::Moved(_), Some(slot)) = (added, self.index.find(meta.id))
            && let Some(facts) = self.index.facts(slot)
            && facts.touched < meta.written
        {
            self.policy.touched(slot, &facts, told(&facts, meta.written));
            self.index.touch(slot, meta.written);
        }
        added
    }

    /// Marks the first blocks of a chain as used now, with the slice of the last: what a check that found them does.
    pub fn touch_chain(&mut self, keys: &[Key], now: u32) {
        let last = keys.last().and_then(|&key| self.index.find(ObjectId { kind: Kind::Slice, key }));
        if let Some(slot) = last {
            self.touch(slot, now);
        }
        self.touch_blocks(keys, now);
    }

    /// Marks blocks of a chain as used now, the last one first.
    pub fn touch_blocks(&mut self, keys: &[Key], now: u32) {
        for &key in keys.iter().rev() {
            if let Some(slot) = self.index.find(ObjectId { kind: Kind::Block, key }) {
                self.touch(slot, now);
            }
        }
    }

    /// Marks one object as used now.
    pub fn touch(&mut self, slot: Slot, now: u32) {
        let now = self.at(now);
        if let Some(entry) = self.index.entry(slot) {
            let facts = Facts::from(&entry);
            self.policy.touched(slot, &facts, told(&facts, now));
            self.index.touch(slot, now);
        }
    }

    /// Evicts leaves in scope until `bytes` are freed or nothing is left; `each` is told of every removal. Returns the bytes freed.
    pub fn evict(&mut self, scope: Scope, bytes: u64, now: u32, each: &mut dyn FnMut(&Removed)) -> u64 {
        let now = self.at(now);
        let mut freed = 0;
        while freed < bytes {
            let Some(slot) = self.policy.victim(scope, now, &self.index) else { break };
            let Some(removed) = self.drop_leaf(slot, Why::Evicted) else { break };
            freed += removed.bytes();
            each(&removed);
        }
        freed
    }

    /// Removes what the policy knows to be over, then looks at up to `rows` entries, going on where the last call ended, and removes
    /// the leaves whose time to live is over. Returns how many went.
    pub fn expire(&mut self, rows: usize, now: u32, each: &mut dyn FnMut(&Removed)) -> usize {
        let now = self.at(now);
        let mut gone = 0;
        while let Some(slot) = self.policy.expired(now, &self.index) {
            // A slice that the policy takes for older than it is has time left; the look at all entries finds it when it has none.
            if !self.index.entry(slot).is_some_and(|entry| self.is_over(&entry, now)) {
                break;
            }
            let Some(removed) = self.drop_leaf(slot, Why::Expired) else { break };
            each(&removed);
            gone += 1;
        }
        for _ in 0..rows.min(self.index.slots()) {
            self.swept = self.swept % self.index.slots() + 1;
            // A block frees its parent, which is as old or younger: follow it up.
            let mut next = self.index.slot(self.swept);
            while let Some((slot, entry)) = next.and_then(|slot| self.index.entry(slot).map(|entry| (slot, entry))) {
                if entry.children > 0 || !self.is_over(&entry, now) {
                    break;
                }
                let Some(removed) = self.drop_leaf(slot, Why::Expired) else { break };
                each(&removed);
                gone += 1;
                next = removed.uncovered;
            }
        }
        gone
    }

    /// Removes an object that nothing depends on; `None` if it has children or is not there.
    pub fn remove(&mut self, slot: Slot) -> Option<Removed> {
        self.drop_leaf(slot, Why::Removed)
    }

    /// The bytes of an object are gone: see [`Index::lose`].
    pub fn lose(&mut self, slot: Slot) -> Option<Removed> {
        if self.index.is_leaf(slot) {
            return self.remove(slot);
        }
        self.index.lose(slot)
    }

    /// Keeps a block for a child that is being written: whatever the policy, room for the child is not made of its parent. Every hold
    /// is undone by [`Retention::release`].
    pub fn hold(&mut self, block: Slot) -> bool {
        self.index.hold(block)
    }

    /// Undoes one [`Retention::hold`].
    pub fn release(&mut self, block: Slot) {
        if self.index.release(block)
            && let Some(facts) = self.index.facts(block)
        {
            self.policy.uncovered(block, &facts);
        }
    }

    /// A record was copied: see [`Index::relocate`].
    pub fn relocate(&mut self, id: ObjectId, from: Place, to: Place) -> bool {
        self.index.relocate(id, from, to)
    }

    fn drop_leaf(&mut self, slot: Slot, why: Why) -> Option<Removed> {
        let removed = self.index.remove_leaf(slot).ok().flatten()?;
        if let Some((slice, entry)) = &removed.slice {
            self.policy.removed(*slice, &Facts::from(entry), why, self.now);
        }
        self.policy.removed(slot, &Facts::from(&removed.entry), why, self.now);
        if let Some(parent) = removed.uncovered
            && let Some(facts) = self.index.facts(parent)
        {
            self.policy.uncovered(parent, &facts);
        }
        Some(removed)
    }

    /// Whether an object's time to live is over: it is a miss, swept or not.
    pub fn is_over(&self, entry: &Entry, now: u32) -> bool {
        self.lifetimes.is_over(entry.class, entry.touched, now)
    }

    /// The times to live.
    pub fn lifetimes(&self) -> Lifetimes {
        self.lifetimes
    }

    /// Other times to live hold from now on, for what is there too.
    pub fn set_lifetimes(&mut self, lifetimes: Lifetimes) {
        self.lifetimes = lifetimes;
        self.policy.set_lifetimes(lifetimes);
    }

    /// Sets or lifts a tenant's bound of bytes. What it has above the bound goes with its next write.
    pub fn set_quota(&mut self, tenant: TenantId, bytes: Option<u64>) {
        match bytes {
            Some(bytes) => self.quotas.insert(tenant, bytes),
            None => self.quotas.remove(&tenant),
        };
    }

    /// A tenant's bound, if it has one.
    pub fn quota(&self, tenant: TenantId) -> Option<u64> {
        self.quotas.get(&tenant).copied()
    }

    /// Makes a tenant's own entries give way to `bytes` more of its own; others' are not touched. Whether they fit now.
    pub fn make_room(&mut self, tenant: TenantId, bytes: u64, now: u32, each: &mut dyn FnMut(&Removed)) -> bool {
        let Some(quota) = self.quota(tenant) else { return true };
        if bytes > quota {
            return false;
        }
        let over = (self.index.usage(tenant).bytes + bytes).saturating_sub(quota);
        self.evict(Scope::Tenant(tenant), over, now, each) >= over
    }

    /// An object that can be read.
    pub fn get(&self, id: ObjectId) -> Option<(Slot, Entry)> {
        self.index.get(id)
    }
}

impl std::fmt::Debug for Retention {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Retention")
            .field("entries", &self.index.len())
            .field("quotas", &self.quotas)
            .finish_non_exhaustive()
    }
}
