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
    /// It is a copy of one that was: the index points to the copy now, the place returned holds nothing that is needed.
    Moved(Place),
    /// It waits for its parent.
    Waiting,
    /// Another record of that name, with other bytes, came first. Its place holds nothing that is needed.
    Conflict,
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
            Err(Refused::Exists(slot)) => {
                let from = index.slab[slot].place;
                // The records that waited come late: of two copies the one that lies further on stays.
                if (place.segment, place.offset) > (from.segment, from.offset) {
                    index.relocate(meta.id, from, place);
                    return Added::Moved(from);
                }
                Added::Moved(place)
            }
            Err(Refused::NoParent) => {
                let parent = meta.parent.unwrap_or(meta.id.key);
                self.waiting.entry(parent).or_default().push((meta, place));
                Added::Waiting
            }
            Err(Refused::Conflict(_) | Refused::BadParent | Refused::Full) => Added::Conflict,
        }
    }

    /// Records whose parents never came: nothing leads to them, their places hold nothing that is needed.
    pub fn orphans(self) -> impl Iterator<Item = (Meta, Place)> {
        self.waiting.into_values().flatten()
    }
}
