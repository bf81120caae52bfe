//! The index at the end of a sealed segment: one entry a record, then a tail whose last eight bytes are the footer's length.
//!
//! Entry (64 B, little endian): 0 offset u32 · 4 length u32 · 8 kind · 9 class · 10 tenant u16 · 12 flags u16 (1: has a parent) · 14 zeros ·
//! 16 key · 32 parent · 48 XXH3-64 of the bytes · 56 written u32 · 60 zeros.
//! Tail (64 B): 0 magic · 4 version u16 · 6 entry size u16 · 8 segment u32 · 12 entries u32 · 16 media id u64 · 24 XXH3-64 of the entries ·
//! 32 offset of the first entry u64 · 40 zeros · 48 XXH3-64 of the 48 bytes before and the length · 56 length u64.

use crate::checksum::{Sum, checksum};
use crate::error::Error;
use crate::key::{Key, Kind, ObjectId};
use crate::media::{ALIGN, Place};
use crate::object::{Class, Meta, TenantId};
use crate::record::{VERSION, known, put, span, take};

const MAGIC: [u8; 4] = *b"DKVF";

/// Bytes of an entry.
pub const ENTRY: usize = 64;
/// Bytes of a tail.
pub const TAIL: usize = 64;

/// What a tail says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tail {
    /// Number of the segment.
    pub segment: u32,
    /// Id of the media.
    pub media: u64,
    /// Entries.
    pub count: u32,
    /// Where the entries begin: the end of the records.
    pub start: u64,
    sum: u64,
}

/// The footer of records that end at `start`.
pub fn encode(segment: u32, media: u64, start: u64, records: &[(Place, Meta)]) -> Vec<u8> {
    let length = records.len() * ENTRY + TAIL;
    let mut to = vec![0; length];
    for ((place, meta), entry) in records.iter().zip(to.chunks_exact_mut(ENTRY)) {
        put(entry, 0, place.offset.to_le_bytes());
        put(entry, 4, meta.len.to_le_bytes());
        entry[8] = meta.id.kind as u8;
        entry[9] = meta.class as u8;
        put(entry, 10, meta.tenant.0.to_le_bytes());
        put(entry, 12, u16::from(meta.parent.is_some()).to_le_bytes());
        put(entry, 16, meta.id.key.to_bytes());
        put(entry, 32, meta.parent.unwrap_or(Key(0)).to_bytes());
        put(entry, 48, meta.checksum.to_le_bytes());
        put(entry, 56, meta.written.to_le_bytes());
    }
    let (entries, tail) = to.split_at_mut(length - TAIL);
    put(tail, 0, MAGIC);
    put(tail, 4, VERSION.to_le_bytes());
    put(tail, 6, (ENTRY as u16).to_le_bytes());
    put(tail, 8, segment.to_le_bytes());
    put(tail, 12, (records.len() as u32).to_le_bytes());
    put(tail, 16, media.to_le_bytes());
    put(tail, 24, checksum(entries).to_le_bytes());
    put(tail, 32, start.to_le_bytes());
    put(tail, 56, (length as u64).to_le_bytes());
    let sum = Sum::of(&[&tail[..48], &tail[56..]]);
    put(tail, 48, sum.to_le_bytes());
    to
}

impl Tail {
    /// Reads the last [`TAIL`] bytes of a segment of `size` bytes. `None`: the segment was not sealed, or its footer is damaged.
    ///
    /// # Errors
    /// [`Error::Newer`].
    pub fn decode(from: &[u8; TAIL], size: u64) -> Result<Option<Self>, Error> {
        if from[..4] != MAGIC || u64::from_le_bytes(take(from, 48)) != Sum::of(&[&from[..48], &from[56..]]) {
            return Ok(None);
        }
        known(u16::from_le_bytes(take(from, 4)), "a segment's footer")?;
        let tail = Self {
            segment: u32::from_le_bytes(take(from, 8)),
            media: u64::from_le_bytes(take(from, 16)),
            count: u32::from_le_bytes(take(from, 12)),
            start: u64::from_le_bytes(take(from, 32)),
            sum: u64::from_le_bytes(take(from, 24)),
        };
        // What follows sizes a buffer by these numbers.
        let length = u64::from_le_bytes(take(from, 56));
        let agrees = length == u64::from(tail.count) * ENTRY as u64 + TAIL as u64
            && tail.start.checked_add(length) == Some(size)
            && usize::from(u16::from_le_bytes(take(from, 6))) == ENTRY;
        Ok(agrees.then_some(tail))
    }

