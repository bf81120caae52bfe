//! An agent and engines over real sockets and shared memory, in one process.
#![allow(clippy::unwrap_used, missing_docs)]

mod agent_kit;
mod kit;

use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use agent_kit::*;
use deepinfer_kvstore::agent::{Agent, AgentConfig, Client, ClientConfig};
use deepinfer_kvstore::checksum::checksum;
use deepinfer_kvstore::cluster::ClusterConfig;
use deepinfer_kvstore::upstream::{Found, Load, Save, Upstream};
use deepinfer_kvstore::wire::Outcome;
use deepinfer_kvstore::{Class, Error, Key, Kind, ObjectId};
use kit::{bytes, chain};

#[test]
fn what_one_engine_puts_another_reads_and_the_store_has_after_a_flush() {
    let host = Host::new();
    let (one, two) = (host.client(), host.client());
    let keys = chain(1, 20);
    assert_eq!(one.check(&keys, 1).unwrap().blocks, 0);
    host.over.hold();
    assert_eq!(put(&one, &keys, Kind::Block, 0..20), vec![Outcome::Stored; 20]);
    assert_eq!(put(&one, &keys, Kind::Slice, [9, 19].into_iter()), vec![Outcome::Stored; 2]);
    // The store has nothing yet; the host has all of it.
    assert!(!one.flush(Duration::from_millis(50)));
    assert_eq!(host.over.found(&keys), 0);
    let found = two.check(&keys, 9).unwrap();
    assert_eq!((found.blocks, found.near, found.slices), (20, 20, vec![19, 9]));
    assert_eq!(get(&two, Kind::Block, &keys), vec![true; 20]);
    assert_eq!(put(&two, &keys, Kind::Block, 0..20), vec![Outcome::Exists; 20]);
    assert_eq!(host.over.gets.load(Ordering::Relaxed), 0);
    host.over.go_on();
    assert!(one.flush(WAIT) && two.flush(WAIT));
    assert_eq!(host.over.found(&keys), 20);
    assert_eq!(
        (host.stat("put"), host.stat("written"), host.stat("unwritten"), host.stat("backlog_bytes")),
        (22, 22, 0, 0)
    );
    assert_eq!(host.stat("arena_objects"), 22);
    host.all_unpinned();
    assert_eq!((stat(&two, "hits"), stat(&two, "misses"), stat(&two, "mismatches")), (20, 0, 0));
    assert_eq!(stat(&two, "agent_exists"), 20);
}

#[test]
fn what_the_store_has_is_fetched_once_whoever_asks_and_several_at_a_time() {
    let host = Host::new();
    let keys = chain(1, 16);
    host.over.fill(&keys);
    host.over.delay(Duration::from_millis(150));
    let clients: Vec<Client> = (0..8).map(|_| host.client()).collect();
    std::thread::scope(|scope| {
        for (at, client) in clients.iter().enumerate() {
            let keys = &keys;
            scope.spawn(move || {
                let found = client.check(keys, 0).unwrap();
                assert_eq!(found.blocks, 16);
                // Everybody asks for two objects of its own and for one that all want.
                let own = [keys[2 * at], keys[2 * at + 1], keys[3]];
                assert_eq!(
                    get(client, Kind::Block, if at == 1 { &own[..2] } else { &own }),
                    vec![true; if at == 1 { 2 } else { 3 }]
                );
            });
        }
    });
    let peak = host.over.peak.load(Ordering::Relaxed);
    assert!((3..=8).contains(&peak), "{peak} calls at once");
    assert_eq!((host.stat("fetches"), host.stat("fetched")), (16, 16));
    assert_eq!(host.over.objects.load(Ordering::Relaxed), 16, "an object was fetched twice");
    assert_eq!(clients[0].check(&keys, 0).unwrap().near, 16);
    // What is not there is a miss, and so is another length.
    let begun = Instant::now();
    assert_eq!(get(&clients[0], Kind::Block, &chain(9, 3)), vec![false; 3]);
    assert!(begun.elapsed() < Duration::from_secs(5));
    let id = ObjectId { kind: Kind::Block, key: keys[0] };
    assert_eq!(clients[0].get(&mut [Load { id, into: &mut vec![0; LEN - 1] }]), [None]);
    host.all_unpinned();
}

