//! Reading through shared memory: objects of an agent's arena, copied out and held to their checksums, beside a copy of the same bytes alone.
//!
//! `cargo bench -p deepinfer-kvstore --bench agent`: medians of 5, in GB/s of wall time and of processor time of the reading thread.
#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use deepinfer_kvstore::agent::{Agent, AgentConfig, Client, ClientConfig};
use deepinfer_kvstore::checksum::checksum;
use deepinfer_kvstore::media::local::{Local, LocalConfig};
use deepinfer_kvstore::root::Root;
use deepinfer_kvstore::store::{Store, StoreConfig};
use deepinfer_kvstore::upstream::{Load, Save, Upstream};
use deepinfer_kvstore::{Class, Key, Kind, ObjectId};

const ARENA: u64 = 1 << 30;

/// Processor time of this thread.
fn used() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a clock of this thread, and a place for its time.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn key(at: usize) -> Key {
    Key(u128::from(checksum(&at.to_le_bytes())) << 64 | at as u128)
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

/// Median rates of 5 rounds, in GB/s: of wall time, of processor time.
fn rates(bytes: usize, mut round: impl FnMut()) -> (f64, f64) {
    round();
    let (mut wall, mut processor) = (Vec::new(), Vec::new());
    for _ in 0..5 {
        let (begun, before) = (Instant::now(), used());
        round();
        wall.push(bytes as f64 / begun.elapsed().as_secs_f64() / 1e9);
        processor.push(bytes as f64 / used().saturating_sub(before).as_secs_f64() / 1e9);
    }
    (median(wall), median(processor))
}

fn main() {
    let base = tempfile::tempdir().unwrap();
    let root = Root::open(&base.path().join("store")).unwrap();
    let media = Arc::new(Local::open(&root, LocalConfig::default()).unwrap());
    let store = Arc::new(Store::open(root, media, StoreConfig::default()).unwrap());
    let config = AgentConfig {
        arena_bytes: ARENA,
        backlog_bytes: ARENA / 4,
        ..AgentConfig::new(base.path().join("agent/sock"))
    };
    let agent = Agent::start(Arc::new(store), config).unwrap();
    let client =
        Client::new(ClientConfig { silence: Duration::from_secs(30), ..ClientConfig::new(agent.socket()) }).unwrap();
    println!("bytes     at once  GB/s wall  GB/s processor  copy alone: wall  processor   ratio (processor)");
    for len in [1_415_040, 113_920] {
        let count = ((ARENA / 3) as usize / len).min(2000);
        let keys: Vec<Key> = (0..count).map(|at| key(at + len)).collect();
        let data: Vec<u8> = (0..len).map(|at| (at * 31 + at / 253) as u8).collect();
        for from in (0..count).step_by(16) {
            let pieces: [&[u8]; 1] = [&data];
            let saves: Vec<Save<'_>> = (from..(from + 16).min(count))
                .map(|at| Save { kind: Kind::Block, at, pieces: &pieces, checksum: None })
                .collect();
            assert!(client.put(&keys, &saves, Class::Chat).iter().all(|outcome| outcome.is_there()));
        }
        assert!(client.flush(Duration::from_secs(120)));
        // In an order that no prefetcher knows.
        let mut order: Vec<usize> = (0..count).collect();
        order.sort_by_key(|&at| checksum(&(at * 7).to_le_bytes()));
        let source: Vec<Vec<u8>> = (0..count).map(|_| data.clone()).collect();
        for at_once in [1, 8, 64] {
            let mut targets = vec![vec![1u8; len]; at_once];
            let (wall, processor) = rates(count * len, || {
                for group in order.chunks(at_once) {
                    let mut loads: Vec<Load<'_>> = group
                        .iter()
                        .zip(&mut targets)
                        .map(|(&at, into)| Load { id: ObjectId { kind: Kind::Block, key: keys[at] }, into })
                        .collect();
                    assert!(client.get(&mut loads).iter().all(Option::is_some));
                }
            });
            let (copy_wall, copy) = rates(count * len, || {
                for group in order.chunks(at_once) {
                    for (&at, into) in group.iter().zip(&mut targets) {
                        into.copy_from_slice(std::hint::black_box(&source[at]));
                    }
                }
            });
            println!(
                "{len:<9} {at_once:<8} {wall:<10.2} {processor:<15.2} {copy_wall:<17.2} {copy:<11.2} {:.2}",
                processor / copy
            );
        }
    }
    let sizes = agent.sizes();
    assert_eq!((sizes.evicted, sizes.pinned), (0, 0));
}
