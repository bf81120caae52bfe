//! A server with everything that belongs to it, made of settings.
//!
//! Owns: the order in which media, store, upkeep, repair, listeners and metrics begin and end. Never touches: signals, terminals.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::agent::Agent;
use crate::backend::Backend;
#[cfg(feature = "redis")]
use crate::directory::share::Share;
use crate::error::Error;
use crate::media::Media;
use crate::media::local::Local;
use crate::media::objects::Objects;
use crate::media::striped::{Config, Striped};
use crate::metrics::{AgentPages, Http, ServerPages};
use crate::net::Address;
use crate::root::Root;
use crate::server::Server;
use crate::settings::{MediaSettings, Settings};
use crate::store::{Store, Upkeep};
#[cfg(not(feature = "redis"))]
use crate::trouble::Trouble;
use crate::upstream::Source;

/// Debts of domains that one look pays.
const REPAIRS: usize = 16;

/// Opens the media of these settings and the store over it.
///
/// # Errors
/// As [`Root::open`], the media's and [`Store::open`].
pub fn open_store(settings: &Settings) -> Result<Arc<Store>, Error> {
    let root = Root::open(&settings.root)?;
    let media: Arc<dyn Media> = match &settings.media {
        MediaSettings::Local(config) => Arc::new(Local::open(&root, config.clone())?),
        MediaSettings::Objects(place) => Arc::new(Objects::new(place.open()?, root.media())?),
        MediaSettings::Striped { domains, config, .. } => {
            let opened = domains.iter().map(crate::settings::Where::open).collect::<Result<Vec<_>, _>>()?;
            let domains: Result<[Arc<dyn Backend>; crate::erasure::SHARDS], _> = opened.try_into();
            let wrong = |given: Vec<_>| Error::Invalid(format!("media.domains: {} are given", given.len()));
            Arc::new(Striped::new(domains.map_err(wrong)?, Config { media: root.media(), ..config.clone() })?)
        }
    };
    let store = Arc::new(Store::open(root, media, settings.store.clone())?);
    for (tenant, &bytes) in &settings.quotas {
        store.set_quota(tenant, Some(bytes)).map_err(|error| match error {
            Error::Invalid(said) => Error::Invalid(format!("quotas.{tenant}: {said}")),
            other => other,
        })?;
    }
    Ok(store)
}

/// Joins the store with others over its back end, if the settings say so.
#[cfg(feature = "redis")]
fn share(settings: &Settings, store: &Arc<Store>) -> Result<Option<Share>, Error> {
    settings.directory.as_ref().map(|directory| Share::start(store, directory.clone())).transpose()
}

/// This build knows none.
#[cfg(not(feature = "redis"))]
enum Share {}

#[cfg(not(feature = "redis"))]
impl Share {
    fn is_up(&self) -> bool {
        match *self {}
    }

    fn trouble(&self) -> &Trouble {
        match *self {}
    }
}

#[cfg(not(feature = "redis"))]
fn share(_: &Settings, _: &Arc<Store>) -> Result<Option<Share>, Error> {
    Ok(None)
}

/// What fails, with what the directory's server has failed with.
fn with_share((count, why): (u64, Option<String>), share: Option<&Share>) -> (u64, Option<String>) {
    let Some(trouble) = share.map(Share::trouble) else { return (count, why) };
    let all: Vec<String> = why.into_iter().chain(trouble.latest()).collect();
    (count + trouble.count(), (!all.is_empty()).then(|| all.join("; ")))
}

/// A running server.
pub struct Node {
    server: Server,
    metrics: Option<Http>,
    share: Option<Share>,
    _mender: Option<Mender>,
    _upkeep: Upkeep,
    store: Arc<Store>,
}

impl Node {
    /// Opens and serves.
    ///
    /// # Errors
    /// [`Error::Invalid`] for settings that do not fit what is there, and those of the parts.
    pub fn start(settings: &Settings) -> Result<Self, Error> {
        let store = open_store(settings)?;
        let share = share(settings, &store)?;
        let server = Server::start(Arc::clone(&store), settings.server.clone())?;
        let upkeep = Upkeep::start(&store, settings.tend_every)?;
        let mender = Mender::of(&store, &settings.media)?;
        let metrics = match &settings.metrics {
            Some(address) => {
                let pages = ServerPages { store: Arc::clone(&store), watch: server.watch() };
                Some(Http::start(&address.to_string(), Arc::new(pages))?)
            }
            None => None,
        };
        Ok(Self { server, metrics, share, _mender: mender, _upkeep: upkeep, store })
    }

    /// Where it listens, with the ports that were chosen.
    pub fn addresses(&self) -> Vec<Address> {
        self.server.addresses()
    }

    /// Where metrics are to be had.
    pub fn metrics(&self) -> Option<SocketAddr> {
        self.metrics.as_ref().map(Http::address)
    }

    /// Whether the directory server answers; none: the settings name none.
    pub fn directory(&self) -> Option<bool> {
        self.share.as_ref().map(Share::is_up)
    }

    /// How often reads and writes of the disk or the service, or calls of the directory server, have failed, and why at last.
    pub fn trouble(&self) -> (u64, Option<String>) {
        let trouble = self.store.trouble();
        with_share((trouble.count(), trouble.latest()), self.share.as_ref())
    }

