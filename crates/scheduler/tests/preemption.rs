//! Taking blocks back: whom, how many, and what that changes (nothing but time).

// A test that meets an error stops there.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod common;

use common::{Rig, config, prompt};
use deepinfer_scheduler::{ChunkPolicy, Outcome, Prepared, Seq, Status};
use proptest::prelude::*;
use proptest::test_runner::{Config as Cases, RngAlgorithm, TestRng, TestRunner};

#[test]
fn a_row_waits_for_blocks_that_are_coming_back_rather_than_take_a_victim() {
    let mut rig = Rig::new(&config(16, 8, 4, 256));
    // Blocks: 3 for the saved one, 2 + 2 for the others; all seven are taken.
    let saved = rig.add_long(&prompt(1, 40), 2);
    let first = rig.add_long(&prompt(2, 31), 20);
    let second = rig.add_long(&prompt(3, 20), 11);
    rig.step();
    let save = rig.scheduler.begin_save(saved).unwrap();
    while !rig.finished.contains_key(&saved) {
        rig.step();
    }
    let mut waited = 0;
    for _ in 0..6 {
        rig.step();
        waited = rig.scheduler.snapshot().row_waits;
    }
    assert!(waited > 0, "the first one needs a block and three are coming back");
    assert_eq!(rig.scheduler.snapshot().preemptions, 0);
    assert_eq!((rig.status(first), rig.status(second)), (Some(Status::Running), Some(Status::Running)));
    rig.inbox.transfer(save.transfer, Outcome::Done).unwrap();
    rig.run(60);
    assert_eq!(rig.scheduler.snapshot().preemptions, 0);
    rig.verify_streams(256);
    rig.verify_empty();
}

#[test]
fn rows_that_all_wait_for_one_transfer_do_not_wait_for_ever() {
    let mut rig = Rig::new(&config(16, 8, 4, 256));
    let saved = rig.add_long(&prompt(1, 40), 3);
    let first = rig.add_long(&prompt(2, 31), 20);
    let second = rig.add_long(&prompt(3, 31), 20);
    rig.step();
    let save = rig.scheduler.begin_save(saved).unwrap();
    for _ in 0..200 {
        rig.step();
    }
    assert!(rig.finished.contains_key(&first), "the older one went on at the cost of the newer");
    assert!(rig.finished.contains_key(&second));
    rig.inbox.transfer(save.transfer, Outcome::Done).unwrap();
    rig.run(5);
    rig.verify_streams(256);
    rig.verify_empty();
}

#[test]
fn victims_go_by_lowest_priority_then_newest() {
    let mut rig = Rig::new(&config(16, 9, 4, 256));
    let add = |rig: &mut Rig, family, priority| {
        rig.submit(&Prepared { priority, ..Prepared::new(prompt(family, 31), 60) }, family).unwrap()[0]
    };
    let low = add(&mut rig, 1, 5);
    let old = add(&mut rig, 2, 0);
    let new = add(&mut rig, 3, 0);
    let high = add(&mut rig, 4, -5);
    let mut order = Vec::new();
    for _ in 0..300 {
        rig.step();
        for seq in [low, old, new, high] {
            if rig.scheduler.info(seq).is_some_and(|i| i.preemptions > 0) && !order.contains(&seq) {
                order.push(seq);
            }
        }
    }
    assert_eq!(order[..2], [low, new]);
    assert!(!order.contains(&high));
    rig.run(100);
    rig.verify_streams(256);
}

#[test]
fn a_preempted_sequence_finds_its_own_blocks_again() {
    let mut rig = Rig::new(&config(16, 12, 2, 256));
    let old = rig.add_long(&prompt(1, 79), 40);
    let new = rig.add_long(&prompt(2, 79), 40);
    while rig.scheduler.snapshot().preemptions == 0 {
        rig.step();
    }
    rig.inbox.abort(old).unwrap();
    let before = rig.scheduler.snapshot().hit_tokens;
    rig.step();
    assert_eq!(rig.status(new), Some(Status::Running));
    assert_eq!(rig.scheduler.snapshot().hit_tokens - before, 80, "its history was hashed before it left");
    assert_eq!(rig.scheduler.info(new).unwrap().cached_tokens, 0, "what the user is told is the first admission");
    rig.run(100);
    rig.verify_streams(256);
}

#[test]
fn a_block_queued_before_a_preemption_is_not_published_before_it_is_computed_again() {
    // Eight sequences fill their first block in one step; the hash budget is one block a step. Two of them are preempted in
    // the next step, lose the block to others and compute it again, a token at a time, while it is still in the queue.
    let mut c = config(16, 13, 8, 64);
    c.policy.chunk = ChunkPolicy::Tokens(1);
    let mut rig = Rig::new(&c);
    let seqs: Vec<Seq> = (0..8).map(|i| rig.add_long(&prompt(i, 15), 60)).collect();
    while rig.scheduler.snapshot().preemptions == 0 {
        rig.step();
    }
    let victims = &seqs[6..];
    assert!(victims.iter().all(|&seq| rig.status(seq) == Some(Status::Ready)));
    for &seq in &seqs[..3] {
        rig.inbox.abort(seq).unwrap();
    }
    for _ in 0..8 {
        rig.step();
    }
    let again = rig.scheduler.info(victims[0]).unwrap();
    assert!(again.status == Status::Running && again.computed_tokens < 16, "{again:?}");
    let mut turn = prompt(6, 15);
    turn.extend(&rig.outputs[&victims[0]][..2]);
    let twin = rig.add_long(&turn, 3);
    rig.step();
    assert_eq!(rig.scheduler.info(twin).map(|i| i.cached_tokens), Some(0), "nobody has computed that block");
    rig.run(500);
    rig.verify_streams(256);
    rig.verify_empty();
}

