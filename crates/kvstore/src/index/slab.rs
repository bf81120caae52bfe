//! Rows of the table under numbers that stay the same while their entry lives.

use std::num::NonZeroU32;

use super::chunked::Chunked;
use crate::key::{Key, Kind};
use crate::media::Place;

/// Number of an entry, stable while it lives and given again after: what policies name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Slot(NonZeroU32);

impl Slot {
    /// As a place in a side array.
    pub fn index(self) -> usize {
        self.0.get() as usize
    }

    /// As four bytes of a link; 0 is none.
    pub(crate) fn raw(self) -> u32 {
        self.0.get()
    }

    /// The inverse of [`Slot::raw`].
    pub(crate) fn from_raw(raw: u32) -> Option<Self> {
        NonZeroU32::new(raw).map(Self)
    }
}

/// An entry as it is kept: 56 bytes. `Option<Slot>` is four.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row {
    // As two words: a u128 would be aligned to 16 and cost eight bytes more.
    pub key: [u64; 2],
    pub checksum: u64,
    pub place: Place,
    pub len: u32,
    /// Block: its parent. Slice: its block. Free: the next free row.
    pub parent: Option<Slot>,
    pub slice: Option<Slot>,
    pub children: u32,
    pub touched: u32,
    pub tenant: u16,
    pub class: u8,
    pub state: State,
}

/// What a row is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[repr(u8)]
pub(super) enum State {
    #[default]
    Free,
    Block,
    /// A block whose bytes are gone: kept because it has children.
    Lost,
    Slice,
}

impl Row {
    pub(super) fn key(&self) -> Key {
        Key(u128::from(self.key[0]) | u128::from(self.key[1]) << 64)
    }

    pub(super) fn words(key: Key) -> [u64; 2] {
        [key.0 as u64, (key.0 >> 64) as u64]
    }

    pub(super) fn kind(&self) -> Kind {
        if self.state == State::Slice { Kind::Slice } else { Kind::Block }
    }
}

impl Default for Row {
    fn default() -> Self {
        Self {
            key: [0; 2],
            checksum: 0,
            place: Place { segment: 0, offset: 0 },
            len: 0,
            parent: None,
            slice: None,
            children: 0,
            touched: 0,
            tenant: 0,
            class: 0,
            state: State::Free,
        }
    }
}

/// The rows. Row 0 is never given.
#[derive(Debug, Default)]
pub(super) struct Slab {
    rows: Chunked<Row>,
    free: Option<Slot>,
    /// Rows given at least once.
    used: u32,
    live: usize,
}

impl Slab {
    /// Takes a row and puts `row` there; `None` when four billion are taken.
    pub(super) fn insert(&mut self, row: Row) -> Option<Slot> {
        let slot = if let Some(slot) = self.free {
            self.free = self.rows[slot.index()].parent;
            slot
        } else {
            let slot = Slot::from_raw(self.used.checked_add(1)?)?;
            self.used += 1;
            self.rows.reach(slot.index());
            slot
        };
        self.rows[slot.index()] = row;
        self.live += 1;
        Some(slot)
    }

    /// Gives a row back.
    pub(super) fn remove(&mut self, slot: Slot) -> Row {
        let row = std::mem::take(&mut self.rows[slot.index()]);
        debug_assert!(row.state != State::Free, "{slot:?} is free");
        self.rows[slot.index()].parent = self.free;
        self.free = Some(slot);
        self.live -= 1;
        row
    }

    /// The row, unless it is free.
    pub(super) fn get(&self, slot: Slot) -> Option<&Row> {
        self.rows.get(slot.index()).filter(|row| row.state != State::Free)
    }

    pub(super) fn live(&self) -> usize {
        self.live
    }

    pub(super) fn used(&self) -> usize {
        self.used as usize
    }

    pub(super) fn bytes(&self) -> usize {
        self.rows.bytes()
    }

    /// Every live row.
    pub(super) fn iter(&self) -> impl Iterator<Item = (Slot, &Row)> {
        (1..=self.used).filter_map(Slot::from_raw).filter_map(|slot| self.get(slot).map(|row| (slot, row)))
    }
}

impl std::ops::Index<Slot> for Slab {
    type Output = Row;

    fn index(&self, slot: Slot) -> &Row {
        &self.rows[slot.index()]
    }
}

impl std::ops::IndexMut<Slot> for Slab {
    fn index_mut(&mut self, slot: Slot) -> &mut Row {
        &mut self.rows[slot.index()]
    }
}
