//! From the first message to the last row: ends, aborts in every status, stops, forks, drafts, transfers, the ring.

// A test that meets an error stops there.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod common;

use common::{EOS, Memory, Rig, config, prompt, reference};
use deepinfer_scheduler::{
    Finish, LayoutError, OUTPUT_WORDS, Outcome, PrepFlags, Prepared, Scheduler, Seq, Status, StepError, StepId,
    TransferError, header, out,
};

fn flagged(flags: PrepFlags, len: u32, max_new: u32) -> Prepared {
    Prepared { flags, ..Prepared::new(prompt(5, len), max_new) }
}

#[test]
fn abort_is_valid_in_every_status_and_ends_a_sequence_once() {
    let none = PrepFlags::default();
    let cases = [
        (PrepFlags { grammar: true, ..none }, Status::WaitGrammar),
        (PrepFlags { wait_kv: true, ..none }, Status::WaitKv),
        (none, Status::Running),
        (PrepFlags { hold: true, ..none }, Status::Handover),
    ];
    for (flags, status) in cases {
        let mut rig = Rig::new(&config(16, 64, 4, 64));
        let max_new = if status == Status::Handover { 1 } else { 20 };
        let seq = rig.submit(&flagged(flags, 20, max_new), 0).unwrap()[0];
        rig.step();
        assert_eq!(rig.status(seq), Some(status));
        rig.inbox.abort(seq).unwrap();
        rig.inbox.abort(seq).unwrap();
        rig.step();
        rig.flush();
        let end = if status == Status::Handover { Finish::Length } else { Finish::Abort };
        assert_eq!(rig.finished.get(&seq), Some(&(end as i32)), "{status:?}");
        rig.step();
        rig.verify_empty();
        assert_eq!(rig.scheduler.info(seq), None);
    }
    // Ready: no lane is free. WaitFork: the parent's prompt is not done.
    let mut rig = Rig::new(&config(16, 64, 1, 16));
    rig.add_long(&prompt(1, 40), 8);
    let ready = rig.add_long(&prompt(2, 20), 8);
    let forks = rig.submit(&Prepared { forks: 2, ..Prepared::new(prompt(3, 20), 4) }, 0).unwrap();
    rig.step();
    assert_eq!((rig.status(ready), rig.status(forks[1])), (Some(Status::Ready), Some(Status::WaitFork)));
    rig.inbox.abort(ready).unwrap();
    rig.inbox.abort(forks[1]).unwrap();
    rig.run(60);
    assert_eq!((rig.finished[&ready], rig.finished[&forks[1]]), (3, 3));
    rig.verify_streams(256);
    rig.verify_empty();
}

#[test]
fn a_stale_handle_is_counted_and_does_nothing() {
    let mut rig = Rig::new(&config(16, 64, 4, 64));
    let seq = rig.add_long(&prompt(1, 5), 1);
    rig.run(5);
    rig.flush();
    let next = rig.add_long(&prompt(2, 5), 5);
    assert_eq!((next.index, next.generation), (seq.index, seq.generation + 1), "the place is used again");
    let before = rig.scheduler.snapshot().stale;
    rig.inbox.abort(seq).unwrap();
    rig.inbox.grammar_ready(seq, true).unwrap();
    rig.inbox.stop_at(seq, 1, Finish::Stop).unwrap();
    assert!(!rig.scheduler.propose(seq, &[1]).unwrap());
    rig.run(20);
    assert_eq!(rig.scheduler.snapshot().stale, before + 4);
    assert_eq!(rig.finished[&next], Finish::Length as i32);
}

#[test]
fn stop_ids_end_in_complete_and_minimum_lengths_hold_them_off() {
    for (min_new, stops) in [(0, vec![7]), (6, vec![7]), (0, vec![3, 7, 9, 11, 13, 20]), (9, vec![3, 7, 9, 11, 13, 20])]
    {
        for family in 0..6 {
            let mut rig = Rig::new(&config(16, 64, 4, 64));
            let request =
                Prepared { eos: vec![EOS], stop_ids: stops.clone(), min_new, ..Prepared::new(prompt(family, 9), 100) };
            let seq = rig.submit(&request, family).unwrap()[0];
            rig.run(120);
            let mut all = stops.clone();
            all.push(EOS);
            assert_eq!(rig.outputs[&seq], reference(&request.tokens, family, 100, min_new, &all, 256));
            let last = *rig.outputs[&seq].last().unwrap();
            let stopped = rig.finished[&seq] == Finish::Stop as i32;
            assert_eq!(stopped, all.contains(&last) && rig.outputs[&seq].len() as u32 >= min_new);
        }
    }
}

