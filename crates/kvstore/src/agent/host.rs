//! A running agent: its socket, its threads, its end.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::arena::{Arena, Pin, Sizes};
use super::behind::Backlog;
use super::counters::{Counters, add};
use super::fetch::Fetches;
use super::talk;
use super::tenants::Tenants;
use crate::error::Error;
use crate::net::{Address, Socket};
use crate::server::gate::Gate;
use crate::server::{Listener, spawn};
use crate::upstream::Source;

/// Where an agent listens and what it may use.
#[derive(Clone, Debug)]
pub struct AgentConfig {
    /// Path of the socket, in a directory of its own that nobody else may enter; made if it is not there.
    pub socket: PathBuf,
    /// Bytes of the arena: taken at the start.
    pub arena_bytes: u64,
    /// Longest object.
    pub max_object: u32,
    /// Most bytes that one request may pin or put.
    pub at_once: u64,
    /// Most bytes of puts on their way to the store: what waits keeps its place in the arena.
    pub backlog_bytes: u64,
    /// How long a put waits for room in the backlog before it is refused.
    pub put_patience: Duration,
    /// How long a fetch or a put waits for readers to let go of their pins, where everything is pinned.
    pub room_patience: Duration,
    /// Calls to the store at once, for reading.
    pub fetchers: usize,
    /// Calls to the store at once, for writing: of different tenants.
    pub writers: usize,
    /// Bytes that one call to the store asks for.
    pub fetch_bytes: u64,
    /// Most objects being fetched or waiting for it.
    pub max_fetches: usize,
    /// How long an engine waits for an object that is being fetched.
    pub fetch_patience: Duration,
    /// How long an engine may keep objects pinned.
    pub lease: Duration,
    /// Most connections.
    pub max_connections: usize,
    /// Most of them that have not said who they are.
    pub max_unknown: usize,
    /// Most tenants at once.
    pub max_tenants: usize,
    /// Time for a greeting.
    pub handshake: Duration,
    /// Time for a request to arrive whole, and for its answer to be taken.
    pub request: Duration,
    /// Time between requests.
    pub idle: Duration,
    /// Time that puts have to reach the store when the agent is drained.
    pub drain: Duration,
}

impl Default for AgentConfig {
    fn default() -> Self {
        Self {
            socket: PathBuf::new(),
            arena_bytes: 4 << 30,
            max_object: 16 << 20,
            at_once: 64 << 20,
            backlog_bytes: 1 << 30,
            put_patience: Duration::from_secs(2),
            room_patience: Duration::from_millis(500),
            fetchers: 8,
            writers: 4,
            fetch_bytes: 4 << 20,
            max_fetches: 16 << 10,
            fetch_patience: Duration::from_secs(30),
            lease: Duration::from_secs(30),
            max_connections: 256,
            max_unknown: 32,
            max_tenants: 64,
            handshake: Duration::from_secs(5),
            request: Duration::from_secs(30),
            idle: Duration::from_secs(600),
            drain: Duration::from_secs(30),
        }
    }
}

impl AgentConfig {
    /// At this socket.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into(), ..Self::default() }
    }

    fn check(&self) -> Result<(), Error> {
        let most = u64::from(self.max_object);
        let orders = [
            ("at_once", self.at_once, "max_object", most),
            ("backlog_bytes", self.backlog_bytes, "at_once", self.at_once),
            ("arena_bytes", self.arena_bytes / 2, "twice at_once", self.at_once),
            // So that reading goes on whatever is being written.
            ("arena_bytes", self.arena_bytes / 2, "twice backlog_bytes", self.backlog_bytes),
        ];
        for (name, value, bound, least) in orders {
            if value < least {
                return Err(Error::Invalid(format!("{name} is less than {bound}: give more, or less of the other")));
            }
        }
        let counts = [
            ("fetchers", self.fetchers),
            ("writers", self.writers),
            ("max_connections", self.max_connections),
            ("max_unknown", self.max_unknown),
            ("max_tenants", self.max_tenants),
        ];
        match counts.iter().find(|(_, count)| *count == 0) {
            Some((name, _)) => Err(Error::Invalid(format!("{name} is 0: give 1 at least"))),
            None => Ok(()),
        }
    }
}