#[test]
fn a_store_that_takes_its_time_is_waited_for_and_one_that_fails_is_a_miss() {
    let host = Host::with(|config| config.fetch_patience = Duration::from_millis(2500));
    let client = Client::new(ClientConfig { silence: Duration::from_millis(800), ..host.engine() }).unwrap();
    let keys = chain(1, 2);
    host.over.fill(&keys);
    // Longer than an agent may say nothing: it says that it waits.
    host.over.delay(Duration::from_millis(1600));
    assert_eq!(get(&client, Kind::Block, &keys[..1]), [true]);
    host.over.delay(Duration::from_secs(20));
    let begun = Instant::now();
    assert_eq!(get(&client, Kind::Block, &keys[1..]), [false]);
    assert!(begun.elapsed() < Duration::from_secs(10));
    host.over.delay(Duration::ZERO);
    assert_eq!(get(&client, Kind::Block, &keys[..1]), [true], "the connection goes on");
}

#[test]
fn a_chain_goes_on_from_the_store_into_memory() {
    let host = Host::with(|config| config.fetchers = 1);
    let client = host.client();
    let keys = chain(1, 12);
    host.over.fill(&keys[..6]);
    host.over.hold();
    assert_eq!(put(&client, &keys, Kind::Block, 6..10), vec![Outcome::Stored; 4]);
    let found = client.check(&keys, 0).unwrap();
    assert_eq!((found.blocks, found.near), (10, 0));
    assert_eq!(get(&client, Kind::Block, &keys[..3]), vec![true; 3]);
    assert_eq!(client.check(&keys, 0).unwrap().near, 3);
    host.over.go_on();
    assert!(client.flush(WAIT));
    assert_eq!(host.over.found(&keys), 10);
}

#[test]
fn tenants_of_one_agent_do_not_see_each_other() {
    let host = Host::new();
    let of = |tenant: &str| Client::new(ClientConfig { tenant: tenant.into(), ..host.engine() }).unwrap();
    let (one, two) = (of("one"), of("two"));
    let keys = chain(1, 8);
    put(&one, &keys, Kind::Block, 0..8);
    put(&one, &keys, Kind::Slice, [7].into_iter());
    for _ in 0..2 {
        assert_eq!((one.check(&keys, 1).unwrap().blocks, two.check(&keys, 1).unwrap()), (8, Found::default()));
        assert_eq!((get(&one, Kind::Block, &keys), get(&two, Kind::Block, &keys)), (vec![true; 8], vec![false; 8]));
        assert_eq!(get(&two, Kind::Slice, &keys), vec![false; 8]);
        // Now the store has it, too.
        assert!(one.flush(WAIT));
    }
    // Nor where the memory forgot it and the store is asked.
    let host = host.again();
    let of = |tenant: &str| Client::new(ClientConfig { tenant: tenant.into(), ..host.engine() }).unwrap();
    assert_eq!(get(&of("two"), Kind::Block, &keys), vec![false; 8]);
    assert_eq!(get(&of("one"), Kind::Block, &keys), vec![true; 8]);
    assert_eq!(get(&of("two"), Kind::Block, &keys), vec![false; 8]);
}

