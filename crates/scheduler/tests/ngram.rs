//! Prompt lookup in running sequences: streams stay what they are, serial and overlapped, under preemption.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use common::{Rig, config, prompt};
use deepinfer_scheduler::{NgramConfig, Seq, header};

fn rig(in_flight: u32, pages: u32) -> Rig {
    let mut c = config(16, pages, 6, 64);
    c.limits.max_draft = 3;
    c.max_in_flight = in_flight;
    let mut rig = Rig::new(&c);
    rig.scheduler.set_ngram(NgramConfig { shortest: 1, longest: 3, tokens: 3, ..NgramConfig::default() }).unwrap();
    rig
}

#[test]
fn streams_are_those_of_no_drafting() {
    for in_flight in [1, 2] {
        for pages in [64, 14] {
            let mut rig = rig(in_flight, pages);
            let seqs: Vec<Seq> = (0..5).map(|i| rig.add_long(&prompt(i, 20), 60)).collect();
            for _ in 0..2000 {
                if !rig.scheduler.has_work() {
                    break;
                }
                rig.scheduler.propose_ngram();
                rig.step();
            }
            assert!(rig.scheduler.snapshot().drafted > 0);
            assert!(seqs.iter().all(|s| rig.outputs[s].len() == 60), "{in_flight} in flight, {pages} pages");
            rig.verify_streams(256);
            rig.verify_empty();
        }
    }
}

#[test]
fn nothing_is_proposed_in_prefill_nor_beyond_the_limit() {
    let mut rig = rig(1, 64);
    // Every token of this prompt occurred before; 5 tokens are left to make.
    rig.add_long(&[7; 100], 5);
    assert_eq!(rig.scheduler.propose_ngram(), 0, "not running yet");
    let plan = rig.schedule().unwrap();
    assert_eq!(rig.scheduler.propose_ngram(), 0, "in prefill");
    rig.execute(&plan);
    rig.complete(plan.step);
    let mut steps = 0;
    while let Some(plan) = rig.schedule() {
        assert!(rig.memory.get(plan.slot, "header")[header::LONGEST_CONTEXT] <= 105);
        rig.execute(&plan);
        rig.complete(plan.step);
        assert!(rig.scheduler.propose_ngram() <= 3);
        steps += 1;
    }
    assert!(steps <= 6);
    rig.flush();
    rig.verify_streams(256);
}

#[test]
fn without_settings_nothing_happens_and_wrong_ones_are_refused() {
    let mut c = config(16, 64, 4, 64);
    c.limits.max_draft = 2;
    let mut rig = Rig::new(&c);
    assert!(rig.scheduler.set_ngram(NgramConfig { tokens: 3, ..NgramConfig::default() }).is_err());
    rig.add_long(&[7; 10], 5);
    for _ in 0..3 {
        rig.step();
    }
    assert_eq!(rig.scheduler.propose_ngram(), 0);
}