/// What one connection has pinned.
#[derive(Debug, Default)]
pub(super) struct Pins {
    next: u64,
    held: BTreeMap<u64, (Pin, Instant)>,
    bytes: u64,
}

impl Pins {
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub fn add(&mut self, pin: Pin) -> u64 {
        self.next += 1;
        self.bytes += u64::from(pin.extent().len);
        self.held.insert(self.next, (pin, Instant::now()));
        self.next
    }

    pub fn drop_pin(&mut self, number: u64) -> bool {
        let Some((pin, _)) = self.held.remove(&number) else { return false };
        self.bytes -= u64::from(pin.extent().len);
        true
    }

    fn oldest(&self) -> Option<Instant> {
        self.held.first_key_value().map(|(_, (_, since))| *since)
    }
}

/// A connection, as the thread that watches leases sees it.
struct Guest {
    handle: Socket,
    pins: Arc<Mutex<Pins>>,
}

/// What all threads of an agent share.
pub(super) struct Host {
    pub config: AgentConfig,
    pub arena: Arc<Arena>,
    pub tenants: Tenants,
    pub fetches: Fetches,
    pub backlog: Backlog,
    pub counters: Arc<Counters>,
    pub leaving: AtomicBool,
    /// Another one after each start.
    pub number: u64,
    gate: Gate,
    guests: Mutex<HashMap<u64, Guest>>,
    stop: Mutex<bool>,
    stopped: Condvar,
    owner: u32,
}

impl Host {
    fn guests(&self) -> MutexGuard<'_, HashMap<u64, Guest>> {
        self.guests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A connection has said who it is.
    pub fn known(&self, id: u64, handle: Socket) -> Arc<Mutex<Pins>> {
        self.gate.known(id);
        let pins = Arc::new(Mutex::new(Pins::default()));
        self.guests().insert(id, Guest { handle, pins: Arc::clone(&pins) });
        pins
    }

    fn leave(&self, id: u64) {
        let guest = self.guests().remove(&id);
        if let Some(guest) = guest {
            *guest.pins.lock().unwrap_or_else(PoisonError::into_inner) = Pins::default();
        }
        self.gate.leave(id);
    }

    /// Ends connections that hold a pin for too long: a stopped engine must not keep what others need. Whatever it copies from then on lacks
    /// its checksum at worst.
    fn end_leases(&self) {
        let over = |guest: &Guest| {
            let pins = guest.pins.lock().unwrap_or_else(PoisonError::into_inner);
            pins.oldest().is_some_and(|since| since.elapsed() > self.config.lease)
        };
        for guest in self.guests().values().filter(|guest| over(guest)) {
            guest.handle.shut_down();
            let pins = std::mem::take(&mut *guest.pins.lock().unwrap_or_else(PoisonError::into_inner));
            drop(pins);
            add(&self.counters.leases_over, 1);
        }
    }

    fn watch(&self) {
        let pause = (self.config.lease / 4).clamp(Duration::from_millis(10), Duration::from_secs(1));
        let mut stop = self.stop.lock().unwrap_or_else(PoisonError::into_inner);
        while !*stop {
            stop = self.stopped.wait_timeout(stop, pause).unwrap_or_else(PoisonError::into_inner).0;
            self.end_leases();
        }
    }

