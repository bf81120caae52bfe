//! The directory in a Valkey or Redis server or cluster: for media that every process can read (an object store, a mounted directory), so that
//! one finds what another wrote without an entry point between them.
//!
//! Soft state: everything here can be lost, and is then written again by those who hold the objects. Keys live as long as what they tell of.
//! A server that does not answer means misses; it is asked again after a while.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use redis::cluster::{ClusterClient, ClusterConnection, cluster_pipe};
use redis::{
    Client, Cmd, Connection, ConnectionAddr, ConnectionInfo, FromRedisValue, IntoConnectionInfo, RedisResult,
    TlsCertificates, Value, cmd,
};

use super::{Hint, Owner};
use crate::error::Error;
use crate::key::{Key, Kind, ObjectId};
use crate::media::Place;
use crate::object::{Class, Meta, TenantId};
use crate::trouble::Trouble;

/// Keys of a round trip at most.
const MAX_ROUND: usize = 4096;

/// Connections kept while nobody uses them.
const MAX_IDLE: usize = 8;

/// Where the server is and how it is used.
#[derive(Clone)]
pub struct Settings {
    /// URLs, `redis://host:port`, or `rediss://` for TLS. More than one, or `cluster`, is a cluster.
    pub servers: Vec<String>,
    /// Whether a single URL names a member of a cluster.
    pub cluster: bool,
    /// What is shown to the servers, where they ask for it. In no URL: those are printed.
    pub password: Option<String>,
    /// PEM of the authorities that servers of `rediss://` have their certificates from; none: those of the system.
    pub authorities: Option<Vec<u8>>,
    /// First part of every key, to share a server: lower-case letters, digits and dashes.
    pub prefix: String,
    /// How long a connection or an answer may take.
    pub timeout: Duration,
    /// How long a server that failed is left alone.
    pub retry: Duration,
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings")
            .field("servers", &self.servers)
            .field("cluster", &self.cluster)
            .field("password", &self.password.as_ref().map(|_| "…"))
            .field("authorities", &self.authorities.as_ref().map(Vec::len))
            .field("prefix", &self.prefix)
            .field("timeout", &self.timeout)
            .field("retry", &self.retry)
            .finish()
    }
}

impl Settings {
    /// For one server.
    pub fn new(server: impl Into<String>) -> Self {
        Self {
            servers: vec![server.into()],
            cluster: false,
            password: None,
            authorities: None,
            prefix: "deepinfer".into(),
            timeout: Duration::from_millis(150),
            retry: Duration::from_secs(1),
        }
    }
}

/// What was counted since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Keys asked for.
    pub asked: u64,
    /// Keys found.
    pub found: u64,
    /// Keys not asked for because the server was left alone, or whose answer did not come.
    pub unanswered: u64,
    /// Calls that failed.
    pub failures: u64,
    /// Values that are none of ours.
    pub malformed: u64,
}

#[derive(Debug, Default)]
struct Atomics {
    asked: AtomicU64,
    found: AtomicU64,
    unanswered: AtomicU64,
    failures: AtomicU64,
    malformed: AtomicU64,
}

enum Opener {
    One(Client),
    Cluster(ClusterClient),
}

enum Link {
    One(Connection),
    Cluster(Box<ClusterConnection>),
}

impl Link {
    fn query<T: FromRedisValue>(&mut self, commands: &[Cmd], timeout: Duration) -> RedisResult<T> {
        match self {
            // Read one by one: the library's own pipeline waits for every answer before it tells of the first that did not come.
            Self::One(connection) => {
                let end = Instant::now() + timeout;
                let packed: Vec<u8> = commands.iter().flat_map(Cmd::get_packed_command).collect();
                connection.send_packed_command(&packed)?;
                let mut answers = Vec::with_capacity(commands.len());
                for _ in commands {
                    let left = end.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into());
                    }
                    answers.push(connection.recv_response()?.extract_error()?);
                }
                Ok(redis::from_redis_value(Value::Array(answers))?)
            }
            // Here it cannot be avoided, so that nodes that hang are found first.
            Self::Cluster(connection) => {
                if !connection.check_connection() {
                    return Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into());
                }
                let mut all = cluster_pipe();
                for command in commands {
                    all.add_command(command.clone());
                }
                all.query(connection.as_mut())
            }
        }
    }
}

