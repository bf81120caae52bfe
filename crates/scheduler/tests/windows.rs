//! Models with windows: where chunks end, where sequences begin after a hit, which states are kept and brought back.
//!
//! The toy model computes its windows row by row, so that each test also compares what must be exact (`common/window.rs`).

// A test that meets an error stops there.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod common;

use common::{Rig, config, paged, prompt};
use deepinfer_scheduler::{
    Config, EngineType, Finish, GroupSpec, HitRule, PrepFlags, Prepared, Seq, StartKind, Status, WindowRule, header,
};

/// Two encoder and two decoder layers with windows of five tokens: 17 tokens, 9 and 8 where the full model has 5081, 2541 and 2540.
const SMALL: WindowRule =
    WindowRule { encoder: 2, decoder: 2, window: 5, grain: 16, backtrack: 3, exact: true, keep: 8, truncated: false };
const REPLAY: WindowRule = WindowRule { exact: false, ..SMALL };
/// DeepSeek-V4.1: 20 + 20 layers, windows of 128 tokens.
const FULL: WindowRule = WindowRule {
    encoder: 20,
    decoder: 20,
    window: 128,
    grain: 128,
    backtrack: 6,
    exact: true,
    keep: 134,
    truncated: false,
};

fn state(cut: u32) -> GroupSpec {
    GroupSpec::State { stored: 64, dropped: 128, replicas: 1, ring: 0, cut }
}

/// One paged group whose blocks are the rule's grain, and a state.
fn windows(rule: WindowRule, pages: u32, seqs: u32, tokens: u32, places: u32) -> Config {
    let mut c = config(rule.grain, pages, seqs, tokens);
    c.groups.push(state(rule.grain));
    c.policy.hit_rule = HitRule::Window(rule);
    c.snapshot_slots = places;
    c
}

/// Runs a request to its end. How it began, and the prompt rows that it computed.
fn ask(rig: &mut Rig, tokens: &[u32], max_new: u32) -> ([i32; 3], u32) {
    let seq = rig.add_long(tokens, max_new);
    let mut began = None;
    for _ in 0..2000 {
        let plan = rig.schedule();
        if let Some(plan) = plan {
            rig.queue.push_back(plan);
            began = began.or(rig.begun(&plan).first().copied());
            if rig.queue.len() < rig.scheduler_depth() {
                continue;
            }
        }
        if !rig.finish_oldest() {
            rig.flush();
            break;
        }
    }
    assert_eq!(rig.outputs[&seq].len(), max_new as usize);
    rig.verify_streams(1 << 20);
    (began.unwrap(), rig.prompt_rows[&seq])
}

#[test]
fn every_tail_of_a_prompt_ends_a_chunk_where_its_state_can_be_copied() {
    let mut cuts = 0;
    for tail in 0..128 {
        for budget in [1, 5, 64, 131, 200, 512] {
            if budget == 1 && tail % 16 > 0 {
                continue;
            }
            let mut c = windows(FULL, 40, 4, 4, 4);
            c.limits.max_num_batched_tokens = budget.max(4);
            c.limits.max_model_len = 1024;
            c.policy.chunk = deepinfer_scheduler::ChunkPolicy::Tokens(budget);
            c.policy.chunk_align = 1 + tail % 20;
            let mut scheduler = Rig::new(&c);
            // Only where rows go is of interest here: results are made up.
            let (len, last) = (256 + tail, 256);
            let others = 2u64;
            for i in 0..=others {
                scheduler.inbox.add(&Prepared::new(prompt(i, len), 500)).unwrap();
            }
            let (mut ends, mut steps) = (vec![Vec::new(); 3], 0);
            while ends.iter().any(|ends: &Vec<u32>| ends.last() != Some(&len)) {
                let plan = scheduler.scheduler.schedule(1).unwrap().expect("somebody has rows");
                assert!(plan.rows > 0 && plan.rows <= budget.max(4));
                let field = |name: &str| scheduler.memory.get(plan.slot, name).to_vec();
                let (flags, row, seq_len) = (field("seq_flags"), field("state_row"), field("seq_len"));
                for i in plan.decoding as usize..plan.seqs as usize {
                    assert_eq!(flags[i] & 4, 4);
                    ends[row[i] as usize - 1].push(seq_len[i] as u32);
                }
                let n = plan.seqs as usize;
                scheduler.memory.get_mut(plan.slot, "accepted")[..n].fill(1);
                scheduler.memory.get_mut(plan.slot, "tokens")[..plan.samples as usize].fill(1);
                scheduler.scheduler.complete(plan.step, 1).unwrap();
                steps += 1;
                assert!(steps < 4 * len, "it starves");
            }
            for ends in ends {
                let copied = ends.iter().any(|&end| end >= last && end <= last + 6);
                assert!(copied, "tail {tail}, {budget} rows: chunks end at {ends:?}");
                cuts += u32::from(ends.contains(&last));
            }
        }
    }
    assert!(cuts > 1000);
}

