//! A server and its clients over real sockets.
#![allow(clippy::unwrap_used, missing_docs)]

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use deepinfer_kvstore::client::{Client, ClientConfig, Fetch, NewObject};
use deepinfer_kvstore::index::MAX_CHAIN;
use deepinfer_kvstore::media::local::{Local, LocalConfig};
use deepinfer_kvstore::net::Address;
use deepinfer_kvstore::root::Root;
use deepinfer_kvstore::server::{Server, ServerConfig};
use deepinfer_kvstore::store::{Store, StoreConfig};
use deepinfer_kvstore::wire::{Greeting, HEADER, Header, Hello, Op, Outcome, Role, Status, Welcome};
use deepinfer_kvstore::{Class, Error, Key, Kind, ObjectId};

fn store(root: &std::path::Path) -> Arc<Store> {
    let root = Root::open(root).unwrap();
    let media = Arc::new(Local::open(&root, LocalConfig::default()).unwrap());
    Arc::new(Store::open(root, media, StoreConfig { max_object: 2 << 20, ..StoreConfig::default() }).unwrap())
}

struct Running {
    server: Server,
    _root: tempfile::TempDir,
}

impl Running {
    fn with(config: ServerConfig) -> Self {
        let root = tempfile::tempdir().unwrap();
        let server = Server::start(store(&root.path().join("store")), config).unwrap();
        Self { server, _root: root }
    }

    fn address(&self) -> Address {
        self.server.addresses()[0].clone()
    }

    fn client(&self) -> Client {
        Client::new(ClientConfig::new(self.address())).unwrap()
    }

    fn raw(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address().to_string()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        stream
    }
}

fn here() -> ServerConfig {
    ServerConfig { listen: vec!["127.0.0.1:0".parse().unwrap()], ..ServerConfig::default() }
}

fn block(key: u128) -> ObjectId {
    ObjectId { kind: Kind::Block, key: Key(key) }
}

fn bytes_of(key: u128, len: usize) -> Vec<u8> {
    (0..len).map(|at| (key as usize * 31 + at * 7) as u8).collect()
}

/// Blocks `first..=last` of the chain 1, 2, 3, … with a slice on the last one.
fn put_chain(client: &Client, first: u128, last: u128, len: usize) -> Vec<Outcome> {
    let bytes: Vec<Vec<u8>> = (first..=last).map(|key| bytes_of(key, len)).collect();
    let pieces: Vec<[&[u8]; 2]> = bytes.iter().map(|bytes| [&bytes[..len / 3], &bytes[len / 3..]]).collect();
    let slice = bytes_of(last + 1000, 99);
    let slice: [&[u8]; 1] = [&slice];
    let mut objects: Vec<NewObject<'_>> = (first..=last)
        .zip(&pieces)
        .map(|(key, pieces)| NewObject {
            id: block(key),
            parent: (key > 1).then_some(Key(key - 1)),
            class: Class::Agent,
            pieces,
            checksum: None,
        })
        .collect();
    let id = ObjectId { kind: Kind::Slice, key: Key(last) };
    objects.push(NewObject { id, parent: Some(Key(last)), class: Class::Agent, pieces: &slice, checksum: None });
    client.put(&objects).unwrap()
}

fn chain(keys: std::ops::RangeInclusive<u128>) -> Vec<Key> {
    keys.map(Key).collect()
}

fn get(client: &Client, key: u128, len: usize) -> Option<Vec<u8>> {
    let mut into = vec![0; len];
    let hit = client.get(&mut [Fetch { id: block(key), start: 0, into: &mut into }]).unwrap();
    hit[0].then_some(into)
}

