//! Any machine: the payload comes over the connection.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use crate::KvTransfer;
use crate::client::Target;
use crate::config::{Config, TcpAddress};
use crate::error::Error;
use crate::offers::{Counts, Event};
use crate::server::{Listener, Server};
use crate::shared::Shared;
use crate::ticket::{Address, Ticket};

/// An end that listens on a TCP port; on the loopback address unless told otherwise.
pub struct Tcp {
    shared: Arc<Shared>,
    address: Address,
    _server: Server,
}

impl Tcp {
    /// Starts to listen.
    ///
    /// # Errors
    /// [`Error::Invalid`] (settings; an address that cannot be reached from elsewhere without one to advertise), [`Error::System`].
    pub fn new(config: &Config, address: &TcpAddress) -> Result<Self, Error> {
        let shared = Arc::new(Shared::new(config)?);
        if address.advertise.unwrap_or(address.listen).ip().is_unspecified() {
            return Err(Error::Invalid(format!(
                "{} is every interface; tickets need the one address to advertise",
                address.listen
            )));
        }
        if config.token.is_none() && !address.listen.ip().is_loopback() {
            return Err(Error::Invalid(format!("listening on {} needs a token", address.listen)));
        }
        let listener = TcpListener::bind(address.listen).map_err(Error::io("cannot listen"))?;
        let bound = listener.local_addr().map_err(Error::io("cannot listen"))?;
        let told = address.advertise.unwrap_or(bound);
        let port = if told.port() == 0 { bound.port() } else { told.port() };
        let address = Address::Tcp(SocketAddr::new(told.ip(), port));
        Ok(Self { address, _server: Server::start(Arc::clone(&shared), Listener::Tcp(listener))?, shared })
    }
}

impl KvTransfer for Tcp {
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
        Address::Tcp(_) => Ok(()),
        Address::Shm(_) => Err(Error::Refused("a ticket of the shared-memory back end; this end does TCP".to_owned())),
    }
}
