//! Chains that come from a store or go to one, and sequences that wait for the former.

// A test that meets an error stops there.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod common;

use common::{Rig, config, prompt, state};
use deepinfer_scheduler::{
    BlockHash, ChainSave, ConfigError, EngineType, Finish, GroupSpec, HitRule, Outcome, PrepFlags, Prepared, Reject,
    Saves, Scheduler, Seq, StartKind, Status, Tier, TransferError, TransferId, WindowRule,
};

const NONE: PrepFlags =
    PrepFlags { stream: false, prompt_logprobs: false, grammar: false, wait_kv: false, fetch: false, hold: false };
const FETCH: PrepFlags = PrepFlags { fetch: true, ..NONE };

/// A request that waits for a fetch.
fn waiting(rig: &mut Rig, tokens: Vec<u32>, max_new: u32) -> Seq {
    let seed = rig.requests.len() as u64 * 100;
    rig.submit(&Prepared { flags: FETCH, ..Prepared::new(tokens, max_new) }, seed).unwrap()[0]
}

fn available(rig: &Rig) -> u64 {
    rig.scheduler.snapshot().available_blocks
}

#[test]
fn a_sequence_begins_behind_what_was_fetched_for_it_while_others_run() {
    for (depth, state_group) in [(1, false), (2, false), (1, true), (2, true)] {
        let mut c = config(16, 40, 4, 64);
        c.max_in_flight = depth;
        if state_group {
            c.groups.push(state());
        }
        let mut rig = Rig::new(&c);
        let other = rig.add_long(&prompt(2, 20), 30);
        rig.step();
        rig.step();
        let seq = waiting(&mut rig, prompt(1, 70), 9);
        let chain = rig.scheduler.chain(seq);
        assert_eq!(chain.len(), 4, "its name is known before anything is scheduled");
        rig.step();
        assert_eq!(rig.status(seq), Some(Status::WaitKv));
        assert_eq!(rig.scheduler.chain_hash(seq, 64), Some(chain[3]));
        let fetch = rig.scheduler.begin_fetch(seq, 64).unwrap();
        assert_eq!((fetch.present, fetch.tokens, fetch.blocks.len()), (0, 64, 4));
        rig.verify();
        for _ in 0..5 {
            rig.step();
        }
        assert!(rig.scheduler.info(other).unwrap().output_tokens >= 3, "others go on");
        assert_eq!(rig.status(seq), Some(Status::WaitKv));
        rig.fill_fetch(&fetch, &prompt(1, 70), 64);
        assert!(rig.scheduler.end_fetch(fetch.transfer, 64));
        assert!(rig.scheduler.end_wait(seq));
        rig.verify();
        assert_eq!(rig.status(seq), Some(Status::Ready));
        if rig.queue.len() == rig.scheduler_depth() {
            rig.finish_oldest();
        }
        let plan = rig.schedule().unwrap();
        let info = rig.scheduler.info(seq).unwrap();
        assert_eq!((info.status, info.cached_tokens), (Status::Running, 64), "at the first schedule that could know");
        rig.queue.push_back(plan);
        rig.run(100);
        assert_eq!((rig.prompt_rows[&seq], rig.outputs[&seq].len()), (6, 9), "{depth} in flight, state {state_group}");
        rig.verify_streams(256);
        rig.verify_empty();
        let metrics = rig.scheduler.snapshot();
        assert_eq!((metrics.fetches, metrics.fetches_ended, metrics.fetches_failed), (1, 1, 0));
        assert_eq!((metrics.fetched_tokens, metrics.fetch_waits_ended, metrics.fetch_leases_ended), (64, 1, 0));
    }
}

#[test]
fn who_waits_holds_nobody_up_and_keeps_its_place() {
    let mut rig = Rig::new(&config(16, 40, 1, 64));
    let first = waiting(&mut rig, prompt(1, 40), 4);
    let second = rig.add_long(&prompt(2, 40), 4);
    let third = rig.add_long(&prompt(3, 40), 4);
    rig.step();
    assert_eq!(
        [first, second, third].map(|s| rig.status(s).unwrap()),
        [Status::WaitKv, Status::Running, Status::Ready]
    );
    assert!(rig.scheduler.end_wait(first));
    while rig.status(second) == Some(Status::Running) {
        rig.step();
    }
    rig.step();
    assert_eq!((rig.status(first), rig.status(third)), (Some(Status::Running), Some(Status::Ready)), "by arrival");
    rig.run(60);
    rig.verify_streams(256);
    rig.verify_empty();
}