#[test]
fn tokens_computed_again_are_those_derived_by_hand() {
    // Small: no window at S, S ≤ L − 17 and S ≤ H − 8; a slice at S ≤ L − 9; replay: S ≤ L − 8, S ≤ H − 16.
    for (rule, len, hit, start) in [
        (SMALL, 65, 64, 48),
        (SMALL, 66, 64, 48),
        (SMALL, 80, 64, 48),
        (SMALL, 64, 48, 32),
        (SMALL, 17, 16, 0),
        (SMALL, 32, 16, 0),
        (SMALL, 34, 32, 16),
        (REPLAY, 65, 64, 48),
        (REPLAY, 71, 64, 48),
        (REPLAY, 72, 64, 48),
        (REPLAY, 80, 64, 48),
        (REPLAY, 32, 16, 0),
        (REPLAY, 55, 48, 32),
        (WindowRule { truncated: true, ..REPLAY }, 71, 48, 32),
        (WindowRule { truncated: true, ..REPLAY }, 72, 64, 48),
        (WindowRule { truncated: true, keep: 40, ..REPLAY }, 72, 64, 32),
        (WindowRule { truncated: true, ..REPLAY }, 20, 0, 0),
    ] {
        let mut rig = Rig::new(&windows(rule, 40, 2, 64, 0));
        ask(&mut rig, &prompt(1, 81), 1);
        let (began, rows) = ask(&mut rig, &prompt(1, len), 3);
        let kind = if hit > 0 { StartKind::Rerun } else { StartKind::Nothing };
        assert_eq!(began, [start as i32, hit as i32, kind as i32], "{rule:?} {len}");
        assert_eq!(rows, len - start);
        let metrics = rig.scheduler.snapshot();
        assert_eq!((metrics.hit_tokens, metrics.rerun_tokens), (hit.into(), (hit - start).into()));
        assert_eq!(metrics.starts, if hit > 0 { [1, 0, 0, 1] } else { [2, 0, 0, 0] });
        rig.verify_empty();
    }
}

#[test]
fn a_long_turn_behind_a_short_hit_begins_early_enough_for_its_block_kv() {
    let mut rig = Rig::new(&windows(SMALL, 40, 2, 256, 0));
    ask(&mut rig, &prompt(1, 33), 1);
    let mut turn = prompt(1, 32);
    turn.extend(prompt(2, 90));
    // L − 17 = 105 lies behind the hit; what matters is 32 − 8 = 24.
    assert_eq!(ask(&mut rig, &turn, 2), ([16, 32, StartKind::Rerun as i32], 122 - 16));
    // And what it wrote is right: the toy compares it where the next one reads it.
    turn.extend(prompt(3, 20));
    assert_eq!(ask(&mut rig, &turn, 2), ([96, 112, StartKind::Rerun as i32], 142 - 96));
}

