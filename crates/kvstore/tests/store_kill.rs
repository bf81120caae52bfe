//! A process that puts, evicts, removes and collects is killed at random moments: nothing acknowledged is gone but what it had evicted before,
//! nothing removed is back, and nothing is wrong.
//!
//! The process is this test itself, run again with its root in the environment. It tells of everything on a pipe, which outlives it: that an
//! object entered the index or left it, and why, under the store's own lock and so in the order in which it happened; what was acknowledged. The
//! parent reads that, kills it, opens the store and holds it to the last that was said of each object, over all processes on that root.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod kit;

use std::collections::{BTreeSet, HashMap};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use deepinfer_kvstore::clock::SystemClock;
use deepinfer_kvstore::media::local::{Local, LocalConfig};
use deepinfer_kvstore::policy::{Lifetimes, Policy, PolicyKind};
use deepinfer_kvstore::root::Root;
use deepinfer_kvstore::store::{Put, Store, StoreConfig, Upkeep};
use deepinfer_kvstore::{Kind, ObjectId};
use kit::*;

const ROOT: &str = "KVSTORE_KILL_ROOT";
const FIRST: &str = "KVSTORE_KILL_FIRST";
const POLICY: &str = "KVSTORE_KILL_POLICY";
const LENGTH: u64 = 6;
/// Small enough that what earlier children left is evicted and collected while this one writes.
const CAPACITY: u64 = 1 << 20;

/// Lengths of one chain's blocks: from nothing to several pages.
fn size(chain: u64, at: u64) -> usize {
    (chain.wrapping_mul(7919) + at * 5003) as usize % 20_000
}

/// The blocks of a chain, the slice of the last one, and with some chains of one in the middle.
fn objects(chain: u64) -> Vec<Object> {
    let blocks = (0..LENGTH).map(|at| block(chain, at, size(chain, at)));
    let middle = chain.is_multiple_of(3).then(|| slice(chain, 2, size(chain, 90)));
    blocks.chain(middle).chain([slice(chain, LENGTH - 1, size(chain, 91))]).collect()
}

fn config(policy: PolicyKind, capacity: u64) -> StoreConfig {
    StoreConfig {
        capacity,
        slack: 512 << 10,
        policy,
        max_object: 32 << 10,
        batch_bytes: 128 << 10,
        piece_bytes: 64 << 10,
        ..StoreConfig::default()
    }
}

fn open_with(path: &Path, config: StoreConfig, policy: Box<dyn Policy>) -> Store {
    let root = Root::open(path).unwrap();
    let segments = LocalConfig { segment_bytes: 256 << 10, ..LocalConfig::default() };
    let media = Local::open(&root, segments).unwrap();
    Store::open_with(root, Arc::new(media), config, Arc::new(SystemClock), policy).unwrap()
}

/// One write a line: lines of two threads do not mix, and what was written is the parent's, whatever becomes of the child.
fn tell(line: &str) {
    std::io::stdout().lock().write_all(line.as_bytes()).unwrap();
}

fn label(id: ObjectId) -> String {
    format!("{}{}", if id.kind == Kind::Block { 'b' } else { 's' }, id.key)
}

fn tell_of(id: ObjectId, heard: Heard) {
    match heard {
        Heard::In(_) => tell(&format!("in {}\n", label(id))),
        Heard::Used(_) => {}
        Heard::Out(why) => tell(&format!("{why:?} {}\n", label(id))),
    }
}

fn policy_of(number: &str) -> PolicyKind {
    PolicyKind::ALL[number.parse::<usize>().unwrap()]
}