    /// Bytes of all entries.
    pub fn entries_bytes(&self) -> usize {
        self.count as usize * ENTRY
    }

    /// Reads the entries. `None`: they lack their checksum, or one of them names what is no record.
    pub fn records(&self, entries: &[u8]) -> Option<Vec<(Place, Meta)>> {
        self.records_of(entries, span)
    }

    /// [`Tail::records`] where an object of a length takes `span` bytes of the segment.
    pub fn records_of(&self, entries: &[u8], span: fn(u32) -> u64) -> Option<Vec<(Place, Meta)>> {
        if entries.len() != self.entries_bytes() || checksum(entries) != self.sum {
            return None;
        }
        entries.chunks_exact(ENTRY).map(|entry| self.record(entry, span)).collect()
    }

    fn record(&self, entry: &[u8], span: fn(u32) -> u64) -> Option<(Place, Meta)> {
        let place = Place { segment: self.segment, offset: u32::from_le_bytes(take(entry, 0)) };
        let parent = u16::from_le_bytes(take(entry, 12)) & 1 != 0;
        let meta = Meta {
            id: ObjectId { kind: Kind::from_byte(entry[8])?, key: Key::from_bytes(take(entry, 16)) },
            parent: parent.then(|| Key::from_bytes(take(entry, 32))),
            tenant: TenantId(u16::from_le_bytes(take(entry, 10))),
            class: Class::from_byte(entry[9])?,
            len: u32::from_le_bytes(take(entry, 4)),
            checksum: u64::from_le_bytes(take(entry, 48)),
            written: u32::from_le_bytes(take(entry, 56)),
        };
        (u64::from(place.offset) * ALIGN + span(meta.len) <= self.start).then_some((place, meta))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn records(count: u32) -> Vec<(Place, Meta)> {
        (0..count)
            .map(|at| {
                let meta = Meta {
                    id: ObjectId {
                        kind: if at % 3 == 0 { Kind::Slice } else { Kind::Block },
                        key: Key(u128::from(at) << 90 | 7),
                    },
                    parent: (at % 2 == 0).then_some(Key(u128::from(at) * 11)),
                    tenant: TenantId(at as u16),
                    class: Class::ALL[at as usize % 3],
                    len: at,
                    checksum: u64::from(at).wrapping_mul(0x9e37_79b9_7f4a_7c15),
                    written: at + 5,
                };
                (Place { segment: 9, offset: 1 + at * 4 }, meta)
            })
            .collect()
    }

    fn read(footer: &[u8], start: u64) -> Option<Vec<(Place, Meta)>> {
        let (entries, tail) = footer.split_at(footer.len() - TAIL);
        Tail::decode(tail.try_into().unwrap(), start + footer.len() as u64).unwrap()?.records(entries)
    }

    #[test]
    fn a_footer_is_read_as_it_is_written() {
        for count in [0, 1, 60] {
            let records = records(count);
            let footer = encode(9, 0x77, 1 << 20, &records);
            assert_eq!(footer.len(), count as usize * ENTRY + TAIL);
            assert_eq!(read(&footer, 1 << 20).unwrap(), records);
        }
    }

    #[test]
    fn no_flipped_bit_goes_unseen() {
        let whole = encode(9, 0x77, 1 << 20, &records(3));
        for bit in 0..whole.len() * 8 {
            let mut footer = whole.clone();
            footer[bit / 8] ^= 1 << (bit % 8);
            assert!(read(&footer, 1 << 20).is_none(), "bit {bit}");
        }
    }

    #[test]
    fn a_footer_of_another_size_is_none() {
        let footer = encode(9, 0x77, 1 << 20, &records(3));
        assert!(read(&footer, (1 << 20) + 64).is_none());
    }

    #[test]
    fn an_entry_beyond_the_records_is_refused() {
        let footer = encode(9, 0x77, 256, &records(3));
        assert!(read(&footer, 256).is_none());
    }
}
