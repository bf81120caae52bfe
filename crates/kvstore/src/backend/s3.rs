//! A bucket of an S3 service as a back end, through `object_store`.

use std::ops::Range;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt};
use object_store::aws::{AmazonS3, AmazonS3Builder, Checksum, S3ConditionalPut};
use object_store::path::Path;
use object_store::{
    BackoffConfig, Certificate, ClientOptions, ObjectStore, ObjectStoreExt, PutMode, PutPayload, RetryConfig,
};

use super::{Backend, Capabilities, Name, Put, beyond};
use crate::Error;

/// How to reach a bucket.
#[derive(Clone)]
pub struct S3Config {
    /// `http://host:port` or `https://…`. What goes over `http` is signed but can be read on the way.
    pub endpoint: String,
    /// The bucket, which is there already.
    pub bucket: String,
    /// Objects are named `<folder>/<name>`: 1 to 64 of `a-z 0-9 -`. Each store has one of its own.
    pub folder: String,
    /// Some services check it.
    pub region: String,
    /// Access key.
    pub access_key: String,
    /// Its secret.
    pub secret_key: String,
    /// Whether the service honours `If-None-Match: *`.
    pub conditional_put: bool,
    /// A request without an answer for so long has failed.
    pub timeout: Duration,
    /// More attempts after a failed one.
    pub retries: usize,
    /// Certificates (PEM) trusted beside those of the system.
    pub certificates: Option<Vec<u8>>,
}

impl Default for S3Config {
    fn default() -> Self {
        Self {
            endpoint: String::new(),
            bucket: String::new(),
            folder: "kvstore".into(),
            region: "us-east-1".into(),
            access_key: String::new(),
            secret_key: String::new(),
            conditional_put: true,
            timeout: Duration::from_secs(10),
            retries: 2,
            certificates: None,
        }
    }
}

impl std::fmt::Debug for S3Config {
    /// Without the secret.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("S3Config")
            .field("endpoint", &self.endpoint)
            .field("bucket", &self.bucket)
            .field("folder", &self.folder)
            .finish_non_exhaustive()
    }
}

/// A folder of a bucket. Its connections live in the runtime that it is first used from: one for each runtime.
#[derive(Debug)]
pub struct S3 {
    place: String,
    folder: String,
    conditional_put: bool,
    store: AmazonS3,
}

impl S3 {
    /// Makes a client; asks the service nothing yet.
    ///
    /// # Errors
    /// [`Error::Invalid`]: the configuration makes no sense.
    pub fn new(config: &S3Config) -> Result<Self, Error> {
        let named = |text: &str| {
            (1..=64).contains(&text.len())
                && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
        };
        if !named(&config.folder) {
            return Err(Error::Invalid("a folder of a bucket is named by 1 to 64 of a-z, 0-9 and -".into()));
        }
        let bucket = &config.bucket;
        if !(3..=63).contains(&bucket.len())
            || !bucket.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_'))
        {
            return Err(Error::Invalid(format!("{bucket:?} names no bucket: 3 to 63 of a-z, 0-9, - and .")));
        }
        let http = config.endpoint.starts_with("http://");
        if !http && !config.endpoint.starts_with("https://") {
            return Err(Error::Invalid(format!(
                "an S3 endpoint begins with http:// or https://: {:?}",
                config.endpoint
            )));
        }
        // One for the process; if it has another one already, that does as well.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut client = ClientOptions::new()
            .with_allow_http(http)
            .with_timeout(config.timeout)
            .with_connect_timeout(config.timeout.min(Duration::from_secs(2)));
        if let Some(pem) = &config.certificates {
            let known =
                Certificate::from_pem_bundle(pem).map_err(|error| Error::Invalid(format!("certificates: {error}")))?;
            client = known.into_iter().fold(client, ClientOptions::with_root_certificate);
        }
        let backoff = BackoffConfig {
            init_backoff: Duration::from_millis(50),
            max_backoff: Duration::from_secs(1),
            ..BackoffConfig::default()
        };
        let retry = RetryConfig { backoff, max_retries: config.retries, retry_timeout: config.timeout };
        let conditional = if config.conditional_put { S3ConditionalPut::ETagMatch } else { S3ConditionalPut::Disabled };
        let store = AmazonS3Builder::new()
            .with_endpoint(&config.endpoint)
            .with_bucket_name(&config.bucket)
            .with_region(&config.region)
            .with_access_key_id(&config.access_key)
            .with_secret_access_key(&config.secret_key)
            .with_checksum_algorithm(Checksum::SHA256)
            .with_conditional_put(conditional)
            .with_client_options(client)
            .with_retry(retry)
            .build()
            .map_err(|error| Error::Invalid(format!("S3: {error}")))?;
        let place = format!("{}/{}/{}", config.endpoint.trim_end_matches('/'), config.bucket, config.folder);
        Ok(Self { place, folder: config.folder.clone(), conditional_put: config.conditional_put, store })
    }

