#![allow(clippy::unwrap_used)]
use super::*;

/// Bytes without a pattern, from a seed (`SplitMix64`).
fn bytes(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        out.extend((z ^ (z >> 31)).to_le_bytes());
    }
    out.truncate(len);
    out
}

/// Data and parity of a stripe, by the scalar path.
fn stripe(len: usize) -> Vec<Vec<u8>> {
    let mut shards: Vec<Vec<u8>> = (0..DATA).map(|at| bytes(len, at as u64 + 1)).collect();
    let (mut p, mut q) = (vec![0; len], vec![0; len]);
    parity_by(Path::Scalar, &std::array::from_fn(|at| shards[at].as_slice()), &mut p, &mut q);
    shards.extend([p, q]);
    shards
}

fn without<'a>(shards: &'a [Vec<u8>], lost: &[usize]) -> [Option<&'a [u8]>; SHARDS] {
    std::array::from_fn(|at| (!lost.contains(&at)).then_some(shards[at].as_slice()))
}

/// A product by long division, with nothing of the module in it.
fn carryless(a: u8, b: u8) -> u8 {
    let mut product = (0..8).filter(|bit| b >> bit & 1 == 1).fold(0u32, |sum, bit| sum ^ u32::from(a) << bit);
    for bit in (8..16).rev() {
        if product >> bit & 1 == 1 {
            product ^= 0x11d << (bit - 8);
        }
    }
    product as u8
}

#[test]
fn the_field_is_the_one_of_0x11d() {
    for a in 0..=255u8 {
        for b in 0..=255u8 {
            assert_eq!(field::product(a, b), carryless(a, b), "{a}·{b}");
        }
        assert_eq!(field::double(a), carryless(2, a));
        assert_eq!(field::product(a, field::inverse(a)), u8::from(a != 0));
    }
    let powers: std::collections::BTreeSet<u8> = (0..255).map(field::power).collect();
    assert_eq!(powers.len(), 255);
    assert_eq!(field::power(255), 1);
}

#[test]
fn parity_is_the_one_of_isa_l() {
    // The rows of its generator for ten data and two parity shards, below the identity.
    const ROWS: [[u8; DATA]; PARITY] = [[1; DATA], [1, 2, 4, 8, 16, 32, 64, 128, 29, 58]];
    let data: Vec<Vec<u8>> = (0..DATA).map(|at| bytes(1000, 77 + at as u64)).collect();
    let (mut p, mut q) = (vec![0; 1000], vec![0; 1000]);
    for path in Path::available() {
        parity_by(path, &std::array::from_fn(|at| data[at].as_slice()), &mut p, &mut q);
        for (row, parity) in ROWS.iter().zip([&p, &q]) {
            for (at, byte) in parity.iter().enumerate() {
                let expected =
                    row.iter().zip(&data).fold(0, |sum, (factor, shard)| sum ^ carryless(*factor, shard[at]));
                assert_eq!(*byte, expected, "{path:?}, byte {at}");
            }
        }
    }
    // Bytes worked out outside of this program: byte k of shard i is 37·i² + 11·k + 5·i·k modulo 256.
    let data: Vec<Vec<u8>> =
        (0..10u32).map(|i| (0..16).map(|k| (37 * i * i + 11 * k + 5 * i * k) as u8).collect()).collect();
    let (mut p, mut q) = ([0; 16], [0; 16]);
    parity(&std::array::from_fn(|at| data[at].as_slice()), &mut p, &mut q);
    assert_eq!(p, GOLDEN_P);
    assert_eq!(q, GOLDEN_Q);
}

const GOLDEN_P: [u8; 16] =
    [0xe5, 0xde, 0x73, 0x2c, 0x79, 0xc2, 0x37, 0xd0, 0x7d, 0x86, 0xeb, 0xa4, 0x11, 0xaa, 0x2f, 0xa8];
const GOLDEN_Q: [u8; 16] =
    [0x9b, 0x87, 0xcd, 0x60, 0xee, 0x40, 0x7a, 0x6c, 0x72, 0xb1, 0x95, 0x8f, 0x59, 0xa6, 0x20, 0xc6];

