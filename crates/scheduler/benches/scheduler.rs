//! What one step costs: `cargo bench -p deepinfer-scheduler [-- --json]`.
//!
//! Counted: one `schedule` and one `complete`, run serially, prefix caching on: reading the inbox, picking the rows,
//! blocks at block ends, hashing and publishing filled blocks, every step buffer, one token each, stop checks, outputs,
//! deferred release. Not counted: building and hashing a prompt (its caller's thread) and the worker. Best of 5 runs by the
//! median; µs.

#![allow(clippy::print_stdout, clippy::unwrap_used, clippy::cast_precision_loss)]

mod load;

use deepinfer_scheduler::{GroupError, OneRank, StepVote, ThreadVote, VoteWords};
use load::{Churn, Load, Shape, Step, decoding};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

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
        let shape = Shape { seqs, block, blocks, tokens: seqs.max(16) * load::PROMPT * 2, ..Shape::default() };
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
        let shape = Shape { seqs, block, blocks, tokens: 8192, ..Shape::default() };
        let mut churn = Churn::new(&shape);
        for _ in 0..3 * seqs {
            churn.step(seqs);
        }
        let before = churn.load.scheduler.snapshot();
        let times: Vec<Step> = (0..2000).map(|_| churn.step(seqs)).collect();
        let after = churn.load.scheduler.snapshot();
        let each = (after.admitted - before.admitted) as f64 / times.len() as f64;
        row("admission", seqs, block, &times, format!("{each:.2} admissions a step"))
    })
}

/// Steps of a pool that holds half of what is asked for, preempting again and again.
fn tight(seqs: u32, block: u32) -> Row {
    best(|| {
        let blocks = seqs * (load::PROMPT + 128).div_ceil(block) / 2;
        let shape = Shape { seqs, block, blocks, tokens: 8192, headroom: 0, ..Shape::default() };
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
        row("tight_pool", seqs, block, &times, format!("{each:.2} preemptions a step"))
    })
}

/// The one step in which every sequence needs a block and the pool has none.
fn storm(seqs: u32, block: u32) -> Row {
    best(|| {
        let blocks = seqs * load::PROMPT.div_ceil(block) + 5;
        let shape = Shape { seqs, block, blocks, tokens: seqs * load::PROMPT, headroom: 0, ..Shape::default() };
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
        row("preemption_storm", seqs, block, &times, format!("{victims} preempted in the step"))
    })
}

fn waiting(seqs: u32, block: u32) -> Row {
    best(|| {
        let blocks = seqs * (load::PROMPT + block + 2400).div_ceil(block) + 64;
        let shape = Shape { seqs, block, blocks, tokens: seqs * load::PROMPT * 2, ..Shape::default() };
        let mut load = decoding(&shape, true, 8000);
        for _ in 0..4096 {
            load.add(load::PROMPT, 16);
        }
        for _ in 0..50 {
            load.step(|_| 1);
        }
        let times: Vec<Step> = (0..2000).map(|_| load.step(|_| 1)).collect();
        assert_eq!(load.scheduler.snapshot().waiting, 4096);
        row("waiting_4096", seqs, block, &times, String::new())
    })
}

/// Six rows a sequence of which 3.5 tokens come out; proposing is the drafter's, not counted.
fn drafts(seqs: u32, block: u32) -> Row {
    best(|| {
        let steps = 1000;
        let blocks = seqs * (load::PROMPT + block + 6 * steps).div_ceil(block) + 64;
        let tokens = seqs * load::PROMPT * 2;
        let shape = Shape { seqs, block, blocks, tokens, draft: 5, ..Shape::default() };
        let mut load = decoding(&shape, true, 8000);
        let keep = |n: u64| 1 + (n * 7 % 6) as i32;
        let mut times = Vec::new();
        let before = load.scheduler.snapshot();
        for step in 0..steps {
            load.propose();
            let time = load.step(keep);
            if step >= 50 {
                times.push(time);
            }
        }
        let after = load.scheduler.snapshot();
        let rows = (after.decode_rows - before.decode_rows) as f64 / f64::from(steps);
        let made = (after.output_tokens - before.output_tokens) as f64 / f64::from(steps * seqs);
        row("drafts_6", seqs, block, &times, format!("{rows:.0} rows, {made:.2} tokens a sequence"))
    })
}

