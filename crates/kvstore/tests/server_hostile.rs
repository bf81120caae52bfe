//! Hostile traffic for many rounds: refused each time, nobody else notices, and the memory of the process, which this test has for itself,
//! stays what it was.
#![allow(clippy::unwrap_used)]

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use deepinfer_kvstore::client::{Client, ClientConfig};
use deepinfer_kvstore::index::MAX_CHAIN;
use deepinfer_kvstore::media::local::{Local, LocalConfig};
use deepinfer_kvstore::root::Root;
use deepinfer_kvstore::server::{Server, ServerConfig};
use deepinfer_kvstore::store::{Store, StoreConfig};
use deepinfer_kvstore::wire::{Greeting, HEADER, Header, Hello, Op, Role, Status, Welcome};

const REQUEST: Duration = Duration::from_millis(200);

fn connect(server: &Server) -> TcpStream {
    let stream = TcpStream::connect(server.addresses()[0].to_string()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream
}

/// A connection with the roles that need no token.
fn known(server: &Server) -> TcpStream {
    let mut stream = connect(server);
    let mut greeting = [0; Greeting::LEN];
    stream.read_exact(&mut greeting).unwrap();
    let greeting = Greeting::decode(&greeting).unwrap();
    let hello = Hello { tenant: String::new(), fingerprint: [0; 16], block_tokens: 0, first_stays: false };
    let roles = [(Role::Check, None), (Role::Get, None), (Role::Put, None)];
    stream.write_all(&hello.encode(&greeting.nonce, &roles)).unwrap();
    stream.read_exact(&mut [0; Welcome::LEN]).unwrap();
    stream
}

fn head(op: Op, len: u32) -> [u8; HEADER] {
    Header { op, status: Status::Done, number: 1, len }.encode()
}

fn status(stream: &mut TcpStream) -> Status {
    let mut bytes = [0; HEADER];
    stream.read_exact(&mut bytes).unwrap();
    let header = Header::decode(&bytes).unwrap();
    stream.read_exact(&mut vec![0; header.len as usize]).unwrap();
    header.status
}

/// What is left to read until the other side closes; within seconds, or this fails.
fn is_cut(stream: &mut TcpStream) {
    let begun = Instant::now();
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest);
    assert!(begun.elapsed() < Duration::from_secs(10), "still open");
}

fn resident() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

fn round(server: &Server) {
    // Lengths that nothing has.
    for op in [Op::Check, Op::Get, Op::Start, Op::Write, Op::Commit, Op::Admin] {
        let mut stream = known(server);
        stream.write_all(&head(op, u32::MAX)).unwrap();
        assert_eq!(status(&mut stream), Status::Invalid, "{op:?}");
        is_cut(&mut stream);
    }
    // A chain of more than a million tokens in blocks of 128, and one that claims 2³² blocks.
    let mut stream = known(server);
    let mut chain = [0u32.to_le_bytes(), (MAX_CHAIN as u32 + 1).to_le_bytes()].concat();
    chain.resize(8 + 16 * (MAX_CHAIN + 1), 1);
    let claims = [&0u32.to_le_bytes()[..], &u32::MAX.to_le_bytes(), &[7; 64]].concat();
    for body in [&chain, &claims] {
        stream.write_all(&head(Op::Check, body.len() as u32)).unwrap();
        stream.write_all(body).unwrap();
        assert_eq!(status(&mut stream), Status::Invalid);
    }
    // Names in words of operators that are paths, without the operator's token.
    let words = br#"{"remove": ["../../etc/passwd", "zz", "00"]}"#;
    stream.write_all(&head(Op::Admin, words.len() as u32)).unwrap();
    stream.write_all(words).unwrap();
    assert_ne!(status(&mut stream), Status::Done);
    // Another token than the operator's.
    let mut config = ClientConfig::new(server.addresses()[0].clone());
    config.roles = vec![(Role::Admin, Some(b"not the right one at all".to_vec()))];
    assert!(Client::new(config).and_then(|client| client.ping()).is_err());
    // Half a hello, half a frame, and a frame that comes a byte at a time: none is waited for longer than a whole one.
    let mut half = connect(server);
    half.write_all(&[1]).unwrap();
    let mut frame = known(server);
    frame.write_all(&head(Op::Check, 5000)[..3]).unwrap();
    let mut slow = known(server);
    slow.write_all(&head(Op::Check, 5000)).unwrap();
    let begun = Instant::now();
    while slow.write_all(&[0]).is_ok() {
        assert!(begun.elapsed() < 25 * REQUEST, "fed for ever");
        std::thread::sleep(REQUEST / 20);
    }
    is_cut(&mut half);
    is_cut(&mut frame);
}

#[test]
fn hostile_traffic_is_refused_and_memory_stays_flat() {
    let base = tempfile::tempdir().unwrap();
    let root = Root::open(base.path()).unwrap();
    let media = Arc::new(Local::open(&root, LocalConfig::default()).unwrap());
    let store = Arc::new(Store::open(root, media, StoreConfig::default()).unwrap());
    let config = ServerConfig {
        listen: vec!["127.0.0.1:0".parse().unwrap()],
        tokens: HashMap::from([(Role::Admin, b"the operator's, and no other".to_vec())]),
        handshake: REQUEST,
        request: REQUEST,
        ..ServerConfig::default()
    };
    let server = Server::start(Arc::clone(&store), config).unwrap();
    let mut honest = ClientConfig::new(server.addresses()[0].clone());
    honest.roles = vec![(Role::Check, None)];
    let honest = Client::new(honest).unwrap();
    // Threads and buffers are made in the first rounds.
    (0..3).for_each(|_| round(&server));
    let before = resident();
    for _ in 0..8 {
        round(&server);
        honest.ping().unwrap();
    }
    let after = resident();
    assert!(after < before + (8 << 20), "{before} bytes before, {after} after");
    let stats = store.stats();
    assert_eq!((stats.blocks, stats.slices, stats.pending), (0, 0, 0));
}
