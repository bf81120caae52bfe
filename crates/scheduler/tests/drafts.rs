//! Draft rows: guesses that cost rows and never a token, and of which nothing is left when they are rejected.

// A test that meets an error stops there.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod common;

use common::{EOS, Rig, VOCAB, config, prompt, state};
use deepinfer_scheduler::{Config, ConfigError, Event, NgramConfig, PrepFlags, Prepared, Seq, header};
use std::collections::BTreeSet;

const K: u32 = 3;

fn drafting(in_flight: u32, with_state: bool) -> Config {
    let mut c = config(4, 200, 4, 64);
    c.limits.max_draft = K;
    c.max_in_flight = in_flight;
    c.event_capacity = 1000;
    if with_state {
        c.groups.push(state());
    }
    c
}

/// Proposes `K` tokens of which the first `right` are those that the model draws.
fn propose(rig: &mut Rig, seq: Seq, right: usize) -> bool {
    let next = rig.planned(seq) as usize + 1;
    let mut drafts = rig.stream(seq, next + K as usize).tokens[next..next + K as usize].to_vec();
    if let Some(wrong) = drafts.get_mut(right) {
        *wrong = (*wrong + 1) % VOCAB;
    }
    rig.scheduler.propose(seq, &drafts).unwrap()
}

fn stored(rig: &mut Rig) -> BTreeSet<u128> {
    let mut events = Vec::new();
    rig.scheduler.events(&mut events);
    let hashes = events.iter().filter_map(|e| if let Event::Stored { hash, .. } = e { Some(hash.0) } else { None });
    hashes.collect()
}

#[test]
fn every_pattern_of_accepted_drafts_leaves_what_no_drafting_leaves() {
    for with_state in [false, true] {
        let request = Prepared { eos: vec![EOS], ..Prepared::new(prompt(5, 14), 40) };
        let mut bare = Rig::new(&drafting(1, with_state));
        let seq = bare.submit(&request, 7).unwrap()[0];
        bare.run(60);
        let (tokens, chain) = (bare.outputs[&seq].clone(), stored(&mut bare));
        assert!(tokens.len() > 20 && chain.len() > 6);
        for in_flight in [1, 2] {
            for pattern in 0..4usize.pow(3) {
                let mut rig = Rig::new(&drafting(in_flight, with_state));
                let seq = rig.submit(&request, 7).unwrap()[0];
                let mut n = 0;
                while rig.scheduler.has_work() {
                    let right = pattern / 4usize.pow(n % 3) % 4;
                    n += u32::from(propose(&mut rig, seq, right));
                    rig.step();
                    if let Some(row) = rig.scheduler.block_row(seq) {
                        // Positions launched, and the reserve that rejected rows leave until the next step.
                        let most = rig.planned(seq).max(1) + 1 + K;
                        assert!(row.len() as u32 <= most.div_ceil(4).max(4), "{} blocks", row.len());
                    }
                }
                rig.flush();
                assert_eq!(rig.outputs[&seq], tokens, "pattern {pattern}, {in_flight} in flight");
                assert_eq!(stored(&mut rig), chain, "the chain never saw a rejected token");
                rig.schedule();
                rig.verify_empty();
                let m = rig.scheduler.snapshot();
                assert!(m.accepted <= m.drafted && m.output_tokens == tokens.len() as u64);
                if pattern == 0 && in_flight == 1 {
                    assert_eq!(m.accepted, 0, "behind a step that falls short a guess may be right by chance");
                }
                if pattern == 63 && in_flight == 1 {
                    assert!(m.steps < 15, "four tokens a step: {}", m.steps);
                }
            }
        }
    }
}

#[test]
fn guesses_are_right_when_the_step_in_flight_falls_short_of_nothing() {
    let mut rig = Rig::new(&drafting(2, false));
    let seq = rig.add_long(&prompt(1, 14), 60);
    rig.step();
    while rig.scheduler.has_work() {
        propose(&mut rig, seq, K as usize);
        rig.step();
    }
    let m = rig.scheduler.snapshot();
    assert_eq!(m.accepted, m.drafted, "all accepted, always");
    assert!(m.steps < 24, "{} steps for 60 tokens", m.steps);
    rig.verify_streams(256);
}

