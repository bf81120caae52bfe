//! Agents and engines are processes that are killed at random moments: nothing wrong is served, what was flushed is there, nothing stays pinned.
//!
//! The processes are this test itself, run again with their part in the environment. An engine tells of every chain that it has flushed; the
//! parent kills engines and the agent, and asks a new agent over the same store for what it must have.
#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs)]

mod agent_kit;
mod kit;

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use agent_kit::*;
use deepinfer_kvstore::agent::{Agent, Client, ClientConfig};
use deepinfer_kvstore::upstream::Upstream;
use deepinfer_kvstore::{Key, Kind};
use kit::{chain, key};

const ROOT: &str = "KVSTORE_AGENT_ROOT";
const FIRST: &str = "KVSTORE_AGENT_FIRST";
const LENGTH: u64 = 5;

fn config(root: &Path) -> ClientConfig {
    ClientConfig { rest: Duration::from_millis(20), stage_bytes: 4 << 20, ..ClientConfig::new(root.join("agent/sock")) }
}

/// One that waits on a machine that does much else, too.
fn client(root: &Path) -> Client {
    let patient = Duration::from_secs(10);
    Client::new(ClientConfig { connect: patient, silence: patient, ..config(root) }).unwrap()
}

/// An agent over the store at the root: does nothing unless it was started by a parent below.
#[test]
fn agent() {
    let Ok(root) = std::env::var(ROOT) else { return };
    if std::env::var(FIRST).is_ok() {
        return;
    }
    let root = Path::new(&root);
    let mut agent = Agent::start(Arc::new(open(&root.join("store"))), small(root.join("agent/sock"))).unwrap();
    std::io::stdout().lock().write_all(b"ready\n").unwrap();
    // Until the parent closes its end.
    let _ = std::io::stdin().read(&mut [0]);
    agent.drain().unwrap();
}

/// An engine: puts chains, flushes them, says so, and reads whatever it has put so far.
#[test]
fn engine() {
    let (Ok(root), Ok(first)) = (std::env::var(ROOT), std::env::var(FIRST)) else { return };
    let client = client(Path::new(&root));
    let first: u64 = first.parse().unwrap();
    std::io::stdout().lock().write_all(b"ready\n").unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in first.. {
                let keys = chain(number, LENGTH);
                let there =
                    put(&client, &keys, Kind::Block, 0..LENGTH as usize).iter().all(|outcome| outcome.is_there());
                let there = there && put(&client, &keys, Kind::Slice, [LENGTH as usize - 1].into_iter())[0].is_there();
                if client.flush(Duration::from_secs(5)) && there {
                    std::io::stdout().lock().write_all(format!("flushed {number}\n").as_bytes()).unwrap();
                }
            }
        });
        scope.spawn(|| {
            for number in (0..).map(|at: u64| first + at % 40) {
                // Compares the bytes of what is there.
                get(&client, Kind::Block, &chain(number, LENGTH));
            }
        });
    });
}

struct Process {
    child: Child,
    reader: Option<JoinHandle<Vec<u64>>>,
}

impl Process {
    fn start(part: &str, root: &Path, first: Option<u64>) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([part, "--exact", "--nocapture", "--test-threads=1"]).env(ROOT, root);
        if let Some(first) = first {
            command.env(FIRST, first.to_string());
        }
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        while !line.ends_with("ready\n") {
            line.clear();
            assert!(output.read_line(&mut line).unwrap() > 0, "{part} did not start");
        }
        let reader = std::thread::spawn(move || {
            let number = |line: String| line.rsplit_once("flushed ").and_then(|(_, number)| number.parse().ok());
            output.lines().map_while(Result::ok).filter_map(number).collect()
        });
        Self { child, reader: Some(reader) }
    }

    /// Ends at once; what it said until then. It must not have ended by itself, as it would with wrong bytes.
    fn kill(mut self) -> Vec<u64> {
        assert!(self.child.try_wait().unwrap().is_none(), "it ended by itself");
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.reader.take().unwrap().join().unwrap()
    }

    fn signal(&self, signal: libc::c_int) {
        // SAFETY: a signal to a child that was not waited for yet: its number is nobody else's.
        let sent = unsafe { libc::kill(self.child.id() as libc::pid_t, signal) };
        assert_eq!(sent, 0);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % bound
    }
}