#[test]
fn the_full_models_bounds_hold() {
    let limits = |mut c: Config| {
        c.limits.max_model_len = 8_400;
        c
    };
    // 5081 and 2541 tokens, rounded up to the grain: 8200 − 5081 = 3119 → 3072; 8200 − 2541 = 5659 → 5632.
    let mut rig = Rig::new(&limits(windows(FULL, 140, 2, 4_096, 0)));
    ask(&mut rig, &prompt(1, 8_200), 1);
    assert_eq!(ask(&mut rig, &prompt(1, 8_200), 2), ([3_072, 8_192, 3], 8_200 - 3_072));
    assert_eq!(rig.scheduler.snapshot().rerun_tokens, 5_120);
    // Without the toy's layers: the same numbers for a stored slice and for replay.
    let mut slices = Rig::new(&limits(windows(FULL, 140, 2, 4_096, 0)));
    slices.windows.as_mut().unwrap().computes = false;
    let first = slices.add_long(&prompt(1, 8_200), 8);
    while slices.scheduler.info(first).is_none_or(|info| info.output_tokens < 2) {
        slices.step();
    }
    for boundary in (128..=8_192).step_by(128) {
        assert!(slices.scheduler.note_state_slice(first, boundary, deepinfer_scheduler::Tier::Store, true));
    }
    slices.run(40);
    assert_eq!(ask(&mut slices, &prompt(1, 8_200), 2), ([5_632, 8_192, 2], 8_200 - 5_632));
    let replay = WindowRule { exact: false, truncated: true, ..FULL };
    let mut rig = Rig::new(&limits(windows(replay, 140, 2, 4_096, 0)));
    rig.windows.as_mut().unwrap().computes = false;
    ask(&mut rig, &prompt(1, 8_200), 1);
    assert_eq!(ask(&mut rig, &prompt(1, 8_200), 2), ([7_936, 8_064, 3], 8_200 - 7_936));
    assert_eq!(ask(&mut rig, &prompt(1, 8_326), 2), ([8_064, 8_192, 3], 8_326 - 8_064));
}

#[test]
fn a_stored_slice_needs_the_decoder_made_up_only() {
    let mut rig = Rig::new(&windows(SMALL, 40, 2, 64, 0));
    let first = rig.add_long(&prompt(1, 81), 8);
    while rig.scheduler.info(first).is_none_or(|info| info.output_tokens < 2) {
        rig.step();
    }
    for boundary in [16, 64] {
        assert!(rig.scheduler.note_state_slice(first, boundary, deepinfer_scheduler::Tier::Store, true));
    }
    rig.run(40);
    assert_eq!(ask(&mut rig, &prompt(1, 73), 2).0, [64, 64, 2], "73 − 9 = 64");
    assert_eq!(ask(&mut rig, &prompt(1, 72), 2).0, [48, 64, 3], "too near to the end");
    assert_eq!(ask(&mut rig, &prompt(1, 49), 2).0, [32, 48, 3], "a later start than the slice at 16");
}

#[test]
fn a_snapshot_at_the_end_of_a_prompt_and_of_an_answer_needs_nothing_made_up() {
    for depth in [1, 2] {
        let mut c = windows(SMALL, 60, 4, 64, 8);
        c.max_in_flight = depth;
        let mut rig = Rig::new(&c);
        let first = prompt(1, 70);
        assert_eq!(ask(&mut rig, &first, 30), ([0, 0, 0], 70));
        // At 64 while the prompt was computed; at 96 when the request ended, with this very step.
        let seq = *rig.outputs.keys().last().unwrap();
        let mut turn = first.clone();
        turn.extend(&rig.outputs[&seq]);
        turn.extend(prompt(2, 10));
        assert_eq!(ask(&mut rig, &turn, 2), ([96, 96, 1], 110 - 96), "{depth} in flight");
        assert_eq!(ask(&mut rig, &first, 4), ([64, 64, 1], 70 - 64));
        let metrics = rig.scheduler.snapshot();
        assert_eq!((metrics.rerun_tokens, metrics.starts), (0, [1, 2, 0, 0]));
        assert_eq!(metrics.snapshots_taken, 2, "the second and third passed no boundary that was not kept");
        let places = rig.scheduler.counts().snapshots;
        assert_eq!((places.total, places.cached, places.held), (8, 2, 0));
        assert_eq!(rig.windows.as_ref().unwrap().restored, 2);
        rig.verify_empty();
    }
}

