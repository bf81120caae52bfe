//! What one step costs: `cargo bench -p deepinfer-scheduler [-- --json]`.
//!
//! Counted: one `schedule` and one `complete`, run serially, prefix caching on: reading the inbox, picking the rows,
//! blocks at block ends, hashing and publishing filled blocks, every step buffer, one token each, stop checks, outputs,
//! deferred release. Not counted: building and hashing a prompt (its caller's thread) and the worker. Best of 5 runs by the
//! median; µs.

#![allow(clippy::print_stdout, clippy::unwrap_used, clippy::cast_precision_loss)]

mod load;

use load::{Churn, Load, Shape, Step, decoding};
use std::time::Duration;

const RUNS: usize = 5;

struct Row {
    case: &'static str,
    seqs: u32,
    block: u32,
    schedule: f64,
    complete: f64,
    median: f64,
    p99: f64,
    max: f64,
    note: String,
}

fn us(d: Duration) -> f64 {
    d.as_nanos() as f64 / 1000.0
}

fn at(sorted: &[f64], quantile: f64) -> f64 {
    sorted[((sorted.len() - 1) as f64 * quantile).round() as usize]
}

fn sorted(times: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut times: Vec<f64> = times.collect();
    times.sort_by(f64::total_cmp);
    times
}

fn row(case: &'static str, seqs: u32, block: u32, steps: &[Step], note: String) -> Row {
    let total = sorted(steps.iter().map(|s| us(s.schedule + s.complete)));
    Row {
        case,
        seqs,
        block,
        schedule: at(&sorted(steps.iter().map(|s| us(s.schedule))), 0.5),
        complete: at(&sorted(steps.iter().map(|s| us(s.complete))), 0.5),
        median: at(&total, 0.5),
        p99: at(&total, 0.99),
        max: at(&total, 1.0),
        note,
    }
}

/// Best of the runs by the median.
fn best(mut run: impl FnMut() -> Row) -> Row {
    (0..RUNS).map(|_| run()).min_by(|a, b| a.median.total_cmp(&b.median)).unwrap()
}

fn steady(case: &'static str, seqs: u32, block: u32, even: bool) -> Row {
    best(|| {
        let steps = 2000;
        let blocks = seqs * (load::PROMPT + block + steps + 200).div_ceil(block) + 64;
        let shape = Shape { seqs, block, blocks, tokens: seqs.max(16) * load::PROMPT * 2, draft: 0, headroom: 16 };
        let mut load = decoding(&shape, even, 8000);
        for _ in 0..50 {
            load.step(|_| 1);
        }
        let times: Vec<Step> = (0..steps).map(|_| load.step(|_| 1)).collect();
        assert_eq!(load.scheduler.snapshot().decoding, u64::from(seqs));
        row(case, seqs, block, &times, String::new())
    })
}

fn admission(seqs: u32, block: u32) -> Row {
    best(|| {
        let blocks = seqs * (load::PROMPT + seqs).div_ceil(block) + 64;
        let shape = Shape { seqs, block, blocks, tokens: 8192, draft: 0, headroom: 16 };
        let mut churn = Churn::new(&shape);
        for _ in 0..3 * seqs {
            churn.step(seqs);
        }
        let before = churn.load.scheduler.snapshot();
        let times: Vec<Step> = (0..2000).map(|_| churn.step(seqs)).collect();
        let after = churn.load.scheduler.snapshot();
        let each = (after.admitted - before.admitted) as f64 / times.len() as f64;
        row("one in, one out", seqs, block, &times, format!("{each:.2} admissions a step"))
    })
}

