//! A store behind sockets: one thread a connection, bounded in number, time and memory.
//!
//! Owns: listeners, connections, roles. Never touches: how objects are kept ([`crate::store`]), the words themselves ([`crate::wire`]).
//!
//! Nobody is trusted before the hello: until then a connection may take a few hundred bytes and `handshake` of time. No length is
//! believed before it is held to its bound; answers of all connections together take no more than `answer_bytes` of memory.

pub(crate) mod admin;
pub(crate) mod gate;
mod serve;

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::error::Error;
use crate::metrics::Histogram;
use crate::net::{Address, Socket};
use crate::store::Store;
use crate::tls::{Acceptor, ServerTls};
use crate::wire::{Op, Proof, Role};
use gate::{Budget, Gate};

/// Where a server listens and what it allows.
#[derive(Clone)]
pub struct ServerConfig {
    /// Addresses; a port of 0 is chosen by the system.
    pub listen: Vec<Address>,
    /// Token of each role, at least 16 bytes. A role without one is anybody's, which is refused on addresses that others can reach.
    pub tokens: HashMap<Role, Vec<u8>>,
    /// Certificate for TCP addresses; none: plain.
    pub tls: Option<ServerTls>,
    /// Most connections.
    pub max_connections: usize,
    /// Most of them that have not proved who they are.
    pub max_unknown: usize,
    /// Time for a hello.
    pub handshake: Duration,
    /// Time for a request to arrive whole, and for its answer to be taken.
    pub request: Duration,
    /// Time between requests.
    pub idle: Duration,
    /// Bytes of memory for answers under way.
    pub answer_bytes: u64,
    /// Time that connections have to end when the server is drained.
    pub drain: Duration,
}

impl std::fmt::Debug for ServerConfig {
    /// Without the tokens.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut roles: Vec<&str> = self.tokens.keys().map(|role| role.name()).collect();
        roles.sort_unstable();
        f.debug_struct("ServerConfig")
            .field("listen", &self.listen)
            .field("tokens", &roles)
            .field("tls", &self.tls)
            .field("max_connections", &self.max_connections)
            .field("max_unknown", &self.max_unknown)
            .field("handshake", &self.handshake)
            .field("request", &self.request)
            .field("idle", &self.idle)
            .field("answer_bytes", &self.answer_bytes)
            .field("drain", &self.drain)
            .finish()
    }
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            listen: Vec::new(),
            tokens: HashMap::new(),
            tls: None,
            max_connections: 512,
            max_unknown: 64,
            handshake: Duration::from_secs(5),
            request: Duration::from_secs(30),
            idle: Duration::from_secs(600),
            answer_bytes: 256 << 20,
            drain: Duration::from_secs(10),
        }
    }
}

impl ServerConfig {
    fn check(&self) -> Result<(), Error> {
        if self.listen.is_empty() {
            return Err(Error::Invalid("no address to listen on: give one at least".to_owned()));
        }
        for (role, token) in &self.tokens {
            if token.len() < 16 {
                return Err(Error::Invalid(format!("the token of role {} is shorter than 16 bytes", role.name())));
            }
        }
        let open: Vec<&str> =
            Role::ALL.iter().filter(|role| !self.tokens.contains_key(role)).map(|r| r.name()).collect();
        for address in &self.listen {
            let resolved = address.resolve().map_err(Error::io(format!("the address {address}")))?;
            if !open.is_empty() && resolved.iter().any(|one| !one.ip().is_loopback()) {
                return Err(Error::Invalid(format!(
                    "{address} can be reached from elsewhere: give tokens for {}, or listen on 127.0.0.1",
                    open.join(", ")
                )));
            }
        }
        Ok(())
    }
}

/// Operations whose times are kept.
pub const OPERATIONS: [&str; 5] = ["check", "get", "start", "commit", "admin"];

/// Counters of a server since its start.
#[derive(Debug, Default)]
pub struct Traffic {
    /// Connections let in.
    pub connections: AtomicU64,
    /// Connections turned away for want of a place.
    pub turned_away: AtomicU64,
    /// Hellos whose proof was wrong or that were none.
    pub refused: AtomicU64,
    /// Requests that made no sense.
    pub malformed: AtomicU64,
    /// Requests without the role for them.
    pub forbidden: AtomicU64,
    /// Requests by operation: check, get, start, commit.
    pub requests: [AtomicU64; 4],
    /// How long requests took, in the order of [`OPERATIONS`].
    pub times: [Histogram; OPERATIONS.len()],
}

