//! Engine types: what a prompt engine hands over, what a completion engine goes on with, and what each side owes the other.

// A test that meets an error stops there.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod common;

use common::{EOS, Rig, VOCAB, config, hybrid, prompt, reference};
use deepinfer_scheduler::{
    Config, EngineType, Finish, Load, Outcome, PrepFlags, Prepared, Reject, Seq, Status, TransferError,
};
use proptest::prelude::*;
use proptest::test_runner::{Config as Cases, RngAlgorithm, TestRng, TestRunner};
use std::collections::BTreeMap;

const WAIT: PrepFlags =
    PrepFlags { stream: false, prompt_logprobs: false, grammar: false, wait_kv: true, fetch: false, hold: false };

fn as_engine(engine: EngineType, config: Config) -> Config {
    Config { engine, ..config }
}

fn prompt_engine() -> Rig {
    Rig::new(&as_engine(EngineType::Prompt, config(16, 64, 4, 32)))
}

/// A request whose last `produced` tokens are what the model makes after a prompt of `len` tokens with `seed`.
fn arriving(family: u64, len: u32, produced: u32, max_new: u32, seed: u64) -> Prepared {
    let mut tokens = prompt(family, len);
    let made = reference(&tokens, seed, produced, 0, &[], 256);
    tokens.extend(made);
    Prepared { produced, flags: WAIT, ..Prepared::new(tokens, max_new) }
}

#[test]
fn a_prompt_engine_hands_over_after_the_first_token_and_never_plans_a_decode_row() {
    for depth in [1, 2] {
        let mut c = as_engine(EngineType::Prompt, config(16, 64, 4, 32));
        c.max_in_flight = depth;
        let mut rig = Rig::new(&c);
        let seqs: Vec<Seq> = (0..9).map(|i| rig.add_long(&prompt(i, 7 + 11 * i as u32), 20)).collect();
        let mut handed = 0;
        for _ in 0..80 {
            rig.step();
            assert!(rig.queue.iter().all(|plan| plan.decoding == 0));
            for &seq in &seqs {
                if rig.status(seq) == Some(Status::Handover) {
                    let info = rig.scheduler.info(seq).unwrap();
                    assert_eq!((info.finish, info.output_tokens), (Some(Finish::Handover), 1));
                    assert_eq!(info.computed_tokens, info.prompt_tokens);
                    let save = rig.scheduler.begin_save(seq).unwrap();
                    assert_eq!((save.tokens, save.slot.0), (info.prompt_tokens, info.slot));
                    rig.scheduler.close_transfer(save.transfer, true);
                    assert!(rig.scheduler.release(seq));
                    assert!(!rig.scheduler.release(seq), "once");
                    handed += 1;
                }
            }
        }
        assert_eq!(handed, 9);
        let metrics = rig.scheduler.snapshot();
        assert_eq!((metrics.finished, metrics.decode_rows), ([0, 0, 0, 0, 9], 0));
        rig.verify_streams(256);
        rig.verify_empty();
    }
}

#[test]
fn a_first_token_that_ends_the_sequence_is_not_handed_over() {
    for max_new in [1, 8] {
        let mut rig = prompt_engine();
        for family in 0..100 {
            let first = reference(&prompt(family, 20), 5, 1, 0, &[], 256)[0];
            let stops = if max_new == 1 { vec![] } else { vec![first] };
            let prepared = Prepared { eos: stops, ..Prepared::new(prompt(family, 20), max_new) };
            let seq = rig.submit(&prepared, 5).unwrap()[0];
            rig.run(20);
            rig.flush();
            let finish = if max_new == 1 { Finish::Length } else { Finish::Stop };
            assert_eq!(rig.finished[&seq], finish as i32);
            assert_eq!(rig.outputs[&seq], [first]);
        }
        rig.verify_empty();
    }
    // Below min_new the same id does not end it: it is handed over.
    let mut rig = prompt_engine();
    let first = reference(&prompt(1, 20), 5, 1, 0, &[], 256)[0];
    let prepared = Prepared { eos: vec![first], min_new: 2, ..Prepared::new(prompt(1, 20), 8) };
    let seq = rig.submit(&prepared, 5).unwrap()[0];
    rig.run(20);
    assert_eq!(rig.finished[&seq], Finish::Handover as i32);
}

