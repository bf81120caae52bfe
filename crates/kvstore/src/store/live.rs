//! How many bytes of each segment are still needed, how many are promised to writes on their way, and which objects came, went or moved.

use std::collections::{BTreeSet, HashMap, VecDeque};

use crate::index::{Entry, Removed};
use crate::key::ObjectId;
use crate::media::Place;
use crate::object::TenantId;
use crate::record::span;

/// Bytes of live records.
#[derive(Debug, Default)]
pub(super) struct Live {
    segments: HashMap<u32, u64>,
    total: u64,
    /// Spans of batches between their start and their end.
    pub promised: u64,
    /// Bytes of objects of each tenant in them.
    pub promised_to: HashMap<TenantId, u64>,
    /// Objects that came, went or moved, for whoever tells other stores.
    changes: Option<Changes>,
}

/// Objects to be looked at that are remembered; beyond them all are.
const MOST_CHANGES: usize = 256 << 10;

/// Names only: what is to be said of each is seen when it is.
#[derive(Debug, Default)]
struct Changes {
    ids: VecDeque<ObjectId>,
    /// More came, went or moved than are remembered.
    lost: bool,
}

impl Live {
    pub(super) fn add(&mut self, id: ObjectId, place: Place, len: u32) {
        self.changed(id);
        *self.segments.entry(place.segment).or_default() += span(len);
        self.total += span(len);
    }

    /// From now on changes are remembered.
    pub(super) fn remember_changes(&mut self) {
        self.changes.get_or_insert_default();
    }

    /// Up to `most` of the objects that changed, the oldest change first, and whether others were not remembered.
    pub(super) fn take_changes(&mut self, most: usize) -> (Vec<ObjectId>, bool) {
        self.changes.as_mut().map_or_else(Default::default, |changes| {
            let count = changes.ids.len().min(most);
            (changes.ids.drain(..count).collect(), std::mem::take(&mut changes.lost))
        })
    }

    /// An object came, went or moved.
    pub(super) fn changed(&mut self, id: ObjectId) {
        if let Some(changes) = &mut self.changes {
            if changes.ids.len() < MOST_CHANGES {
                changes.ids.push_back(id);
            } else {
                changes.lost = true;
            }
        }
    }

    pub(super) fn sub(&mut self, place: Place, len: u32) {
        let bytes = span(len);
        self.total = self.total.saturating_sub(bytes);
        if let Some(live) = self.segments.get_mut(&place.segment) {
            *live = live.saturating_sub(bytes);
            if *live == 0 {
                self.segments.remove(&place.segment);
            }
        }
    }

    fn drop_entry(&mut self, entry: &Entry) {
        self.changed(entry.id);
        if !entry.lost {
            self.sub(entry.place, entry.len);
        }
    }

    /// An entry left the index, maybe with its slice.
    pub(super) fn drop_removed(&mut self, removed: &Removed) {
        self.drop_entry(&removed.entry);
        if let Some((_, slice)) = &removed.slice {
            self.drop_entry(slice);
        }
    }

    pub(super) fn of(&self, segment: u32) -> u64 {
        self.segments.get(&segment).copied().unwrap_or(0)
    }

    pub(super) fn total(&self) -> u64 {
        self.total
    }
}

/// Batches between their append and their entry in the index. A segment sealed before the oldest of them began holds nothing that is still to be
/// entered: only then do its live bytes say all.
#[derive(Debug, Default)]
pub(super) struct Tickets {
    next: u64,
    open: BTreeSet<u64>,
}

impl Tickets {
    pub(super) fn take(&mut self) -> u64 {
        self.next += 1;
        self.open.insert(self.next);
        self.next
    }

    pub(super) fn give_back(&mut self, ticket: u64) {
        self.open.remove(&ticket);
    }

    /// What [`Tickets::is_past`] is to be asked about later.
    pub(super) fn now(&self) -> u64 {
        self.next
    }

    /// Whether all that had begun at that moment has ended.
    pub(super) fn is_past(&self, moment: u64) -> bool {
        self.open.first().is_none_or(|&oldest| oldest > moment)
    }

    pub(super) fn is_idle(&self) -> bool {
        self.open.is_empty()
    }
}
