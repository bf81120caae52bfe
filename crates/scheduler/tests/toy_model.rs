//! The hybrid toy model: one 128-token group with sources of 64, 64 and 128 entries, a second paged group, a state slot.

// A test that meets an error stops there.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod common;

use common::{EOS, Rig, hybrid, prompt};
use deepinfer_scheduler::{HitRule, Prepared, Seq, Tier, header};

const MAX_LEN: u32 = 2048;

fn rig(pages: u32) -> Rig {
    Rig::new(&hybrid(pages, 4, 256))
}

#[test]
fn sources_of_one_ratio_share_a_slot_map() {
    let rig = rig(32);
    let maps: Vec<(usize, u32)> = rig.scheduler.slot_maps().iter().map(|m| (m.group, m.entries)).collect();
    assert_eq!(maps, [(0, 64), (0, 128), (1, 64)]);
    let sections: Vec<u32> = rig.scheduler.sections().iter().map(|s| s.column).collect();
    assert_eq!((sections, rig.scheduler.table_columns()), (vec![0, 16], 16 + 32));
}

#[test]
fn chunked_prefill_and_decode_write_and_read_the_right_slots() {
    let mut rig = rig(32);
    let seq = rig.add_long(&prompt(1, 700), 200);
    rig.run(300);
    assert_eq!(rig.outputs[&seq].len(), 200);
    rig.verify_streams(MAX_LEN);
    rig.verify_empty();
}

#[test]
fn a_hit_shares_the_pages_of_every_group() {
    let mut rig = rig(32);
    rig.add_long(&prompt(1, 300), 4);
    rig.run(20);
    let second = rig.add_long(&prompt(1, 300), 4);
    let before = rig.prefill_rows;
    rig.run(20);
    assert_eq!(rig.scheduler.info(second), None, "its end was reported and taken back");
    assert_eq!(rig.prefill_rows - before, 300 - 256, "two blocks of 128 came from the index");
    assert_eq!(rig.scheduler.snapshot().hit_tokens, 256);
    rig.verify_streams(MAX_LEN);
}

#[test]
fn hits_of_models_with_state_end_where_a_slice_is_stored() {
    let mut config = hybrid(32, 4, 256);
    config.policy.hit_rule = HitRule::StateSlice;
    let mut rig = Rig::new(&config);
    rig.slices = Some(std::collections::HashMap::new());
    let first = rig.add_long(&prompt(1, 300), 30);
    while rig.scheduler.info(first).is_none_or(|i| i.output_tokens < 2) {
        rig.step();
    }
    assert!(
        rig.scheduler.note_state_slice(first, 128, Tier::Host, true),
        "the first block has a slice, the second none"
    );
    assert!(!rig.scheduler.note_state_slice(first, 100, Tier::Host, true), "not a boundary");
    let second = rig.add_long(&prompt(1, 300), 3);
    rig.step();
    assert_eq!(rig.scheduler.info(second).unwrap().cached_tokens, 128);
    rig.run(100);
    rig.verify_streams(MAX_LEN);
}

#[test]
fn preemption_frees_pages_of_every_group_and_tokens_stay_the_same() {
    let mut rig = rig(10);
    let seqs: Vec<Seq> = (0..3).map(|i| rig.add_long(&prompt(i, 250), 300)).collect();
    rig.run(3000);
    assert!(rig.scheduler.snapshot().preemptions > 0);
    for seq in seqs {
        assert_eq!(rig.outputs[&seq].len(), 300);
    }
    rig.verify_streams(MAX_LEN);
    rig.verify_empty();
}

#[test]
fn forks_share_the_prompt_and_clone_the_tail_page_and_the_state() {
    for len in [1, 2, 128, 129, 200, 256, 300] {
        let mut rig = rig(40);
        let prepared = Prepared { eos: vec![EOS], forks: 3, ..Prepared::new(prompt(len.into(), len), 40) };
        rig.submit(&prepared, 9).unwrap();
        let (mut clones, mut state_clones) = (0, 0);
        while let Some(plan) = rig.schedule() {
            let head = rig.memory.get(plan.slot, "header");
            clones += head[header::CLONE_BLOCKS];
            state_clones += head[header::CLONE_STATES];
            rig.execute(&plan);
            rig.complete(plan.step);
        }
        rig.flush();
        let used = (len - 1) % 128;
        let pages = if used == 0 { 0 } else { 1 + i32::from(used > 0) + i32::from(used > 64) };
        if len > 1 {
            assert_eq!((clones, state_clones), (2 * pages, 2), "prompt of {len}");
            assert_eq!(rig.prefill_rows, u64::from(len) + 2, "each fork computes the last prompt token only");
        }
        rig.verify_streams(MAX_LEN);
        rig.verify_empty();
    }
}