#[test]
fn ignore_eos_goes_on_past_the_end_but_not_past_stop_ids() {
    let mut rig = Rig::new(&config(16, 64, 4, 64));
    let request = Prepared { eos: (0..25).collect(), ignore_eos: true, ..Prepared::new(prompt(1, 9), 30) };
    let seq = rig.submit(&request, 0).unwrap()[0];
    rig.run(40);
    assert_eq!((rig.outputs[&seq].len(), rig.finished[&seq]), (30, Finish::Length as i32));
}

#[test]
fn stop_at_cuts_by_position_and_drops_what_was_made_beyond() {
    let mut rig = Rig::new(&config(16, 64, 4, 64));
    let flags = PrepFlags { stream: true, ..PrepFlags::default() };
    let seq = rig.submit(&flagged(flags, 20, 50), 3).unwrap()[0];
    for _ in 0..9 {
        rig.step();
    }
    let made = rig.outputs[&seq].clone();
    rig.inbox.stop_at(seq, 4, Finish::Stop).unwrap();
    rig.step();
    rig.flush();
    assert_eq!(rig.finished[&seq], Finish::Stop as i32);
    assert_eq!(rig.outputs[&seq], made[..4]);
}

#[test]
fn a_lease_that_runs_out_fails_the_request_and_the_pages_return_with_the_transfer() {
    let mut c = config(16, 64, 4, 64);
    c.policy.kv_lease_ns = 10;
    let mut rig = Rig::new(&c);
    let flags = PrepFlags { wait_kv: true, ..PrepFlags::default() };
    let seq = rig.submit(&flagged(flags, 60, 5), 0).unwrap()[0];
    rig.step();
    let load = rig.scheduler.begin_load(seq, 50).unwrap();
    assert_eq!((load.blocks.len(), load.present, load.tokens), (4, 0, 50));
    assert_eq!(rig.scheduler.begin_load(seq, 50), Err(TransferError::Busy(seq)));
    rig.clock += 100;
    rig.step();
    assert_eq!(rig.finished[&seq], Finish::Error as i32);
    let counts = rig.scheduler.counts();
    assert_eq!((counts.groups[0].held, counts.slots.held), (4, 1), "a remote writer may still touch them");
    rig.flush();
    // Late, and twice: no effect but the release.
    rig.inbox.transfer(load.transfer, Outcome::Done).unwrap();
    rig.inbox.transfer(load.transfer, Outcome::Done).unwrap();
    rig.step();
    assert_eq!(rig.scheduler.snapshot().stale, 1);
    rig.verify_empty();
}

#[test]
fn a_load_that_arrived_in_part_is_a_miss_and_the_request_computes_its_prompt() {
    let mut rig = Rig::new(&config(16, 64, 4, 64));
    let flags = PrepFlags { wait_kv: true, ..PrepFlags::default() };
    let seq = rig.submit(&flagged(flags, 60, 5), 0).unwrap()[0];
    rig.step();
    assert!(matches!(rig.scheduler.begin_load(seq, 60), Err(TransferError::Length { tokens: 60, most: 59 })));
    let load = rig.scheduler.begin_load(seq, 59).unwrap();
    rig.inbox.transfer(load.transfer, Outcome::Failed).unwrap();
    rig.run(20);
    assert_eq!(rig.prompt_rows[&seq], 60);
    rig.verify_streams(256);
    rig.verify_empty();
}

#[test]
fn inbound_kv_is_refused_where_it_would_starve_the_waiting_head() {
    let mut rig = Rig::new(&config(16, 9, 2, 64));
    let runner = rig.add_long(&prompt(1, 60), 4);
    rig.step();
    rig.add_long(&prompt(2, 70), 4);
    let flags = PrepFlags { wait_kv: true, ..PrepFlags::default() };
    let seq = rig.submit(&flagged(flags, 60, 2), 0).unwrap()[0];
    rig.step();
    assert!(matches!(rig.scheduler.begin_load(seq, 40), Err(TransferError::NoRoom { need: 3 })));
    assert_eq!(rig.status(runner), Some(Status::Running));
    assert_eq!(rig.scheduler.begin_load(runner, 4), Err(TransferError::Status(runner)));
}