/// A client of the server. Calls wait for it, no longer than its time-out for each round trip; any thread may call.
pub struct SoftDirectory {
    settings: Settings,
    opener: Opener,
    idle: Mutex<Vec<Link>>,
    down_until: Mutex<Option<Instant>>,
    counters: Atomics,
    trouble: Trouble,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where a URL leads. Nothing that is said of it shows it: it may hold a secret after all.
fn server(url: &str, password: Option<&str>) -> Result<ConnectionInfo, Error> {
    let none = || {
        let form = "redis://host:port, or rediss://host:port for TLS, perhaps with a user and /number";
        Error::Invalid(format!("a directory server is given as {form}"))
    };
    let info = url.into_connection_info().map_err(|_| none())?;
    // Whoever takes any certificate has TLS for nothing.
    if !matches!(info.addr(), ConnectionAddr::Tcp(..) | ConnectionAddr::TcpTls { insecure: false, .. }) {
        return Err(none());
    }
    let redis = info.redis_settings().clone();
    if redis.password().is_some() {
        return Err(Error::Invalid("a password stands in the URL: give it in a variable or a file of its own".into()));
    }
    Ok(match password {
        Some(password) => info.set_redis_settings(redis.set_password(password)),
        None => info,
    })
}

fn cluster(members: Vec<ConnectionInfo>, settings: &Settings) -> RedisResult<ClusterClient> {
    let builder = ClusterClient::builder(members);
    let builder = builder.connection_timeout(settings.timeout).response_timeout(settings.timeout).retries(1);
    match certificates(settings) {
        Some(known) => builder.certs(known).build(),
        None => builder.build(),
    }
}

fn certificates(settings: &Settings) -> Option<TlsCertificates> {
    settings.authorities.clone().map(|known| TlsCertificates { client_tls: None, root_cert: Some(known) })
}

fn client(server: ConnectionInfo, settings: &Settings) -> RedisResult<Client> {
    match certificates(settings).filter(|_| is_protected(&server)) {
        Some(known) => Client::build_with_tls(server, known),
        None => Client::open(server),
    }
}

fn is_protected(server: &ConnectionInfo) -> bool {
    matches!(server.addr(), ConnectionAddr::TcpTls { .. })
}

fn refused(error: &redis::RedisError) -> Error {
    Error::Unavailable(format!("directory server: {error}"))
}

impl SoftDirectory {
    /// Connects with the first call, not here: a server that is down is no error.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a URL or prefix that is none, or a URL with a password.
    pub fn new(settings: Settings) -> Result<Self, Error> {
        let fits = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        if settings.prefix.is_empty() || settings.prefix.len() > 32 || !settings.prefix.bytes().all(fits) {
            return Err(Error::Invalid("a directory's prefix is 1 to 32 lower-case letters, digits and dashes".into()));
        }
        let bad = |error: &redis::RedisError| Error::Invalid(format!("directory server: {error}"));
        let servers: Vec<ConnectionInfo> =
            settings.servers.iter().map(|url| server(url, settings.password.as_deref())).collect::<Result<_, _>>()?;
        let protected = servers.iter().filter(|server| is_protected(server)).count();
        if protected != 0 && protected != servers.len() {
            return Err(Error::Invalid("members of one cluster are all given as rediss://, or none is".into()));
        }
        if protected == 0 && settings.authorities.is_some() {
            return Err(Error::Invalid("authorities are for servers of rediss://".into()));
        }
        // One for the process; if it has another one already, that does as well.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let opener = match <[ConnectionInfo; 1]>::try_from(servers) {
            Ok([one]) if !settings.cluster => Opener::One(client(one, &settings).map_err(|error| bad(&error))?),
            Ok([one]) => Opener::Cluster(cluster(vec![one], &settings).map_err(|error| bad(&error))?),
            Err(none) if none.is_empty() => {
                return Err(Error::Invalid("a directory needs the URL of a server".into()));
            }
            Err(many) => Opener::Cluster(cluster(many, &settings).map_err(|error| bad(&error))?),
        };
        Ok(Self {
            settings,
            opener,
            idle: Mutex::default(),
            down_until: Mutex::default(),
            counters: Atomics::default(),
            trouble: Trouble::default(),
        })
    }

