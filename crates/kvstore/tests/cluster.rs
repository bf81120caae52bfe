//! A store behind several entry points: who owns what, and what an entry point that dies or hangs costs.
#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs)]

mod kit;

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use deepinfer_kvstore::client::{Client, ClientConfig};
use deepinfer_kvstore::cluster::{Cluster, ClusterConfig};
use deepinfer_kvstore::media::local::{Local, LocalConfig};
use deepinfer_kvstore::net::Address;
use deepinfer_kvstore::root::Root;
use deepinfer_kvstore::server::{Server, ServerConfig};
use deepinfer_kvstore::store::{Rule, Store, StoreConfig};
use deepinfer_kvstore::upstream::{Embedded, Load, Save, Source, Upstream};
use deepinfer_kvstore::wire::{Greeting, HEADER, Header, Hello, Op, Outcome, Role, Status, Welcome};
use deepinfer_kvstore::{Class, Error, Key, Kind, ObjectId};
use kit::{bytes, chain};

const ROOT: &str = "KVSTORE_CLUSTER_ROOT";
const LEN: usize = 20_000;

fn open(path: &Path) -> Arc<Store> {
    let root = Root::open(path).unwrap();
    let media = Arc::new(Local::open(&root, LocalConfig::default()).unwrap());
    Arc::new(Store::open(root, media, StoreConfig { max_object: 2 << 20, ..StoreConfig::default() }).unwrap())
}

fn serve(folder: &Path, config: ServerConfig) -> Server {
    std::fs::create_dir_all(folder).unwrap();
    let listen = vec![socket(folder)];
    Server::start(open(&folder.join("store")), ServerConfig { listen, drain: Duration::from_millis(50), ..config })
        .unwrap()
}

fn socket(folder: &Path) -> Address {
    format!("unix:{}", folder.join("sock").display()).parse().unwrap()
}

fn put(store: &dyn Upstream, keys: &[Key], kind: Kind, positions: impl Iterator<Item = usize>) -> Vec<Outcome> {
    let positions: Vec<usize> = positions.collect();
    let all: Vec<Vec<u8>> = positions.iter().map(|&at| bytes(ObjectId { kind, key: keys[at] }, LEN)).collect();
    let pieces: Vec<[&[u8]; 2]> = all.iter().map(|bytes| [&bytes[..LEN / 3], &bytes[LEN / 3..]]).collect();
    let objects: Vec<Save<'_>> =
        positions.iter().zip(&pieces).map(|(&at, pieces)| Save { kind, at, pieces, checksum: None }).collect();
    store.put(keys, &objects, Class::Agent)
}

/// Which of the blocks are there; those that are have the right bytes.
fn get(store: &dyn Upstream, keys: &[Key]) -> Vec<bool> {
    let ids: Vec<ObjectId> = keys.iter().map(|&key| ObjectId { kind: Kind::Block, key }).collect();
    let mut room = vec![vec![0; LEN]; ids.len()];
    let mut loads: Vec<Load<'_>> = ids.iter().zip(&mut room).map(|(&id, into)| Load { id, into }).collect();
    let sums = store.get(&mut loads);
    for ((sum, id), into) in sums.iter().zip(&ids).zip(&room) {
        assert!(
            sum.is_none() || (*into == bytes(*id, LEN) && *sum == Some(deepinfer_kvstore::checksum::checksum(into)))
        );
    }
    sums.iter().map(Option::is_some).collect()
}

fn stat(store: &dyn Upstream, name: &str) -> u64 {
    store.stats().into_iter().find(|(known, _)| known == name).unwrap().1
}

