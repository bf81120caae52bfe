//! What is kept, under every policy: the rules that hold for all of them, then each one's order.

#![allow(clippy::unwrap_used)]

use std::collections::{BTreeSet, HashMap};

use deepinfer_kvstore::index::{Refused, Removed};
use deepinfer_kvstore::media::Place;
use deepinfer_kvstore::policy::{Lifetimes, PolicyKind, Retention, SLICE_HANDICAP, Scope};
use deepinfer_kvstore::{Class, Key, Kind, Meta, ObjectId, TenantId};
use proptest::prelude::*;

const LIVES: Lifetimes = Lifetimes { chat: 50, agent: 20, other: 20 };

fn key(number: u64) -> Key {
    Key(u128::from(number).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835))
}

fn meta(kind: Kind, number: u64, parent: Option<u64>, tenant: u16, class: Class, len: u32) -> Meta {
    let id = ObjectId { kind, key: key(number) };
    Meta { id, parent: parent.map(key), tenant: TenantId(tenant), class, len, checksum: 0, written: 0 }
}

fn kept(kind: PolicyKind) -> Retention {
    Retention::new(kind.build(LIVES), LIVES)
}

const PLACE: Place = Place { segment: 1, offset: 0 };

/// Puts the blocks of a chain that are not here.
fn put(kept: &mut Retention, numbers: &[u64], tenant: u16, class: Class, len: u32, now: u32) {
    let batch: Vec<_> = numbers
        .iter()
        .enumerate()
        .map(|(at, &number)| {
            (meta(Kind::Block, number, at.checked_sub(1).map(|before| numbers[before]), tenant, class, len), PLACE)
        })
        .collect();
    for done in kept.insert(&batch, now) {
        assert!(matches!(done, Ok(_) | Err(Refused::Exists(_))), "{done:?}");
    }
}

fn slice(kept: &mut Retention, number: u64, tenant: u16, len: u32, now: u32) {
    let done = kept.insert(&[(meta(Kind::Slice, number, Some(number), tenant, Class::Chat, len), PLACE)], now);
    assert!(done[0].is_ok());
}

fn keys(numbers: &[u64]) -> Vec<Key> {
    numbers.iter().map(|&number| key(number)).collect()
}

/// Evicts and names what went, in order.
fn evict(kept: &mut Retention, scope: Scope, bytes: u64, now: u32) -> Vec<ObjectId> {
    let mut gone = Vec::new();
    kept.evict(scope, bytes, now, &mut |removed| {
        gone.push(removed.entry.id);
        gone.extend(removed.slice.map(|(_, entry)| entry.id));
    });
    gone
}

fn blocks(numbers: &[u64]) -> Vec<ObjectId> {
    numbers.iter().map(|&number| ObjectId { kind: Kind::Block, key: key(number) }).collect()
}

#[derive(Clone, Debug)]
enum Op {
    Request { chain: u8, blocks: u8, slice: bool },
    Evict { tenant: Option<u8>, objects: u8 },
    Expire { rows: u8 },
    Remove { chain: u8, at: u8 },
    Lose { chain: u8, at: u8 },
    Wait { seconds: u8 },
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        6 => (0..9u8, 1..9u8, any::<bool>()).prop_map(|(chain, blocks, slice)| Op::Request { chain, blocks, slice }),
        3 => (prop::option::of(0..3u8), 1..6u8).prop_map(|(tenant, objects)| Op::Evict { tenant, objects }),
        1 => (0..20u8).prop_map(|rows| Op::Expire { rows }),
        1 => (0..9u8, 0..9u8).prop_map(|(chain, at)| Op::Remove { chain, at }),
        1 => (0..9u8, 0..9u8).prop_map(|(chain, at)| Op::Lose { chain, at }),
        2 => (0..30u8).prop_map(|seconds| Op::Wait { seconds }),
    ];
    prop::collection::vec(op, 1..80)
}

