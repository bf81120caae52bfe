//! Real processes that die or stop at bad moments. A child is this test binary again, told its part by an environment variable.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod kit;

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use deepinfer_kvtransfer::frame::{Operation, Status};
use deepinfer_kvtransfer::{Counts, Error, EventKind, Ticket};
use kit::raw::Raw;
use kit::{Kind, LONG, bytes, config, end, events, eventually, fetch, with_limits};

const PART: &str = "KVTRANSFER_TEST_PART";
const SIZE: usize = 16 << 20;

/// A child process and its two pipes; killed when dropped.
struct Peer {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Peer {
    fn start(kind: Kind, part: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child", "--nocapture", "--test-threads=1"])
            .env(PART, format!("{kind:?} {part}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (to, from) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, to, from }
    }

    fn tell(&mut self, text: &str) {
        writeln!(self.to, "{text}").unwrap();
    }

    /// The rest of the next line that begins with `word`; the test harness prints lines of its own.
    fn hear(&mut self, word: &str) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(self.from.read_line(&mut line).unwrap() > 0, "the child ended before it said {word:?}");
            if let Some(at) = line.find(word) {
                return line[at + word.len()..].trim().to_owned();
            }
        }
    }

    fn ticket(&mut self) -> Ticket {
        self.hear("TICKET").parse().unwrap()
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // It may be dead already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Not a test by itself: the part of a child.
#[test]
fn child() {
    let Ok(part) = std::env::var(PART) else { return };
    let (kind, part) = part.split_once(' ').unwrap();
    let kind = if kind == "Shm" { Kind::Shm } else { Kind::Tcp };
    let mut lines = std::io::stdin().lines().map_while(Result::ok);
    match part {
        // Offers at each line, for ever.
        "owner" | "owner that does not ignore SIGPIPE" => {
            if part != "owner" {
                // SAFETY: sets the default action, which has no handler; the pullers' tests see what it leads to.
                unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
            }
            let owner = end(kind, &config());
            for line in lines {
                let payload = bytes(SIZE, line.parse().unwrap());
                println!("\nTICKET {}", owner.offer(b"meta", &[&payload], LONG).unwrap());
            }
        }
        // Has few descriptors; offers until it has none, then lets go of all but the first.
        "owner without descriptors" => {
            let few = libc::rlimit { rlim_cur: 40, rlim_max: 40 };
            // SAFETY: reads one `rlimit`, which is there.
            assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const few) }, 0);
            let owner = end(kind, &config());
            let mut tickets = Vec::new();
            let error = loop {
                match owner.offer(b"", &[b"abc"], LONG) {
                    Ok(ticket) => tickets.push(ticket),
                    Err(error) => break error,
                }
            };
            assert!(matches!(error, Error::System { .. }), "{error}");
            for ticket in tickets.drain(1..) {
                assert!(owner.release(&ticket).unwrap());
            }
            println!("\nTICKET {}", tickets[0]);
            lines.next();
        }
        // Gets a grant, takes a little, and waits to be killed.
        "puller" => {
            let ticket: Ticket = lines.next().unwrap().parse().unwrap();
            let mut raw = Raw::connect(ticket.address());
            assert_eq!(raw.ask(&ticket, &config(), Operation::Pull).status, Status::Granted);
            raw.read_exact(&mut [0; 5]).unwrap();
            println!("\nGRANTED");
            lines.next();
        }
        other => panic!("no part {other:?}"),
    }
}

