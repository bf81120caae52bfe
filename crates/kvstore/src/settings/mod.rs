//! Settings of a server: one file, the environment over it, defaults below.
//!
//! Owns: names of keys, sizes and times as people write them, which values belong together, where secrets come from.
//! Never touches: disks or services, but for the settings file and the files of tokens and certificates that it names.
//!
//! Every error is one line that names the key. Secrets are in no file of ours: tokens come from files of their own or from the
//! environment, keys of S3 from the environment, and nothing here prints them.

mod agent;
mod directory;
mod keys;
mod media;
mod raw;
#[cfg(test)]
mod tests;
mod values;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::time::Duration;

use toml::Table;

pub use agent::AgentSettings;
pub use directory::DirectorySettings;
pub use keys::{KEYS, PREFIX, SECRETS, variable};
pub use media::{MediaSettings, Where};
pub use values::{Size, Time};

use crate::error::Error;
use crate::net::Address;
use crate::policy::{Lifetimes, PolicyKind};
use crate::server::ServerConfig;
use crate::store::StoreConfig;
use crate::tls::ServerTls;
use crate::wire::Role;

/// Where a server listens, and a command looks for one, without settings.
pub const DEFAULT_LISTEN: &str = "127.0.0.1:7460";

/// Where metrics are to be had without settings.
pub const DEFAULT_METRICS: &str = "127.0.0.1:7461";

/// All settings, each with its default, in a file that can be used as it is.
pub const EXAMPLE: &str = include_str!("example.toml");

/// What a server is to be.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Catalogue and lock; of local media the segments too.
    pub root: PathBuf,
    /// Where bytes lie.
    pub media: MediaSettings,
    /// What joins stores over one back end; none: each keeps to itself.
    pub directory: Option<DirectorySettings>,
    /// Sizes, policy, times to live.
    pub store: StoreConfig,
    /// Bytes that a tenant may keep, by its name.
    pub quotas: BTreeMap<String, u64>,
    /// Addresses, roles, limits.
    pub server: ServerConfig,
    /// Where metrics are to be had; none: nowhere.
    pub metrics: Option<Address>,
    /// Pause between rounds of upkeep.
    pub tend_every: Duration,
    /// What an agent is to be, if one is started.
    pub agent: AgentSettings,
}

/// What is under a key, or a default.
fn or<T, V>(given: Option<V>, default: T, of: impl FnOnce(V) -> T) -> T {
    given.map_or(default, of)
}

fn invalid<T>(key: &str, why: impl std::fmt::Display) -> Result<T, Error> {
    Err(Error::Invalid(format!("{key}: {why}")))
}

/// The text on one line.
fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Reads a table into its structure; an error names the key.
fn read<'de, T: serde::Deserialize<'de>>(value: toml::Value, below: &str) -> Result<T, Error> {
    serde_path_to_error::deserialize(value).map_err(|error| {
        let path = error.path().to_string();
        let key = match (below, path.as_str()) {
            ("", ".") => "settings".to_owned(),
            ("", path) => path.to_owned(),
            (below, ".") => below.to_owned(),
            (below, path) => format!("{below}.{path}"),
        };
        Error::Invalid(format!("{key}: {}", one_line(error.inner().message())))
    })
}

impl Settings {
    /// Reads `file`, if one is given, lays `variables` and then `given` (keys with their text, of a command line) over it.
    ///
    /// # Errors
    /// [`Error::Invalid`], one line that names file, variable or key.
    pub fn load(
        file: Option<&Path>,
        variables: &BTreeMap<String, String>,
        given: &[(String, String)],
    ) -> Result<Self, Error> {
        let text = match file {
            Some(path) => {
                let wrong = |error| Error::Invalid(format!("settings {}: {error}", path.display()));
                std::fs::read_to_string(path).map_err(wrong)?
            }
            None => String::new(),
        };
        let shown = file.map_or_else(String::new, |path| path.display().to_string());
        let mut table: Table = text.parse().map_err(|error: toml::de::Error| {
            let line = error.span().map_or(1, |span| 1 + text[..span.start.min(text.len())].matches('\n').count());
            Error::Invalid(format!("{shown} line {line}: {}", one_line(error.message())))
        })?;
        let allowed = media::variables_named(&table);
        keys::overlay(&mut table, variables, &allowed)?;
        keys::overlay_given(&mut table, given)?;
        Self::of(read(toml::Value::Table(table), "")?, variables)
    }

