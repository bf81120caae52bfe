//! What operators do to a store: one that is served, or one in a directory that nobody serves.
//!
//! Owns: how commands reach a store. Never touches: what they mean ([`crate::server`]), terminals.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::client::{Client, ClientConfig};
use crate::error::Error;
use crate::index::check_chain;
use crate::key::Key;
use crate::media::local::{Local, LocalConfig};
use crate::root::Root;
use crate::server::admin;
use crate::store::{Store, StoreConfig};
use crate::tier::entry_points;
use crate::tls::ClientTls;
use crate::wire::Role;

/// How to reach a store, and as whom.
#[derive(Clone)]
pub struct OperatorConfig {
    /// The one role that is asked for.
    pub role: Role,
    /// Its token, where the server has one.
    pub token: Option<Vec<u8>>,
    /// Tenant whose objects a check finds beside everybody's.
    pub tenant: String,
    /// How the server is known; none: plain.
    pub tls: Option<ClientTls>,
    /// Time for an answer.
    pub timeout: Duration,
}

/// One end that asks.
pub enum Operator {
    /// A server.
    Served(Box<Client>),
    /// A store of this process; named by its tenant for checks.
    Own(Arc<Store>, String),
}

impl Operator {
    /// Opens what `address` names: `dir:/path`, `tcp://host:port` or `unix:/path`. A store in a directory is opened with room for all it holds,
    /// so that looking at it evicts nothing.
    ///
    /// # Errors
    /// [`Error::Invalid`] for what is no address of one store, and those of the store's open.
    pub fn open(address: &str, config: OperatorConfig) -> Result<Self, Error> {
        if let Some(path) = address.strip_prefix("dir:").filter(|path| !path.is_empty()) {
            if !Path::new(path).join("FORMAT").exists() {
                return Err(Error::Invalid(format!("{path} holds no KV store")));
            }
            let root = Root::open(Path::new(path))?;
            let media = Arc::new(Local::open(&root, LocalConfig::default())?);
            let store = Store::open(root, media, StoreConfig { capacity: 1 << 62, ..StoreConfig::default() })?;
            return Ok(Self::Own(Arc::new(store), config.tenant));
        }
        if address.starts_with("agent:") {
            let said = "an agent answers engines only: ask the store behind it; what it counts is in its metrics";
            return Err(Error::Invalid(format!("{address}: {said}")));
        }
        let known = "dir:/path, tcp://host:port or unix:/path";
        let no_address = |_| Error::Invalid(format!("{address:?} is no address of a KV store: give {known}"));
        let addresses = entry_points(address).map_err(no_address)?;
        let [one] = addresses.as_slice() else {
            return Err(Error::Invalid(format!("{address:?} names several entry points: name one")));
        };
        let client = ClientConfig {
            tenant: config.tenant,
            roles: vec![(config.role, config.token)],
            tls: config.tls,
            connect: config.timeout,
            check: config.timeout,
            request: config.timeout,
            ..ClientConfig::new(one.clone())
        };
        Ok(Self::Served(Box::new(Client::new(client)?)))
    }

    /// Runs a command: JSON in, JSON out.
    ///
    /// # Errors
    /// [`Error::Invalid`] for what is no command or not allowed, [`Error::Unavailable`], and those of the command.
    pub fn admin(&self, command: &str) -> Result<String, Error> {
        match self {
            Self::Served(client) => client.admin(command),
            Self::Own(store, _) => admin::run(store, None, command.as_bytes()),
        }
    }

    /// Of a chain: blocks from the first on, positions of slices among them, another size of blocks that is in use.
    ///
    /// # Errors
    /// As [`Client::check`].
    pub fn check(&self, chain: &[Key], slices: u32) -> Result<(usize, Vec<usize>, u32), Error> {
        check_chain(chain)?;
        match self {
            Self::Served(client) => {
                let found = client.check(chain, slices)?;
                let slices = found.slices.into_iter().map(|position| position as usize).collect();
                Ok((found.blocks as usize, slices, client.other_block_tokens()))
            }
            Self::Own(store, tenant) => {
                let found = store.check(store.reader(tenant)?, chain, slices as usize)?;
                Ok((found.blocks, found.slices, 0))
            }
        }
    }
}