    pub fn stats(&self) -> Vec<(String, u64)> {
        let sizes = self.arena.sizes();
        let mut all: Vec<(String, u64)> = [
            ("arena_bytes", sizes.bytes),
            ("arena_objects", sizes.objects),
            ("arena_free_bytes", sizes.free),
            ("arena_pinned_bytes", sizes.pinned),
            ("arena_evicted", sizes.evicted),
            ("backlog_bytes", self.backlog.bytes()),
            ("engines_connected", self.guests().len() as u64),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .to_vec();
        all.extend(self.counters.each().map(|(name, value)| (name.to_owned(), value)));
        all.push(("store_failures".to_owned(), self.tenants.trouble().0));
        all
    }
}

/// A look at an agent from outside, also while it drains.
#[derive(Clone)]
pub struct Watch(Arc<Host>);

impl Watch {
    /// Counters and sizes by name.
    pub fn stats(&self) -> Vec<(String, u64)> {
        self.0.stats()
    }

    /// How often the store behind it has failed, and why at last.
    pub fn trouble(&self) -> (u64, Option<String>) {
        self.0.tenants.trouble()
    }

    /// Whether it takes no new work any more.
    pub fn is_leaving(&self) -> bool {
        self.0.leaving.load(Ordering::SeqCst)
    }
}

/// A running agent; stopped when dropped.
pub struct Agent {
    host: Arc<Host>,
    listener: Option<Arc<Listener>>,
    accept: Option<JoinHandle<()>>,
    workers: Vec<JoinHandle<()>>,
}

impl Agent {
    /// Takes the memory, listens and serves from threads of its own.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a configuration that makes no sense or a directory that others may enter, [`Error::Io`].
    pub fn start(source: Arc<dyn Source>, config: AgentConfig) -> Result<Self, Error> {
        config.check()?;
        own_directory(&config.socket)?;
        let listener = Listener::bind(&Address::Unix(config.socket.clone()))?;
        let owner = std::fs::metadata(&config.socket).map_err(Error::io("the agent's socket"))?.uid();
        let arena = Arena::new(config.arena_bytes)?;
        let counters = Arc::new(Counters::default());
        let mut number = [0; 8];
        getrandom::fill(&mut number).map_err(|error| Error::Unavailable(format!("no random numbers: {error}")))?;
        let host = Arc::new(Host {
            fetches: Fetches::new(
                Arc::clone(&arena),
                Arc::clone(&counters),
                config.fetch_bytes,
                config.max_fetches,
                config.room_patience,
            ),
            backlog: Backlog::new(Arc::clone(&arena), Arc::clone(&counters), config.backlog_bytes),
            tenants: Tenants::new(source, config.max_tenants),
            gate: Gate::new(config.max_connections, config.max_unknown),
            number: u64::from_le_bytes(number),
            leaving: AtomicBool::new(false),
            guests: Mutex::default(),
            stop: Mutex::new(false),
            stopped: Condvar::new(),
            owner,
            arena,
            counters,
            config,
        });
        let mut agent = Self { host, listener: None, accept: None, workers: Vec::new() };
        let host = &agent.host;
        for (name, count, body) in [
            ("kv-fetch", host.config.fetchers, (|host: &Host| host.fetches.work()) as fn(&Host)),
            ("kv-write", host.config.writers, |host: &Host| host.backlog.work()),
            ("kv-lease", 1, Host::watch),
        ] {
            for _ in 0..count {
                let here = Arc::clone(host);
                let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || body(&here));
                agent.workers.push(thread.map_err(Error::io("no thread for the agent"))?);
            }
        }
        let listener = Arc::new(listener);
        let (here, listens) = (Arc::clone(host), Arc::clone(&listener));
        let accept = spawn("kv-accept", move || accept(&here, &listens));
        agent.accept = Some(accept.map_err(Error::io("no thread for connections"))?);
        agent.listener = Some(listener);
        Ok(agent)
    }

    /// A look at it that others may keep.
    pub fn watch(&self) -> Watch {
        Watch(Arc::clone(&self.host))
    }

    /// Path of its socket.
    pub fn socket(&self) -> &Path {
        &self.host.config.socket
    }

