//! Two steps in flight: what the host plans before it knows what the step before drew, and what it does about it later.

// A test that meets an error stops there.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod common;

use common::{EOS, Rig, config, hybrid, prompt};
use deepinfer_scheduler::{Config, Finish, PrepFlags, Prepared, Seq, Status, StepError, header};

fn overlapped(mut config: Config) -> Config {
    config.max_in_flight = 2;
    config
}

fn plain(pages: u32, seqs: u32, tokens: u32) -> Rig {
    Rig::new(&overlapped(config(16, pages, seqs, tokens)))
}

/// A request whose stream meets the end only after some tokens, and how many it makes.
fn stopping(rig: &mut Rig, least: usize) -> (Seq, usize) {
    for family in 0.. {
        let request = Prepared { eos: vec![EOS], ..Prepared::new(prompt(family, 20), 100) };
        let made = common::reference(&request.tokens, family, 100, 0, &[EOS], 256).len();
        if (least..80).contains(&made) {
            return (rig.submit(&request, family).unwrap()[0], made);
        }
    }
    unreachable!()
}

#[test]
fn steps_complete_in_the_order_they_were_planned_and_no_third_one_is_planned() {
    let mut rig = plain(64, 4, 64);
    rig.add_long(&prompt(1, 20), 10);
    let first = rig.schedule().unwrap();
    let second = rig.schedule().unwrap();
    assert_eq!(rig.scheduler.schedule(9).unwrap_err(), StepError::InFlight(first.step));
    assert_eq!(rig.scheduler.plan_dummy(9).unwrap_err(), StepError::InFlight(first.step));
    let early = StepError::OutOfOrder { step: second.step, oldest: first.step };
    assert_eq!(rig.scheduler.complete(second.step, 9).unwrap_err(), early);
    assert_eq!(rig.scheduler.fail_step(second.step, 9).unwrap_err(), early);
    rig.queue.extend([first, second]);
    rig.finish_oldest();
    assert_eq!(rig.scheduler.complete(first.step, 9).unwrap_err(), StepError::NotInFlight(first.step));
    rig.run(30);
    rig.verify_streams(256);
    rig.verify_empty();
}

#[test]
fn ids_that_are_being_drawn_are_placeholders_and_name_where_they_are_drawn() {
    let mut rig = plain(64, 4, 32);
    let old = rig.add_long(&prompt(1, 20), 30);
    rig.add_long(&prompt(2, 40), 30);
    // Step 1: a whole prompt and a cut one. Step 2: the first draws, the second goes on to the end of its prompt.
    let one = rig.schedule().unwrap();
    let two = rig.schedule().unwrap();
    let get = |rig: &Rig, slot, name: &str, n: usize| rig.memory.get(slot, name)[..n].to_vec();
    assert_eq!((one.rows, one.seqs, two.rows, two.seqs, two.decoding), (32, 2, 29, 2, 1));
    assert_eq!(get(&rig, one.slot, "prev_seq", 2), [-1, -1]);
    assert_eq!(get(&rig, two.slot, "ids", 1), [-1]);
    assert_eq!(get(&rig, two.slot, "prev_seq", 2), [0, -1]);
    assert_eq!(get(&rig, two.slot, "pos", 2), [20, 12]);
    assert_eq!(rig.memory.get(two.slot, "header")[header::PLACEHOLDERS], 1);
    rig.queue.extend([one, two]);
    assert_eq!(rig.scheduler.info(old).unwrap().output_tokens, 0, "nothing is known of it yet");
    rig.finish_oldest();
    assert_eq!(rig.scheduler.info(old).unwrap().output_tokens, 1);
    let three = rig.schedule().unwrap();
    assert_eq!((three.rows, three.decoding), (2, 2));
    assert_eq!(get(&rig, three.slot, "ids", 2), [-1, -1]);
    assert_eq!(get(&rig, three.slot, "prev_seq", 2), [0, 1]);
    rig.queue.push_back(three);
    rig.run(60);
    rig.verify_streams(256);
}

#[test]
fn a_sequence_that_stops_costs_one_row_in_its_own_pages_and_nothing_else() {
    // A pool in which the blocks that it gives up are needed at once.
    let mut rig = plain(12, 4, 64);
    let (seq, made) = stopping(&mut rig, 5);
    rig.add_long(&prompt(50, 30), 60);
    while !rig.finished.contains_key(&seq) {
        rig.step();
    }
    let next = rig.add_long(&prompt(51, 60), 20);
    rig.run(100);
    assert_eq!((rig.outputs[&seq].len(), rig.finished[&seq]), (made, Finish::Stop as i32));
    assert_eq!(rig.scheduler.snapshot().ghost_rows, 1, "one lane, once");
    assert_eq!(rig.outputs[&next].len(), 20);
    rig.verify_streams(256);
    rig.verify_empty();
}