#[test]
fn what_was_used_longest_ago_makes_room() {
    let host = Host::with(|config| {
        config.arena_bytes = 8 << 20;
        config.backlog_bytes = 4 << 20;
    });
    let client = host.client();
    let fit = (8 << 20) / LEN.next_multiple_of(4096);
    let many = 3 * fit;
    let keys = chain(1, many as u64);
    for from in (0..many).step_by(20) {
        let outcomes = put(&client, &keys, Kind::Block, from..(from + 20).min(many));
        assert!(outcomes.iter().all(|outcome| *outcome == Outcome::Stored), "{outcomes:?}");
        assert!(client.flush(WAIT));
        assert_eq!(get(&client, Kind::Block, &keys[..1]), [true]);
    }
    host.all_unpinned();
    let sizes = host.agent().sizes();
    assert!(sizes.evicted as usize >= many - fit, "{sizes:?}");
    let fetched = host.stat("fetched");
    assert_eq!(get(&client, Kind::Block, &keys[..1]), [true]);
    assert_eq!(host.stat("fetched"), fetched, "what is used stays");
    assert_eq!(get(&client, Kind::Block, &keys[1..2]), [true]);
    assert_eq!(host.stat("fetched"), fetched + 1, "what is not is fetched again");
    assert_eq!(client.check(&keys, 0).unwrap().blocks, many);
}

#[test]
fn the_backlog_is_bounded_and_what_fails_is_told() {
    let host = Host::with(|config| {
        config.at_once = 2 << 20;
        config.backlog_bytes = 2 << 20;
        config.put_patience = Duration::from_millis(50);
    });
    let client = host.client();
    host.over.hold();
    let keys = chain(1, 200);
    let (mut taken, mut refused) = (0, 0);
    for from in (0..200).step_by(10) {
        let outcomes = put(&client, &keys, Kind::Block, from..from + 10);
        taken += outcomes.iter().filter(|outcome| **outcome == Outcome::Stored).count();
        refused += outcomes.iter().filter(|outcome| **outcome == Outcome::Full).count();
    }
    assert_eq!(taken + refused, 200);
    assert_eq!(taken, (2 << 20) / LEN / 10 * 10);
    assert!(host.stat("backlog_bytes") <= 2 << 20);
    assert_eq!(get(&client, Kind::Block, &keys[..taken]), vec![true; taken], "what was taken is there");
    host.over.go_on();
    assert!(client.flush(WAIT));
    assert_eq!(host.over.found(&keys), taken);
    // A store that takes nothing: the host has it, and the next flush says so, once.
    host.over.refuse(true);
    let other = chain(2, 4);
    assert_eq!(put(&client, &other, Kind::Block, 0..4), vec![Outcome::Stored; 4]);
    assert!(!client.flush(WAIT));
    host.over.refuse(false);
    assert_eq!(get(&client, Kind::Block, &other), vec![true; 4]);
    assert_eq!(put(&client, &chain(3, 1), Kind::Block, 0..1), [Outcome::Stored]);
    assert!(client.flush(WAIT));
    assert_eq!(host.stat("unwritten"), 4);
}

#[test]
fn ancestors_that_the_store_lost_are_written_again() {
    let host = Host::new();
    let client = host.client();
    let keys = chain(1, 8);
    put(&client, &keys, Kind::Block, 0..5);
    assert!(client.flush(WAIT));
    let ids: Vec<ObjectId> = keys[..5].iter().rev().map(|&key| ObjectId { kind: Kind::Block, key }).collect();
    for id in &ids[..3] {
        assert_eq!(host.over.store.remove(&[*id]).unwrap(), 1);
    }
    assert_eq!(put(&client, &keys, Kind::Block, 5..8), vec![Outcome::Stored; 3]);
    assert!(client.flush(WAIT));
    assert_eq!(host.over.found(&keys), 8);
}

