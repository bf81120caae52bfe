//! What stands before the bytes of an object in a segment: 128 bytes that say what follows and can be told from anything else.
//!
//! Little endian; offsets: 0 magic · 4 version u16 · 6 kind · 7 class · 8 tenant u16 · 10 flags u16 (1: has a parent) · 12 length u32 ·
//! 16 key · 32 parent · 48 written u32 · 52 records of the same batch that follow u32 · 56 XXH3-64 of the bytes · 64 segment u32 ·
//! 68 offset u32 · 72 media id u64 · 80 bytes of the segment that were synced before u64 · 88 number in its batch u32 · 92 zeros · 120 XXH3-64 of the 120 bytes before.
//!
//! A header names its own place and media, so that one which was copied, moved or left over from an earlier file is not taken for a
//! record. Bytes follow at once, then zeros up to the next multiple of 64.

use crate::checksum::checksum;
use crate::error::Error;
use crate::key::{Key, Kind, ObjectId};
use crate::media::{ALIGN, Place};
use crate::object::{Class, Meta, TenantId};

/// The newest version of header, footer and segment this code reads, and the one that it writes.
pub const VERSION: u16 = 1;

const MAGIC: [u8; 4] = *b"DKVR";
const HAS_PARENT: u16 = 1;

/// A record's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The object.
    pub meta: Meta,
    /// Where this header lies.
    pub place: Place,
    /// Records of the same batch behind this one: a batch counts only when all of it is there.
    pub left: u32,
    /// Records of the same batch before this one.
    pub before: u32,
    /// Bytes of its segment that were on the disk when this was written: damage below is decay, not a torn write.
    pub synced: u64,
    /// Of the media it was written to.
    pub media: u64,
}

/// Bytes that a record of `len` bytes takes in a segment.
pub fn span(len: u32) -> u64 {
    (Header::BYTES as u64 + u64::from(len)).next_multiple_of(ALIGN)
}

pub(crate) fn put<const N: usize>(to: &mut [u8], at: usize, bytes: [u8; N]) {
    to[at..at + N].copy_from_slice(&bytes);
}

pub(crate) fn take<const N: usize>(from: &[u8], at: usize) -> [u8; N] {
    let mut bytes = [0; N];
    bytes.copy_from_slice(&from[at..at + N]);
    bytes
}

impl Header {
    /// Bytes of the written form.
    pub const BYTES: usize = 128;

