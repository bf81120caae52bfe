//! The first 64 bytes of a segment, little endian: 0 magic · 4 version u16 · 8 number u32 · 16 media id u64 · 56 XXH3-64 of the 56 before.

use crate::checksum::checksum;
use crate::error::Error;
use crate::record::{VERSION, known, put, take};

const MAGIC: [u8; 4] = *b"DKVS";

/// A segment's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentHeader {
    /// Number of the segment, from 1.
    pub number: u32,
    /// Id of the media it belongs to.
    pub media: u64,
}

impl SegmentHeader {
    /// Bytes of the written form: records begin here.
    pub const BYTES: usize = 64;

    /// The written form.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut to = [0; Self::BYTES];
        put(&mut to, 0, MAGIC);
        put(&mut to, 4, VERSION.to_le_bytes());
        put(&mut to, 8, self.number.to_le_bytes());
        put(&mut to, 16, self.media.to_le_bytes());
        let sum = checksum(&to[..56]);
        put(&mut to, 56, sum.to_le_bytes());
        to
    }

    /// Reads one. `None`: these bytes are none, or not whole.
    ///
    /// # Errors
    /// [`Error::Newer`].
    pub fn decode(from: &[u8; Self::BYTES]) -> Result<Option<Self>, Error> {
        if from[..4] != MAGIC || u64::from_le_bytes(take(from, 56)) != checksum(&from[..56]) {
            return Ok(None);
        }
        known(u16::from_le_bytes(take(from, 4)), "a segment")?;
        Ok(Some(Self { number: u32::from_le_bytes(take(from, 8)), media: u64::from_le_bytes(take(from, 16)) }))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_header_is_read_as_it_is_written_or_not_at_all() {
        let header = SegmentHeader { number: 0x0a0b, media: 0xfeed_0000_0000_0001 };
        let whole = header.encode();
        assert_eq!(SegmentHeader::decode(&whole).unwrap(), Some(header));
        for bit in 0..SegmentHeader::BYTES * 8 {
            let mut bytes = whole;
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(SegmentHeader::decode(&bytes).unwrap(), None, "bit {bit}");
        }
        let mut newer = whole;
        newer[4] = 9;
        let sum = checksum(&newer[..56]);
        put(&mut newer, 56, sum.to_le_bytes());
        assert!(matches!(SegmentHeader::decode(&newer), Err(Error::Newer { found: 9, .. })));
    }
}
