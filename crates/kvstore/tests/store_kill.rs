//! A process that puts, evicts and collects is killed at random moments: what it had acknowledged is there, and nothing is wrong.
//!
//! The process is this test itself, run again with its root in the environment. It tells of every acknowledged chain on its output; the
//! parent reads that, kills it, opens the store and asks for what it must have: the newest, which cannot have been evicted yet. Of the others
//! there is a prefix, with the right bytes.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod kit;

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use deepinfer_kvstore::media::local::{Local, LocalConfig};
use deepinfer_kvstore::policy::PolicyKind;
use deepinfer_kvstore::root::Root;
use deepinfer_kvstore::store::{Put, Store, StoreConfig, Upkeep};
use kit::*;

const ROOT: &str = "KVSTORE_KILL_ROOT";
const FIRST: &str = "KVSTORE_KILL_FIRST";
const LENGTH: u64 = 6;

/// Lengths of one chain's blocks: from nothing to several pages.
fn object(chain: u64, at: u64) -> Object {
    block(chain, at, (chain.wrapping_mul(7919) + at * 5003) as usize % 20_000)
}

fn open(path: &Path, capacity: u64) -> Store {
    let root = Root::open(path).unwrap();
    let segments = LocalConfig { segment_bytes: 256 << 10, ..LocalConfig::default() };
    let media = Local::open(&root, segments).unwrap();
    let config = StoreConfig {
        capacity,
        slack: 512 << 10,
        // What was written last goes last: so the parent knows what must be there.
        policy: PolicyKind::Lru,
        max_object: 32 << 10,
        batch_bytes: 128 << 10,
        piece_bytes: 64 << 10,
        ..StoreConfig::default()
    };
    Store::open(root, Arc::new(media), config).unwrap()
}

/// The child: does nothing unless it was started by a parent below.
#[test]
fn child() {
    let Ok(root) = std::env::var(ROOT) else { return };
    let first: u64 = std::env::var(FIRST).unwrap().parse().unwrap();
    // Small enough that what earlier children left is evicted and collected while this one writes.
    let store = Arc::new(open(Path::new(&root), 6 << 20));
    let _upkeep = Upkeep::start(&store, Duration::from_millis(1)).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let store = &store;
            scope.spawn(move || {
                for round in 0.. {
                    let chain = first + round * 2 + thread;
                    let objects: Vec<Object> = (0..LENGTH).map(|at| object(chain, at)).collect();
                    let (head, tail) = objects.split_at(1 + (chain % (LENGTH - 1)) as usize);
                    for part in [head, tail] {
                        assert!(put(store, part).iter().all(Put::is_there));
                        // One write a line: lines of two threads do not mix.
                        let line = format!("ack {chain} {}\n", part.len());
                        std::io::stdout().lock().write_all(line.as_bytes()).unwrap();
                    }
                }
            });
        }
    });
}

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % bound
    }
}

/// Runs a child, kills it, and returns what it acknowledged: (chain, blocks), in order.
fn run_and_kill(root: &Path, first: u64, after: Duration) -> Vec<(u64, u64)> {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["child", "--exact", "--nocapture", "--test-threads=1"])
        .env(ROOT, root)
        .env(FIRST, first.to_string())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let output = child.stdout.take().unwrap();
    let reader = std::thread::spawn(move || {
        let mut acknowledged: Vec<(u64, u64)> = Vec::new();
        // The last line may be cut by the kill: it was not acknowledged to anybody.
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            let Some(words) = line.split_once("ack ").map(|(_, words)| words.to_owned()) else { continue };
            let mut words = words.split(' ').map(|word| word.parse::<u64>().ok());
            let (Some(Some(chain)), Some(Some(count))) = (words.next(), words.next()) else { continue };
            match acknowledged.iter_mut().find(|(known, _)| *known == chain) {
                Some((_, blocks)) => *blocks += count,
                None => acknowledged.push((chain, count)),
            }
        }
        acknowledged
    });
    std::thread::sleep(after);
    child.kill().unwrap();
    child.wait().unwrap();
    reader.join().unwrap()
}

fn kill(rounds: u64, seed: u64) -> (u64, u64) {
    let base = tempfile::tempdir().unwrap();
    let mut random = Random(seed);
    let (mut acknowledged, mut kept) = (0, 0);
    for round in 0..rounds {
        let first = round << 20;
        let mine = run_and_kill(base.path(), first, Duration::from_millis(20 + random.below(180)));
        let store = open(base.path(), 1 << 30);
        // The newest cannot have been evicted: the capacity is larger than what was written since.
        let mut written = 0;
        for &(chain_number, blocks) in mine.iter().rev() {
            written += (0..LENGTH).map(|at| object(chain_number, at).bytes.len() as u64 + 192).sum::<u64>();
            let prefix = found(&store, &chain(chain_number, LENGTH)) as u64;
            if written < 4 << 20 {
                assert!(
                    prefix >= blocks,
                    "round {round}: {blocks} of {chain_number} were acknowledged, {prefix} are there"
                );
                kept += 1;
            }
            for at in 0..LENGTH {
                // Compares the bytes of what is there.
                assert_eq!(has(&store, &object(chain_number, at)), at < prefix, "round {round}");
            }
            acknowledged += blocks;
        }
        // Whatever there is of earlier rounds is right, too.
        let scrubbed = store.scrub(u64::MAX);
        assert_eq!((scrubbed.damaged, scrubbed.errors), (0, 0), "round {round}");
        let counts = store.stats().counts;
        assert_eq!((counts.quarantined, counts.segments_missing), (0, 0), "round {round}");
        // The children did evict and collect.
        assert!(store.stats().sealed < 16 << 20, "round {round}: {:?}", store.stats());
    }
    (acknowledged, kept)
}

#[test]
fn killed_at_any_moment_nothing_acknowledged_is_lost() {
    let begun = Instant::now();
    let (acknowledged, kept) = kill(50, 1);
    println!("50 kills, {acknowledged} blocks acknowledged, {kept} chains held to it, {:?}", begun.elapsed());
    assert!(acknowledged > 50 && kept > 25, "the children got too little done: {acknowledged}, {kept}");
}

#[test]
#[ignore = "nightly: a thousand kills take minutes"]
fn killed_a_thousand_times() {
    let (acknowledged, kept) = kill(1000, 2);
    println!("1000 kills, {acknowledged} blocks acknowledged, {kept} chains held to it");
    assert!(acknowledged > 1000 && kept > 500);
}
