//! Positions of a prompt that one chunk computes together.

// A test that meets an error stops there. A list of one span is meant.
#![allow(clippy::unwrap_used, clippy::panic, clippy::single_range_in_vec_init)]

mod common;

use common::{Rig, config, mix, prompt, spans, state};
use deepinfer_scheduler::{ChunkCost, ChunkPolicy, Extra, ExtraKind, GroupSpec, HitRule, Prepared, Reject, WindowRule};
use std::ops::Range;

fn request(seed: u64, len: u32, max_new: u32, spans: Vec<Range<u32>>) -> Prepared {
    Prepared { spans, ..Prepared::new(prompt(seed, len), max_new) }
}

/// Ends of the chunks that `len` tokens with these spans are computed in, alone.
fn chunk_ends(rig: &mut Rig, prepared: &Prepared) -> Vec<u32> {
    rig.submit(prepared, 7).unwrap();
    let mut ends = Vec::new();
    while let Some(plan) = rig.schedule() {
        ends.push(rig.memory.get(plan.slot, "seq_len")[0] as u32);
        rig.queue.push_back(plan);
        rig.finish_oldest();
    }
    ends.retain(|&end| end <= prepared.tokens.len() as u32);
    ends
}

#[test]
fn chunks_end_before_a_span_or_hold_it_whole() {
    let ends = |tokens: u32, given: Vec<Range<u32>>| {
        let mut rig = Rig::new(&config(16, 64, 1, tokens));
        chunk_ends(&mut rig, &request(1, 60, 1, given))
    };
    assert_eq!(ends(16, vec![]), [16, 32, 48, 60]);
    assert_eq!(ends(16, vec![10..20, 20..36]), [10, 20, 36, 52, 60]);
    assert_eq!(ends(16, vec![0..16, 44..60]), [16, 32, 44, 60]);
    assert_eq!(ends(60, vec![5..7]), [60]);
}

#[test]
fn aligned_and_timed_chunks_leave_spans_whole() {
    let mut aligned = config(16, 64, 1, 32);
    aligned.policy.chunk_align = 8;
    assert_eq!(chunk_ends(&mut Rig::new(&aligned), &request(1, 60, 1, vec![20..50])), [20, 50, 60]);
    let mut timed = config(16, 64, 1, 64);
    let cost = ChunkCost { a: 0.0, b: 0.0, d: 1.0, e: 0.0 };
    timed.policy.chunk = ChunkPolicy::Time { budget_ns: 8, cost };
    // More than the step's time, but nothing else would ever make room for it.
    assert_eq!(chunk_ends(&mut Rig::new(&timed), &request(1, 40, 1, vec![12..30])), [8, 12, 30, 38, 40]);
}

#[test]
fn a_span_longer_than_a_step_is_sure_to_hold_is_refused() {
    let mut two = config(16, 64, 4, 32);
    two.limits.max_draft = 2;
    let rig = Rig::new(&two); // 32 rows less one and two drafts of three others
    assert_eq!(rig.inbox.add(&request(1, 60, 1, vec![3..27])), Err(Reject::SpanTooLong { len: 24, most: 23 }));
    let said = Reject::SpanTooLong { len: 24, most: 23 }.to_string();
    assert!(said.contains("max_num_batched_tokens") && said.contains("max_num_seqs"), "{said}");
    let mut chunked = config(16, 64, 1, 64);
    chunked.policy.chunk = ChunkPolicy::Tokens(10);
    let refused = Rig::new(&chunked).inbox.add(&request(1, 60, 1, vec![0..11]));
    assert_eq!(refused, Err(Reject::SpanTooLong { len: 11, most: 10 }));
    for wrong in [vec![5..5], vec![4..61], vec![0..4, 3..5], vec![8..9, 0..1]] {
        assert!(matches!(rig.inbox.add(&request(1, 60, 1, wrong)), Err(Reject::Conflict(_))));
    }
}

