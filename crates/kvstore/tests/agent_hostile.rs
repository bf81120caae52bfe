//! Engines that break their word: each ends its own connection, nothing else changes, and no memory stays behind.
#![allow(clippy::unwrap_used, missing_docs)]

mod agent_kit;
mod kit;

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use agent_kit::*;
use deepinfer_kvstore::agent::protocol::{
    self, Greeting, HEADER, Header, MAX_BODY, Op, PutItem, Status, VERSION, Welcome, decode_outcomes, decode_places,
    encode_damaged, encode_get, encode_put,
};
use deepinfer_kvstore::checksum::checksum;
use deepinfer_kvstore::index::MAX_CHAIN;
use deepinfer_kvstore::upstream::Upstream;
use deepinfer_kvstore::wire::{CheckRequest, Hello, Outcome, encode_numbers};
use deepinfer_kvstore::{Class, Key, Kind, ObjectId};
use kit::{bytes, chain};

fn connect(host: &Host) -> UnixStream {
    let stream = UnixStream::connect(host.socket()).unwrap();
    stream.set_read_timeout(Some(WAIT)).unwrap();
    stream
}

fn greeting(version: u16) -> Vec<u8> {
    let who = Hello { tenant: String::new(), fingerprint: [0; 16], block_tokens: 0, first_stays: false };
    Greeting { version, who }.encode()
}

fn greet(host: &Host) -> (UnixStream, Welcome, OwnedFd) {
    let mut stream = connect(host);
    stream.write_all(&greeting(VERSION)).unwrap();
    let mut bytes = [0; Welcome::LEN];
    let (read, fd) = protocol::receive(stream.as_fd(), &mut bytes).unwrap();
    stream.read_exact(&mut bytes[read..]).unwrap();
    let welcome = Welcome::decode(&bytes).unwrap();
    assert!(welcome.admitted);
    (stream, welcome, fd.unwrap())
}

fn send(stream: &mut UnixStream, op: Op, body: &[u8]) {
    let head = Header { op, status: Status::Done, number: 1, len: body.len() as u32 }.encode();
    stream.write_all(&[&head[..], body].concat()).unwrap();
}

fn answer(stream: &mut UnixStream) -> Option<(Status, Vec<u8>)> {
    loop {
        let mut head = [0; HEADER];
        stream.read_exact(&mut head).ok()?;
        let header = Header::decode(&head).unwrap();
        let mut body = vec![0; header.len as usize];
        stream.read_exact(&mut body).unwrap();
        if header.status != Status::Waiting {
            return Some((header.status, body));
        }
    }
}

fn is_closed(stream: &mut UnixStream) -> bool {
    matches!(stream.read(&mut [0; 64]), Ok(0) | Err(_))
}

fn stage_with(stream: &mut UnixStream, fd: Option<&OwnedFd>) -> (Status, String) {
    stream.write_all(&Header { op: Op::Stage, status: Status::Done, number: 1, len: 1 }.encode()).unwrap();
    match fd {
        Some(fd) => protocol::send(stream.as_fd(), &[0], fd.as_fd()).unwrap(),
        None => stream.write_all(&[0]).unwrap(),
    }
    let (status, why) = answer(stream).unwrap();
    (status, String::from_utf8_lossy(&why).into_owned())
}

fn sealed(len: u64) -> OwnedFd {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
    let fd = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&fd, len).unwrap();
    fcntl_add_seals(&fd, SealFlags::SHRINK).unwrap();
    fd
}