    /// What it serves.
    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// Takes no new work, ends what is under way and leaves the store as a clean end does. Metrics can be read until it is dropped.
    ///
    /// # Errors
    /// As [`Server::drain`].
    pub fn drain(&mut self) -> Result<(), Error> {
        self.server.drain()
    }
}

/// A running agent, with the store of these settings where it has one of its own.
pub struct AgentNode {
    agent: Agent,
    metrics: Option<Http>,
    own: Option<Own>,
}

/// A store of this process, with its upkeep.
struct Own {
    // Ends first, and tells others what is left to be told.
    share: Option<Share>,
    store: Arc<Store>,
    _mender: Option<Mender>,
    _upkeep: Upkeep,
}

impl AgentNode {
    /// Takes its memory and serves the engines of this host.
    ///
    /// # Errors
    /// As [`Agent::start`]; with a store of its own as [`open_store`].
    pub fn start(settings: &Settings) -> Result<Self, Error> {
        let given = &settings.agent;
        let own = if given.upstream.is_some() {
            None
        } else {
            let store = open_store(settings)?;
            let upkeep = Upkeep::start(&store, settings.tend_every)?;
            let mender = Mender::of(&store, &settings.media)?;
            let share = share(settings, &store)?;
            Some(Own { store, share, _mender: mender, _upkeep: upkeep })
        };
        let source: Arc<dyn Source> = match (&given.upstream, &own) {
            (Some(cluster), _) => Arc::new(cluster.clone()),
            (None, Some(own)) => Arc::new(Arc::clone(&own.store)),
            (None, None) => return Err(Error::Invalid("agent.upstream: none".to_owned())),
        };
        let agent = Agent::start(source, given.config.clone()).map_err(|error| match error {
            Error::Invalid(said) if said.starts_with("arena") => Error::Invalid(format!("agent.{said}")),
            other => other,
        })?;
        let metrics = match &given.metrics {
            Some(address) => {
                let store = own.as_ref().map(|own| Arc::clone(&own.store));
                let pages = AgentPages { watch: agent.watch(), store };
                Some(Http::start(&address.to_string(), Arc::new(pages))?)
            }
            None => None,
        };
        Ok(Self { agent, metrics, own })
    }

    /// The agent.
    pub fn agent(&self) -> &Agent {
        &self.agent
    }

    /// Where metrics are to be had.
    pub fn metrics(&self) -> Option<SocketAddr> {
        self.metrics.as_ref().map(Http::address)
    }

    /// Whether the directory server of its own store answers; none: there is none.
    pub fn directory(&self) -> Option<bool> {
        self.own.as_ref().and_then(|own| own.share.as_ref()).map(Share::is_up)
    }

    /// How often the store behind it has failed, and why at last.
    pub fn trouble(&self) -> (u64, Option<String>) {
        with_share(self.agent.watch().trouble(), self.own.as_ref().and_then(|own| own.share.as_ref()))
    }

    /// Takes no more puts, waits until the store has those it took, and ends.
    ///
    /// # Errors
    /// As [`Agent::drain`] and [`Store::drain`].
    pub fn drain(&mut self) -> Result<(), Error> {
        let drained = self.agent.drain();
        let closed = self.own.as_ref().map_or(Ok(()), |own| own.store.drain());
        drained.and(closed)
    }
}

/// A thread that repairs and scrubs stripes until it is dropped.
struct Mender {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Mender {
    /// For media that have redundancy of their own.
    fn of(store: &Arc<Store>, media: &MediaSettings) -> Result<Option<Self>, Error> {
        match *media {
            MediaSettings::Striped { repair_every, scrub_every, .. } => {
                Self::start(store, repair_every, scrub_every).map(Some)
            }
            _ => Ok(None),
        }
    }

    fn start(store: &Arc<Store>, repair_every: Duration, scrub_every: Duration) -> Result<Self, Error> {
        let stop = Arc::new(AtomicBool::new(false));
        let (store, stopped) = (Arc::downgrade(store), Arc::clone(&stop));
        let thread = std::thread::Builder::new()
            .name("kvstore-mend".to_owned())
            .spawn(move || mend(&store, &stopped, repair_every, scrub_every))
            .map_err(Error::io("start the repair thread"))?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

fn mend(store: &Weak<Store>, stopped: &AtomicBool, repair_every: Duration, scrub_every: Duration) {
    let mut scrubbed = Instant::now();
    let mut last = 0;
    while !stopped.load(Ordering::Relaxed) {
        let Some(open) = store.upgrade() else { return };
        // What fails is owed still and tried again at the next look; the backlog says so.
        let repaired = open.repair(REPAIRS).ok().flatten().unwrap_or_default();
        if !scrub_every.is_zero() && scrubbed.elapsed() >= scrub_every {
            scrubbed = Instant::now();
            last = open.scrub_shards(last).ok().flatten().map_or(0, |(segment, _)| segment);
        }
        drop(open);
        // While there is something to be made, the next step begins at once.
        if repaired.made + repaired.deleted == 0 || repaired.left == 0 {
            std::thread::park_timeout(repair_every);
        }
    }
}

impl Drop for Mender {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // Its own panic was reported by the hook; nothing is left to undo.
            let _ = thread.join();
        }
    }
}
