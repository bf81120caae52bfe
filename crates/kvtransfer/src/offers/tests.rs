//! The table under every order of a few steps, and under long random ones.
#![allow(clippy::unwrap_used)]

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use proptest::prelude::*;

use super::*;

/// Memory whose life can be watched.
type Watched = Arc<()>;

const fn id(n: u8) -> OfferId {
    OfferId([n; 16])
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Begin(usize),
    End(usize, bool),
    Release,
    Expire,
}

/// All orders of the threads' steps that keep each thread's own.
fn orders(threads: &[Vec<Step>]) -> Vec<Vec<Step>> {
    if threads.iter().all(Vec::is_empty) {
        return vec![Vec::new()];
    }
    let mut all = Vec::new();
    for at in 0..threads.len() {
        if let Some((first, rest)) = threads[at].split_first() {
            let mut left = threads.to_vec();
            left[at] = rest.to_vec();
            all.extend(orders(&left).into_iter().map(|tail| [vec![*first], tail].concat()));
        }
    }
    all
}

#[test]
fn in_every_order_an_offer_ends_once_and_its_memory_goes_with_the_last_pull() {
    let pull = |n, verified| vec![Step::Begin(n), Step::End(n, verified)];
    let threads =
        [pull(0, true), pull(1, false), pull(2, true), vec![Step::Release], vec![Step::Release], vec![Step::Expire]];
    let all = orders(&threads);
    assert_eq!(all.len(), 362_880 / 8);
    for order in all {
        let mut offers = Offers::new(1, 100);
        let memory: Watched = Arc::new(());
        let watch = Arc::downgrade(&memory);
        offers.reserve(10).unwrap();
        offers.insert(id(1), memory, b"ab", 8, 0, 50);
        let (mut grants, mut now, mut told) = ([None, None, None], 0, Vec::new());
        let (mut released, mut ended, mut verified) = (0, false, false);
        for step in &order {
            match *step {
                Step::Begin(n) => {
                    grants[n] = offers.begin_pull(id(1), now);
                    assert_eq!(grants[n].is_some(), !ended, "{order:?}");
                }
                Step::End(n, good) => {
                    if let Some(grant) = grants[n].take() {
                        assert!(watch.strong_count() > 0, "memory gone under a pull: {order:?}");
                        verified |= good;
                        offers.end_pull(grant, good);
                    }
                }
                Step::Release => {
                    let did = offers.release(id(1), now);
                    assert_eq!(did, !ended, "{order:?}");
                    released += usize::from(did);
                    ended = true;
                }
                Step::Expire => {
                    now = 50;
                    assert_eq!(offers.expire(now), None);
                    ended = true;
                }
            }
            drop(offers.take_dead());
            let pulls = grants.iter().flatten().count();
            let held = !ended || pulls > 0;
            assert_eq!(offers.counts().pulls, pulls, "{order:?}");
            assert_eq!(
                (offers.counts().offers, offers.counts().bytes),
                (usize::from(held), 10 * u64::from(held)),
                "{order:?}"
            );
            assert_eq!(watch.strong_count() > 0, held, "{order:?}");
        }
        offers.drain_events(&mut told);
        let count = |kind| told.iter().filter(|event| event.kind == kind).count();
        assert_eq!(count(EventKind::Pulled), usize::from(verified), "{order:?}");
        assert_eq!(count(EventKind::Released), released, "{order:?}");
        assert_eq!(count(EventKind::Expired), 1 - released, "{order:?}");
    }
}

#[derive(Clone, Debug)]
enum Op {
    Offer { name: u8, bytes: u16, lease: u8 },
    Cancel { bytes: u16 },
    Begin { name: u8 },
    End { which: u8, verified: bool },
    Release { name: u8 },
    Pass { time: u8, expire: bool },
    Poll,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        (0..12u8, 0..400u16, 1..40u8).prop_map(|(name, bytes, lease)| Op::Offer { name, bytes, lease }),
        (0..400u16).prop_map(|bytes| Op::Cancel { bytes }),
        (0..12u8).prop_map(|name| Op::Begin { name }),
        (any::<u8>(), any::<bool>()).prop_map(|(which, verified)| Op::End { which, verified }),
        (0..12u8).prop_map(|name| Op::Release { name }),
        (0..20u8, any::<bool>()).prop_map(|(time, expire)| Op::Pass { time, expire }),
        Just(Op::Poll),
    ];
    prop::collection::vec(op, 1..120)
}