#[test]
fn what_is_put_is_found_and_read() {
    let running = Running::with(here());
    let client = running.client();
    assert_eq!(client.check(&chain(1..=5), 8).unwrap().blocks, 0);
    assert_eq!(put_chain(&client, 1, 5, 300_000), vec![Outcome::Stored; 6]);
    let other = running.client();
    let found = other.check(&chain(1..=9), 8).unwrap();
    assert_eq!((found.blocks, found.slices), (5, vec![4]));
    assert_eq!(get(&other, 3, 300_000).unwrap(), bytes_of(3, 300_000));
    let mut part = [0; 10];
    let fetches = &mut [Fetch { id: block(2), start: 299_990, into: &mut part }];
    assert_eq!(other.get(fetches).unwrap(), [true]);
    assert_eq!(part[..], bytes_of(2, 300_000)[299_990..]);
    assert_eq!(get(&other, 6, 10), None);
    assert_eq!(put_chain(&other, 1, 5, 300_000), vec![Outcome::Exists; 6], "the same again");
    let wrong = bytes_of(77, 300_000);
    let pieces: [&[u8]; 1] = [&wrong];
    let objects = [
        NewObject { id: block(5), parent: Some(Key(4)), class: Class::Chat, pieces: &pieces, checksum: None },
        NewObject { id: block(50), parent: Some(Key(49)), class: Class::Chat, pieces: &pieces, checksum: None },
    ];
    assert_eq!(other.put(&objects).unwrap(), [Outcome::Conflict, Outcome::NoParent]);
    assert_eq!(get(&client, 5, 300_000).unwrap(), bytes_of(5, 300_000), "the first write stays");
}

#[test]
fn many_at_once_and_larger_than_any_frame() {
    let running = Running::with(here());
    let client = running.client();
    let len = 1_500_000;
    assert!(put_chain(&client, 1, 60, len).iter().all(|outcome| outcome.is_there()));
    let mut room = vec![vec![0; len]; 60];
    let mut fetches: Vec<Fetch<'_>> =
        room.iter_mut().zip(1..).map(|(into, key)| Fetch { id: block(key), start: 0, into }).collect();
    assert_eq!(client.get(&mut fetches).unwrap(), vec![true; 60]);
    assert!(room.iter().zip(1..).all(|(bytes, key)| *bytes == bytes_of(key, len)));
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| (0..20).for_each(|_| assert_eq!(client.check(&chain(1..=61), 0).unwrap().blocks, 60)));
        }
    });
}