#[test]
fn the_longest_span_finds_room_beside_everyone_else() {
    let mut rig = Rig::new(&config(16, 400, 6, 24));
    for seed in 0..5 {
        rig.add_long(&prompt(seed, 12), 200);
    }
    for _ in 0..6 {
        rig.step();
    }
    let seq = rig.submit(&request(9, 60, 3, vec![20..39, 39..58]), 900).unwrap()[0];
    for _ in 0..10 {
        rig.step();
    }
    assert_eq!(rig.finished.get(&seq), Some(&2), "the others still decode");
    assert!(rig.scheduler.snapshot().running == 5);
    rig.run(400);
    rig.verify_streams(256);
    rig.verify_empty();
}

#[test]
fn a_hit_within_a_span_goes_on_with_the_rest_of_it() {
    let image = |data: u8| Extra { kind: ExtraKind::Image, position: 10, data: vec![data; 32] };
    let mut rig = Rig::new(&config(16, 64, 1, 32));
    let with = |data| Prepared { extras: vec![image(data)], ..request(3, 60, 1, vec![10..40]) };
    assert_eq!(chunk_ends(&mut rig, &with(1)), [10, 42, 60]);
    assert_eq!(chunk_ends(&mut rig, &with(1)), [60], "three blocks of the same image");
    assert_eq!(chunk_ends(&mut rig, &with(2)), [10, 42, 60], "no block of another one");
    let longer = Prepared { tokens: prompt(3, 33), ..request(3, 33, 1, vec![10..33]) };
    assert_eq!(chunk_ends(&mut rig, &Prepared { extras: vec![image(1)], ..longer }), [33], "two blocks, then the rest");
}

#[test]
fn forks_of_a_prompt_that_ends_with_a_span() {
    for stateful in [false, true] {
        let mut config = config(16, 64, 4, 40);
        if stateful {
            config.groups.push(state());
        }
        let mut rig = Rig::new(&config);
        let forked = Prepared { forks: 3, ..request(2, 30, 6, vec![5..30]) };
        let seqs = rig.submit(&forked, 50).unwrap();
        rig.run(60);
        rig.flush();
        assert!(seqs.iter().all(|seq| rig.finished.contains_key(seq)));
        rig.verify_streams(256);
        rig.verify_empty();
    }
}

/// Many at once in small pools: preemption, swap and recompute leave spans whole, which the device of the tests checks.
#[test]
fn spans_stay_whole_under_pressure() {
    for seed in 0..60u64 {
        let seqs = 1 + (mix(seed, 1) % 5) as u32;
        let tokens = seqs + 12 + (mix(seed, 2) % 30) as u32;
        let mut config = config(8, 20 + (mix(seed, 3) % 12) as u32, seqs, tokens);
        config.max_in_flight = 1 + (seed % 2) as u32;
        config.host_blocks = if seed % 3 == 0 { 20 } else { 0 };
        config.policy.chunk_align = 1 + (mix(seed, 4) % 5) as u32;
        if seed % 2 == 0 {
            let cut = if seed % 4 == 0 { 8 } else { 0 };
            config.groups.push(GroupSpec::State { stored: 64, dropped: 128, replicas: 1, ring: 0, cut });
            config.host_slots = 4;
        }
        if seed % 4 == 0 {
            // States are kept of boundaries that a chunk passes by at most four rows, never of one within a span.
            config.policy.hit_rule = HitRule::Window(WindowRule {
                encoder: 2,
                decoder: 2,
                window: 5,
                grain: 8,
                backtrack: 4,
                exact: true,
                keep: 9,
                truncated: false,
            });
            config.snapshot_slots = 6;
        }
        let mut rig = Rig::new(&config);
        rig.scheduler.set_rates(1e12, 1.0);
        for nth in 0..14u64 {
            let len = 2 + (mix(seed, 10 + nth) % 90) as u32;
            let (family, forks) = (nth % 4, 1 + u32::from(nth % 5 == 0));
            let spans = spans(mix(seed, nth), len, tokens - (seqs - 1));
            let prepared = Prepared { forks, ..request(family, len, 1 + (mix(seed, 90 + nth) % 40) as u32, spans) };
            rig.submit(&prepared, 100 * nth).unwrap();
            for _ in 0..mix(seed, 50 + nth) % 5 {
                rig.step();
            }
        }
        rig.run(6000);
        rig.flush();
        rig.verify_streams(256);
        rig.verify_empty();
    }
}