#[test]
fn a_sequence_whose_length_ends_it_has_no_row_behind_its_last() {
    for max_new in [1, 2, 3, 9] {
        let mut rig = plain(64, 4, 64);
        let seqs: Vec<Seq> = (0..3).map(|i| rig.add_long(&prompt(i, 20), max_new)).collect();
        rig.run(40);
        let m = rig.scheduler.snapshot();
        assert_eq!((m.ghost_rows, m.decode_rows), (0, 3 * u64::from(max_new - 1)));
        assert!(seqs.iter().all(|s| rig.outputs[s].len() == max_new as usize));
        rig.verify_streams(256);
        rig.verify_empty();
    }
}

#[test]
fn a_sequence_preempted_with_rows_in_flight_draws_the_same_tokens_again() {
    for ordered in [true, false] {
        let mut c = overlapped(config(16, 12, 4, 256));
        c.device_ordered = ordered;
        let mut rig = Rig::new(&c);
        let seqs: Vec<Seq> = (0..4).map(|i| rig.add_long(&prompt(i, 20 + 5 * i as u32), 60)).collect();
        rig.run(1500);
        let m = rig.scheduler.snapshot();
        assert!(m.preemptions > 1 && m.ghost_rows > 0, "{} preemptions, {} rows lost", m.preemptions, m.ghost_rows);
        assert!(seqs.iter().all(|s| rig.outputs[s].len() == 60));
        rig.verify_streams(256);
        rig.verify_empty();
    }
}

#[test]
fn a_lone_sequence_that_lacks_a_block_waits_for_its_own_rows() {
    // Four blocks, two of them handed over: the others are full while its last row is in flight.
    let mut rig = plain(5, 2, 64);
    let held = PrepFlags { hold: true, ..PrepFlags::default() };
    let first = rig.submit(&Prepared { flags: held, ..Prepared::new(prompt(1, 30), 1) }, 0).unwrap()[0];
    rig.run(4);
    rig.flush();
    let second = rig.add_long(&prompt(2, 20), 30);
    for _ in 0..60 {
        rig.step();
    }
    let info = rig.scheduler.info(second).unwrap();
    assert_eq!((info.status, info.output_tokens, info.preemptions), (Status::Ready, 13, 1), "no token is drawn twice");
    assert!(rig.scheduler.release(first));
    rig.run(60);
    assert_eq!(rig.outputs[&second].len(), 30);
    rig.verify_streams(256);
    rig.verify_empty();
}

#[test]
fn abort_and_stop_take_effect_with_two_steps_in_flight() {
    for at in 1..12 {
        let mut rig = plain(64, 4, 32);
        let aborted = rig.add_long(&prompt(1, 40), 40);
        let cut = rig.add_long(&prompt(2, 20), 40);
        let whole = rig.add_long(&prompt(3, 20), 40);
        for _ in 0..at {
            rig.step();
        }
        rig.inbox.abort(aborted).unwrap();
        let made = rig.outputs[&cut].len() as u32;
        rig.inbox.stop_at(cut, made / 2, Finish::Stop).unwrap();
        rig.run(80);
        assert_eq!((rig.finished[&aborted], rig.finished[&cut], rig.finished[&whole]), (3, 1, 2));
        let expected = rig.expected(cut, 256);
        assert_eq!(rig.outputs[&cut], expected[..made as usize / 2]);
        rig.finished.insert(cut, Finish::Abort as i32);
        rig.verify_streams(256);
        rig.verify_empty();
    }
}

#[test]
fn a_failed_step_takes_along_who_went_on_from_it_and_nobody_else() {
    let mut rig = plain(64, 8, 24);
    let decoding = rig.add_long(&prompt(1, 10), 30);
    rig.step();
    rig.step();
    let prefill = rig.add_long(&prompt(2, 40), 30);
    // One step with both, and one behind it in which both go on and another comes.
    rig.drain();
    let failing = rig.schedule().unwrap();
    rig.queue.push_back(failing);
    let late = rig.add_long(&prompt(3, 4), 30);
    let behind = rig.schedule().unwrap();
    rig.queue.push_back(behind);
    assert_eq!((failing.seqs, behind.seqs), (2, 3));
    assert!(rig.fail_oldest());
    assert_eq!((rig.finished.get(&decoding), rig.finished.get(&prefill)), (Some(&4), Some(&4)));
    assert_eq!(rig.status(late), Some(Status::Running));
    rig.finish_oldest();
    assert_eq!(rig.scheduler.snapshot().ghost_rows, 2);
    assert_eq!(rig.outputs[&late].len(), 1, "its first token counts");
    rig.run(60);
    assert_eq!((rig.outputs[&late].len(), rig.finished[&late]), (30, 2));
    rig.verify_streams(256);
    rig.verify_empty();
}

