//! The vector paths of x86: the same computation for AVX2 and for AVX-512 with GFNI, over what differs between them.
#![expect(
    clippy::inline_always,
    reason = "an instruction set is switched on for a whole function: what it is made of must be inlined"
)]

use std::arch::x86_64::{
    __m256i, __m512i, _mm256_add_epi8, _mm256_and_si256, _mm256_cmpgt_epi8, _mm256_loadu_si256, _mm256_set1_epi8,
    _mm256_setzero_si256, _mm256_shuffle_epi8, _mm256_srli_epi64, _mm256_storeu_si256, _mm256_xor_si256,
    _mm512_gf2p8affine_epi64_epi8, _mm512_loadu_si512, _mm512_set1_epi64, _mm512_storeu_si512, _mm512_xor_si512,
};

use super::field::product;
use super::{DATA, Work};

/// A vector of bytes and what is done to it.
///
/// All its functions are inlined into one that has the processor's features switched on, and may only be called from there.
trait Vector: Copy {
    /// A constant factor, prepared.
    type Factor: Copy;
    const BYTES: usize;
    unsafe fn load(from: *const u8) -> Self;
    unsafe fn store(self, to: *mut u8);
    unsafe fn xor(self, other: Self) -> Self;
    unsafe fn factor(factor: u8) -> Self::Factor;
    unsafe fn times(self, factor: Self::Factor) -> Self;
    /// Times 2, by a factor prepared from 2 where that helps.
    unsafe fn double(self, two: Self::Factor) -> Self;
}

impl Vector for __m256i {
    /// Products of the low and of the high half of a byte.
    type Factor = (__m256i, __m256i);
    const BYTES: usize = 32;

    #[inline(always)]
    unsafe fn load(from: *const u8) -> Self {
        // SAFETY: the caller has 32 bytes there.
        unsafe { _mm256_loadu_si256(from.cast()) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut u8) {
        // SAFETY: the caller has 32 bytes there.
        unsafe { _mm256_storeu_si256(to.cast(), self) }
    }

    #[inline(always)]
    unsafe fn xor(self, other: Self) -> Self {
        // SAFETY: AVX2, as the trait says.
        unsafe { _mm256_xor_si256(self, other) }
    }

    #[inline(always)]
    unsafe fn factor(factor: u8) -> Self::Factor {
        let mut tables = [[0u8; 32]; 2];
        for half in 0..16u8 {
            for (table, shift) in tables.iter_mut().zip([0, 4]) {
                // Once for each half of the vector: the look-up does not cross them.
                let value = product(factor, half << shift);
                (table[usize::from(half)], table[usize::from(half) + 16]) = (value, value);
            }
        }
        // SAFETY: AVX2, and 32 bytes in each table.
        unsafe { (_mm256_loadu_si256(tables[0].as_ptr().cast()), _mm256_loadu_si256(tables[1].as_ptr().cast())) }
    }

    #[inline(always)]
    unsafe fn times(self, (low, high): Self::Factor) -> Self {
        // SAFETY: AVX2, as the trait says.
        unsafe {
            let half = _mm256_set1_epi8(0x0f);
            let low = _mm256_shuffle_epi8(low, _mm256_and_si256(self, half));
            let high = _mm256_shuffle_epi8(high, _mm256_and_si256(_mm256_srli_epi64::<4>(self), half));
            _mm256_xor_si256(low, high)
        }
    }

    #[inline(always)]
    unsafe fn double(self, _: Self::Factor) -> Self {
        // SAFETY: AVX2, as the trait says.
        unsafe {
            // Bytes whose highest bit is set are negative.
            let overflow = _mm256_cmpgt_epi8(_mm256_setzero_si256(), self);
            _mm256_xor_si256(_mm256_add_epi8(self, self), _mm256_and_si256(overflow, _mm256_set1_epi8(0x1d)))
        }
    }
}

impl Vector for __m512i {
    /// The bit matrix of the product.
    type Factor = __m512i;
    const BYTES: usize = 64;

