//! One machine: the payload is passed as a descriptor of sealed shared memory and copied once, by the puller.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::sync::Arc;
use std::time::Duration;

use crate::KvTransfer;
use crate::client::Target;
use crate::config::Config;
use crate::error::Error;
use crate::offers::{Counts, Event};
use crate::server::{Listener, Server};
use crate::shared::{Shared, random};
use crate::ticket::{Address, OfferId, Ticket};

/// An end for peers on the same machine, of the same user and network namespace.
pub struct SharedMemory {
    shared: Arc<Shared>,
    address: Address,
    _server: Server,
}

impl SharedMemory {
    /// Starts to listen, under a name that no other process has or can guess.
    ///
    /// # Errors
    /// [`Error::Invalid`] (settings), [`Error::System`].
    pub fn new(config: &Config) -> Result<Self, Error> {
        let shared = Arc::new(Shared::new(config)?);
        let name = format!("deepinfer-kv.{}.{:?}", std::process::id(), OfferId(random()?));
        let bound = SocketAddr::from_abstract_name(&name).and_then(|address| UnixListener::bind_addr(&address));
        let listener = Listener::Unix(bound.map_err(Error::io("cannot listen on an abstract Unix socket"))?);
        Ok(Self { address: Address::Shm(name), _server: Server::start(Arc::clone(&shared), listener)?, shared })
    }
}

impl KvTransfer for SharedMemory {
    fn offer(&self, meta: &[u8], segments: &[&[u8]], lease: Duration) -> Result<Ticket, Error> {
        self.shared.offer(meta, segments, lease, &self.address)
    }

    fn pull(&self, ticket: &Ticket, into: Target<'_>) -> Result<Vec<u8>, Error> {
        check(ticket)?;
        self.shared.pull(ticket, into)
    }

    fn release(&self, ticket: &Ticket) -> Result<bool, Error> {
        check(ticket)?;
        self.shared.release_ticket(ticket, &self.address)
    }

    fn poll(&self, events: &mut Vec<Event>) {
        self.shared.poll(events);
    }

    fn counts(&self) -> Counts {
        self.shared.counts()
    }

    fn address(&self) -> &Address {
        &self.address
    }
}

fn check(ticket: &Ticket) -> Result<(), Error> {
    match ticket.address() {
        Address::Shm(_) => Ok(()),
        Address::Tcp(_) => Err(Error::Refused("a ticket of the TCP back end; this end does shared memory".to_owned())),
    }
}
