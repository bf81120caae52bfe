//! What is turned away, who goes first, and that waiting costs nobody anything.

// A test that meets an error stops there.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod common;

use common::{EOS, Rig, config, hybrid, paged, prompt, state};
use deepinfer_scheduler::{ConfigError, GroupSpec, PrepFlags, Prepared, Reject, Scheduler, Seq, Status};

fn request(len: u32, max_new: u32) -> Prepared {
    Prepared { eos: vec![EOS], ..Prepared::new(prompt(1, len), max_new) }
}

#[test]
fn a_request_that_no_empty_pool_can_hold_is_rejected_and_the_next_is_served_in_the_same_step() {
    let mut rig = Rig::new(&config(16, 8, 4, 64));
    let refused = rig.submit(&request(100, 100), 0).unwrap_err();
    assert_eq!(refused, Reject::NeverFits { need: 13, have: 7 });
    assert!(refused.to_string().contains("num_kv_blocks"));
    let seq = rig.add_long(&prompt(2, 20), 3);
    assert!(rig.step());
    assert_eq!(rig.status(seq), Some(Status::Running));
    // The KV of the last token is never written: 7 blocks hold 113 tokens.
    assert!(rig.submit(&request(100, 13), 0).is_ok());
    assert_eq!(rig.submit(&request(100, 14), 0), Err(Reject::NeverFits { need: 8, have: 7 }));
}

#[test]
fn the_smallest_group_decides_what_never_fits() {
    let mut config = config(16, 100, 4, 64);
    config.groups = vec![paged(16, 100, &[16]), paged(8, 9, &[8])];
    let mut rig = Rig::new(&config);
    assert_eq!(rig.submit(&request(60, 10), 0), Err(Reject::NeverFits { need: 5, have: 4 }));
    assert!(rig.submit(&request(60, 5), 0).is_ok());
}

#[test]
fn bad_requests_are_typed_and_cost_the_others_nothing() {
    let mut rig = Rig::new(&config(16, 64, 4, 64));
    let good = rig.add(&prompt(1, 30), 20);
    rig.step();
    let conflict = |r: Result<Vec<Seq>, Reject>| matches!(r, Err(Reject::Conflict(_)));
    assert_eq!(rig.submit(&request(0, 5), 0), Err(Reject::Empty));
    assert_eq!(rig.submit(&request(256, 5), 0), Err(Reject::TooLong { len: 256, max: 255 }));
    let foreign = Prepared::new(vec![1, 50], 4);
    assert_eq!(rig.submit(&foreign, 0), Err(Reject::BadToken { token: 50, vocab: 50 }));
    assert!(conflict(rig.submit(&request(4, 0), 0)));
    assert!(conflict(rig.submit(&Prepared { min_new: 6, ..request(4, 5) }, 0)));
    assert!(conflict(rig.submit(&Prepared { forks: 0, ..request(4, 5) }, 0)));
    let loads = PrepFlags { wait_kv: true, prompt_logprobs: true, ..PrepFlags::default() };
    assert!(conflict(rig.submit(&Prepared { flags: loads, ..request(4, 5) }, 0)));
    rig.run(100);
    rig.verify_streams(256);
    assert_eq!(rig.finished.len(), 1);
    assert!(rig.finished.contains_key(&good));
}

#[test]
fn a_closed_scheduler_turns_requests_away() {
    let rig = Rig::new(&config(16, 64, 4, 64));
    let inbox = rig.scheduler.inbox();
    drop(rig);
    assert_eq!(inbox.add(&request(4, 4)), Err(Reject::Closed));
}

#[test]
fn a_head_that_lacks_resources_never_stops_a_plan_while_something_else_fits() {
    // Eight blocks, six kept by a sequence that was handed over: the head needs five, the one behind it one.
    let mut rig = Rig::new(&config(16, 9, 4, 256));
    let flags = PrepFlags { hold: true, ..PrepFlags::default() };
    let kept = rig.submit(&Prepared { flags, ..Prepared::new(prompt(1, 90), 1) }, 0).unwrap()[0];
    rig.run(3);
    assert_eq!(rig.status(kept), Some(Status::Handover));
    let head = rig.add_long(&prompt(2, 70), 2);
    let small = rig.add_long(&prompt(3, 10), 2);
    assert!(rig.step(), "nothing runs and the second fits");
    assert_eq!((rig.status(head), rig.status(small)), (Some(Status::Ready), Some(Status::Running)));
    while rig.step() {}
    rig.scheduler.release(kept);
    rig.run(10);
    rig.verify_streams(256);
}