#[test]
fn a_role_needs_its_token() {
    let token = |role: &str| format!("token of role {role}").into_bytes();
    let tokens: HashMap<Role, Vec<u8>> = Role::ALL.map(|role| (role, token(role.name()))).into();
    let running = Running::with(ServerConfig { tokens, ..here() });
    let with = |roles: &[(Role, Option<Vec<u8>>)]| {
        Client::new(ClientConfig { roles: roles.to_vec(), ..ClientConfig::new(running.address()) }).unwrap()
    };
    let putter = with(&[(Role::Put, Some(token("put")))]);
    assert_eq!(put_chain(&putter, 1, 2, 100), vec![Outcome::Stored; 3]);
    let error = putter.check(&chain(1..=2), 0).unwrap_err();
    assert!(matches!(&error, Error::Invalid(why) if why.contains("needs the role check")), "{error}");
    let checker = with(&[(Role::Check, Some(token("check")))]);
    assert_eq!(checker.check(&chain(1..=2), 0).unwrap().blocks, 2);
    let error = checker.get(&mut [Fetch { id: block(1), start: 0, into: &mut [0; 100] }]).unwrap_err();
    assert!(matches!(&error, Error::Invalid(why) if why.contains("role get")), "{error}");
    assert!(checker.admin(r#"{"do": "stats"}"#).is_err());
    for roles in
        [vec![(Role::Get, Some(token("check")))], vec![(Role::Get, None)], vec![(Role::Check, Some(token("put")))]]
    {
        let error = with(&roles).ping().unwrap_err();
        assert!(matches!(&error, Error::Invalid(why) if why.contains("does not accept the token")), "{error}");
    }
    assert_eq!(running.server.traffic().refused.load(Ordering::Relaxed), 3);
    assert!(running.server.traffic().forbidden.load(Ordering::Relaxed) >= 3);
}

#[test]
fn whoever_proves_no_role_keeps_nobody_out() {
    let tokens = HashMap::from(Role::ALL.map(|role| (role, b"a token of sixteen bytes".to_vec())));
    let running = Running::with(ServerConfig { tokens, max_connections: 4, ..here() });
    let hello = Hello { tenant: "squatter".into(), fingerprint: [0; 16], block_tokens: 0, first_stays: false };
    let mut held = Vec::new();
    for _ in 0..8 {
        let mut stream = running.raw();
        let mut greeting = [0; Greeting::LEN];
        stream.read_exact(&mut greeting).unwrap();
        stream.write_all(&hello.encode(&Greeting::decode(&greeting).unwrap().nonce, &[])).unwrap();
        let mut welcome = [0; Welcome::LEN];
        stream.read_exact(&mut welcome).unwrap();
        assert!(!Welcome::decode(&welcome).unwrap().all);
        assert_eq!(stream.read(&mut [0]).unwrap(), 0, "it is let go");
        held.push(stream);
    }
    let roles = vec![(Role::Admin, Some(b"a token of sixteen bytes".to_vec()))];
    let honest = Client::new(ClientConfig { roles, ..ClientConfig::new(running.address()) }).unwrap();
    assert!(!honest.admin(r#"{"do": "tenants"}"#).unwrap().contains("squatter"));
    assert_eq!(running.server.traffic().refused.load(Ordering::Relaxed), 8);
}

#[test]
fn only_who_may_write_gives_a_tenant_its_number() {
    let running = Running::with(here());
    let with = |roles: &[Role]| {
        let roles = roles.iter().map(|&role| (role, None)).collect();
        Client::new(ClientConfig { tenant: "one".into(), roles, ..ClientConfig::new(running.address()) }).unwrap()
    };
    let reader = with(&[Role::Check, Role::Get, Role::Admin]);
    assert_eq!(reader.check(&chain(1..=2), 0).unwrap().blocks, 0);
    assert!(!reader.admin(r#"{"do": "tenants"}"#).unwrap().contains("one"));
    assert_eq!(put_chain(&with(&[Role::Put]), 1, 2, 500), vec![Outcome::Stored; 3]);
    // The reader's connection is older than the number.
    assert_eq!(reader.check(&chain(1..=2), 0).unwrap().blocks, 2);
    assert_eq!(get(&reader, 1, 500).unwrap(), bytes_of(1, 500));
    assert!(reader.admin(r#"{"do": "tenants"}"#).unwrap().contains("one"));
}

#[test]
fn what_others_can_reach_has_tokens() {
    let root = tempfile::tempdir().unwrap();
    let listen = vec!["0.0.0.0:0".parse().unwrap()];
    let error = Server::start(store(&root.path().join("s")), ServerConfig { listen, ..here() }).err().unwrap();
    assert!(error.to_string().contains("can be reached from elsewhere"), "{error}");
    let tokens = HashMap::from([(Role::Put, b"short".to_vec())]);
    let error = Server::start(store(&root.path().join("t")), ServerConfig { tokens, ..here() }).err().unwrap();
    assert!(error.to_string().contains("shorter than 16 bytes"), "{error}");
}

#[test]
fn tenants_do_not_see_each_other() {
    let running = Running::with(here());
    let of = |tenant: &str| {
        Client::new(ClientConfig { tenant: tenant.into(), ..ClientConfig::new(running.address()) }).unwrap()
    };
    let (one, two) = (of("one"), of("two"));
    assert_eq!(put_chain(&one, 1, 3, 500), vec![Outcome::Stored; 4]);
    assert_eq!(one.check(&chain(1..=3), 4).unwrap().blocks, 3);
    assert_eq!(two.check(&chain(1..=3), 4).unwrap().blocks, 0, "even who knows a key finds nothing under it");
    assert_eq!(get(&two, 1, 500), None);
    let answer = one.admin(r#"{"do": "tenants"}"#).unwrap();
    assert!(answer.contains(r#""name":"one""#) && answer.contains(r#""bytes":1599"#), "{answer}");
}

#[test]
fn sizes_of_blocks_that_differ_are_told() {
    let running = Running::with(here());
    let of = |block_tokens| {
        let config = ClientConfig { fingerprint: [5; 16], block_tokens, ..ClientConfig::new(running.address()) };
        Client::new(config).unwrap()
    };
    let (writes, same, other) = (of(128), of(128), of(64));
    put_chain(&writes, 1, 1, 10);
    same.ping().unwrap();
    other.check(&chain(9..=9), 0).unwrap();
    assert_eq!((writes.other_block_tokens(), same.other_block_tokens(), other.other_block_tokens()), (0, 0, 128));
}

#[test]
fn commands_of_operators() {
    let running = Running::with(here());
    let client = running.client();
    put_chain(&client, 1, 3, 1000);
    let stats: serde_json::Value = serde_json::from_str(&client.admin(r#"{"do": "stats"}"#).unwrap()).unwrap();
    assert_eq!(
        (stats["blocks"].as_u64(), stats["slices"].as_u64(), stats["bytes"].as_u64()),
        (Some(3), Some(1), Some(3099))
    );
    let key = Key(3).to_string();
    let removed = client.admin(&format!(r#"{{"do": "remove", "kind": "block", "keys": ["{key}"]}}"#)).unwrap();
    assert!(removed.contains(":2"), "{removed}: the slice goes with its block");
    assert_eq!(client.check(&chain(1..=3), 0).unwrap().blocks, 2);
    assert!(client.admin(r#"{"do": "scrub", "bytes": 1000000}"#).unwrap().contains(r#""objects":2"#));
    for bad in [
        "",
        "{",
        r#"{"do": "format"}"#,
        r#"{"do": "remove", "kind": "block", "keys": ["../../etc/passwd"]}"#,
        r#"{"do": "remove", "kind": "file", "keys": []}"#,
    ] {
        assert!(matches!(client.admin(bad), Err(Error::Invalid(_))), "{bad}");
    }
    client.ping().unwrap();
}

fn greet(stream: &mut TcpStream) {
    let mut greeting = [0; Greeting::LEN];
    stream.read_exact(&mut greeting).unwrap();
    let greeting = Greeting::decode(&greeting).unwrap();
    let hello = Hello { tenant: String::new(), fingerprint: [0; 16], block_tokens: 0, first_stays: false };
    stream.write_all(&hello.encode(&greeting.nonce, &Role::ALL.map(|role| (role, None)))).unwrap();
    let mut welcome = [0; Welcome::LEN];
    stream.read_exact(&mut welcome).unwrap();
    assert!(Welcome::decode(&welcome).unwrap().all);
}

fn send(stream: &mut TcpStream, op: Op, body: &[u8]) {
    let head = Header { op, status: Status::Done, number: 1, len: body.len() as u32 }.encode();
    stream.write_all(&head).unwrap();
    stream.write_all(body).unwrap();
}

fn answer(stream: &mut TcpStream) -> Option<(Status, Vec<u8>)> {
    let mut head = [0; HEADER];
    stream.read_exact(&mut head).ok()?;
    let header = Header::decode(&head).unwrap();
    let mut body = vec![0; header.len as usize];
    stream.read_exact(&mut body).unwrap();
    Some((header.status, body))
}

#[test]
fn hostile_words_end_their_own_connection_only() {
    let running = Running::with(here());
    let client = running.client();
    put_chain(&client, 1, 2, 100);
    for garbage in [&b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"[..], &[0xff; 600], &[0, 0, 0, 0]] {
        let mut stream = running.raw();
        stream.write_all(garbage).unwrap();
        let mut all = Vec::new();
        let _ = stream.read_to_end(&mut all);
        assert!(all.len() <= Greeting::LEN + Welcome::LEN, "{} bytes", all.len());
    }
    let mut stream = running.raw();
    greet(&mut stream);
    // A length that is a lie is refused before a byte of it is awaited.
    stream.write_all(&Header { op: Op::Check, status: Status::Done, number: 1, len: u32::MAX }.encode()).unwrap();
    assert_eq!(answer(&mut stream).unwrap().0, Status::Invalid);
    assert!(answer(&mut stream).is_none(), "the connection is closed");
    let mut stream = running.raw();
    greet(&mut stream);
    let mut long = 0u32.to_le_bytes().to_vec();
    long.extend((MAX_CHAIN as u32 + 1).to_le_bytes());
    long.resize(8 + 16 * (MAX_CHAIN + 1), 1);
    let mut lying = u32::MAX.to_le_bytes().to_vec();
    lying.extend([1; 64]);
    let foreign_put = [&1u32.to_le_bytes()[..], &7u64.to_le_bytes()[..]].concat();
    let too_long = [&1u32.to_le_bytes()[..], &[1; 17], &0u32.to_le_bytes(), &u32::MAX.to_le_bytes()].concat();
    let cases: [(Op, &[u8]); 8] = [
        (Op::Check, &long),
        (Op::Get, &lying),
        (Op::Get, &too_long),
        (Op::Start, &lying),
        (Op::Commit, &foreign_put),
        (Op::Revoke, &foreign_put),
        (Op::Answer, &[]),
        (Op::Admin, &[0xff, 0xfe]),
    ];
    for (op, body) in cases {
        send(&mut stream, op, body);
        let (status, why) = answer(&mut stream).unwrap();
        assert_eq!(status, Status::Invalid, "{op:?}: {}", String::from_utf8_lossy(&why));
    }
    send(&mut stream, Op::Ping, &[]);
    assert_eq!(answer(&mut stream).unwrap().0, Status::Done, "after requests that make no sense it goes on");
    assert_eq!(get(&client, 2, 100).unwrap(), bytes_of(2, 100));
}

#[test]
fn who_says_nothing_keeps_nobody_out() {
    let running = Running::with(ServerConfig {
        max_connections: 40,
        max_unknown: 8,
        handshake: Duration::from_secs(60),
        ..here()
    });
    let silent: Vec<TcpStream> = (0..200).map(|_| running.raw()).collect();
    let began = Instant::now();
    running.client().ping().unwrap();
    assert!(began.elapsed() < Duration::from_secs(5));
    assert!(running.server.connections() <= 10, "{}", running.server.connections());
    drop(silent);
    let slow = Running::with(ServerConfig { handshake: Duration::from_millis(100), ..here() });
    let mut half = slow.raw();
    half.write_all(&[9]).unwrap();
    let mut all = Vec::new();
    half.read_to_end(&mut all).unwrap();
    assert_eq!(all.len(), Greeting::LEN, "half a hello is waited for no longer than a whole one");
}

#[test]
fn a_put_that_is_not_committed_leaves_nothing() {
    let running = Running::with(here());
    let client = running.client();
    let mut stream = running.raw();
    greet(&mut stream);
    let item =
        deepinfer_kvstore::wire::MetaFields { id: block(1), parent: None, class: Class::Chat, len: 1000, checksum: 1 };
    send(&mut stream, Op::Start, &deepinfer_kvstore::wire::encode_start(&[item]));
    let (_, body) = answer(&mut stream).unwrap();
    let put = deepinfer_kvstore::wire::decode_started(&body).unwrap()[0].unwrap();
    let mut write = deepinfer_kvstore::wire::WriteHead { put, offset: 0 }.encode().to_vec();
    write.extend([7; 400]);
    send(&mut stream, Op::Write, &write);
    send(&mut stream, Op::Ping, &[]);
    answer(&mut stream).unwrap();
    assert_eq!(client.check(&chain(1..=1), 0).unwrap().blocks, 0, "nothing is visible before its commit");
    let pending = || {
        let stats: serde_json::Value = serde_json::from_str(&client.admin(r#"{"do": "stats"}"#).unwrap()).unwrap();
        stats["pending"].as_u64().unwrap()
    };
    assert!(pending() >= 400);
    drop(stream);
    let until = Instant::now() + Duration::from_secs(10);
    while pending() > 0 && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(pending(), 0, "what its connection leaves behind is dropped");
    // Bytes that are not those announced are refused at the commit.
    let mut stream = running.raw();
    greet(&mut stream);
    send(&mut stream, Op::Start, &deepinfer_kvstore::wire::encode_start(&[item]));
    let put = deepinfer_kvstore::wire::decode_started(&answer(&mut stream).unwrap().1).unwrap()[0].unwrap();
    let mut write = deepinfer_kvstore::wire::WriteHead { put, offset: 0 }.encode().to_vec();
    write.extend([7; 1000]);
    send(&mut stream, Op::Write, &write);
    send(&mut stream, Op::Commit, &deepinfer_kvstore::wire::encode_numbers(&[put]));
    let outcomes = deepinfer_kvstore::wire::decode_outcomes(&answer(&mut stream).unwrap().1).unwrap();
    assert_eq!(outcomes, [Outcome::Invalid]);
    assert_eq!(client.check(&chain(1..=1), 0).unwrap().blocks, 0);
}

#[test]
fn a_server_that_comes_back_is_used_again() {
    let folder = tempfile::tempdir().unwrap();
    let address: Address = format!("unix:{}", folder.path().join("sock").display()).parse().unwrap();
    let start = || {
        let config = ServerConfig { listen: vec![address.clone()], drain: Duration::from_millis(50), ..here() };
        Server::start(store(&folder.path().join("store")), config).unwrap()
    };
    let mut server = start();
    let config = ClientConfig { rest: Duration::from_millis(50), ..ClientConfig::new(address.clone()) };
    let client = Client::new(config).unwrap();
    put_chain(&client, 1, 3, 1000);
    server.drain().unwrap();
    drop(server);
    let began = Instant::now();
    assert!(matches!(client.check(&chain(1..=3), 0), Err(Error::Unavailable(_))));
    assert!(matches!(client.check(&chain(1..=3), 0), Err(Error::Unavailable(_))));
    assert!(began.elapsed() < Duration::from_secs(1));
    let _server = start();
    std::thread::sleep(Duration::from_millis(60));
    assert_eq!(client.check(&chain(1..=3), 1).unwrap().slices, [2]);
    assert_eq!(get(&client, 3, 1000).unwrap(), bytes_of(3, 1000));
    let second =
        Server::start(store(&folder.path().join("other")), ServerConfig { listen: vec![address.clone()], ..here() });
    assert!(second.err().unwrap().to_string().contains("in use by another server"));
    assert!(UnixStream::connect(folder.path().join("sock")).is_ok());
}

#[test]
fn a_server_that_does_not_answer_is_left_alone_for_a_while() {
    let deaf = TcpListener::bind("127.0.0.1:0").unwrap();
    let address: Address = deaf.local_addr().unwrap().to_string().parse().unwrap();
    let client = Client::new(ClientConfig::new(address)).unwrap();
    let began = Instant::now();
    assert!(matches!(client.check(&chain(1..=3), 0), Err(Error::Unavailable(_))));
    let first = began.elapsed();
    assert!(first < Duration::from_secs(1), "{first:?}");
    let began = Instant::now();
    assert!(matches!(client.check(&chain(1..=3), 0), Err(Error::Unavailable(_))));
    assert!(began.elapsed() < Duration::from_millis(100));
}

#[test]
fn bytes_are_protected_where_that_is_asked_for() {
    let made = rcgen::generate_simple_self_signed(vec!["store.test".to_owned()]).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (certificate, key) = (folder.path().join("cert.pem"), folder.path().join("key.pem"));
    std::fs::write(&certificate, made.cert.pem()).unwrap();
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    let tls = Some(deepinfer_kvstore::tls::ServerTls { certificate: certificate.clone(), key });
    let running = Running::with(ServerConfig { tls, ..here() });
    let with = |name: &str| {
        let tls = deepinfer_kvstore::tls::ClientTls { authorities: certificate.clone(), server_name: name.to_owned() };
        let config =
            ClientConfig { tls: Some(tls), connect: Duration::from_secs(5), ..ClientConfig::new(running.address()) };
        Client::new(ClientConfig { check: Duration::from_secs(5), ..config }).unwrap()
    };
    let client = with("store.test");
    assert_eq!(put_chain(&client, 1, 4, 1_200_000), vec![Outcome::Stored; 5]);
    assert_eq!(get(&client, 4, 1_200_000).unwrap(), bytes_of(4, 1_200_000));
    assert!(with("other.test").ping().is_err(), "another name than the certificate's");
    assert!(running.client().ping().is_err(), "without TLS");
}