#[test]
fn a_save_keeps_blocks_and_slot_past_the_end() {
    let mut rig = Rig::new(&config(16, 64, 4, 64));
    let seq = rig.add_long(&prompt(1, 40), 5);
    rig.step();
    rig.step();
    let save = rig.scheduler.begin_save(seq).unwrap();
    assert_eq!((save.blocks.len(), save.tokens), (3, 41));
    assert_eq!(rig.scheduler.begin_save(seq), Err(TransferError::Busy(seq)));
    rig.run(10);
    let counts = rig.scheduler.counts();
    assert_eq!((counts.groups[0].held, counts.groups[0].held_by_transfers, counts.slots.parked), (3, 3, 1));
    rig.inbox.transfer(save.transfer, Outcome::Done).unwrap();
    rig.step();
    rig.verify_empty();
    assert_eq!(rig.scheduler.counts().slots.parked, 0);
    assert_eq!(rig.scheduler.begin_save(seq), Err(TransferError::Stale(seq)));
}

#[test]
fn a_handed_over_sequence_keeps_its_kv_until_it_is_released() {
    let mut rig = Rig::new(&config(16, 64, 4, 64));
    let flags = PrepFlags { hold: true, ..PrepFlags::default() };
    let seq = rig.submit(&flagged(flags, 40, 1), 0).unwrap()[0];
    rig.run(4);
    rig.flush();
    assert_eq!(rig.status(seq), Some(Status::Handover));
    let save = rig.scheduler.begin_save(seq).unwrap();
    assert_eq!(save.tokens, 40);
    assert!(rig.scheduler.release(seq));
    assert!(!rig.scheduler.release(seq), "once");
    assert_eq!(rig.scheduler.counts().groups[0].held, 3, "the save still reads them");
    rig.scheduler.close_transfer(save.transfer, true);
    rig.verify_empty();
}

#[test]
fn forks_of_a_parent_that_is_gone_are_admitted_like_any_other() {
    for caching in [true, false] {
        let mut c = config(16, 64, 4, 16);
        c.prefix_caching = caching;
        let mut rig = Rig::new(&c);
        let seqs = rig.submit(&Prepared { forks: 3, ..Prepared::new(prompt(1, 50), 6) }, 40).unwrap();
        rig.step();
        rig.inbox.abort(seqs[0]).unwrap();
        rig.run(60);
        assert_eq!(rig.finished[&seqs[0]], Finish::Abort as i32);
        assert_eq!((rig.outputs[&seqs[1]].len(), rig.outputs[&seqs[2]].len()), (6, 6));
        rig.verify_streams(256);
        rig.verify_empty();
    }
}

#[test]
fn a_failing_grammar_ends_its_own_request_only() {
    let mut rig = Rig::new(&config(16, 64, 4, 64));
    let flags = PrepFlags { grammar: true, ..PrepFlags::default() };
    let bad = rig.submit(&flagged(flags, 9, 5), 0).unwrap()[0];
    let good = rig.submit(&flagged(flags, 9, 5), 1).unwrap()[0];
    let free = rig.add_long(&prompt(3, 9), 5);
    rig.step();
    rig.inbox.grammar_ready(bad, false).unwrap();
    rig.inbox.grammar_ready(good, true).unwrap();
    let plan = rig.schedule().unwrap();
    let row = rig.memory.get(plan.slot, "grammar_row").to_vec();
    let slot = rig.scheduler.info(good).unwrap().slot as i32;
    assert_eq!(row[..2], [-1, slot], "the decoding sequence is free, the new one constrained");
    assert_eq!(rig.memory.get(plan.slot, "header")[header::GRAMMAR_ROWS], 1);
    rig.execute(&plan);
    rig.complete(plan.step);
    rig.run(20);
    assert_eq!((rig.finished[&bad], rig.finished[&good], rig.finished[&free]), (4, 2, 2));
}

#[test]
fn a_failed_step_fails_its_rows_and_keeps_the_rest() {
    let mut rig = Rig::new(&config(16, 64, 2, 64));
    let running: Vec<Seq> = (0..2).map(|i| rig.add_long(&prompt(i, 20), 10)).collect();
    let waiting = rig.add_long(&prompt(9, 20), 10);
    rig.step();
    let plan = rig.schedule().unwrap();
    assert_eq!(rig.scheduler.complete(StepId(99), 1).unwrap_err(), StepError::NotInFlight(StepId(99)));
    rig.fail(plan.step);
    assert_eq!(rig.scheduler.fail_step(plan.step, 1).unwrap_err(), StepError::NotInFlight(plan.step));
    for seq in running {
        assert_eq!(rig.finished[&seq], Finish::Error as i32);
    }
    rig.run(40);
    assert_eq!(rig.outputs[&waiting].len(), 10);
    rig.verify_streams(256);
    rig.verify_empty();
}

