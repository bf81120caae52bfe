//! Both back ends behind one constructor, and small helpers.
#![allow(dead_code, clippy::unwrap_used, clippy::panic)]

pub mod raw;

use std::time::{Duration, Instant};

use deepinfer_kvtransfer::{
    Config, Error, Event, EventKind, KvTransfer, Limits, SharedMemory, Target, Tcp, TcpAddress, Ticket,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Shm,
    Tcp,
}

pub const LONG: Duration = Duration::from_secs(600);

/// Settings of tests: two ends made from the same ones understand each other.
pub fn config() -> Config {
    Config { layout: b"test layout".to_vec(), ..Config::default() }
}

pub fn with_limits(change: impl FnOnce(&mut Limits)) -> Config {
    let mut config = config();
    change(&mut config.limits);
    config
}

pub fn end(kind: Kind, config: &Config) -> Box<dyn KvTransfer> {
    match kind {
        Kind::Shm => Box::new(SharedMemory::new(config).unwrap()),
        Kind::Tcp => Box::new(Tcp::new(config, &TcpAddress::default()).unwrap()),
    }
}

/// Bytes that are nowhere the same.
pub fn bytes(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        bytes.extend_from_slice(&next().to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// Description and payload of a ticket.
pub fn fetch(end: &dyn KvTransfer, ticket: &Ticket) -> Result<(Vec<u8>, Vec<u8>), Error> {
    let mut payload = Vec::new();
    end.pull(ticket, Target::Fresh(&mut payload)).map(|meta| (meta, payload))
}

pub fn events(end: &dyn KvTransfer, ticket: &Ticket) -> Vec<EventKind> {
    let mut all: Vec<Event> = Vec::new();
    end.poll(&mut all);
    all.iter().filter(|event| event.id == ticket.id()).map(|event| event.kind).collect()
}

/// Waits until something holds; panics after ten seconds.
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(10);
    while !holds() {
        assert!(Instant::now() < until, "never: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Each function as a test for both back ends.
#[macro_export]
macro_rules! both {
    ($($(#[$meta:meta])* fn $name:ident($kind:ident) $body:block)*) => {
        $($(#[$meta])* fn $name($kind: Kind) $body)*
        mod shm {
            $(#[test] fn $name() { super::$name(super::Kind::Shm) })*
        }
        mod tcp {
            $(#[test] fn $name() { super::$name(super::Kind::Tcp) })*
        }
    };
}
