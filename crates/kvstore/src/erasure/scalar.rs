//! Plain loops over bytes: the reference of the vector paths, what finishes their odd tails, and the path of other processors, for
//! which the compiler makes vectors of them.

use super::field::{double, product};
use super::{DATA, Work};

/// Bytes at a time, which stay in registers or nearly so.
const PIECE: usize = 64;

/// Does the bytes from `from` on.
pub fn compute(data: &[Option<&[u8]>; DATA], work: &mut Work<'_>, from: usize) {
    let mut at = from;
    while at < work.len() {
        let piece = at..work.len().min(at + PIECE);
        at = piece.end;
        let mut sum = [0; PIECE];
        let mut weighted = [0; PIECE];
        // Horner's rule, from the highest power down.
        for shard in data.iter().rev() {
            for byte in &mut weighted {
                *byte = double(*byte);
            }
            if let Some(shard) = shard {
                add(&mut sum, &shard[piece.clone()]);
                add(&mut weighted, &shard[piece.clone()]);
            }
        }
        let len = piece.len();
        match work {
            Work::Both { p, q } => {
                p[piece.clone()].copy_from_slice(&sum[..len]);
                q[piece].copy_from_slice(&weighted[..len]);
            }
            Work::Sum { add: more, out } => {
                if let Some(more) = more {
                    add(&mut sum, &more[piece.clone()]);
                }
                out[piece].copy_from_slice(&sum[..len]);
            }
            Work::Weighted { add: more, factor, out } => {
                if let Some(more) = more {
                    add(&mut weighted, &more[piece.clone()]);
                }
                times(&mut weighted, *factor);
                out[piece].copy_from_slice(&weighted[..len]);
            }
            Work::Two { p, q, a, b, first, second } => {
                add(&mut sum, &p[piece.clone()]);
                add(&mut weighted, &q[piece.clone()]);
                let rest = sum;
                times(&mut sum, *a);
                times(&mut weighted, *b);
                add(&mut sum, &weighted);
                first[piece.clone()].copy_from_slice(&sum[..len]);
                add(&mut sum, &rest);
                second[piece].copy_from_slice(&sum[..len]);
            }
        }
    }
}

fn add(to: &mut [u8; PIECE], bytes: &[u8]) {
    to.iter_mut().zip(bytes).for_each(|(to, byte)| *to ^= byte);
}

fn times(bytes: &mut [u8; PIECE], factor: u8) {
    for byte in bytes {
        *byte = product(*byte, factor);
    }
}
