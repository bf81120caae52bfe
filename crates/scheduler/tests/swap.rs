//! Victims that go to host memory: when, what is copied, and that it comes back as it was.

// A test that meets an error stops there.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod common;

use common::{Rig, config, hybrid, mix, paged, prompt, state};
use deepinfer_scheduler::{Config, Finish, Plan, Prepared, Seq, Status, header};
use proptest::prelude::*;
use proptest::test_runner::{Config as Cases, RngAlgorithm, TestRng, TestRunner};
use std::collections::{BTreeMap, HashMap};

/// Rates at which every victim is swapped, and at which none is.
const SWAP: (f64, f64) = (1e12, 1.0);
const RECOMPUTE: (f64, f64) = (1.0, 1e12);

/// Host memory for `blocks` blocks and as many states.
fn with_host(config: Config, blocks: u32) -> Config {
    Config { host_blocks: blocks, host_slots: blocks, ..config }
}

fn rig(config: &Config, rates: (f64, f64)) -> Rig {
    let mut rig = Rig::new(config);
    rig.scheduler.set_rates(rates.0, rates.1);
    rig
}

/// The same with up to `depth` steps in flight.
fn deep(config: Config, depth: u32) -> Config {
    Config { max_in_flight: depth, ..config }
}

/// Four sequences that need twice the pool.
fn crowd(rig: &mut Rig) -> Vec<Seq> {
    (0..4).map(|i| rig.add_long(&prompt(i, 40), 50)).collect()
}

#[test]
fn the_fed_rates_alone_choose_between_swap_and_recompute() {
    // A page holds 16 entries of 64 bytes. The victim leaves with 47 tokens on three pages: 3072 bytes.
    let cases = [
        ((3072.0 * 1.01, 47.0), true),
        ((3072.0 * 0.99, 47.0), false),
        ((3072.0, 47.0 * 0.99), true),
        ((3072.0, 47.0 * 1.01), false),
        ((3072.0, 47.0), false),
        ((0.0, 47.0), false),
        ((3072.0, 0.0), false),
        ((f64::NAN, 47.0), false),
        ((f64::INFINITY, 47.0), false),
        ((-3072.0, -47.0), false),
    ];
    for (rates, swapped) in cases {
        let mut rig = rig(&with_host(config(16, 7, 4, 64), 64), rates);
        let old = rig.add_long(&prompt(1, 40), 30);
        let new = rig.add_long(&prompt(2, 40), 30);
        rig.step();
        while rig.scheduler.snapshot().preemptions == 0 {
            rig.schedule().map(|plan| rig.execute(&plan)).unwrap();
            let metrics = rig.scheduler.snapshot();
            if metrics.preemptions > 0 {
                let status = if swapped { Status::SwappingOut } else { Status::Ready };
                assert_eq!((rig.status(old), rig.status(new)), (Some(Status::Running), Some(status)), "{rates:?}");
                assert_eq!(metrics.swapped_out, u64::from(swapped));
            }
            let step = metrics.steps;
            rig.complete(deepinfer_scheduler::StepId(step));
        }
        rig.run(300);
        let metrics = rig.scheduler.snapshot();
        assert_eq!((metrics.swapped_out > 0, metrics.swaps_refused), (swapped, 0), "{rates:?}");
        assert_eq!(metrics.swapped_in, metrics.swapped_out);
        rig.verify_streams(256);
        rig.verify_empty();
    }
}

#[test]
fn what_was_swapped_is_not_computed_again() {
    for depth in [1, 2] {
        not_computed_again(depth);
    }
}

fn not_computed_again(depth: u32) {
    let mut computed = Vec::new();
    for rates in [SWAP, RECOMPUTE] {
        let mut c = deep(with_host(config(16, 9, 4, 64), 64), depth);
        c.prefix_caching = false;
        let mut rig = rig(&c, rates);
        crowd(&mut rig);
        rig.run(600);
        let metrics = rig.scheduler.snapshot();
        assert!(metrics.preemptions > 2);
        // The newest token of a decoding victim has no KV yet: its row is the one that must be there in any case.
        computed.push((metrics.recomputed_tokens, metrics.preemptions));
        rig.verify_streams(256);
        rig.verify_empty();
    }
    assert!(computed[0].0 <= computed[0].1, "{computed:?}");
    assert!(computed[1].0 > 40 * computed[1].1, "{computed:?}");
}