    fn of(file: raw::File, variables: &BTreeMap<String, String>) -> Result<Self, Error> {
        let root = match file.root {
            Some(root) => root,
            None => default_root(variables)?,
        };
        if !root.is_absolute() {
            return invalid("root", format!("{} is no absolute path", root.display()));
        }
        let lifetimes = lifetimes(&file.lifetimes)?;
        let media = MediaSettings::of(file.media, variables)?;
        let directory = directory::of(&file.directory, &media, variables)?;
        let (store, tend_every) = store(&file.store, lifetimes, &media)?;
        let listen = file.listen.unwrap_or_else(|| vec![DEFAULT_LISTEN.to_owned()]);
        let metrics = metrics("metrics", file.metrics.as_deref().unwrap_or(DEFAULT_METRICS))?;
        let tokens = tokens(&file.tokens, variables)?;
        let agent = AgentSettings::of(file.agent, store.max_object, |role| tokens.get(&role).cloned(), variables)?;
        let server = ServerConfig {
            listen: addresses("listen", &listen)?,
            tokens,
            tls: tls(file.tls)?,
            ..limits(&file.limits)?
        };
        let quotas = file.quotas.into_iter().map(|(tenant, Size(bytes))| (tenant, bytes)).collect();
        Ok(Self { root, media, directory, store, quotas, server, metrics, tend_every, agent })
    }
}