    fn open(&self) -> RedisResult<Link> {
        match &self.opener {
            Opener::One(client) => {
                let connection = client.get_connection_with_timeout(self.settings.timeout)?;
                connection.set_read_timeout(Some(self.settings.timeout))?;
                connection.set_write_timeout(Some(self.settings.timeout))?;
                Ok(Link::One(connection))
            }
            Opener::Cluster(client) => {
                let connection = client.get_connection()?;
                connection.set_read_timeout(Some(self.settings.timeout))?;
                connection.set_write_timeout(Some(self.settings.timeout))?;
                Ok(Link::Cluster(Box::new(connection)))
            }
        }
    }

    /// Calls that failed, and with what at last.
    pub fn trouble(&self) -> &Trouble {
        &self.trouble
    }

    /// Whether the server is asked at all now.
    pub fn is_up(&self) -> bool {
        lock(&self.down_until).is_none_or(|until| Instant::now() >= until)
    }

    // One round trip. A connection that was idle may have been closed meanwhile, so a failure on one is tried again on a fresh one.
    fn call<T: FromRedisValue>(&self, commands: &[Cmd]) -> Result<T, Error> {
        if !self.is_up() {
            return Err(Error::Unavailable("directory server: left alone after a failure".into()));
        }
        let idle = lock(&self.idle).pop();
        let mut outcome = match idle {
            Some(mut link) => link.query(commands, self.settings.timeout).map(|value| (link, value)),
            None => self.fresh(commands),
        };
        if outcome
            .as_ref()
            .is_err_and(|error| error.is_connection_dropped() || error.is_io_error() && !error.is_timeout())
        {
            lock(&self.idle).clear();
            outcome = self.fresh(commands);
        }
        match outcome {
            Ok((link, value)) => {
                *lock(&self.down_until) = None;
                let mut idle = lock(&self.idle);
                if idle.len() < MAX_IDLE {
                    idle.push(link);
                }
                Ok(value)
            }
            Err(error) => {
                self.counters.failures.fetch_add(1, Ordering::Relaxed);
                *lock(&self.down_until) = Some(Instant::now() + self.settings.retry);
                let error = refused(&error);
                self.trouble.note(&error);
                Err(error)
            }
        }
    }

    fn fresh<T: FromRedisValue>(&self, commands: &[Cmd]) -> RedisResult<(Link, T)> {
        let mut link = self.open()?;
        let value = link.query(commands, self.settings.timeout)?;
        Ok((link, value))
    }

    // Fixed length, of our making: nothing else becomes a key.
    fn name(&self, id: ObjectId) -> String {
        let kind = match id.kind {
            Kind::Block => 'b',
            Kind::Slice => 's',
        };
        format!("{}:{kind}:{}", self.settings.prefix, id.key)
    }

    /// Says where objects are, for so many seconds. An entry that was there is replaced: a record may have been copied.
    ///
    /// # Errors
    /// [`Error::Unavailable`]; nothing is lost by it but hits.
    pub fn publish(&self, hints: &[(Hint, u32)]) -> Result<(), Error> {
        for round in hints.chunks(MAX_ROUND) {
            let commands: Vec<Cmd> = round
                .iter()
                .map(|(hint, life)| {
                    let mut set = cmd("SET");
                    set.arg(self.name(hint.meta.id)).arg(&encode(hint)[..]).arg("EX").arg((*life).max(1));
                    set
                })
                .collect();
            let _: Vec<Value> = self.call(&commands)?;
        }
        Ok(())
    }