#[test]
fn a_lease_ends_the_wait_and_not_the_request() {
    let mut c = config(16, 40, 4, 64);
    c.policy.fetch_lease_ns = 10;
    let mut rig = Rig::new(&c);
    let seq = waiting(&mut rig, prompt(1, 40), 4);
    rig.step();
    assert_eq!(rig.scheduler.next_lease(), Some(11));
    let fetch = rig.scheduler.begin_fetch(seq, 32).unwrap();
    rig.clock = 9;
    assert!(!rig.step());
    assert_eq!(rig.status(seq), Some(Status::WaitKv), "10 have not passed");
    assert!(rig.step());
    assert_eq!(rig.scheduler.next_lease(), None);
    // What arrives late is of use to the next one; what this one computed already goes back.
    rig.fill_fetch(&fetch, &prompt(1, 40), 32);
    assert!(rig.scheduler.end_fetch(fetch.transfer, 32));
    assert!(!rig.scheduler.end_wait(seq), "it waits no more");
    rig.run(20);
    let metrics = rig.scheduler.snapshot();
    assert_eq!((metrics.fetch_leases_ended, metrics.kv_leases_ended, metrics.fetch_waits_ended), (1, 0, 0));
    assert_eq!((metrics.fetch_duplicates, metrics.fetched_tokens, metrics.stale), (2, 0, 1));
    assert!(rig.scheduler.drain_remote_releases().is_empty(), "nobody elsewhere has it");
    assert_eq!(rig.finished[&seq], Finish::Length as i32);
    rig.verify_streams(256);
    rig.verify_empty();
}

#[test]
fn an_end_does_not_wait_and_what_arrives_after_it_is_anybodys() {
    for stop in [false, true] {
        let mut rig = Rig::new(&config(16, 40, 4, 64));
        let seq = waiting(&mut rig, prompt(1, 40), 4);
        rig.step();
        let fetch = rig.scheduler.begin_fetch(seq, 32).unwrap();
        if stop {
            rig.inbox.stop_at(seq, 0, Finish::Error).unwrap();
        } else {
            rig.inbox.abort(seq).unwrap();
        }
        rig.step();
        rig.flush();
        assert_eq!(rig.finished[&seq], if stop { 4 } else { 3 });
        assert_eq!((rig.scheduler.info(seq), rig.scheduler.next_lease()), (None, None));
        assert_eq!(rig.scheduler.counts().groups[0].held, 2, "the mover may still write there");
        assert_eq!(rig.scheduler.begin_fetch(seq, 32), Err(TransferError::Stale(seq)));
        assert!(rig.scheduler.chain(seq).is_empty() && !rig.scheduler.end_wait(seq));
        rig.fill_fetch(&fetch, &prompt(1, 40), 32);
        assert!(rig.scheduler.end_fetch(fetch.transfer, 32));
        rig.verify_empty();
        let next = rig.add_long(&prompt(1, 40), 4);
        rig.run(20);
        assert_eq!(rig.prompt_rows[&next], 8);
        rig.verify_streams(256);
    }
}

#[test]
fn a_wait_may_be_over_before_it_began() {
    let mut rig = Rig::new(&config(16, 40, 4, 64));
    let seq = waiting(&mut rig, prompt(1, 40), 4);
    let fetch = rig.fetch(seq, 40);
    assert_eq!((fetch.present, fetch.tokens), (0, 32), "whole blocks, of a request that nobody has seen");
    assert!(rig.scheduler.end_wait(seq) && !rig.scheduler.end_wait(seq));
    assert!(rig.step());
    assert_eq!(rig.scheduler.info(seq).unwrap().cached_tokens, 32);
    // While its grammar is compiled.
    let flags = PrepFlags { grammar: true, ..FETCH };
    let seq = rig.submit(&Prepared { flags, ..Prepared::new(prompt(2, 40), 4) }, 7).unwrap()[0];
    rig.step();
    assert_eq!(rig.status(seq), Some(Status::WaitGrammar));
    rig.fetch(seq, 16);
    assert!(rig.scheduler.end_wait(seq) && !rig.scheduler.end_wait(seq));
    rig.inbox.grammar_ready(seq, true).unwrap();
    rig.step();
    assert_eq!(rig.scheduler.info(seq).unwrap().cached_tokens, 16);
    // Or after it.
    let flags = PrepFlags { grammar: true, ..FETCH };
    let seq = rig.submit(&Prepared { flags, ..Prepared::new(prompt(3, 40), 4) }, 7).unwrap()[0];
    rig.inbox.grammar_ready(seq, true).unwrap();
    rig.step();
    assert_eq!(rig.status(seq), Some(Status::WaitKv));
    let plain = rig.add_long(&prompt(4, 40), 4);
    assert!(!rig.scheduler.end_wait(plain), "it does not wait for a fetch");
    assert!(rig.scheduler.end_wait(seq));
    rig.run(30);
    assert_eq!(rig.scheduler.snapshot().fetch_waits_ended, 3);
    rig.verify_streams(256);
    rig.verify_empty();
}

