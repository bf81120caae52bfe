//! State slices: where they are cut, what they are called, how long they count, and begins at one that is gone.

// A test that meets an error stops there.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod common;

use common::{Rig, config, prompt};
use deepinfer_scheduler::{
    Config, GroupSpec, HitRule, Plan, Prepared, Root, Seq, SliceCut, StartKind, Status, Tier, WindowRule, header,
};

/// Two encoder and two decoder layers with windows of five tokens: a slice needs 9 tokens behind it, a start without one 17.
const SMALL: WindowRule =
    WindowRule { encoder: 2, decoder: 2, window: 5, grain: 16, backtrack: 3, exact: true, keep: 8, truncated: false };

fn windows(rule: WindowRule, pages: u32, seqs: u32, tokens: u32) -> Config {
    let mut c = config(rule.grain, pages, seqs, tokens);
    c.groups.push(GroupSpec::State { stored: 64, dropped: 128, replicas: 1, ring: 0, cut: rule.grain });
    c.policy.hit_rule = HitRule::Window(rule);
    c
}

fn rig(config: &Config) -> Rig {
    let mut rig = Rig::new(config);
    rig.scheduler.set_state_slices(true).unwrap();
    rig
}

/// One turn, with the cuts it led to.
fn step(rig: &mut Rig) -> Vec<SliceCut> {
    rig.step();
    rig.scheduler.take_slices().collect()
}

/// Runs a request to its end: how it began, and where slices of it were cut.
fn ask(rig: &mut Rig, tokens: &[u32], max_new: u32) -> ([i32; 3], Vec<SliceCut>) {
    let seq = rig.add_long(tokens, max_new);
    let (mut began, mut cuts) = (None, Vec::new());
    for _ in 0..2000 {
        let plan = rig.schedule();
        cuts.extend(rig.scheduler.take_slices());
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
        cuts.extend(rig.scheduler.take_slices());
    }
    assert_eq!(rig.outputs[&seq].len(), max_new as usize);
    rig.verify_streams(256);
    (began.unwrap(), cuts)
}

fn note(rig: &mut Rig, cuts: &[SliceCut]) {
    for cut in cuts {
        assert!(rig.scheduler.note_slice(cut.hash, Tier::Host, true));
    }
}

fn boundaries(cuts: &[SliceCut]) -> Vec<u32> {
    cuts.iter().map(|cut| cut.boundary).collect()
}

#[test]
fn slices_are_cut_at_the_last_boundary_of_a_prompt_and_at_the_end() {
    for depth in [1, 2] {
        let mut c = windows(SMALL, 60, 4, 64);
        c.max_in_flight = depth;
        let mut rig = rig(&c);
        let (_, cuts) = ask(&mut rig, &prompt(1, 70), 30);
        assert_eq!(boundaries(&cuts), [64, 96], "{depth} in flight");
        let chain = rig.scheduler.snapshot();
        assert_eq!((chain.snapshots_taken, chain.starts), (0, [1, 0, 0, 0]));
        note(&mut rig, &cuts);
        // The names are those of the prompt's own chain.
        let seq = rig.add_long(&prompt(1, 70), 4);
        rig.step();
        assert_eq!(rig.scheduler.chain_hash(seq, 64), Some(cuts[0].hash));
        for tokens in [0, 1, 63, 80, 1 << 20] {
            assert_eq!(rig.scheduler.chain_hash(seq, tokens), None, "{tokens}");
        }
        rig.run(50);
        rig.scheduler.take_slices().for_each(drop);
        // What is there already is not cut again: 73 − 9 = 64.
        assert_eq!(ask(&mut rig, &prompt(1, 73), 4), ([64, 64, StartKind::Slice as i32], vec![]));
        // A sequence that was made up has right windows in the encoder 9 tokens behind its start: 80 − 17 → 48.
        let mut turn = prompt(1, 64);
        turn.extend(prompt(2, 16));
        rig.scheduler.note_slice(cuts[0].hash, Tier::Host, false);
        let (began, cuts) = ask(&mut rig, &turn, 3);
        assert_eq!((began, boundaries(&cuts)), ([48, 64, StartKind::Rerun as i32], vec![80]));
        rig.verify_empty();
    }
}

