//! What a server counts, for Prometheus.
//!
//! Owns: names of metrics, their text format (version 0.0.4), the small HTTP listener they are read from. Never touches: what is counted.
//!
//! All values exist as counters elsewhere and are read when asked for; the format is a line for each, so it is written here.

mod histogram;
mod http;

use std::fmt::{Display, Write};
use std::sync::Arc;
use std::sync::atomic::Ordering;

pub use histogram::Histogram;
pub use http::{Http, Pages};

use crate::agent;
use crate::object::Class;
use crate::server::{OPERATIONS, Watch};
use crate::store::Store;

/// Pages of one server.
pub struct ServerPages {
    /// What is served.
    pub store: Arc<Store>,
    /// Who serves it.
    pub watch: Watch,
}

impl Pages for ServerPages {
    fn metrics(&self) -> String {
        let mut text = Text::default();
        store(&mut text, &self.store);
        server(&mut text, &self.watch);
        text.0
    }

    fn health(&self) -> (bool, &'static str) {
        if self.watch.is_leaving() { (false, "draining") } else { (true, "ok") }
    }
}

/// Pages of one agent, and of the store in its process if there is one.
pub struct AgentPages {
    /// The agent.
    pub watch: agent::Watch,
    /// Its own store.
    pub store: Option<Arc<Store>>,
}

impl Pages for AgentPages {
    fn metrics(&self) -> String {
        let mut text = Text::default();
        shared(&mut text, &self.watch.stats());
        if let Some(own) = &self.store {
            store(&mut text, own);
        }
        text.0
    }

    fn health(&self) -> (bool, &'static str) {
        if self.watch.is_leaving() { (false, "draining") } else { (true, "ok") }
    }
}

/// What an agent has now; everything else it counts.
const AGENT_GAUGES: [&str; 6] =
    ["arena_bytes", "arena_objects", "arena_free_bytes", "arena_pinned_bytes", "backlog_bytes", "engines_connected"];

fn shared(text: &mut Text, stats: &[(String, u64)]) {
    for (name, value) in stats {
        let words = name.replace('_', " ");
        if AGENT_GAUGES.contains(&name.as_str()) {
            text.one(&format!("agent_{name}"), "gauge", &format!("Of the agent now: {words}."), value);
        } else {
            text.one(
                &format!("agent_{name}_total"),
                "counter",
                &format!("Of the agent since its start: {words}."),
                value,
            );
        }
    }
}

#[derive(Default)]
struct Text(String);

impl Text {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.0, "# HELP deepinfer_kvstore_{name} {help}\n# TYPE deepinfer_kvstore_{name} {kind}");
    }

    fn value(&mut self, name: &str, labels: &str, value: impl Display) {
        let labels = if labels.is_empty() { String::new() } else { format!("{{{labels}}}") };
        let _ = writeln!(self.0, "deepinfer_kvstore_{name}{labels} {value}");
    }

    fn one(&mut self, name: &str, kind: &str, help: &str, value: impl Display) {
        self.head(name, kind, help);
        self.value(name, "", value);
    }

    fn several(&mut self, name: &str, kind: &str, help: &str, label: &str, values: &[(&str, u64)]) {
        self.head(name, kind, help);
        for (which, value) in values {
            self.value(name, &format!("{label}=\"{}\"", escaped(which)), value);
        }
    }
}

/// A label's value as the format wants it.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