#[test]
fn a_fetch_is_refused_for_a_reason() {
    let mut rig = Rig::new(&config(16, 40, 4, 64));
    let running = rig.add_long(&prompt(1, 40), 8);
    let remote = PrepFlags { wait_kv: true, ..NONE };
    let remote = rig.submit(&Prepared { flags: remote, ..Prepared::new(prompt(6, 40), 4) }, 7).unwrap()[0];
    let seq = waiting(&mut rig, prompt(2, 40), 4);
    rig.step();
    let s = &mut rig.scheduler;
    assert_eq!(s.begin_fetch(running, 32), Err(TransferError::Status(running)));
    assert_eq!(s.begin_load(seq, 32), Err(TransferError::Status(seq)), "nobody else has its KV");
    let nobody = Seq { generation: 77, ..seq };
    assert_eq!(s.begin_fetch(nobody, 32), Err(TransferError::Stale(nobody)));
    for tokens in [0, 15, 48, u32::MAX] {
        assert_eq!(s.begin_fetch(seq, tokens), Err(TransferError::NoBlocks { tokens, least: 16, most: 32 }));
    }
    assert!(s.begin_fetch(remote, 32).is_ok_and(|f| s.end_fetch(f.transfer, 0)), "whatever it waits for");
    assert!(!s.end_wait(remote), "but it goes on waiting");
    let not = |flags, produced| Prepared { flags, produced, ..Prepared::new(prompt(2, 40), 9) };
    for (flags, why) in [
        (PrepFlags { wait_kv: true, ..FETCH }, "fetch and wait_kv"),
        (PrepFlags { prompt_logprobs: true, ..FETCH }, "prompt_logprobs"),
    ] {
        let refused = rig.inbox.add(&not(flags, 0)).unwrap_err();
        assert!(matches!(refused, Reject::Conflict(said) if said.contains(why)), "{refused}");
    }
    rig.inbox.abort(remote).unwrap();
    assert!(rig.scheduler.end_wait(seq));
    rig.run(30);
    rig.verify_empty();
    let mut c = config(16, 40, 4, 64);
    c.prefix_caching = false;
    let mut rig = Rig::new(&c);
    assert!(matches!(rig.inbox.add(&not(FETCH, 0)), Err(Reject::Conflict(said)) if said.contains("index")));
    let seq = rig.add_long(&prompt(1, 40), 2);
    assert_eq!(rig.scheduler.begin_fetch(seq, 16), Err(TransferError::NoBlocks { tokens: 16, least: 16, most: 0 }));
    assert_eq!(rig.scheduler.set_saves(Saves::OnFinish, 1), Err(ConfigError::NoSaves));
    assert_eq!(rig.scheduler.set_saves(Saves::Off, 0), Ok(()));
}

#[test]
fn room_is_left_for_the_oldest_waiting_and_for_those_who_run() {
    // 20 blocks: 4 run and may grow by 1 each, the head needs 6.
    let mut c = config(16, 21, 1, 64);
    c.policy.headroom_tokens = 8;
    let mut rig = Rig::new(&c);
    let running = rig.add_long(&prompt(1, 60), 40);
    let head = rig.add_long(&prompt(2, 90), 4);
    let seq = waiting(&mut rig, prompt(3, 200), 4);
    rig.step();
    assert_eq!((rig.status(running), rig.status(head)), (Some(Status::Running), Some(Status::Ready)));
    assert_eq!(available(&rig), 16);
    assert_eq!(rig.scheduler.begin_fetch(seq, 160), Err(TransferError::NoRoom { need: 10 }));
    let fetch = rig.scheduler.begin_fetch(seq, 144).unwrap();
    assert_eq!((fetch.blocks.len(), available(&rig)), (9, 7), "6 and 1");
    // The oldest one itself gets a fetch only if there is room for both.
    assert_eq!(rig.scheduler.begin_fetch(head, 16), Err(TransferError::NoRoom { need: 1 }));
    assert!(rig.scheduler.end_fetch(fetch.transfer, 0));
    rig.step();
    rig.fetch(head, 80);
    rig.verify();
    let metrics = rig.scheduler.snapshot();
    assert_eq!((metrics.fetches_no_room, metrics.preemptions, metrics.fetches_failed), (2, 0, 1));
    assert!(rig.scheduler.end_wait(seq));
    rig.run(300);
    assert_eq!(rig.prompt_rows[&head], 10);
    rig.verify_streams(256);
    rig.verify_empty();
}