#[test]
fn a_slice_needs_the_encoder_to_be_right_and_no_more() {
    // Windows of eight: right in the encoder 14 tokens behind a start, in the decoder 28.
    let rule = WindowRule { window: 8, keep: 11, ..SMALL };
    let mut rig = rig(&windows(rule, 60, 2, 64));
    ask(&mut rig, &prompt(1, 79), 1);
    // 79 − 29 = 64 − 14 = 50 → 48: at 64 the encoder is right, the whole state is from 76 on.
    let (began, cuts) = ask(&mut rig, &prompt(1, 79), 1);
    assert_eq!((began, boundaries(&cuts)), ([48, 64, 3], vec![64]));
    assert_eq!(rule.whole_from(StartKind::Rerun, 48, 79), 76);
    assert_eq!(rule.slice_from(StartKind::Rerun, 48), 63);
    assert_eq!(rule.slice_from(StartKind::Slice, 48), 0);
    assert_eq!(rule.slice_from(StartKind::Rerun, 0), 0);
    assert_eq!(WindowRule { exact: false, ..rule }.slice_from(StartKind::Rerun, 48), 56);
}

#[test]
fn no_slice_is_cut_where_nobody_wants_one_or_the_sequence_ends_badly() {
    let mut rig = Rig::new(&windows(SMALL, 60, 2, 64));
    assert_eq!(boundaries(&ask(&mut rig, &prompt(1, 70), 30).1), [0; 0]);
    rig.scheduler.set_state_slices(true).unwrap();
    let seq = rig.add_long(&prompt(2, 10), 60);
    while rig.scheduler.info(seq).is_none_or(|info| info.output_tokens < 30) {
        assert_eq!(step(&mut rig), []);
    }
    rig.inbox.abort(seq).unwrap();
    for _ in 0..4 {
        assert_eq!(step(&mut rig), []);
    }
    // Nor when a victim leaves its lane.
    let mut rig = self::rig(&windows(SMALL, 9, 4, 64));
    for i in 0..4 {
        rig.add_long(&prompt(i, 40), 50);
    }
    let (mut cuts, mut turns) = (Vec::new(), 0);
    while rig.scheduler.has_work() {
        cuts.extend(step(&mut rig));
        turns += 1;
        assert!(turns < 2000);
    }
    assert!(rig.scheduler.snapshot().preemptions > 2);
    // A victim's prompt is what it had by then, so that further boundaries are the last one of it.
    assert!(cuts.iter().all(|cut| cut.boundary >= 32));
    rig.verify_streams(256);
    let refused = |c: &Config| Rig::new(c).scheduler.set_state_slices(true).err().map(|e| e.to_string());
    let mut c = windows(SMALL, 40, 2, 64);
    assert_eq!(refused(&c), None);
    c.prefix_caching = false;
    assert!(refused(&c).unwrap().contains("prefix caching"));
    c = windows(SMALL, 40, 2, 64);
    c.groups[1] = GroupSpec::State { stored: 64, dropped: 64, replicas: 0, ring: 0, cut: 16 };
    assert!(refused(&c).unwrap().contains("replica"));
    assert!(refused(&config(16, 40, 2, 64)).unwrap().contains("hit_window"));
}

#[test]
fn a_cut_that_nobody_took_in_time_is_not_given() {
    let mut rig = rig(&windows(SMALL, 60, 2, 64));
    rig.add_long(&prompt(1, 40), 20);
    for _ in 0..4 {
        rig.step();
    }
    assert_eq!(rig.scheduler.take_slices().count(), 0, "its replica may be another's by now");
}

#[test]
fn a_slice_counts_whenever_its_block_is_in_the_index() {
    let mut rig = rig(&windows(SMALL, 9, 2, 64));
    let (_, cuts) = ask(&mut rig, &prompt(1, 42), 1);
    assert_eq!(boundaries(&cuts), [32]);
    note(&mut rig, &cuts);
    assert_eq!(ask(&mut rig, &prompt(1, 42), 1).0, [32, 32, 2]);
    // Its block leaves for another prompt; the slice stays known and counts again once the prompt has been computed again.
    ask(&mut rig, &prompt(3, 120), 1);
    assert_eq!(ask(&mut rig, &prompt(1, 42), 1), ([0, 0, 0], vec![]));
    assert_eq!(ask(&mut rig, &prompt(1, 42), 1).0, [32, 32, 2]);
    // Given up, it is cut anew where the encoder is right.
    assert!(rig.scheduler.note_slice(cuts[0].hash, Tier::Host, false));
    let (began, again) = ask(&mut rig, &prompt(1, 42), 1);
    assert_eq!(began, [16, 32, 3]);
    assert_eq!(again, [SliceCut { seq: again[0].seq, slot: again[0].slot, ..cuts[0] }]);
    // Another engine, which has never seen it, may be told before it has the block. Other names stand for nothing.
    let mut other = self::rig(&windows(SMALL, 20, 2, 64));
    note(&mut other, &cuts);
    let (_, own) = ask(&mut other, &prompt(1, 42), 1);
    assert_eq!(own, [], "there is one already");
    assert_eq!(ask(&mut other, &prompt(1, 42), 1).0, [32, 32, 2]);
    let root = Root { kv_format: "other".into(), ..common::root(16) };
    let mut foreign = self::rig(&Config { root, ..windows(SMALL, 20, 2, 64) });
    note(&mut foreign, &cuts);
    ask(&mut foreign, &prompt(1, 42), 1);
    assert_eq!(ask(&mut foreign, &prompt(1, 42), 1).0, [16, 32, 3]);
    assert!(!rig.scheduler.note_slice(deepinfer_scheduler::BlockHash(0), Tier::Host, true), "a name of nothing");
}

