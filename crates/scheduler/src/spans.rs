//! Spans: positions of a prompt that one chunk computes together, such as the rows of an image.

use crate::chunk_policy::ChunkPolicy;
use crate::config::Limits;
use crate::prepared::Reject;
use std::ops::Range;

/// Longest span that is never kept waiting for good: a step has that many rows beside the rows and drafts of every other sequence.
pub(crate) fn longest(limits: &Limits, chunk: &ChunkPolicy) -> u32 {
    let others = u64::from(limits.max_num_seqs.saturating_sub(1)) * (1 + u64::from(limits.max_draft));
    let room = u64::from(limits.max_num_batched_tokens).saturating_sub(others) as u32;
    match *chunk {
        ChunkPolicy::Tokens(most) if most > 0 => room.min(most),
        _ => room,
    }
}

/// Checks the spans of a prompt of `prompt` tokens.
pub(crate) fn check(spans: &[Range<u32>], prompt: u32, longest: u32) -> Result<(), Reject> {
    let mut from = 0;
    for span in spans {
        if span.start < from || span.end <= span.start || span.end > prompt {
            return Err(Reject::Conflict(
                "spans lie within the prompt, in order, without overlap, and hold at least one token each",
            ));
        }
        from = span.end;
        let len = span.end - span.start;
        if len > longest {
            return Err(Reject::SpanTooLong { len, most: longest });
        }
    }
    Ok(())
}

/// Rows of a chunk that would have `rows` behind `planned`: it ends before a span that it would cut, and a span that it starts in
/// is taken whole, or not at all if it has more rows than `most`. At `stop` everything ends.
pub(crate) fn whole(spans: &[Range<u32>], planned: u32, rows: u32, most: u32, stop: u32) -> u32 {
    let end = planned + rows;
    let cut = spans.partition_point(|span| span.end.min(stop) <= end);
    let Some(span) = spans.get(cut).filter(|span| span.start < end) else { return rows };
    if span.start > planned {
        return span.start - planned;
    }
    let needed = span.end.min(stop) - planned;
    if needed <= most { needed } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_chunk_ends_before_a_span_it_would_cut_or_takes_it_whole() {
        let spans = [10..20, 20..24, 30..31];
        for (planned, rows, most, expected) in [
            (0, 10, 64, 10),
            (0, 11, 64, 10),
            (0, 20, 64, 20),
            (0, 22, 64, 20),
            (10, 1, 64, 10),
            (10, 12, 64, 10),
            (10, 9, 9, 0),
            (12, 3, 8, 8),
            (12, 3, 7, 0),
            (20, 2, 3, 0),
            (24, 6, 6, 6),
            (24, 40, 64, 40),
        ] {
            assert_eq!(whole(&spans, planned, rows, most, 100), expected, "{planned} {rows} {most}");
        }
    }

    #[test]
    fn a_fork_stops_within_the_span_that_ends_its_prompt() {
        let spans = [2..4, 10..20];
        assert_eq!(whole(&spans, 0, 19, 64, 19), 19);
        assert_eq!(whole(&spans, 10, 4, 64, 19), 9);
        assert_eq!(whole(&spans, 19, 1, 64, 20), 1);
    }

    proptest! {
        #[test]
        fn no_cut_is_left_and_whatever_fits_goes_on(
            lens in prop::collection::vec((0u32..5, 1u32..9), 0..6), planned in 0u32..60, rows in 1u32..30, extra in 0u32..10,
        ) {
            let mut at = 0;
            let spans: Vec<_> = lens.iter().map(|&(gap, len)| { at += gap + len; at - len..at }).collect();
            let most = rows + extra;
            let got = whole(&spans, planned, rows, most, 1000);
            let end = planned + got;
            prop_assert!(got <= most);
            prop_assert!(got == 0 || spans.iter().all(|s| end <= s.start || end >= s.end));
            if got == 0 {
                prop_assert!(spans.iter().any(|s| s.start <= planned && planned < s.end && s.end - planned > most));
            }
        }
    }
}