#[test]
fn host_memory_is_bounded_and_victims_beyond_it_are_computed_again() {
    for (blocks, refused, depth) in [(3, true, 1), (64, false, 1), (3, true, 2), (64, false, 2)] {
        let mut rig = rig(&deep(with_host(config(16, 9, 4, 64), blocks), depth), SWAP);
        crowd(&mut rig);
        let mut most = 0;
        for _ in 0..600 {
            rig.step();
            let host = rig.scheduler.counts().host_blocks;
            assert_eq!((host.total, host.reserved), (blocks + 1, 1));
            most = most.max(host.held);
        }
        let metrics = rig.scheduler.snapshot();
        assert_eq!(metrics.swaps_refused > 0, refused);
        assert!(most > 0 && most <= blocks && metrics.swapped_out > 0);
        rig.verify_streams(256);
        rig.verify_empty();
    }
    let mut rig = rig(&config(16, 9, 4, 64), SWAP);
    crowd(&mut rig);
    rig.run(600);
    assert_eq!(rig.scheduler.snapshot().swapped_out, 0, "there is no host memory");
    assert_eq!(rig.scheduler.counts().host_blocks.total, 0);
    rig.verify_streams(256);
}

#[test]
fn copies_beyond_a_steps_lists_are_not_ordered() {
    // Sixteen sequences share 24 blocks, so that a victim copies many pages and frees one. They are admitted five a step, with
    // prompts so long that all need their next block in one step.
    let mut c = with_host(config(4, 44, 16, 64), 1000);
    c.limits.max_model_len = 128;
    let mut rig = rig(&c, SWAP);
    let shared = prompt(1, 100);
    rig.add_long(&shared, 20);
    for _ in 0..3 {
        rig.step();
    }
    for n in 0..15 {
        rig.add_long(&shared[..97 + n / 5], 20);
    }
    let room = rig.memory.get(0, "swap_out").len() / 3;
    let mut most = 0;
    for _ in 0..400 {
        let Some(plan) = rig.schedule() else { break };
        most = most.max(rig.memory.get(plan.slot, "header")[header::SWAP_OUT] as usize);
        rig.execute(&plan);
        rig.complete(plan.step);
    }
    let metrics = rig.scheduler.snapshot();
    assert!(most > room - 26 && most <= room, "{most} of {room}");
    assert!(metrics.swaps_refused > 0);
    rig.run(400);
    rig.verify_streams(128);
    rig.verify_empty();
}

#[test]
fn readmission_copies_back_only_what_the_index_has_lost() {
    let mut rig = rig(&with_host(config(16, 12, 2, 256), 64), SWAP);
    let old = rig.add_long(&prompt(1, 79), 40);
    let new = rig.add_long(&prompt(2, 79), 40);
    while rig.scheduler.snapshot().swapped_out == 0 {
        rig.step();
    }
    let info = rig.scheduler.info(new).unwrap();
    assert_eq!((info.status, info.computed_tokens), (Status::Swapped, 80));
    assert_eq!(rig.scheduler.snapshot().swap_out_pages, 5, "every page, whoever else may have it");
    rig.inbox.abort(old).unwrap();
    rig.step();
    assert_eq!(rig.status(new), Some(Status::Running));
    let metrics = rig.scheduler.snapshot();
    assert_eq!((metrics.swapped_in, metrics.swap_in_pages, metrics.swapped), (1, 0, 0), "the index had all five");
    assert_eq!(rig.scheduler.counts().host_blocks.held, 0);
    rig.run(100);
    rig.verify_streams(256);
    rig.verify_empty();
}

#[test]
fn state_and_every_group_come_back_and_without_host_slots_nothing_is_swapped() {
    for (slots, swaps, depth) in [(8, true, 1), (0, false, 1), (8, true, 2), (0, false, 2)] {
        let mut c = deep(with_host(hybrid(10, 4, 256), 64), depth);
        c.host_slots = slots;
        let mut rig = rig(&c, SWAP);
        let seqs: Vec<Seq> = (0..3).map(|i| rig.add_long(&prompt(i, 250), 300)).collect();
        let mut states = 0;
        while rig.scheduler.has_work() {
            rig.step();
            if let Some(plan) = rig.queue.back() {
                let head = rig.memory.get(plan.slot, "header");
                assert_eq!(head[header::SWAP_OUT] > 0, head[header::SWAP_OUT_STATES] > 0);
                states = states.max(head[header::SWAP_IN_STATES]);
            }
        }
        let metrics = rig.scheduler.snapshot();
        assert_eq!(metrics.swapped_in > 0, swaps);
        assert_eq!(metrics.swapped_out > 0, swaps);
        // A lane whose state runs ahead rests for a step rather than be computed again.
        assert_eq!(metrics.swaps_refused, if swaps { 0 } else { metrics.preemptions });
        assert!(depth == 1 || !swaps || states > 0, "seen in a step in flight");
        for seq in seqs {
            assert_eq!(rig.outputs[&seq].len(), 300);
        }
        rig.verify_streams(2048);
        rig.verify_empty();
    }
}

