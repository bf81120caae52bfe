//! The embedded store beside what its disk does: `cargo bench -p deepinfer-kvstore --bench store`
//!
//! PUT: objects in batches, acknowledged when durable, beside one `pwritev` and one `fdatasync` of as many bytes a batch. GET: whole objects in
//! random order with their checksum, beside `pread` of the same ranges of the same files, all in the page cache. The two sides take turns
//! within each round; the ratio is the median of the rounds' ratios, which a busy machine disturbs least. Open: a million small records.
//! `KVSTORE_BENCH_DIR` names the directory (default: the system's temporary one).
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::fs::{File, OpenOptions};
use std::io::IoSlice;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use deepinfer_kvstore::checksum::checksum;
use deepinfer_kvstore::media::local::{Local, LocalConfig};
use deepinfer_kvstore::media::{Media, Place, Record};
use deepinfer_kvstore::root::Root;
use deepinfer_kvstore::store::{Rule, Store, StoreConfig, Want};
use deepinfer_kvstore::{Class, Key, Kind, Meta, ObjectId, TenantId};

const ROUNDS: usize = 9;
const TENANT: TenantId = TenantId(1);

fn key(number: u64) -> Key {
    let mix = |value: u64| (value ^ (value >> 31)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    Key((u128::from(mix(number + 1)) << 64) | u128::from(mix(mix(number + 7))))
}

fn meta(number: u64, bytes: &[u8], sum: u64) -> Meta {
    Meta {
        id: ObjectId { kind: Kind::Block, key: key(number) },
        parent: None,
        tenant: TENANT,
        class: Class::Chat,
        len: bytes.len() as u32,
        checksum: sum,
        written: 0,
    }
}

fn open(path: &Path) -> (Store, Arc<Local>) {
    let root = Root::open(path).unwrap();
    let media = Arc::new(Local::open(&root, LocalConfig::default()).unwrap());
    let config = StoreConfig { capacity: 1 << 40, ..StoreConfig::default() };
    (Store::open(root, Arc::clone(&media) as Arc<dyn Media>, config).unwrap(), media)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Runs both sides in turn, the first of a round changing; prints their medians and the median of their ratios.
fn beside(name: &str, bytes: usize, mut store: impl FnMut(usize), mut plain: impl FnMut(usize)) {
    let time = |side: &mut dyn FnMut(usize), round: usize| {
        let start = Instant::now();
        side(round);
        bytes as f64 / start.elapsed().as_secs_f64() / 1e9
    };
    let (mut ours, mut theirs, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..=ROUNDS {
        let (our, their) = if round % 2 == 0 {
            let our = time(&mut store, round);
            (our, time(&mut plain, round))
        } else {
            let their = time(&mut plain, round);
            (time(&mut store, round), their)
        };
        // The first round only warms.
        if round > 0 {
            ours.push(our);
            theirs.push(their);
            ratios.push(our / their);
        }
    }
    let (low, high) = ratios.iter().fold((f64::MAX, 0f64), |(low, high), &ratio| (low.min(ratio), high.max(ratio)));
    println!(
        "{name:<34} store {:>6.2}   plain {:>6.2} GB/s   ratio {:.2} ({low:.2} to {high:.2})",
        median(ours),
        median(theirs),
        median(ratios)
    );
}

fn put(base: &Path, size: usize, batch: usize, batches: usize) {
    let (store, _) = open(&base.join(format!("put-{size}-{batch}")));
    let plain = OpenOptions::new().write(true).create(true).truncate(true).open(base.join("plain")).unwrap();
    let data: Vec<u8> = (0..size).map(|at| (at.wrapping_mul(2_654_435_761) >> 8) as u8).collect();
    let sum = checksum(&data);
    let mut number = 0;
    let mut end = 0;
    beside(
        &format!("PUT {size} B, {batch} a batch"),
        size * batch * batches,
        |_| {
            for _ in 0..batches {
                let metas: Vec<Meta> = (0..batch as u64).map(|at| meta(number + at, &data, sum)).collect();
                number += batch as u64;
                let pieces = [&data[..]];
                let records: Vec<Record<'_>> = metas.iter().map(|&meta| Record { meta, pieces: &pieces }).collect();
                assert!(store.put(&records, Rule::Exact).iter().all(deepinfer_kvstore::store::Put::is_there));
            }
        },
        |_| {
            for _ in 0..batches {
                let slices: Vec<IoSlice<'_>> = (0..batch).map(|_| IoSlice::new(&data)).collect();
                let written = rustix::io::pwritev(&plain, &slices, end).unwrap();
                assert_eq!(written, size * batch);
                end += written as u64;
                plain.sync_data().unwrap();
            }
        },
    );
    drop(plain);
    std::fs::remove_file(base.join("plain")).unwrap();
}

fn get(base: &Path, size: usize, count: u64, a_call: usize) {
    let path = base.join(format!("get-{size}"));
    let (store, media) = open(&path);
    let mut data = vec![0u8; size];
    for number in 0..count {
        for (at, byte) in data.iter_mut().enumerate() {
            *byte = (at as u64).wrapping_mul(0x9e37_79b9 + number) as u8;
        }
        let meta = meta(number, &data, checksum(&data));
        assert!(store.put(&[Record { meta, pieces: &[&data] }], Rule::Exact)[0].is_there());
    }
    media.seal().unwrap();
    let mut order: Vec<u64> = (0..count).collect();
    let mut state = 9u64;
    for at in (1..order.len()).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        order.swap(at, (state >> 33) as usize % (at + 1));
    }
    let places: Vec<Place> = order.iter().map(|&number| store.place(Kind::Block, key(number)).unwrap()).collect();
    let file = |number: u32| File::open(path.join("segments").join(format!("{number:08x}.seg"))).unwrap();
    let files: Vec<File> = (1..=places.iter().map(|place| place.segment).max().unwrap()).map(file).collect();
    // Both sides read into the same memory, one object after the other.
    let buffers = std::cell::RefCell::new(vec![1u8; size * a_call]);
    beside(
        &format!("GET {size} B, {a_call} a call"),
        size * order.len(),
        |_| {
            let mut buffers = buffers.borrow_mut();
            for numbers in order.chunks(a_call) {
                let mut wants: Vec<Want<'_>> = numbers
                    .iter()
                    .zip(buffers.chunks_mut(size))
                    .map(|(&number, into)| Want {
                        id: ObjectId { kind: Kind::Block, key: key(number) },
                        start: 0,
                        into,
                    })
                    .collect();
                assert!(store.get(TENANT, &mut wants).iter().all(deepinfer_kvstore::store::Got::is_hit));
            }
        },
        |_| {
            let mut buffers = buffers.borrow_mut();
            for places in places.chunks(a_call) {
                for (place, into) in places.iter().zip(buffers.chunks_mut(size)) {
                    let at = u64::from(place.offset) * 64 + 128;
                    files[place.segment as usize - 1].read_exact_at(into, at).unwrap();
                }
            }
        },
    );
}

fn check_and_open(base: &Path, count: u64) {
    let path = base.join("open");
    let (store, media) = open(&path);
    let data = [7u8; 16];
    let sum = checksum(&data);
    // Chains of a thousand, so that parents are looked up.
    for first in (0..count).step_by(10_000) {
        let metas: Vec<Meta> = (first..(first + 10_000).min(count))
            .map(|number| Meta { parent: (number % 1000 > 0).then(|| key(number - 1)), ..meta(number, &data, sum) })
            .collect();
        let pieces = [&data[..]];
        let records: Vec<Record<'_>> = metas.iter().map(|&meta| Record { meta, pieces: &pieces }).collect();
        assert!(store.put(&records, Rule::Exact).iter().all(deepinfer_kvstore::store::Put::is_there));
    }
    let chain: Vec<Key> = (5000..6000).map(key).collect();
    let mut checks: Vec<f64> = (0..2000)
        .map(|_| {
            let start = Instant::now();
            assert_eq!(store.check(TENANT, &chain, 0).unwrap().blocks, 1000);
            start.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    checks.sort_by(f64::total_cmp);
    println!("CHECK of 1,000 blocks, {count} objects: median {:.2} µs, p99 {:.2} µs", checks[1000], checks[1980]);
    media.seal().unwrap();
    drop((store, media));
    let times: Vec<f64> = (0..5)
        .map(|_| {
            let start = Instant::now();
            let opened = open(&path);
            let time = start.elapsed().as_secs_f64();
            assert_eq!(opened.0.stats().blocks, count);
            time
        })
        .collect();
    println!("open of {count} records: median {:.2} s of 5", median(times));
}

/// How long collection keeps others waiting while half of what lives is moved.
fn collect(base: &Path) {
    let size = 113_920;
    let (store, _) = open(&base.join("collect"));
    let data = vec![3u8; size];
    let sum = checksum(&data);
    for number in 0..4000 {
        let meta = meta(number, &data, sum);
        assert!(store.put(&[Record { meta, pieces: &[&data] }], Rule::Exact)[0].is_there());
    }
    let every_other: Vec<ObjectId> =
        (0..4000).step_by(2).map(|number| ObjectId { kind: Kind::Block, key: key(number) }).collect();
    assert_eq!(store.remove(&every_other).unwrap(), 2000);
    let start = Instant::now();
    while store.collect(true).unwrap() {}
    let counts = store.stats().counts;
    println!(
        "collection: {:.2} GB/s copied, longest pause {:.2} ms, longest piece {:.1} ms, {} segments freed",
        counts.copied_bytes as f64 / start.elapsed().as_secs_f64() / 1e9,
        Duration::from_micros(counts.collect_pause_us).as_secs_f64() * 1e3,
        Duration::from_micros(counts.collect_piece_us).as_secs_f64() * 1e3,
        counts.segments_deleted
    );
}

fn main() {
    let base = match std::env::var_os("KVSTORE_BENCH_DIR") {
        Some(path) => tempfile::tempdir_in(path).unwrap(),
        None => tempfile::tempdir().unwrap(),
    };
    let base = base.path();
    get(base, 1_415_040, 300, 1);
    get(base, 113_920, 3000, 1);
    get(base, 113_920, 3000, 16);
    put(base, 1_415_040, 8, 6);
    put(base, 113_920, 64, 10);
    put(base, 113_920, 8, 10);
    collect(base);
    check_and_open(base, 1_000_000);
}