#[test]
fn a_prompt_and_a_completion_engine_make_what_one_engine_makes() {
    for (name, base, each) in [("paged", config(16, 64, 4, 32), 13), ("hybrid", hybrid(32, 4, 256), 40)] {
        let max_len = base.limits.max_model_len;
        let mut first = Rig::new(&as_engine(EngineType::Prompt, base.clone()));
        let mut second = Rig::new(&as_engine(EngineType::Completion, base));
        let mut pairs = Vec::new();
        for i in 0..12u64 {
            let tokens = prompt(i % 3, 20 + each * i as u32);
            let prepared = Prepared { eos: vec![EOS], ..Prepared::new(tokens, 30) };
            let seq = first.submit(&prepared, i).unwrap()[0];
            while !first.finished.contains_key(&seq) {
                first.step();
            }
            if first.finished[&seq] != Finish::Handover as i32 {
                continue;
            }
            let save = first.scheduler.begin_save(seq).unwrap();
            let tokens = first.scheduler.history(seq).unwrap().to_vec();
            let there = Prepared { tokens, produced: 1, flags: WAIT, user: i, ..prepared };
            let other = second.submit(&there, i).unwrap()[0];
            second.step();
            let load = loop {
                match second.scheduler.begin_load(other, save.tokens) {
                    Ok(load) => break load,
                    Err(TransferError::NoRoom { .. }) => second.step(),
                    Err(error) => panic!("{error}"),
                };
            };
            second.copy_from(&first, &save, &load);
            second.inbox.transfer(load.transfer, Outcome::Done).unwrap();
            first.scheduler.close_transfer(save.transfer, true);
            first.scheduler.release(seq);
            pairs.push((other, save.tokens, load.present));
        }
        second.run(500);
        assert!(pairs.len() >= 8, "{name}");
        assert!(pairs.iter().any(|p| p.2 > 0), "a prefix that is there already is not moved");
        for (seq, ..) in &pairs {
            let expected = second.expected(*seq, max_len);
            assert_eq!(second.outputs[seq], expected, "{name}");
        }
        assert_eq!(second.prompt_rows.values().sum::<u32>(), 0, "no prompt row is computed twice");
        let users: Vec<Seq> = second.scheduler.drain_remote_releases().into_iter().map(|r| r.0).collect();
        assert_eq!(users, pairs.iter().map(|p| p.0).collect::<Vec<_>>());
        second.verify_empty();
        first.step();
        first.verify_empty();
    }
}

#[test]
fn a_completion_engine_takes_requests_with_kv_only_and_refusals_release_the_other_side() {
    let rig = Rig::new(&as_engine(EngineType::Completion, config(16, 9, 4, 32)));
    let good = arriving(1, 20, 1, 8, 0);
    let refused = |prepared: &Prepared| rig.inbox.add(prepared).unwrap_err();
    let plain = Prepared { flags: PrepFlags::default(), user: 1, ..good.clone() };
    assert!(matches!(refused(&plain), Reject::Conflict(_)));
    let all = good.tokens.len() as u32;
    let cases = [
        (Prepared { user: 2, produced: all, max_new: 60, ..good.clone() }, "every token is output already"),
        (Prepared { user: 3, produced: 8, ..good.clone() }, "nothing is left to do"),
        (Prepared { user: 4, forks: 2, ..good.clone() }, "n > 1"),
        (Prepared { user: 5, flags: PrepFlags { prompt_logprobs: true, ..WAIT }, ..good.clone() }, "prompt"),
        (Prepared { user: 6, max_new: 200, ..good.clone() }, "KV blocks"),
        (Prepared { user: 7, tokens: vec![VOCAB; 9], ..good.clone() }, "vocabulary"),
        (Prepared { user: 8, tokens: vec![], produced: 0, ..good.clone() }, "empty"),
        (Prepared { user: 9, tokens: prompt(1, 256), ..good.clone() }, "at most 255"),
        (Prepared { user: 10, max_new: 0, ..good.clone() }, "max_tokens is 0"),
    ];
    for (prepared, says) in &cases {
        let text = refused(prepared).to_string();
        assert!(text.contains(says), "{text}");
    }
    let mut rig = rig;
    rig.scheduler.close();
    assert_eq!(rig.inbox.add(&Prepared { user: 11, ..good }), Err(Reject::Closed));
    let told = rig.scheduler.drain_remote_releases();
    assert_eq!(told, (2..=11).map(|user| (Seq::default(), user)).collect::<Vec<_>>(), "the plain one held nothing");
    assert!(rig.scheduler.drain_remote_releases().is_empty());
    let rig = prompt_engine();
    assert!(matches!(
        rig.inbox.add(&Prepared { forks: 2, ..Prepared::new(prompt(1, 9), 4) }),
        Err(Reject::Conflict(_))
    ));
    assert!(matches!(rig.inbox.stop_at(Seq::default(), 1, Finish::Handover), Err(Reject::Conflict(_))));
}