#[test]
fn a_short_step_moves_the_rows_behind_it_back() {
    let mut rig = Rig::new(&drafting(2, true));
    let seq = rig.add_long(&prompt(1, 14), 60);
    rig.step();
    rig.step();
    rig.drain();
    assert!(propose(&mut rig, seq, 1));
    let one = rig.schedule().unwrap();
    rig.queue.push_back(one);
    assert!(propose(&mut rig, seq, 2), "legal with a step in flight");
    let two = rig.schedule().unwrap();
    rig.queue.push_back(two);
    let at = |rig: &Rig, slot, name: &str| rig.memory.get(slot, name)[0];
    assert_eq!((one.rows, two.rows), (4, 4));
    assert_eq!(at(&rig, two.slot, "ids"), -1, "what the last of four rows draws, if all are accepted");
    assert_eq!(at(&rig, two.slot, "pos"), at(&rig, one.slot, "pos") + 4);
    assert_eq!(rig.memory.get(two.slot, "header")[header::DRAFT_ROWS], 3);
    let made = rig.outputs[&seq].len();
    rig.finish_oldest();
    assert_eq!(rig.outputs[&seq].len(), made + 2, "one draft and what was drawn for the wrong one");
    rig.run(100);
    rig.verify_streams(256);
    rig.verify_empty();
}

#[test]
fn the_budget_is_shared_out_evenly() {
    for (budget, rows) in [(0, [1, 1, 1, 1]), (2, [2, 2, 1, 1]), (5, [3, 2, 2, 2]), (9, [4, 3, 3, 3]), (99, [4; 4])] {
        let mut rig = Rig::new(&drafting(1, false));
        let seqs: Vec<Seq> = (0..4).map(|i| rig.add_long(&prompt(i, 14), 60)).collect();
        while rig.scheduler.snapshot().decoding < 4 {
            rig.step();
        }
        rig.scheduler.set_draft_budget(budget);
        for &seq in &seqs {
            propose(&mut rig, seq, 3);
        }
        let plan = rig.schedule().unwrap();
        let cu_q = &rig.memory.get(plan.slot, "cu_q")[..5];
        let planned: Vec<i32> = cu_q.windows(2).map(|w| w[1] - w[0]).collect();
        assert_eq!(planned, rows, "budget of {budget}");
        rig.execute(&plan);
        rig.complete(plan.step);
        rig.run(100);
        rig.verify_streams(256);
    }
}

#[test]
fn drafts_take_no_block_from_anybody_and_give_their_reserve_back_first() {
    for in_flight in [1, 2] {
        let mut c = drafting(in_flight, false);
        c.groups[0] = common::paged(4, 12, &[4]);
        let mut rig = Rig::new(&c);
        // Nine blocks at the end for one, and two for the other: the pool holds both only without a reserve.
        let seqs = [rig.add_long(&prompt(1, 14), 23), rig.add_long(&prompt(2, 3), 6)];
        while rig.scheduler.has_work() {
            for seq in seqs {
                if rig.status(seq).is_some() {
                    propose(&mut rig, seq, 0);
                }
            }
            rig.step();
        }
        let m = rig.scheduler.snapshot();
        assert_eq!(m.preemptions, 0, "{in_flight} in flight");
        assert!(m.drafted > 20, "{} drafted, {in_flight} in flight", m.drafted);
        rig.verify_streams(256);
        rig.verify_empty();
    }
}

#[test]
fn drafts_are_dropped_with_the_lane() {
    let mut c = drafting(1, false);
    c.groups[0] = common::paged(4, 12, &[4]);
    let mut rig = Rig::new(&c);
    let seqs: Vec<Seq> = (0..3).map(|i| rig.add_long(&prompt(i, 12), 20)).collect();
    while rig.scheduler.has_work() {
        for &seq in &seqs {
            if rig.status(seq).is_some() {
                propose(&mut rig, seq, 3);
            }
        }
        rig.step();
    }
    assert!(rig.scheduler.snapshot().preemptions > 0);
    rig.verify_streams(256);
    rig.verify_empty();
}

// Drafts of the device

fn device_drafting(in_flight: u32, with_state: bool) -> Config {
    Config { device_drafts: K, ..drafting(in_flight, with_state) }
}

#[test]
fn drafts_of_the_device_leave_what_no_drafting_leaves_whatever_is_verified() {
    for (with_state, in_flight) in [(false, 1), (true, 1), (false, 2), (true, 2)] {
        let mut bare = Rig::new(&drafting(1, with_state));
        let mut rig = Rig::new(&device_drafting(in_flight, with_state));
        let seqs: Vec<Seq> = (0..4).map(|i| rig.add(&prompt(i.into(), 9 + 3 * i), 40)).collect();
        let same: Vec<Seq> = (0..4).map(|i| bare.add(&prompt(i.into(), 9 + 3 * i), 40)).collect();
        bare.run(400);
        let mut turn = 0;
        while rig.scheduler.has_work() {
            // All rows, none, and every number of them in between.
            rig.scheduler.set_draft_budget(if turn % 3 == 0 { u32::MAX } else { turn % 13 });
            turn += 1;
            rig.step();
        }
        for (a, b) in seqs.iter().zip(&same) {
            assert_eq!(rig.outputs[a], bare.outputs[b]);
        }
        assert_eq!(stored(&mut rig), stored(&mut bare));
        rig.verify_empty();
        let m = rig.scheduler.snapshot();
        assert!(m.accepted > 20 && m.accepted < m.drafted, "{} of {}", m.accepted, m.drafted);
        let (asked, taken) = m.drafts.at_positions();
        assert!(
            asked[0] > asked[2] && asked.iter().zip(taken).all(|(&asked, taken)| taken <= asked),
            "{asked:?} {taken:?}"
        );
    }
}