impl Traffic {
    fn note(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }

    /// Times of an operation, if they are kept.
    fn times(&self, op: Op) -> Option<&Histogram> {
        let at = match op {
            Op::Check => 0,
            Op::Get => 1,
            Op::Start => 2,
            Op::Commit => 3,
            Op::Admin => 4,
            Op::Write | Op::Revoke | Op::Ping | Op::Answer => return None,
        };
        Some(&self.times[at])
    }
}

/// What all threads of a server share.
struct Shared {
    store: Arc<Store>,
    config: ServerConfig,
    secrets: HashMap<Role, Proof>,
    acceptor: Option<Acceptor>,
    gate: Gate,
    budget: Budget,
    traffic: Traffic,
    leaving: AtomicBool,
    /// Sizes of blocks that writers named by fingerprint: who shares nothing is told so.
    block_sizes: Mutex<HashMap<[u8; 16], u32>>,
}

impl Shared {
    /// Notes a writer's size of blocks; another one that is in use under its fingerprint, or 0.
    fn other_block_tokens(&self, fingerprint: [u8; 16], block_tokens: u32, writes: bool) -> u32 {
        const MOST: usize = 4096;
        if fingerprint == [0; 16] || block_tokens == 0 {
            return 0;
        }
        let mut sizes = self.block_sizes.lock().unwrap_or_else(PoisonError::into_inner);
        match sizes.get(&fingerprint) {
            Some(&known) if known != block_tokens => known,
            None if writes && sizes.len() < MOST => {
                sizes.insert(fingerprint, block_tokens);
                0
            }
            _ => 0,
        }
    }
}

/// A socket that others connect to.
pub(crate) enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener, std::path::PathBuf),
}

/// Why nobody can be listened to at an address, and what to do about it.
pub(crate) fn not_bound(what: String, error: io::Error) -> Error {
    let advice = match error.kind() {
        io::ErrorKind::AddrInUse => "stop who has it, or name another port",
        io::ErrorKind::AddrNotAvailable => "name an address of this machine",
        io::ErrorKind::PermissionDenied => "name a port above 1023, or run as who may",
        _ => return Error::io(what)(error),
    };
    Error::io(what)(io::Error::new(error.kind(), format!("{error}: {advice}")))
}

impl Listener {
    pub(crate) fn bind(address: &Address) -> Result<Self, Error> {
        let what = format!("listening on {address}");
        match address {
            Address::Tcp(name) => Ok(Self::Tcp(TcpListener::bind(name).map_err(|error| not_bound(what, error))?)),
            Address::Unix(path) => {
                // A socket that a killed server left answers nobody; one that answers is somebody's.
                if std::os::unix::net::UnixStream::connect(path).is_ok() {
                    return Err(Error::Invalid(format!(
                        "{} is in use by another server: stop it, or name another socket",
                        path.display()
                    )));
                }
                if path
                    .symlink_metadata()
                    .is_ok_and(|meta| std::os::unix::fs::FileTypeExt::is_socket(&meta.file_type()))
                {
                    std::fs::remove_file(path).map_err(Error::io(what.clone()))?;
                }
                let listener = UnixListener::bind(path).map_err(Error::io(what.clone()))?;
                std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).map_err(Error::io(what))?;
                Ok(Self::Unix(listener, path.clone()))
            }
        }
    }

    pub(crate) fn accept(&self) -> std::io::Result<Socket> {
        match self {
            Self::Tcp(listener) => Socket::tcp(listener.accept()?.0),
            Self::Unix(listener, _) => Ok(Socket::Unix(listener.accept()?.0)),
        }
    }

    /// Ends [`Listener::accept`] in another thread.
    pub(crate) fn wake(&self) {
        let fd = match self {
            Self::Tcp(listener) => listener.as_fd(),
            Self::Unix(listener, _) => listener.as_fd(),
        };
        let _ = rustix::net::shutdown(fd, rustix::net::Shutdown::Both);
    }
}

/// A look at a server from outside, also while it drains.
#[derive(Clone)]
pub struct Watch(Arc<Shared>);

impl Watch {
    /// What it counted.
    pub fn traffic(&self) -> &Traffic {
        &self.0.traffic
    }

    /// Connections there are.
    pub fn connections(&self) -> usize {
        self.0.gate.count()
    }

    /// Whether it takes no new work any more.
    pub fn is_leaving(&self) -> bool {
        self.0.leaving.load(Ordering::SeqCst)
    }
}

