//! How an object is cut into shards.

use super::DATA;

/// The cut of an object of some length: ten equal shards of whole 64-byte units, the last ones padded with zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stripe {
    len: usize,
}

impl Stripe {
    /// Shards are a multiple of this, so that vectors and direct I/O find whole units.
    pub const UNIT: usize = 64;

    /// Of an object of `len` bytes.
    pub const fn of(len: usize) -> Self {
        Self { len }
    }

    /// Bytes of each of the twelve shards: ⌈len / 10⌉ rounded up to [`Stripe::UNIT`], 0 for an empty object.
    pub const fn shard(self) -> usize {
        self.len.div_ceil(DATA).next_multiple_of(Self::UNIT)
    }

    /// Bytes of the ten data shards that are padding.
    pub const fn padding(self) -> usize {
        self.shard() * DATA - self.len
    }

    /// The bytes of the object that data shard `at` begins with; what follows in it is padding.
    pub fn range(self, at: usize) -> std::ops::Range<usize> {
        let shard = self.shard();
        (at * shard).min(self.len)..((at + 1) * shard).min(self.len)
    }

    /// The data shards that hold any of these bytes of the object; none for an empty range.
    pub fn covering(self, bytes: &std::ops::Range<usize>) -> std::ops::Range<usize> {
        if bytes.is_empty() {
            return 0..0;
        }
        bytes.start / self.shard()..(bytes.end - 1) / self.shard() + 1
    }
}