    /// Forgets objects: they were deleted, or read and found wrong.
    ///
    /// # Errors
    /// [`Error::Unavailable`]; then they are stale hints until their time is up.
    pub fn forget(&self, ids: &[ObjectId]) -> Result<(), Error> {
        for round in ids.chunks(MAX_ROUND) {
            let commands: Vec<Cmd> = round
                .iter()
                .map(|&id| {
                    let mut del = cmd("DEL");
                    del.arg(self.name(id));
                    del
                })
                .collect();
            let _: Vec<Value> = self.call(&commands)?;
        }
        Ok(())
    }

    /// Where objects are said to be, in the order asked; no answer is a miss.
    pub fn find(&self, ids: &[ObjectId]) -> Vec<Option<Hint>> {
        ids.chunks(MAX_ROUND).flat_map(|round| self.find_round(round)).collect()
    }

    fn find_round(&self, ids: &[ObjectId]) -> Vec<Option<Hint>> {
        let commands: Vec<Cmd> = ids
            .iter()
            .map(|&id| {
                let mut get = cmd("GET");
                get.arg(self.name(id));
                get
            })
            .collect();
        self.counters.asked.fetch_add(ids.len() as u64, Ordering::Relaxed);
        let Ok(values) = self.call::<Vec<Option<Vec<u8>>>>(&commands) else {
            self.counters.unanswered.fetch_add(ids.len() as u64, Ordering::Relaxed);
            return vec![None; ids.len()];
        };
        let read = |(&id, value): (&ObjectId, Option<Vec<u8>>)| {
            let value = value?;
            let hint = decode(id, &value);
            let counter = if hint.is_some() { &self.counters.found } else { &self.counters.malformed };
            counter.fetch_add(1, Ordering::Relaxed);
            hint
        };
        let mut found: Vec<Option<Hint>> = ids.iter().zip(values).map(read).collect();
        found.resize(ids.len(), None);
        found
    }

    /// Whether the server still has what it was told, which it then keeps for so many seconds more: one that was restarted or emptied has
    /// not, and is told so now.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub fn remembers(&self, who: u64, seconds: u32) -> Result<bool, Error> {
        let name = format!("{}:m:{who:016x}", self.settings.prefix);
        let mut set = cmd("SET");
        set.arg(name).arg(1).arg("EX").arg(seconds.max(1)).arg("GET");
        let before: Vec<Option<Vec<u8>>> = self.call(&[set])?;
        Ok(before.first().is_some_and(Option::is_some))
    }

    /// What was counted.
    pub fn counters(&self) -> Counters {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counters {
            asked: get(&self.counters.asked),
            found: get(&self.counters.found),
            unanswered: get(&self.counters.unanswered),
            failures: get(&self.counters.failures),
            malformed: get(&self.counters.malformed),
        }
    }
}

/// Bytes of a value.
const VALUE: usize = 72;
const VERSION: u8 = 1;

// Little endian: version, class, whether there is a parent, 0, tenant, 0 (2), length, written, checksum, segment, offset, parent, media, owner.
fn encode(hint: &Hint) -> [u8; VALUE] {
    let meta = &hint.meta;
    let mut value = [0; VALUE];
    value[0] = VERSION;
    value[1] = meta.class as u8;
    value[2] = u8::from(meta.parent.is_some());
    value[4..6].copy_from_slice(&meta.tenant.0.to_le_bytes());
    value[8..12].copy_from_slice(&meta.len.to_le_bytes());
    value[12..16].copy_from_slice(&meta.written.to_le_bytes());
    value[16..24].copy_from_slice(&meta.checksum.to_le_bytes());
    value[24..28].copy_from_slice(&hint.place.segment.to_le_bytes());
    value[28..32].copy_from_slice(&hint.place.offset.to_le_bytes());
    value[32..48].copy_from_slice(&meta.parent.map_or([0; 16], Key::to_bytes));
    value[48..56].copy_from_slice(&hint.media.to_le_bytes());
    value[56..].copy_from_slice(&hint.owner.0);
    value
}