    #[inline(always)]
    unsafe fn load(from: *const u8) -> Self {
        // SAFETY: the caller has 64 bytes there.
        unsafe { _mm512_loadu_si512(from.cast()) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut u8) {
        // SAFETY: the caller has 64 bytes there.
        unsafe { _mm512_storeu_si512(to.cast(), self) }
    }

    #[inline(always)]
    unsafe fn xor(self, other: Self) -> Self {
        // SAFETY: AVX-512 F, as the trait says.
        unsafe { _mm512_xor_si512(self, other) }
    }

    #[inline(always)]
    unsafe fn factor(factor: u8) -> Self::Factor {
        // SAFETY: AVX-512 F, as the trait says.
        unsafe { _mm512_set1_epi64(matrix(factor) as i64) }
    }

    #[inline(always)]
    unsafe fn times(self, matrix: Self::Factor) -> Self {
        // SAFETY: AVX-512 F and GFNI, as the trait says.
        unsafe { _mm512_gf2p8affine_epi64_epi8::<0>(self, matrix) }
    }

    #[inline(always)]
    unsafe fn double(self, two: Self::Factor) -> Self {
        // SAFETY: AVX-512 F and GFNI, as the trait says.
        unsafe { self.times(two) }
    }
}

/// Multiplication by a constant as a matrix over bits, as the affine instruction takes it: bit i of the product is the parity of byte
/// 7 − i of the matrix and the operand. (The product instruction itself knows only the field of 0x11b.)
pub(super) fn matrix(factor: u8) -> u64 {
    let mut rows = [0u8; 8];
    for bit in 0..8 {
        let column = product(factor, 1 << bit);
        for (i, row) in rows.iter_mut().rev().enumerate() {
            *row |= ((column >> i) & 1) << bit;
        }
    }
    u64::from_le_bytes(rows)
}

/// Does the whole vectors and returns how many bytes that was.
///
/// # Safety
/// The processor has AVX2, and all shards and buffers are of one length.
#[target_feature(enable = "avx2")]
pub unsafe fn avx2(data: &[Option<&[u8]>; DATA], work: &mut Work<'_>) -> usize {
    // SAFETY: as of this function.
    unsafe { compute::<__m256i>(data, work) }
}

/// Does the whole vectors and returns how many bytes that was.
///
/// # Safety
/// The processor has AVX-512 F and BW and GFNI, and all shards and buffers are of one length.
#[target_feature(enable = "avx512f,avx512bw,gfni")]
pub unsafe fn gfni(data: &[Option<&[u8]>; DATA], work: &mut Work<'_>) -> usize {
    // SAFETY: as of this function.
    unsafe { compute::<__m512i>(data, work) }
}

/// What stands for a missing shard.
static ZEROS: [u8; 64] = [0; 64];

/// Where the data lie. A missing shard is a vector of zeros that is read again and again: its offsets are masked away, which costs less
/// than a branch.
#[derive(Clone, Copy)]
struct Shards([(*const u8, usize); DATA]);

impl Shards {
    fn new(data: &[Option<&[u8]>; DATA]) -> Self {
        Self(data.map(|shard| shard.map_or((ZEROS.as_ptr(), 0), |shard| (shard.as_ptr(), usize::MAX))))
    }

    /// Σ dᵢ.
    #[inline(always)]
    unsafe fn sum<V: Vector>(&self, at: usize) -> V {
        // SAFETY: a whole vector lies at `at` of each shard, by the caller, and at the start of the zeros.
        unsafe {
            let mut sum = V::load(self.0[0].0.add(at & self.0[0].1));
            for (shard, mask) in &self.0[1..] {
                sum = sum.xor(V::load(shard.add(at & mask)));
            }
            sum
        }
    }

    /// Σ dᵢ and Σ gⁱ·dᵢ, the latter by Horner's rule.
    #[inline(always)]
    unsafe fn both<V: Vector>(&self, at: usize, two: V::Factor) -> (V, V) {
        // SAFETY: as in `sum`.
        unsafe {
            let (last, mask) = self.0[DATA - 1];
            let mut sum = V::load(last.add(at & mask));
            let mut weighted = sum;
            for (shard, mask) in self.0[..DATA - 1].iter().rev() {
                let bytes = V::load(shard.add(at & mask));
                sum = sum.xor(bytes);
                weighted = weighted.double(two).xor(bytes);
            }
            (sum, weighted)
        }
    }
}

#[expect(clippy::many_single_char_names, reason = "the names of the formula")]
#[inline(always)]
unsafe fn compute<V: Vector>(data: &[Option<&[u8]>; DATA], work: &mut Work<'_>) -> usize {
    let whole = work.len() / V::BYTES * V::BYTES;
    let shards = Shards::new(data);
    // SAFETY: every pointer has at least `whole` bytes behind it, outputs are exclusive borrows, and the features are the caller's.
    unsafe {
        let two = V::factor(2);
        match work {
            Work::Both { p, q } => {
                let (p, q) = (p.as_mut_ptr(), q.as_mut_ptr());
                for at in (0..whole).step_by(V::BYTES) {
                    let (sum, weighted) = shards.both::<V>(at, two);
                    sum.store(p.add(at));
                    weighted.store(q.add(at));
                }
            }
            Work::Sum { add, out } => {
                let (add, mask) = add.map_or((ZEROS.as_ptr(), 0), |add| (add.as_ptr(), usize::MAX));
                let out = out.as_mut_ptr();
                for at in (0..whole).step_by(V::BYTES) {
                    shards.sum::<V>(at).xor(V::load(add.add(at & mask))).store(out.add(at));
                }
            }
            Work::Weighted { add, factor, out } => {
                let (add, mask) = add.map_or((ZEROS.as_ptr(), 0), |add| (add.as_ptr(), usize::MAX));
                let (factor, out) = (V::factor(*factor), out.as_mut_ptr());
                for at in (0..whole).step_by(V::BYTES) {
                    let (_, weighted) = shards.both::<V>(at, two);
                    weighted.xor(V::load(add.add(at & mask))).times(factor).store(out.add(at));
                }
            }
            Work::Two { p, q, a, b, first, second } => {
                let (p, q, first, second) = (p.as_ptr(), q.as_ptr(), first.as_mut_ptr(), second.as_mut_ptr());
                let (a, b) = (V::factor(*a), V::factor(*b));
                for at in (0..whole).step_by(V::BYTES) {
                    let (sum, weighted) = shards.both::<V>(at, two);
                    let rest = sum.xor(V::load(p.add(at)));
                    let x = rest.times(a).xor(weighted.xor(V::load(q.add(at))).times(b));
                    x.store(first.add(at));
                    rest.xor(x).store(second.add(at));
                }
            }
        }
    }
    whole
}
