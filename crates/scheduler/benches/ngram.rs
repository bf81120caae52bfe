//! Prompt lookup: one pass over 256 decoding sequences of 8k tokens each, whose history repeats in part.

#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::cast_precision_loss)]

use deepinfer_scheduler::{NgramConfig, NgramIndex};
use std::time::Instant;

const SEQS: usize = 256;
const TOKENS: usize = 8192;
const STEPS: usize = 400;

fn main() {
    for (name, vocab) in [("49,152 words", 49_152u64), ("256 words", 256), ("8 words, every lookup at its bound", 8)] {
        let config = NgramConfig::default();
        let mut state = 7u64;
        let mut word = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 33) % vocab) as u32
        };
        let mut histories: Vec<Vec<u32>> = (0..SEQS)
            .map(|_| {
                let mut tokens = Vec::with_capacity(TOKENS + STEPS);
                tokens.extend((0..TOKENS).map(|_| word()));
                tokens
            })
            .collect();
        let mut indices: Vec<NgramIndex> = (0..SEQS).map(|_| NgramIndex::default()).collect();
        let begin = Instant::now();
        for (index, tokens) in indices.iter_mut().zip(&histories) {
            index.reset(TOKENS + STEPS);
            index.enter(tokens, config.shortest as usize, TOKENS);
        }
        let entered = begin.elapsed().as_nanos() as f64 / (SEQS * TOKENS) as f64;
        let mut times = Vec::with_capacity(STEPS);
        let mut found = 0;
        for step in 0..STEPS {
            for (seq, tokens) in histories.iter_mut().enumerate() {
                // Half of the tokens go on copying an old place, as drafts want it.
                let token = if (step + seq) % 64 < 32 { tokens[(seq * 31 + step) % TOKENS] } else { word() };
                tokens.push(token);
            }
            let begin = Instant::now();
            for (index, tokens) in indices.iter_mut().zip(&histories) {
                index.enter(tokens, config.shortest as usize, TOKENS);
                found += usize::from(index.find(tokens, &config).is_some());
            }
            times.push(begin.elapsed().as_nanos() as f64 / 1e3);
        }
        times.sort_by(f64::total_cmp);
        let share = found as f64 / (SEQS * STEPS) as f64;
        let (median, p99) = (times[STEPS / 2], times[STEPS * 99 / 100]);
        println!(
            "{name}: {median:.1} us a pass (p99 {p99:.1}), a match for {share:.2} of the lookups; {entered:.1} ns to enter a position"
        );
    }
}