#[test]
fn other_bytes_under_a_name_are_an_alarm_or_a_count() {
    let host = Host::new();
    let client = host.client();
    let keys = chain(1, 2);
    put(&client, &keys, Kind::Block, 0..2);
    let other = vec![7; LEN];
    let pieces: [&[u8]; 1] = [&other];
    let save = [Save { kind: Kind::Block, at: 1, pieces: &pieces, checksum: None }];
    assert_eq!(client.put(&keys, &save, Class::Chat), [Outcome::Conflict]);
    let replay = Client::new(ClientConfig { first_stays: true, ..host.engine() }).unwrap();
    assert_eq!(replay.put(&keys, &save, Class::Chat), [Outcome::Exists]);
    assert_eq!((host.stat("conflicts"), host.stat("differs")), (1, 1));
    assert_eq!(get(&client, Kind::Block, &keys), vec![true; 2]);
    // Bytes that are not those announced; an object that is too long; one outside of its chain.
    let fresh = chain(2, 2);
    let wrong = [Save { kind: Kind::Block, at: 0, pieces: &pieces, checksum: Some(1) }];
    assert_eq!(client.put(&fresh, &wrong, Class::Chat), [Outcome::Invalid]);
    let long = vec![0; MAX + 1];
    let long_pieces: [&[u8]; 1] = [&long];
    let saves = [
        Save { kind: Kind::Block, at: 0, pieces: &long_pieces, checksum: None },
        Save { kind: Kind::Block, at: 5, pieces: &pieces, checksum: None },
        Save { kind: Kind::Block, at: 0, pieces: &pieces, checksum: Some(checksum(&other)) },
    ];
    assert_eq!(client.put(&fresh, &saves, Class::Chat), [Outcome::Invalid, Outcome::Invalid, Outcome::Stored]);
    assert_eq!(client.check(&fresh, 0).unwrap().blocks, 1);
    assert!(matches!(client.check(&vec![Key(1); 9000], 0), Err(Error::Invalid(_))));
}

#[test]
fn objects_of_any_length_and_more_than_fit_one_request() {
    let host = Host::new();
    let client = host.client();
    let keys = chain(1, 60);
    let lens: Vec<usize> = (0..60).map(|at| [0, 1, 4095, 4097, MAX, 300_000][at % 6]).collect();
    let all: Vec<Vec<u8>> =
        keys.iter().zip(&lens).map(|(&key, &len)| bytes(ObjectId { kind: Kind::Block, key }, len)).collect();
    let pieces: Vec<[&[u8]; 3]> =
        all.iter().map(|bytes| [&bytes[..bytes.len() / 2], &[], &bytes[bytes.len() / 2..]]).collect();
    let saves: Vec<Save<'_>> =
        pieces.iter().enumerate().map(|(at, pieces)| Save { kind: Kind::Block, at, pieces, checksum: None }).collect();
    assert_eq!(client.put(&keys, &saves, Class::Other), vec![Outcome::Stored; 60]);
    assert!(client.flush(WAIT));
    for client in [client, host.client()] {
        let mut room: Vec<Vec<u8>> = lens.iter().map(|&len| vec![1; len]).collect();
        let mut loads: Vec<Load<'_>> = keys
            .iter()
            .zip(&mut room)
            .map(|(&key, into)| Load { id: ObjectId { kind: Kind::Block, key }, into })
            .collect();
        let sums = client.get(&mut loads);
        assert!(sums.iter().zip(&all).all(|(sum, bytes)| *sum == Some(checksum(bytes))));
        assert_eq!(room, all);
    }
    host.all_unpinned();
}

#[test]
fn an_agent_that_is_gone_is_misses_and_is_used_again_when_it_is_back() {
    let mut host = Host::new();
    let client = Client::new(ClientConfig { rest: Duration::from_millis(50), ..host.engine() }).unwrap();
    let keys = chain(1, 6);
    put(&client, &keys, Kind::Block, 0..6);
    assert!(client.flush(WAIT));
    put(&client, &keys, Kind::Slice, [5].into_iter());
    host.stop();
    let begun = Instant::now();
    for _ in 0..50 {
        assert!(matches!(client.check(&keys, 0), Err(Error::Unavailable(_))));
        assert_eq!(get(&client, Kind::Block, &keys), vec![false; 6]);
        assert_eq!(put(&client, &keys, Kind::Block, 0..1), [Outcome::Failed]);
    }
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    assert!(client.last_error().unwrap().contains("agent at"));
    host.start();
    until("it is not used again", || client.check(&keys, 0).is_ok_and(|found| found.blocks == 6));
    assert_eq!(get(&client, Kind::Block, &keys), vec![true; 6]);
    assert!(!client.flush(WAIT), "what went to another agent was not flushed there");
    assert!(client.flush(WAIT));
}