both! {
    fn an_owner_killed_at_any_moment_ends_a_pull_with_all_bytes_or_an_error(kind) {
        let puller = end(kind, &config());
        let mut ends = [0; 2];
        for round in 0..8 {
            let mut owner = Peer::start(kind, "owner");
            owner.tell("7");
            let ticket = owner.ticket();
            // From "before it connects" to "in the middle of the copy".
            let delay = Duration::from_micros([0, 300, 1000, 3000, 6000, 10_000, 16_000, 30_000][round]);
            let (result, took) = std::thread::scope(|scope| {
                let pull = scope.spawn(|| {
                    let start = Instant::now();
                    (fetch(&*puller, &ticket), start.elapsed())
                });
                std::thread::sleep(delay);
                owner.kill();
                pull.join().unwrap()
            });
            assert!(took < Duration::from_secs(5), "{took:?}");
            match result {
                Ok((meta, payload)) => {
                    assert!(meta == b"meta" && payload == bytes(SIZE, 7));
                    ends[0] += 1;
                }
                Err(Error::Gone(_) | Error::Unreachable { .. }) => ends[1] += 1,
                Err(other) => panic!("{other}"),
            }
            assert!(matches!(fetch(&*puller, &ticket), Err(Error::Gone(_) | Error::Unreachable { .. })));
        }
        assert!(ends[1] > 0, "no kill came in time: {ends:?}");
    }

    fn a_killed_owner_leaves_nothing_behind(kind) {
        let mut owner = Peer::start(kind, "owner");
        owner.tell("7");
        let ticket = owner.ticket();
        let pid = owner.child.id();
        let traces = || {
            let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
            let files = std::fs::read_dir("/dev/shm").unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
            sockets.lines().filter(|line| line.contains(&format!("deepinfer-kv.{pid}."))).count()
                + files.filter(|name| name.contains("deepinfer")).count()
        };
        assert_eq!(traces(), usize::from(kind == Kind::Shm), "only the listening name, while it lives");
        owner.kill();
        assert_eq!(traces(), 0);
        assert!(matches!(fetch(&*end(kind, &config()), &ticket), Err(Error::Gone(_) | Error::Unreachable { .. })));
    }

    fn an_owner_that_stops_is_unreachable_and_comes_back(kind) {
        let puller = end(kind, &with_limits(|limits| limits.handshake = Duration::from_millis(300)));
        let mut owner = Peer::start(kind, "owner");
        owner.tell("7");
        let ticket = owner.ticket();
        owner.signal(rustix::process::Signal::STOP);
        let start = Instant::now();
        assert!(matches!(fetch(&*puller, &ticket), Err(Error::Unreachable { .. })));
        assert!(matches!(puller.release(&ticket), Err(Error::Unreachable { .. })));
        assert!(start.elapsed() < Duration::from_secs(3));
        owner.signal(rustix::process::Signal::CONT);
        assert_eq!(fetch(&*puller, &ticket).unwrap().1, bytes(SIZE, 7));
    }

    fn a_puller_killed_in_the_middle_lets_go_and_the_lease_still_ends(kind) {
        let owner = end(kind, &config());
        let mut puller = Peer::start(kind, "puller");
        let lease = Duration::from_millis(500);
        let ticket = owner.offer(b"meta", &[&bytes(SIZE, 1)], lease).unwrap();
        puller.tell(&ticket.to_string());
        puller.hear("GRANTED");
        assert_eq!(owner.counts().pulls, 1);
        puller.kill();
        eventually("given back", || owner.counts() == Counts::default());
        assert_eq!(events(&*owner, &ticket), [EventKind::Expired]);
        assert!(matches!(fetch(&*owner, &ticket), Err(Error::Gone(_))));
    }

    fn a_puller_that_stops_is_cut_and_the_others_are_served(kind) {
        let owner = end(kind, &with_limits(|limits| (limits.stall, limits.pull) = (Duration::from_millis(300), Duration::from_secs(2))));
        let mut puller = Peer::start(kind, "puller");
        let ticket = owner.offer(b"meta", &[&bytes(SIZE, 1)], LONG).unwrap();
        puller.tell(&ticket.to_string());
        puller.hear("GRANTED");
        puller.signal(rustix::process::Signal::STOP);
        assert_eq!(fetch(&*end(kind, &config()), &ticket).unwrap().1, bytes(SIZE, 1));
        eventually("cut", || owner.counts().pulls == 0);
        assert_eq!(owner.counts().offers, 1);
    }

    fn an_owner_without_descriptors_refuses_offers_and_serves_who_asks(kind) {
        let mut owner = Peer::start(kind, "owner without descriptors");
        let ticket = owner.ticket();
        let puller = end(kind, &config());
        // More silent connections than it has descriptors, and not as many as it would serve.
        let silent: Vec<Raw> = (0..50).map(|_| Raw::connect(ticket.address())).collect();
        let start = Instant::now();
        assert_eq!(fetch(&*puller, &ticket).unwrap().1, b"abc");
        assert!(start.elapsed() < Duration::from_secs(4), "not before the silent ones' time was over");
        drop(silent);
        assert!(puller.release(&ticket).unwrap());
    }

    fn a_puller_that_goes_away_does_not_end_an_owner_by_a_signal(kind) {
        let mut owner = Peer::start(kind, "owner that does not ignore SIGPIPE");
        owner.tell("7");
        let ticket = owner.ticket();
        for _ in 0..3 {
            let mut raw = Raw::connect(ticket.address());
            assert_eq!(raw.ask(&ticket, &config(), Operation::Pull).status, Status::Granted);
            drop(raw);
        }
        assert_eq!(fetch(&*end(kind, &config()), &ticket).unwrap().1, bytes(SIZE, 7));
        owner.tell("8");
        let next = owner.ticket();
        assert_eq!(fetch(&*end(kind, &config()), &next).unwrap().1, bytes(SIZE, 8));
    }
}
