//! Keyed BLAKE3 of equally long short messages, several at once in the lanes of a vector register.
//!
//! The `blake3` crate does this inside of long messages only; its entry point for separate ones (`platform`) is public but not
//! promised to stay, hence the exact version in `Cargo.toml` and the tests against `blake3::keyed_hash`.

use blake3::IncrementCounter;
use blake3::platform::Platform;

use crate::hash::finish;
use crate::ids::BlockHash;

/// Messages of one call at most: the widest vectors hold sixteen.
pub(crate) const LANES: usize = 16;

// Flags of the BLAKE3 specification.
const CHUNK_START: u8 = 1;
const CHUNK_END: u8 = 2;
const ROOT: u8 = 8;
const KEYED_HASH: u8 = 16;

/// Appends the first 16 bytes of `keyed_hash(key, message)` of the first `n` of `messages` to `out`. `N` is a multiple of 64, at most 1024.
/// Messages behind `n` may be hashed along.
pub(crate) fn hash_side_by_side<const N: usize>(
    messages: &[[u8; N]; LANES],
    n: usize,
    key: &[u8; 32],
    out: &mut Vec<BlockHash>,
) {
    let platform = Platform::detect();
    let wide = platform.simd_degree().clamp(1, LANES);
    // A full register costs what half of one costs; the last few go through half as wide ones.
    let lanes = if n % wide > wide / 2 { n.next_multiple_of(wide) } else { n }.min(LANES);
    let inputs: [&[u8; N]; LANES] = messages.each_ref();
    let mut words = [0; 8];
    for (word, bytes) in words.iter_mut().zip(key.as_chunks::<4>().0) {
        *word = u32::from_le_bytes(*bytes);
    }
    let mut hashes = [0; LANES * 32];
    platform.hash_many(
        &inputs[..lanes],
        &words,
        0,
        IncrementCounter::No,
        KEYED_HASH,
        CHUNK_START,
        CHUNK_END | ROOT,
        &mut hashes[..lanes * 32],
    );
    out.extend(hashes.chunks_exact(32).take(n).map(finish));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agrees<const N: usize>() {
        let key: [u8; 32] = std::array::from_fn(|i| (i * 7 + 3) as u8);
        let messages: [[u8; N]; LANES] =
            std::array::from_fn(|m| std::array::from_fn(|i| (i * 31 + m * 17 + i / 64) as u8));
        for n in 0..=LANES {
            let mut out = Vec::new();
            hash_side_by_side(&messages, n, &key, &mut out);
            let expected: Vec<_> =
                messages[..n].iter().map(|message| finish(blake3::keyed_hash(&key, message).as_bytes())).collect();
            assert_eq!(out, expected, "{n} messages of {N} bytes");
        }
    }

    #[test]
    fn every_number_of_lanes_gives_the_hash_of_each_message() {
        agrees::<64>();
        agrees::<128>();
        agrees::<256>();
        agrees::<448>();
        agrees::<832>();
        agrees::<1024>();
    }
}
