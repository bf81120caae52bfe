//! Owners that lie about lengths, send other bytes, or fall silent: the puller says which, takes no more memory than it agreed to, and
//! never waits for ever.
#![allow(clippy::unwrap_used, clippy::panic)]

mod kit;

use std::io::{IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use deepinfer_kvtransfer::frame::{Greeting, Reply, Request, Status};
use deepinfer_kvtransfer::{Address, Config, Error, KvTransfer, Target, Ticket};
use kit::raw::{Raw, epoch, impostor, redirect};
use kit::{Kind, LONG, bytes, config, end, fetch, with_limits};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

/// A ticket that leads to an impostor, which gets as far as `serve` with the owner's true reply.
fn lured(kind: Kind, payload: &[u8], serve: impl Fn(&mut Raw, Reply) + Send + Sync + 'static) -> Ticket {
    let owner = end(kind, &config());
    let ticket = owner.offer(b"meta", &[payload], LONG).unwrap();
    let reply = Reply { status: Status::Granted, meta: 4, length: ticket.length(), checksum: ticket.checksum() };
    let epoch = epoch(&ticket);
    let address = impostor(kind, move |mut raw| {
        raw.write_all(&Greeting { epoch, nonce: [1; 16] }.encode()).unwrap();
        let _: [u8; Request::SIZE] = raw.frame();
        serve(&mut raw, reply);
        // Long enough for the puller to have its say first.
        raw.patience(Duration::from_secs(5));
        raw.is_closed();
    });
    redirect(&ticket, &address)
}

/// Sends one byte with descriptors.
fn send_fds(raw: &Raw, fds: &[OwnedFd]) {
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    }
    rustix::net::sendmsg(raw, &[IoSlice::new(b"M")], &mut control, SendFlags::NOSIGNAL).unwrap();
}

fn memory(bytes: &[u8], sealed: bool) -> OwnedFd {
    let fd = rustix::fs::memfd_create(c"test", MemfdFlags::ALLOW_SEALING).unwrap();
    let mut file = std::fs::File::from(fd);
    file.write_all(bytes).unwrap();
    std::io::Seek::rewind(&mut file).unwrap();
    if sealed {
        rustix::fs::fcntl_add_seals(&file, SealFlags::WRITE | SealFlags::GROW).unwrap();
    }
    file.into()
}

/// Sends the payload as the back end does.
fn send(raw: &mut Raw, payload: &[u8]) {
    match raw {
        Raw::Unix(_) => send_fds(raw, &[memory(payload, true)]),
        Raw::Tcp(_) => raw.write_all(payload).unwrap(),
    }
}

fn impatient() -> Config {
    with_limits(|limits| {
        (limits.handshake, limits.stall, limits.pull) =
            (Duration::from_millis(200), Duration::from_millis(200), Duration::from_millis(600));
    })
}

/// Pulls; the vector is as it was after any error.
fn refused(puller: &dyn KvTransfer, ticket: &Ticket) -> Error {
    let mut into = b"before".to_vec();
    let error = puller.pull(ticket, Target::Fresh(&mut into)).unwrap_err();
    assert_eq!(into, b"before");
    assert!(into.capacity() < 1 << 30, "memory was taken for what never came");
    error
}

