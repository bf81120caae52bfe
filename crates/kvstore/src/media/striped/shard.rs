//! What stands before each shard in an object of a domain: 64 bytes that say whose it is, and its checksum.
//!
//! Little endian; offsets: 0 magic · 4 version u16 · 6 position · 7 kind · 8 length of the object u32 · 12 segment u32 · 16 key · 32 XXH3-64
//! of the object · 40 XXH3-64 of the shard · 48 media id u64 · 56 XXH3-64 of the 56 bytes before. The shard follows, a multiple of 64.

use crate::checksum::checksum;
use crate::erasure::Stripe;
use crate::error::Error;
use crate::object::Meta;
use crate::record::{VERSION, known, put, take};

const MAGIC: [u8; 4] = *b"DKVX";

/// Bytes of a shard's header.
pub const HEAD: usize = 64;

/// Bytes that an object of `len` bytes takes in each domain.
pub fn span(len: u32) -> u64 {
    (HEAD + Stripe::of(len as usize).shard()) as u64
}

/// What a shard is held to.
#[derive(Clone, Copy, Debug)]
pub struct Identity<'a> {
    pub meta: &'a Meta,
    pub position: usize,
    pub segment: u32,
    pub media: u64,
}

impl Identity<'_> {
    /// The header of this shard.
    pub fn encode(&self, shard: &[u8]) -> [u8; HEAD] {
        let mut to = self.start(VERSION);
        put(&mut to, 40, checksum(shard).to_le_bytes());
        let sum = checksum(&to[..56]);
        put(&mut to, 56, sum.to_le_bytes());
        to
    }

    /// Everything that is known before the bytes are.
    fn start(&self, version: u16) -> [u8; HEAD] {
        let mut to = [0; HEAD];
        put(&mut to, 0, MAGIC);
        put(&mut to, 4, version.to_le_bytes());
        to[6] = self.position as u8;
        to[7] = self.meta.id.kind as u8;
        put(&mut to, 8, self.meta.len.to_le_bytes());
        put(&mut to, 12, self.segment.to_le_bytes());
        put(&mut to, 16, self.meta.id.key.to_bytes());
        put(&mut to, 32, self.meta.checksum.to_le_bytes());
        put(&mut to, 48, self.media.to_le_bytes());
        to
    }

    /// Whether these are this shard's header and the shard, unharmed.
    ///
    /// # Errors
    /// [`Error::Newer`]: a whole header of a version to come.
    pub fn holds(&self, bytes: &[u8]) -> Result<bool, Error> {
        let Some((head, shard)) = bytes.split_at_checked(HEAD) else { return Ok(false) };
        if head[..4] != MAGIC || u64::from_le_bytes(take(head, 56)) != checksum(&head[..56]) {
            return Ok(false);
        }
        let version = u16::from_le_bytes(take(head, 4));
        known(version, "a shard")?;
        let start = self.start(version);
        Ok(head[..40] == start[..40]
            && head[48..56] == start[48..56]
            && u64::from_le_bytes(take(head, 40)) == checksum(shard))
    }
}
