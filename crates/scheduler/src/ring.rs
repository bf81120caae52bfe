//! The step ring: caller-owned memory that a step is written into and its results are read from.
//!
//! A slot is handed out only after the step that used it has been completed; asking earlier is an error, not a wait.

use crate::layout::{F, Layout};
use thiserror::Error;

/// Word that a returned slot is filled with in debug builds, so that a late reader sees nonsense at once.
pub const POISON: i32 = 0x5EAD_0BAD;

/// One field of one slot, as the caller owns it.
#[derive(Clone, Copy, Debug)]
pub struct FieldView {
    /// First word.
    pub words: *mut i32,
    /// Length in words.
    pub len: usize,
}

/// One slot: a view for each field of [`crate::Scheduler::layout`], in that order.
#[derive(Clone, Debug)]
pub struct RingView {
    /// Views in layout order.
    pub fields: Vec<FieldView>,
}

/// Why memory was refused as a ring.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum LayoutError {
    /// Another number of slots than configured.
    #[error("the ring has {given} slots; the configuration says {want}")]
    Slots {
        /// Slots given.
        given: usize,
        /// Slots configured.
        want: usize,
    },
    /// Another number of fields than the layout has.
    #[error("ring slot {slot} has {given} fields; the layout has {want}")]
    Fields {
        /// Slot.
        slot: usize,
        /// Fields given.
        given: usize,
        /// Fields of the layout.
        want: usize,
    },
    /// A field has another length.
    #[error("field {name} of ring slot {slot} has {given} words; the layout says {want}")]
    Words {
        /// Slot.
        slot: usize,
        /// Field.
        name: String,
        /// Words given.
        given: usize,
        /// Words of the layout.
        want: usize,
    },
    /// A field does not start at a 32-bit boundary, or nowhere.
    #[error("field {name} of ring slot {slot} is null or not aligned to 4 bytes")]
    Alignment {
        /// Slot.
        slot: usize,
        /// Field.
        name: String,
    },
    /// Two fields share memory.
    #[error("fields of the ring overlap in memory (slots {0} and {1})")]
    Overlap(usize, usize),
    /// The ring was given already and steps used it.
    #[error("a ring is registered already")]
    Registered,
}

/// Pointer and length of one field.
#[derive(Clone, Copy)]
struct Raw {
    words: *mut i32,
    len: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Use {
    Free,
    Step(u64),
}

struct Slot {
    fields: Box<[Raw]>,
    used: Use,
}

/// Registered slots and who uses them.
#[derive(Default)]
pub(crate) struct Ring {
    slots: Vec<Slot>,
    fixed: [usize; crate::layout::FIXED],
    first_map: usize,
}

// SAFETY: the pointers are used only through `&Ring` and `&mut Ring`; the caller of `register` promised that the memory
// stays valid and is not touched by others while a step is being written or read, on whichever thread that happens.
unsafe impl Send for Ring {}
// SAFETY: as above; `&Ring` only reads.
unsafe impl Sync for Ring {}

impl Ring {
    /// Checks and takes the caller's memory.
    ///
    /// # Safety
    /// Every view must be valid for reads and writes until the ring is dropped, and nobody else may access a slot's
    /// memory during a call of the scheduler.
    pub unsafe fn register(&mut self, views: &[RingView], layout: &Layout, want: usize) -> Result<(), LayoutError> {
        if !self.slots.is_empty() {
            return Err(LayoutError::Registered);
        }
        if views.len() != want {
            return Err(LayoutError::Slots { given: views.len(), want });
        }
        let mut ranges: Vec<(usize, usize, usize)> = Vec::new();
        for (slot, view) in views.iter().enumerate() {
            if view.fields.len() != layout.fields.len() {
                return Err(LayoutError::Fields { slot, given: view.fields.len(), want: layout.fields.len() });
            }
            for (given, field) in view.fields.iter().zip(&layout.fields) {
                if given.len != field.words {
                    let (name, given, want) = (field.name.clone(), given.len, field.words);
                    return Err(LayoutError::Words { slot, name, given, want });
                }
                if given.words.is_null() || !given.words.is_aligned() {
                    return Err(LayoutError::Alignment { slot, name: field.name.clone() });
                }
                let start = given.words.addr();
                ranges.push((start, start + 4 * given.len, slot));
            }
        }
        ranges.sort_unstable();
        for pair in ranges.windows(2) {
            if pair[0].1 > pair[1].0 {
                return Err(LayoutError::Overlap(pair[0].2, pair[1].2));
            }
        }
        self.fixed = layout.fixed;
        self.first_map = layout.first_map;
        self.slots = views
            .iter()
            .map(|view| Slot {
                fields: view.fields.iter().map(|f| Raw { words: f.words, len: f.len }).collect(),
                used: Use::Free,
            })
            .collect();
        Ok(())
    }

    pub fn is_registered(&self) -> bool {
        !self.slots.is_empty()
    }

    /// Slot that `step` goes into, and the step that still uses it, if any.
    pub fn slot_of(&self, step: u64) -> (usize, Option<u64>) {
        let slot = (step % self.slots.len() as u64) as usize;
        match self.slots[slot].used {
            Use::Free => (slot, None),
            Use::Step(user) => (slot, Some(user)),
        }
    }

    pub fn take(&mut self, slot: usize, step: u64) {
        self.slots[slot].used = Use::Step(step);
    }

    /// Gives a slot back; in debug builds its content becomes nonsense.
    pub fn give_back(&mut self, slot: usize) {
        self.slots[slot].used = Use::Free;
        if cfg!(debug_assertions) {
            for field in 0..self.slots[slot].fields.len() {
                self.words_mut(slot, field).fill(POISON);
            }
        }
    }

    #[inline]
    fn words(&self, slot: usize, field: usize) -> &[i32] {
        let raw = self.slots[slot].fields[field];
        // SAFETY: `register` checked pointer, length, alignment and that no two fields overlap; its caller promised
        // validity and that nobody writes during this call. The borrow of `self` keeps our own writers out.
        unsafe { std::slice::from_raw_parts(raw.words, raw.len) }
    }

    #[inline]
    fn words_mut(&mut self, slot: usize, field: usize) -> &mut [i32] {
        let raw = self.slots[slot].fields[field];
        // SAFETY: as in `words`, and `&mut self` makes this the only slice over the field.
        unsafe { std::slice::from_raw_parts_mut(raw.words, raw.len) }
    }

    #[inline]
    pub fn get(&self, slot: usize, field: F) -> &[i32] {
        self.words(slot, self.fixed[field as usize])
    }

    #[inline]
    pub fn get_mut(&mut self, slot: usize, field: F) -> &mut [i32] {
        self.words_mut(slot, self.fixed[field as usize])
    }

    /// Several fields at once; naming one twice is a fault.
    #[inline]
    pub fn many_mut<const N: usize>(&mut self, slot: usize, fields: [F; N]) -> [&mut [i32]; N] {
        let named = fields.iter().fold(0u64, |seen, &field| seen | 1 << field as usize);
        assert_eq!(named.count_ones() as usize, N, "a field of the ring is named twice");
        let Self { slots, fixed, .. } = self;
        fields.map(|field| {
            let raw = slots[slot].fields[fixed[field as usize]];
            // SAFETY: as in `words_mut`; the fields differ, and `register` checked that no two share memory.
            unsafe { std::slice::from_raw_parts_mut(raw.words, raw.len) }
        })
    }

    #[inline]
    pub fn slots_mut(&mut self, slot: usize, map: usize) -> &mut [i32] {
        self.words_mut(slot, self.first_map + map)
    }
}