fn until(what: &str, mut is: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !is() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The first key of a chain that an entry point owns.
fn first_of(cluster: &Cluster, owner: usize, keys: &[Key]) -> usize {
    keys.iter().position(|&key| cluster.members().owner(key) == owner).unwrap()
}

#[test]
fn a_chain_is_cut_by_owner_and_found_whole() {
    let base = tempfile::tempdir().unwrap();
    let folders: Vec<_> = (0..4).map(|at| base.path().join(at.to_string())).collect();
    let _servers: Vec<Server> = folders.iter().map(|folder| serve(folder, ServerConfig::default())).collect();
    let cluster = Cluster::new(&ClusterConfig::new(folders.iter().map(|folder| socket(folder)))).unwrap();
    let keys = chain(1, 40);
    assert_eq!(cluster.check(&keys, 9).unwrap().blocks, 0);
    assert_eq!(put(&cluster, &keys, Kind::Block, 0..25), vec![Outcome::Stored; 25]);
    // Later blocks name the nearest ancestor of their owner, in any order of writing.
    assert_eq!(put(&cluster, &keys, Kind::Block, (25..40).rev()), vec![Outcome::Stored; 15]);
    assert_eq!(put(&cluster, &keys, Kind::Block, 3..5), vec![Outcome::Exists; 2]);
    assert_eq!(put(&cluster, &keys, Kind::Slice, [9, 30, 39].into_iter()), vec![Outcome::Stored; 3]);
    let found = cluster.check(&keys, 2).unwrap();
    assert_eq!((found.blocks, found.slices, found.near), (40, vec![39, 30], 0));
    assert_eq!(get(&cluster, &keys), vec![true; 40]);
    // Everybody has a part, and each alone is closed under its own parents: it gallops.
    for (at, folder) in folders.iter().enumerate() {
        let client = Client::new(ClientConfig::new(socket(folder))).unwrap();
        let own: Vec<Key> = keys.iter().copied().filter(|&key| cluster.members().owner(key) == at).collect();
        assert!(own.len() > 1, "{at}");
        assert_eq!(client.check(&own, 0).unwrap().blocks as usize, own.len());
    }
    // An ancestor of the same owner that is not there; another chain's first blocks do not help.
    let other = chain(2, 30);
    let lacks = put(&cluster, &other, Kind::Block, 10..20);
    for (outcome, at) in lacks.iter().zip(10..) {
        let heads = (0..10).any(|before| cluster.members().owner(other[before]) == cluster.members().owner(other[at]));
        assert_eq!(*outcome, if heads { Outcome::NoParent } else { Outcome::Stored }, "{at}");
    }
    // What makes no sense concerns its object only.
    let short: [&[u8]; 1] = [&[1, 2, 3]];
    let mut part = vec![0; LEN - 1];
    let id = ObjectId { kind: Kind::Block, key: keys[0] };
    assert_eq!(cluster.get(&mut [Load { id, into: &mut part }]), [None], "part of an object is none");
    let objects = [
        Save { kind: Kind::Block, at: 99, pieces: &short, checksum: None },
        Save { kind: Kind::Block, at: 0, pieces: &short, checksum: Some(7) },
        Save { kind: Kind::Block, at: 0, pieces: &short, checksum: None },
    ];
    let third = chain(3, 1);
    assert_eq!(cluster.put(&third, &objects, Class::Chat), [Outcome::Invalid, Outcome::Invalid, Outcome::Stored]);
    assert_eq!(get(&cluster, &third), [false], "another length than the object's");
    assert!(matches!(cluster.check(&vec![Key(1); 9000], 0), Err(Error::Invalid(_))));
    assert_eq!((stat(&cluster, "entry_points"), stat(&cluster, "entry_points_down")), (4, 0));
    assert_eq!(stat(&cluster, "entry_point_failures"), 0);
}

#[test]
fn tenants_and_tokens_hold_everywhere() {
    let base = tempfile::tempdir().unwrap();
    let folders: Vec<_> = (0..2).map(|at| base.path().join(at.to_string())).collect();
    let tokens: HashMap<Role, Vec<u8>> = Role::ALL.map(|role| (role, b"0123456789abcdef".to_vec())).into();
    let servers: Vec<Server> = folders
        .iter()
        .map(|folder| serve(folder, ServerConfig { tokens: tokens.clone(), ..ServerConfig::default() }))
        .collect();
    let open = ClusterConfig::new(folders.iter().map(|folder| socket(folder)));
    let with = ClusterConfig {
        roles: [Role::Check, Role::Get, Role::Put].map(|role| (role, Some(b"0123456789abcdef".to_vec()))).to_vec(),
        ..open.clone()
    };
    let who = |tenant: &str| Hello { tenant: tenant.into(), fingerprint: [0; 16], block_tokens: 0, first_stays: false };
    let (one, two) = (with.open(&who("one")).unwrap(), with.open(&who("two")).unwrap());
    let keys = chain(1, 12);
    assert_eq!(put(&*one, &keys, Kind::Block, 0..12), vec![Outcome::Stored; 12]);
    assert_eq!((one.check(&keys, 0).unwrap().blocks, two.check(&keys, 0).unwrap().blocks), (12, 0));
    assert_eq!((get(&*one, &keys), get(&*two, &keys)), (vec![true; 12], vec![false; 12]));
    let stranger = Cluster::new(&open).unwrap();
    assert_eq!(stranger.check(&keys, 0).unwrap().blocks, 0);
    assert_eq!(get(&stranger, &keys), vec![false; 12]);
    assert_eq!(put(&stranger, &keys, Kind::Block, 0..1), [Outcome::Failed]);
    let errors = stranger.last_errors();
    assert!(
        errors.iter().all(|(_, why)| why.as_ref().is_some_and(|why| why.contains("does not accept the token"))),
        "{errors:?}"
    );
    assert!(stranger.trouble().unwrap().contains("does not accept the token"));
    assert_eq!(one.trouble(), None);
    let long = vec![0; (2 << 20) + 1];
    let save = Save { kind: Kind::Slice, at: 0, pieces: &[&long], checksum: None };
    assert!(!one.put(&keys, &[save], Class::Chat)[0].is_there());
    assert!(one.trouble().is_some());
    assert!(stranger.ping().iter().all(|(_, answer)| matches!(answer, Err(Error::Invalid(_)))));
    assert!(servers.iter().all(|server| server.traffic().refused.load(Ordering::Relaxed) > 0));
}

#[test]
fn another_size_of_blocks_is_told() {
    let base = tempfile::tempdir().unwrap();
    let folders: Vec<_> = (0..3).map(|at| base.path().join(at.to_string())).collect();
    let _servers: Vec<Server> = folders.iter().map(|folder| serve(folder, ServerConfig::default())).collect();
    let of = |block_tokens| {
        let all = ClusterConfig::new(folders.iter().map(|folder| socket(folder)));
        Cluster::new(&ClusterConfig { fingerprint: [5; 16], block_tokens, ..all }).unwrap()
    };
    let (writes, other) = (of(128), of(64));
    let keys = chain(1, 9);
    put(&writes, &keys, Kind::Block, 0..9);
    other.check(&keys, 0).unwrap();
    assert_eq!((writes.other_block_tokens(), other.other_block_tokens()), (0, 128));
}

/// An entry point of its own process: does nothing unless it was started by a parent below.
#[test]
fn child() {
    let Ok(folder) = std::env::var(ROOT) else { return };
    let _server = serve(Path::new(&folder), ServerConfig::default());
    std::io::stdout().lock().write_all(b"serving\n").unwrap();
    // Until the parent closes its end.
    let _ = std::io::stdin().read(&mut [0]);
}

struct Point(Child);

impl Point {
    fn start(folder: &Path) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["child", "--exact", "--nocapture", "--test-threads=1"])
            .env(ROOT, folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let serving = output.lines().map_while(Result::ok).any(|line| line.ends_with("serving"));
        assert!(serving);
        Self(child)
    }

    fn signal(&self, signal: libc::c_int) {
        // SAFETY: a signal to a child that was not waited for yet: its number is nobody else's.
        let sent = unsafe { libc::kill(self.0.id() as libc::pid_t, signal) };
        assert_eq!(sent, 0);
    }
}