/// A running server; drained when dropped.
pub struct Server {
    shared: Arc<Shared>,
    listeners: Vec<Arc<Listener>>,
    threads: Vec<JoinHandle<()>>,
}

impl Server {
    /// Listens and serves from threads of its own.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a configuration that is unsafe or makes no sense, [`Error::Io`].
    pub fn start(store: Arc<Store>, config: ServerConfig) -> Result<Self, Error> {
        config.check()?;
        let secrets = config.tokens.iter().map(|(&role, token)| (role, Proof::from_token(token))).collect();
        let acceptor = config.tls.as_ref().map(Acceptor::new).transpose()?;
        let listeners =
            config.listen.iter().map(|one| Listener::bind(one).map(Arc::new)).collect::<Result<Vec<_>, _>>()?;
        let shared = Arc::new(Shared {
            store,
            secrets,
            acceptor,
            gate: Gate::new(config.max_connections, config.max_unknown),
            budget: Budget::new(config.answer_bytes),
            traffic: Traffic::default(),
            leaving: AtomicBool::new(false),
            block_sizes: Mutex::default(),
            config,
        });
        let mut server = Self { shared, listeners, threads: Vec::new() };
        for listener in &server.listeners {
            let (shared, listener) = (Arc::clone(&server.shared), Arc::clone(listener));
            let thread = spawn("kv-accept", move || accept(&shared, &listener));
            server.threads.push(thread.map_err(Error::io("no thread for connections"))?);
        }
        Ok(server)
    }

    /// Addresses it listens on, with the ports that were chosen.
    pub fn addresses(&self) -> Vec<Address> {
        let of = |tcp: &TcpListener| tcp.local_addr().as_ref().map_or_else(|_| String::new(), SocketAddr::to_string);
        self.listeners
            .iter()
            .map(|listener| match &**listener {
                Listener::Tcp(tcp) => Address::Tcp(of(tcp)),
                Listener::Unix(_, path) => Address::Unix(path.clone()),
            })
            .collect()
    }

    /// What it counted.
    pub fn traffic(&self) -> &Traffic {
        &self.shared.traffic
    }

    /// Connections there are.
    pub fn connections(&self) -> usize {
        self.shared.gate.count()
    }

    /// A look at it that others may keep.
    pub fn watch(&self) -> Watch {
        Watch(Arc::clone(&self.shared))
    }

    /// Takes no new work, ends what is under way, and drains the store.
    ///
    /// # Errors
    /// As [`Store::drain`].
    pub fn drain(&mut self) -> Result<(), Error> {
        self.stop();
        self.shared.store.drain()
    }

    fn stop(&mut self) {
        if self.shared.leaving.swap(true, Ordering::SeqCst) {
            return;
        }
        self.shared.gate.close();
        self.listeners.iter().for_each(|listener| listener.wake());
        for thread in self.threads.drain(..) {
            // It ended, or panicked and ended.
            let _ = thread.join();
        }
        self.shared.gate.empty(self.shared.config.drain);
        for listener in self.listeners.drain(..) {
            if let Listener::Unix(_, path) = &*listener {
                let _ = std::fs::remove_file(path);
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

/// A thread that serves one peer, or waits for them.
pub(crate) fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> std::io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name.to_owned()).stack_size(512 << 10).spawn(body)
}

fn accept(shared: &Arc<Shared>, listener: &Listener) {
    while !shared.leaving.load(Ordering::SeqCst) {
        let Ok(socket) = listener.accept() else {
            // A connection that died before it was taken, or no descriptors left: neither may spin.
            std::thread::sleep(Duration::from_millis(5));
            continue;
        };
        let entered = socket.handle().ok().and_then(|handle| shared.gate.enter(handle));
        let Some(id) = entered else {
            Traffic::note(&shared.traffic.turned_away);
            continue;
        };
        Traffic::note(&shared.traffic.connections);
        let here = Arc::clone(shared);
        let tcp = matches!(socket, Socket::Tcp(_));
        let started = spawn("kv-serve", move || {
            let leaving = Leaving(&here, id);
            // A peer that goes away, or says nothing that makes sense, is its own affair.
            let _ = serve::conversation(&here, socket, tcp, id);
            drop(leaving);
        });
        if started.is_err() {
            shared.gate.leave(id);
        }
    }
}

/// Ends a connection, panic or not.
struct Leaving<'a>(&'a Shared, u64);

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        self.0.gate.leave(self.1);
    }
}