/// The child: does nothing unless it was started by a parent below.
#[test]
fn child() {
    let Ok(root) = std::env::var(ROOT) else { return };
    let first: u64 = std::env::var(FIRST).unwrap().parse().unwrap();
    let kind = policy_of(&std::env::var(POLICY).unwrap());
    // The harness has begun this line.
    tell("\n");
    let policy = Box::new(Telling(kind.build(Lifetimes::default()), tell_of));
    let store = Arc::new(open_with(Path::new(&root), config(kind, CAPACITY), policy));
    tell("opened\n");
    let _upkeep = Upkeep::start(&store, Duration::from_millis(1)).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let store = &store;
            scope.spawn(move || {
                for round in 0.. {
                    // Every fourth is one of before, of this process or another: there, or evicted and written again. Each thread has its own.
                    let back = if round % 4 == 3 { 1 + (round * round) % 60 } else { 0 };
                    let number = (first + round).saturating_sub(back) * 2 + thread;
                    let all = objects(number);
                    tell(&format!("chain {number}\n"));
                    let (head, tail) = all.split_at(1 + (number % (LENGTH - 1)) as usize);
                    for part in [head, tail] {
                        for (put, object) in put(store, part).iter().zip(part) {
                            // What of the head is evicted before the tail comes is no parent any more.
                            assert!(put.is_there() || matches!(put, Put::NoParent), "{put:?}");
                            if put.is_there() {
                                tell(&format!("ack {}\n", label(object.meta.id)));
                            }
                        }
                    }
                    found(store, &chain(number.saturating_sub(8), LENGTH));
                    if round % 5 == 2 {
                        // The slice, then the last block, of a chain that only this thread writes.
                        let ids = [all[all.len() - 1].meta.id, all[LENGTH as usize - 1].meta.id];
                        store.remove(&ids).unwrap();
                        for id in ids {
                            tell(&format!("away {}\n", label(id)));
                        }
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

/// The last that was said of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Last {
    In,
    Evicted,
    /// Being removed, or written.
    Open,
    /// Its removal has come back from the store: it is written down.
    Away,
}

#[derive(Default)]
struct Told {
    objects: HashMap<String, Last>,
    chains: BTreeSet<u64>,
    acknowledged: u64,
    evicted: u64,
    removed: u64,
    opened: u64,
}

impl Told {
    fn hear(&mut self, line: &str) {
        let Some((word, rest)) = line.split_once(' ') else {
            self.opened += u64::from(line == "opened");
            return;
        };
        let name = rest.to_owned();
        match word {
            "in" => {
                self.objects.insert(name, Last::In);
            }
            "Evicted" => {
                self.evicted += 1;
                self.objects.insert(name, Last::Evicted);
            }
            "Removed" => {
                self.objects.insert(name, Last::Open);
            }
            "ack" => {
                assert!(self.objects.contains_key(&name), "{name} was acknowledged and never entered the index");
                self.acknowledged += 1;
            }
            // An evicted one was no longer there to be removed, and may be back after a restart.
            "away" if self.objects.get(&name) == Some(&Last::Open) => {
                self.removed += 1;
                self.objects.insert(name, Last::Away);
            }
            "chain" => {
                let number = rest.parse().unwrap();
                self.chains.insert(number);
                // What was removed is written again: it may be there before anybody is told.
                for object in objects(number) {
                    if let Some(last) = self.objects.get_mut(&label(object.meta.id)).filter(|last| **last == Last::Away)
                    {
                        *last = Last::Open;
                    }
                }
            }
            "Expired" => unreachable!("nothing is that old: {line}"),
            // Words of the test harness.
            _ => {}
        }
    }
}

/// Runs a child, kills it `after` it has begun, or after it has acknowledged something, and hears all it said.
fn run_and_kill(root: &Path, policy: usize, first: u64, at_work: bool, after: Duration, told: &mut Told) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["child", "--exact", "--nocapture", "--test-threads=1"])
        .env(ROOT, root)
        .env(FIRST, first.to_string())
        .env(POLICY, policy.to_string())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let output = child.stdout.take().unwrap();
    let (working, work) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut output = BufReader::new(output);
            let mut line = String::new();
            // A line that the kill has cut is of a change that nobody saw.
            while output.read_line(&mut line).unwrap_or(0) > 0 && line.ends_with('\n') {
                told.hear(line.trim_end());
                if line.starts_with("ack") {
                    let _ = working.send(());
                }
                line.clear();
            }
        });
        if at_work {
            work.recv_timeout(Duration::from_secs(20)).unwrap();
        }
        std::thread::sleep(after);
        assert!(child.try_wait().unwrap().is_none(), "the child ended by itself");
        child.kill().unwrap();
        child.wait().unwrap();
    });
}