#[test]
fn lengths_counts_and_positions_include_what_was_produced_elsewhere() {
    for (produced, max_new, min_new) in [(1, 12, 0), (5, 12, 8), (11, 12, 12), (3, 200, 0)] {
        let mut rig = Rig::new(&config(16, 64, 4, 64));
        let mut prepared = arriving(3, 21, produced, max_new, 7);
        let whole = reference(&prompt(3, 21), 7, 200, 0, &[], 256);
        // An id that is drawn early, and once more after min_new.
        let stop = whole[6];
        prepared.stop_ids = if min_new > 0 { vec![stop] } else { vec![] };
        prepared.min_new = min_new;
        prepared.flags.wait_kv = false;
        let seq = rig.submit(&prepared, 7).unwrap()[0];
        rig.step();
        let info = rig.scheduler.info(seq).unwrap();
        assert_eq!((info.prompt_tokens, info.output_tokens), (21, produced + 1));
        assert_eq!(rig.scheduler.output_tokens(seq).unwrap(), &whole[..=produced as usize]);
        rig.run(300);
        let expected = rig.expected(seq, 256);
        assert_eq!(rig.outputs[&seq], expected);
        assert!(expected.len() as u32 <= max_new && expected.len() as u32 >= min_new);
        rig.verify_empty();
    }
}

#[test]
fn the_hash_chain_covers_produced_tokens_as_any_others() {
    let mut rig = Rig::new(&config(16, 64, 4, 64));
    let prepared = Prepared { flags: PrepFlags::default(), ..arriving(3, 20, 30, 34, 7) };
    rig.submit(&prepared, 7).unwrap();
    rig.run(20);
    let twin = rig.submit(&Prepared { produced: 29, max_new: 40, ..prepared }, 7).unwrap()[0];
    rig.step();
    assert_eq!(rig.scheduler.info(twin).unwrap().cached_tokens, 48, "three blocks, whoever made their tokens");
}

#[test]
fn a_handed_over_sequence_that_nobody_takes_is_released_when_its_lease_ends() {
    let mut c = as_engine(EngineType::Prompt, config(16, 64, 4, 64));
    c.policy.handover_lease_ns = 100;
    let mut rig = Rig::new(&c);
    let (left, read) = (rig.add_long(&prompt(1, 40), 9), rig.add_long(&prompt(2, 20), 9));
    rig.step();
    let save = rig.scheduler.begin_save(read).unwrap();
    let ends = rig.scheduler.next_lease().unwrap();
    assert!(ends > rig.clock && ends <= rig.clock + 100);
    assert_eq!((rig.status(left), rig.status(read)), (Some(Status::Handover), Some(Status::Handover)));
    rig.clock = ends - 2;
    rig.step();
    assert_eq!(rig.scheduler.counts().slots.held, 2, "not yet");
    rig.step();
    let snapshot = rig.scheduler.snapshot();
    assert_eq!((snapshot.handover_leases_ended, snapshot.kv_leases_ended), (2, 0));
    assert_eq!(rig.scheduler.next_lease(), None);
    let counts = rig.scheduler.counts();
    assert_eq!(
        (counts.groups[0].held, counts.groups[0].held_by_transfers),
        (2, 2),
        "what a save reads stays till it ends"
    );
    assert!(!rig.scheduler.release(left) && !rig.scheduler.release(read), "late");
    rig.inbox.transfer(save.transfer, Outcome::Done).unwrap();
    rig.step();
    rig.verify_empty();
    assert_eq!(rig.scheduler.snapshot().finished[4], 2, "each ended once");
}