#[test]
fn a_snapshot_before_the_end_of_the_hit_still_reads_the_hit() {
    let mut rig = Rig::new(&windows(SMALL, 60, 4, 64, 8));
    ask(&mut rig, &prompt(1, 40), 1);
    let (began, rows) = ask(&mut rig, &prompt(1, 60), 1);
    assert_eq!((began, rows), ([32, 32, 1], 28));
    ask(&mut rig, &prompt(1, 90), 1);
    // 48 and 80 are kept by now, 64 is not; rows from 48 on read the block that ends at 64.
    let metrics = rig.scheduler.snapshot();
    assert_eq!(ask(&mut rig, &prompt(1, 66), 1), ([48, 64, 1], 66 - 48));
    assert_eq!(rig.scheduler.snapshot().rerun_tokens - metrics.rerun_tokens, 16);
    rig.verify_empty();
}

#[test]
fn places_are_bounded_and_the_one_used_longest_ago_goes_first() {
    let mut rig = Rig::new(&windows(SMALL, 80, 2, 64, 2));
    for family in 1..=3 {
        ask(&mut rig, &prompt(family, 40), 1);
    }
    // The third one's copy goes with the next step and gives the first one's place to it.
    assert_eq!(ask(&mut rig, &prompt(3, 40), 1).0, [32, 32, 1]);
    assert_eq!(ask(&mut rig, &prompt(2, 40), 1).0, [32, 32, 1]);
    assert_eq!(ask(&mut rig, &prompt(1, 40), 1).0, [16, 32, 3], "made up from block KV: 40 − 17, 32 − 8");
    let metrics = rig.scheduler.snapshot();
    assert_eq!((metrics.starts, metrics.snapshots_evicted), ([3, 2, 0, 1], 2));
    // A rerun's state is right from 16 + 16 on: it is kept again.
    assert_eq!(ask(&mut rig, &prompt(1, 40), 1).0, [32, 32, 1]);
    assert_eq!(ask(&mut rig, &prompt(2, 40), 1).0, [32, 32, 1]);
    assert_eq!(rig.scheduler.counts().snapshots.total, 2);
}

#[test]
fn a_block_that_leaves_the_index_takes_its_snapshot_along() {
    let mut rig = Rig::new(&windows(SMALL, 8, 2, 64, 8));
    ask(&mut rig, &prompt(1, 40), 1);
    ask(&mut rig, &prompt(2, 5), 1);
    assert_eq!(rig.scheduler.counts().snapshots.cached, 1);
    ask(&mut rig, &prompt(3, 100), 1);
    ask(&mut rig, &prompt(4, 5), 1);
    let places = rig.scheduler.counts().snapshots;
    assert_eq!((places.cached, places.free), (1, 7), "only that of the last long prompt is left");
    assert_eq!(ask(&mut rig, &prompt(1, 40), 1).0, [0, 0, 0]);
}

#[test]
fn a_failed_step_takes_the_snapshots_it_made_and_those_that_began_with_them() {
    let mut rig = Rig::new(&windows(SMALL, 60, 4, 64, 8));
    ask(&mut rig, &prompt(1, 34), 1);
    // The copy at 32 goes with the step that uses it, and fails with it.
    let seq = rig.add_long(&prompt(1, 50), 4);
    let plan = rig.schedule().unwrap();
    let head = rig.memory.get(plan.slot, "header");
    assert_eq!((head[header::SNAPSHOT_OUT], head[header::SNAPSHOT_IN]), (1, 1));
    assert_eq!(rig.scheduler.counts().snapshots.held, 1);
    rig.queue.push_back(plan);
    rig.fail_oldest();
    assert_eq!(rig.finished[&seq], Finish::Error as i32);
    let places = rig.scheduler.counts().snapshots;
    assert_eq!((places.cached, places.held), (0, 0));
    assert_eq!(ask(&mut rig, &prompt(1, 50), 4).0, [16, 32, 3]);
    rig.verify_empty();
}

