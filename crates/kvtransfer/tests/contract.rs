//! What both back ends promise, each test run over each.
#![allow(clippy::unwrap_used, clippy::panic)]

mod kit;

use std::sync::Barrier;
use std::time::{Duration, Instant};

use deepinfer_kvtransfer::{Config, Error, EventKind, KvTransfer, SharedMemory, Target, Tcp, TcpAddress, Ticket};
use kit::{Kind, LONG, bytes, config, end, events, eventually, fetch, with_limits};

both! {
    fn segments_arrive_gathered_and_equal(kind) {
        let (owner, puller) = (end(kind, &config()), end(kind, &config()));
        let parts = [bytes(3, 1), bytes(0, 2), bytes(1 << 20, 3), bytes((256 << 10) + 1, 4)];
        let segments: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
        let ticket = owner.offer(b"meta", &segments, LONG).unwrap();
        let ticket: Ticket = ticket.to_string().parse().unwrap();
        assert_eq!(ticket.length(), parts.concat().len() as u64);
        for _ in 0..2 {
            assert_eq!(fetch(&*puller, &ticket).unwrap(), (b"meta".to_vec(), parts.concat()));
        }
        // Into memory that is there, cut elsewhere than the segments were.
        let mut into = vec![0; parts.concat().len()];
        let (head, tail) = into.split_at_mut(777_777);
        assert_eq!(puller.pull(&ticket, Target::Buffers(&mut [head, &mut [], tail])).unwrap(), b"meta");
        assert_eq!(into, parts.concat());
        // A vector that holds something keeps it.
        let mut more = b"before".to_vec();
        puller.pull(&ticket, Target::Fresh(&mut more)).unwrap();
        assert_eq!(more, [b"before".as_slice(), &parts.concat()].concat());
    }

    fn an_offer_is_a_copy(kind) {
        let owner = end(kind, &config());
        let mut pages = bytes(100_000, 1);
        let ticket = owner.offer(b"", &[&pages], LONG).unwrap();
        let then = pages.clone();
        pages.fill(0);
        assert_eq!(fetch(&*owner, &ticket).unwrap().1, then);
    }

    fn nothing_and_only_a_description_can_be_offered(kind) {
        let owner = end(kind, &config());
        let ticket = owner.offer(b"", &[], LONG).unwrap();
        assert_eq!(fetch(&*owner, &ticket).unwrap(), (Vec::new(), Vec::new()));
        let ticket = owner.offer(b"first token 17", &[b""], LONG).unwrap();
        assert_eq!(fetch(&*owner, &ticket).unwrap().0, b"first token 17");
    }

    fn release_from_either_side_is_idempotent_and_told_once(kind) {
        let (owner, puller) = (end(kind, &config()), end(kind, &config()));
        for releasing in [&owner, &puller] {
            let ticket = owner.offer(b"", &[b"abc"], LONG).unwrap();
            assert!(releasing.release(&ticket).unwrap());
            assert!(!releasing.release(&ticket).unwrap());
            assert!(!owner.release(&ticket).unwrap());
            assert!(!puller.release(&ticket).unwrap());
            assert!(matches!(fetch(&*puller, &ticket), Err(Error::Gone(_))));
            assert_eq!(events(&*owner, &ticket), [EventKind::Released]);
            assert_eq!(owner.counts(), deepinfer_kvtransfer::Counts::default());
        }
        assert!(events(&*puller, &owner.offer(b"", &[], LONG).unwrap()).is_empty());
    }

    fn a_pull_is_told_once_and_the_offer_stays(kind) {
        let (owner, puller) = (end(kind, &config()), end(kind, &config()));
        let ticket = owner.offer(b"", &[b"abc"], LONG).unwrap();
        let mut told = Vec::new();
        fetch(&*puller, &ticket).unwrap();
        eventually("pulled", || {
            told.extend(events(&*owner, &ticket));
            !told.is_empty() && owner.counts().pulls == 0
        });
        fetch(&*puller, &ticket).unwrap();
        eventually("served", || owner.counts().pulls == 0);
        puller.release(&ticket).unwrap();
        told.extend(events(&*owner, &ticket));
        assert_eq!(told, [EventKind::Pulled, EventKind::Released]);
    }

    fn a_lease_ends_without_traffic(kind) {
        let owner = end(kind, &config());
        let lease = Duration::from_millis(60);
        let start = Instant::now();
        let ticket = owner.offer(b"m", &[&bytes(1 << 20, 1)], lease).unwrap();
        assert_eq!(owner.counts().bytes, (1 << 20) + 1);
        // `counts` does not look at the clock: the owner's own thread ends the lease.
        eventually("memory given back", || owner.counts().bytes == 0);
        assert!(start.elapsed() >= lease);
        assert!(matches!(fetch(&*owner, &ticket), Err(Error::Gone(_))));
        assert!(!owner.release(&ticket).unwrap());
        assert_eq!(events(&*owner, &ticket), [EventKind::Expired]);
    }

    fn leases_end_each_at_its_own_time(kind) {
        let owner = end(kind, &config());
        let offer = |millis| owner.offer(b"", &[b"x"], Duration::from_millis(millis)).unwrap();
        let (long, short, longest) = (offer(300), offer(50), offer(600_000));
        eventually("the short one ended", || owner.counts().offers == 2);
        assert!(matches!(fetch(&*owner, &short), Err(Error::Gone(_))));
        assert!(fetch(&*owner, &long).is_ok());
        eventually("the long one ended", || owner.counts().offers == 1);
        assert!(fetch(&*owner, &longest).is_ok());
    }

    fn old_tickets_of_a_restarted_owner_are_gone(kind) {
        let puller = end(kind, &config());
        let first = Tcp::new(&config(), &TcpAddress::default()).unwrap();
        let (ticket, address) = match kind {
            Kind::Shm => (end(kind, &config()).offer(b"", &[b"old"], LONG).unwrap(), None),
            Kind::Tcp => {
                let ticket = first.offer(b"", &[b"old"], LONG).unwrap();
                let deepinfer_kvtransfer::Address::Tcp(address) = *ticket.address() else { panic!("not TCP") };
                (ticket, Some(address))
            }
        };
        drop(first);
        // A new owner, under the old address where the back end has such a thing, with an offer of its own.
        let second: Box<dyn KvTransfer> = match address {
            None => Box::new(SharedMemory::new(&config()).unwrap()),
            Some(listen) => Box::new(Tcp::new(&config(), &TcpAddress { listen, advertise: None }).unwrap()),
        };
        let fresh = second.offer(b"", &[b"new"], LONG).unwrap();
        assert!(matches!(fetch(&*puller, &ticket), Err(Error::Gone(_))));
        assert!(!puller.release(&ticket).unwrap());
        assert_eq!(fetch(&*puller, &fresh).unwrap().1, b"new");
    }

    fn bounds_on_offers_and_bytes_hold_and_are_given_back(kind) {
        let owner = end(kind, &with_limits(|limits| (limits.offers, limits.bytes, limits.meta) = (2, 1000, 10)));
        let refused = |result: Result<Ticket, Error>| match result {
            Err(Error::Full { what, need, have }) => (what, need, have),
            other => panic!("{other:?}"),
        };
        let first = owner.offer(b"mm", &[&bytes(500, 1)], LONG).unwrap();
        assert_eq!(refused(owner.offer(b"", &[&bytes(499, 1)], LONG)), ("bytes", 1001, 1000));
        let second = owner.offer(b"", &[&bytes(498, 1)], LONG).unwrap();
        assert_eq!(refused(owner.offer(b"", &[], LONG)), ("offers", 3, 2));
        owner.release(&first).unwrap();
        owner.release(&second).unwrap();
        assert!(owner.offer(b"", &[&bytes(1000, 1)], LONG).is_ok());
        assert!(matches!(owner.offer(&bytes(11, 1), &[], LONG), Err(Error::TooLarge { need: 11, have: 10, .. })));
    }

    fn leases_out_of_range_are_refused(kind) {
        let owner = end(kind, &with_limits(|limits| limits.lease = Duration::from_secs(9)));
        for lease in [Duration::ZERO, Duration::from_secs(10), Duration::MAX] {
            assert!(matches!(owner.offer(b"", &[], lease), Err(Error::Invalid(_))));
        }
        assert_eq!(owner.counts().offers, 0);
    }

    fn buffers_of_another_length_are_refused_before_anything_moves(kind) {
        let (owner, puller) = (end(kind, &config()), end(kind, &with_limits(|limits| limits.pull_bytes = 50)));
        let ticket = owner.offer(b"", &[&bytes(100, 1)], LONG).unwrap();
        let (mut short, mut long) = ([0; 99], [0; 101]);
        let got = owner.pull(&ticket, Target::Buffers(&mut [&mut short]));
        assert!(matches!(got, Err(Error::TooLarge { need: 100, have: 99, .. })));
        assert!(matches!(owner.pull(&ticket, Target::Buffers(&mut [&mut long])), Err(Error::Refused(_))));
        assert_eq!((short, long), ([0; 99], [0; 101]));
        assert!(matches!(fetch(&*puller, &ticket), Err(Error::TooLarge { need: 100, have: 50, .. })));
    }

    fn ends_of_another_layout_refuse_each_other(kind) {
        let (owner, puller) = (end(kind, &config()), end(kind, &Config { layout: b"other".to_vec(), ..config() }));
        let ticket = owner.offer(b"", &[b"abc"], LONG).unwrap();
        assert!(matches!(fetch(&*puller, &ticket), Err(Error::Refused(_))));
        assert!(matches!(puller.release(&ticket), Err(Error::Refused(_))));
        assert_eq!(owner.counts().offers, 1);
    }

    fn without_the_token_nothing_is_pulled_or_released(kind) {
        let with = |token: Option<&[u8]>| end(kind, &Config { token: token.map(<[u8]>::to_vec), ..config() });
        let (owner, friend) = (with(Some(b"a token of many bytes")), with(Some(b"a token of many bytes")));
        let ticket = owner.offer(b"", &[b"abc"], LONG).unwrap();
        for stranger in [with(None), with(Some(b"another token of bytes"))] {
            assert!(matches!(fetch(&*stranger, &ticket), Err(Error::Refused(_))));
            assert!(matches!(stranger.release(&ticket), Err(Error::Refused(_))));
        }
        assert_eq!(fetch(&*friend, &ticket).unwrap().1, b"abc");
        assert!(friend.release(&ticket).unwrap());
    }

    fn many_pull_and_release_at_once(kind) {
        let owner = end(kind, &config());
        let ends: Vec<_> = (0..4).map(|_| end(kind, &config())).collect();
        let payload = bytes(300_000, 9);
        for _ in 0..20 {
            let ticket = owner.offer(b"m", &[&payload], LONG).unwrap();
            let barrier = Barrier::new(ends.len());
            let work = |end: &dyn KvTransfer| {
                barrier.wait();
                match fetch(end, &ticket) {
                    Ok((meta, got)) => assert!(meta == b"m" && got == payload),
                    Err(error) => assert!(matches!(error, Error::Gone(_)), "{error}"),
                }
                usize::from(end.release(&ticket).unwrap())
            };
            let released: usize = std::thread::scope(|scope| {
                let threads: Vec<_> = ends.iter().map(|end| scope.spawn(|| work(&**end))).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).sum()
            });
            assert_eq!(released, 1);
            eventually("everything given back", || owner.counts() == deepinfer_kvtransfer::Counts::default());
        }
    }

    fn closing_ends_offers_and_pulls_that_come_later_are_gone_or_unreachable(kind) {
        let (owner, puller) = (end(kind, &config()), end(kind, &config()));
        let ticket = owner.offer(b"", &[b"abc"], LONG).unwrap();
        drop(owner);
        let error = fetch(&*puller, &ticket).unwrap_err();
        match kind {
            Kind::Shm => assert!(matches!(error, Error::Gone(_)), "{error}"),
            Kind::Tcp => assert!(matches!(error, Error::Unreachable { .. }), "{error}"),
        }
    }
}