impl Drop for Point {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Everything that is asked while one of three is away takes less than a second; hits of the other two stay.
fn misses_of_one(cluster: &Cluster, keys: &[Key], gone: usize) {
    let first = first_of(cluster, gone, keys);
    let theirs: Vec<bool> = keys.iter().map(|&key| cluster.members().owner(key) != gone).collect();
    for round in 0..3 {
        for what in ["get", "check", "put"] {
            let begun = Instant::now();
            match what {
                "get" => assert_eq!(get(cluster, keys), theirs, "round {round}"),
                "check" => assert_eq!(cluster.check(keys, 0).unwrap().blocks, first, "round {round}"),
                _ => {
                    let outcomes = put(cluster, keys, Kind::Block, 0..keys.len());
                    let expected: Vec<Outcome> =
                        theirs.iter().map(|&there| if there { Outcome::Exists } else { Outcome::Failed }).collect();
                    assert_eq!(outcomes, expected, "round {round}");
                }
            }
            let took = begun.elapsed();
            assert!(took < Duration::from_secs(1), "{what}, round {round}: {took:?}");
            assert!(round == 0 || took < Duration::from_millis(400), "{what} waits again: {took:?}");
        }
    }
    assert_eq!(stat(cluster, "entry_points_down"), 1);
}

#[test]
fn one_of_three_that_dies_or_hangs_is_missed_within_a_second_and_found_again() {
    let base = tempfile::tempdir().unwrap();
    let folders: Vec<_> = (0..3).map(|at| base.path().join(at.to_string())).collect();
    let mut points: Vec<Point> = folders.iter().map(|folder| Point::start(folder)).collect();
    let retry = Duration::from_millis(50);
    let config = ClusterConfig { retry, ..ClusterConfig::new(folders.iter().map(|folder| socket(folder))) };
    let cluster = Cluster::new(&config).unwrap();
    let keys = chain(1, 24);
    assert_eq!(put(&cluster, &keys, Kind::Block, 0..24), vec![Outcome::Stored; 24]);
    let all_back = |what: &str| {
        until(what, || cluster.check(&keys, 0).unwrap().blocks == 24);
        assert_eq!(get(&cluster, &keys), vec![true; 24], "{what}");
    };
    // One hangs, with its connections open and others still accepted by the system.
    kit::stop(&points[1].0);
    misses_of_one(&cluster, &keys, 1);
    // A client that knows none of this meets the full second at most, too.
    let fresh = Cluster::new(&config).unwrap();
    misses_of_one(&fresh, &keys, 1);
    points[1].signal(libc::SIGCONT);
    all_back("it goes on");
    // One dies and is started again over what it had.
    points[2].signal(libc::SIGKILL);
    points[2].0.wait().unwrap();
    misses_of_one(&cluster, &keys, 2);
    points[2] = Point::start(&folders[2]);
    all_back("it was started again");
    // All of them hang: misses, at once from the second call on.
    for point in &points {
        kit::stop(&point.0);
    }
    let begun = Instant::now();
    assert_eq!(cluster.check(&keys, 0).unwrap().blocks, 0);
    assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
    let begun = Instant::now();
    assert_eq!(get(&cluster, &keys), vec![false; 24]);
    assert!(begun.elapsed() < Duration::from_millis(400), "{:?}", begun.elapsed());
    for point in &points {
        point.signal(libc::SIGCONT);
    }
    all_back("all go on");
}

/// Says hello, answers checks and the first objects of a get, and stops in the middle of a further one.
fn stalls(listener: &TcpListener, whole: usize, done: &std::sync::mpsc::Receiver<()>) {
    let (mut stream, _) = listener.accept().unwrap();
    stream.write_all(&Greeting { nonce: [1; 16] }.encode()).unwrap();
    let mut len = [0; 4];
    stream.read_exact(&mut len).unwrap();
    stream.read_exact(&mut vec![0; u32::from_le_bytes(len) as usize]).unwrap();
    let mut welcome = Welcome {
        roles: deepinfer_kvstore::wire::Roles::of(&[Role::Check, Role::Get, Role::Put]),
        all: true,
        other_block_tokens: 0,
        max_object: 1 << 20,
    }
    .encode();
    welcome[1] = 1;
    stream.write_all(&welcome).unwrap();
    let mut head = [0; HEADER];
    stream.read_exact(&mut head).unwrap();
    let header = Header::decode(&head).unwrap();
    assert_eq!(header.op, Op::Get);
    let mut body = vec![0; header.len as usize];
    stream.read_exact(&mut body).unwrap();
    let items = deepinfer_kvstore::wire::GetRequest::decode(&body).unwrap();
    assert!(items.len() > whole);
    stream.write_all(&Header { op: Op::Answer, status: Status::Done, number: header.number, len: 0 }.encode()).unwrap();
    for (at, item) in items.iter().enumerate().take(whole + 1) {
        let all = bytes(item.id, item.len as usize);
        let sum = deepinfer_kvstore::checksum::checksum(&all);
        stream
            .write_all(&deepinfer_kvstore::wire::AnswerStart { hit: true, len: item.len, checksum: sum }.encode())
            .unwrap();
        stream.write_all(if at < whole { &all } else { &all[..all.len() / 2] }).unwrap();
    }
    done.recv().unwrap();
}

#[test]
fn an_answer_that_stops_in_the_middle_is_a_miss_within_a_second() {
    let base = tempfile::tempdir().unwrap();
    let _server = serve(base.path(), ServerConfig::default());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let stalled: Address = listener.local_addr().unwrap().to_string().parse().unwrap();
    let cluster = Cluster::new(&ClusterConfig::new([socket(base.path()), stalled.clone()])).unwrap();
    let keys = chain(1, 24);
    // What the sound one owns is written; the other one claims to have whatever it is asked for.
    let sound = Cluster::new(&ClusterConfig::new([socket(base.path())])).unwrap();
    put(&sound, &keys, Kind::Block, 0..24);
    let own: Vec<usize> = (0..24).filter(|&at| cluster.members().owner(keys[at]) == 1).collect();
    assert!(own.len() > 4);
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(move || stalls(&listener, 2, &told));
        let begun = Instant::now();
        let hits = get(&cluster, &keys);
        let took = begun.elapsed();
        let expected: Vec<bool> = (0..24).map(|at| !own.contains(&at) || own[..2].contains(&at)).collect();
        assert_eq!(hits, expected, "what had arrived counts");
        assert!(took < Duration::from_secs(1), "{took:?}");
        let begun = Instant::now();
        assert_eq!(get(&cluster, &keys).iter().filter(|hit| **hit).count(), 24 - own.len());
        assert!(begun.elapsed() < Duration::from_millis(400));
        tell.send(()).unwrap();
    });
}