/// Bytes of memory of this process that are its own: without what is shared, as the arena is.
fn memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn words_that_make_no_sense_end_their_own_connection_only() {
    let host = Host::new();
    let client = host.client();
    let keys = chain(1, 3);
    put(&client, &keys, Kind::Block, 0..3);
    for garbage in [&b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"[..], &[0xff; 600], &[0; 64]] {
        let mut stream = connect(&host);
        stream.write_all(garbage).unwrap();
        assert!(is_closed(&mut stream));
    }
    // Another version is told which one is spoken here, and gets no memory.
    let mut stream = connect(&host);
    stream.write_all(&greeting(VERSION + 1)).unwrap();
    let mut words = [0; Welcome::LEN];
    let (read, fd) = protocol::receive(stream.as_fd(), &mut words).unwrap();
    stream.read_exact(&mut words[read..]).unwrap();
    let welcome = Welcome::decode(&words).unwrap();
    assert_eq!((welcome.version, welcome.admitted, fd.is_none()), (VERSION, false, true));
    assert!(is_closed(&mut stream));
    // A length that is a lie is refused before a byte of it is awaited.
    let (mut stream, ..) = greet(&host);
    stream.write_all(&Header { op: Op::Check, status: Status::Done, number: 1, len: u32::MAX }.encode()).unwrap();
    assert_eq!(answer(&mut stream).unwrap().0, Status::Invalid);
    assert!(is_closed(&mut stream));
    let (mut stream, welcome, _fd) = greet(&host);
    let mut long = 0u32.to_le_bytes().to_vec();
    long.extend((MAX_CHAIN as u32 + 1).to_le_bytes());
    long.resize(8 + 16 * (MAX_CHAIN + 1), 1);
    let mut lying = u32::MAX.to_le_bytes().to_vec();
    lying.extend([1; 64]);
    let block = |key| ObjectId { kind: Kind::Block, key };
    let item = |len, place| PutItem { kind: Kind::Block, at: 0, len, place, checksum: 0 };
    let cases: Vec<(Op, Vec<u8>)> = vec![
        (Op::Check, long),
        (Op::Check, lying.clone()),
        (Op::Get, lying.clone()),
        (Op::Get, encode_get([].into_iter())),
        (Op::Get, encode_get([(block(keys[0]), MAX as u32 + 1)].into_iter())),
        (Op::Get, encode_get((0..9).map(|_| (block(keys[0]), (welcome.at_once / 8) as u32)))),
        (Op::Put, lying),
        (Op::Put, encode_put(Class::Chat, &keys, &[item(10, 0)])),
        (Op::Flush, vec![1]),
        (Op::Answer, vec![]),
    ];
    for (op, body) in &cases {
        send(&mut stream, *op, body);
        let (status, why) = answer(&mut stream).unwrap();
        assert_eq!(status, Status::Invalid, "{op:?}: {}", String::from_utf8_lossy(&why));
    }
    send(&mut stream, Op::Stats, &[]);
    assert_eq!(answer(&mut stream).unwrap().0, Status::Done, "after requests that make no sense it goes on");
    // A pin that was not given.
    for pins in [&[7][..], &[0], &[u64::MAX]] {
        let (mut stream, ..) = greet(&host);
        send(&mut stream, Op::Release, &encode_numbers(pins));
        assert!(is_closed(&mut stream));
    }
    // Wrong bytes are claimed where they are right.
    send(&mut stream, Op::Damaged, &encode_damaged(block(keys[0]), checksum(&bytes(block(keys[0]), LEN))));
    send(&mut stream, Op::Check, &CheckRequest::encode(0, &keys));
    assert_eq!(answer(&mut stream).unwrap().0, Status::Done);
    assert_eq!((host.stat("false_reports"), host.stat("quarantined")), (1, 0));
    assert_eq!(get(&client, Kind::Block, &keys), vec![true; 3]);
    assert_eq!(host.stat("turned_away"), 4);
}