/// Opens what a child left and holds it to what is known. How many acknowledged objects are gone, all of them evicted.
fn check(root: &Path, policy: PolicyKind, round: u64, told: &Told) -> u64 {
    let store = open_with(root, config(policy, 1 << 30), policy.build(Lifetimes::default()));
    let mut gone = 0;
    for &number in &told.chains {
        for object in objects(number) {
            // Compares the bytes of what is there.
            let there = has(&store, &object);
            let name = label(object.meta.id);
            match told.objects.get(&name) {
                Some(Last::In) => assert!(there, "{policy:?}, round {round}: {name} of {number} is gone"),
                Some(Last::Away) => assert!(!there, "{policy:?}, round {round}: {name} of {number} is back"),
                Some(Last::Evicted) => gone += u64::from(!there),
                // The kill came between the change and the word of it.
                Some(Last::Open) | None => {}
            }
        }
        let prefix = found(&store, &chain(number, LENGTH));
        for at in 0..LENGTH {
            let present = has(&store, &block(number, at, size(number, at)));
            assert_eq!(present, (at as usize) < prefix, "{policy:?}, round {round}: {at} of {number}");
        }
    }
    let scrubbed = store.scrub(u64::MAX);
    assert_eq!((scrubbed.damaged, scrubbed.errors), (0, 0), "{policy:?}, round {round}");
    let stats = store.stats();
    assert_eq!((stats.counts.quarantined, stats.counts.segments_missing), (0, 0), "{policy:?}, round {round}");
    // The children did evict and collect, if not as fast as they were killed.
    assert!(stats.sealed < 16 * CAPACITY, "{policy:?}, round {round}: {stats:?}");
    gone
}

/// Kills in turn under every policy, each on a root of its own.
fn kill(rounds: u64, seed: u64) {
    let begun = Instant::now();
    let mut random = Random(seed);
    let mut runs: Vec<_> =
        PolicyKind::ALL.iter().map(|&kind| (kind, tempfile::tempdir().unwrap(), Told::default())).collect();
    let mut gone = [0; PolicyKind::ALL.len()];
    for round in 0..rounds {
        let at = round as usize % runs.len();
        let (kind, base, told) = &mut runs[at];
        let first = 1000 + (round / PolicyKind::ALL.len() as u64) * 30;
        // One in four ends in its start, when the store evicts what came back.
        let at_work = random.below(4) > 0;
        let after = Duration::from_millis(random.below(if at_work { 150 } else { 60 }));
        run_and_kill(base.path(), at, first, at_work, after, told);
        gone[at] = check(base.path(), *kind, round, told);
    }
    for ((kind, _, told), gone) in runs.iter().zip(gone) {
        println!(
            "{kind:?}: {} starts, {} acknowledged, {} evictions told, {} objects gone by them at the end, {} removed",
            told.opened, told.acknowledged, told.evicted, gone, told.removed
        );
        // What a busy machine gets done, too.
        assert!(told.opened > rounds / 10 && told.acknowledged > rounds && told.evicted > rounds, "{kind:?}");
        assert!(gone > 0 && told.removed > 0, "{kind:?}");
    }
    println!("{rounds} kills in {:?}", begun.elapsed());
}

#[test]
fn killed_at_any_moment_nothing_is_lost_but_by_eviction() {
    kill(50, 1);
}

#[test]
#[ignore = "nightly: a thousand kills take minutes"]
fn killed_a_thousand_times() {
    kill(1000, 2);
}
