//! Steady decode of 256 sequences for an instruction count: `steady_decode STEPS`.
//!
//! Run under callgrind with two step counts; the difference divided by steps and sequences is the cost of one sequence-step.

#![allow(clippy::print_stdout)]

#[path = "../benches/load/mod.rs"]
mod load;

use load::{Shape, decoding};

const SEQS: u32 = 256;
const BLOCK: u32 = 64;

fn main() {
    let steps: u32 = std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(256);
    let blocks = SEQS * (load::PROMPT + BLOCK + steps + 64).div_ceil(BLOCK) + 64;
    let shape = Shape { seqs: SEQS, block: BLOCK, blocks, tokens: SEQS * load::PROMPT, ..Shape::default() };
    let mut load = decoding(&shape, true, 8000);
    let before = load.scheduler.snapshot().output_tokens;
    for _ in 0..steps {
        load.step(|_| 1);
    }
    let made = load.scheduler.snapshot().output_tokens - before;
    println!("{SEQS} sequences, {steps} steps, {made} tokens");
}