#[test]
fn a_load_that_takes_the_slot_first_costs_the_snapshot_only() {
    let mut rig = Rig::new(&windows(SMALL, 60, 1, 64, 8));
    ask(&mut rig, &prompt(1, 34), 1);
    let flags = PrepFlags { wait_kv: true, ..PrepFlags::default() };
    let seq = rig.submit(&Prepared { flags, ..Prepared::new(prompt(2, 40), 4) }, 7).unwrap()[0];
    assert!(rig.schedule().is_none());
    let load = rig.scheduler.begin_load(seq, 39).unwrap();
    rig.fill_load(&load, &prompt(2, 40));
    rig.load_windows(load.slot.index(), seq, 39);
    rig.scheduler.close_transfer(load.transfer, true);
    rig.run(20);
    assert_eq!(rig.scheduler.snapshot().snapshots_taken, 0);
    assert_eq!(rig.scheduler.counts().snapshots.free, 8);
    assert_eq!(rig.outputs[&seq], rig.expected(seq, 256));
    rig.verify_empty();
}

#[test]
fn what_a_launched_row_may_have_overwritten_is_not_kept() {
    // It ends on an id one token before the next boundary, with a row in flight that passes it.
    let run = |depth: u32, max_new: u32, draft: u32| {
        let mut c = windows(SMALL, 60, 2, 64, 8);
        (c.max_in_flight, c.limits.max_draft) = (depth, draft);
        let mut rig = Rig::new(&c);
        let alone = {
            let seq = rig.add_long(&prompt(1, 20), 60);
            rig.run(200);
            rig.outputs[&seq].clone()
        };
        let mut rig = Rig::new(&c);
        let stop = alone[max_new as usize - 1];
        let made = alone.iter().position(|&t| t == stop).unwrap() + 1;
        let seq = rig.submit(&Prepared { stop_ids: vec![stop], ..Prepared::new(prompt(1, 20), 60) }, 0).unwrap()[0];
        while rig.scheduler.has_work() {
            if draft > 0 && rig.status(seq) == Some(Status::Running) {
                let next = rig.planned(seq) as usize + 1;
                let drafts = rig.stream(seq, next + 3).tokens[next..next + 3].to_vec();
                rig.scheduler.propose(seq, &drafts).unwrap();
            }
            rig.step();
        }
        assert_eq!(rig.outputs[&seq].len(), made);
        // The copy, if there is one, goes with the next step.
        ask(&mut rig, &prompt(2, 3), 1);
        (20 + made as u32 - 1, rig.scheduler.counts().snapshots.cached)
    };
    let mut seen = [0, 0];
    for (depth, draft) in [(1, 0), (2, 0), (1, 3), (2, 3)] {
        for max_new in 1..50 {
            let (computed, kept) = run(depth, max_new, draft);
            // 16 is the boundary of the prompt.
            let newest = computed / 16 * 16;
            let reach = computed + draft + (depth - 1) * (1 + draft);
            assert!(kept <= 1 + u32::from(newest > 16), "{depth} {draft} {computed}");
            assert!(newest == 16 || kept == 2 || reach >= newest + 16, "{depth} {draft}: {computed} keeps {kept}");
            seen[usize::from(newest > 16 && kept == 1)] += 1;
        }
    }
    assert!(seen[1] > 0, "the toy fails if one is copied that was overwritten: {seen:?}");
}

#[test]
fn preempted_sequences_come_back_from_their_own_snapshots_or_make_up_windows() {
    for (places, depth, host, exact) in
        [(0, 1, 0, true), (8, 1, 0, true), (8, 2, 0, true), (0, 2, 64, true), (8, 2, 64, false), (8, 1, 4, true)]
    {
        let mut c = windows(WindowRule { exact, ..SMALL }, 9, 4, 64, places);
        (c.max_in_flight, c.host_blocks, c.host_slots) = (depth, host, host);
        let mut rig = Rig::new(&c);
        rig.scheduler.set_rates(1e12, 1.0);
        let seqs: Vec<Seq> = (0..4).map(|i| rig.add_long(&prompt(i, 40), 50)).collect();
        rig.run(2000);
        let metrics = rig.scheduler.snapshot();
        assert!(metrics.preemptions > 2);
        assert_eq!(metrics.swapped_out > 0, host > 0);
        if host == 0 {
            assert_eq!(metrics.starts[1] > 0, places > 0, "{:?}", metrics.starts);
        }
        for seq in seqs {
            assert_eq!(rig.outputs[&seq].len(), 50);
        }
        rig.verify_streams(256);
        rig.verify_empty();
    }
}