fn pinned(client: &Client) -> Option<u64> {
    client.stats().into_iter().find(|(name, _)| name == "agent_arena_pinned_bytes").map(|(_, value)| value)
}

/// Everything of a chain that was flushed is there, with the right bytes.
fn is_whole(client: &Client, number: u64) -> bool {
    let keys = chain(number, LENGTH);
    let found = client.check(&keys, 1).unwrap_or_default();
    (found.blocks as u64, found.slices) == (LENGTH, vec![LENGTH as usize - 1])
        && get(client, Kind::Block, &keys) == vec![true; LENGTH as usize]
        && get(client, Kind::Slice, &[key(number, LENGTH - 1)]) == [true]
}

fn kill(rounds: u64, seed: u64) -> (usize, u64) {
    let base = tempfile::tempdir().unwrap();
    let mut random = Random(seed);
    let mut agent = Process::start("agent", base.path(), None);
    let watcher = client(base.path());
    let mut flushed: Vec<u64> = Vec::new();
    let mut agents = 0;
    for round in 0..rounds {
        let engine = Process::start("engine", base.path(), Some(round << 20));
        std::thread::sleep(Duration::from_millis(20 + random.below(120)));
        let with_agent = random.below(2) == 0;
        let told = if with_agent {
            agents += 1;
            // The engine lives on, and goes on with the next agent.
            agent.kill();
            agent = Process::start("agent", base.path(), None);
            std::thread::sleep(Duration::from_millis(30 + random.below(60)));
            engine.kill()
        } else {
            engine.kill()
        };
        until("something stays pinned", || pinned(&watcher) == Some(0));
        for &number in told.iter().rev().take(4) {
            assert!(is_whole(&watcher, number), "round {round}: chain {number} was flushed and is not there");
        }
        flushed.extend(told);
    }
    // An agent with an empty memory: all of it is in the store.
    agent.kill();
    let _agent = Process::start("agent", base.path(), None);
    until("the agent does not come back", || watcher.ping().is_ok());
    let newest = flushed.iter().rev().take(1000);
    for &number in newest {
        assert!(is_whole(&watcher, number), "chain {number} was flushed and is not in the store");
    }
    (flushed.len(), agents)
}

#[test]
fn killed_at_any_moment_nothing_flushed_is_lost_and_nothing_stays_pinned() {
    let begun = Instant::now();
    let (flushed, agents) = kill(50, 1);
    println!("50 kills, {agents} of agents, {flushed} chains flushed, {:?}", begun.elapsed());
    assert!(flushed > 25 && agents > 10, "the engines got too little done: {flushed}, {agents}");
}

#[test]
#[ignore = "nightly: a thousand kills take minutes"]
fn killed_a_thousand_times() {
    let (flushed, agents) = kill(1000, 2);
    println!("1000 kills, {agents} of agents, {flushed} chains flushed");
    assert!(flushed > 500 && agents > 300);
}

#[test]
fn an_agent_that_hangs_is_misses_and_is_used_again() {
    let base = tempfile::tempdir().unwrap();
    let agent = Process::start("agent", base.path(), None);
    let keys: Vec<Key> = chain(1, 6);
    let patient = client(base.path());
    put(&patient, &keys, Kind::Block, 0..6);
    assert!(patient.flush(WAIT));
    let client = Client::new(config(base.path())).unwrap();
    until("it does not answer", || get(&client, Kind::Block, &keys) == vec![true; 6]);
    kit::stop(&agent.child);
    for what in ["get", "check", "put", "get"] {
        let begun = Instant::now();
        match what {
            "get" => assert_eq!(get(&client, Kind::Block, &keys), vec![false; 6]),
            "check" => assert!(client.check(&keys, 0).is_err()),
            _ => assert!(!put(&client, &keys, Kind::Block, 0..1)[0].is_there()),
        }
        assert!(begun.elapsed() < Duration::from_millis(1600), "{what}: {:?}", begun.elapsed());
    }
    agent.signal(libc::SIGCONT);
    until("it is not used again", || get(&client, Kind::Block, &keys) == vec![true; 6]);
}