#[test]
fn a_failed_step_turns_its_copies_into_recomputing() {
    let mut rig = rig(&with_host(config(16, 9, 4, 64), 64), SWAP);
    let seqs = crowd(&mut rig);
    let plan = loop {
        let plan = rig.schedule().unwrap();
        rig.execute(&plan);
        if rig.scheduler.snapshot().swapping_out > 0 {
            break plan;
        }
        rig.complete(plan.step);
    };
    let victim = *seqs.iter().find(|&&s| rig.status(s) == Some(Status::SwappingOut)).unwrap();
    assert!(rig.scheduler.counts().host_blocks.held > 0);
    rig.fail(plan.step);
    assert_eq!(rig.status(victim), Some(Status::Ready));
    assert_eq!(rig.scheduler.counts().host_blocks.held, 0);
    rig.run(300);
    assert_eq!(rig.finished[&victim], Finish::Length as i32);
    rig.verify_streams(256);
    rig.verify_empty();
}

#[test]
fn a_swapped_sequence_can_be_aborted_or_cut_and_leaves_nothing_behind() {
    for cut in [false, true] {
        let mut rig = rig(&with_host(config(16, 9, 4, 64), 64), SWAP);
        let seqs = crowd(&mut rig);
        let victim = loop {
            rig.step();
            if let Some(&seq) = seqs.iter().find(|&&s| rig.status(s) == Some(Status::Swapped)) {
                break seq;
            }
        };
        let made = rig.outputs[&victim].len() as u32;
        if cut {
            rig.inbox.stop_at(victim, made - 1, Finish::Abort).unwrap();
        } else {
            rig.inbox.abort(victim).unwrap();
        }
        rig.step();
        assert_eq!(rig.finished[&victim], Finish::Abort as i32);
        assert_eq!(rig.outputs[&victim].len() as u32, made - u32::from(cut));
        assert_eq!(rig.scheduler.info(victim).map_or(0, |i| i.computed_tokens), 0);
        rig.run(400);
        rig.verify_streams(256);
        rig.verify_empty();
    }
}

#[test]
fn a_sequence_that_is_being_copied_out_can_be_aborted_or_cut() {
    for cut in [false, true] {
        let mut rig = rig(&deep(with_host(config(16, 9, 4, 64), 64), 2), SWAP);
        let seqs = crowd(&mut rig);
        let victim = loop {
            rig.step();
            if let Some(&seq) = seqs.iter().find(|&&s| rig.status(s) == Some(Status::SwappingOut)) {
                break seq;
            }
        };
        let held = rig.scheduler.counts().host_blocks.held;
        assert!(held > 0);
        let made = rig.scheduler.info(victim).unwrap().output_tokens;
        if cut {
            rig.inbox.stop_at(victim, made - 1, Finish::Abort).unwrap();
        } else {
            rig.inbox.abort(victim).unwrap();
        }
        // The copy is in flight when the next step is planned.
        let plan = rig.schedule().unwrap();
        rig.queue.push_back(plan);
        let host = rig.scheduler.counts().host_blocks;
        assert_eq!(rig.scheduler.info(victim).map(|i| i.status), Some(Status::Finished));
        assert_eq!(host.held, 0, "{host:?}");
        rig.finish_oldest();
        rig.run(400);
        assert_eq!(rig.finished[&victim], Finish::Abort as i32);
        assert_eq!(rig.outputs[&victim].len() as u32, made - u32::from(cut));
        rig.verify_streams(256);
        rig.verify_empty();
    }
}

