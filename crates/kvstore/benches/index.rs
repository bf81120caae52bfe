//! `cargo bench -p deepinfer-kvstore --bench index [-- ENTRIES]`: memory of an entry, inserts, the longest prefix of a chain.

#![allow(clippy::print_stdout, clippy::unwrap_used)]

use std::hint::black_box;
use std::time::Instant;

use deepinfer_kvstore::index::Index;
use deepinfer_kvstore::media::Place;
use deepinfer_kvstore::policy::{Lifetimes, PolicyKind, Retention, Scope};
use deepinfer_kvstore::{Class, Key, Kind, Meta, ObjectId, TenantId};

const RULE: &str = "\
Counted: memory = rows, tables, links and ranks of the policy and its ghosts, with all slack of growth, over the entries; checked against the
resident memory of the process. insert = index and policy, parents first, batches of 100. longest = keys given, one chain of 1,000 blocks, all
present, a part of even spread, or none; cold: another chain each time, last touched a whole table ago; warm: the same chain. Medians of 5 runs.";

const CHAIN: u64 = 1000;

/// A key as a hash would spread it.
fn key(chain: u64, at: u64) -> Key {
    let mut word = (u128::from(chain) << 64 | u128::from(at)).wrapping_add(0x9e37_79b9_7f4a_7c15);
    for _ in 0..3 {
        word = (word ^ (word >> 67)).wrapping_mul(0xda94_2042_e4dd_58b5_9e37_79b9_7f4a_7c15);
    }
    Key(word ^ (word >> 64))
}

fn chain(number: u64) -> Vec<Key> {
    (0..CHAIN).map(|at| key(number, at)).collect()
}

fn meta(chain: u64, key: Key, parent: Option<Key>, written: u32) -> Meta {
    let id = ObjectId { kind: Kind::Block, key };
    let class = Class::ALL[(chain % 2) as usize];
    Meta { id, parent, tenant: TenantId((chain % 7) as u16), class, len: 113_920, checksum: 1, written }
}

/// Resident bytes of this process.
fn resident() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    text.split(' ').nth(1).and_then(|pages| pages.parse::<usize>().ok()).unwrap_or(0) * 4096
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Microseconds of a call, median over `calls` of the median of five runs.
fn micros(calls: usize, mut call: impl FnMut(usize)) -> f64 {
    let run = |call: &mut dyn FnMut(usize)| {
        let times = (0..calls).map(|number| {
            let start = Instant::now();
            call(number);
            start.elapsed().as_secs_f64() * 1e6
        });
        median(times.collect())
    };
    median((0..5).map(|_| run(&mut call)).collect())
}

fn fill(entries: u64, kind: PolicyKind) -> (Retention, f64) {
    let mut kept = Retention::new(kind.build(Lifetimes::default()), Lifetimes::default());
    let mut seconds = 0.0;
    for number in 0..entries / CHAIN {
        let keys = chain(number);
        let now = (number / 4) as u32;
        for start in (0..keys.len()).step_by(100) {
            let batch: Vec<_> = (start..start + 100)
                .map(|at| {
                    (
                        meta(number, keys[at], at.checked_sub(1).map(|before| keys[before]), now),
                        Place { segment: 1, offset: at as u32 },
                    )
                })
                .collect();
            let begin = Instant::now();
            let done = kept.insert(&batch, now);
            seconds += begin.elapsed().as_secs_f64();
            assert!(done.iter().all(Result::is_ok));
        }
    }
    (kept, entries as f64 / seconds / 1e6)
}

fn search(index: &Index, entries: u64) {
    let chains = entries / CHAIN;
    let asked: Vec<Vec<Key>> = (0..200.min(chains)).map(|number| chain(number * 7919 % chains)).collect();
    let cold = micros(asked.len(), |number| {
        assert_eq!(black_box(index.longest(black_box(&asked[number]))), CHAIN as usize);
    });
    let warm = micros(200, |_| {
        assert_eq!(black_box(index.longest(black_box(&asked[0]))), CHAIN as usize);
    });
    let absent: Vec<Vec<Key>> = (0..200).map(|number| chain(chains + number)).collect();
    let miss = micros(absent.len(), |number| {
        assert_eq!(black_box(index.longest(black_box(&absent[number]))), 0);
    });
    let cut: Vec<Vec<Key>> = (0..asked.len())
        .map(|number| {
            let here = number * 37 % 999 + 1;
            let (old, new) = (chain((number as u64 * 6007 + 3) % chains), chain(chains + number as u64));
            old[..here].iter().chain(&new[here..]).copied().collect()
        })
        .collect();
    let part = |number: usize| {
        assert_eq!(black_box(index.longest(black_box(&cut[number]))), number * 37 % 999 + 1);
    };
    let (part_cold, part_warm) = (micros(cut.len(), part), micros(200, |_| part(100)));
    println!(
        "longest, 1,000 blocks: all present cold {cold:.2} us, warm {warm:.2} us; a part present cold {part_cold:.2} us, warm {part_warm:.2} us; \
         nothing present {miss:.2} us"
    );
}

fn main() {
    let entries = std::env::args().find_map(|word| word.parse::<u64>().ok()).unwrap_or(10_000_000);
    println!("{RULE}\n{entries} entries");
    for kind in PolicyKind::ALL {
        let before = resident();
        let (mut kept, rate) = fill(entries, kind);
        search(kept.index(), entries);
        // Ghosts take their memory with the first evictions.
        let start = Instant::now();
        kept.evict(Scope::All, entries / 100 * 113_920, (entries / CHAIN) as u32, &mut |_| {});
        let evicted = entries as f64 / 100.0 / start.elapsed().as_secs_f64() / 1e6;
        let (index, policy) = kept.memory();
        let each = |bytes: usize| bytes as f64 / kept.index().len() as f64;
        println!(
            "{kind:?}: index {:.1} + policy {:.1} = {:.1} B an entry (resident {:.1}); insert {rate:.2} M/s, evict {evicted:.2} M/s",
            each(index),
            each(policy),
            each(index + policy),
            each(resident().saturating_sub(before)),
        );
    }
}
