//! Short runs of words in whole vectors: one store where a loop would count, at the price of a few words behind the run.
//!
//! Only for places where what lies behind the run is written later, or means nothing.

/// Words of a run that are written at once.
pub(crate) const WIDE: usize = 8;

/// Writes `n` consecutive numbers to the head of `to`, and maybe a few behind them.
#[inline]
pub(crate) fn count_up(to: &mut [i32], n: usize, first: i32) {
    if n <= WIDE
        && let Some(wide) = to.first_chunk_mut::<WIDE>()
    {
        *wide = std::array::from_fn(|k| first.wrapping_add(k as i32));
        return;
    }
    for (to, number) in to[..n].iter_mut().zip(first..) {
        *to = number;
    }
}

/// Writes the first `n` words of `from` to the head of `to`, and maybe a few behind them.
#[inline]
pub(crate) fn copy_few<A: Copy, B>(to: &mut [B], from: &[A], n: usize, cast: impl Fn(A) -> B) {
    if n <= WIDE
        && let (Some(to), Some(from)) = (to.first_chunk_mut::<WIDE>(), from.first_chunk::<WIDE>())
    {
        *to = from.map(cast);
        return;
    }
    for (to, &from) in to[..n].iter_mut().zip(&from[..n]) {
        *to = cast(from);
    }
}

/// Whether one of the first `n` tokens is among `stops`, of which the first negative one ends the list.
#[inline]
pub(crate) fn any_stop(tokens: &[i32], n: usize, stops: &[i32]) -> bool {
    let mut stops = stops.iter().take_while(|&&stop| stop >= 0);
    let Some(wide) = tokens.first_chunk::<WIDE>().filter(|_| n <= WIDE) else {
        return stops.any(|stop| tokens[..n].contains(stop));
    };
    // Asked of all eight first, which takes no branch for each.
    stops.any(|stop| {
        let any = wide.iter().fold(0, |any, token| any | i32::from(token == stop));
        any != 0 && wide[..n].contains(stop)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_every_length_are_whole_wherever_they_end() {
        for room in [0, 1, 7, 8, 9, 20] {
            for n in 0..=room {
                let mut to = vec![-1; room];
                count_up(&mut to, n, 5);
                assert!(to[..n].iter().copied().eq((5..).take(n)));
                let from: Vec<u32> = (0..room as u32).collect();
                copy_few(&mut to, &from, n, |word| word as i32 + 3);
                assert!(to[..n].iter().copied().eq((3..).take(n)));
                copy_few(&mut to, &from[..n], n, |word| word as i32 + 4);
                assert!(to[..n].iter().copied().eq((4..).take(n)), "a source that ends with the run");
            }
        }
    }

    #[test]
    fn a_stop_counts_within_the_run_only() {
        for len in [1, 6, 8, 12] {
            for at in 0..len {
                for (token, stop) in [(2, true), (9, true), (-1, false), (50, false)] {
                    let mut tokens = vec![50; len];
                    tokens[at] = token;
                    for n in 0..=len {
                        assert_eq!(any_stop(&tokens, n, &[2, 9, -1, -1]), stop && at < n, "{tokens:?} {n}");
                    }
                }
            }
        }
    }
}