both! {
    fn an_honest_impostor_would_be_believed(kind) {
        // The control: what the other tests change is what makes them fail.
        let payload = bytes(600_000, 1);
        let sent = payload.clone();
        let ticket = lured(kind, &payload, move |raw, reply| {
            raw.write_all(&reply.encode()).unwrap();
            raw.write_all(b"meta").unwrap();
            send(raw, &sent);
        });
        assert_eq!(fetch(&*end(kind, &config()), &ticket).unwrap(), (b"meta".to_vec(), payload));
    }

    fn one_changed_byte_anywhere_is_corrupt(kind) {
        let payload = bytes(600_000, 1);
        for at in [0, 1, 262_143, 262_144, 599_999] {
            let mut sent = payload.clone();
            sent[at] ^= 1;
            let ticket = lured(kind, &payload, move |raw, reply| {
                raw.write_all(&reply.encode()).unwrap();
                raw.write_all(b"meta").unwrap();
                send(raw, &sent);
            });
            assert!(matches!(refused(&*end(kind, &config()), &ticket), Error::Corrupt(_)), "{at}");
        }
        let ticket = lured(kind, &payload.clone(), move |raw, reply| {
            raw.write_all(&reply.encode()).unwrap();
            raw.write_all(b"meto").unwrap();
            send(raw, &payload);
        });
        assert!(matches!(refused(&*end(kind, &config()), &ticket), Error::Corrupt(_)));
    }

    fn other_lengths_than_the_tickets_are_noticed_before_memory_is_taken(kind) {
        let huge = u64::MAX;
        for change in [(4, huge, 0), (4, 9, 0), (4, 11, 0), (4, 10, 1), (huge, 10, 0), (1 << 40, 10, 0), (70_000, 10, 0)] {
            let ticket = lured(kind, &[7; 10], move |raw, reply| {
                let (meta, length, checksum) = (change.0, change.1, reply.checksum ^ change.2);
                raw.write_all(&Reply { meta, length, checksum, ..reply }.encode()).unwrap();
            });
            let error = refused(&*end(kind, &config()), &ticket);
            assert!(matches!(error, Error::Corrupt(_) | Error::TooLarge { .. }), "{error}");
        }
    }

    fn a_ticket_that_claims_a_huge_length_costs_nothing(kind) {
        let owner = end(kind, &config());
        let ticket = owner.offer(b"", &[b"abc"], LONG).unwrap();
        for length in [60u64 << 30, 1 << 62, u64::MAX] {
            let mut forged = ticket.to_bytes();
            forged[48..56].copy_from_slice(&length.to_le_bytes());
            let forged = Ticket::from_bytes(&forged).unwrap();
            let error = refused(&*end(kind, &config()), &forged);
            assert!(matches!(error, Error::Corrupt(_) | Error::TooLarge { .. }), "{error}");
        }
    }

    fn silence_and_an_end_at_any_place_are_unreachable(kind) {
        let owner = end(kind, &config());
        let payload = bytes(600_000, 1);
        let ticket = owner.offer(b"meta", &[&payload], LONG).unwrap();
        let greeting = Greeting { epoch: epoch(&ticket), nonce: [1; 16] }.encode();
        let reply = Reply { status: Status::Granted, meta: 4, length: 600_000, checksum: ticket.checksum() }.encode();
        let said = [&greeting[..], &reply, b"meta", &payload].concat();
        let puller = end(kind, &impatient());
        for len in [0, 1, 31, 32, 33, 63, 64, 66, 68, 69, 300_000] {
            if kind == Kind::Shm && len > 68 {
                continue; // A descriptor comes whole or not at all.
            }
            for silent in [true, false] {
                let said = said[..len].to_vec();
                let address = impostor(kind, move |mut raw| {
                    raw.write_all(&said).unwrap();
                    if silent {
                        raw.is_closed();
                    }
                });
                let start = Instant::now();
                let error = refused(&*puller, &redirect(&ticket, &address));
                assert!(matches!(error, Error::Unreachable { .. }), "{len} {silent}: {error}");
                assert!(start.elapsed() < Duration::from_secs(3), "{len} {silent}: {:?}", start.elapsed());
            }
        }
    }

    fn one_byte_at_a_time_ends_at_the_limit(kind) {
        let ticket = lured(kind, &vec![7; 100_000], |raw, reply| {
            raw.write_all(&reply.encode()).unwrap();
            // Never silent for long; shared memory is slow with the description.
            let drips = if matches!(raw, Raw::Unix(_)) { b"met" } else { &[7; 1000][..] };
            if matches!(raw, Raw::Tcp(_)) {
                raw.write_all(b"meta").unwrap();
            }
            for byte in drips.iter().cycle().take(if drips.len() == 3 { 3 } else { 1000 }) {
                if raw.write_all(&[*byte]).is_err() {
                    return;
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let start = Instant::now();
        assert!(matches!(refused(&*end(kind, &impatient()), &ticket), Error::Unreachable { .. }));
        assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    }

    fn what_is_no_owner_or_another_version_is_refused(kind) {
        let owner = end(kind, &config());
        let ticket = owner.offer(b"", &[b"abc"], LONG).unwrap();
        let mut next = Greeting { epoch: epoch(&ticket), nonce: [1; 16] }.encode();
        next[4] = 2;
        let mut odd = Greeting { epoch: epoch(&ticket), nonce: [1; 16] }.encode();
        odd[6] = 1;
        for said in [b"HTTP/1.1 400 Bad Request\r\nServer: x\r\n\r\n".to_vec(), next.to_vec(), odd.to_vec(), vec![0; 64]] {
            let address = impostor(kind, move |mut raw| {
                let _ = raw.write_all(&said);
            });
            assert!(matches!(refused(&*end(kind, &config()), &redirect(&ticket, &address)), Error::Refused(_)));
        }
        let ticket = lured(kind, b"abc", |raw, reply| {
            let mut frame = reply.encode();
            frame[6] = 200;
            raw.write_all(&frame).unwrap();
        });
        assert!(matches!(refused(&*end(kind, &config()), &ticket), Error::Refused(_)));
    }

    fn under_a_token_a_forged_ticket_is_refused_before_connecting(kind) {
        let with = Config { token: Some(b"0123456789abcdef".to_vec()), ..config() };
        let owner = end(kind, &with);
        let ticket = owner.offer(b"", &[b"abc"], LONG).unwrap();
        let called = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let flag = std::sync::Arc::clone(&called);
        let address = impostor(kind, move |_| flag.store(true, std::sync::atomic::Ordering::Relaxed));
        let puller = end(kind, &with);
        let forged = redirect(&ticket, &address);
        assert!(matches!(refused(&*puller, &forged), Error::Refused(_)));
        assert!(matches!(puller.release(&forged), Err(Error::Refused(_))));
        assert!(!called.load(std::sync::atomic::Ordering::Relaxed));
        assert_eq!(fetch(&*puller, &ticket).unwrap().1, b"abc");
    }
}

/// Ends of pipes that must stay open.
static KEPT: std::sync::Mutex<Vec<OwnedFd>> = std::sync::Mutex::new(Vec::new());

#[test]
fn what_is_not_sealed_memory_of_the_right_length_is_not_read() {
    let payload = bytes(5000, 1);
    let puller = end(Kind::Shm, &impatient());
    let reject = |fds: fn() -> Vec<OwnedFd>| {
        let ticket = lured(Kind::Shm, &payload, move |raw, reply| {
            raw.write_all(&reply.encode()).unwrap();
            raw.write_all(b"meta").unwrap();
            send_fds(raw, &fds());
        });
        refused(&*puller, &ticket)
    };
    assert!(matches!(reject(Vec::new), Error::Corrupt(_)));
    assert!(matches!(reject(|| vec![memory(&bytes(5000, 1), false)]), Error::Corrupt(_)));
    // A pipe that nobody writes to must not be waited for.
    let pipe = || {
        let (read, write) = std::io::pipe().unwrap();
        KEPT.lock().unwrap().push(write.into());
        vec![read.into()]
    };
    assert!(matches!(reject(pipe), Error::Corrupt(_)));
    assert!(matches!(reject(|| vec![std::fs::File::open("/dev/zero").unwrap().into()]), Error::Corrupt(_)));
    assert!(matches!(reject(|| vec![memory(&bytes(4999, 1), true)]), Error::Gone(_)));
    // More descriptors than one are closed, not kept.
    let before = open_descriptors();
    for _ in 0..20 {
        reject(|| (0..3).map(|_| memory(b"other", true)).collect());
    }
    assert!(open_descriptors() < before + 40, "{before} to {}", open_descriptors());
}

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn nobody_listening_is_told_at_once() {
    let owner = end(Kind::Tcp, &config());
    let ticket = owner.offer(b"", &[b"abc"], LONG).unwrap();
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let start = Instant::now();
    let error = refused(&*owner, &redirect(&ticket, &Address::Tcp(free)));
    assert!(matches!(error, Error::Unreachable { .. }));
    let (shm, name) = (end(Kind::Shm, &config()), Address::Shm("deepinfer-kv.nobody".to_owned()));
    let ticket = shm.offer(b"", &[b"abc"], LONG).unwrap();
    assert!(matches!(refused(&*shm, &redirect(&ticket, &name)), Error::Gone(_)));
    assert!(start.elapsed() < Duration::from_secs(2));
}