/// Steps of a pool that holds half of what is asked for, preempting again and again.
fn tight(seqs: u32, block: u32) -> Row {
    best(|| {
        let blocks = seqs * (load::PROMPT + 128).div_ceil(block) / 2;
        let shape = Shape { seqs, block, blocks, tokens: 8192, draft: 0, headroom: 0 };
        let mut load = Load::new(&shape);
        for _ in 0..seqs {
            load.add(load::PROMPT, 4000);
        }
        for _ in 0..200 {
            load.step(|_| 1);
        }
        let before = load.scheduler.snapshot();
        let times: Vec<Step> = (0..1500).map(|_| load.step(|_| 1)).collect();
        let after = load.scheduler.snapshot();
        let each = (after.preemptions - before.preemptions) as f64 / times.len() as f64;
        row("pool of half", seqs, block, &times, format!("{each:.2} preemptions a step"))
    })
}

/// The one step in which every sequence needs a block and the pool has none.
fn storm(seqs: u32, block: u32) -> Row {
    best(|| {
        let blocks = seqs * load::PROMPT.div_ceil(block) + 5;
        let shape = Shape { seqs, block, blocks, tokens: seqs * load::PROMPT, draft: 0, headroom: 0 };
        let mut victims = 0;
        let times: Vec<Step> = (0..40)
            .map(|_| {
                let mut load = decoding(&shape, false, 4000);
                let step = load.step(|_| 1);
                victims = load.scheduler.snapshot().preemptions;
                step
            })
            .collect();
        assert!(victims > 0);
        row("preemption storm", seqs, block, &times, format!("{victims} preempted in the step"))
    })
}

fn waiting(seqs: u32, block: u32) -> Row {
    best(|| {
        let blocks = seqs * (load::PROMPT + block + 2400).div_ceil(block) + 64;
        let shape = Shape { seqs, block, blocks, tokens: seqs * load::PROMPT * 2, draft: 0, headroom: 16 };
        let mut load = decoding(&shape, true, 8000);
        for _ in 0..4096 {
            load.add(load::PROMPT, 16);
        }
        for _ in 0..50 {
            load.step(|_| 1);
        }
        let times: Vec<Step> = (0..2000).map(|_| load.step(|_| 1)).collect();
        assert_eq!(load.scheduler.snapshot().waiting, 4096);
        row("4096 waiting", seqs, block, &times, String::new())
    })
}

fn main() {
    let json = std::env::args().any(|a| a == "--json");
    let mut rows = Vec::new();
    for block in [16, 64] {
        for seqs in [16, 64, 256, 1024] {
            rows.push(steady("steady", seqs, block, true));
        }
    }
    for block in [16, 64] {
        rows.push(steady("all cross together", 256, block, false));
        rows.push(admission(256, block));
        rows.push(tight(256, block));
        rows.push(storm(256, block));
    }
    rows.push(waiting(256, 64));
    if json {
        let text: Vec<String> = rows.iter().map(json_row).collect();
        println!("{{\"rows\":[{}]}}", text.join(","));
        return;
    }
    println!(
        "{:<20}{:>6}{:>7}{:>10}{:>10}{:>9}{:>9}{:>9}  note",
        "case", "seqs", "block", "schedule", "complete", "both", "p99", "max"
    );
    for r in &rows {
        println!(
            "{:<20}{:>6}{:>7}{:>10.2}{:>10.2}{:>9.2}{:>9.2}{:>9.1}  {}",
            r.case, r.seqs, r.block, r.schedule, r.complete, r.median, r.p99, r.max, r.note
        );
    }
    let bar = rows.iter().find(|r| r.case == "steady" && r.seqs == 256 && r.block == 64).unwrap();
    let within = bar.median <= 6.0 && bar.p99 <= 3.0 * bar.median;
    println!("bar: 256 decoding at block 64 ≤ 6 µs, p99 ≤ 3 × median: {}", if within { "held" } else { "MISSED" });
}

fn json_row(r: &Row) -> String {
    format!(
        "{{\"case\":\"{}\",\"num_seqs\":{},\"block\":{},\"rust_us_median\":{:.3},\"rust_us_p99\":{:.3},\"rust_us_max\":{:.3},\
         \"schedule_us_median\":{:.3},\"complete_us_median\":{:.3},\"note\":\"{}\"}}",
        r.case, r.seqs, r.block, r.median, r.p99, r.max, r.schedule, r.complete, r.note
    )
}
