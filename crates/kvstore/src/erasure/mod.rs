//! Erasure coding 10 + 2: twelve shards of which any ten give the bytes back.
//!
//! Owns: the field, the parity and the rebuilding of lost shards, and the geometry of a stripe. Knows no input or output.
//!
//! The code is the one of RAID 6 over GF(2⁸) with the polynomial 0x11d and g = 2: P = Σ dᵢ, Q = Σ gⁱ·dᵢ (H. P. Anvin, "The mathematics
//! of RAID-6"). These are the bytes that ISA-L's `gf_gen_rs_matrix` gives for ten data and two parity shards, so that any tool that
//! speaks that code can read a stripe.
//!
//! It makes losses good, it does not find errors: which shard is wrong is known by its checksum only, and a wrong one counts as lost.

mod field;
mod scalar;
mod stripe;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use stripe::Stripe;

/// Data shards of a stripe.
pub const DATA: usize = 10;
/// Parity shards of a stripe, and the losses it survives.
pub const PARITY: usize = 2;
/// Shards of a stripe: data, then P, then Q.
pub const SHARDS: usize = DATA + PARITY;
/// Position of P, the sum.
pub const P: usize = DATA;
/// Position of Q, the weighted sum.
pub const Q: usize = DATA + 1;

/// More shards are lost than the code makes good.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{lost} of {SHARDS} shards are lost, {PARITY} can be rebuilt")]
pub struct TooManyLost {
    /// How many.
    pub lost: usize,
}

/// A way to compute; all give the same bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// One byte at a time, on any processor; what the others are tested against.
    Scalar,
    /// 32 bytes at a time: doubling by comparison and mask, products by two look-ups of half a byte.
    Avx2,
    /// 64 bytes at a time: every product is one affine transform of bits.
    Gfni,
}

impl Path {
    /// All that this processor can run, the fastest last.
    pub fn available() -> Vec<Self> {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = std::arch::is_x86_feature_detected!("avx2");
            let gfni = std::arch::is_x86_feature_detected!("avx512bw") && std::arch::is_x86_feature_detected!("gfni");
            [(true, Self::Scalar), (avx2, Self::Avx2), (gfni, Self::Gfni)]
                .into_iter()
                .filter_map(|(has, path)| has.then_some(path))
                .collect()
        }
        #[cfg(not(target_arch = "x86_64"))]
        vec![Self::Scalar]
    }

    /// The fastest one, found once.
    pub fn best() -> Self {
        static BEST: std::sync::OnceLock<Path> = std::sync::OnceLock::new();
        *BEST.get_or_init(|| Self::available().last().copied().unwrap_or(Self::Scalar))
    }
}

/// Writes the parity of ten data shards.
///
/// # Panics
/// When lengths differ.
pub fn parity(data: &[&[u8]; DATA], p: &mut [u8], q: &mut [u8]) {
    parity_by(Path::best(), data, p, q);
}

/// [`parity`] by a path of choice; one that this processor lacks falls back to the scalar one.
///
/// # Panics
/// When lengths differ.
pub fn parity_by(path: Path, data: &[&[u8]; DATA], p: &mut [u8], q: &mut [u8]) {
    let shards = data.map(Some);
    compute(path, &shards, &mut Work::Both { p, q });
}

/// A shard to be rebuilt: its position and where its bytes go.
pub type Wanted<'a> = (usize, &'a mut [u8]);

