//! What an agent is to be.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use super::values::{Size, Time};
use super::{DEFAULT_LISTEN, invalid, metrics, or, raw};
use crate::agent::AgentConfig;
use crate::cluster::ClusterConfig;
use crate::error::Error;
use crate::net::Address;
use crate::sizes::in_words;
use crate::tier::entry_points;
use crate::tls::ClientTls;
use crate::wire::Role;

/// Where an agent's metrics are to be had without settings.
const DEFAULT_METRICS: &str = "127.0.0.1:7462";

/// An agent and where it reads and writes.
#[derive(Clone, Debug)]
pub struct AgentSettings {
    /// Socket, memory, limits.
    pub config: AgentConfig,
    /// Entry points; none: the store of these settings, in the agent's own process.
    pub upstream: Option<ClusterConfig>,
    /// Where metrics are to be had; none: nowhere.
    pub metrics: Option<Address>,
}

impl AgentSettings {
    pub(super) fn of(
        given: raw::Agent,
        max_object: u32,
        tokens: impl Fn(Role) -> Option<Vec<u8>>,
        variables: &BTreeMap<String, String>,
    ) -> Result<Self, Error> {
        let base = AgentConfig::default();
        let size = |given: Option<Size>, default: u64| or(given, default, |Size(bytes)| bytes);
        let time = |key: &str, given: Option<Time>, default: Duration| match given {
            None => Ok(default),
            Some(Time(time)) if time.is_zero() => invalid(key, "0 is too little"),
            Some(Time(time)) => Ok(time),
        };
        // What is not given follows what is: half of the arena for the backlog, all of the backlog for one request, as far as that is less.
        let arena_bytes = or(given.arena, base.arena_bytes.max(4 * u64::from(max_object)), |Size(bytes)| bytes);
        let backlog_bytes = size(given.backlog, base.backlog_bytes.min(arena_bytes / 2));
        let at_once = size(given.at_once, base.at_once.max(max_object.into()).min(backlog_bytes));
        let config = AgentConfig {
            socket: given.socket.unwrap_or_else(|| default_socket(variables)),
            arena_bytes,
            backlog_bytes,
            at_once,
            max_object,
            fetchers: given.fetchers.unwrap_or(base.fetchers),
            writers: given.writers.unwrap_or(base.writers),
            lease: time("agent.lease", given.lease, base.lease)?,
            drain: time("agent.drain", given.drain, base.drain)?,
            ..base
        };
        if !config.socket.is_absolute() {
            return invalid("agent.socket", format!("{} is no absolute path", config.socket.display()));
        }
        let least = [
            ("agent.arena", arena_bytes / 2, backlog_bytes.max(max_object.into()), 2),
            ("agent.backlog", backlog_bytes, at_once.max(max_object.into()), 1),
            ("agent.at_once", at_once, max_object.into(), 1),
        ];
        if let Some((key, value, least, times)) = least.into_iter().find(|(_, value, least, _)| value < least) {
            let (value, least) = (in_words(value * times), in_words(least * times));
            let why = "an arena is twice agent.backlog, which is agent.at_once, which is store.max_object, or more";
            return invalid(key, format!("{value} is too little: give {least}, or less of the others ({why})"));
        }
        for (key, count) in [("agent.fetchers", config.fetchers), ("agent.writers", config.writers)] {
            if !(1..=1024).contains(&count) {
                return invalid(key, format!("{count} is not between 1 and 1024"));
            }
        }
        let address = given.upstream.unwrap_or_else(|| format!("tcp://{DEFAULT_LISTEN}"));
        let upstream = if address == "own" {
            if given.tls_ca.is_some() || given.tls_name.is_some() {
                return invalid("agent.tls_ca", "it belongs to an agent.upstream of entry points");
            }
            None
        } else {
            let addresses = entry_points(&address).or_else(|_| {
                invalid(
                    "agent.upstream",
                    format!("{address:?}: give \"own\", tcp://host:port[,host:port] or unix:/path"),
                )
            })?;
            let host = || Some(address.strip_prefix("tcp://")?.split(',').next()?.rsplit_once(':')?.0.to_owned());
            let tls = given.tls_ca.map(|authorities| ClientTls {
                authorities,
                server_name: given.tls_name.or_else(host).unwrap_or_default(),
            });
            let base = ClusterConfig::new(addresses);
            let roles = base.roles.iter().map(|(role, _)| (*role, tokens(*role))).collect();
            Some(ClusterConfig { roles, tls, ..base })
        };
        let metrics = metrics("agent.metrics", given.metrics.as_deref().unwrap_or(DEFAULT_METRICS))?;
        Ok(Self { config, upstream, metrics })
    }
}

/// In a directory that is this user's alone: `$XDG_RUNTIME_DIR/deepinfer`, or one below `/tmp` that the agent makes and checks.
fn default_socket(variables: &BTreeMap<String, String>) -> PathBuf {
    let runtime = variables.get("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|path| path.is_absolute());
    let folder = runtime.map(|path| path.join("deepinfer"));
    folder
        .unwrap_or_else(|| format!("/tmp/deepinfer-{}", rustix::process::geteuid().as_raw()).into())
        .join("agent.sock")
}
