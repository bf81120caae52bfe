//! State slots against a naive model, and blocks and slots taken together.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;

use deepinfer_kvindex::{
    BlockPool, Fence, Need, Owner, PoolConfig, PoolError, PoolGroup, StateSlot, StateSlots, StepId, TransferId, reserve,
};
use proptest::prelude::*;

#[derive(Clone, Copy, Debug)]
enum Op {
    Alloc,
    Release { slot: u32, fence: u8 },
    Advance,
    Retire,
    Open,
    Close,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        5 => Just(Op::Alloc),
        8 => (0..12u32, 0..5u8).prop_map(|(slot, fence)| Op::Release { slot, fence }),
        2 => Just(Op::Advance),
        1 => Just(Op::Retire),
        1 => Just(Op::Open),
        1 => Just(Op::Close),
    ]
}

/// Slot → fence: `Err(step)` waits for a step (0: free), `Ok(id)` for a transfer.
struct Model {
    held: BTreeSet<u32>,
    released: Vec<(u32, Result<TransferId, u64>)>,
    open: Option<TransferId>,
    last: u64,
    opened: u64,
}

impl Model {
    fn settle(&mut self) {
        for entry in &mut self.released {
            if entry.1.is_err_and(|step| step < self.opened) {
                entry.1 = Err(0);
            }
        }
    }

    fn available(&self, now: u64) -> u32 {
        let now = now.max(self.opened);
        self.released.iter().filter(|r| r.1.is_err_and(|step| step < now)).count() as u32
    }
}