#[test]
fn an_impossible_result_fails_its_sequence_only() {
    for (accepted, token) in [(0, 5), (2, 5), (1, -3), (1, 50)] {
        let mut rig = Rig::new(&config(16, 64, 4, 64));
        let seqs: Vec<Seq> = (0..3).map(|i| rig.add_long(&prompt(i, 20), 4)).collect();
        rig.step();
        let plan = rig.schedule().unwrap();
        rig.execute(&plan);
        rig.memory.get_mut(plan.slot, "accepted")[1] = accepted;
        rig.memory.get_mut(plan.slot, "tokens")[1] = token;
        rig.complete(plan.step);
        rig.run(20);
        let ends: Vec<i32> = seqs.iter().map(|s| rig.finished[s]).collect();
        assert_eq!(ends, [2, 4, 2]);
        rig.verify_streams(256);
    }
}

#[test]
fn drafts_are_verified_ragged_and_rolled_back_exactly() {
    for right in 0..5usize {
        let mut c = config(16, 64, 4, 64);
        c.limits.max_draft = 4;
        let mut rig = Rig::new(&c);
        let seqs: Vec<Seq> = (0..3).map(|i| rig.add_long(&prompt(i, 14), 40)).collect();
        rig.step();
        let mut steps = 0;
        while rig.scheduler.has_work() {
            for (n, &seq) in seqs.iter().enumerate().take(2) {
                let expected = rig.expected(seq, 256);
                let made = rig.outputs[&seq].len();
                let mut drafts: Vec<u32> = expected.iter().skip(made).take(4).copied().collect();
                if let Some(wrong) = drafts.get_mut(right + n) {
                    *wrong = (*wrong + 1) % common::VOCAB;
                }
                if rig.status(seq) == Some(Status::Running) {
                    assert!(rig.scheduler.propose(seq, &drafts).unwrap());
                }
            }
            rig.step();
            steps += 1;
        }
        assert!(steps <= 41, "the third sequence has no drafts");
        let m = rig.scheduler.snapshot();
        assert!(m.accepted <= m.drafted && (m.accepted > 0));
        rig.verify_streams(256);
        rig.verify_empty();
        // The chain never saw a rejected token.
        let mut turn = prompt(0, 14);
        turn.extend(&rig.outputs[&seqs[0]]);
        let again = rig.add_long(&turn, 1);
        rig.step();
        assert_eq!(rig.scheduler.info(again).map_or(48, |i| i.cached_tokens), 48);
    }
}

#[test]
fn a_step_is_planned_only_after_the_one_before_completed() {
    let mut c = config(16, 64, 4, 64);
    let mut unready = Scheduler::new(&c).unwrap();
    assert_eq!(unready.schedule(1).unwrap_err(), StepError::NoRing);
    c.ring_slots = 3;
    let mut rig = Rig::new(&c);
    rig.add_long(&prompt(1, 20), 10);
    let plan = rig.schedule().unwrap();
    assert_eq!(rig.scheduler.schedule(2).unwrap_err(), StepError::InFlight(plan.step));
    assert_eq!(rig.scheduler.plan_dummy(2).unwrap_err(), StepError::InFlight(plan.step));
    rig.execute(&plan);
    rig.complete(plan.step);
    if cfg!(debug_assertions) {
        assert!(rig.memory.get(plan.slot, "ids").iter().all(|&w| w == deepinfer_scheduler::POISON));
    }
    rig.run(20);
    rig.verify_streams(256);
}

#[test]
fn an_idle_plan_still_names_a_full_dummy_step() {
    let mut rig = Rig::new(&config(16, 64, 4, 64));
    assert_eq!(rig.schedule(), None);
    let slot = 1;
    assert_eq!(rig.memory.get(slot, "header")[..6], [0, 0, 0, 1, 1, 1]);
    let plan = rig.scheduler.plan_dummy(1).unwrap();
    assert_eq!(rig.memory.get(plan.slot, "header")[..6], [4, 1, 0, 1, 1, 1]);
    for (field, value) in [("ids", 0), ("pos", 0), ("slots0", 0), ("seq_len", 1), ("state_row", 0), ("seq_flags", 0)] {
        assert_eq!(rig.memory.get(plan.slot, field)[0], value, "{field}");
    }
    assert_eq!(rig.memory.get(plan.slot, "cu_q")[..2], [0, 1]);
    rig.complete(plan.step);
    rig.add_long(&prompt(1, 5), 2);
    assert!(rig.step());
}

