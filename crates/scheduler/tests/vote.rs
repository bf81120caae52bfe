//! Deadlines of decode-first steps, alone and in a group of threads, and what a rank without work does.

// A test that meets an error stops there.
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use common::{Rig, config, prompt};
use deepinfer_scheduler::{
    ChunkCost, ChunkPolicy, Config, Finish, GroupError, Plan, Seq, Status, StepError, StepKind, StepPolicy, ThreadVote,
    header,
};
use std::thread;

fn decode_first(all: u32, any: u32) -> Config {
    let mut c = config(16, 200, 8, 32);
    c.policy.step_policy = Some(StepPolicy::DecodeFirst);
    c.policy.all_interval = all;
    c.policy.any_interval = any;
    c
}

fn join(rig: &mut Rig, vote: ThreadVote) {
    rig.scheduler.set_vote(Box::new(vote)).unwrap();
    assert!(!rig.step(), "nothing is agreed before the first round");
}

#[test]
fn alone_a_decoding_sequence_waits_for_one_prefill_step_at_most_and_a_head_for_a_hundred() {
    let mut rig = Rig::new(&decode_first(70, 100));
    let runner = rig.add_long(&prompt(1, 20), 200);
    assert!(rig.step(), "nothing runs: at once");
    let (mut gap, mut decodes) = (0, 0);
    let mut head: Option<(Seq, u32)> = None;
    while !rig.finished.contains_key(&runner) {
        // There is always a head; each is tried within the bound.
        if head.is_none_or(|(seq, _)| rig.status(seq) != Some(Status::Ready) && rig.requests.contains_key(&seq)) {
            head = Some((rig.add_long(&prompt(rig.steps, 40), 3), decodes));
        }
        let plan = rig.schedule().unwrap();
        assert_ne!(plan.kind, StepKind::Mixed);
        rig.execute(&plan);
        rig.complete(plan.step);
        if plan.kind == StepKind::Decode {
            (gap, decodes) = (0, decodes + 1);
        } else {
            gap += 1;
            assert!(gap <= 1, "two prefill steps between two decode steps");
        }
        if let Some((seq, since)) = head {
            assert!(rig.status(seq) != Some(Status::Ready) || decodes - since <= 100);
        }
    }
    assert!(decodes >= 199 && rig.scheduler.snapshot().admitted > 2);
    rig.run(500);
    rig.verify_streams(256);
}

#[test]
fn the_same_tokens_come_of_mixed_and_of_decode_first_steps() {
    for overlap in [false, true] {
        let made = [None, Some(StepPolicy::DecodeFirst)].map(|policy| {
            let mut c = decode_first(3, 5);
            c.policy.step_policy = policy;
            c.max_in_flight = if overlap { 2 } else { 1 };
            c.groups = vec![common::paged(16, 20, &[16])];
            let mut rig = Rig::new(&c);
            for i in 0..12 {
                rig.add(&prompt(i, 1 + (i as u32 * 13) % 60), 1 + (i as u32 * 5) % 40);
            }
            rig.run(3000);
            rig.verify_streams(256);
            rig.verify_empty();
            rig.outputs
        });
        assert_eq!(made[0], made[1]);
    }
}

#[test]
fn a_time_budget_bounds_every_prefill_step() {
    let cost = ChunkCost { a: 1.0, b: 2.0, d: 100.0, e: 500.0 };
    let mut c = decode_first(1, 1);
    c.limits.max_num_batched_tokens = 200;
    c.policy.chunk = ChunkPolicy::Time { budget_ns: 3000, cost };
    let mut rig = Rig::new(&c);
    let seq = rig.add_long(&prompt(1, 150), 4);
    let mut at = 0;
    while let Some(plan) = rig.schedule() {
        if plan.kind == StepKind::Prefill {
            let most = cost.most_rows(3000.0, at).max(1);
            assert_eq!(plan.rows, most.min(150 - at));
            at += plan.rows;
        }
        rig.execute(&plan);
        rig.complete(plan.step);
    }
    assert!(rig.finished.contains_key(&seq) && at == 150);
}

/// A group of threads whose last rank never has a request. Returns what each rank did in each step.
fn threads(ranks: usize, steps: u64, in_flight: u32) -> Vec<Vec<Option<(StepKind, i32, i32)>>> {
    let spawn = |(rank, vote): (usize, ThreadVote)| {
        thread::spawn(move || {
            let mut c = decode_first(7, 10);
            c.max_in_flight = in_flight;
            let mut rig = Rig::new(&c);
            join(&mut rig, vote);
            let mut made = Vec::new();
            let mut flight: Option<Plan> = None;
            let mut gap = 0;
            for step in 0..steps {
                let chance = common::mix(rank as u64, step);
                if rank + 1 < ranks && chance.is_multiple_of(6) {
                    let seq = rig.add(&prompt(chance, 1 + chance as u32 % 70), 1 + (chance >> 8) as u32 % 25);
                    if chance.is_multiple_of(5) {
                        rig.inbox.abort(seq).unwrap();
                    }
                }
                let decodes = rig.scheduler.snapshot().decoding > 0;
                let plan = rig.schedule();
                made.push(plan.map(|plan| {
                    let words = rig.memory.get(plan.slot, "header");
                    assert!(plan.kind == StepKind::Dummy || words[header::GROUP_ROWS] >= plan.rows as i32);
                    (plan.kind, words[header::GROUP_TYPE], words[header::GROUP_ROWS])
                }));
                // Between two decode steps of a sequence that runs here lie two prefill steps at most.
                let prefill = made.last().is_some_and(|step| step.is_some_and(|step| step.1 == 1));
                gap = if decodes && prefill { gap + 1 } else { 0 };
                assert!(gap <= 2);
                let ended = if in_flight > 1 { std::mem::replace(&mut flight, plan) } else { plan };
                if let Some(plan) = ended {
                    if plan.kind != StepKind::Dummy {
                        rig.execute(&plan);
                    }
                    rig.complete(plan.step);
                }
            }
            // Nobody may leave while another is in its last round.
            (made, rig)
        })
    };
    let handles: Vec<_> = ThreadVote::group(ranks).into_iter().enumerate().map(spawn).collect();
    let done: Vec<_> = handles.into_iter().map(|handle| handle.join().unwrap()).collect();
    for (_, rig) in &done {
        rig.verify_streams(256);
    }
    done.into_iter().map(|(made, _)| made).collect()
}

