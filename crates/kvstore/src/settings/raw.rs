//! The settings file as it is written, before anything is made of it.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Deserialize;

use super::values::{Size, Time};

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct File {
    pub root: Option<PathBuf>,
    pub listen: Option<Vec<String>>,
    pub metrics: Option<String>,
    pub media: Media,
    pub directory: Directory,
    pub store: Store,
    pub lifetimes: Lifetimes,
    pub quotas: BTreeMap<String, Size>,
    pub tokens: Tokens,
    pub tls: Tls,
    pub limits: Limits,
    pub agent: Agent,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Media {
    pub kind: Option<String>,
    pub segment_bytes: Option<Size>,
    pub directory: Option<PathBuf>,
    pub s3: Option<S3>,
    pub domains: Option<Vec<toml::Value>>,
    pub min_domains: Option<usize>,
    pub hedge: Option<Time>,
    pub read_timeout: Option<Time>,
    pub write_timeout: Option<Time>,
    pub repair_every: Option<Time>,
    pub scrub_every: Option<Time>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct S3 {
    pub endpoint: Option<String>,
    pub bucket: Option<String>,
    pub folder: Option<String>,
    pub region: Option<String>,
    pub access_key_env: Option<String>,
    pub secret_key_env: Option<String>,
    pub conditional_put: Option<bool>,
    pub timeout: Option<Time>,
    pub retries: Option<usize>,
    pub certificates: Option<PathBuf>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Directory {
    pub servers: Option<Vec<String>>,
    pub cluster: Option<bool>,
    pub password_file: Option<PathBuf>,
    pub tls_ca: Option<PathBuf>,
    pub prefix: Option<String>,
    pub timeout: Option<Time>,
    pub retry: Option<Time>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Store {
    pub capacity: Option<Size>,
    pub slack: Option<Size>,
    pub policy: Option<String>,
    pub max_object: Option<Size>,
    pub batch_bytes: Option<Size>,
    pub piece_bytes: Option<Size>,
    pub pending_bytes: Option<Size>,
    pub orphan_after: Option<Time>,
    pub tend_every: Option<Time>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Lifetimes {
    pub chat: Option<Time>,
    pub agent: Option<Time>,
    pub other: Option<Time>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Tokens {
    #[serde(rename = "check_file")]
    pub check: Option<PathBuf>,
    #[serde(rename = "get_file")]
    pub get: Option<PathBuf>,
    #[serde(rename = "put_file")]
    pub put: Option<PathBuf>,
    #[serde(rename = "admin_file")]
    pub admin: Option<PathBuf>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Tls {
    pub certificate: Option<PathBuf>,
    pub key: Option<PathBuf>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    pub max_connections: Option<usize>,
    pub max_unknown: Option<usize>,
    pub handshake: Option<Time>,
    pub request: Option<Time>,
    pub idle: Option<Time>,
    pub answer_bytes: Option<Size>,
    pub drain: Option<Time>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Agent {
    pub socket: Option<PathBuf>,
    pub upstream: Option<String>,
    pub metrics: Option<String>,
    pub arena: Option<Size>,
    pub backlog: Option<Size>,
    pub at_once: Option<Size>,
    pub fetchers: Option<usize>,
    pub writers: Option<usize>,
    pub lease: Option<Time>,
    pub drain: Option<Time>,
    pub tls_ca: Option<PathBuf>,
    pub tls_name: Option<String>,
}