/// One step behind the device: the plan of step n + 1 while n is in flight, ids as placeholders.
fn overlap(seqs: u32, block: u32) -> Row {
    best(|| {
        let steps = 2000;
        let blocks = seqs * (load::PROMPT + block + steps + 200).div_ceil(block) + 64;
        let tokens = seqs * load::PROMPT * 2;
        let shape = Shape { seqs, block, blocks, tokens, depth: 2, ..Shape::default() };
        let mut load = decoding(&shape, true, 8000);
        for _ in 0..50 {
            load.step(|_| 1);
        }
        let times: Vec<Step> = (0..steps).map(|_| load.step(|_| 1)).collect();
        assert_eq!(load.scheduler.snapshot().decoding, u64::from(seqs));
        row("decode_overlap", seqs, block, &times, "two steps in flight".to_owned())
    })
}

/// The step that meets aborts of everything: running and waiting.
fn abort_storm(seqs: u32, block: u32, waiting: u32) -> Row {
    best(|| {
        let blocks = seqs * (load::PROMPT + 128).div_ceil(block) + 64;
        let shape = Shape { seqs, block, blocks, tokens: seqs * load::PROMPT, ..Shape::default() };
        let times: Vec<Step> = (0..20)
            .map(|_| {
                let mut load = decoding(&shape, false, 4000);
                for _ in 0..waiting {
                    load.add(load::PROMPT, 16);
                }
                load.step(|_| 1);
                for &seq in &load.handles {
                    load.inbox.abort(seq).unwrap();
                }
                // One that stays, so that there is a step.
                load.add(load::PROMPT, 16);
                let step = load.step(|_| 1);
                assert_eq!(load.scheduler.snapshot().finished[2], u64::from(seqs + waiting));
                step
            })
            .collect();
        row("abort_storm", seqs, block, &times, format!("{} aborted in the step", seqs + waiting))
    })
}

/// Prompts of 64k tokens in chunks beside decoding sequences: 8,192 rows a step.
fn long_prompts(seqs: u32, block: u32) -> Row {
    best(|| {
        let (prompt, long) = (65_536, 8);
        let length = prompt + 4096;
        let blocks = (seqs * (load::PROMPT + 1024) + long * length).div_ceil(block) + seqs;
        let shape = Shape { seqs, block, blocks, length, ..Shape::default() };
        let mut load = Load::new(&shape);
        for _ in 0..seqs - long {
            load.add(load::PROMPT, 2000);
        }
        load.warm();
        for _ in 0..long {
            load.add(prompt, 16);
        }
        let before = load.scheduler.snapshot();
        let times: Vec<Step> = (0..60).map(|_| load.step(|_| 1)).collect();
        let after = load.scheduler.snapshot();
        let rows = (after.prefill_tokens - before.prefill_tokens) / 60;
        row("prompts_64k", seqs, block, &times, format!("{rows} prompt rows a step"))
    })
}

/// A rank's end that keeps the time spent in the collective itself.
struct Clocked {
    inner: ThreadVote,
    spent: Arc<AtomicU64>,
}

impl Clocked {
    fn time<T>(&mut self, call: impl FnOnce(&mut ThreadVote) -> T) -> T {
        let start = Instant::now();
        let result = call(&mut self.inner);
        self.spent.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
        result
    }
}

impl StepVote for Clocked {
    fn start(&mut self, words: VoteWords) -> Result<(), GroupError> {
        self.time(|vote| vote.start(words))
    }

    fn wait(&mut self) -> Result<VoteWords, GroupError> {
        self.time(StepVote::wait)
    }
}

/// A rank of a group of threads, the others with 16 sequences each: what a step costs without the collective.
fn vote(ranks: usize, seqs: u32, block: u32) -> Row {
    best(|| {
        let steps = 1000;
        let shape = |seqs: u32| {
            let blocks = seqs * (load::PROMPT + block + steps + 200).div_ceil(block) + 64;
            Shape { seqs, block, blocks, ..Shape::default() }
        };
        let done = Arc::new(Barrier::new(ranks));
        let mut ends = ThreadVote::group(ranks);
        let inner = ends.pop().unwrap();
        let start = |shape: Shape, end: Box<dyn StepVote>| {
            let mut load = decoding(&shape, true, 8000);
            load.scheduler.set_vote(end).unwrap();
            load
        };
        let others: Vec<_> = ends
            .into_iter()
            .map(|end| {
                let (done, shape) = (Arc::clone(&done), shape(16));
                std::thread::spawn(move || {
                    let mut load = start(shape, Box::new(end));
                    for _ in 0..steps {
                        load.step(|_| 1);
                    }
                    done.wait();
                })
            })
            .collect();
        let spent = Arc::new(AtomicU64::new(0));
        let mut load = start(shape(seqs), Box::new(Clocked { inner, spent: Arc::clone(&spent) }));
        let mut collective = Vec::new();
        let times: Vec<Step> = (0..steps)
            .map(|_| {
                let before = spent.load(Ordering::Relaxed);
                let mut step = load.step(|_| 1);
                let inside = Duration::from_nanos(spent.load(Ordering::Relaxed) - before);
                step.schedule = step.schedule.saturating_sub(inside);
                collective.push(us(inside));
                step
            })
            .collect();
        done.wait();
        for other in others {
            other.join().unwrap();
        }
        assert_eq!(load.scheduler.snapshot().decoding, u64::from(seqs));
        let median = at(&sorted(collective.into_iter()), 0.5);
        row(
            "vote_4_ranks",
            seqs,
            block,
            &times,
            format!("without the collective: {median:.1} in this group of threads"),
        )
    })
}