#[test]
fn outputs_stay_valid_until_the_next_complete() {
    let mut rig = Rig::new(&config(16, 64, 4, 64));
    let flags = PrepFlags { stream: true, ..PrepFlags::default() };
    let seq = rig.submit(&flagged(flags, 5, 3), 0).unwrap()[0];
    for n in 0..3 {
        let plan = rig.schedule().unwrap();
        rig.execute(&plan);
        let outputs = rig.scheduler.complete(plan.step, 7).unwrap();
        let copy = outputs.rows.to_vec();
        assert_eq!((outputs.len(), outputs.seq(0), copy.len()), (1, seq, OUTPUT_WORDS));
        assert_eq!(copy[out::FLAGS], if n == 0 { 3 } else { 1 });
        assert_eq!(copy[out::FINISH], if n == 2 { 2 } else { 0 });
        if n < 2 {
            // Planning the next step leaves them alone.
            let next = rig.scheduler.schedule(8).unwrap().unwrap();
            assert_eq!(rig.scheduler.outputs().rows, copy);
            rig.execute(&next);
            rig.scheduler.fail_step(next.step, 8).unwrap();
            break;
        }
    }
}

#[test]
fn a_ring_that_does_not_fit_the_layout_is_refused() {
    let c = config(16, 64, 4, 64);
    let mut scheduler = Scheduler::new(&c).unwrap();
    let mut memory = Memory::new(&scheduler, 3);
    let views = memory.views();
    let mut register = |views: &[deepinfer_scheduler::RingView]| {
        // SAFETY: the memory outlives the scheduler of this test and nobody else touches it.
        unsafe { scheduler.register_ring(views) }
    };
    assert_eq!(register(&views[..2]), Err(LayoutError::Slots { given: 2, want: 3 }));
    let mut short = views.clone();
    short[1].fields[1].len -= 1;
    assert!(matches!(register(&short), Err(LayoutError::Words { slot: 1, given: 63, want: 64, .. })));
    let mut odd = views.clone();
    odd[2].fields[2].words = odd[2].fields[2].words.wrapping_byte_add(2);
    assert!(matches!(register(&odd), Err(LayoutError::Alignment { slot: 2, .. })));
    let mut twice = views.clone();
    twice[2] = views[1].clone();
    assert!(matches!(register(&twice), Err(LayoutError::Overlap(..))));
    let mut fewer = views.clone();
    fewer[0].fields.pop();
    assert!(matches!(register(&fewer), Err(LayoutError::Fields { slot: 0, .. })));
    assert_eq!(register(&views), Ok(()));
    assert_eq!(register(&views), Err(LayoutError::Registered));
}

#[test]
fn many_threads_add_and_abort_while_steps_run() {
    let mut rig = Rig::new(&config(16, 64, 4, 64));
    let threads: Vec<_> = (0..4)
        .map(|t| {
            let inbox = rig.inbox.clone();
            std::thread::spawn(move || {
                let mut kept = Vec::new();
                for i in 0..50u64 {
                    let seqs = inbox.add(&Prepared::new(prompt(t * 100 + i, 10), 3)).unwrap();
                    if i % 3 == 0 {
                        inbox.abort(seqs[0]).unwrap();
                    }
                    kept.extend(seqs);
                }
                kept
            })
        })
        .collect();
    let mut finished = 0;
    let mut idle = 0;
    while finished < 200 && idle < 100_000 {
        rig.clock += 1;
        let Some(plan) = rig.scheduler.schedule(rig.clock).unwrap() else {
            finished += common::read(&rig.scheduler.flush()).len();
            idle += 1;
            std::thread::yield_now();
            continue;
        };
        let seqs = rig.memory.get(plan.slot, "header")[header::SEQS] as usize;
        let flags = rig.memory.get(plan.slot, "seq_flags")[..seqs].to_vec();
        for (to, flag) in rig.memory.get_mut(plan.slot, "accepted").iter_mut().zip(flags) {
            *to = flag & 1;
        }
        rig.memory.get_mut(plan.slot, "tokens").fill(5);
        let outputs = rig.scheduler.complete(plan.step, rig.clock).unwrap();
        finished += common::read(&outputs).iter().filter(|r| r[out::FINISH] != 0).count();
    }
    let mut all: Vec<Seq> = threads.into_iter().flat_map(|t| t.join().unwrap()).collect();
    all.sort_unstable();
    all.dedup();
    assert_eq!((all.len(), finished), (200, 200), "each handle is its own, each ends once");
    rig.verify_empty();
}
