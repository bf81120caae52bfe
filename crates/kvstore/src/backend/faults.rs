//! A back end that fails when told to: for tests and benches of what stands above one.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use super::{Backend, Capabilities, Name, Put};
use crate::Error;

/// Another back end, slower or out of reach.
#[derive(Debug)]
pub struct Faulty {
    inner: Arc<dyn Backend>,
    down: AtomicBool,
    hanging: AtomicBool,
    delay_us: AtomicU64,
    /// Writes that still succeed; then they fail.
    writes_left: AtomicUsize,
    reads: AtomicUsize,
}

impl Faulty {
    /// `inner`, without faults so far.
    pub fn new(inner: Arc<dyn Backend>) -> Self {
        Self {
            inner,
            down: AtomicBool::new(false),
            hanging: AtomicBool::new(false),
            delay_us: AtomicU64::new(0),
            writes_left: AtomicUsize::new(usize::MAX),
            reads: AtomicUsize::new(0),
        }
    }

    /// From now on every call fails at once, or none does.
    pub fn set_down(&self, down: bool) {
        self.down.store(down, SeqCst);
    }

    /// From now on no call is ever answered, or each is.
    pub fn set_hanging(&self, hanging: bool) {
        self.hanging.store(hanging, SeqCst);
    }

    /// From now on every call takes this much longer.
    pub fn set_delay(&self, delay: Duration) {
        self.delay_us.store(delay.as_micros() as u64, SeqCst);
    }

    /// After this many more writes, writes fail.
    pub fn set_writes_left(&self, writes: usize) {
        self.writes_left.store(writes, SeqCst);
    }

    /// Calls of [`Backend::get_ranges`] so far.
    pub fn reads(&self) -> usize {
        self.reads.load(SeqCst)
    }

    async fn pass(&self) -> Result<(), Error> {
        if self.hanging.load(SeqCst) {
            std::future::pending::<()>().await;
        }
        let delay = self.delay_us.load(SeqCst);
        if delay > 0 {
            tokio::time::sleep(Duration::from_micros(delay)).await;
        }
        if self.down.load(SeqCst) {
            return Err(Error::Unavailable(format!("{} is down by order", self.inner.place())));
        }
        Ok(())
    }

    async fn write(&self) -> Result<(), Error> {
        self.pass().await?;
        let left =
            self.writes_left.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(usize::from(left != usize::MAX)));
        left.map(|_| ()).map_err(|_| Error::Full(format!("{} takes no more writes by order", self.inner.place())))
    }
}

#[async_trait]
impl Backend for Faulty {
    fn place(&self) -> &str {
        self.inner.place()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    async fn put_segment(&self, name: &Name, parts: Vec<Bytes>) -> Result<(), Error> {
        self.write().await?;
        self.inner.put_segment(name, parts).await
    }

    async fn put_object(&self, name: &Name, parts: Vec<Bytes>) -> Result<Put, Error> {
        self.write().await?;
        self.inner.put_object(name, parts).await
    }

    async fn get_ranges(&self, name: &Name, ranges: &[Range<u64>]) -> Result<Option<Vec<Bytes>>, Error> {
        self.reads.fetch_add(1, SeqCst);
        self.pass().await?;
        self.inner.get_ranges(name, ranges).await
    }

    async fn delete_many(&self, names: &[Name]) -> Result<(), Error> {
        self.pass().await?;
        self.inner.delete_many(names).await
    }

    async fn list(&self, prefix: &str) -> Result<Vec<(Name, u64)>, Error> {
        self.pass().await?;
        self.inner.list(prefix).await
    }
}