#[test]
fn forks_and_drafts_work_behind_every_kind_of_start() {
    for (rule, places) in [(SMALL, 0), (SMALL, 8), (REPLAY, 0), (WindowRule { truncated: true, ..REPLAY }, 4)] {
        for len in [17, 64, 65, 70, 79] {
            let mut c = windows(rule, 60, 6, 64, places);
            (c.limits.max_draft, c.max_in_flight) = (3, 2);
            let mut rig = Rig::new(&c);
            ask(&mut rig, &prompt(1, len), 2);
            let forks = Prepared { forks: 3, ..Prepared::new(prompt(1, len), 20) };
            let seqs = rig.submit(&forks, 5).unwrap();
            for _ in 0..200 {
                for &seq in &seqs {
                    if rig.status(seq) == Some(Status::Running) {
                        let next = rig.planned(seq) as usize + 1;
                        let drafts = rig.stream(seq, next + 2).tokens[next..next + 2].to_vec();
                        rig.scheduler.propose(seq, &drafts).unwrap();
                    }
                }
                rig.step();
            }
            let metrics = rig.scheduler.snapshot();
            // A parent that begins at its last token has nothing to share: its forks begin with the same snapshot.
            let shared = if metrics.starts[1] == 3 { 0 } else { 2 };
            assert_eq!(metrics.forks, shared, "{rule:?} {len}");
            assert!(metrics.accepted > 20);
            rig.verify_streams(256);
            rig.verify_empty();
        }
    }
}

#[test]
fn a_hand_over_carries_whole_windows_behind_a_rerun() {
    for places in [0, 4] {
        let mut from = Rig::new(&Config { engine: EngineType::Prompt, ..windows(SMALL, 60, 4, 64, places) });
        let mut to = Rig::new(&Config { engine: EngineType::Completion, ..windows(SMALL, 60, 4, 64, places) });
        let mut kinds = Vec::new();
        for round in 0..3 {
            let tokens = prompt(1, 70 + round);
            let given = from.add_long(&tokens, 20);
            while from.status(given) != Some(Status::Handover) {
                let plan = from.schedule().unwrap();
                kinds.extend(from.begun(&plan).iter().map(|words| words[2]));
                from.execute(&plan);
                from.complete(plan.step);
            }
            let save = from.scheduler.begin_save(given).unwrap();
            let history = from.scheduler.history(given).unwrap().to_vec();
            let flags = PrepFlags { wait_kv: true, ..PrepFlags::default() };
            let prepared = Prepared { produced: 1, flags, ..Prepared::new(history, 20) };
            let seed = from.requests[&given].seed;
            let taken = to.submit(&prepared, seed).unwrap()[0];
            to.schedule();
            let load = to.scheduler.begin_load(taken, save.tokens).unwrap();
            to.copy_from(&from, &save, &load);
            to.scheduler.close_transfer(load.transfer, true);
            from.scheduler.close_transfer(save.transfer, true);
            from.scheduler.release(given);
            to.run(100);
            assert_eq!(to.outputs[&taken], to.expected(taken, 256));
        }
        assert_eq!(kinds, if places > 0 { [0, 1, 1] } else { [0, 3, 3] });
        from.flush();
        from.verify_empty();
        to.verify_empty();
    }
}

