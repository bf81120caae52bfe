//! Under every policy: what is stored is there or was evicted, and what is there outlives a close. Which objects an order keeps is for
//! `policy_on_trace.rs`; here nothing may go any other way.
#![allow(clippy::unwrap_used)]

mod kit;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use deepinfer_kvstore::policy::PolicyKind;
use deepinfer_kvstore::store::Upkeep;
use kit::*;

const CHAINS: u64 = 150;
const LENGTH: u64 = 6;

/// Objects of all sizes: policies that divide by size order them by it.
fn object(chain: u64, at: u64) -> Object {
    block(chain, at, (chain.wrapping_mul(7919) + at * 5003) as usize % 20_000)
}

fn present(store: &deepinfer_kvstore::store::Store) -> Vec<(u64, u64)> {
    let all = (0..CHAINS).flat_map(|chain| (0..LENGTH).map(move |at| (chain, at)));
    all.filter(|&(chain, at)| has(store, &object(chain, at))).collect()
}

#[test]
fn nothing_goes_but_by_eviction() {
    for policy in PolicyKind::ALL {
        let mut kit = Kit::new();
        kit.config.policy = policy;
        kit.config.capacity = 2 << 20;
        kit.config.slack = 256 << 10;
        let store = kit.open();
        for chain in 0..CHAINS {
            let objects: Vec<Object> = (0..LENGTH).map(|at| object(chain, at)).collect();
            let (head, tail) = objects.split_at(1 + (chain % (LENGTH - 1)) as usize);
            store_all(&store, head);
            store_all(&store, tail);
            if chain % 3 == 0 {
                // Asked for again: policies that count touches keep these longer.
                found(&store, &kit::chain(chain / 2, LENGTH));
            }
            kit.hands.pass(7);
            while store.collect(false).unwrap() {}
        }
        let counts = store.stats().counts;
        assert_eq!(counts.stored, CHAINS * LENGTH, "{policy:?}");
        assert!(counts.evicted > counts.stored / 2 && counts.segments_deleted > 10, "{policy:?}: {counts:?}");
        let before = present(&store);
        assert_eq!(before.len() as u64, counts.stored - counts.evicted, "{policy:?}");
        // What is there of a chain is its beginning.
        assert!(before.iter().all(|&(chain, at)| at == 0 || before.contains(&(chain, at - 1))), "{policy:?}");
        drop(store);
        // Evicted records that no collection has met may come back; what was there is there.
        kit.config.capacity = 64 << 20;
        let store = kit.open();
        let after = present(&store);
        assert!(before.iter().all(|object| after.contains(object)), "{policy:?}");
    }
}

/// Else whoever checks would do it: a hundred times the cost of finding.
#[test]
fn upkeep_is_woken_to_tell_the_policy_of_many_checks() {
    let kit = Kit::new();
    let used = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&used);
    let told = move |_, heard| {
        if matches!(heard, Heard::Used(_)) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    };
    let policy = PolicyKind::Lru.build(kit.config.lifetimes);
    let store = Arc::new(kit.open_with(Box::new(Telling(policy, told))));
    let chains: Vec<_> = (0..20).map(|number| kit::chain(number, 1000)).collect();
    for number in 0..20 {
        store_all(&store, &blocks(number, 0, 1000, 8));
    }
    let upkeep = Upkeep::start(&store, Duration::from_secs(3600)).unwrap();
    std::thread::sleep(Duration::from_secs(1)); // its first round is over, the next one is an hour away
    let before = used.load(Ordering::Relaxed);
    for chain in &chains {
        assert_eq!(found(&store, chain), 1000);
    }
    let end = Instant::now() + Duration::from_secs(20);
    while used.load(Ordering::Relaxed) < before + 16_384 {
        assert!(Instant::now() < end, "{} told", used.load(Ordering::Relaxed) - before);
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(upkeep);
}
