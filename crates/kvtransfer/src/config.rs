//! Settings of one end: what it serves, what it accepts, and every bound.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use crate::error::Error;

/// Most bytes of the opaque description that goes with an offer.
pub const MAX_META: usize = 1 << 20;

/// Bounds and timeouts. None is without a limit: a peer can cost no more than these say.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Offers alive at a time. Each takes one file descriptor.
    pub offers: usize,
    /// Bytes of all offers alive.
    pub bytes: u64,
    /// Bytes that one pull may bring in.
    pub pull_bytes: u64,
    /// Bytes of one offer's description; at most [`MAX_META`].
    pub meta: usize,
    /// Connections served at a time; one more costs the oldest that has not yet said what it wants.
    pub connections: usize,
    /// Longest lease that an offer may ask for.
    pub lease: Duration,
    /// For a connection to be made.
    pub connect: Duration,
    /// For greeting, request and reply together.
    pub handshake: Duration,
    /// Longest silence in the middle of a payload.
    pub stall: Duration,
    /// Longest whole pull. An offer outlives its lease by no more than this.
    pub pull: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            offers: 256,
            bytes: 64 << 30,
            pull_bytes: 64 << 30,
            meta: 64 << 10,
            connections: 64,
            lease: Duration::from_secs(3600),
            connect: Duration::from_secs(5),
            handshake: Duration::from_secs(5),
            stall: Duration::from_secs(10),
            pull: Duration::from_secs(120),
        }
    }
}

/// Everything an end is made from.
#[derive(Clone, Debug, Default)]
pub struct Config {
    /// What the bytes mean (model, formats, page sizes, ranks): two ends understand each other only if it is equal.
    pub layout: Vec<u8>,
    /// Shared secret. With it, a peer without it gets nothing, and a ticket that it did not sign is refused before connecting.
    pub token: Option<Vec<u8>>,
    /// Bounds.
    pub limits: Limits,
}

impl Config {
    pub(crate) fn check(&self) -> Result<(), Error> {
        let limits = &self.limits;
        let wrong = |what: &str| Err(Error::Invalid(what.to_owned()));
        if self.token.as_ref().is_some_and(|token| token.len() < 16) {
            return wrong("the token is shorter than 16 bytes; take a random one");
        }
        if limits.meta > MAX_META {
            return wrong("the limit on an offer's description is over 1 MiB; large data belongs into segments");
        }
        if limits.connections == 0 || limits.offers == 0 {
            return wrong("the limits on connections and offers must be at least 1");
        }
        for span in [limits.lease, limits.connect, limits.handshake, limits.stall, limits.pull] {
            if span.is_zero() || span > Duration::from_secs(7 * 24 * 3600) {
                return wrong("a time limit is 0 or longer than a week");
            }
        }
        Ok(())
    }
}

/// Where a TCP end listens.
#[derive(Clone, Debug)]
pub struct TcpAddress {
    /// Bound address; port 0 = any free one.
    pub listen: SocketAddr,
    /// Address to write into tickets, where it is not the bound one (all interfaces, port mapping); port 0 = the bound one.
    pub advertise: Option<SocketAddr>,
}

impl Default for TcpAddress {
    /// This machine only.
    fn default() -> Self {
        Self { listen: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0), advertise: None }
    }
}