#[test]
fn every_way_out_of_waiting_for_kv_releases_the_other_side_once() {
    type Act = fn(&mut Rig, Seq, Option<Load>);
    let ways: [(&str, bool, Act); 8] = [
        ("loaded", true, |rig, _, load| rig.inbox.transfer(load.unwrap().transfer, Outcome::Done).unwrap()),
        ("failed", true, |rig, _, load| rig.inbox.transfer(load.unwrap().transfer, Outcome::Failed).unwrap()),
        ("lease", false, |rig, _, _| rig.clock += 1000),
        ("lease while loading", true, |rig, _, _| rig.clock += 1000),
        ("aborted", false, |rig, seq, _| rig.inbox.abort(seq).unwrap()),
        ("aborted while loading", true, |rig, seq, _| rig.inbox.abort(seq).unwrap()),
        ("cut", false, |rig, seq, _| rig.inbox.stop_at(seq, 1, Finish::Error).unwrap()),
        ("cut while loading", true, |rig, seq, _| rig.inbox.stop_at(seq, 1, Finish::Abort).unwrap()),
    ];
    for (way, loads, act) in ways {
        let mut c = as_engine(EngineType::Completion, config(16, 64, 4, 64));
        c.policy.kv_lease_ns = 500;
        let mut rig = Rig::new(&c);
        let prepared = Prepared { user: 42, ..arriving(1, 40, 1, 6, 3) };
        let seq = rig.submit(&prepared, 3).unwrap()[0];
        rig.step();
        let load = loads.then(|| rig.scheduler.begin_load(seq, 40).unwrap());
        if let Some(load) = &load {
            rig.fill_load(load, &prepared.tokens);
        }
        assert!(rig.scheduler.drain_remote_releases().is_empty(), "{way}: it may still be wanted");
        act(&mut rig, seq, load.clone());
        rig.step();
        assert_eq!(rig.scheduler.drain_remote_releases(), [(seq, 42)], "{way}");
        // Late and repeated.
        if let Some(load) = load {
            rig.inbox.transfer(load.transfer, Outcome::Done).unwrap();
        }
        rig.inbox.abort(seq).unwrap();
        rig.clock += 2000;
        rig.step();
        rig.run(20);
        assert_eq!(rig.scheduler.drain_remote_releases(), [], "{way}: once");
        rig.verify_streams(256);
        rig.verify_empty();
    }
    // A grammar that cannot be compiled ends a request before it asks for its KV.
    let mut rig = Rig::new(&config(16, 64, 4, 64));
    let flags = PrepFlags { grammar: true, ..WAIT };
    let seq = rig.submit(&Prepared { flags, user: 7, ..arriving(1, 40, 1, 6, 3) }, 3).unwrap()[0];
    rig.step();
    rig.inbox.grammar_ready(seq, false).unwrap();
    rig.step();
    assert_eq!(rig.scheduler.drain_remote_releases(), [(seq, 7)]);
}

#[test]
fn two_parked_holders_of_half_the_pool_each_make_progress() {
    // Each holds four of nine blocks with loaded KV and needs five; nobody runs.
    let mut rig = Rig::new(&config(16, 10, 4, 64));
    let prepared: Vec<Prepared> = (0..2).map(|i| arriving(i, 64, 1, 20, i)).collect();
    let seqs: Vec<Seq> = prepared.iter().enumerate().map(|(i, p)| rig.submit(p, i as u64).unwrap()[0]).collect();
    rig.step();
    // A third takes the last block while they wait, and keeps it past its end.
    let third = rig.add_long(&prompt(9, 5), 3);
    rig.step();
    let save = rig.scheduler.begin_save(third).unwrap();
    let loads: Vec<Load> = seqs.iter().map(|&seq| rig.scheduler.begin_load(seq, 64).unwrap()).collect();
    for (load, prepared) in loads.iter().zip(&prepared) {
        rig.fill_load(load, &prepared.tokens);
        rig.inbox.transfer(load.transfer, Outcome::Done).unwrap();
    }
    for _ in 0..200 {
        rig.step();
    }
    for seq in seqs {
        assert_eq!(rig.finished.get(&seq), Some(&(Finish::Length as i32)), "{:?}", rig.scheduler.snapshot());
    }
    rig.scheduler.close_transfer(save.transfer, true);
    rig.step();
    rig.verify_streams(256);
    rig.verify_empty();
}