#[test]
fn only_leaves_that_nobody_holds_are_evicted_for_a_fetch() {
    let mut rig = Rig::new(&config(16, 13, 2, 64));
    rig.add_long(&prompt(1, 100), 1);
    rig.run(20);
    let seq = waiting(&mut rig, [prompt(1, 32), prompt(2, 150)].concat(), 2);
    rig.step();
    assert_eq!(rig.scheduler.counts().groups[0].cached, 6);
    // 12 blocks: 2 of them are the begin of its own chain, and stay.
    let fetch = rig.scheduler.begin_fetch(seq, 176).unwrap();
    assert_eq!((fetch.present, fetch.blocks.len()), (32, 9));
    let counts = rig.scheduler.counts();
    assert_eq!((counts.groups[0].held, counts.groups[0].cached), (11, 1));
    rig.fill_fetch(&fetch, &rig.requests[&seq].prompt.clone(), 176);
    assert!(rig.scheduler.end_fetch(fetch.transfer, 176) && rig.scheduler.end_wait(seq));
    rig.run(20);
    assert_eq!(rig.prompt_rows[&seq], 6);
    rig.verify_streams(256);
    rig.verify_empty();
}

#[test]
fn copies_lie_behind_the_newest_planned_step() {
    let mut c = config(16, 40, 4, 64);
    c.max_in_flight = 2;
    let mut rig = Rig::new(&c);
    let (ends, goes_on) = (rig.add_long(&prompt(1, 40), 60), rig.add_long(&prompt(2, 40), 60));
    let seq = waiting(&mut rig, prompt(3, 70), 3);
    while rig.scheduler.info(goes_on).is_none_or(|i| i.output_tokens < 2) {
        rig.step();
    }
    rig.drain();
    // One step is in flight when its sequence is given up; the next one is planned without it.
    let first = rig.schedule().unwrap();
    let was = rig.scheduler.block_row(ends).unwrap().to_vec();
    rig.inbox.abort(ends).unwrap();
    let second = rig.schedule().unwrap();
    rig.queue.extend([first, second]);
    let fetch = rig.scheduler.begin_fetch(seq, 64).unwrap();
    assert_eq!(fetch.after, second.step);
    assert!(fetch.blocks.iter().any(|block| was.contains(block)), "blocks that the first one still writes");
    rig.fill_fetch(&fetch, &prompt(3, 70), 64);
    assert!(rig.scheduler.end_fetch(fetch.transfer, 64) && rig.scheduler.end_wait(seq));
    rig.run(100);
    assert_eq!(rig.prompt_rows[&seq], 6);
    rig.verify_streams(256);
    rig.verify_empty();
}

#[test]
fn a_block_is_brought_once() {
    let mut rig = Rig::new(&config(16, 60, 4, 64));
    let shared = prompt(1, 64);
    let first = waiting(&mut rig, [&*shared, &prompt(2, 40)].concat(), 3);
    let second = waiting(&mut rig, [&*shared, &prompt(3, 60)].concat(), 3);
    rig.step();
    let fetch = rig.scheduler.begin_fetch(first, 96).unwrap();
    let under_way = Err(TransferError::UnderWay { transfer: fetch.transfer, present: 0 });
    assert_eq!(rig.scheduler.begin_fetch(second, 112), under_way);
    assert_eq!(rig.scheduler.begin_fetch(first, 96), under_way, "not by itself either");
    assert_eq!(rig.scheduler.counts().groups[0].held, 6);
    rig.fill_fetch(&fetch, &rig.requests[&first].prompt.clone(), 96);
    assert!(rig.scheduler.end_fetch(fetch.transfer, 96));
    // What the two have in common is there; the rest of the second is its own.
    let rest = rig.fetch(second, 112);
    assert_eq!((rest.present, rest.tokens), (64, 112));
    let nothing = rig.scheduler.begin_fetch(second, 112).unwrap();
    assert_eq!((nothing.present, nothing.tokens, nothing.blocks.len()), (112, 112, 0));
    rig.verify_empty();
    assert!(rig.scheduler.end_fetch(nothing.transfer, 112));
    assert!(rig.scheduler.end_wait(first) && rig.scheduler.end_wait(second));
    rig.run(30);
    assert_eq!((rig.prompt_rows[&first], rig.prompt_rows[&second]), (8, 12));
    let metrics = rig.scheduler.snapshot();
    assert_eq!((metrics.fetches, metrics.fetches_under_way, metrics.fetched_tokens), (3, 2, 144));
    assert_eq!((metrics.fetches_ended, metrics.fetches_failed), (3, 0));
    rig.verify_streams(256);
    rig.verify_empty();
}