#[test]
fn a_failed_copy_back_publishes_nothing_and_ends_its_sequence_only() {
    let mut rig = rig(&with_host(config(16, 9, 4, 64), 64), SWAP);
    let seqs = crowd(&mut rig);
    let mut failed = None;
    for _ in 0..400 {
        let Some(plan) = rig.schedule() else {
            rig.flush();
            continue;
        };
        rig.queue.push_back(plan);
        if failed.is_none() && rig.memory.get(plan.slot, "header")[header::SWAP_IN] > 0 {
            failed = seqs.iter().copied().find(|&s| rig.scheduler.info(s).is_some_and(|i| i.computed_tokens > 40));
            let turn = rig.scheduler.history(failed.unwrap()).unwrap().to_vec();
            let before = rig.scheduler.snapshot().finished[3];
            rig.fail_oldest();
            assert!(rig.scheduler.snapshot().finished[3] > before);
            // The same tokens once more: what the failed step was to bring back must not be found.
            rig.add_long(&turn, 4);
        } else {
            rig.finish_oldest();
        }
    }
    assert!(failed.is_some());
    rig.run(400);
    rig.verify_streams(256);
    rig.verify_empty();
}

#[test]
fn nobody_passes_a_victim_while_it_is_copied_out() {
    let mut rig = rig(&with_host(config(16, 9, 8, 64), 64), SWAP);
    let seqs: Vec<Seq> = (0..3).map(|i| rig.add_long(&prompt(i, 33), 60)).collect();
    rig.step();
    // Small enough for what is left over at any time.
    let small: Vec<Seq> = (10..30).map(|i| rig.add_long(&prompt(i, 3), 2)).collect();
    let mut swapped = 0;
    for _ in 0..400 {
        let waits = |rig: &Rig, seq: &Seq| rig.status(*seq) == Some(Status::Ready);
        let before: Vec<Seq> = small.iter().copied().filter(|s| waits(&rig, s)).collect();
        let Some(plan) = rig.schedule() else { break };
        let leaving = seqs.iter().any(|&s| rig.status(s) == Some(Status::SwappingOut));
        if leaving {
            swapped += 1;
            assert!(before.iter().all(|s| waits(&rig, s)), "never started, and passed a preempted one");
        }
        rig.execute(&plan);
        rig.complete(plan.step);
    }
    assert!(swapped > 0);
    rig.run(400);
    rig.verify_streams(256);
    rig.verify_empty();
}

#[test]
fn the_last_one_running_is_not_swapped_for_nobody() {
    // A save holds most of the pool, so that the only sequence preempts itself and no step would carry its copy.
    let mut rig = rig(&with_host(config(16, 7, 2, 64), 64), SWAP);
    let saved = rig.add_long(&prompt(1, 60), 2);
    rig.step();
    let save = rig.scheduler.begin_save(saved).unwrap();
    rig.run(4);
    let seq = rig.add_long(&prompt(2, 20), 30);
    for _ in 0..60 {
        rig.step();
    }
    assert_eq!(rig.scheduler.snapshot().swapping_out, 0);
    rig.scheduler.close_transfer(save.transfer, true);
    rig.run(100);
    assert_eq!(rig.finished[&seq], Finish::Length as i32);
    rig.verify_streams(256);
    rig.verify_empty();
}

/// What a sequence wrote, by group and position, and its state.
type Wrote = (Vec<BTreeMap<u32, [u8; 8]>>, Vec<u8>);

/// Pages, states and their host copies as plain bytes that no history explains: what is read must be what was written.
struct Bytes {
    /// By group, page and byte.
    pages: Vec<Vec<Vec<u8>>>,
    host: Vec<Vec<Vec<u8>>>,
    states: Vec<Vec<u8>>,
    host_states: Vec<Vec<u8>>,
    wrote: HashMap<Seq, Wrote>,
    nonce: u64,
    copied: [u64; 2],
}

impl Bytes {
    fn new(config: &Config, rig: &Rig) -> Self {
        let s = &rig.scheduler;
        let mut bytes = Self {
            pages: Vec::new(),
            host: Vec::new(),
            states: vec![vec![0; 24]; s.state_slots() as usize],
            host_states: vec![vec![0; 24]; config.host_slots as usize],
            wrote: HashMap::new(),
            nonce: 1,
            copied: [0; 2],
        };
        for section in s.sections() {
            let empty = vec![0; 8 << section.page_shift];
            bytes.pages.push(vec![empty.clone(); section.num_pages as usize]);
            bytes.host.push(vec![empty; (config.host_blocks << section.pages_shift) as usize]);
        }
        bytes
    }

