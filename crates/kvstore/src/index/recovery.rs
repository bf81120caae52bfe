//! Filling an index from records in the order they lie on the media, which is not always parents first: collection copies a parent behind
//! its children.

use std::collections::HashMap;

use super::{Index, Refused, Slot};
use crate::key::{Key, Kind};
use crate::media::Place;
use crate::object::Meta;

/// What became of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Added {
    /// It is in the index.
    Inserted(Slot),
    /// There was one of that name: the index points to the one that lies further on, the place returned holds nothing that is needed.
    Moved(Place),
    /// It waits for its parent.
    Waiting,
    /// It fits nowhere. Its place holds nothing that is needed.
    Unfit,
}

/// Records waiting for their parents while an index is filled.
#[derive(Debug, Default)]
pub struct Recovery {
    waiting: HashMap<Key, Vec<(Meta, Place)>>,
}

impl Recovery {
    /// None waits.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a record and whatever waited for it. `each` is told of every entry made, parents first.
    pub fn add(&mut self, index: &mut Index, meta: Meta, place: Place, each: &mut dyn FnMut(Slot, &Meta)) -> Added {
        let first = self.add_one(index, meta, place, each);
        if !matches!(first, Added::Inserted(_)) || meta.id.kind == Kind::Slice {
            return first;
        }
        let mut ready = self.waiting.remove(&meta.id.key).unwrap_or_default();
        while let Some((meta, place)) = ready.pop() {
            let added = self.add_one(index, meta, place, each);
            if matches!(added, Added::Inserted(_)) && meta.id.kind == Kind::Block {
                ready.extend(self.waiting.remove(&meta.id.key).unwrap_or_default());
            }
        }
        first
    }

    fn add_one(&mut self, index: &mut Index, meta: Meta, place: Place, each: &mut dyn FnMut(Slot, &Meta)) -> Added {
        match index.insert(&meta, place) {
            Ok(slot) => {
                each(slot, &meta);
                Added::Inserted(slot)
            }
            // What lies further on was written later: a copy, or what was written again after an eviction.
            Err(Refused::Exists(slot) | Refused::Conflict(slot)) => {
                let from = index.slab[slot].place;
                if place > from {
                    index.replace(slot, &meta, place);
                    return Added::Moved(from);
                }
                Added::Moved(place)
            }
            Err(Refused::NoParent) => {
                let parent = meta.parent.unwrap_or(meta.id.key);
                self.waiting.entry(parent).or_default().push((meta, place));
                Added::Waiting
            }
            Err(Refused::BadParent | Refused::Full) => Added::Unfit,
        }
    }

    /// Records whose parents never came: nothing leads to them, their places hold nothing that is needed.
    pub fn orphans(self) -> impl Iterator<Item = (Meta, Place)> {
        self.waiting.into_values().flatten()
    }
}
