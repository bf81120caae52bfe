//! Prefix hits: what may be matched, from when on, and by whom.

// A test that meets an error stops there.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod common;

use common::{Rig, config, prompt};
use deepinfer_scheduler::{Extra, ExtraKind, PrepFlags, Prepared, Seq};

fn cached(rig: &Rig, seq: Seq) -> u32 {
    rig.scheduler.info(seq).unwrap().cached_tokens
}

fn warm(rig: &mut Rig, tokens: &[u32]) {
    rig.add_long(tokens, 1);
    rig.run(50);
}

#[test]
fn two_requests_in_one_step_do_not_hit_blocks_that_are_not_computed_yet() {
    let mut rig = Rig::new(&config(16, 64, 4, 256));
    let first = rig.add_long(&prompt(1, 70), 3);
    let second = rig.add_long(&prompt(1, 70), 3);
    rig.step();
    assert_eq!((cached(&rig, first), cached(&rig, second)), (0, 0));
    let third = rig.add_long(&prompt(1, 70), 3);
    rig.step();
    assert_eq!(cached(&rig, third), 64, "matchable once the step that filled them completed");
    rig.run(20);
    rig.verify_streams(256);
    rig.verify_empty();
}

#[test]
fn a_step_in_flight_publishes_nothing() {
    let mut rig = Rig::new(&config(16, 64, 4, 32));
    rig.add_long(&prompt(1, 70), 3);
    rig.step();
    let plan = rig.schedule().unwrap();
    rig.execute(&plan);
    let before = rig.scheduler.counts();
    rig.complete(plan.step);
    let other = rig.add_long(&prompt(1, 70), 3);
    rig.step();
    assert_eq!(cached(&rig, other), 64, "{before:?}");
}

#[test]
fn abort_at_each_step_of_prefill_leaves_nothing_wrong_behind() {
    for steps in 0..8 {
        let mut rig = Rig::new(&config(16, 64, 4, 12));
        let first = rig.add_long(&prompt(1, 70), 5);
        for _ in 0..steps {
            rig.step();
        }
        let computed = rig.scheduler.info(first).map_or(0, |i| i.computed_tokens);
        rig.inbox.abort(first).unwrap();
        rig.step();
        let second = rig.add_long(&prompt(1, 70), 5);
        rig.step();
        assert_eq!(cached(&rig, second), (computed / 16 * 16).min(64), "whole confirmed blocks only");
        rig.run(30);
        assert_eq!(rig.outputs[&second], rig.expected(second, 256));
        assert_eq!(rig.finished[&first], 3);
        rig.verify_streams(256);
        rig.verify_empty();
    }
}

#[test]
fn a_failed_step_publishes_nothing_of_what_it_wrote() {
    let mut rig = Rig::new(&config(16, 64, 4, 32));
    rig.add_long(&prompt(1, 70), 5);
    rig.step();
    let plan = rig.schedule().unwrap();
    // The device stops before it wrote anything.
    rig.fail(plan.step);
    let second = rig.add_long(&prompt(1, 70), 5);
    rig.step();
    assert_eq!(cached(&rig, second), 32, "the completed step counts, the failed one does not");
    rig.run(30);
    rig.verify_streams(256);
}

#[test]
fn a_hit_rounds_down_to_the_block_and_leaves_one_token_to_compute() {
    for (len, hit) in [(15, 0), (16, 0), (17, 16), (31, 16), (32, 16), (33, 32), (64, 48), (65, 64)] {
        let mut rig = Rig::new(&config(16, 64, 4, 256));
        warm(&mut rig, &prompt(1, 100));
        let seq = rig.add_long(&prompt(1, len), 3);
        rig.step();
        assert_eq!(cached(&rig, seq), hit, "prompt of {len}");
        rig.run(20);
        rig.verify_streams(256);
    }
}