    /// Applies a step's copies, then checks what its sequences read and writes what they write.
    fn apply(&mut self, rig: &Rig, plan: &Plan) {
        let field = |name: &str, word: usize, each: usize| -> Vec<Vec<usize>> {
            let n = rig.memory.get(plan.slot, "header")[word] as usize * each;
            let words = rig.memory.get(plan.slot, name)[..n].to_vec();
            words.chunks(each).map(|c| c.iter().map(|&w| w as usize).collect()).collect()
        };
        for c in field("swap_out", header::SWAP_OUT, 3) {
            self.host[c[0]][c[2]].clone_from(&self.pages[c[0]][c[1]]);
            self.copied[0] += 1;
        }
        for c in field("swap_out_states", header::SWAP_OUT_STATES, 2) {
            self.host_states[c[1]].clone_from(&self.states[c[0]]);
        }
        for c in field("zero_states", header::ZERO_STATES, 1) {
            self.states[c[0]].fill(0);
        }
        for c in field("swap_in", header::SWAP_IN, 3) {
            self.pages[c[0]][c[2]].clone_from(&self.host[c[0]][c[1]]);
            self.copied[1] += 1;
        }
        for c in field("swap_in_states", header::SWAP_IN_STATES, 2) {
            self.states[c[1]].clone_from(&self.host_states[c[0]]);
        }
        let seqs = plan.seqs as usize;
        let (cu_q, pos) = (rig.memory.get(plan.slot, "cu_q"), rig.memory.get(plan.slot, "pos"));
        let rows = rig.memory.get(plan.slot, "state_row");
        let owners: HashMap<u32, Seq> = rig
            .requests
            .keys()
            .filter_map(|&s| rig.scheduler.info(s).filter(|i| i.status == Status::Running).map(|i| (i.slot, s)))
            .collect();
        for i in 0..seqs {
            let row = rows[i] as u32;
            let seq = owners[&row];
            let (first, last) = (pos[cu_q[i] as usize] as u32, pos[cu_q[i + 1] as usize - 1] as u32);
            let groups = self.pages.len();
            let (wrote, state) = self.wrote.entry(seq).or_insert_with(|| (vec![BTreeMap::new(); groups], vec![0; 24]));
            let blocks = rig.scheduler.block_row(seq).unwrap();
            for (g, section) in rig.scheduler.sections().iter().enumerate() {
                let at = |p: u32| {
                    let block = blocks[(p / rig.scheduler.block_tokens()) as usize];
                    let j = (p % rig.scheduler.block_tokens()) >> section.page_shift;
                    let within = p as usize & ((1 << section.page_shift) - 1);
                    (rig.scheduler.page(g, block, j as usize) as usize, 8 * within)
                };
                for p in 0..first {
                    let (page, from) = at(p);
                    assert_eq!(self.pages[g][page][from..from + 8], wrote[g][&p], "{seq:?} group {g} position {p}");
                }
                for p in first..=last {
                    self.nonce += 1;
                    let value = mix(self.nonce, u64::from(p)).to_le_bytes();
                    let (page, from) = at(p);
                    self.pages[g][page][from..from + 8].copy_from_slice(&value);
                    wrote[g].insert(p, value);
                }
            }
            if rig.has_state {
                if first == 0 {
                    state.fill(0);
                }
                assert_eq!(&self.states[row as usize], state, "{seq:?} state at {first}");
                self.nonce += 1;
                for (k, byte) in state.iter_mut().enumerate() {
                    *byte = mix(self.nonce, k as u64) as u8;
                }
                self.states[row as usize].clone_from(state);
            }
        }
    }
}