/// Gives every sequence of the newest plan that begins at a slice up; who they were.
fn give_up(rig: &mut Rig, plan: &Plan, cuts: &[SliceCut]) -> Vec<Seq> {
    let n = rig.memory.get(plan.slot, "header")[header::ADMITTED] as usize;
    let words = rig.memory.get(plan.slot, "admitted").to_vec();
    let mut gone = Vec::new();
    for words in words.chunks(6).take(n) {
        let seq = Seq { index: words[1] as u32, generation: words[2] as u32 };
        assert_eq!(rig.scheduler.give_up_start(seq), words[5] == 2);
        if words[5] == 2 {
            assert!(!rig.scheduler.give_up_start(seq), "once");
            gone.push(seq);
        }
    }
    for cut in cuts {
        rig.scheduler.note_slice(cut.hash, Tier::Host, false);
    }
    rig.verify();
    gone
}

#[test]
fn a_begin_at_a_slice_that_is_gone_is_made_good() {
    for (depth, forks, beside) in [(1, 1, 0), (2, 1, 2), (1, 3, 1), (2, 3, 2)] {
        let mut c = windows(SMALL, 80, 8, 64);
        (c.max_in_flight, c.host_blocks, c.host_slots) = (depth, 20, 4);
        let mut rig = rig(&c);
        // Swapping would be cheaper than anything; there is nothing worth a copy here.
        rig.scheduler.set_rates(1e15, 1.0);
        let (_, cuts) = ask(&mut rig, &prompt(1, 73), 1);
        note(&mut rig, &cuts);
        assert_eq!(boundaries(&cuts), [64]);
        for i in 0..beside {
            rig.add_long(&prompt(10 + i, 30), 25);
            rig.step();
        }
        let before = rig.scheduler.snapshot();
        // With a hit of just what the slice has, and with one that goes on behind it.
        let seqs = rig.submit(&Prepared { forks, ..Prepared::new(prompt(1, 75), 20) }, 900).unwrap();
        if rig.queue.len() == rig.scheduler_depth() {
            rig.finish_oldest();
        }
        let plan = rig.schedule().unwrap();
        assert_eq!(rig.begun(&plan)[0], [64, 64, 2]);
        let gone = give_up(&mut rig, &plan, &cuts);
        assert_eq!(gone, seqs[..1]);
        assert_eq!(rig.status(seqs[0]), Some(Status::Ready));
        rig.queue.push_back(plan);
        rig.run(400);
        let after = rig.scheduler.snapshot();
        assert_eq!((after.slices_gone, after.preemptions, after.swapped_out), (1, 0, 0));
        assert_eq!(after.starts[2..], [before.starts[2], before.starts[3] + 1], "75 − 17 → 48");
        assert_eq!(after.rerun_tokens - before.rerun_tokens, 16);
        assert_eq!(after.admitted - before.admitted, u64::from(forks));
        for seq in seqs {
            assert_eq!(rig.outputs[&seq].len(), 20);
        }
        rig.verify_streams(256);
        rig.verify_empty();
    }
}

#[test]
fn only_a_begin_of_the_newest_step_can_be_given_up() {
    let mut rig = rig(&windows(SMALL, 80, 8, 64));
    let (_, cuts) = ask(&mut rig, &prompt(1, 73), 1);
    note(&mut rig, &cuts);
    let seq = rig.add_long(&prompt(1, 75), 20);
    assert!(!rig.scheduler.give_up_start(seq), "it has not begun");
    let plan = rig.schedule().unwrap();
    rig.queue.push_back(plan);
    rig.finish_oldest();
    assert!(!rig.scheduler.give_up_start(seq), "it is computed");
    rig.run(100);
    assert!(!rig.scheduler.give_up_start(seq), "it has ended");
    // A step that fails behind a begin that was given up takes nothing with it.
    let seq = rig.add_long(&prompt(1, 75), 20);
    let plan = rig.schedule().unwrap();
    assert!(rig.scheduler.give_up_start(seq));
    rig.queue.push_back(plan);
    rig.fail_oldest();
    rig.run(100);
    assert_eq!(rig.outputs[&seq].len(), 20);
    rig.verify_streams(256);
    rig.verify_empty();
}