#[test]
fn a_drain_leaves_nothing_behind() {
    let mut host = Host::new();
    let client = host.client();
    let keys = chain(1, 30);
    host.over.delay(Duration::from_millis(20));
    for from in (0..30).step_by(5) {
        put(&client, &keys, Kind::Block, from..from + 5);
    }
    host.drain().unwrap();
    assert_eq!(host.over.found(&keys), 30);
    assert!(!host.socket().exists());
    host.over.refuse(true);
    host.start();
    put(&host.client(), &chain(2, 1), Kind::Block, 0..1);
    let error = host.drain().unwrap_err();
    assert!(error.to_string().contains("did not take 1 of the objects"), "{error}");
}

#[test]
fn sizes_of_blocks_that_differ_are_told() {
    let host = Host::new();
    let of = |block_tokens| Client::new(ClientConfig { fingerprint: [5; 16], block_tokens, ..host.engine() }).unwrap();
    let (writes, same, other) = (of(128), of(128), of(64));
    let keys = chain(1, 1);
    put(&writes, &keys, Kind::Block, 0..1);
    for client in [&writes, &same, &other] {
        client.check(&keys, 0).unwrap();
    }
    assert_eq!((writes.other_block_tokens(), same.other_block_tokens(), other.other_block_tokens()), (0, 0, 128));
}

#[test]
fn its_socket_is_nobody_elses() {
    let host = Host::new();
    let folder = host.socket().parent().unwrap();
    let mode = |path: &std::path::Path| std::fs::metadata(path).unwrap().mode() & 0o777;
    assert_eq!((mode(folder), mode(host.socket())), (0o700, 0o600));
    let base = tempfile::tempdir().unwrap();
    let open = base.path().join("open");
    std::fs::create_dir(&open).unwrap();
    std::fs::set_permissions(&open, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let start = |config: AgentConfig| {
        Agent::start(Arc::new(Handle(Arc::clone(&host.over))), config).err().map(|error| error.to_string()).unwrap()
    };
    let small = |socket: std::path::PathBuf| AgentConfig { socket, ..host.config.clone() };
    assert!(start(small(open.join("sock"))).contains("chmod 700"));
    assert!(start(small("relative/sock".into())).contains("absolute path"));
    assert!(start(small(host.socket().into())).contains("in use by another"));
    assert!(start(AgentConfig { arena_bytes: 1 << 20, ..small(base.path().join("a/sock")) }).contains("arena_bytes"));
    assert!(start(AgentConfig { writers: 0, ..small(base.path().join("a/sock")) }).contains("writers is 0"));
}

#[test]
fn why_the_store_behind_an_agent_fails_is_known() {
    let base = tempfile::tempdir().unwrap();
    // A port that nobody has any more.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let nobody = ClusterConfig::new([port.to_string().parse().unwrap()]);
    let agent = Agent::start(Arc::new(nobody), small(base.path().join("agent/sock"))).unwrap();
    let (watch, client) = (agent.watch(), Client::new(ClientConfig::new(agent.socket())).unwrap());
    assert_eq!(watch.trouble(), (0, None));
    let keys = chain(1, 2);
    assert_eq!(client.check(&keys, 0).unwrap().blocks, 0);
    let (count, why) = watch.trouble();
    assert!(count > 0 && why.as_deref().is_some_and(|why| why.contains("Connection refused")), "{why:?}");
    assert_eq!(watch.stats().into_iter().find(|(name, _)| name == "store_failures").unwrap().1, count);
    // Nothing new is nothing to tell, and the reason stays known.
    assert_eq!(watch.trouble(), (count, why));
}