#[test]
fn bytes_after_a_round_trip_are_those_before_it_under_random_schedules() {
    let cases = Cases { cases: 120, failure_persistence: None, max_shrink_iters: 200, ..Cases::default() };
    let mut runner = TestRunner::new_with_rng(cases, TestRng::from_seed(RngAlgorithm::ChaCha, &[5; 32]));
    let copied = std::cell::Cell::new([0u64; 2]);
    let requests = prop::collection::vec((1..70u32, 1..60u32, -1..2i32, 0..12u32, 0..30u8), 14);
    let shape = (10..26u32, 0..60u32, any::<u8>());
    runner
        .run(&(requests, shape), |(requests, (pages, host, bits))| {
            let mut c = with_host(config(8, pages.max(17), 6, 48), host);
            c.limits.max_model_len = 120;
            c.device_ordered = bits & 1 == 0;
            c.prefix_caching = bits & 2 == 0;
            c.max_in_flight = 1 + u32::from(bits & 16 != 0);
            if bits & 4 != 0 {
                c.groups = vec![paged(8, pages.max(17), &[4, 8]), paged(4, 2 * pages.max(17), &[4])];
            }
            // A hit restores state from elsewhere, which these bytes know nothing of.
            if bits & 8 != 0 && !c.prefix_caching {
                c.groups.push(state());
            }
            let mut rig = rig(&c, SWAP);
            let mut bytes = Bytes::new(&c, &rig);
            let mut live: Vec<Seq> = Vec::new();
            for (family, (len, max_new, priority, steps, act)) in requests.into_iter().enumerate() {
                // Prompts of their own: a block found in the index is one that its sequence wrote.
                let prepared = Prepared { priority, ..Prepared::new(prompt(700 + family as u64, len), max_new) };
                live.extend(rig.submit(&prepared, family as u64).unwrap_or_default());
                if act == 0 {
                    rig.inbox.abort(live[family / 2 % live.len()]).unwrap();
                }
                for _ in 0..steps {
                    run_one(&mut rig, &mut bytes, act == 1);
                }
            }
            for _ in 0..4000 {
                if !rig.scheduler.has_work() {
                    break;
                }
                run_one(&mut rig, &mut bytes, false);
            }
            assert!(!rig.scheduler.has_work(), "{:?}", rig.scheduler.snapshot());
            let sum = copied.get();
            copied.set([sum[0] + bytes.copied[0], sum[1] + bytes.copied[1]]);
            rig.verify_streams(120);
            rig.verify_empty();
            Ok(())
        })
        .unwrap();
    println!("pages out and back: {:?}", copied.get());
    assert!(copied.get().iter().all(|&n| n > 2000), "{:?}", copied.get());
}

fn run_one(rig: &mut Rig, bytes: &mut Bytes, fail: bool) {
    let plan = rig.schedule();
    if let Some(plan) = plan {
        // The device takes steps in their order, so that these bytes may run ahead of it.
        bytes.apply(rig, &plan);
        rig.queue.push_back(plan);
        if rig.queue.len() < rig.scheduler_depth() {
            return;
        }
    }
    let ran = if fail { rig.fail_oldest() } else { rig.finish_oldest() };
    if !ran {
        rig.flush();
    }
}

/// Preemptions of a random crowd in a random pool, run to its end.
fn preempted(case: u64, depth: u32) -> u64 {
    let pick = |what: u64, n: u64| mix(case, what) % n;
    let pages = 14 + pick(1, 14) as u32;
    let host = [0, 64][pick(2, 2) as usize];
    let mut c = deep(with_host(config(8, pages, 2 + pick(3, 7) as u32, 64), host), depth);
    match pick(4, 3) {
        0 => c.groups.push(state()),
        1 => c.groups = vec![paged(8, pages, &[8]), paged(4, 2 * pages, &[4]), state()],
        _ => {}
    }
    c.prefix_caching = pick(5, 2) == 0;
    c.device_ordered = pick(6, 2) == 0;
    c.policy.headroom_tokens = [0, 16][pick(7, 2) as usize];
    c.limits.max_model_len = 100;
    let mut rig = rig(&c, if pick(8, 2) == 0 { SWAP } else { RECOMPUTE });
    for i in 0..3 + pick(9, 8) {
        rig.add_long(&prompt(case * 20 + i, 1 + pick(20 + i, 45) as u32), 1 + pick(40 + i, 55) as u32);
    }
    while rig.scheduler.has_work() {
        rig.step();
        assert!(rig.steps < 9000, "case {case} does not end");
    }
    rig.verify_empty();
    rig.scheduler.snapshot().preemptions
}

#[test]
fn a_step_in_flight_costs_no_more_preemptions() {
    let mut sums = [0, 0];
    for case in 0..400 {
        let [serial, ahead] = [1, 2].map(|depth| preempted(case, depth));
        assert!(ahead <= 2 * serial + 3, "case {case}: {ahead} against {serial}");
        sums = [sums[0] + serial, sums[1] + ahead];
    }
    println!("preemptions one and two steps deep: {sums:?}");
    assert!(sums[0] > 300, "{sums:?}");
    assert!(sums[1] * 10 <= sums[0] * 11, "{sums:?}");
}