#[test]
fn a_fetch_may_end_in_any_way_and_leaves_nothing_behind() {
    let bad = TransferId { index: 5, generation: 1 };
    for (arrived, published) in [(0, 0), (15, 0), (16, 1), (47, 2), (48, 3), (64, 4), (1000, 4)] {
        let mut rig = Rig::new(&config(16, 40, 4, 64));
        let seq = waiting(&mut rig, prompt(1, 70), 3);
        rig.step();
        let fetch = rig.scheduler.begin_fetch(seq, 64).unwrap();
        rig.fill_fetch(&fetch, &prompt(1, 70), arrived / 16 * 16);
        assert!(!rig.scheduler.end_fetch(bad, 64) && !rig.scheduler.end_save(fetch.transfer, true));
        assert!(rig.scheduler.end_fetch(fetch.transfer, arrived));
        assert!(!rig.scheduler.end_fetch(fetch.transfer, 64), "a second time");
        rig.inbox.transfer(fetch.transfer, Outcome::Done).unwrap();
        rig.verify();
        rig.verify_empty();
        assert_eq!(rig.scheduler.counts().groups[0].cached, published);
        assert!(rig.scheduler.end_wait(seq));
        rig.run(20);
        assert_eq!(rig.prompt_rows[&seq], 70 - 16 * published, "{arrived}");
        rig.verify_streams(256);
        let metrics = rig.scheduler.snapshot();
        assert_eq!((metrics.fetches_failed, metrics.stale), (u64::from(published < 4), 4));
        assert_eq!(metrics.fetched_tokens, 16 * u64::from(published));
    }
    // The mover's own way to end transfers works too.
    for (outcome, rows) in [(Outcome::Done, 6), (Outcome::Failed, 70)] {
        let mut rig = Rig::new(&config(16, 40, 4, 64));
        let seq = waiting(&mut rig, prompt(1, 70), 3);
        let fetch = rig.scheduler.begin_fetch(seq, 64).unwrap();
        rig.fill_fetch(&fetch, &prompt(1, 70), 64);
        rig.inbox.transfer(fetch.transfer, outcome).unwrap();
        assert!(rig.scheduler.end_wait(seq));
        rig.run(20);
        assert_eq!(rig.prompt_rows[&seq], rows);
        rig.verify_empty();
    }
}

#[test]
fn what_somebody_else_computed_meanwhile_is_not_there_twice() {
    for depth in [1, 2] {
        let mut c = config(16, 40, 4, 64);
        c.max_in_flight = depth;
        let mut rig = Rig::new(&c);
        let seq = waiting(&mut rig, prompt(1, 70), 3);
        rig.step();
        let fetch = rig.scheduler.begin_fetch(seq, 64).unwrap();
        let same = rig.add_long(&prompt(1, 40), 20);
        while rig.scheduler.info(same).is_none_or(|i| i.computed_tokens < 32) {
            rig.step();
        }
        rig.fill_fetch(&fetch, &prompt(1, 70), 64);
        assert!(rig.scheduler.end_fetch(fetch.transfer, 64));
        rig.verify();
        let metrics = rig.scheduler.snapshot();
        assert_eq!((metrics.fetch_duplicates, metrics.fetched_tokens), (2, 32));
        assert!(rig.scheduler.end_wait(seq));
        rig.run(60);
        assert_eq!(rig.prompt_rows[&seq], 6);
        rig.verify_streams(256);
        rig.verify_empty();
    }
}

