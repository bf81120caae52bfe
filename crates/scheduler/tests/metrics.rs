//! Counters mean what they say: each is compared with what the test itself saw happen.

#![allow(clippy::unwrap_used)]

mod common;

use common::{Rig, config, prompt};
use deepinfer_scheduler::{Prepared, Status, StepId, StepKind};

#[test]
fn step_kinds_and_chunk_shares_are_those_of_the_plans() {
    let mut rig = Rig::new(&config(16, 64, 8, 40));
    for i in 0..6 {
        rig.add_long(&prompt(i, 30 + i as u32), 12);
    }
    let mut seen = [0_u64; 5];
    let (mut chunks, mut chunk_rows, mut room) = (0, 0, 0);
    while let Some(plan) = rig.schedule() {
        seen[plan.kind as usize] += 1;
        let rows = u64::from(plan.rows - plan.decoding);
        if rows > 0 {
            chunks += 1;
            chunk_rows += rows;
            room += 40 - u64::from(plan.decoding);
        }
        rig.execute(&plan);
        rig.complete(plan.step);
    }
    let dummy = rig.scheduler.plan_dummy(rig.clock).unwrap();
    rig.scheduler.complete(dummy.step, rig.clock).unwrap();
    let m = rig.scheduler.snapshot();
    assert_eq!(
        [m.prefill_steps, m.decode_steps, m.mixed_steps],
        [StepKind::Prefill, StepKind::Decode, StepKind::Mixed].map(|kind| seen[kind as usize])
    );
    assert!(m.prefill_steps > 0 && m.decode_steps > 0 && m.mixed_steps > 0);
    assert_eq!((m.idle_plans, m.dummy_steps), (1, 1));
    assert_eq!(m.steps, m.prefill_steps + m.decode_steps + m.mixed_steps + m.dummy_steps);
    assert_eq!((m.chunk_fill.part, m.chunk_fill.whole), (chunk_rows, room));
    assert_eq!(m.chunk_fill.counts.iter().sum::<u64>(), chunks);
    assert_eq!(m.chunk_fill.part, m.prefill_tokens);
    assert!(m.chunk_fill.counts[10] > 0, "the first prompts fill whole steps");
}

#[test]
fn waiting_sequences_are_told_by_what_they_wait_for() {
    let mut rig = Rig::new(&config(16, 8, 4, 256));
    for i in 0..3 {
        rig.add_long(&prompt(i, 30), 40);
    }
    let mut grammar = Prepared::new(prompt(7, 20), 4);
    grammar.flags.grammar = true;
    rig.submit(&grammar, 1).unwrap();
    let mut preempted = 0;
    for _ in 0..40 {
        rig.step();
        let m = rig.scheduler.snapshot();
        let again = rig.requests.keys().filter(|&&seq| {
            let info = rig.scheduler.info(seq);
            info.is_some_and(|i| i.status == Status::Ready && i.preemptions > 0)
        });
        assert_eq!(m.wait_preempted, again.count() as u64);
        assert!(m.wait_preempted <= m.waiting);
        assert_eq!(m.wait_grammar, 1);
        preempted = preempted.max(m.wait_preempted);
        let counts = rig.scheduler.counts();
        assert_eq!((m.blocks, m.slots), (counts.groups[0], counts.slots));
    }
    assert!(preempted > 0, "the pool is too small for three");
    let m = rig.scheduler.snapshot();
    assert!(m.preemptions > 0 && m.swapped_out == 0);
}

#[test]
fn drafts_count_by_position_what_was_asked_and_what_was_taken() {
    let mut c = config(16, 64, 4, 256);
    c.limits.max_draft = 3;
    let mut rig = Rig::new(&c);
    let seqs: Vec<_> = (0..3).map(|i| rig.add_long(&prompt(i, 20), 30)).collect();
    rig.step();
    // The toy draws what its history says: proposals of three unlike tokens are taken up to the first wrong one.
    let mut drafted = 0;
    for _ in 0..4 {
        for (n, &seq) in seqs.iter().enumerate() {
            if rig.scheduler.propose(seq, &[1, 2, 3][..n]).unwrap() {
                drafted += n as u64;
            }
        }
        rig.step();
    }
    let m = rig.scheduler.snapshot();
    let (asked, taken) = m.drafts.at_positions();
    assert_eq!(asked.iter().sum::<u64>(), drafted);
    assert_eq!(asked[..3], [8, 4, 0]);
    assert_eq!(m.drafted, drafted);
    assert_eq!(taken.iter().sum::<u64>(), m.accepted);
    assert!(taken.iter().zip(asked).all(|(taken, asked)| *taken <= asked));
}

#[test]
fn times_are_taken_once_for_each_completed_step_and_in_order() {
    let mut rig = Rig::new(&config(16, 64, 4, 256));
    rig.add_long(&prompt(1, 20), 10);
    for _ in 0..4 {
        rig.step();
    }
    let s = &mut rig.scheduler;
    assert!(s.note_step_times(StepId(1), 4_000_000, 0, 1_000_000));
    assert!(s.note_step_times(StepId(3), 4_000_000, 500_000, 1_500_000), "a step nobody timed is left out");
    for late in [0, 1, 2, 3, 5, u64::MAX] {
        assert!(!s.note_step_times(StepId(late), 1, 1, 1), "step {late}");
    }
    let m = s.snapshot();
    assert_eq!((m.times.last, m.times.device.count(), m.times.host.count()), (3, 2, 2));
    assert_eq!((m.times.device.sum, m.times.host.sum), (8_000_000, 2_500_000));
    assert_eq!(m.bubble_ppm(), 500_000 * 1_000_000 / 8_500_000);
    assert_eq!(m.overlap_ppm(), 800_000);
    assert!(s.note_step_times(StepId(4), u64::MAX, u64::MAX, u64::MAX), "absurd times break nothing");
    assert!(s.snapshot().bubble_ppm() <= 1_000_000 && s.snapshot().overlap_ppm() <= 1_000_000);
}