/// Chains 0–2, 3–5 and 6–8 share their first three blocks and belong to one tenant.
fn chain(number: u8, blocks: u8) -> Vec<u64> {
    let tenant = u64::from(number / 3);
    (0..u64::from(blocks))
        .map(|at| if at < 3 { 1000 * (tenant + 1) + at } else { 100 * (u64::from(number) + 100) + at })
        .collect()
}

/// Leaves only, of the right tenant, nothing twice, everything in the end.
fn check_rules(kind: PolicyKind, ops: Vec<Op>) {
    let mut kept = kept(kind);
    let mut now = 1000;
    let mut gone: Vec<Removed> = Vec::new();
    let find = |kept: &Retention, chain_number: u8, at: u8| {
        let key = key(chain(chain_number, at + 1)[usize::from(at)]);
        kept.index().find(ObjectId { kind: Kind::Block, key })
    };
    for op in ops {
        gone.clear();
        let before: HashMap<_, _> = kept.index().iter().collect();
        match op {
            Op::Request { chain: number, blocks, slice: has_slice } => {
                let numbers = chain(number, blocks);
                let class = Class::ALL[usize::from(number % 3)];
                let found = kept.index().longest(&keys(&numbers));
                kept.touch_chain(&keys(&numbers[..found]), now);
                put(&mut kept, &numbers, u16::from(number / 3), class, 10 + u32::from(number / 3), now);
                let last = numbers[numbers.len() - 1];
                if has_slice && kept.index().find(ObjectId { kind: Kind::Slice, key: key(last) }).is_none() {
                    slice(&mut kept, last, u16::from(number / 3), 100, now);
                }
            }
            Op::Evict { tenant, objects } => {
                let scope = tenant.map_or(Scope::All, |tenant| Scope::Tenant(TenantId(u16::from(tenant))));
                let bytes = u64::from(objects) * 10;
                let freed = kept.evict(scope, bytes, now, &mut |removed| gone.push(*removed));
                assert_eq!(freed, gone.iter().map(Removed::bytes).sum::<u64>());
                let left = kept
                    .index()
                    .iter()
                    .filter(|(_, entry)| tenant.is_none_or(|tenant| entry.tenant.0 == u16::from(tenant)))
                    .count();
                assert!(freed >= bytes || left == 0, "{left} left but only {freed} of {bytes} freed");
                assert!(
                    gone.iter().all(|removed| tenant.is_none_or(|tenant| removed.entry.tenant.0 == u16::from(tenant)))
                );
            }
            Op::Expire { rows } => {
                kept.expire(usize::from(rows), now, &mut |removed| gone.push(*removed));
                assert!(gone.iter().all(|removed| LIVES.is_over(removed.entry.class, removed.entry.touched, now)));
            }
            Op::Remove { chain, at } => {
                if let Some(slot) = find(&kept, chain, at) {
                    let leaf = kept.index().is_leaf(slot);
                    gone.extend(kept.remove(slot));
                    assert_eq!(!gone.is_empty(), leaf);
                }
            }
            Op::Lose { chain, at } => {
                if let Some(slot) = find(&kept, chain, at) {
                    gone.extend(kept.lose(slot));
                }
            }
            Op::Wait { seconds } => now += u32::from(seconds),
        }
        for removed in &gone {
            assert_eq!(before[&removed.slot].id, removed.entry.id);
            assert_eq!(removed.entry.children, 0);
            assert!(kept.index().find(removed.entry.id).is_none());
        }
        // What is present is closed under parents.
        for (_, entry) in kept.index().iter() {
            assert!(entry.parent.is_none_or(|parent| kept.index().entry(parent).is_some()));
        }
    }
    // Whatever was set aside comes back: all of it can be evicted.
    let count = kept.index().len();
    let mut seen = BTreeSet::new();
    kept.evict(Scope::All, u64::MAX, now, &mut |removed| {
        seen.insert(removed.entry.id);
        seen.extend(removed.slice.map(|(_, entry)| entry.id));
    });
    assert_eq!(seen.len(), count);
    assert!(kept.index().is_empty());
    assert_eq!(kept.index().total().bytes, 0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn every_policy_keeps_the_rules(ops in ops()) {
        for kind in PolicyKind::ALL {
            check_rules(kind, ops.clone());
        }
    }
}

#[test]
fn lru_takes_the_oldest_leaf() {
    let mut kept = kept(PolicyKind::Lru);
    put(&mut kept, &[1, 2, 3], 0, Class::Chat, 10, 100);
    put(&mut kept, &[11, 12], 0, Class::Agent, 10, 200);
    kept.touch_chain(&keys(&[1, 2]), 300);
    assert_eq!(evict(&mut kept, Scope::All, 31, 400), blocks(&[3, 12, 11, 2]));
    put(&mut kept, &[1, 5], 0, Class::Chat, 10, 400);
    assert_eq!(evict(&mut kept, Scope::All, 20, 400), blocks(&[5, 1]), "an old parent waits for its young child");
}

#[test]
fn a_clock_that_goes_back_changes_no_order() {
    for kind in PolicyKind::ALL {
        let mut kept = kept(kind);
        put(&mut kept, &[1], 0, Class::Chat, 10, 1000);
        put(&mut kept, &[2], 0, Class::Chat, 10, 10);
        assert_eq!(evict(&mut kept, Scope::All, 10, 20), blocks(&[1]), "{kind:?}");
    }
}

#[test]
fn slices_go_sooner_than_blocks_under_every_policy() {
    for kind in PolicyKind::ALL {
        let mut kept = kept(kind);
        // No larger than a block, and used later than all of them, if by less than the handicap.
        put(&mut kept, &[1, 2], 0, Class::Chat, 114, 1000);
        put(&mut kept, &[7, 8], 0, Class::Chat, 114, 1000 + SLICE_HANDICAP / 2);
        slice(&mut kept, 8, 0, 114, 1000 + SLICE_HANDICAP - 1);
        let slice_8 = ObjectId { kind: Kind::Slice, key: key(8) };
        assert_eq!(evict(&mut kept, Scope::All, 114, 1600), [slice_8], "{kind:?}");
        slice(&mut kept, 8, 0, 114, 1600);
        let gone = evict(&mut kept, Scope::All, 10_000, 1600);
        assert_eq!(gone.len(), 5, "{kind:?}: a block takes its slice along");
        // And not before a block that nobody used for much longer.
        put(&mut kept, &[1, 2], 0, Class::Chat, 114, 2000);
        put(&mut kept, &[7, 8], 0, Class::Chat, 114, 2000 + 2 * SLICE_HANDICAP);
        slice(&mut kept, 8, 0, 114, 2000 + 2 * SLICE_HANDICAP);
        assert_eq!(evict(&mut kept, Scope::All, 228, 2000 + 2 * SLICE_HANDICAP), blocks(&[2, 1]), "{kind:?}");
    }
}

#[test]
fn other_times_to_live_hold_at_once() {
    for kind in PolicyKind::ALL {
        let mut kept = kept(kind);
        put(&mut kept, &[1], 0, Class::Chat, 10, 1000);
        put(&mut kept, &[2], 0, Class::Agent, 10, 1000);
        kept.set_lifetimes(LIVES.with(Class::Chat, 1000).with(Class::Agent, 2));
        let mut gone = Vec::new();
        kept.expire(10, 1003, &mut |removed| gone.push(removed.entry.id));
        assert_eq!(gone, blocks(&[2]), "{kind:?}");
        kept.expire(10, 2000, &mut |removed| gone.push(removed.entry.id));
        assert_eq!(gone.len(), 1, "{kind:?}");
        kept.set_lifetimes(LIVES.with(Class::Chat, 10));
        kept.expire(10, 2000, &mut |removed| gone.push(removed.entry.id));
        assert_eq!(gone, blocks(&[2, 1]), "{kind:?}");
    }
}

#[test]
fn a_slice_lives_as_long_as_its_class() {
    for kind in PolicyKind::ALL {
        let mut kept = kept(kind);
        kept.set_lifetimes(LIVES.with(Class::Chat, 1000));
        put(&mut kept, &[1], 0, Class::Chat, 10, 5000);
        slice(&mut kept, 1, 0, 10, 5000);
        assert_eq!(kept.expire(10, 6000, &mut |_| ()), 0, "{kind:?}");
        assert!(kept.expire(10, 6001, &mut |_| ()) > 0, "{kind:?}");
        assert!(kept.index().is_empty(), "{kind:?}");
    }
}

#[test]
fn marginal_hit_counts_touches_by_their_age() {
    let mut kept = kept(PolicyKind::MarginalHit);
    put(&mut kept, &[1], 0, Class::Chat, 10, 1000);
    kept.touch_chain(&keys(&[1]), 1010);
    put(&mut kept, &[2], 0, Class::Chat, 10, 1100);
    assert_eq!(evict(&mut kept, Scope::All, 10, 1100), blocks(&[2]), "two touches of late are worth more than one");
    put(&mut kept, &[3], 0, Class::Chat, 10, 1400);
    assert_eq!(evict(&mut kept, Scope::All, 10, 1400), blocks(&[1]), "not for longer than a half-life");
}

#[test]
fn marginal_hit_divides_by_size() {
    let mut kept = kept(PolicyKind::MarginalHit);
    put(&mut kept, &[1], 0, Class::Chat, 100_000, 1000);
    put(&mut kept, &[2], 0, Class::Chat, 800_000, 1899);
    put(&mut kept, &[3], 0, Class::Chat, 800_000, 1901);
    // Eight times the size weigh three half-lives.
    assert_eq!(evict(&mut kept, Scope::All, 1_700_000, 1901), blocks(&[2, 1, 3]));
}

#[test]
fn marginal_hit_remembers_the_evicted() {
    let mut kept = kept(PolicyKind::MarginalHit);
    // Enough entries of the class for ghosts of them.
    for number in 1000..1400 {
        put(&mut kept, &[number], 0, Class::Chat, 10, 1000);
    }
    kept.touch_chain(&keys(&[1000]), 1001);
    assert_eq!(evict(&mut kept, Scope::All, 4000, 1300).len(), 400);
    for number in (1000..1400).rev() {
        put(&mut kept, &[number], 0, Class::Chat, 10, 1400);
    }
    let gone = evict(&mut kept, Scope::All, 4000, 1400);
    assert_eq!(gone[399], blocks(&[1000])[0], "three touches, two of them before it was evicted");
}

#[test]
fn classes_are_compared_by_their_rates() {
    use deepinfer_kvstore::policy::{HalfLives, MarginalHit};
    let policy = MarginalHit::new(HalfLives { chat: 100.0, agent: 400.0, other: 100.0 });
    let mut kept = Retention::new(Box::new(policy), LIVES);
    put(&mut kept, &[1], 0, Class::Chat, 10, 1000);
    put(&mut kept, &[2], 0, Class::Agent, 10, 1000);
    // One touch within the last 100 s tells of four times as many hits as one within the last 400 s; after 300 s more no longer.
    assert_eq!(evict(&mut kept, Scope::All, 10, 1200), blocks(&[2]));
    put(&mut kept, &[2], 0, Class::Agent, 10, 1201);
    assert_eq!(evict(&mut kept, Scope::All, 10, 1301), blocks(&[1]));
}

#[test]
fn time_to_live_begins_again_at_each_touch() {
    let mut kept = kept(PolicyKind::Ttl);
    put(&mut kept, &[1, 2], 0, Class::Chat, 10, 100);
    put(&mut kept, &[11, 12], 0, Class::Agent, 10, 100);
    let expire = |kept: &mut Retention, rows, now| {
        let mut gone = Vec::new();
        kept.expire(rows, now, &mut |removed| gone.push(removed.entry.id));
        gone
    };
    assert_eq!(expire(&mut kept, 0, 120), []);
    assert_eq!(expire(&mut kept, 0, 121), blocks(&[12, 11]), "agents' first");
    kept.touch_chain(&keys(&[1]), 140);
    assert_eq!(expire(&mut kept, 0, 151), blocks(&[2]));
    assert_eq!(expire(&mut kept, 0, 190), []);
    assert_eq!(expire(&mut kept, 0, 191), blocks(&[1]));
}

#[test]
fn what_is_too_old_goes_under_any_policy_by_sweeping() {
    let mut kept = kept(PolicyKind::Lru);
    for number in 0..100 {
        put(&mut kept, &[2 * number + 1, 2 * number + 2], 0, Class::Agent, 10, 100 + number as u32);
    }
    let mut gone = 0;
    for _ in 0..20 {
        gone += kept.expire(10, 219, &mut |_| {});
    }
    assert_eq!(gone, 198, "all but the last chain are older than 20 s");
    assert_eq!(kept.index().len(), 2);
}

#[test]
fn a_tenant_over_its_quota_loses_its_own_only() {
    for kind in PolicyKind::ALL {
        let mut kept = kept(kind);
        put(&mut kept, &[1, 2, 3], 1, Class::Chat, 100, 10);
        put(&mut kept, &[11, 12, 13], 2, Class::Chat, 100, 20);
        kept.set_quota(TenantId(2), Some(350));
        let mut gone = Vec::new();
        assert!(kept.make_room(TenantId(1), 1_000_000, 30, &mut |_| ()), "no bound");
        assert!(kept.make_room(TenantId(2), 50, 30, &mut |removed| gone.push(removed.entry.id)));
        assert_eq!(gone, []);
        assert!(kept.make_room(TenantId(2), 200, 30, &mut |removed| gone.push(removed.entry.id)));
        assert_eq!(gone, blocks(&[13, 12]), "{kind:?}");
        assert!(!kept.make_room(TenantId(2), 351, 30, &mut |_| ()), "more than the whole bound");
        assert_eq!(kept.index().usage(TenantId(2)).bytes, 100);
        assert_eq!(kept.index().usage(TenantId(1)).bytes, 300);
    }
}

#[test]
fn a_held_block_stays_for_its_child() {
    for kind in PolicyKind::ALL {
        let mut kept = kept(kind);
        put(&mut kept, &[1, 2], 0, Class::Chat, 800_000, 10);
        put(&mut kept, &[9], 0, Class::Chat, 10, 20);
        let slot = kept.index().find(blocks(&[2])[0]).unwrap();
        assert!(kept.hold(slot) && kept.hold(slot));
        assert_eq!(evict(&mut kept, Scope::All, 10_000_000, 30), blocks(&[9]), "{kind:?}");
        assert!(kept.remove(slot).is_none());
        kept.release(slot);
        assert_eq!(evict(&mut kept, Scope::All, 10_000_000, 30), [], "{kind:?}: held once more");
        put(&mut kept, &[1, 2, 3], 0, Class::Chat, 800_000, 30);
        kept.release(slot);
        assert_eq!(evict(&mut kept, Scope::All, 10_000_000, 30), blocks(&[3, 2, 1]), "{kind:?}");
    }
}

#[test]
fn recovered_entries_are_as_old_as_their_records() {
    use deepinfer_kvstore::index::{Added, Recovery};
    let mut kept = kept(PolicyKind::Lru);
    let mut recovery = Recovery::new();
    let record = |number, parent, written| Meta { written, ..meta(Kind::Block, number, parent, 0, Class::Chat, 10) };
    // Collection has copied the first of the chain behind the others.
    assert_eq!(kept.recover(&mut recovery, record(2, Some(1), 50), PLACE), Added::Waiting);
    assert!(matches!(kept.recover(&mut recovery, record(9, None, 30), PLACE), Added::Inserted(_)));
    assert!(matches!(kept.recover(&mut recovery, record(1, None, 50), PLACE), Added::Inserted(_)));
    assert_eq!(recovery.orphans().count(), 0);
    assert_eq!(evict(&mut kept, Scope::All, 30, 60), blocks(&[9, 2, 1]));
}