/// `$XDG_DATA_HOME/deepinfer/kvstore`, or below `~/.local/share`.
fn default_root(variables: &BTreeMap<String, String>) -> Result<PathBuf, Error> {
    let of = |name: &str| variables.get(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let base = of("XDG_DATA_HOME").or_else(|| of("HOME").map(|home| home.join(".local/share")));
    base.map(|base| base.join("deepinfer/kvstore"))
        .ok_or_else(|| Error::Invalid("root: there is no home directory to put the store in: give a path".to_owned()))
}

fn metrics(key: &str, text: &str) -> Result<Option<Address>, Error> {
    match text {
        "" | "off" => Ok(None),
        text => match text.parse() {
            Ok(Address::Tcp(name)) => Ok(Some(Address::Tcp(name))),
            _ => invalid(key, format!("{text:?}: give host:port, or \"off\"")),
        },
    }
}

fn addresses(key: &str, given: &[String]) -> Result<Vec<Address>, Error> {
    if given.is_empty() {
        return invalid(key, "give one address at least");
    }
    given.iter().map(|text| text.parse().or_else(|error| invalid(key, error))).collect()
}

fn lifetimes(given: &raw::Lifetimes) -> Result<Lifetimes, Error> {
    let base = Lifetimes::default();
    let of = |key: &str, given: Option<Time>, default: u32| match given {
        None => Ok(default),
        Some(Time(time)) if time >= Duration::from_secs(1) => Ok(time.as_secs() as u32),
        Some(_) => invalid(key, "give a second at least"),
    };
    Ok(Lifetimes {
        chat: of("lifetimes.chat", given.chat, base.chat)?,
        agent: of("lifetimes.agent", given.agent, base.agent)?,
        other: of("lifetimes.other", given.other, base.other)?,
    })
}

fn store(given: &raw::Store, lifetimes: Lifetimes, media: &MediaSettings) -> Result<(StoreConfig, Duration), Error> {
    let base = StoreConfig::default();
    let policy = match given.policy.as_deref() {
        None => base.policy,
        Some("lru") => PolicyKind::Lru,
        Some("ttl") => PolicyKind::Ttl,
        Some("marginal") => PolicyKind::MarginalHit,
        Some(other) => return invalid("store.policy", format!("{other:?} is none: give lru, ttl or marginal")),
    };
    let size = |given: Option<Size>, default: u64| or(given, default, |Size(bytes)| bytes);
    let max_object = size(given.max_object, base.max_object.into());
    let config = StoreConfig {
        capacity: size(given.capacity, base.capacity),
        slack: size(given.slack, base.slack),
        policy,
        lifetimes,
        orphan_after: or(given.orphan_after, base.orphan_after, |Time(time)| time),
        pending_bytes: size(given.pending_bytes, base.pending_bytes),
        max_object: u32::try_from(max_object)
            .or_else(|_| invalid("store.max_object", format!("{max_object} bytes are more than 4 GiB")))?,
        batch_bytes: size(given.batch_bytes, base.batch_bytes),
        piece_bytes: size(given.piece_bytes, base.piece_bytes),
    };
    for (key, value) in [("store.capacity", config.capacity), ("store.batch_bytes", config.batch_bytes)] {
        let least = crate::record::span(config.max_object);
        if value < least {
            return invalid(
                key,
                format!("{value} is too little: {least} at least, for one object of store.max_object"),
            );
        }
    }
    for (key, value) in [
        ("store.max_object", max_object),
        ("store.piece_bytes", config.piece_bytes),
        ("store.pending_bytes", config.pending_bytes),
    ] {
        if value == 0 {
            return invalid(key, "0 is too little");
        }
    }
    if let MediaSettings::Local(local) = media
        && config.batch_bytes > local.segment_bytes - crate::media::segment::SegmentHeader::BYTES as u64
    {
        let said =
            format!("{} do not fit a segment of media.segment_bytes, {}", config.batch_bytes, local.segment_bytes);
        return invalid("store.batch_bytes", said);
    }
    let tend_every = or(given.tend_every, Duration::from_secs(1), |Time(time)| time);
    if tend_every < Duration::from_millis(10) {
        return invalid("store.tend_every", "give 10ms at least");
    }
    Ok((config, tend_every))
}

/// The contents of a file of one token: what stands in it, without space around it.
///
/// # Errors
/// [`Error::Io`], [`Error::Invalid`] for an empty or a far too long one.
pub fn read_token(path: &Path) -> Result<Vec<u8>, Error> {
    let shown = path.display();
    let bytes = std::fs::read(path).map_err(Error::io(format!("read the token {shown}")))?;
    let token = bytes.trim_ascii();
    if token.is_empty() || token.len() > 4096 {
        return Err(Error::Invalid(format!("{shown} holds no token: 16 to 4096 bytes on one line")));
    }
    Ok(token.to_vec())
}

/// Tokens of the environment, by role.
pub fn tokens_of_environment(variables: &BTreeMap<String, String>) -> HashMap<Role, Vec<u8>> {
    let name = |role: Role| format!("{PREFIX}TOKEN_{}", role.name().to_ascii_uppercase());
    let of = |role: Role| Some((role, variables.get(&name(role))?.trim().as_bytes().to_vec()));
    Role::ALL.into_iter().filter_map(of).collect()
}

fn tokens(given: &raw::Tokens, variables: &BTreeMap<String, String>) -> Result<HashMap<Role, Vec<u8>>, Error> {
    let mut tokens = HashMap::new();
    let files =
        [(Role::Check, &given.check), (Role::Get, &given.get), (Role::Put, &given.put), (Role::Admin, &given.admin)];
    for (role, path) in files {
        if let Some(path) = path {
            let named = |error| Error::Invalid(format!("tokens.{}_file: {error}", role.name()));
            tokens.insert(role, read_token(path).map_err(named)?);
        }
    }
    // A variable is nearer than a file.
    tokens.extend(tokens_of_environment(variables));
    for (role, token) in &tokens {
        if token.len() < 16 {
            return invalid(&format!("the token of role {}", role.name()), "it is shorter than 16 bytes");
        }
    }
    Ok(tokens)
}

fn tls(given: raw::Tls) -> Result<Option<ServerTls>, Error> {
    match (given.certificate, given.key) {
        (None, None) => Ok(None),
        (Some(certificate), Some(key)) => Ok(Some(ServerTls { certificate, key })),
        (Some(_), None) => invalid("tls.key", "give it with tls.certificate"),
        (None, Some(_)) => invalid("tls.certificate", "give it with tls.key"),
    }
}

fn limits(given: &raw::Limits) -> Result<ServerConfig, Error> {
    let base = ServerConfig::default();
    let time = |key: &str, given: Option<Time>, default| match given {
        None => Ok(default),
        Some(Time(time)) if time.is_zero() => invalid(key, "0 is too little"),
        Some(Time(time)) => Ok(time),
    };
    let count = |key: &str, given: Option<usize>, default| match given {
        None => Ok(default),
        Some(0) => invalid(key, "0 is too little"),
        Some(count) if count > 1 << 20 => invalid(key, format!("{count} is too much: 1048576 at most")),
        Some(count) => Ok(count),
    };
    Ok(ServerConfig {
        max_connections: count("limits.max_connections", given.max_connections, base.max_connections)?,
        max_unknown: count("limits.max_unknown", given.max_unknown, base.max_unknown)?,
        handshake: time("limits.handshake", given.handshake, base.handshake)?,
        request: time("limits.request", given.request, base.request)?,
        idle: time("limits.idle", given.idle, base.idle)?,
        answer_bytes: or(given.answer_bytes, base.answer_bytes, |Size(bytes)| bytes),
        drain: or(given.drain, base.drain, |Time(time)| time),
        ..base
    })
}