#[test]
fn a_stage_is_sealed_memory_and_is_read_within_its_bounds() {
    let host = Host::new();
    let (mut stream, ..) = greet(&host);
    let file: OwnedFd = tempfile::tempfile().unwrap().into();
    let (pipe, _other) = std::io::pipe().unwrap();
    let pipe: OwnedFd = pipe.into();
    let open = rustix::fs::memfd_create("open", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    for fd in [&file, &pipe, &open] {
        let (status, why) = stage_with(&mut stream, Some(fd));
        assert!(status == Status::Invalid && why.contains("sealed against shrinking"), "{why}");
    }
    let (status, why) = stage_with(&mut stream, None);
    assert!(status == Status::Invalid && why.contains("without its descriptor"), "{why}");
    let stage = sealed(1 << 20);
    let data = bytes(ObjectId { kind: Kind::Block, key: Key(1) }, 9000);
    rustix::io::pwrite(&stage, &data, 77).unwrap();
    assert_eq!(stage_with(&mut stream, Some(&stage)).0, Status::Done);
    let keys = chain(1, 6);
    let item = |at, len, place, checksum| PutItem { kind: Kind::Block, at, len, place, checksum };
    let items = [
        item(0, 9000, 77, checksum(&data)),
        item(1, 9000, 78, checksum(&data)),
        item(2, 9000, 1 << 20, checksum(&data)),
        item(3, 9000, u64::MAX - 5, checksum(&data)),
        item(4, MAX as u32 + 1, 0, 0),
    ];
    send(&mut stream, Op::Put, &encode_put(Class::Chat, &keys, &items));
    let (status, body) = answer(&mut stream).unwrap();
    assert_eq!(status, Status::Done);
    let mut expected = [Outcome::Invalid; 5];
    expected[0] = Outcome::Stored;
    assert_eq!(decode_outcomes(&body).unwrap(), expected);
    // More than may be put at once, in objects that are each short enough.
    let many: Vec<PutItem> = (0..6).map(|at| item(at, MAX as u32, 0, 0)).collect();
    send(&mut stream, Op::Put, &encode_put(Class::Chat, &keys, &many));
    assert_eq!(answer(&mut stream).unwrap().0, Status::Invalid);
    // What changes in the stage afterwards changes nothing.
    rustix::io::pwrite(&stage, &[0xaa; 9000], 77).unwrap();
    send(&mut stream, Op::Get, &encode_get([(ObjectId { kind: Kind::Block, key: keys[0] }, 9000)].into_iter()));
    let place = decode_places(&answer(&mut stream).unwrap().1).unwrap()[0].unwrap();
    assert_eq!(place.checksum, checksum(&data));
    assert_eq!(host.stat("arena_objects"), 1);
}

#[test]
fn half_a_greeting_is_waited_for_no_longer_than_a_whole_one() {
    let host = Host::with(|config| {
        config.handshake = Duration::from_millis(150);
        config.request = Duration::from_millis(150);
    });
    for half in [&greeting(VERSION)[..0], &greeting(VERSION)[..9], &greeting(VERSION)[..31]] {
        let mut stream = connect(&host);
        stream.write_all(half).unwrap();
        assert!(is_closed(&mut stream));
    }
    // Half a request, and a body that does not come.
    let (mut stream, ..) = greet(&host);
    stream.write_all(&Header { op: Op::Check, status: Status::Done, number: 1, len: 100 }.encode()[..5]).unwrap();
    assert!(is_closed(&mut stream));
    let (mut stream, ..) = greet(&host);
    stream.write_all(&Header { op: Op::Check, status: Status::Done, number: 1, len: 100 }.encode()).unwrap();
    assert!(is_closed(&mut stream));
}

#[test]
fn who_says_nothing_keeps_nobody_out_and_no_memory_stays_behind() {
    let host = Host::with(|config| {
        config.max_connections = 24;
        config.max_unknown = 8;
        config.handshake = Duration::from_secs(60);
    });
    let client = host.client();
    put(&client, &chain(1, 20), Kind::Block, 0..20);
    assert!(client.flush(WAIT));
    let silent: Vec<UnixStream> = (0..60).map(|_| connect(&host)).collect();
    let begun = Instant::now();
    host.client().ping().unwrap();
    assert!(begun.elapsed() < Duration::from_secs(5));
    drop(silent);
    let round = |count: usize| {
        for at in 0..count {
            let mut stream = connect(&host);
            match at % 5 {
                0 => stream.write_all(&[0xff; 100]).unwrap(),
                1 => stream.write_all(&greeting(VERSION)[..20]).unwrap(),
                2 => {
                    // Admitted, asks for much, and goes before the answer.
                    stream.write_all(&greeting(VERSION)).unwrap();
                    let items = (0..60u32).map(|at| (ObjectId { kind: Kind::Block, key: Key(at.into()) }, LEN as u32));
                    send(&mut stream, Op::Get, &encode_get(items));
                }
                3 => {
                    stream.write_all(&greeting(VERSION)).unwrap();
                    let len = MAX_BODY as u32;
                    stream.write_all(&Header { op: Op::Check, status: Status::Done, number: 1, len }.encode()).unwrap();
                }
                _ => {
                    // Descriptors where none belong.
                    stream.write_all(&greeting(VERSION)).unwrap();
                    let head = Header { op: Op::Check, status: Status::Done, number: 1, len: 9 }.encode();
                    protocol::send(stream.as_fd(), &head, stream.as_fd()).unwrap();
                    protocol::send(stream.as_fd(), &[0; 9], stream.as_fd()).unwrap();
                }
            }
        }
        until("connections stay", || host.stat("engines_connected") <= 1 && host.stat("arena_pinned_bytes") == 0);
    };
    round(200);
    let (before, open) = (memory(), descriptors());
    round(1000);
    let grown = memory().saturating_sub(before);
    assert!(grown < 8 << 20, "{grown} bytes stay");
    until("descriptors stay", || descriptors() <= open + 4);
    assert_eq!(get(&client, Kind::Block, &chain(1, 20)), vec![true; 20]);
}

#[test]
fn what_an_engine_pins_is_bounded_and_ends_with_it_or_with_its_lease() {
    let host = Host::with(|config| {
        config.lease = Duration::from_millis(300);
        config.room_patience = Duration::from_millis(50);
    });
    let client = host.client();
    let keys = chain(1, 100);
    for from in (0..100).step_by(20) {
        put(&client, &keys, Kind::Block, from..from + 20);
    }
    assert!(client.flush(WAIT));
    let ids: Vec<(ObjectId, u32)> = keys.iter().map(|&key| (ObjectId { kind: Kind::Block, key }, LEN as u32)).collect();
    let pin = |stream: &mut UnixStream, ids: &[(ObjectId, u32)]| {
        send(stream, Op::Get, &encode_get(ids.iter().copied()));
        let (status, body) = answer(stream).unwrap();
        (status, if status == Status::Done { decode_places(&body).unwrap().len() } else { 0 })
    };
    let (mut one, welcome, fd) = greet(&host);
    let most = (welcome.at_once / LEN as u64) as usize;
    assert_eq!(pin(&mut one, &ids[..40]), (Status::Done, 40));
    assert_eq!(pin(&mut one, &ids[40..=most]).0, Status::Invalid, "more than it may pin");
    assert_eq!(host.stat("arena_pinned_bytes") / 40, (LEN as u64).next_multiple_of(4096));
    drop(fd);
    drop(one);
    until("the pins of an engine that is gone stay", || host.stat("arena_pinned_bytes") == 0);
    // One that holds on to them while it lives.
    let (mut two, ..) = greet(&host);
    assert_eq!(pin(&mut two, &ids[..10]), (Status::Done, 10));
    until("the pins of an engine that does nothing stay", || host.stat("arena_pinned_bytes") == 0);
    assert!(is_closed(&mut two));
    assert_eq!(host.stat("leases_over"), 1);
    assert_eq!(get(&client, Kind::Block, &keys), vec![true; 100], "others go on");
}

#[test]
fn where_everything_is_pinned_the_rest_is_a_miss() {
    let host = Host::with(|config| {
        config.arena_bytes = 8 << 20;
        config.backlog_bytes = 4 << 20;
        config.room_patience = Duration::from_millis(50);
    });
    let keys = chain(1, 200);
    host.over.fill(&keys);
    let ids: Vec<(ObjectId, u32)> = keys.iter().map(|&key| (ObjectId { kind: Kind::Block, key }, LEN as u32)).collect();
    let mut holders = Vec::new();
    let mut held = 0;
    for part in ids[..190].chunks(70) {
        let (mut stream, ..) = greet(&host);
        send(&mut stream, Op::Get, &encode_get(part.iter().copied()));
        let mut told = 0;
        while told < part.len() {
            let places = decode_places(&answer(&mut stream).unwrap().1).unwrap();
            told += places.len();
            held += places.iter().flatten().count();
        }
        holders.push(stream);
    }
    assert_eq!(held, (8 << 20) / LEN.next_multiple_of(4096), "all there is room for");
    let client = host.client();
    assert_eq!(get(&client, Kind::Block, &keys[195..]), vec![false; 5]);
    assert_eq!(put(&client, &chain(2, 1), Kind::Block, 0..1), [Outcome::Full]);
    assert!(host.stat("no_room") > 0);
    drop(holders);
    until("the pins stay", || host.stat("arena_pinned_bytes") == 0);
    assert_eq!(get(&client, Kind::Block, &keys[195..]), vec![true; 5]);
}