    /// Counters and sizes by name.
    pub fn stats(&self) -> Vec<(String, u64)> {
        self.host.stats()
    }

    /// The arena's sizes.
    pub fn sizes(&self) -> Sizes {
        self.host.arena.sizes()
    }

    /// Takes no more puts, waits until the store has those it took, and stops.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if the store does not have all of them.
    pub fn drain(&mut self) -> Result<(), Error> {
        let until = Instant::now() + self.host.config.drain;
        let left = || until.saturating_duration_since(Instant::now());
        let first = !self.host.leaving.swap(true, Ordering::SeqCst);
        let mut all = true;
        if first {
            for tenant in self.host.tenants.all() {
                let taken = tenant.queue().taken;
                all &= tenant.wait(taken, left()) && tenant.upstream.flush(left());
            }
            all &= self.host.backlog.drain(left());
        }
        self.stop();
        match self.host.counters.unwritten.load(Ordering::Relaxed) {
            0 if all => Ok(()),
            0 => Err(Error::Unavailable("not all that was put reached the store in time".to_owned())),
            lost => Err(Error::Unavailable(format!("the store did not take {lost} of the objects that were put"))),
        }
    }

    fn stop(&mut self) {
        self.host.leaving.store(true, Ordering::SeqCst);
        self.host.gate.close();
        if let Some(listener) = &self.listener {
            listener.wake();
        }
        if let Some(thread) = self.accept.take() {
            // It ended, or panicked and ended.
            let _ = thread.join();
        }
        self.host.fetches.close();
        self.host.backlog.close();
        *self.host.stop.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.host.stopped.notify_all();
        self.host.gate.empty(Duration::ZERO);
        for thread in self.workers.drain(..) {
            let _ = thread.join();
        }
        if self.listener.take().is_some() {
            let _ = std::fs::remove_file(&self.host.config.socket);
        }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The directory of a socket: ours, and nobody else's to enter.
fn own_directory(socket: &Path) -> Result<(), Error> {
    let folder = socket.parent().filter(|folder| folder.is_absolute());
    let folder = folder.ok_or_else(|| Error::Invalid("the agent's socket needs an absolute path".to_owned()))?;
    let what = || format!("the agent's directory {}", folder.display());
    match std::fs::DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => return Err(Error::io(what())(error)),
        _ => {}
    }
    let meta = std::fs::symlink_metadata(folder).map_err(Error::io(what()))?;
    let mine = rustix::process::geteuid().as_raw();
    if !meta.is_dir() || meta.uid() != mine || meta.mode() & 0o077 != 0 {
        return Err(Error::Invalid(format!("{} has to be yours alone: chmod 700 it, or name another", what())));
    }
    Ok(())
}

fn accept(host: &Arc<Host>, listener: &Listener) {
    while !host.leaving.load(Ordering::SeqCst) {
        let Ok(socket) = listener.accept() else {
            // A connection that died before it was taken, or no descriptors left: neither may spin.
            std::thread::sleep(Duration::from_millis(5));
            continue;
        };
        let same_user = rustix::net::sockopt::socket_peercred(socket.as_fd())
            .is_ok_and(|peer| [host.owner, 0].contains(&peer.uid.as_raw()));
        let entered = if same_user { socket.handle().ok().and_then(|handle| host.gate.enter(handle)) } else { None };
        let Some(id) = entered else {
            add(&host.counters.turned_away, 1);
            continue;
        };
        add(&host.counters.connections, 1);
        let here = Arc::clone(host);
        let started = spawn("kv-engine", move || {
            let leaving = Leaving(&here, id);
            // An engine that goes away, or says nothing that makes sense, is its own affair.
            talk::conversation(&here, socket, id);
            drop(leaving);
        });
        if started.is_err() {
            host.gate.leave(id);
        }
    }
}

/// Ends a connection, panic or not: what it pinned is free again.
struct Leaving<'a>(&'a Host, u64);

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        self.0.leave(self.1);
    }
}