/// Rebuilds shards that are not there (`None`) from those that are. Not all that is missing must be wanted: a reader of data that has
/// not asked for Q does not pay for it.
///
/// # Errors
/// [`TooManyLost`] when more than two shards are missing.
///
/// # Panics
/// When lengths differ, or a wanted shard is there, is no shard or is named twice.
pub fn rebuild(shards: &[Option<&[u8]>; SHARDS], wanted: &mut [Wanted<'_>]) -> Result<(), TooManyLost> {
    rebuild_by(Path::best(), shards, wanted)
}

/// [`rebuild`] by a path of choice; one that this processor lacks falls back to the scalar one.
///
/// # Errors
/// As [`rebuild`].
///
/// # Panics
/// As [`rebuild`].
pub fn rebuild_by(path: Path, shards: &[Option<&[u8]>; SHARDS], wanted: &mut [Wanted<'_>]) -> Result<(), TooManyLost> {
    let lost = shards.iter().filter(|shard| shard.is_none()).count();
    if lost > PARITY {
        return Err(TooManyLost { lost });
    }
    wanted.sort_unstable_by_key(|(at, _)| *at);
    for at in 0..wanted.len() {
        assert!(shards[wanted[at].0].is_none(), "shard {} is there", wanted[at].0);
        assert!(at == 0 || wanted[at - 1].0 < wanted[at].0, "shard {} is wanted twice", wanted[at].0);
    }
    let mut data: [Option<&[u8]>; DATA] = [None; DATA];
    data.copy_from_slice(&shards[..DATA]);
    let (p, q) = (shards[P], shards[Q]);
    match wanted {
        [] => {}
        // The data are there: parity is computed as at the first time.
        [(P, p)] if data.iter().all(Option::is_some) => compute(path, &data, &mut Work::Sum { add: None, out: p }),
        [(Q, q)] if data.iter().all(Option::is_some) => {
            compute(path, &data, &mut Work::Weighted { add: None, factor: 1, out: q });
        }
        [(P, p), (Q, q)] => compute(path, &data, &mut Work::Both { p, q }),
        [(x, first), (y, second)] if *y < DATA => two(path, &data, (p, q), (*x, *y), first, second),
        // One of the data and one parity: the data first, then the parity from all of them.
        [(x, out), (parity, second)] => {
            one(path, &data, (p, q), *x, out);
            data[*x] = Some(out);
            match *parity {
                P => compute(path, &data, &mut Work::Sum { add: None, out: second }),
                _ => compute(path, &data, &mut Work::Weighted { add: None, factor: 1, out: second }),
            }
        }
        // One is wanted and another of the data is missing too: that one has to be made on the way.
        [(wanted, out)] => {
            let other = (0..DATA).find(|at| data[*at].is_none() && at != wanted);
            let Some(other) = other else {
                one(path, &data, (p, q), *wanted, out);
                return Ok(());
            };
            let mut spare = vec![0; out.len()];
            match *wanted {
                P | Q => {
                    one(path, &data, (p, q), other, &mut spare);
                    data[other] = Some(&spare);
                    match *wanted {
                        P => compute(path, &data, &mut Work::Sum { add: None, out }),
                        _ => compute(path, &data, &mut Work::Weighted { add: None, factor: 1, out }),
                    }
                }
                x if x < other => two(path, &data, (p, q), (x, other), out, &mut spare),
                x => two(path, &data, (p, q), (other, x), &mut spare, out),
            }
        }
        _ => unreachable!("at most two are missing, and each wanted one is"),
    }
    Ok(())
}

/// The only missing one of the data, by P where it is there, else by Q.
fn one(path: Path, data: &[Option<&[u8]>; DATA], (p, q): (Option<&[u8]>, Option<&[u8]>), x: usize, out: &mut [u8]) {
    match (p, q) {
        (Some(_), _) => compute(path, data, &mut Work::Sum { add: p, out }),
        _ => compute(path, data, &mut Work::Weighted { add: q, factor: field::power(255 - x), out }),
    }
}

/// Two missing ones of the data, x < y: `dx = A·(P ⊕ Pxy) ⊕ B·(Q ⊕ Qxy)`, `dy = P ⊕ Pxy ⊕ dx`, with Pxy and Qxy of those that are
/// there, `A = gʸ⁻ˣ / (gʸ⁻ˣ ⊕ 1)`, `B = g⁻ˣ / (gʸ⁻ˣ ⊕ 1)`.
#[expect(clippy::many_single_char_names, reason = "the names of the formula")]
fn two(
    path: Path,
    data: &[Option<&[u8]>; DATA],
    (p, q): (Option<&[u8]>, Option<&[u8]>),
    (x, y): (usize, usize),
    first: &mut [u8],
    second: &mut [u8],
) {
    let (Some(p), Some(q)) = (p, q) else { unreachable!("two of the data are missing, so both parities are there") };
    let gap = field::power(y - x);
    let over = field::inverse(gap ^ 1);
    let (a, b) = (field::product(gap, over), field::product(field::power(255 - x), over));
    compute(path, data, &mut Work::Two { p, q, a, b, first, second });
}

/// What is computed from the data that are there; missing ones count as zero.
enum Work<'a> {
    /// P and Q.
    Both { p: &'a mut [u8], q: &'a mut [u8] },
    /// Σ dᵢ ⊕ add.
    Sum { add: Option<&'a [u8]>, out: &'a mut [u8] },
    /// factor · (Σ gⁱ·dᵢ ⊕ add).
    Weighted { add: Option<&'a [u8]>, factor: u8, out: &'a mut [u8] },
    /// Both missing data shards.
    Two { p: &'a [u8], q: &'a [u8], a: u8, b: u8, first: &'a mut [u8], second: &'a mut [u8] },
}

impl Work<'_> {
    /// The length of its outputs.
    fn len(&self) -> usize {
        match self {
            Self::Both { p, .. } => p.len(),
            Self::Sum { out, .. } | Self::Weighted { out, .. } => out.len(),
            Self::Two { first, .. } => first.len(),
        }
    }

    /// Whether all its buffers have this length.
    fn is_of(&self, len: usize) -> bool {
        match self {
            Self::Both { p, q } => p.len() == len && q.len() == len,
            Self::Sum { add, out } | Self::Weighted { add, out, .. } => {
                out.len() == len && add.is_none_or(|add| add.len() == len)
            }
            Self::Two { p, q, first, second, .. } => [p.len(), q.len(), first.len(), second.len()] == [len; 4],
        }
    }
}

fn compute(path: Path, data: &[Option<&[u8]>; DATA], work: &mut Work<'_>) {
    let len = work.len();
    // What the vector paths rely on.
    assert!(
        work.is_of(len) && data.iter().flatten().all(|shard| shard.len() == len),
        "the shards of a stripe are of one length"
    );
    // Whole vectors first, the rest by the scalar path.
    let done = match path {
        #[cfg(target_arch = "x86_64")]
        Path::Avx2 if std::arch::is_x86_feature_detected!("avx2") => {
            // SAFETY: the processor has AVX2; all lengths are equal, asserted above.
            unsafe { x86::avx2(data, work) }
        }
        #[cfg(target_arch = "x86_64")]
        Path::Gfni
            if std::arch::is_x86_feature_detected!("avx512bw") && std::arch::is_x86_feature_detected!("gfni") =>
        {
            // SAFETY: the processor has AVX-512 F and BW and GFNI; all lengths are equal, asserted above.
            unsafe { x86::gfni(data, work) }
        }
        _ => 0,
    };
    scalar::compute(data, work, done);
}