#[test]
fn threads_make_the_same_steps_and_an_empty_rank_only_dummies() {
    let made = threads(3, 600, 1);
    let kind = |step: &Option<(StepKind, i32, i32)>| step.map(|(_, kind, rows)| (kind, rows));
    for rank in &made[1..] {
        assert!(rank.iter().map(kind).eq(made[0].iter().map(kind)));
    }
    assert!(made[2].iter().flatten().all(|step| step.0 == StepKind::Dummy));
    assert!(made[0].iter().flatten().any(|step| step.0 == StepKind::Prefill));
    for rank in &made {
        let decodes = rank.iter().flatten().filter(|step| step.0 == StepKind::Decode).count();
        assert!(rank.iter().flatten().count() > 300 && (decodes > 100 || rank == &made[2]));
    }
}

#[test]
fn the_rank_that_wanted_cannot_and_all_decode() {
    let mut ends = ThreadVote::group(2);
    let (second, first) = (ends.pop().unwrap(), ends.pop().unwrap());
    let mut c = decode_first(1, 2);
    c.groups = vec![common::paged(16, 4, &[16])];
    let mut rigs = [Rig::new(&c), Rig::new(&c)];
    rigs[0].scheduler.set_vote(Box::new(first)).unwrap();
    rigs[1].scheduler.set_vote(Box::new(second)).unwrap();
    // Two of three blocks are taken, and the next prompt needs two.
    let runner = rigs[0].add_long(&prompt(1, 20), 12);
    let head = rigs[0].add_long(&prompt(2, 20), 2);
    let mut fell_back = 0;
    for _ in 0..40 {
        let both = rigs.each_mut().map(|rig| rig.scheduler.begin_schedule(1).unwrap());
        let plans: Vec<Option<Plan>> = both
            .into_iter()
            .zip(&mut rigs)
            .map(|(begun, rig)| match begun {
                deepinfer_scheduler::Begun::Planned(plan) => plan,
                deepinfer_scheduler::Begun::Second => rig.scheduler.finish_schedule().unwrap(),
            })
            .collect();
        for (rig, plan) in rigs.iter_mut().zip(&plans) {
            let Some(plan) = plan else { continue };
            if plan.kind != StepKind::Dummy {
                rig.execute(plan);
            }
            rig.complete(plan.step);
        }
        let votes = rigs[0].scheduler.snapshot().votes;
        if votes.outcomes[3] > fell_back {
            fell_back = votes.outcomes[3];
            assert_eq!(plans[0].unwrap().kind, StepKind::Decode, "the step is not lost");
            assert_eq!(plans[1].unwrap().kind, StepKind::Dummy);
            assert_eq!(rigs[0].status(head), Some(Status::Ready));
        }
    }
    assert!(fell_back > 0);
    assert!(rigs[0].finished[&runner] == Finish::Length as i32 && rigs[0].finished[&head] == Finish::Length as i32);
}

#[test]
fn a_rank_that_leaves_or_fails_is_an_error_everywhere_and_others_keep_their_state() {
    let mut ends = ThreadVote::group(2);
    let (second, first) = (ends.pop().unwrap(), ends.pop().unwrap());
    let mut rigs = [Rig::new(&decode_first(70, 100)), Rig::new(&decode_first(70, 100))];
    rigs[0].scheduler.set_vote(Box::new(first)).unwrap();
    rigs[1].scheduler.set_vote(Box::new(second)).unwrap();
    let seq = rigs[1].add_long(&prompt(1, 20), 12);
    for rig in &mut rigs {
        assert!(!rig.step());
    }
    rigs[0].scheduler.fail_group();
    for rig in &mut rigs {
        assert!(rig.scheduler.begin_schedule(1).is_ok());
    }
    for rig in &mut rigs {
        if let Ok(Some(plan)) = rig.scheduler.finish_schedule() {
            rig.scheduler.complete(plan.step, 1).unwrap();
        }
    }
    for rig in &mut rigs {
        assert_eq!(rig.scheduler.schedule(1), Err(StepError::Group(GroupError::Failed)));
    }
    let [left, mut rig] = rigs;
    drop(left);
    for _ in 0..3 {
        let lost = rig.scheduler.schedule(1);
        if matches!(lost, Err(StepError::Group(GroupError::Lost(_)))) {
            rig.scheduler.check().unwrap();
            assert!(rig.scheduler.info(seq).is_some());
            return;
        }
        if let Ok(Some(plan)) = lost {
            rig.scheduler.complete(plan.step, 1).unwrap();
        }
    }
    panic!("nobody noticed");
}