#[test]
fn an_embedded_store_offers_the_same() {
    let base = tempfile::tempdir().unwrap();
    let store = open(base.path());
    let (one, two) = (
        Embedded::new(Arc::clone(&store), "one", Rule::Exact).unwrap(),
        Embedded::new(store, "two", Rule::Exact).unwrap(),
    );
    let keys = chain(1, 6);
    assert_eq!(put(&one, &keys, Kind::Block, (0..6).rev()), vec![Outcome::Stored; 6]);
    assert_eq!(put(&one, &keys, Kind::Slice, [2].into_iter()), [Outcome::Stored]);
    let found = one.check(&keys, 4).unwrap();
    assert_eq!((found.blocks, found.slices), (6, vec![2]));
    assert_eq!((get(&one, &keys), get(&two, &keys)), (vec![true; 6], vec![false; 6]));
    assert_eq!(two.check(&keys, 4).unwrap().blocks, 0);
    let mut short = vec![0; LEN - 1];
    let id = ObjectId { kind: Kind::Block, key: keys[0] };
    assert_eq!(one.get(&mut [Load { id, into: &mut short }]), [None], "a part is no object");
    assert_eq!(put(&one, &chain(2, 5), Kind::Block, 2..3), [Outcome::NoParent]);
    assert!(one.flush(Duration::ZERO));
    assert_eq!((stat(&one, "hits"), stat(&one, "misses"), stat(&one, "stored")), (6, 1, 7));
}
