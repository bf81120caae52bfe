//! Commands of operators: a JSON object with the word `do` and its arguments; the answer is a JSON object.

use std::sync::atomic::Ordering;

use serde::Deserialize;
use serde_json::{Value, json};

use super::Traffic;
use crate::error::Error;
use crate::key::{Key, Kind, ObjectId};
use crate::object::Class;
use crate::store::Store;

/// Most bytes that one scrub reads: whoever wants more asks again.
const MOST_SCRUBBED: u64 = 1 << 30;

/// Most objects of domains that one command makes again.
const MOST_REPAIRED: usize = 256;

#[derive(Deserialize)]
#[serde(tag = "do", rename_all = "lowercase", deny_unknown_fields)]
enum Command {
    Stats,
    Scrub { bytes: u64 },
    Shards { after: u32 },
    Repair { limit: usize },
    Collect { force: bool },
    Tenants,
    Quota { tenant: String, bytes: Option<u64> },
    Lifetime { class: String, seconds: u32 },
    Remove { kind: String, keys: Vec<String> },
}

/// Runs one command.
///
/// # Errors
/// [`Error::Invalid`] for what is no command, and those of the command.
pub(crate) fn run(store: &Store, traffic: Option<&Traffic>, body: &[u8]) -> Result<String, Error> {
    let command: Command =
        serde_json::from_slice(body).map_err(|error| Error::Invalid(format!("no command: {error}")))?;
    let answer = match command {
        Command::Stats => stats(store, traffic),
        Command::Scrub { bytes } => {
            let done = store.scrub(bytes.min(MOST_SCRUBBED));
            json!({"objects": done.objects, "bytes": done.bytes, "damaged": done.damaged, "errors": done.errors, "done": done.done})
        }
        Command::Shards { after } => match store.scrub_shards(after)? {
            Some((segment, found)) => {
                json!({"segment": segment, "sound": found.sound, "damaged": found.damaged, "away": found.away})
            }
            None => json!({"segment": null, "sound": 0, "damaged": 0, "away": 0}),
        },
        Command::Repair { limit } => {
            let did = store.repair(limit.min(MOST_REPAIRED))?.unwrap_or_default();
            json!({"made": did.made, "deleted": did.deleted, "hopeless": did.hopeless, "left": did.left})
        }
        Command::Collect { force } => json!({"more": store.collect(force)?}),
        Command::Tenants => {
            let tenants = store.tenants()?;
            let each = tenants
                .iter()
                .map(|(name, tenant, bytes)| json!({"name": name, "quota": tenant.quota, "bytes": bytes}));
            Value::Array(each.collect())
        }
        Command::Quota { tenant, bytes } => {
            let tenant = store.set_quota(&tenant, bytes)?;
            json!({"quota": tenant.quota})
        }
        Command::Lifetime { class, seconds } => {
            let class = class_of(&class)?;
            store.set_lifetime(class, seconds)?;
            json!({"seconds": seconds})
        }
        Command::Remove { kind, keys } => {
            let kind = match kind.as_str() {
                "block" => Kind::Block,
                "slice" => Kind::Slice,
                _ => return Err(Error::Invalid("kind is block or slice".to_owned())),
            };
            let ids: Vec<ObjectId> =
                keys.iter().map(|key| Ok(ObjectId { kind, key: key.parse::<Key>()? })).collect::<Result<_, Error>>()?;
            json!({"removed": store.remove(&ids)?})
        }
    };
    Ok(answer.to_string())
}

fn class_of(name: &str) -> Result<Class, Error> {
    Class::named(name).ok_or_else(|| Error::Invalid("class is chat, agent or other".to_owned()))
}

fn stats(store: &Store, traffic: Option<&Traffic>) -> Value {
    let stats = store.stats();
    let counts: serde_json::Map<String, Value> =
        stats.counts.each().map(|(name, value)| (name.to_owned(), value.into())).collect();
    let of = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
    let media: serde_json::Map<String, Value> =
        store.media_counts().into_iter().map(|(name, value)| (name.to_owned(), value.into())).collect();
    let server = traffic.map(|traffic| {
        json!({
            "connections": of(&traffic.connections), "turned_away": of(&traffic.turned_away), "refused": of(&traffic.refused),
            "malformed": of(&traffic.malformed), "forbidden": of(&traffic.forbidden),
            "checks": of(&traffic.requests[0]), "gets": of(&traffic.requests[1]), "starts": of(&traffic.requests[2]),
            "commits": of(&traffic.requests[3]),
        })
    });
    json!({
        "counts": counts,
        "blocks": stats.blocks, "slices": stats.slices, "bytes": stats.bytes, "live": stats.live, "sealed": stats.sealed,
        "segments": stats.segments, "pending": stats.pending, "memory": stats.memory, "capacity": store.config().capacity,
        "media": media, "server": server, "last_failure": store.trouble().latest(),
    })
}