fn run(total: u32, ops: &[Op]) -> Result<(), TestCaseError> {
    let mut slots = StateSlots::new(total).unwrap();
    let released = (1..total).map(|s| (s, Err(0))).collect();
    let mut model = Model { held: BTreeSet::new(), released, open: None, last: 0, opened: 1 };
    let (mut now, mut serial, mut refused) = (1u64, 0, 0);
    for &op in ops {
        match op {
            Op::Alloc => {
                let possible = model.available(now) > 0;
                let got = slots.alloc(StepId(now));
                model.opened = model.opened.max(now);
                model.settle();
                prop_assert_eq!(got.is_some(), possible);
                if let Some(slot) = got {
                    let at = model.released.iter().position(|r| *r == (slot.0, Err(0)));
                    prop_assert!(at.is_some(), "slot {} was not free", slot.0);
                    let _ = model.released.swap_remove(at.unwrap());
                    model.held.insert(slot.0);
                }
            }
            Op::Release { slot, fence } => {
                let stale = TransferId { index: 0, generation: u32::MAX };
                let fence = match (fence, model.open) {
                    (0, _) => Fence::Open,
                    (1, Some(id)) => Fence::Transfer(id),
                    (2, _) => Fence::Transfer(stale),
                    _ => Fence::Step(StepId(now)),
                };
                let wanted = if slot == 0 || slot >= total {
                    Err(PoolError::BadSlot(StateSlot(slot)))
                } else if !model.held.contains(&slot) {
                    Err(PoolError::SlotNotHeld(StateSlot(slot)))
                } else if fence == Fence::Transfer(stale) {
                    Err(PoolError::UnknownTransfer(stale))
                } else {
                    Ok(())
                };
                prop_assert_eq!(slots.release(StateSlot(slot), fence), wanted);
                if wanted.is_err() {
                    refused += 1;
                    continue;
                }
                model.held.remove(&slot);
                if let Fence::Step(step) = fence {
                    model.last = model.last.max(step.0);
                }
                let waits = if let Fence::Transfer(id) = fence { Ok(id) } else { Err(model.last) };
                model.released.push((slot, waits));
                model.settle();
            }
            Op::Advance => now += 1,
            Op::Retire => {
                slots.retire(StepId(now));
                model.opened = model.opened.max(now);
                model.settle();
            }
            Op::Open if model.open.is_none() => {
                serial += 1;
                let id = TransferId { index: 0, generation: serial };
                prop_assert!(slots.open_transfer(id) && !slots.open_transfer(id));
                model.open = Some(id);
            }
            Op::Open => {}
            Op::Close => {
                if let Some(id) = model.open.take() {
                    prop_assert!(slots.close_transfer(id) && !slots.close_transfer(id));
                    for entry in &mut model.released {
                        if entry.1 == Ok(id) {
                            entry.1 = Err(model.last);
                        }
                    }
                    model.settle();
                }
            }
        }
        prop_assert_eq!(slots.check(), Ok(()));
        let counts = slots.counts();
        prop_assert!(counts.adds_up());
        prop_assert_eq!((counts.held, counts.reserved), (model.held.len() as u32, 1));
        prop_assert_eq!(slots.misuse(), refused);
        prop_assert_eq!(slots.available(StepId(now)), model.available(now));
        prop_assert_eq!(slots.coming_back(StepId(now)), model.released.len() as u32 - model.available(now));
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn slots_agree_with_the_naive_model_after_every_call(total in 2..12u32, ops in prop::collection::vec(op(), 500)) {
        run(total, &ops)?;
    }
}

#[test]
fn a_reservation_takes_all_groups_and_slots_or_nothing() {
    let groups = vec![
        PoolGroup { num_pages: 11, pages_per_block: 1 },
        // Room for 4 blocks: the tighter group decides.
        PoolGroup { num_pages: 10, pages_per_block: 2 },
    ];
    let mut pool = BlockPool::new(&PoolConfig { groups, prefix_caching: true, event_capacity: 0 }).unwrap();
    let mut slots = StateSlots::new(3).unwrap();
    let (now, owner) = (StepId(1), Owner::Sequence);
    let need = |blocks, slots| Need { blocks, slots };
    assert_eq!(pool.capacity(), 4);
    assert!(need(4, 2).fits_empty(&pool, &slots) && need(4, 2).fits(&pool, &slots, now));
    assert!(!need(5, 1).fits_empty(&pool, &slots) && !need(1, 3).fits_empty(&pool, &slots));
    let (mut blocks, mut rows) = (Vec::new(), Vec::new());
    for too_much in [need(5, 1), need(1, 3)] {
        assert!(!reserve(&mut pool, &mut slots, now, owner, too_much, &mut blocks, &mut rows));
        assert!(blocks.is_empty() && rows.is_empty());
        assert_eq!((pool.counts(0).held, pool.counts(1).held, slots.counts().held), (0, 0, 0));
    }
    assert!(reserve(&mut pool, &mut slots, now, owner, need(3, 2), &mut blocks, &mut rows));
    assert_eq!((blocks.len(), rows.len()), (3, 2));
    let mut pages: Vec<u32> = blocks.iter().flat_map(|&b| pool.pages(1, b).to_vec()).collect();
    pages.sort_unstable();
    pages.dedup();
    assert!(pages.len() == 6 && pages[0] > 0, "pages are shared or null: {pages:?}");
    assert_eq!(pool.counts(1).held, 6);
    // The rest of group 1 has one page too few for a second block.
    assert_eq!((pool.available(now), pool.counts(0).free, pool.counts(1).free), (1, 7, 3));
    for block in blocks {
        pool.release_private(block, owner, Fence::Open).unwrap();
    }
    pool.check_holders([]).unwrap();
    assert_eq!(pool.available(now), 4);
}

#[test]
fn configurations_that_cannot_hold_a_block_are_refused_with_what_to_change() {
    let group = |num_pages, pages_per_block| PoolGroup { num_pages, pages_per_block };
    for groups in [
        vec![],
        vec![group(1, 1)],
        vec![group(0, 1)],
        vec![group(8, 2)],
        vec![group(8, 0)],
        vec![group(8, 1), group(2, 2)],
        vec![group(8, 1), group(8, 0)],
        vec![group(u32::MAX, 1)],
    ] {
        let error = BlockPool::new(&PoolConfig { groups, prefix_caching: true, event_capacity: 0 }).unwrap_err();
        assert!(
            matches!(error, PoolError::Config(_)) && error.to_string().contains("must")
                || error.to_string().contains("declare")
        );
    }
    assert!(StateSlots::new(1).is_err());
}