#[test]
fn a_sequence_below_its_hit_is_neither_saved_nor_swapped() {
    let mut c = windows(SMALL, 60, 4, 8, 0);
    (c.host_blocks, c.host_slots) = (20, 4);
    let mut rig = Rig::new(&c);
    rig.scheduler.set_rates(1e12, 1.0);
    ask(&mut rig, &prompt(1, 81), 1);
    let seq = rig.add_long(&prompt(1, 81), 4);
    rig.step();
    assert_eq!(rig.scheduler.info(seq).unwrap().computed_tokens, 72, "it began at 64, and 80 are in the hit");
    assert!(rig.scheduler.begin_save(seq).is_err());
    rig.step();
    rig.step();
    rig.step();
    assert!(rig.scheduler.info(seq).unwrap().computed_tokens >= 81);
    let save = rig.scheduler.begin_save(seq).unwrap();
    rig.scheduler.close_transfer(save.transfer, true);
    rig.run(20);
    rig.verify_streams(256);
    rig.verify_empty();
}

#[test]
fn rules_without_what_they_need_are_refused() {
    let refused = |c: &Config| deepinfer_scheduler::Scheduler::new(c).err().map(|e| e.to_string()).unwrap_or_default();
    let good = windows(SMALL, 40, 2, 64, 4);
    assert_eq!(refused(&good), "");
    let mut c = good.clone();
    c.groups.truncate(1);
    assert!(refused(&c).contains("state group"));
    let mut c = good.clone();
    c.groups[1] = GroupSpec::State { stored: 64, dropped: 64, replicas: 0, ring: 0, cut: 16 };
    assert!(refused(&c).contains("replica"));
    c.snapshot_slots = 0;
    assert_eq!(refused(&c), "", "hits alone need none");
    let mut c = good.clone();
    c.policy.hit_rule = HitRule::All;
    assert!(refused(&c).contains("snapshot_slots is 4"));
    let mut c = good.clone();
    c.limits.max_draft = 4;
    assert!(refused(&c).contains("max_draft"));
    let mut c = good;
    c.groups = vec![paged(16, 40, &[16]), state(12)];
    assert!(refused(&c).contains("cut of a state group"));
}

#[test]
fn a_state_that_is_not_right_in_every_layer_yet_is_not_kept() {
    // Windows of six: 4 · 5 = 20 tokens until the last layer is right. 70 − 21 → 48, so right from 68 on, behind the boundary at 64.
    let rule = WindowRule { window: 6, keep: 9, ..SMALL };
    let mut rig = Rig::new(&windows(rule, 60, 2, 64, 1));
    ask(&mut rig, &prompt(1, 70), 1);
    ask(&mut rig, &prompt(2, 40), 1);
    ask(&mut rig, &prompt(3, 5), 1);
    for _ in 0..2 {
        assert_eq!(ask(&mut rig, &prompt(1, 70), 1).0, [48, 64, 3]);
    }
    // At 80 it is.
    assert_eq!(ask(&mut rig, &prompt(1, 70), 14).0, [48, 64, 3]);
    let taken = rig.scheduler.snapshot().snapshots_taken;
    ask(&mut rig, &prompt(3, 5), 1);
    assert_eq!(rig.scheduler.snapshot().snapshots_taken, taken + 1);
}

#[test]
fn a_victim_below_its_hit_is_computed_again_rather_than_swapped() {
    let mut c = windows(SMALL, 9, 2, 8, 0);
    (c.host_blocks, c.host_slots) = (20, 4);
    let mut rig = Rig::new(&c);
    rig.scheduler.set_rates(1e12, 1.0);
    ask(&mut rig, &prompt(1, 81), 1);
    let old = rig.add_long(&prompt(2, 15), 40);
    while rig.scheduler.info(old).is_none_or(|info| info.computed_tokens < 31) {
        rig.step();
    }
    let new = rig.add_long(&prompt(1, 81), 4);
    rig.step();
    assert_eq!(rig.status(new), Some(Status::Running));
    while rig.scheduler.snapshot().preemptions == 0 {
        assert!(rig.scheduler.info(new).unwrap().computed_tokens < 80);
        rig.step();
    }
    assert_eq!((rig.status(new), rig.scheduler.snapshot().swapped_out), (Some(Status::Ready), 0));
    rig.run(200);
    rig.verify_streams(256);
    rig.verify_empty();
}
