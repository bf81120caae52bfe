//! XXH3-64 over description and payload.
//!
//! It guards against faults, not against forgers: those are kept out by the token. Of what guards against faults it is the fastest
//! without a choice by instruction set (see docs/benchmarks.md): CRC-32C has 32 bits, few for terabytes a day, and BLAKE3 costs
//! several times as much.

use xxhash_rust::xxh3::Xxh3;

/// A running checksum.
pub struct Checksum(Xxh3);

impl Checksum {
    /// Over the description, with its length before it.
    pub fn new(meta: &[u8]) -> Self {
        let mut state = Xxh3::new();
        state.update(&(meta.len() as u64).to_le_bytes());
        state.update(meta);
        Self(state)
    }

    /// The next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Over everything so far.
    pub fn value(&self) -> u64 {
        self.0.digest()
    }
}
