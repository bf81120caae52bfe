//! Which media, and which back ends below it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use toml::{Table, Value};

use super::values::{Size, Time};
use super::{invalid, or, raw, read};
use crate::backend::{Backend, MountedDir};
#[cfg(feature = "s3")]
use crate::backend::{S3, S3Config};
use crate::erasure::SHARDS;
use crate::error::Error;
use crate::media::local::LocalConfig;
use crate::media::striped;

/// The variables of S3 keys, where a bucket names no others.
const ACCESS_KEYS: [&str; 2] = ["DEEPINFER_KVSTORE_S3_ACCESS_KEY", "AWS_ACCESS_KEY_ID"];
const SECRET_KEYS: [&str; 2] = ["DEEPINFER_KVSTORE_S3_SECRET_KEY", "AWS_SECRET_ACCESS_KEY"];

/// A back end.
#[derive(Clone, Debug)]
pub enum Where {
    /// A directory, maybe mounted from elsewhere.
    Directory(PathBuf),
    /// A bucket.
    #[cfg(feature = "s3")]
    Bucket(Box<S3Config>),
}

impl Where {
    /// Opens it.
    ///
    /// # Errors
    /// As [`MountedDir::open`] and [`S3::new`].
    pub fn open(&self) -> Result<Arc<dyn Backend>, Error> {
        Ok(match self {
            Self::Directory(path) => Arc::new(MountedDir::open(path)?),
            #[cfg(feature = "s3")]
            Self::Bucket(config) => Arc::new(S3::new(config)?),
        })
    }
}

/// Where bytes lie.
#[derive(Clone, Debug)]
pub enum MediaSettings {
    /// Segment files below the root.
    Local(LocalConfig),
    /// One object a batch.
    Objects(Where),
    /// Ten and two shards over twelve.
    Striped {
        /// The failure domains, in the order that may not change.
        domains: Vec<Where>,
        /// How they are used; the media's id is the root's.
        config: striped::Config,
        /// Pause between looks at what domains owe.
        repair_every: Duration,
        /// Pause between segments that are compared with their checksums; zero: none are.
        scrub_every: Duration,
    },
}

impl MediaSettings {
    /// Its name under `media.kind`.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Local(_) => "local",
            Self::Objects(_) => "objects",
            Self::Striped { .. } => "striped",
        }
    }

    pub(super) fn of(given: raw::Media, variables: &BTreeMap<String, String>) -> Result<Self, Error> {
        let kind = given.kind.as_deref().unwrap_or("local").to_owned();
        let striped_only = [
            ("media.min_domains", given.min_domains.is_some()),
            ("media.hedge", given.hedge.is_some()),
            ("media.read_timeout", given.read_timeout.is_some()),
            ("media.write_timeout", given.write_timeout.is_some()),
            ("media.repair_every", given.repair_every.is_some()),
            ("media.scrub_every", given.scrub_every.is_some()),
            ("media.domains", given.domains.is_some()),
        ];
        let foreign = |wanted: &str| {
            let of = |key: &'static str, at: &'static str, is: bool| (is && at != wanted).then_some((key, at));
            striped_only
                .iter()
                .find_map(|&(key, is)| of(key, "striped", is))
                .or_else(|| of("media.segment_bytes", "local", given.segment_bytes.is_some()))
                .or_else(|| of("media.directory", "objects", given.directory.is_some()))
                .or_else(|| of("media.s3", "objects", given.s3.is_some()))
        };
        if let Some((key, at)) = foreign(&kind) {
            return invalid(key, format!("it belongs to media.kind = \"{at}\", not \"{kind}\""));
        }
        match kind.as_str() {
            "local" => {
                let base = LocalConfig::default();
                let segment_bytes = or(given.segment_bytes, base.segment_bytes, |Size(bytes)| bytes);
                if !(64 << 10..=4 << 30).contains(&segment_bytes) {
                    return invalid("media.segment_bytes", format!("{segment_bytes} is not between 64KiB and 4GiB"));
                }
                Ok(Self::Local(LocalConfig { segment_bytes, ..base }))
            }
            "objects" => match (given.directory, given.s3) {
                (Some(path), None) => Ok(Self::Objects(directory("media.directory", path)?)),
                (None, Some(s3)) => Ok(Self::Objects(bucket("media.s3", &s3, variables)?)),
                (Some(_), Some(_)) => invalid("media.directory", "give it or media.s3, not both"),
                (None, None) => invalid("media.directory", "kind \"objects\" needs it or media.s3"),
            },
            "striped" => striped(given, variables),
            other => invalid("media.kind", format!("{other:?} is none: give local, objects or striped")),
        }
    }
}