/// The vote without anybody to wait for: every step opens a round, reads the last one and plans by what was agreed. Also the
/// median of the same steps without a vote, run in turn with it.
fn vote_alone(seqs: u32, block: u32) -> (Row, f64) {
    let run = |vote: bool| {
        let steps = 1000;
        let blocks = seqs * (load::PROMPT + block + steps + 200).div_ceil(block) + 64;
        let mut load = decoding(&Shape { seqs, block, blocks, ..Shape::default() }, true, 8000);
        if vote {
            load.scheduler.set_vote(Box::new(OneRank::default())).unwrap();
        }
        let times: Vec<Step> = (0..steps).map(|_| load.step(|_| 1)).collect();
        assert!(!vote || load.scheduler.snapshot().votes.rounds + 1 >= u64::from(steps));
        row("vote_alone", seqs, block, &times, String::new())
    };
    let pairs: Vec<_> = (0..RUNS).map(|_| (run(true), run(false).median)).collect();
    let without = pairs.iter().map(|p| p.1).min_by(f64::total_cmp).unwrap();
    let mut with = pairs.into_iter().map(|p| p.0).min_by(|a, b| a.median.total_cmp(&b.median)).unwrap();
    with.note = format!("a collective that costs nothing; without a vote, in turn: {without:.2}");
    (with, without)
}

fn machine() -> (String, String) {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let cpu = read("/proc/cpuinfo");
    let model = cpu.lines().find(|line| line.starts_with("model name")).and_then(|line| line.split(": ").nth(1));
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let load = read("/proc/loadavg").split(' ').next().unwrap_or_default().to_owned();
    (format!("{}, {cores} cores", model.unwrap_or("unknown processor")), load)
}

const COUNTED: &str = "one schedule and one complete a step, serially, prefix caching on; not the worker, not building prompts; \
    best of 5 runs by the median";

fn main() {
    let json = std::env::args().any(|a| a == "--json");
    let mut rows = Vec::new();
    for block in [16, 64] {
        for seqs in [16, 64, 256, 1024] {
            rows.push(steady("decode", seqs, block, true));
        }
    }
    for block in [16, 64] {
        rows.push(steady("decode_all_cross", 256, block, false));
        rows.push(admission(256, block));
        rows.push(tight(256, block));
        rows.push(storm(256, block));
    }
    rows.push(waiting(256, 64));
    rows.push(overlap(256, 64));
    let (alone, without_vote) = vote_alone(256, 64);
    let vote_cost = alone.median - without_vote;
    rows.push(alone);
    rows.push(vote(4, 256, 64));
    rows.push(drafts(256, 64));
    rows.push(abort_storm(256, 64, 4096));
    rows.push(long_prompts(256, 64));
    let (machine, load) = machine();
    if json {
        let text: Vec<String> = rows.iter().map(json_row).collect();
        let head = format!("\"machine\":\"{machine}\",\"load\":\"{load}\",\"counted\":\"{COUNTED}\"");
        println!("{{{head},\"rows\":[{}]}}", text.join(","));
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
    println!("{machine}, load {load}; {COUNTED}");
    let median = |case| rows.iter().find(|r| r.case == case && r.seqs == 256 && r.block == 64).map(|r| r.median);
    for (what, took, bar) in [
        ("decode", median("decode"), 6.0),
        ("decode_overlap", median("decode_overlap"), 6.0),
        ("drafts_6", median("drafts_6"), 15.0),
        ("the vote beyond the collective", Some(vote_cost), 1.0),
    ] {
        let Some(took) = took else { continue };
        let held = if took <= bar { "held" } else { "MISSED" };
        println!("bar: {what}, 256 sequences at block 64, {bar} µs: {held} ({took:.2})");
    }
}

fn json_row(r: &Row) -> String {
    format!(
        "{{\"case\":\"{}\",\"num_seqs\":{},\"block\":{},\"rust_us_median\":{:.3},\"rust_us_p99\":{:.3},\"rust_us_max\":{:.3},\
         \"schedule_us_median\":{:.3},\"complete_us_median\":{:.3},\"note\":\"{}\"}}",
        r.case, r.seqs, r.block, r.median, r.p99, r.max, r.schedule, r.complete, r.note
    )
}