fn store(text: &mut Text, store: &Store) {
    let stats = store.stats();
    let counts = stats.counts;
    text.head("hits_total", "counter", "Reads that gave bytes, by tier and class of traffic.");
    let hits = [counts.hits_chat, counts.hits_agent, counts.hits_other];
    let bytes = [counts.hit_bytes_chat, counts.hit_bytes_agent, counts.hit_bytes_other];
    let labels = |class: Class| format!("tier=\"store\",class=\"{}\"", class.name());
    for (class, hits) in Class::ALL.into_iter().zip(hits) {
        text.value("hits_total", &labels(class), hits);
    }
    let shared = store.elsewhere_counts();
    let elsewhere = |class: Class| format!("tier=\"elsewhere\",class=\"{}\"", class.name());
    let hits = [counts.elsewhere_hits_chat, counts.elsewhere_hits_agent, counts.elsewhere_hits_other];
    if shared.is_some() {
        for (class, hits) in Class::ALL.into_iter().zip(hits) {
            text.value("hits_total", &elsewhere(class), hits);
        }
    }
    text.head("hit_bytes_total", "counter", "Bytes that reads gave, by tier and class of traffic.");
    for (class, bytes) in Class::ALL.into_iter().zip(bytes) {
        text.value("hit_bytes_total", &labels(class), bytes);
    }
    let bytes = [counts.elsewhere_hit_bytes_chat, counts.elsewhere_hit_bytes_agent, counts.elsewhere_hit_bytes_other];
    if let Some(shared) = &shared {
        for (class, bytes) in Class::ALL.into_iter().zip(bytes) {
            text.value("hit_bytes_total", &elsewhere(class), bytes);
        }
        directory(text, shared, counts.elsewhere_stale);
    }
    text.head("misses_total", "counter", "Reads that found nothing, by tier.");
    text.value("misses_total", "tier=\"store\"", counts.misses);
    text.one("read_errors_total", "counter", "Misses because a disk or a service failed.", counts.read_errors);
    let written = [
        ("stored", counts.stored),
        ("exists", counts.exists),
        ("conflict", counts.conflicts),
        ("differs", counts.differs),
        ("no_parent", counts.no_parent),
        ("full", counts.full),
        ("failed", counts.write_errors),
    ];
    text.several("writes_total", "counter", "Objects to be written, by outcome.", "outcome", &written);
    text.one("stored_bytes_total", "counter", "Bytes of objects stored.", counts.stored_bytes);
    let gone = [
        ("capacity", counts.evicted - counts.evicted_quota.min(counts.evicted)),
        ("quota", counts.evicted_quota),
        ("expired", counts.expired),
        ("removed", counts.removed),
        ("quarantined", counts.quarantined),
    ];
    text.several("evictions_total", "counter", "Objects gone, by reason.", "reason", &gone);
    text.one("evicted_bytes_total", "counter", "Bytes evicted for capacity or quota.", counts.evicted_bytes);
    text.one("lease_expiries_total", "counter", "Puts neither committed nor revoked in time.", counts.orphans);
    text.one("revoked_total", "counter", "Puts revoked.", counts.revoked);
    text.several(
        "objects",
        "gauge",
        "Objects present, by kind.",
        "kind",
        &[("block", stats.blocks), ("slice", stats.slices)],
    );
    let sizes = [
        ("objects", stats.bytes),
        ("records", stats.live),
        ("sealed", stats.sealed),
        ("pending", stats.pending),
        ("index", stats.memory),
        ("capacity", store.config().capacity),
    ];
    text.several("bytes", "gauge", "Bytes now, by what they are.", "what", &sizes);
    text.one("segments", "gauge", "Sealed segments.", stats.segments);
    text.one("segments_deleted_total", "counter", "Segments deleted.", counts.segments_deleted);
    text.one("segments_missing", "gauge", "Segments known and not found at the start.", counts.segments_missing);
    text.one("collected_bytes_total", "counter", "Bytes that collection copied.", counts.copied_bytes);
    text.head("pause_seconds_max", "gauge", "Longest time that others waited for collection, and longest piece of it.");
    text.value("pause_seconds_max", "of=\"index\"", counts.collect_pause_us as f64 / 1e6);
    text.value("pause_seconds_max", "of=\"piece\"", counts.collect_piece_us as f64 / 1e6);
    text.one("scrubbed_total", "counter", "Objects that scrubbing read.", counts.scrubbed);
    let media = store.media_counts();
    let backlog = media.iter().find(|(name, _)| *name == "backlog").map_or(0, |(_, value)| *value);
    text.one("repair_backlog", "gauge", "Objects of domains that wait for repair or deletion.", backlog);
    let counted: Vec<_> = media.into_iter().filter(|(name, _)| *name != "backlog").collect();
    if !counted.is_empty() {
        text.several("stripes_total", "counter", "Reads of stripes and what they met.", "what", &counted);
    }
}

/// What is known of other stores over the same back end.
fn directory(text: &mut Text, counts: &[(&'static str, u64)], stale: u64) {
    let of = |name: &str| counts.iter().find(|(which, _)| *which == name).map_or(0, |(_, value)| *value);
    text.one("directory_up", "gauge", "1 while the directory server answers.", of("up"));
    text.one("directory_backlog", "gauge", "Objects that it was not told of yet.", of("backlog"));
    let counted: Vec<(&str, u64)> = counts
        .iter()
        .filter(|(name, _)| !["up", "backlog"].contains(name))
        .copied()
        .chain([("stale", stale)])
        .collect();
    let help = "Keys asked of the directory server and told to it, and what came of it.";
    text.several("directory_total", "counter", help, "what", &counted);
}

fn server(text: &mut Text, watch: &Watch) {
    let traffic = watch.traffic();
    let of = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
    text.one("connections", "gauge", "Connections there are.", watch.connections());
    let met = [
        ("accepted", of(&traffic.connections)),
        ("turned_away", of(&traffic.turned_away)),
        ("refused", of(&traffic.refused)),
    ];
    text.several("connections_total", "counter", "Connections, by what became of them.", "outcome", &met);
    let faults = [("malformed", of(&traffic.malformed)), ("forbidden", of(&traffic.forbidden))];
    text.several("bad_requests_total", "counter", "Requests refused, by reason.", "reason", &faults);
    let name = "request_seconds";
    text.head(name, "histogram", "Time from the whole request to its answer, by operation.");
    for (operation, times) in OPERATIONS.iter().zip(&traffic.times) {
        times.write(&mut text.0, &format!("deepinfer_kvstore_{name}"), &format!("op=\"{operation}\""));
    }
    text.one("draining", "gauge", "1 once no new work is taken.", u8::from(watch.is_leaving()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_cannot_break_its_line() {
        let mut text = Text::default();
        text.several("x", "gauge", "X.", "name", &[("a\"b\\c\nd", 1)]);
        let line = "deepinfer_kvstore_x{name=\"a\\\"b\\\\c\\nd\"} 1\n";
        assert_eq!(text.0, format!("# HELP deepinfer_kvstore_x X.\n# TYPE deepinfer_kvstore_x gauge\n{line}"));
    }
}