fn striped(given: raw::Media, variables: &BTreeMap<String, String>) -> Result<MediaSettings, Error> {
    let base = striped::Config::default();
    let domains = given.domains.unwrap_or_default();
    if domains.len() != SHARDS {
        return invalid("media.domains", format!("{} are given: name exactly {SHARDS}", domains.len()));
    }
    let domains = domains
        .into_iter()
        .enumerate()
        .map(|(at, domain)| {
            let key = format!("media.domains[{at}]");
            match domain {
                Value::String(path) => directory(&key, path.into()),
                table @ Value::Table(_) => bucket(&key, &read::<raw::S3>(table, &key)?, variables),
                _ => invalid(&key, "give a directory, or a table with endpoint and bucket"),
            }
        })
        .collect::<Result<Vec<_>, Error>>()?;
    for (at, domain) in domains.iter().enumerate() {
        if let Some(first) = domains[..at].iter().position(|other| same(other, domain)) {
            return invalid(&format!("media.domains[{at}]"), format!("it is the same place as domain {first}"));
        }
    }
    let min_domains = given.min_domains.unwrap_or(base.min_domains);
    if !(10..=SHARDS).contains(&min_domains) {
        return invalid("media.min_domains", format!("{min_domains} is not between 10 and {SHARDS}"));
    }
    let time = |key: &str, given: Option<Time>, default| match given {
        None => Ok(default),
        Some(Time(time)) if time.is_zero() => invalid(key, "0 is too little"),
        Some(Time(time)) => Ok(time),
    };
    let config = striped::Config {
        min_domains,
        hedge: time("media.hedge", given.hedge, base.hedge)?,
        read_timeout: time("media.read_timeout", given.read_timeout, base.read_timeout)?,
        write_timeout: time("media.write_timeout", given.write_timeout, base.write_timeout)?,
        ..base
    };
    Ok(MediaSettings::Striped {
        domains,
        config,
        repair_every: time("media.repair_every", given.repair_every, Duration::from_secs(5))?,
        scrub_every: or(given.scrub_every, Duration::from_secs(60), |Time(time)| time),
    })
}

/// Whether two domains are one place.
fn same(one: &Where, other: &Where) -> bool {
    match (one, other) {
        (Where::Directory(one), Where::Directory(other)) => one == other,
        #[cfg(feature = "s3")]
        (Where::Bucket(one), Where::Bucket(other)) => {
            (&one.endpoint, &one.bucket, &one.folder) == (&other.endpoint, &other.bucket, &other.folder)
        }
        #[cfg(feature = "s3")]
        _ => false,
    }
}

fn directory(key: &str, path: PathBuf) -> Result<Where, Error> {
    if path.is_absolute() {
        Ok(Where::Directory(path))
    } else {
        invalid(key, format!("{} is no absolute path", path.display()))
    }
}

/// Variables that buckets name for their keys.
pub(super) fn variables_named(table: &Table) -> Vec<String> {
    let media = table.get("media").and_then(Value::as_table);
    let domains = media.and_then(|media| media.get("domains")?.as_array()).into_iter().flatten();
    let buckets = domains.chain(media.and_then(|media| media.get("s3"))).filter_map(Value::as_table);
    buckets
        .flat_map(|bucket| ["access_key_env", "secret_key_env"].into_iter().filter_map(|key| bucket.get(key)))
        .filter_map(|name| name.as_str().map(str::to_owned))
        .collect()
}

#[cfg(feature = "s3")]
fn bucket(key: &str, given: &raw::S3, variables: &BTreeMap<String, String>) -> Result<Where, Error> {
    let base = S3Config::default();
    let needed = |name: &str, given: &Option<String>| match given {
        Some(text) if !text.is_empty() => Ok(text.clone()),
        _ => invalid(&format!("{key}.{name}"), "it is needed"),
    };
    let secret = |name: &str, named: &Option<String>, usual: &[&str]| {
        let names: Vec<&str> = named.as_deref().map_or_else(|| usual.to_vec(), |name| vec![name]);
        let found = names.iter().find_map(|name| variables.get(*name)).filter(|value| !value.is_empty());
        match found {
            Some(value) => Ok(value.clone()),
            None => invalid(&format!("{key}.{name}"), format!("set the variable {}", names.join(" or "))),
        }
    };
    let certificates = match &given.certificates {
        None => None,
        Some(path) => {
            let named = |error| Error::Invalid(format!("{key}.certificates: {}: {error}", path.display()));
            Some(std::fs::read(path).map_err(named)?)
        }
    };
    let config = S3Config {
        endpoint: needed("endpoint", &given.endpoint)?,
        bucket: needed("bucket", &given.bucket)?,
        folder: given.folder.clone().unwrap_or(base.folder),
        region: given.region.clone().unwrap_or(base.region),
        access_key: secret("access_key_env", &given.access_key_env, &ACCESS_KEYS)?,
        secret_key: secret("secret_key_env", &given.secret_key_env, &SECRET_KEYS)?,
        conditional_put: given.conditional_put.unwrap_or(base.conditional_put),
        timeout: or(given.timeout, base.timeout, |Time(time)| time),
        retries: given.retries.unwrap_or(base.retries),
        certificates,
    };
    // What it refuses is known without a connection.
    S3::new(&config).map_err(|error| Error::Invalid(format!("{key}: {error}")))?;
    Ok(Where::Bucket(Box::new(config)))
}

#[cfg(not(feature = "s3"))]
fn bucket(key: &str, _given: &raw::S3, _variables: &BTreeMap<String, String>) -> Result<Where, Error> {
    invalid(key, "this build has no S3: build it with the feature \"s3\"")
}