#[test]
fn forks_images_and_prompt_engines_wait_too() {
    let mut rig = Rig::new(&config(16, 60, 4, 64));
    let prepared = Prepared { flags: FETCH, forks: 3, ..Prepared::new(prompt(1, 70), 6) };
    let seqs = rig.submit(&prepared, 5).unwrap();
    rig.step();
    assert_eq!(
        seqs.iter().map(|&s| rig.status(s).unwrap()).collect::<Vec<_>>(),
        [Status::WaitKv, Status::WaitFork, Status::WaitFork]
    );
    rig.fetch(seqs[2], 64);
    assert!(!rig.scheduler.end_wait(seqs[1]) && rig.scheduler.end_wait(seqs[0]));
    rig.run(40);
    assert_eq!(rig.prefill_rows, 6 + 2, "each fork computes the last prompt token only");
    rig.verify_streams(256);
    rig.verify_empty();
    // A parent that ends while it waits lets the others go.
    let prepared = Prepared { tokens: prompt(2, 40), ..prepared };
    let seqs = rig.submit(&prepared, 5).unwrap();
    rig.step();
    rig.inbox.abort(seqs[0]).unwrap();
    rig.run(40);
    assert_eq!(seqs.iter().map(|s| rig.finished[s]).collect::<Vec<_>>(), [3, 2, 2]);
    // A hit may end within a span; the rest of it is one chunk.
    let prepared =
        Prepared { flags: FETCH, spans: std::iter::once(20..50).collect(), ..Prepared::new(prompt(3, 70), 3) };
    let seq = rig.submit(&prepared, 5).unwrap()[0];
    rig.step();
    rig.fetch(seq, 32);
    assert!(rig.scheduler.end_wait(seq));
    rig.run(20);
    assert_eq!((rig.prompt_rows[&seq], rig.spans.rests), (38, 1));
    rig.verify_streams(256);
    rig.verify_empty();
    let mut c = config(16, 40, 4, 64);
    c.engine = EngineType::Prompt;
    let mut rig = Rig::new(&c);
    let seq = waiting(&mut rig, prompt(1, 70), 6);
    rig.step();
    rig.fetch(seq, 64);
    assert!(rig.scheduler.end_wait(seq));
    rig.step();
    assert_eq!((rig.status(seq), rig.finished[&seq]), (Some(Status::Handover), Finish::Handover as i32));
    assert_eq!(rig.prompt_rows[&seq], 6);
    assert!(rig.scheduler.release(seq));
}

/// Two encoder and two decoder layers with windows of five tokens: a slice needs 9 tokens behind it, a start without one 17.
const SMALL: WindowRule =
    WindowRule { encoder: 2, decoder: 2, window: 5, grain: 16, backtrack: 3, exact: true, keep: 8, truncated: false };

#[test]
fn with_windows_a_slice_that_came_with_the_blocks_is_where_it_begins() {
    for (slice, began) in
        [(Some(64), [64, 80, 2]), (Some(80), [64, 80, 3]), (Some(48), [64, 80, 3]), (None, [64, 80, 3])]
    {
        let mut c = config(16, 60, 4, 64);
        c.groups.push(GroupSpec::State { stored: 64, dropped: 128, replicas: 1, ring: 0, cut: 16 });
        c.policy.hit_rule = HitRule::Window(SMALL);
        let mut rig = Rig::new(&c);
        let seq = waiting(&mut rig, prompt(1, 88), 4);
        rig.step();
        if let Some(boundary) = slice {
            let key = rig.scheduler.chain_hash(seq, boundary).unwrap();
            assert!(rig.scheduler.note_slice(key, Tier::Host, true));
        }
        rig.fetch(seq, 80);
        assert!(rig.scheduler.end_wait(seq));
        let plan = rig.schedule().unwrap();
        // 88 − 17 = 71 → 64 without; 88 − 9 = 79: a slice at 80 is too late, one at 64 saves nothing but is not made up.
        assert_eq!(rig.begun(&plan), [began], "a slice at {slice:?}");
        rig.queue.push_back(plan);
        rig.run(40);
        rig.verify_streams(256);
        rig.verify_empty();
        assert_eq!(StartKind::Slice as i32, 2);
    }
}

fn saves(rig: &mut Rig) -> Vec<ChainSave> {
    let saves = rig.scheduler.take_saves();
    rig.verify();
    saves
}

/// First token, grains and blocks.
fn shape(save: &ChainSave) -> (u32, usize, usize) {
    (save.first, save.keys.len(), save.blocks.len())
}

