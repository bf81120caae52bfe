//! The ordered queue of sequences that lack nothing but resources.

use deepinfer_kvindex::Seq;
use std::collections::BTreeSet;

/// Place in the queue: priority, preempted before never started, arrival. Arrival is never given anew, nor in another run of
/// the same request whose caller says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    pub priority: i32,
    pub class: Class,
    pub arrival: u64,
    /// Order among sequences of one request.
    pub fork: u32,
    pub index: u32,
    pub generation: u32,
}

/// Preempted sequences re-enter ahead of never-started ones of their priority.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Class {
    Preempted,
    New,
}

impl Place {
    pub fn seq(&self) -> Seq {
        Seq { index: self.index, generation: self.generation }
    }
}

/// When the head was last refused, so that an unchanged world is not asked again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Refusal {
    head: Place,
    room: Room,
    version: u64,
    step: u64,
}

/// What an admission depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Room {
    pub blocks: u32,
    pub slots: u32,
    pub running: usize,
}

/// Steps after which a refused head is tried again even if no resource came free: others may have published its prefix.
pub(crate) const RETRY_STEPS: u64 = 32;

#[derive(Default)]
pub(crate) struct Waiting {
    order: BTreeSet<Place>,
    version: u64,
    refused: Option<Refusal>,
}

impl Waiting {
    pub fn insert(&mut self, place: Place) {
        self.order.insert(place);
        self.version += 1;
    }

    pub fn remove(&mut self, place: &Place) -> bool {
        self.version += 1;
        self.order.remove(place)
    }

    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    pub fn len(&self) -> usize {
        self.order.len()
    }

    pub fn head(&self) -> Option<Place> {
        self.order.first().copied()
    }

    /// Next place after `place`.
    pub fn after(&self, place: &Place) -> Option<Place> {
        use std::ops::Bound::{Excluded, Unbounded};
        self.order.range((Excluded(*place), Unbounded)).next().copied()
    }

    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &Place> {
        self.order.iter()
    }

    /// Whether a scan could end otherwise than the last one, which refused the head.
    pub fn worth_a_scan(&self, room: Room, step: u64) -> bool {
        match (self.refused, self.head()) {
            (_, None) => false,
            (Some(last), Some(head)) => {
                last.head != head
                    || last.version != self.version
                    || room.blocks > last.room.blocks
                    || room.slots > last.room.slots
                    || room.running < last.room.running
                    || step >= last.step + RETRY_STEPS
            }
            (None, Some(_)) => true,
        }
    }

    /// What a later scan depends on beside the queue, seen from `step`; for model checks.
    pub fn digest(&self, step: u64, hasher: &mut impl std::hash::Hasher) {
        use std::hash::Hash;
        if let Some(last) = self.refused.filter(|last| Some(last.head) == self.head()) {
            (last.version == self.version, last.room.blocks, last.room.slots, last.room.running).hash(hasher);
            step.saturating_sub(last.step).min(RETRY_STEPS).hash(hasher);
        }
    }

    pub fn refuse(&mut self, room: Room, step: u64) {
        if let Some(head) = self.head() {
            self.refused = Some(Refusal { head, room, version: self.version, step });
        }
    }

    pub fn forget_refusal(&mut self) {
        self.refused = None;
    }
}