/// Everything that decides about victims, before a schedule.
struct Before {
    /// (priority, arrival, sequence, blocks, whether it needs one more now).
    running: Vec<(i32, u64, Seq, u32, bool, u32)>,
    available: u32,
}

fn before(rig: &Rig, seqs: &[Seq]) -> Before {
    let s = &rig.scheduler;
    let counts = s.counts().groups[0];
    let mut running: Vec<_> = seqs
        .iter()
        .filter_map(|&seq| {
            let info = s.info(seq).filter(|i| i.status == Status::Running)?;
            let blocks = s.block_row(seq)?.len() as u32;
            // A decoding sequence writes its next position into the block after its last.
            let needs = info.output_tokens > 0
                && info.computed_tokens + 1 == info.prompt_tokens + info.output_tokens
                && info.computed_tokens / s.block_tokens() >= blocks;
            Some((info.priority, info.arrival, seq, blocks, needs, info.preemptions))
        })
        .collect();
    running.sort_by_key(|r| std::cmp::Reverse((r.0, r.1)));
    Before { running, available: counts.total - counts.held - 1 }
}

#[test]
fn one_schedule_never_preempts_more_than_needed() {
    let cases = Cases { cases: 150, failure_persistence: None, ..Cases::default() };
    let mut runner = TestRunner::new_with_rng(cases, TestRng::from_seed(RngAlgorithm::ChaCha, &[3; 32]));
    let total = std::cell::Cell::new(0u64);
    let requests = prop::collection::vec((1..60u32, 1..80u32, -1..2i32, 0..4u32), 20);
    runner
        .run(&(requests, 8..30u32, any::<bool>()), |(requests, pages, ordered)| {
            let mut c = config(8, pages, 8, 64);
            c.device_ordered = ordered;
            c.limits.max_model_len = 120;
            let mut rig = Rig::new(&c);
            let mut seqs = Vec::new();
            for (family, (len, max_new, priority, steps)) in requests.into_iter().enumerate() {
                // Prompts of their own: nothing is shared, so a victim gives back exactly what it holds.
                let prepared = Prepared { priority, ..Prepared::new(prompt(500 + family as u64, len), max_new) };
                seqs.extend(rig.submit(&prepared, 1).unwrap_or_default());
                for _ in 0..steps * 3 {
                    check_victims(&mut rig, &seqs);
                }
            }
            for _ in 0..400 {
                check_victims(&mut rig, &seqs);
            }
            rig.run(2000);
            total.set(total.get() + rig.scheduler.snapshot().preemptions);
            rig.verify_streams(120);
            rig.verify_empty();
            Ok(())
        })
        .unwrap();
    assert!(total.get() > 200, "{} preemptions", total.get());
}

fn check_victims(rig: &mut Rig, seqs: &[Seq]) {
    let known = before(rig, seqs);
    let Some(plan) = rig.schedule() else {
        rig.flush();
        return;
    };
    let gone =
        |rig: &Rig, r: &(i32, u64, Seq, u32, bool, u32)| rig.scheduler.info(r.2).is_some_and(|i| i.preemptions > r.5);
    let victims = known.running.iter().filter(|r| gone(rig, r)).count();
    let mut least = 0;
    let mut back = known.available;
    while known.running[least..].iter().filter(|r| r.4).count() as u32 > back {
        back += known.running[least].3;
        least += 1;
    }
    assert_eq!(victims, least, "no more and no fewer than the need takes");
    assert!(known.running[..victims].iter().all(|r| gone(rig, r)), "a beginning of the victim order");
    rig.execute(&plan);
    rig.complete(plan.step);
}

#[test]
fn counts_add_up_through_sharing_preemption_and_saves() {
    let mut rig = Rig::new(&config(16, 16, 4, 64));
    let seqs: Vec<Seq> = (0..6).map(|i| rig.add_long(&prompt(i % 2, 40), 50)).collect();
    let mut saves = Vec::new();
    for n in 0..400 {
        rig.step();
        let counts = rig.scheduler.counts();
        assert!(counts.add_up());
        let g = counts.groups[0];
        assert_eq!(g.free + g.cached + g.held + g.parked + g.reserved, 16);
        if n % 7 == 0
            && let Ok(save) = rig.scheduler.begin_save(seqs[n % 6])
        {
            saves.push(save.transfer);
        }
        if n % 9 == 0
            && let Some(transfer) = saves.pop()
        {
            rig.scheduler.close_transfer(transfer, true);
        }
    }
    for transfer in saves {
        rig.scheduler.close_transfer(transfer, true);
    }
    rig.run(100);
    rig.verify_streams(256);
    rig.verify_empty();
}
