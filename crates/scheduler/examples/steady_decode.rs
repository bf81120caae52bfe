//! Steady decode of 256 sequences for an instruction count: `steady_decode STEPS [decode | decode_overlap | drafts_6]`.
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
    let mode = std::env::args().nth(2).unwrap_or_else(|| "decode".to_owned());
    let (draft, depth) = match mode.as_str() {
        "drafts_6" => (5, 1),
        "decode_overlap" => (0, 2),
        _ => (0, 1),
    };
    // One pool for every count of steps, so that building it is not counted as a step's.
    let blocks = SEQS * (load::PROMPT + BLOCK + (1 + draft) * steps.max(384) + 64).div_ceil(BLOCK) + 64;
    let shape = Shape { blocks, tokens: SEQS * load::PROMPT, draft, depth, ..Shape::default() };
    let mut load = decoding(&shape, true, 8000);
    let before = load.scheduler.snapshot();
    for _ in 0..steps {
        if draft > 0 {
            load.propose();
        }
        load.step(|n| if draft > 0 { 1 + (n * 7 % 6) as i32 } else { 1 });
    }
    let after = load.scheduler.snapshot();
    let rows = after.decode_rows - before.decode_rows;
    println!("{mode}: {SEQS} sequences, {steps} steps, {rows} rows");
}