#[test]
fn whole_grains_are_saved_when_a_prompt_is_computed_and_when_a_request_ends() {
    for depth in [1, 2] {
        let mut c = config(16, 60, 4, 64);
        c.max_in_flight = depth;
        let mut rig = Rig::new(&c);
        rig.scheduler.set_saves(Saves::OnFinish, 2).unwrap();
        let seq = rig.add_long(&prompt(1, 150), 60);
        let mut given = Vec::new();
        while given.is_empty() {
            assert!(rig.scheduler.info(seq).is_none_or(|i| i.output_tokens == 0), "with the prompt");
            rig.step();
            given = saves(&mut rig);
        }
        let [save] = &given[..] else { panic!("{given:?}") };
        let chain = rig.scheduler.chain(seq);
        assert_eq!((shape(save), save.seq, save.parent), ((0, 4, 8), seq, BlockHash(0)));
        assert_eq!(save.keys, [chain[1], chain[3], chain[5], chain[7]]);
        assert_eq!(save.blocks, rig.scheduler.block_row(seq).unwrap()[..8]);
        rig.run(200);
        // 150 + 60 − 1 = 209 positions with KV: 6 grains of 32.
        let more = saves(&mut rig);
        let [end] = &more[..] else { panic!("{more:?}") };
        assert_eq!((shape(end), end.parent), ((128, 2, 4), chain[7]));
        assert_eq!(rig.scheduler.counts().groups[0].held, 12, "held past the end");
        assert!(rig.scheduler.end_save(save.transfer, true));
        assert_eq!(rig.scheduler.counts().groups[0].held, 12, "the deeper one holds its prefix");
        assert!(rig.scheduler.end_save(end.transfer, true) && !rig.scheduler.end_save(end.transfer, false));
        rig.verify_empty();
        // The same again has nothing to say, and a longer one only what is new.
        rig.submit(&Prepared::new(prompt(1, 150), 60), 0).unwrap();
        rig.run(200);
        assert_eq!(saves(&mut rig), []);
        rig.add_long(&[prompt(1, 150), prompt(2, 20)].concat(), 1);
        rig.run(200);
        let more = saves(&mut rig);
        assert_eq!(more.iter().map(shape).collect::<Vec<_>>(), [(128, 1, 2)]);
        let metrics = rig.scheduler.snapshot();
        assert_eq!((metrics.saves_given, metrics.saves_failed, metrics.saves_lost), (3, 0, 0));
        // Nothing is noted any more, what is open stays open.
        rig.scheduler.set_saves(Saves::Off, 0).unwrap();
        rig.add_long(&prompt(3, 150), 1);
        rig.run(20);
        assert_eq!(saves(&mut rig), []);
        assert!(rig.scheduler.end_save(more[0].transfer, true));
        rig.verify_empty();
    }
}

#[test]
fn what_failed_to_be_saved_is_given_again_and_what_was_fetched_is_not() {
    let mut rig = Rig::new(&config(16, 60, 4, 64));
    rig.scheduler.set_saves(Saves::OnFinish, 2).unwrap();
    let ask = |rig: &mut Rig, len| {
        rig.add_long(&prompt(1, len), 1);
        rig.run(30);
        saves(rig)
    };
    let first = ask(&mut rig, 70);
    assert_eq!(first.iter().map(shape).collect::<Vec<_>>(), [(0, 2, 4)]);
    assert_eq!(ask(&mut rig, 70), [], "it is being saved");
    assert!(rig.scheduler.end_save(first[0].transfer, false));
    rig.verify_empty();
    let again = ask(&mut rig, 70);
    assert_eq!(again.iter().map(shape).collect::<Vec<_>>(), [(0, 2, 4)]);
    assert_eq!(again[0].keys, first[0].keys);
    rig.inbox.transfer(again[0].transfer, Outcome::Done).unwrap();
    assert_eq!(ask(&mut rig, 70), []);
    // 70 tokens are there, 64 more come from the store; the rest is computed and saved.
    let seq = waiting(&mut rig, prompt(1, 200), 1);
    rig.step();
    let fetch = rig.fetch(seq, 128);
    assert_eq!(fetch.present, 64);
    assert!(rig.scheduler.end_wait(seq));
    rig.run(30);
    let new = saves(&mut rig);
    assert_eq!(new.iter().map(shape).collect::<Vec<_>>(), [(128, 2, 4)]);
    assert!(rig.scheduler.end_save(new[0].transfer, true));
    let metrics = rig.scheduler.snapshot();
    assert_eq!((metrics.saves_given, metrics.saves_failed, metrics.saves_lost), (3, 1, 0));
    rig.verify_empty();
}

#[test]
fn written_through_every_grain_is_given_in_the_step_that_completed_it() {
    let mut rig = Rig::new(&config(16, 60, 4, 40));
    rig.scheduler.set_saves(Saves::Through, 2).unwrap();
    let seq = rig.add_long(&prompt(1, 100), 70);
    let mut found = Vec::new();
    for _ in 0..200 {
        rig.step();
        let computed = rig.scheduler.info(seq).map_or(169, |info| info.computed_tokens);
        for save in saves(&mut rig) {
            found.push((shape(&save), computed));
            assert!(rig.scheduler.end_save(save.transfer, true));
        }
    }
    // Chunks of 40 tokens, then one token a step; a block may be hashed a few steps late.
    let shapes: Vec<_> = found.iter().map(|&(shape, _)| shape).collect();
    assert_eq!(shapes, [(0, 1, 2), (32, 1, 2), (64, 1, 2), (96, 1, 2), (128, 1, 2)]);
    let late = found.iter().zip([40, 80, 100, 128, 160]).map(|(&(_, at), due)| at - due).collect::<Vec<_>>();
    assert_eq!(late[..3], [0, 0, 0]);
    assert!(late[3..].iter().all(|&late| late <= 2), "{late:?}");
    rig.verify_empty();
}

