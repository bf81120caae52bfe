//! Objects in the memory of this process, gone with it: for tests and benches.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use bytes::Bytes;

use super::{Backend, Capabilities, Name, Put, beyond};
use crate::Error;

/// A map.
#[derive(Debug, Default)]
pub struct Memory {
    objects: Mutex<BTreeMap<Name, Bytes>>,
}

impl Memory {
    /// Without objects.
    pub fn new() -> Self {
        Self::default()
    }

    fn objects(&self) -> MutexGuard<'_, BTreeMap<Name, Bytes>> {
        self.objects.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl Backend for Memory {
    fn place(&self) -> &'static str {
        "memory"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { ttl: false, conditional_put: true, checksum: false, range: true }
    }

    async fn put_segment(&self, name: &Name, parts: Vec<Bytes>) -> Result<(), Error> {
        self.objects().insert(name.clone(), parts.concat().into());
        Ok(())
    }

    async fn put_object(&self, name: &Name, parts: Vec<Bytes>) -> Result<Put, Error> {
        let mut objects = self.objects();
        if objects.contains_key(name) {
            return Ok(Put::Exists);
        }
        objects.insert(name.clone(), parts.concat().into());
        Ok(Put::Created)
    }

    async fn get_ranges(&self, name: &Name, ranges: &[Range<u64>]) -> Result<Option<Vec<Bytes>>, Error> {
        let Some(object) = self.objects().get(name).cloned() else { return Ok(None) };
        let len = object.len() as u64;
        let part = |range: &Range<u64>| {
            if range.start > range.end || range.end > len {
                return Err(beyond(name, range, len));
            }
            Ok(object.slice(range.start as usize..range.end as usize))
        };
        ranges.iter().map(part).collect::<Result<_, _>>().map(Some)
    }

    async fn delete_many(&self, names: &[Name]) -> Result<(), Error> {
        let mut objects = self.objects();
        for name in names {
            objects.remove(name);
        }
        Ok(())
    }

    async fn list(&self, prefix: &str) -> Result<Vec<(Name, u64)>, Error> {
        let objects = self.objects();
        Ok(objects
            .iter()
            .filter(|(name, _)| name.as_str().starts_with(prefix))
            .map(|(name, bytes)| (name.clone(), bytes.len() as u64))
            .collect())
    }
}