#[test]
fn a_failed_step_leaves_alone_who_lost_its_lane_since() {
    let mut rig = plain(6, 2, 64);
    let old = rig.add_long(&prompt(1, 30), 20);
    let new = rig.add_long(&prompt(2, 31), 20);
    while rig.scheduler.snapshot().preemptions == 0 {
        if rig.queue.len() == 2 {
            rig.finish_oldest();
        }
        let plan = rig.schedule();
        rig.queue.extend(plan);
    }
    assert_eq!(rig.queue.len(), 2, "preempted with a step in flight");
    assert!(rig.fail_oldest());
    assert_eq!(rig.finished.get(&old), Some(&4));
    assert!(!rig.finished.contains_key(&new), "it computes those rows again anyway");
    rig.run(60);
    assert_eq!(rig.outputs[&new].len(), 20);
    rig.verify_streams(256);
    rig.verify_empty();
}

#[test]
fn forks_clone_the_state_of_a_parent_that_stands_still() {
    for len in [2, 128, 129, 200, 300] {
        let mut rig = Rig::new(&overlapped(hybrid(40, 4, 256)));
        let prepared = Prepared { eos: vec![EOS], forks: 3, ..Prepared::new(prompt(len.into(), len), 40) };
        rig.submit(&prepared, 9).unwrap();
        rig.run(80);
        assert_eq!(rig.scheduler.snapshot().forks, 2, "prompt of {len}");
        assert_eq!(rig.prefill_rows, u64::from(len) + 2, "each fork computes the last prompt token only");
        rig.verify_streams(2048);
        rig.verify_empty();
    }
}

#[test]
fn state_that_is_handed_over_stands_where_its_sequence_ended() {
    let mut rig = Rig::new(&overlapped(hybrid(40, 4, 256)));
    let flags = PrepFlags { hold: true, ..PrepFlags::default() };
    for family in 0..12 {
        let request = Prepared { eos: vec![EOS], flags, ..Prepared::new(prompt(family, 20), 60) };
        let seq = rig.submit(&request, family).unwrap()[0];
        while !rig.finished.contains_key(&seq) {
            rig.step();
        }
        rig.drain();
        let save = rig.scheduler.begin_save(seq).unwrap();
        assert_eq!(rig.device.seen[save.slot.index()], save.tokens);
        rig.scheduler.close_transfer(save.transfer, true);
        assert!(rig.scheduler.release(seq));
        rig.flush();
    }
    assert_eq!(rig.scheduler.snapshot().ghost_rows, 0);
    rig.verify_streams(2048);
}

#[test]
fn blocks_come_back_when_their_ghost_row_has_passed() {
    for (ordered, held) in [(true, 0), (false, 2)] {
        let mut c = overlapped(config(16, 64, 4, 64));
        (c.device_ordered, c.prefix_caching) = (ordered, false);
        let mut rig = Rig::new(&c);
        rig.add_long(&prompt(50, 20), 100);
        let (seq, _) = stopping(&mut rig, 3);
        while !rig.finished.contains_key(&seq) {
            rig.step();
        }
        assert_eq!(rig.queue.len(), 1, "its ghost row");
        let parked = |rig: &Rig| rig.scheduler.counts().groups[0].parked;
        assert!(parked(&rig) >= 2);
        // Planned behind the ghost row: an ordered device may use the blocks, another one not before it completed.
        let plan = rig.schedule().unwrap();
        rig.queue.push_back(plan);
        assert_eq!(parked(&rig).min(2), held);
        rig.finish_oldest();
        let plan = rig.schedule().unwrap();
        rig.queue.push_back(plan);
        assert_eq!(parked(&rig), 0);
        rig.run(120);
        rig.verify_streams(256);
    }
}

#[test]
fn memory_given_to_a_mover_names_the_step_that_may_still_use_it() {
    let mut rig = plain(64, 4, 64);
    rig.add_long(&prompt(1, 20), 30);
    let flags = PrepFlags { wait_kv: true, ..PrepFlags::default() };
    let seq = rig.submit(&Prepared { flags, ..Prepared::new(prompt(2, 40), 5) }, 0).unwrap()[0];
    let plan = rig.schedule().unwrap();
    rig.queue.push_back(plan);
    let load = rig.scheduler.begin_load(seq, 30).unwrap();
    assert_eq!(load.after, plan.step);
    rig.drain();
    rig.scheduler.close_transfer(load.transfer, false);
    rig.run(60);
    rig.verify_streams(256);
}

#[test]
fn dummy_steps_take_their_place_among_those_in_flight() {
    let mut rig = plain(64, 4, 64);
    let seq = rig.add_long(&prompt(1, 20), 20);
    for n in 0..12 {
        rig.step();
        if n % 3 == 0 {
            if rig.queue.len() == 2 {
                rig.finish_oldest();
            }
            rig.dummy();
            rig.finish_oldest();
        }
    }
    rig.run(60);
    assert_eq!(rig.outputs[&seq].len(), 20);
    rig.verify_streams(256);
}
