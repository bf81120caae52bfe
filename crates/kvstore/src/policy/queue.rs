//! Entries in the order in which they may go: per class and tenant, lists by a 32-bit rank, oldest first within a rank.
//!
//! Twelve bytes an entry. One structure serves every policy, because every rank here is a time in seconds: of the last touch, of expiry, or
//! of the last touch plus what an entry's history is worth.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::{Entries, Facts, Scope};
use crate::index::Slot;
use crate::index::chunked::Chunked;
use crate::object::{Class, TenantId};

#[derive(Clone, Copy, Debug, Default)]
struct Link {
    // An entry that is parked or not here has itself as both neighbours, or 0 in memory never used.
    prev: u32,
    next: u32,
    rank: u32,
}

#[derive(Clone, Copy, Debug)]
struct List {
    head: Slot,
    tail: Slot,
}

/// Ranks of one class of one tenant.
type Lane = BTreeMap<u32, List>;

/// The order.
#[derive(Debug, Default)]
pub(super) struct Queue {
    links: Chunked<Link>,
    lanes: HashMap<(Class, TenantId), Lane>,
    // Lowest rank of every lane that has entries, by class.
    lowest: [BTreeSet<(u32, TenantId)>; Class::ALL.len()],
}

impl Queue {
    /// The rank given last, whether the entry is in a list or parked.
    pub(super) fn rank(&self, slot: Slot) -> u32 {
        self.links.get(slot.index()).map_or(0, |link| link.rank)
    }

    /// First leaf of a class; what is met before it and has children is set aside.
    pub(super) fn first_leaf(&mut self, class: Class, scope: Scope, entries: &dyn Entries) -> Option<(u32, Slot)> {
        loop {
            let (rank, slot) = self.first(class, scope)?;
            if entries.is_leaf(slot) {
                return Some((rank, slot));
            }
            self.park(slot, &entries.facts(slot)?);
        }
    }

    /// The leaf of the lowest rank of all classes.
    pub(super) fn lowest_leaf(&mut self, scope: Scope, entries: &dyn Entries) -> Option<(u32, Slot)> {
        let found = Class::ALL.iter().filter_map(|&class| self.first_leaf(class, scope, entries));
        found.min_by_key(|&(rank, _)| rank)
    }

    /// Puts an entry behind all of its rank.
    pub(super) fn push(&mut self, slot: Slot, of: &Facts, rank: u32) {
        self.links.reach(slot.index());
        self.change(of, |links, lane| {
            let raw = slot.raw();
            let list = lane.entry(rank).or_insert(List { head: slot, tail: slot });
            let prev = if list.tail == slot { 0 } else { list.tail.raw() };
            if prev != 0 {
                links[list.tail.index()].next = raw;
                list.tail = slot;
            }
            links[slot.index()] = Link { prev, next: 0, rank };
        });
    }

    /// Puts a parked entry back before all of its rank.
    pub(super) fn unpark(&mut self, slot: Slot, of: &Facts) {
        if !self.is_parked(slot) {
            return;
        }
        let rank = self.rank(slot);
        self.change(of, |links, lane| {
            let list = lane.entry(rank).or_insert(List { head: slot, tail: slot });
            let next = if list.head == slot { 0 } else { list.head.raw() };
            if next != 0 {
                links[list.head.index()].prev = slot.raw();
                list.head = slot;
            }
            links[slot.index()] = Link { prev: 0, next, rank };
        });
    }

    /// Takes an entry out; it keeps its rank. Nothing if it is parked already.
    pub(super) fn park(&mut self, slot: Slot, of: &Facts) {
        if self.is_parked(slot) {
            return;
        }
        self.change(of, |links, lane| {
            let Link { prev, next, rank } = links[slot.index()];
            if let Some(before) = Slot::from_raw(prev) {
                links[before.index()].next = next;
            }
            if let Some(after) = Slot::from_raw(next) {
                links[after.index()].prev = prev;
            }
            if let Some(list) = lane.get_mut(&rank) {
                match (Slot::from_raw(prev), Slot::from_raw(next)) {
                    (None, None) => {
                        lane.remove(&rank);
                    }
                    (None, Some(after)) => list.head = after,
                    (Some(before), None) => list.tail = before,
                    (Some(_), Some(_)) => {}
                }
            }
            links[slot.index()] = Link { prev: slot.raw(), next: slot.raw(), rank };
        });
    }

    fn is_parked(&self, slot: Slot) -> bool {
        self.links.get(slot.index()).is_none_or(|link| link.prev == slot.raw())
    }

    /// First of a lane.
    fn front(&self, class: Class, tenant: TenantId) -> Option<(u32, Slot)> {
        let (&rank, list) = self.lanes.get(&(class, tenant))?.first_key_value()?;
        Some((rank, list.head))
    }

    /// First of a class in scope.
    pub(super) fn first(&self, class: Class, scope: Scope) -> Option<(u32, Slot)> {
        let tenant = match scope {
            Scope::Tenant(tenant) => tenant,
            Scope::All => self.lowest[class as usize].first()?.1,
        };
        self.front(class, tenant)
    }

    /// Memory of the links; lanes and ranks come to few bytes an entry.
    pub(super) fn memory(&self) -> usize {
        let ranks: usize = self.lanes.values().map(BTreeMap::len).sum();
        self.links.bytes() + ranks * 2 * size_of::<(u32, List)>()
    }

    // Runs a change of a lane and keeps `lowest` true.
    fn change(&mut self, of: &Facts, change: impl FnOnce(&mut Chunked<Link>, &mut Lane)) {
        let lane = self.lanes.entry((of.class, of.tenant)).or_default();
        let before = lane.keys().next().copied();
        change(&mut self.links, lane);
        let after = lane.keys().next().copied();
        if before != after {
            let lowest = &mut self.lowest[of.class as usize];
            if let Some(rank) = before {
                lowest.remove(&(rank, of.tenant));
            }
            match after {
                Some(rank) => {
                    lowest.insert((rank, of.tenant));
                }
                None => {
                    self.lanes.remove(&(of.class, of.tenant));
                }
            }
        }
    }
}