/// What an offer should be doing.
struct Model {
    bytes: u64,
    ends: u64,
    pulls: usize,
    ended: bool,
    memory: Weak<()>,
    told: Vec<EventKind>,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn random_operations_keep_bounds_bytes_and_one_end_each(ops in ops()) {
        const OFFERS: usize = 5;
        const BYTES: u64 = 1000;
        let mut offers: Offers<Watched> = Offers::new(OFFERS, BYTES);
        let mut models: HashMap<OfferId, Model> = HashMap::new();
        let mut grants: Vec<Grant<Watched>> = Vec::new();
        let (mut now, mut made, mut names) = (0u64, 0u8, [id(0); 12]);
        for op in ops.into_iter().chain([Op::Pass { time: 255, expire: true }]) {
            match op {
                Op::Offer { name, bytes, lease } => {
                    let held: u64 = models.values().filter(|m| !m.ended || m.pulls > 0).map(|m| m.bytes).sum();
                    let count = models.values().filter(|m| !m.ended || m.pulls > 0).count();
                    let fits = count < OFFERS && held + u64::from(bytes) <= BYTES;
                    prop_assert_eq!(offers.reserve(u64::from(bytes)).is_ok(), fits);
                    if fits {
                        made += 1;
                        names[usize::from(name)] = id(made);
                        let memory = Arc::new(());
                        let ends = now + u64::from(lease);
                        let model = Model { bytes: bytes.into(), ends, pulls: 0, ended: false, memory: Arc::downgrade(&memory), told: vec![] };
                        models.insert(id(made), model);
                        offers.insert(id(made), memory, &[], bytes.into(), 0, ends);
                    }
                }
                Op::Cancel { bytes } => {
                    let before = offers.counts();
                    if offers.reserve(u64::from(bytes)).is_ok() {
                        offers.cancel(u64::from(bytes));
                    }
                    prop_assert_eq!(offers.counts(), before);
                }
                Op::Begin { name } => {
                    let name = names[usize::from(name)];
                    let grant = offers.begin_pull(name, now);
                    let model = models.get_mut(&name).filter(|m| !m.ended && now < m.ends);
                    prop_assert_eq!(grant.is_some(), model.is_some());
                    if let (Some(grant), Some(model)) = (grant, model) {
                        model.pulls += 1;
                        grants.push(grant);
                    }
                }
                Op::End { which, verified } => {
                    if !grants.is_empty() {
                        let grant = grants.swap_remove(usize::from(which) % grants.len());
                        let model = models.get_mut(&grant.id).unwrap();
                        prop_assert!(model.memory.strong_count() > 0);
                        model.pulls -= 1;
                        offers.end_pull(grant, verified);
                    }
                }
                Op::Release { name } => {
                    let name = names[usize::from(name)];
                    let model = models.get_mut(&name).filter(|m| !m.ended && now < m.ends);
                    prop_assert_eq!(offers.release(name, now), model.is_some());
                    if let Some(model) = model {
                        model.ended = true;
                    }
                }
                Op::Pass { time, expire } => {
                    now += u64::from(time);
                    if expire {
                        let next = offers.expire(now);
                        models.values_mut().filter(|m| m.ends <= now).for_each(|m| m.ended = true);
                        prop_assert_eq!(next, models.values().filter(|m| !m.ended).map(|m| m.ends).min());
                    }
                }
                Op::Poll => {
                    let mut told = Vec::new();
                    offers.drain_events(&mut told);
                    for event in &told {
            models.get_mut(&event.id).unwrap().told.push(event.kind);
        }
                }
            }
            drop(offers.take_dead());
            for model in models.values() {
                prop_assert_eq!(model.memory.strong_count() > 0, !model.ended || model.pulls > 0);
            }
            prop_assert_eq!(offers.counts().bytes, models.values().filter(|m| !m.ended || m.pulls > 0).map(|m| m.bytes).sum::<u64>());
        }
        grants.drain(..).for_each(|grant| offers.end_pull(grant, false));
        let mut told = Vec::new();
        offers.drain_events(&mut told);
        for event in &told {
            models.get_mut(&event.id).unwrap().told.push(event.kind);
        }
        for model in models.values() {
            prop_assert_eq!(model.told.iter().filter(|kind| **kind != EventKind::Pulled).count(), 1);
            prop_assert!(model.told.iter().filter(|kind| **kind == EventKind::Pulled).count() <= 1);
        }
        prop_assert_eq!(offers.counts(), Counts::default());
    }
}

#[test]
fn events_that_nobody_fetches_are_bounded_and_counted() {
    let mut offers = Offers::new(1, 100);
    for turn in 0..(MAX_EVENTS + 10) {
        offers.reserve(1).unwrap();
        let name = OfferId((turn as u128).to_le_bytes());
        offers.insert(name, (), &[], 1, 0, 50);
        assert!(offers.release(name, 0));
    }
    let mut told = Vec::new();
    offers.drain_events(&mut told);
    assert_eq!((told.len(), offers.counts().events_lost), (MAX_EVENTS, 10));
    assert_eq!(told[0].id, OfferId(10u128.to_le_bytes()));
}