// Whoever may write to the server may write anything: what does not have our form is a miss, and the rest is held to its record's header.
fn decode(id: ObjectId, value: &[u8]) -> Option<Hint> {
    let value: &[u8; VALUE] = value.try_into().ok()?;
    let word = |at: usize| u32::from_le_bytes([value[at], value[at + 1], value[at + 2], value[at + 3]]);
    let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
    let parent_bytes: [u8; 16] = value[32..48].try_into().ok()?;
    let owner = Owner(value[56..].try_into().ok()?);
    let parent = match value[2] {
        0 if parent_bytes == [0; 16] => None,
        1 => Some(Key::from_bytes(parent_bytes)),
        _ => return None,
    };
    if value[0] != VERSION || value[3] != 0 || value[6..8] != [0, 0] {
        return None;
    }
    let meta = Meta {
        id,
        parent,
        tenant: TenantId(u16::from_le_bytes([value[4], value[5]])),
        class: Class::from_byte(value[1])?,
        len: word(8),
        checksum: long(16),
        written: word(12),
    };
    Some(Hint { meta, place: Place { segment: word(24), offset: word(28) }, media: long(48), owner })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_value_is_read_as_it_is_written_or_not_at_all() {
        let id = ObjectId { kind: Kind::Block, key: Key(7) };
        let meta = Meta {
            id,
            parent: Some(Key(0x0123_4567_89ab_cdef_0011_2233_4455_6677)),
            tenant: TenantId(513),
            class: Class::Agent,
            len: 113_920,
            checksum: 0xfedc_ba98_7654_3210,
            written: 1_800_000_000,
        };
        let place = Place { segment: 77, offset: 4_000_000_000 };
        let hint = Hint { meta, place, media: 0x1122_3344_5566_7788, owner: Owner::named("someone") };
        let value = encode(&hint);
        assert_eq!(decode(id, &value), Some(hint));
        let root = Hint { meta: Meta { parent: None, ..meta }, ..hint };
        assert_eq!(decode(id, &encode(&root)), Some(root));
        assert_eq!(decode(id, &value[1..]), None);
        assert_eq!(decode(id, b""), None);
        for (at, byte) in [(0, 2), (1, 9), (2, 2), (2, 0), (3, 1), (7, 1)] {
            let mut other = value;
            other[at] = byte;
            assert_eq!(decode(id, &other), None, "byte {at}");
        }
    }

    #[test]
    fn settings_are_held_to_their_form() {
        let with = |change: &dyn Fn(&mut Settings)| {
            let mut settings = Settings::new("redis://127.0.0.1:1");
            change(&mut settings);
            SoftDirectory::new(settings).map(|_| ())
        };
        assert!(with(&|_| ()).is_ok());
        assert!(with(&|settings| settings.servers.clear()).is_err());
        for url in ["http://x", "redis://", "unix:///x", "rediss://host:1/#insecure", "redis://user:word@host:1"] {
            let said = with(&|settings| settings.servers[0] = url.into()).unwrap_err().to_string();
            assert!(!said.contains("word@"), "{said}");
        }
        for url in ["redis://user@host:1/2", "rediss://user@host:1/2", "valkeys://host:1"] {
            assert!(with(&|settings| settings.servers[0] = url.into()).is_ok(), "{url}");
        }
        let other = |settings: &mut Settings| settings.servers.push("rediss://127.0.0.1:2".into());
        assert!(with(&other).is_err(), "some of a cluster are protected");
        for prefix in ["", "a:b", "A", "é", &"a".repeat(33)] {
            assert!(with(&|settings| settings.prefix = prefix.into()).is_err(), "{prefix}");
        }
    }
}
