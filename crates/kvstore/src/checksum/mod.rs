//! The checksum of everything stored: XXH3-64, by the widest instructions of the processor it runs on.

#[cfg(target_arch = "x86_64")]
mod wide;

use std::hash::Hasher;

use twox_hash::XxHash3_64;

/// Bytes summed right after they were read, while a cache still holds them. No fewer: the system copies large pieces so much faster than small ones
/// that a nearer cache does not make up for it (1.4 MB at once: 0.79 of the copy alone, in pieces of 128 KiB: 0.69).
pub const CHUNK: usize = 2 << 20;

/// XXH3-64 of `bytes`.
pub fn checksum(bytes: &[u8]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if bytes.len() >= wide::LEAST && wide::can() {
        // SAFETY: the processor can.
        return unsafe { wide::checksum(bytes) };
    }
    XxHash3_64::oneshot(bytes)
}

/// XXH3-64 of bytes that come in pieces.
pub struct Sum(XxHash3_64);

impl Default for Sum {
    fn default() -> Self {
        Self(XxHash3_64::new())
    }
}

impl Sum {
    /// The next piece.
    pub fn add(&mut self, bytes: &[u8]) {
        self.0.write(bytes);
    }

    /// The checksum of all pieces so far.
    pub fn value(&self) -> u64 {
        self.0.finish()
    }

    /// Of pieces at hand.
    pub fn of(pieces: &[&[u8]]) -> u64 {
        if let [one] = pieces {
            return checksum(one);
        }
        let mut sum = Self::default();
        for piece in pieces {
            sum.add(piece);
        }
        sum.value()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of the reference implementation (xxHash 0.8): what is on a disk must not change with the crate.
    #[test]
    fn values_of_the_reference() {
        assert_eq!(checksum(b""), 0x2d06_8005_38d3_94c2);
        assert_eq!(checksum(b"a"), 0xe6c6_32b6_1e96_4e1f);
        assert_eq!(checksum(b"abc"), 0x78af_5f94_892f_3950);
    }

    /// Every way of summing gives the same, wherever blocks and stripes end and whatever the bytes' alignment.
    #[test]
    fn the_widest_way_gives_the_same() {
        let bytes: Vec<u8> = (0..1_500_000u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        let lengths = (0..3200).chain([65_535, 65_536, 65_537, 113_920, 1_415_039, 1_415_040, 1_415_041]);
        for length in lengths {
            let start = length % 67;
            let part = &bytes[start..start + length];
            assert_eq!(checksum(part), XxHash3_64::oneshot(part), "{length} bytes from {start} on");
        }
        // No bit is left out.
        let mut part = bytes[..2100].to_vec();
        let whole = checksum(&part);
        for at in 0..part.len() * 8 {
            part[at / 8] ^= 1 << (at % 8);
            assert_ne!(checksum(&part), whole, "bit {at}");
            part[at / 8] ^= 1 << (at % 8);
        }
    }

    #[test]
    fn pieces_sum_to_the_whole() {
        let bytes: Vec<u8> = (0..700_000u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 9) as u8).collect();
        for cut in [0, 1, 63, 64, 240, 241, 1024, 300_001] {
            assert_eq!(Sum::of(&[&bytes[..cut], &bytes[cut..]]), checksum(&bytes), "{cut}");
        }
    }
}