    /// The written form.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let meta = &self.meta;
        let mut to = [0; Self::BYTES];
        put(&mut to, 0, MAGIC);
        put(&mut to, 4, VERSION.to_le_bytes());
        to[6] = meta.id.kind as u8;
        to[7] = meta.class as u8;
        put(&mut to, 8, meta.tenant.0.to_le_bytes());
        put(&mut to, 10, if meta.parent.is_some() { HAS_PARENT } else { 0 }.to_le_bytes());
        put(&mut to, 12, meta.len.to_le_bytes());
        put(&mut to, 16, meta.id.key.to_bytes());
        put(&mut to, 32, meta.parent.unwrap_or(Key(0)).to_bytes());
        put(&mut to, 48, meta.written.to_le_bytes());
        put(&mut to, 52, self.left.to_le_bytes());
        put(&mut to, 56, meta.checksum.to_le_bytes());
        put(&mut to, 64, self.place.segment.to_le_bytes());
        put(&mut to, 68, self.place.offset.to_le_bytes());
        put(&mut to, 72, self.media.to_le_bytes());
        put(&mut to, 80, self.synced.to_le_bytes());
        put(&mut to, 88, self.before.to_le_bytes());
        let sum = checksum(&to[..120]);
        put(&mut to, 120, sum.to_le_bytes());
        to
    }

    /// Reads a header. `None`: these bytes are none, or not whole.
    ///
    /// # Errors
    /// [`Error::Newer`]: a whole header of a version to come.
    pub fn decode(from: &[u8; Self::BYTES]) -> Result<Option<Self>, Error> {
        if from[..4] != MAGIC || u64::from_le_bytes(take(from, 120)) != checksum(&from[..120]) {
            return Ok(None);
        }
        known(u16::from_le_bytes(take(from, 4)), "a record")?;
        let (Some(kind), Some(class)) = (Kind::from_byte(from[6]), Class::from_byte(from[7])) else {
            return Ok(None);
        };
        let parent = u16::from_le_bytes(take(from, 10)) & HAS_PARENT != 0;
        Ok(Some(Self {
            meta: Meta {
                id: ObjectId { kind, key: Key::from_bytes(take(from, 16)) },
                parent: parent.then(|| Key::from_bytes(take(from, 32))),
                tenant: TenantId(u16::from_le_bytes(take(from, 8))),
                class,
                len: u32::from_le_bytes(take(from, 12)),
                checksum: u64::from_le_bytes(take(from, 56)),
                written: u32::from_le_bytes(take(from, 48)),
            },
            place: Place { segment: u32::from_le_bytes(take(from, 64)), offset: u32::from_le_bytes(take(from, 68)) },
            left: u32::from_le_bytes(take(from, 52)),
            before: u32::from_le_bytes(take(from, 88)),
            synced: u64::from_le_bytes(take(from, 80)),
            media: u64::from_le_bytes(take(from, 72)),
        }))
    }

    /// Whether this is the header of the object that `meta` means: GC changes neither.
    pub fn names(&self, meta: &Meta) -> bool {
        self.meta.id == meta.id && self.meta.len == meta.len && self.meta.checksum == meta.checksum
    }
}

/// Refuses a version to come.
pub(crate) fn known(found: u16, what: &str) -> Result<(), Error> {
    if found > VERSION {
        return Err(Error::Newer { what: what.to_owned(), found: found.into(), known: VERSION.into() });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn header() -> Header {
        Header {
            meta: Meta {
                id: ObjectId { kind: Kind::Slice, key: Key(0x0123_4567_89ab_cdef_0011_2233_4455_6677) },
                parent: Some(Key(u128::MAX - 5)),
                tenant: TenantId(513),
                class: Class::Agent,
                len: 1_415_040,
                checksum: 0xfeed_face_cafe_beef,
                written: 1_800_000_000,
            },
            place: Place { segment: 10, offset: 77 },
            left: 3,
            before: 2,
            synced: 1 << 33,
            media: 0xabcd,
        }
    }

    #[test]
    fn a_header_is_read_as_it_is_written() {
        let mut header = header();
        assert_eq!(Header::decode(&header.encode()).unwrap(), Some(header));
        header.meta.parent = None;
        assert_eq!(Header::decode(&header.encode()).unwrap(), Some(header));
        // The layout is a promise to files that exist.
        let bytes = header.encode();
        assert_eq!(&bytes[..12], b"DKVR\x01\x00\x02\x01\x01\x02\x00\x00");
        assert_eq!(bytes[12..16], 1_415_040u32.to_le_bytes());
    }

    #[test]
    fn no_flipped_bit_goes_unseen() {
        let whole = header().encode();
        for bit in 0..Header::BYTES * 8 {
            let mut bytes = whole;
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Header::decode(&bytes).unwrap(), None, "bit {bit}");
        }
        assert_eq!(Header::decode(&[0; Header::BYTES]).unwrap(), None);
    }

    #[test]
    fn a_newer_header_is_refused_by_name() {
        let mut bytes = header().encode();
        bytes[4] = 2;
        let sum = checksum(&bytes[..120]);
        put(&mut bytes, 120, sum.to_le_bytes());
        assert!(matches!(Header::decode(&bytes), Err(Error::Newer { found: 2, known: 1, .. })));
    }

    #[test]
    fn spans_are_aligned() {
        assert_eq!(span(0), 128);
        assert_eq!(span(1), 192);
        assert_eq!(span(64), 192);
        assert_eq!(span(1_415_040), 1_415_168);
    }
}