#[test]
fn a_ticket_of_the_other_back_end_is_refused() {
    let (shm, tcp) = (end(Kind::Shm, &config()), end(Kind::Tcp, &config()));
    for (one, other) in [(&shm, &tcp), (&tcp, &shm)] {
        let ticket = one.offer(b"", &[], LONG).unwrap();
        assert!(matches!(fetch(&**other, &ticket), Err(Error::Refused(_))));
        assert!(matches!(other.release(&ticket), Err(Error::Refused(_))));
    }
}

#[test]
fn addresses_that_nobody_could_reach_or_anybody_could_are_refused() {
    let any = "0.0.0.0:0".parse().unwrap();
    let refused = |config: &Config, address: TcpAddress| matches!(Tcp::new(config, &address), Err(Error::Invalid(_)));
    let token = Config { token: Some(b"0123456789abcdef".to_vec()), ..config() };
    assert!(refused(&token, TcpAddress { listen: any, advertise: None }));
    let advertised = TcpAddress { listen: any, advertise: Some("127.0.0.1:0".parse().unwrap()) };
    assert!(refused(&config(), advertised.clone()));
    let owner = Tcp::new(&token, &advertised).unwrap();
    let ticket = owner.offer(b"", &[b"abc"], LONG).unwrap();
    assert_eq!(fetch(&owner, &ticket).unwrap().1, b"abc");
}

#[test]
fn settings_that_make_no_sense_are_refused() {
    let refused = |config: &Config| matches!(SharedMemory::new(config), Err(Error::Invalid(_)));
    assert!(refused(&Config { token: Some(b"short".to_vec()), ..config() }));
    assert!(refused(&with_limits(|limits| limits.meta = 2 << 20)));
    assert!(refused(&with_limits(|limits| limits.connections = 0)));
    assert!(refused(&with_limits(|limits| limits.stall = Duration::ZERO)));
}