#[test]
fn aborts_are_not_saved_and_hand_overs_are() {
    let mut rig = Rig::new(&config(16, 60, 4, 40));
    rig.scheduler.set_saves(Saves::OnFinish, 2).unwrap();
    let seq = rig.add_long(&prompt(1, 100), 70);
    rig.step();
    rig.inbox.abort(seq).unwrap();
    rig.run(10);
    assert_eq!(saves(&mut rig), []);
    // Stopped for a string that was found outside: that is an end of its own.
    let seq = rig.add_long(&prompt(1, 70), 70);
    while rig.scheduler.info(seq).is_none_or(|i| i.output_tokens < 40) {
        rig.step();
    }
    let open = saves(&mut rig);
    rig.inbox.stop_at(seq, 39, Finish::Stop).unwrap();
    rig.run(10);
    let end = saves(&mut rig);
    assert_eq!([shape(&open[0]), shape(&end[0])], [(0, 2, 4), (64, 1, 2)]);
    let mut c = config(16, 60, 4, 64);
    c.engine = EngineType::Prompt;
    let mut rig = Rig::new(&c);
    rig.scheduler.set_saves(Saves::OnFinish, 2).unwrap();
    let seq = rig.add_long(&prompt(1, 70), 70);
    while rig.status(seq) != Some(Status::Handover) {
        rig.step();
    }
    let given = saves(&mut rig);
    assert_eq!(given.iter().map(shape).collect::<Vec<_>>(), [(0, 2, 4)], "once, not for the prompt and the end");
    assert!(rig.scheduler.release(seq) && rig.scheduler.end_save(given[0].transfer, true));
    rig.verify_empty();
}

#[test]
fn what_nobody_takes_is_not_held_and_what_is_taken_is() {
    let mut rig = Rig::new(&config(16, 13, 1, 64));
    rig.scheduler.set_saves(Saves::OnFinish, 1).unwrap();
    rig.add_long(&prompt(1, 100), 1);
    rig.run(20);
    rig.add_long(&prompt(2, 180), 1);
    rig.run(20);
    // The second one needed the blocks of the first.
    let given = saves(&mut rig);
    assert_eq!(given.iter().map(shape).collect::<Vec<_>>(), [(0, 11, 11)]);
    let metrics = rig.scheduler.snapshot();
    assert_eq!(metrics.saves_lost, 2, "of its prompt and of its end");
    // 12 blocks, 11 of them held by the save: the next one waits for its end.
    let next = rig.add_long(&prompt(3, 40), 1);
    rig.step();
    assert_eq!(rig.status(next), Some(Status::Ready));
    assert!(rig.scheduler.end_save(given[0].transfer, true));
    rig.run(20);
    rig.verify_streams(256);
    rig.verify_empty();
    assert_eq!(
        rig.scheduler.set_saves(Saves::Through, 0),
        Err(ConfigError::TooSmall { what: "grain_blocks", value: 0, least: 1 })
    );
    // However long nobody asks, the list is bounded.
    let mut rig = Rig::new(&config(16, 60, 1, 64));
    rig.scheduler.set_saves(Saves::OnFinish, 1).unwrap();
    for i in 0..20 {
        rig.add_long(&prompt(i, 20), 1);
    }
    rig.run(100);
    assert_eq!(rig.scheduler.snapshot().saves_lost, 40 - 8);
    assert_eq!(saves(&mut rig).len(), 4);
}

#[test]
fn a_core_without_a_ring_still_answers() {
    let mut scheduler = Scheduler::new(&config(16, 40, 4, 64)).unwrap();
    let seq = scheduler.inbox().add(&Prepared { flags: FETCH, ..Prepared::new(prompt(1, 40), 3) }).unwrap()[0];
    let fetch = scheduler.begin_fetch(seq, 32).unwrap();
    scheduler.check().unwrap();
    assert!(scheduler.end_fetch(fetch.transfer, 32));
    assert_eq!(scheduler.take_saves(), []);
    scheduler.check().unwrap();
}