#[test]
fn others_pass_a_waiting_head_a_bounded_number_of_times() {
    let mut config = config(16, 9, 4, 256);
    config.policy.bypass = 3;
    let mut rig = Rig::new(&config);
    // Two of eight blocks are always taken by a long runner, so that the head, which needs seven, waits.
    let runner = rig.add_long(&prompt(9, 20), 12);
    rig.step();
    let head = rig.add_long(&prompt(2, 100), 2);
    let mut passed = 0;
    for i in 0..10 {
        let small = rig.add_long(&prompt(10 + i, 4), 1);
        rig.step();
        passed += usize::from(rig.finished.contains_key(&small));
        if rig.finished.contains_key(&runner) {
            break;
        }
    }
    assert_eq!(passed, 3, "then what comes free is kept for the head");
    rig.run(60);
    let order = [rig.last_rows[&runner], rig.last_rows[&head]];
    assert!(order[0] < order[1]);
    rig.verify_streams(256);
}

#[test]
fn order_is_priority_then_preempted_then_arrival_and_a_preempted_sequence_keeps_its_place() {
    let mut rig = Rig::new(&config(16, 7, 2, 256));
    let old = rig.add_long(&prompt(1, 30), 60);
    let newer = rig.add_long(&prompt(2, 30), 40);
    rig.step();
    let third = rig.add_long(&prompt(3, 30), 4);
    let urgent = rig.submit(&Prepared { priority: -1, ..Prepared::new(prompt(4, 10), 4) }, 7).unwrap()[0];
    let mut order = Vec::new();
    let mut preempted = false;
    for _ in 0..400 {
        if !rig.step() {
            break;
        }
        preempted |= rig.status(newer) == Some(Status::Ready);
        if preempted && rig.status(newer) == Some(Status::Ready) {
            assert_ne!(rig.status(third), Some(Status::Running), "never started, same priority: behind");
        }
        for seq in [old, newer, third, urgent] {
            if rig.status(seq) == Some(Status::Running) && !order.contains(&seq) {
                order.push(seq);
            }
        }
    }
    assert!(preempted);
    assert_eq!(order, [old, newer, urgent, third]);
    rig.run(1);
    rig.verify_streams(256);
}

#[test]
fn a_given_arrival_is_the_place_among_equals_and_later_ones_come_behind_it() {
    let mut rig = Rig::new(&config(16, 40, 1, 256));
    let mut add = |family: u64, arrival: u64, priority: i32, forks: u32| {
        let prepared = Prepared { arrival, priority, forks, ..Prepared::new(prompt(family, 10), 4) };
        rig.submit(&prepared, family as usize as u64).unwrap()
    };
    let running = add(1, 30, 0, 1)[0];
    let (late, plain, again) = (add(2, 31, 0, 1)[0], add(3, 0, 0, 1)[0], add(4, 7, 0, 2));
    let (behind, urgent) = (add(5, 0, 0, 1)[0], add(6, 99, -1, 1)[0]);
    let after_urgent = add(7, 0, 0, 1)[0];
    let mut order = Vec::new();
    for _ in 0..200 {
        if !rig.step() {
            break;
        }
        for seq in [running, late, plain, again[0], again[1], behind, urgent, after_urgent] {
            if rig.status(seq) == Some(Status::Running) && !order.contains(&seq) {
                order.push(seq);
            }
        }
    }
    // Whoever runs when the others come has the smallest priority and arrival of those that were there.
    assert_eq!(order, [urgent, again[0], again[1], running, late, plain, behind, after_urgent]);
    rig.run(1);
    rig.verify_streams(256);
}

