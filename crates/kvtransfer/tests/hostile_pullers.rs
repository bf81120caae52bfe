//! Peers that send noise, say nothing, read slowly, or ask for what they have no right to: the owner serves others, and takes
//! everything back.
#![allow(clippy::unwrap_used, clippy::panic)]

mod kit;

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use deepinfer_kvtransfer::frame::{Greeting, Operation, Outcome, Reply, Request, Status};
use deepinfer_kvtransfer::{Auth, Config, Counts, Error, EventKind, OfferId};
use kit::raw::Raw;
use kit::{Kind, LONG, bytes, config, end, events, eventually, fetch, with_limits};

both! {
    fn noise_costs_the_one_who_sends_it(kind) {
        let owner = end(kind, &config());
        let ticket = owner.offer(b"", &[b"abc"], LONG).unwrap();
        for seed in 0..60 {
            let mut raw = Raw::connect(owner.address());
            // It may be closed on before all of it is written.
            let _ = raw.write_all(&bytes(80 + 97 * seed, seed as u64));
            assert!(raw.is_closed());
        }
        assert_eq!(fetch(&*owner, &ticket).unwrap().1, b"abc");
        eventually("nothing left", || owner.counts().pulls == 0);
    }

    fn a_request_cut_anywhere_is_dropped(kind) {
        // Room for all of them: none is pushed out.
        let owner = end(kind, &with_limits(|limits| limits.connections = 2 * Request::SIZE));
        let ticket = owner.offer(b"", &[b"abc"], LONG).unwrap();
        let auth = Auth::new(&config());
        for len in 0..=Request::SIZE {
            let mut raw = Raw::connect(owner.address());
            let Greeting { epoch, nonce } = Greeting::decode(&raw.frame()).unwrap();
            let request = Request { operation: Operation::Pull, epoch, id: ticket.id(), layout: auth.layout() };
            raw.write_all(&request.encode(&auth, &nonce)[..len]).unwrap();
        }
        assert_eq!(fetch(&*owner, &ticket).unwrap().1, b"abc");
        eventually("nothing left", || owner.counts().pulls == 0);
        owner.release(&ticket).unwrap();
        assert_eq!(owner.counts(), Counts::default());
    }

    fn fields_and_versions_unknown_here_are_answered(kind) {
        let owner = end(kind, &config());
        let ticket = owner.offer(b"", &[b"abc"], LONG).unwrap();
        let auth = Auth::new(&config());
        for (at, value) in [(4, 9), (5, 1), (6, 0), (6, 3), (7, 1)] {
            let mut raw = Raw::connect(owner.address());
            let Greeting { epoch, nonce } = Greeting::decode(&raw.frame()).unwrap();
            let request = Request { operation: Operation::Pull, epoch, id: ticket.id(), layout: auth.layout() };
            let mut frame = request.encode(&auth, &nonce);
            frame[at] = value;
            raw.write_all(&frame).unwrap();
            assert_eq!(Reply::decode(&raw.frame()).unwrap(), Reply::empty(Status::Frame));
            assert!(raw.is_closed());
        }
    }

    fn who_connects_and_says_nothing_is_cut_and_keeps_nobody_out(kind) {
        let handshake = Duration::from_millis(400);
        let owner = end(kind, &with_limits(|limits| (limits.connections, limits.handshake) = (4, handshake)));
        let ticket = owner.offer(b"", &[b"abc"], LONG).unwrap();
        let mut silent: Vec<Raw> = (0..4).map(|_| Raw::connect(owner.address())).collect();
        // All places are taken; the oldest has to go.
        let start = Instant::now();
        for _ in 0..3 {
            assert_eq!(fetch(&*owner, &ticket).unwrap().1, b"abc");
        }
        assert!(start.elapsed() < handshake);
        assert!(silent.iter_mut().all(Raw::is_closed));
        // One byte now and then is no better.
        let mut slow = Raw::connect(owner.address());
        let start = Instant::now();
        while slow.write_all(b"D").is_ok() {
            std::thread::sleep(Duration::from_millis(30));
            assert!(start.elapsed() < Duration::from_secs(8));
        }
    }

    fn a_flood_of_connections_does_not_stop_a_pull(kind) {
        let owner = end(kind, &with_limits(|limits| limits.connections = 8));
        let payload = bytes(4 << 20, 1);
        let ticket = owner.offer(b"", &[&payload], LONG).unwrap();
        let over = std::sync::atomic::AtomicBool::new(false);
        let pulled = std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let mut open = Vec::new();
                    while !over.load(std::sync::atomic::Ordering::Relaxed) {
                        open.push(Raw::connect(owner.address()));
                        if open.len() == 20 {
                            open.clear();
                        }
                        std::thread::sleep(Duration::from_micros(500));
                    }
                });
            }
            let pulled = (0..10).filter(|_| fetch(&*owner, &ticket).is_ok_and(|(_, got)| got == payload)).count();
            over.store(true, std::sync::atomic::Ordering::Relaxed);
            pulled
        });
        // One that is pushed out three times in a row may fail; most do not.
        assert!(pulled >= 8, "{pulled} of 10");
        assert_eq!(fetch(&*owner, &ticket).unwrap().1, payload);
    }

    fn a_puller_that_never_ends_holds_an_offer_only_up_to_the_limit(kind) {
        let (lease, whole) = (Duration::from_millis(100), Duration::from_millis(700));
        let owner = end(kind, &with_limits(|limits| limits.pull = whole));
        let ticket = owner.offer(b"", &[&bytes(64 << 20, 1)], lease).unwrap();
        let mut raw = Raw::connect(owner.address());
        let start = Instant::now();
        assert_eq!(raw.ask(&ticket, &config(), Operation::Pull).status, Status::Granted);
        std::thread::sleep(lease + Duration::from_millis(50));
        // The lease is over: held by the pull, but nobody else gets in, and a release comes late.
        assert_eq!(owner.counts(), Counts { offers: 1, bytes: 64 << 20, pulls: 1, events_lost: 0 });
        assert!(matches!(fetch(&*owner, &ticket), Err(Error::Gone(_))));
        assert!(!owner.release(&ticket).unwrap());
        assert!(events(&*owner, &ticket).is_empty());
        // It even reads a little all the time, so that it is never silent.
        let mut sink = [0; 1000];
        while raw.read(&mut sink).is_ok_and(|read| read > 0) {
            std::thread::sleep(Duration::from_millis(5));
            if owner.counts() == Counts::default() {
                break;
            }
        }
        eventually("taken back", || owner.counts() == Counts::default());
        assert!(start.elapsed() >= whole, "{:?}", start.elapsed());
        assert!(start.elapsed() < whole * 4, "{:?}", start.elapsed());
        assert_eq!(events(&*owner, &ticket), [EventKind::Expired]);
    }

    fn a_puller_that_goes_away_in_the_middle_lets_go_at_once(kind) {
        let owner = end(kind, &config());
        let ticket = owner.offer(b"", &[&bytes(64 << 20, 1)], LONG).unwrap();
        for _ in 0..3 {
            let mut raw = Raw::connect(owner.address());
            assert_eq!(raw.ask(&ticket, &config(), Operation::Pull).status, Status::Granted);
            let mut some = [0; 1];
            raw.read_exact(&mut some).unwrap();
            assert_eq!(owner.counts().pulls, 1);
            drop(raw);
            eventually("let go", || owner.counts().pulls == 0);
        }
        assert!(events(&*owner, &ticket).is_empty(), "nobody verified it");
        owner.release(&ticket).unwrap();
        assert_eq!(owner.counts(), Counts::default());
    }

    fn a_pull_that_was_not_verified_is_not_told(kind) {
        let owner = end(kind, &config());
        let ticket = owner.offer(b"", &[b"abc"], LONG).unwrap();
        for last in [&Outcome::Corrupt.encode()[..], &Outcome::GivenUp.encode(), b"noise888", b""] {
            let mut raw = Raw::connect(owner.address());
            raw.ask(&ticket, &config(), Operation::Pull);
            raw.write_all(last).unwrap();
            raw.cut();
            eventually("over", || owner.counts().pulls == 0);
        }
        assert!(events(&*owner, &ticket).is_empty());
    }

    fn guessed_names_find_nothing(kind) {
        let owner = end(kind, &config());
        let ticket = owner.offer(b"", &[b"abc"], LONG).unwrap();
        let auth = Auth::new(&config());
        for bit in 0..128 {
            let mut raw = Raw::connect(owner.address());
            let Greeting { epoch, nonce } = Greeting::decode(&raw.frame()).unwrap();
            let mut id = ticket.id().0;
            id[bit / 8] ^= 1 << (bit % 8);
            let operation = if bit % 2 == 0 { Operation::Pull } else { Operation::Release };
            let request = Request { operation, epoch, id: OfferId(id), layout: auth.layout() };
            raw.write_all(&request.encode(&auth, &nonce)).unwrap();
            assert_eq!(Reply::decode(&raw.frame()).unwrap(), Reply::empty(Status::Gone));
            assert!(raw.is_closed());
        }
        assert_eq!(owner.counts().offers, 1);
    }

    fn a_recorded_request_is_worth_nothing_later(kind) {
        let config = Config { token: Some(b"0123456789abcdef".to_vec()), ..config() };
        let (owner, auth) = (end(kind, &config), Auth::new(&config));
        let ticket = owner.offer(b"", &[b"abc"], LONG).unwrap();
        for operation in [Operation::Pull, Operation::Release] {
            let mut raw = Raw::connect(owner.address());
            let Greeting { epoch, nonce } = Greeting::decode(&raw.frame()).unwrap();
            let recorded = Request { operation, epoch, id: ticket.id(), layout: auth.layout() }.encode(&auth, &nonce);
            // Seen on one connection, sent on another.
            let mut other = Raw::connect(owner.address());
            let _: [u8; Greeting::SIZE] = other.frame();
            other.write_all(&recorded).unwrap();
            assert_eq!(Reply::decode(&other.frame()).unwrap(), Reply::empty(Status::Token));
            // Neither does the MAC of one request do for another operation.
            let mut changed = recorded;
            changed[6] ^= 3;
            raw.write_all(&changed).unwrap();
            assert_eq!(Reply::decode(&raw.frame()).unwrap(), Reply::empty(Status::Token));
        }
        assert_eq!(owner.counts().offers, 1);
        assert_eq!(fetch(&*owner, &ticket).unwrap().1, b"abc");
    }
}