#[test]
fn the_next_plan_has_rows_for_drafts_that_nobody_knows_yet() {
    for in_flight in [1, 2] {
        let mut rig = Rig::new(&device_drafting(in_flight, false));
        let seq = rig.add_long(&prompt(1, 14), 60);
        let one = rig.schedule().unwrap();
        rig.queue.push_back(one);
        if in_flight == 1 {
            rig.finish_oldest();
        }
        let two = rig.schedule().unwrap();
        rig.queue.push_back(two);
        let head = rig.memory.get(two.slot, "header").to_vec();
        assert_eq!((two.rows, head[header::DRAFT_ROWS], head[header::VERIFIED]), (1 + K, K as i32, K as i32));
        let ids = rig.memory.get(two.slot, "ids")[..two.rows as usize].to_vec();
        let first = if in_flight == 1 { rig.stream(seq, 14).tokens[14] as i32 } else { -1 };
        assert_eq!(ids, [first, -2, -3, -4]);
        rig.run(200);
        rig.verify_streams(256);
        rig.verify_empty();
    }
}

#[test]
fn rows_beyond_the_budget_are_planned_and_not_paid_for() {
    let mut rig = Rig::new(&device_drafting(1, false));
    for i in 0..4 {
        rig.add_long(&prompt(i, 14), 60);
    }
    while rig.scheduler.snapshot().decoding < 4 {
        rig.step();
    }
    for (budget, verified) in [(0, 0), (5, 5), (12, 12), (99, 12)] {
        rig.scheduler.set_draft_budget(budget);
        let before = rig.scheduler.snapshot().drafted;
        let plan = rig.schedule().unwrap();
        let head = rig.memory.get(plan.slot, "header");
        assert_eq!((plan.rows, head[header::DRAFT_ROWS], head[header::VERIFIED]), (16, 12, verified));
        assert_eq!(rig.scheduler.snapshot().drafted - before, verified as u64);
        rig.queue.push_back(plan);
        rig.finish_oldest();
    }
    rig.run(200);
    rig.verify_streams(256);
}

#[test]
fn drafts_of_the_device_stop_where_the_sequence_must_end() {
    for in_flight in [1, 2] {
        let mut rig = Rig::new(&device_drafting(in_flight, true));
        let seqs: Vec<Seq> = (1..=5).map(|n| rig.add_long(&prompt(n.into(), 6), n)).collect();
        rig.run(200);
        for (seq, n) in seqs.iter().zip(1..) {
            assert_eq!(rig.outputs[seq].len(), n);
        }
        rig.verify_streams(256);
        rig.verify_empty();
    }
}

#[test]
fn a_grammar_keeps_the_drafts_of_the_device_away() {
    let mut rig = Rig::new(&device_drafting(1, false));
    let flags = PrepFlags { grammar: true, ..PrepFlags::default() };
    let bound = rig.submit(&Prepared { flags, ..Prepared::new(prompt(1, 6), 12) }, 3).unwrap()[0];
    rig.inbox.grammar_ready(bound, true).unwrap();
    let free = rig.add_long(&prompt(2, 6), 12);
    while rig.scheduler.snapshot().decoding < 2 {
        rig.step();
    }
    let plan = rig.schedule().unwrap();
    let rows: Vec<i32> = rig.memory.get(plan.slot, "cu_q")[..3].windows(2).map(|w| w[1] - w[0]).collect();
    let mut sorted = rows.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, [1, 1 + K as i32], "{rows:?}");
    rig.queue.push_back(plan);
    rig.run(100);
    assert_eq!((rig.outputs[&bound].len(), rig.outputs[&free].len()), (12, 12));
}

#[test]
fn drafts_have_one_origin() {
    let mut rig = Rig::new(&device_drafting(1, false));
    let seq = rig.add_long(&prompt(1, 14), 60);
    rig.step();
    assert_eq!(rig.scheduler.propose(seq, &[1]), Err(ConfigError::DeviceDrafts(K)));
    assert_eq!(
        rig.scheduler.set_ngram(NgramConfig { tokens: 1, ..NgramConfig::default() }),
        Err(ConfigError::DeviceDrafts(K))
    );
    let beyond = Config { device_drafts: K + 1, ..drafting(1, false) };
    assert!(deepinfer_scheduler::Scheduler::new(&beyond).is_err());
}