#[test]
fn decode_gaps_stay_bounded_under_endless_arrivals() {
    let mut rig = Rig::new(&config(16, 200, 8, 32));
    let seqs: Vec<Seq> = (0..4).map(|i| rig.add_long(&prompt(i, 20), 100)).collect();
    for _ in 0..8 {
        rig.step();
    }
    for i in 0..80 {
        // Far more than the budget arrives in every step.
        for k in 0..3 {
            rig.add_long(&prompt(100 + i * 3 + k, 60), 2);
        }
        assert!(rig.step());
        let now = rig.steps - 1;
        for seq in &seqs {
            assert_eq!(rig.last_rows[seq], now, "a decoding sequence has a row in every step");
        }
    }
}

#[test]
fn without_pressure_each_prompt_token_is_computed_exactly_once() {
    let mut rig = Rig::new(&config(16, 400, 8, 40));
    let mut seqs = Vec::new();
    for i in 0..30 {
        seqs.push(rig.add_long(&prompt(1000 + i, 1 + (i as u32 * 17) % 90), 1 + (i as u32) % 30));
        rig.step();
    }
    rig.run(500);
    assert_eq!(rig.scheduler.snapshot().preemptions, 0);
    for seq in seqs {
        assert_eq!(rig.prompt_rows[&seq], rig.requests[&seq].prompt.len() as u32);
    }
    rig.verify_streams(256);
}

#[test]
fn four_thousand_waiting_cost_no_scan_when_nothing_can_be_admitted() {
    let mut rig = Rig::new(&config(16, 64, 2, 64));
    for i in 0..2 {
        rig.add_long(&prompt(i, 8), 200);
    }
    rig.step();
    for i in 0..4096 {
        rig.inbox.add(&Prepared::new(prompt(i, 8), 2)).unwrap();
    }
    let start = std::time::Instant::now();
    for _ in 0..20 {
        let plan = rig.scheduler.schedule(1).unwrap().unwrap();
        assert_eq!(plan.seqs, 2);
        rig.memory.get_mut(plan.slot, "accepted")[..2].fill(1);
        rig.memory.get_mut(plan.slot, "tokens")[..2].fill(3);
        rig.scheduler.complete(plan.step, 1).unwrap();
    }
    assert_eq!(rig.scheduler.snapshot().waiting, 4096);
    assert!(start.elapsed().as_millis() < 2000);
}

#[test]
fn configurations_that_cannot_work_say_what_to_change() {
    let refuse = |change: fn(&mut deepinfer_scheduler::Config)| {
        let mut c = config(16, 64, 4, 64);
        change(&mut c);
        Scheduler::new(&c).map(|_| ()).unwrap_err()
    };
    assert_eq!(refuse(|c| c.groups.clear()), ConfigError::NoPagedGroup);
    assert_eq!(refuse(|c| c.groups.insert(0, state())), ConfigError::FirstGroupNotPaged);
    assert!(matches!(refuse(|c| c.groups[0] = paged(24, 64, &[24])), ConfigError::PowerOfTwo { value: 24, .. }));
    assert!(matches!(refuse(|c| c.groups[0] = paged(16, 64, &[])), ConfigError::NoSource(0)));
    assert!(matches!(refuse(|c| c.groups[0] = paged(16, 64, &[32])), ConfigError::Divides { value: 32, of: 16, .. }));
    assert!(matches!(refuse(|c| c.groups.push(paged(32, 64, &[32]))), ConfigError::Divides { value: 32, of: 16, .. }));
    assert!(matches!(refuse(|c| c.groups[0] = paged(16, 1, &[16])), ConfigError::TooSmall { value: 1, .. }));
    assert!(matches!(refuse(|c| c.limits.max_num_batched_tokens = 3), ConfigError::TooSmall { least: 4, .. }));
    assert!(matches!(refuse(|c| c.ring_slots = 2), ConfigError::TooSmall { least: 3, .. }));
    assert!(matches!(refuse(|c| c.root.block_tokens = 32), ConfigError::Divides { .. }));
    assert!(matches!(refuse(|c| c.limits.vocab_size = 0), ConfigError::TooSmall { .. }));
    assert!(Scheduler::new(&hybrid(16, 4, 64)).is_ok());
    assert!(matches!(state(), GroupSpec::State { .. }));
}