#[test]
fn a_waiting_holder_of_loaded_kv_is_a_victim_before_a_running_sequence_that_came_first() {
    // Two blocks run, four are held by a sequence that came later and needs a fifth; then the runner needs a third.
    let mut rig = Rig::new(&config(16, 7, 4, 64));
    let runner = rig.add_long(&prompt(1, 30), 20);
    rig.step();
    let prepared = arriving(2, 64, 1, 4, 5);
    let held = rig.submit(&prepared, 5).unwrap()[0];
    rig.step();
    let load = rig.scheduler.begin_load(held, 64).unwrap();
    rig.fill_load(&load, &prepared.tokens);
    rig.inbox.transfer(load.transfer, Outcome::Done).unwrap();
    rig.step();
    let info = rig.scheduler.info(held).unwrap();
    assert_eq!((info.status, info.computed_tokens), (Status::Ready, 64));
    while !rig.finished.contains_key(&runner) {
        rig.step();
    }
    assert_eq!(rig.scheduler.snapshot().preemptions, 0);
    rig.run(40);
    assert_eq!(rig.finished[&held], Finish::Length as i32);
    rig.verify_streams(256);
    rig.verify_empty();
}

#[derive(Clone, Debug)]
enum Op {
    Add {
        len: u32,
        produced: u32,
        max_new: u32,
        grammar: bool,
        bad: bool,
    },
    Step,
    Grammar(u16, bool),
    Load(u16, u32),
    Close(u16, bool),
    /// A transfer that was closed long ago.
    Again(u16),
    Abort(u16),
    StopAt(u16),
    FailStep,
    Late(u64),
    Drain,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        5 => (1..60u32, 0..4u32, 1..12u32, prop::bool::weighted(0.3), prop::bool::weighted(0.15)).prop_map(
            |(len, produced, max_new, grammar, bad)| Op::Add { len, produced, max_new, grammar, bad }
        ),
        10 => Just(Op::Step),
        3 => (any::<u16>(), prop::bool::weighted(0.7)).prop_map(|(k, ok)| Op::Grammar(k, ok)),
        6 => (any::<u16>(), 1..60u32).prop_map(|(k, n)| Op::Load(k, n)),
        5 => (any::<u16>(), prop::bool::weighted(0.7)).prop_map(|(k, ok)| Op::Close(k, ok)),
        2 => any::<u16>().prop_map(Op::Again),
        2 => any::<u16>().prop_map(Op::Abort),
        1 => any::<u16>().prop_map(Op::StopAt),
        1 => Just(Op::FailStep),
        1 => (0..40u64).prop_map(Op::Late),
        2 => Just(Op::Drain),
    ]
}

/// What is known of every request that came with KV, and what was told about it.
struct Ledger {
    rig: Rig,
    seqs: Vec<Seq>,
    open: Vec<(Seq, Load)>,
    closed: Vec<Load>,
    refused: Vec<u64>,
    tokens: BTreeMap<Seq, Vec<u32>>,
    told: BTreeMap<u64, (u32, Seq)>,
}

impl Ledger {
    fn apply(&mut self, op: &Op) {
        let rig = &mut self.rig;
        let pick = |k: u16, seqs: &[Seq]| (!seqs.is_empty()).then(|| seqs[k as usize % seqs.len()]);
        match *op {
            Op::Add { len, produced, max_new, grammar, bad } => {
                let user = self.tokens.len() as u64 + self.refused.len() as u64;
                let mut prepared = Prepared { user, ..arriving(user % 5, len, produced, max_new, user) };
                prepared.flags.grammar = grammar;
                if bad {
                    prepared.tokens[0] = VOCAB;
                }
                match rig.submit(&prepared, user) {
                    Ok(seqs) => {
                        self.seqs.push(seqs[0]);
                        self.tokens.insert(seqs[0], prepared.tokens);
                    }
                    Err(_) => self.refused.push(user),
                }
            }
            Op::Step => {
                rig.step();
            }
            Op::Grammar(k, ok) => {
                if let Some(seq) = pick(k, &self.seqs) {
                    rig.inbox.grammar_ready(seq, ok).unwrap();
                }
            }
            Op::Load(k, n) => {
                let waiting: Vec<Seq> =
                    self.seqs.iter().copied().filter(|&s| rig.status(s) == Some(Status::WaitKv)).collect();
                let Some(seq) = pick(k, &waiting) else { return };
                let most = self.tokens[&seq].len() as u32 - 1;
                if most > 0
                    && let Ok(load) = rig.scheduler.begin_load(seq, 1 + n % most)
                {
                    self.open.push((seq, load));
                }
            }
            Op::Close(k, ok) => {
                if self.open.is_empty() {
                    return;
                }
                let (seq, load) = self.open.swap_remove(k as usize % self.open.len());
                if ok {
                    // The mover writes behind what is in flight.
                    rig.drain();
                    let tokens = self.tokens[&seq].clone();
                    rig.fill_load(&load, &tokens);
                }
                let outcome = if ok { Outcome::Done } else { Outcome::Failed };
                rig.inbox.transfer(load.transfer, outcome).unwrap();
                self.closed.push(load);
            }
            Op::Again(k) => {
                if !self.closed.is_empty() {
                    let transfer = self.closed[k as usize % self.closed.len()].transfer;
                    rig.inbox.transfer(transfer, Outcome::Done).unwrap();
                }
            }
            Op::Abort(k) => {
                if let Some(seq) = pick(k, &self.seqs) {
                    rig.inbox.abort(seq).unwrap();
                }
            }
            Op::StopAt(k) => {
                if let Some(seq) = pick(k, &self.seqs) {
                    let made = rig.scheduler.info(seq).map_or(0, |i| i.output_tokens);
                    rig.inbox.stop_at(seq, made, Finish::Stop).unwrap();
                }
            }
            Op::FailStep => {
                if rig.queue.len() < rig.scheduler_depth() {
                    let plan = rig.schedule();
                    rig.queue.extend(plan);
                }
                rig.fail_oldest();
            }
            Op::Late(ns) => rig.clock += ns,
            Op::Drain => self.drain(),
        }
        self.rig.verify();
    }