#[test]
fn tokens_do_not_depend_on_hits_chunks_or_company() {
    let alone: Vec<Vec<u32>> = {
        let mut rig = Rig::new(&config(16, 200, 8, 256));
        (0..6)
            .map(|i| {
                let seq = rig.submit(&Prepared::new(prompt(i % 2, 40 + i as u32), 12), i).unwrap()[0];
                rig.run(40);
                rig.outputs[&seq].clone()
            })
            .collect()
    };
    for (tokens, caching) in [(8, true), (8, false), (33, true), (256, false)] {
        let mut c = config(16, 200, 8, tokens);
        c.prefix_caching = caching;
        let mut rig = Rig::new(&c);
        let seqs: Vec<Seq> =
            (0..6).map(|i| rig.submit(&Prepared::new(prompt(i % 2, 40 + i as u32), 12), i).unwrap()[0]).collect();
        rig.run(200);
        for (seq, expected) in seqs.iter().zip(&alone) {
            assert_eq!(&rig.outputs[seq], expected);
        }
    }
}

#[test]
fn requests_that_want_prompt_logprobs_compute_every_prompt_row() {
    let mut rig = Rig::new(&config(16, 64, 4, 256));
    warm(&mut rig, &prompt(1, 70));
    let flags = PrepFlags { prompt_logprobs: true, ..PrepFlags::default() };
    let seq = rig.submit(&Prepared { flags, ..Prepared::new(prompt(1, 70), 2) }, 0).unwrap()[0];
    let plan = rig.schedule().unwrap();
    assert_eq!((plan.rows, cached(&rig, seq)), (70, 0));
    assert_eq!(rig.memory.get(plan.slot, "header")[deepinfer_scheduler::header::PROMPT_LOGPROBS], 1);
    assert_eq!(rig.memory.get(plan.slot, "seq_flags")[0] & 2, 2);
    rig.execute(&plan);
    rig.complete(plan.step);
    rig.run(10);
    rig.verify_streams(256);
}

#[test]
fn salts_and_extras_keep_namespaces_apart() {
    let mut rig = Rig::new(&config(16, 64, 4, 256));
    let plain = Prepared::new(prompt(1, 70), 1);
    let salted = |salt: &[u8]| Prepared { salt: salt.to_vec(), ..plain.clone() };
    let adapter = |name: &[u8]| Prepared {
        extras: vec![Extra { kind: ExtraKind::Adapter, position: 0, data: name.to_vec() }],
        ..plain.clone()
    };
    let requests = [plain.clone(), salted(b"a"), salted(b"b"), adapter(b"a"), adapter(b"b")];
    for round in 0..2 {
        for request in &requests {
            let seq = rig.submit(request, 0).unwrap()[0];
            rig.step();
            assert_eq!(cached(&rig, seq), if round == 0 { 0 } else { 64 }, "{:?}", request.salt);
            rig.run(5);
        }
    }
}

#[test]
fn answers_become_prefixes_too() {
    let mut rig = Rig::new(&config(16, 64, 4, 256));
    let first = rig.add_long(&prompt(1, 20), 45);
    rig.run(100);
    let mut turn = prompt(1, 20);
    turn.extend(&rig.outputs[&first]);
    turn.extend(prompt(2, 10));
    let second = rig.add_long(&turn, 2);
    rig.step();
    assert_eq!(cached(&rig, second), 64, "64 of 65 tokens: the KV of the last was never written");
    rig.run(10);
    rig.verify_streams(256);
}

#[test]
fn the_event_log_tells_what_the_index_does() {
    let mut c = config(16, 64, 4, 256);
    c.event_capacity = 100;
    let mut rig = Rig::new(&c);
    warm(&mut rig, &prompt(1, 70));
    let mut events = Vec::new();
    rig.scheduler.events(&mut events);
    assert_eq!(events.len(), 4);
    assert!(events.iter().all(|e| matches!(e, deepinfer_scheduler::Event::Stored { .. })));
}
