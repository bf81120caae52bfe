//! Hand-over of KV bytes from the process that computed them to the one that goes on.
//!
//! Owns: the trait [`KvTransfer`] and its two back ends, [`SharedMemory`] (one machine) and [`Tcp`]; offers, their leases and
//! memory; tickets; the wire ([`frame`]); threads and sockets of its own, which a step loop never waits for.
//!
//! Never touches: what the bytes mean, blocks and sequences, Python. A caller copies pages out, offers them, and may reuse them at
//! once: an offer is a copy.
//!
//! An offer lives until it is released, from either side, or until its lease ends, traffic or not. A pull that has begun is served to
//! its end, at most [`Limits::pull`] long. A ticket of a dead or restarted owner is [`Error::Gone`] and never another offer's bytes:
//! it carries the owner's epoch. Both back ends keep an offer in anonymous shared memory, which the kernel frees with its last
//! holder: nothing has a name, so nothing is left to clean up after a kill.

mod auth;
mod checksum;
mod client;
mod config;
mod error;
pub mod frame;
mod memory;
mod offers;
mod server;
mod shared;
mod shm;
mod signals;
mod stream;
mod tcp;
mod ticket;

use std::time::Duration;

pub use auth::Auth;
pub use client::Target;
pub use config::{Config, Limits, MAX_META, TcpAddress};
pub use error::Error;
pub use offers::{Counts, Event, EventKind};
pub use shm::SharedMemory;
pub use tcp::Tcp;
pub use ticket::{Address, MAX_ADDRESS, OfferId, Ticket, VERSION};

/// One end: it offers, and pulls what others of its kind offer. All calls are safe from any thread; `offer` and `pull` take as long
/// as the copy does, the others do not wait for anything but a peer's answer.
pub trait KvTransfer: Send + Sync {
    /// Copies the segments, one after the other, and lets whoever has the ticket pull them for as long as the lease lasts.
    ///
    /// # Errors
    /// [`Error::Full`], [`Error::TooLarge`] (description), [`Error::Invalid`] (lease), [`Error::Closed`], [`Error::System`].
    fn offer(&self, meta: &[u8], segments: &[&[u8]], lease: Duration) -> Result<Ticket, Error>;

    /// Brings the bytes of a ticket, checked for length and checksum, and gives the description. The offer stays.
    ///
    /// # Errors
    /// [`Error::Gone`], [`Error::Corrupt`], [`Error::Unreachable`], [`Error::Refused`], [`Error::TooLarge`], [`Error::Closed`].
    fn pull(&self, ticket: &Ticket, into: Target<'_>) -> Result<Vec<u8>, Error>;

    /// Ends an offer, own or another's; false if it had ended. Pulls in progress go on.
    ///
    /// # Errors
    /// [`Error::Unreachable`] (the lease will end it), [`Error::Refused`], [`Error::Closed`].
    fn release(&self, ticket: &Ticket) -> Result<bool, Error>;

    /// Appends what happened to own offers since the last call. Never waits.
    fn poll(&self, events: &mut Vec<Event>);

    /// Gauges of own offers.
    fn counts(&self) -> Counts;

    /// What own tickets carry.
    fn address(&self) -> &Address;
}