    fn drain(&mut self) {
        for (seq, user) in self.rig.scheduler.drain_remote_releases() {
            let told = self.told.entry(user).or_insert((0, seq));
            told.0 += 1;
            assert_eq!(*told, (1, seq), "request {user} is named once");
            let waits = matches!(self.rig.status(seq), Some(Status::WaitGrammar | Status::WaitKv));
            assert!(!waits, "request {user} still waits for what was let go");
        }
    }

    fn finish(mut self) -> [u64; 5] {
        while let Some((_, load)) = self.open.pop() {
            self.rig.inbox.transfer(load.transfer, Outcome::Failed).unwrap();
        }
        self.rig.clock += 1000;
        for &seq in &self.seqs {
            self.rig.inbox.grammar_ready(seq, true).unwrap();
        }
        for _ in 0..2000 {
            if !self.rig.step() {
                if !self.rig.scheduler.has_work() {
                    break;
                }
                self.rig.clock += 1000;
            }
        }
        assert!(!self.rig.scheduler.has_work());
        self.drain();
        assert_eq!(self.told.len(), self.tokens.len() + self.refused.len(), "each request was named");
        assert!(self.refused.iter().all(|user| self.told[user].1 == Seq::default()));
        self.rig.verify_empty();
        assert_eq!(self.rig.finished.len(), self.tokens.len(), "one terminal row each");
        self.rig.scheduler.snapshot().finished
    }
}

#[test]
fn any_order_of_events_with_duplicates_and_lateness_releases_each_remote_once() {
    let cases = Cases { cases: 250, failure_persistence: None, max_shrink_iters: 400, ..Cases::default() };
    let mut runner = TestRunner::new_with_rng(cases, TestRng::from_seed(RngAlgorithm::ChaCha, &[9; 32]));
    let total = std::cell::RefCell::new([0u64; 6]);
    runner
        .run(&(prop::collection::vec(op(), 150), 6..20u32, any::<bool>(), 1..3u32), |(ops, pages, ordered, depth)| {
            let mut c = as_engine(EngineType::Completion, config(16, pages, 4, 64));
            c.policy.kv_lease_ns = 60;
            c.device_ordered = ordered;
            c.max_in_flight = depth;
            let (seqs, open, closed, refused) = (vec![], vec![], vec![], vec![]);
            let (tokens, told) = (BTreeMap::new(), BTreeMap::new());
            let mut ledger = Ledger { rig: Rig::new(&c), seqs, open, closed, refused, tokens, told };
            for op in &ops {
                ledger.apply(op);
            }
            let refused = ledger.refused.len() as u64;
            let finished = ledger.finish();
            let mut total = total.borrow_mut();
            for (sum, n) in total.iter_mut().zip(finished.into_iter().chain([refused])) {
                *sum += n;
            }
            Ok(())
        })
        .unwrap();
    let total = total.into_inner();
    println!("stop, length, abort, error, handover, refused: {total:?}");
    assert!([0, 1, 2, 3, 5].iter().all(|&i| total[i] > 100), "{total:?}");
}