#[test]
fn every_path_gives_the_same_parity_at_every_length() {
    for len in (0..200).chain([255, 256, 257, 1023, 4096, 11_400, 141_504]) {
        let shards = stripe(len);
        for path in Path::available() {
            // One byte more in front, so that nothing is aligned.
            let moved: Vec<Vec<u8>> = shards[..DATA].iter().map(|shard| [&[0], shard.as_slice()].concat()).collect();
            let (mut p, mut q) = (vec![0xee; len], vec![0xee; len]);
            parity_by(path, &std::array::from_fn(|at| &moved[at][1..]), &mut p, &mut q);
            assert!(p == shards[P] && q == shards[Q], "{path:?}, {len} bytes");
        }
    }
}

#[test]
fn every_pattern_of_one_and_two_losses_is_made_good() {
    for path in Path::available() {
        for len in [0, 1, 31, 33, 64, 127, 1000] {
            let shards = stripe(len);
            let mut patterns = 0;
            for first in 0..SHARDS {
                for second in first..SHARDS {
                    let lost: &[usize] = if first == second { &[first] } else { &[first, second] };
                    let there = without(&shards, lost);
                    // All that is lost, in both orders, and each alone.
                    let mut wishes = vec![lost.to_vec(), lost.iter().rev().copied().collect()];
                    wishes.extend(lost.iter().map(|at| vec![*at]));
                    for wish in wishes {
                        let mut out: Vec<(usize, Vec<u8>)> = wish.iter().map(|at| (*at, vec![0xaa; len])).collect();
                        let mut wanted: Vec<Wanted<'_>> =
                            out.iter_mut().map(|(at, out)| (*at, out.as_mut_slice())).collect();
                        rebuild_by(path, &there, &mut wanted).unwrap();
                        assert!(
                            out.iter().all(|(at, out)| *out == shards[*at]),
                            "{path:?}, {len} bytes, {lost:?} lost, {wish:?} wanted"
                        );
                    }
                    patterns += 1;
                }
            }
            assert_eq!(patterns, 12 + 66);
        }
    }
}

#[test]
fn three_losses_are_an_error_and_never_data() {
    let shards = stripe(100);
    for (a, b, c) in [(0, 1, 2), (0, 5, P), (3, P, Q), (7, 9, Q)] {
        let mut out = vec![0xaa; 100];
        let refused = rebuild(&without(&shards, &[a, b, c]), &mut [(a, &mut out)]);
        assert_eq!(refused, Err(TooManyLost { lost: 3 }));
        assert!(out.iter().all(|byte| *byte == 0xaa));
    }
    assert_eq!(TooManyLost { lost: 3 }.to_string(), "3 of 12 shards are lost, 2 can be rebuilt");
}

#[test]
#[should_panic(expected = "of one length")]
fn shards_of_different_lengths_are_refused() {
    let (long, short) = ([0u8; 64], [0u8; 63]);
    let data = std::array::from_fn(|at| if at == 4 { &short[..] } else { &long[..] });
    parity(&data, &mut [0; 64], &mut [0; 64]);
}

#[test]
fn an_object_is_cut_into_ten_shards_of_whole_units() {
    for (len, shard) in [(0, 0), (1, 64), (640, 64), (641, 128), (1_415_040, 141_504), (114_000, 11_456)] {
        let stripe = Stripe::of(len);
        assert_eq!(stripe.shard(), shard, "{len}");
        assert_eq!(stripe.padding(), shard * 10 - len);
        let mut at = 0;
        for data in 0..DATA {
            assert_eq!(stripe.range(data).start, at);
            at = stripe.range(data).end;
            assert!(stripe.range(data).len() <= shard);
        }
        assert_eq!(at, len);
    }
    assert_eq!(Stripe::of(1_415_040).padding(), 0);
    let stripe = Stripe::of(6400);
    assert_eq!(stripe.covering(&(0..6400)), 0..10);
    assert_eq!(stripe.covering(&(639..641)), 0..2);
    assert_eq!(stripe.covering(&(640..1280)), 1..2);
    assert_eq!(stripe.covering(&(0..0)), 0..0);
}

#[test]
fn the_affine_matrix_is_the_product() {
    // What the instruction does, on paper: bit i of the result is the parity of byte 7 − i of the matrix and the operand.
    #[cfg(target_arch = "x86_64")]
    for factor in 0..=255u8 {
        let rows = x86::matrix(factor).to_le_bytes();
        for operand in 0..=255u8 {
            let result = (0..8).fold(0, |sum, i| sum | ((rows[7 - i] & operand).count_ones() as u8 & 1) << i);
            assert_eq!(result, field::product(factor, operand));
        }
    }
}
