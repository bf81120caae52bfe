//! Extents of a range of bytes: taken where they fit best, joined with their neighbours when given back.
//!
//! Owns: which bytes are free. Never touches: the bytes, who has the others.

use std::collections::{BTreeMap, BTreeSet};

/// Extents begin and end at multiples of this: a page.
pub const GRAIN: u64 = 4096;

/// The free extents of a range.
#[derive(Debug)]
pub struct Space {
    /// First byte → length.
    by_place: BTreeMap<u64, u64>,
    /// (length, first byte).
    by_length: BTreeSet<(u64, u64)>,
    free: u64,
}

/// Bytes that an object of `len` takes: never none.
pub fn span(len: u32) -> u64 {
    u64::from(len.max(1)).next_multiple_of(GRAIN)
}

impl Space {
    /// All of `len` bytes free, rounded down to whole grains.
    pub fn new(len: u64) -> Self {
        let mut space = Self { by_place: BTreeMap::new(), by_length: BTreeSet::new(), free: 0 };
        space.add(0, len - len % GRAIN);
        space
    }

    fn add(&mut self, place: u64, len: u64) {
        if len > 0 {
            self.by_place.insert(place, len);
            self.by_length.insert((len, place));
            self.free += len;
        }
    }

    fn drop_free(&mut self, place: u64, len: u64) {
        self.by_place.remove(&place);
        self.by_length.remove(&(len, place));
        self.free -= len;
    }

    /// Bytes free.
    pub fn free(&self) -> u64 {
        self.free
    }

    /// Takes `len` bytes, a multiple of the grain: from the smallest extent that has them.
    pub fn take(&mut self, len: u64) -> Option<u64> {
        debug_assert!(len > 0 && len.is_multiple_of(GRAIN));
        let &(found, place) = self.by_length.range((len, 0)..).next()?;
        self.drop_free(place, found);
        self.add(place + len, found - len);
        Some(place)
    }

    /// Gives back what [`Space::take`] gave.
    pub fn give(&mut self, place: u64, len: u64) {
        let (mut place, mut len) = (place, len);
        if let Some((&before, &its)) = self.by_place.range(..place).next_back()
            && before + its == place
        {
            self.drop_free(before, its);
            (place, len) = (before, its + len);
        }
        if let Some(&behind) = self.by_place.get(&(place + len)) {
            self.drop_free(place + len, behind);
            len += behind;
        }
        self.add(place, len);
    }

    /// Free extents in order: (first byte, length).
    #[cfg(test)]
    pub fn extents(&self) -> impl Iterator<Item = (u64, u64)> {
        self.by_place.iter().map(|(&place, &len)| (place, len))
    }
}