    fn path(&self, name: &Name) -> Path {
        Path::from_iter([self.folder.as_str(), name.as_str()])
    }

    fn failed(&self, what: &str) -> impl FnOnce(object_store::Error) -> Error {
        let what = format!("{what} {}", self.place);
        move |error| Error::Unavailable(format!("{what}: {error}"))
    }

    async fn put(&self, name: &Name, parts: Vec<Bytes>, mode: PutMode) -> Result<Put, Error> {
        let payload = PutPayload::from_iter(parts);
        match self.store.put_opts(&self.path(name), payload, mode.into()).await {
            Ok(_) => Ok(Put::Created),
            Err(object_store::Error::AlreadyExists { .. }) => Ok(Put::Exists),
            Err(error) => Err(self.failed("put to")(error)),
        }
    }
}

#[async_trait]
impl Backend for S3 {
    fn place(&self) -> &str {
        &self.place
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { ttl: false, conditional_put: self.conditional_put, checksum: true, range: true }
    }

    async fn put_segment(&self, name: &Name, parts: Vec<Bytes>) -> Result<(), Error> {
        self.put(name, parts, PutMode::Overwrite).await.map(|_| ())
    }

    async fn put_object(&self, name: &Name, parts: Vec<Bytes>) -> Result<Put, Error> {
        if !self.conditional_put {
            return Err(Error::Invalid(format!(
                "{} is configured as a service without conditional writes",
                self.place
            )));
        }
        self.put(name, parts, PutMode::Create).await
    }

    async fn get_ranges(&self, name: &Name, ranges: &[Range<u64>]) -> Result<Option<Vec<Bytes>>, Error> {
        if let Some(range) = ranges.iter().find(|range| range.start > range.end) {
            return Err(beyond(name, range, 0));
        }
        let path = self.path(name);
        // A range of nothing cannot be asked for in HTTP.
        let asked: Vec<Range<u64>> = ranges.iter().filter(|range| !range.is_empty()).cloned().collect();
        let found = if asked.is_empty() {
            self.store.head(&path).await.map(|_| Vec::new())
        } else {
            self.store.get_ranges(&path, &asked).await
        };
        let mut found = match found {
            Ok(found) => found.into_iter(),
            Err(object_store::Error::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(self.failed("get from")(error)),
        };
        let mut parts = Vec::with_capacity(ranges.len());
        for range in ranges {
            let part = if range.is_empty() { Bytes::new() } else { found.next().unwrap_or_default() };
            // What lies beyond the end is cut off, not refused, by the protocol.
            if part.len() as u64 != range.end - range.start {
                return Err(beyond(name, range, range.start + part.len() as u64));
            }
            parts.push(part);
        }
        Ok(Some(parts))
    }

    async fn delete_many(&self, names: &[Name]) -> Result<(), Error> {
        let paths: Vec<_> = names.iter().map(|name| Ok(self.path(name))).collect();
        let mut deleted = self.store.delete_stream(futures_util::stream::iter(paths).boxed());
        while let Some(done) = deleted.next().await {
            match done {
                Ok(_) | Err(object_store::Error::NotFound { .. }) => {}
                Err(error) => return Err(self.failed("delete from")(error)),
            }
        }
        Ok(())
    }

    async fn list(&self, prefix: &str) -> Result<Vec<(Name, u64)>, Error> {
        let folder = Path::from(self.folder.as_str());
        let mut found: Vec<(Name, u64)> = self
            .store
            .list(Some(&folder))
            .try_filter_map(|object| async move {
                Ok(object.location.filename().and_then(|name| name.parse().ok()).map(|name| (name, object.size)))
            })
            .try_collect()
            .await
            .map_err(self.failed("list"))?;
        found.retain(|(name, _): &(Name, u64)| name.as_str().starts_with(prefix));
        found.sort();
        Ok(found)
    }
}
