//! For whom the agent works: a store for each way in which engines say who they are.
//!
//! Owns: one [`Upstream`] for each, bounded in number; sizes of blocks in use. Never touches: sockets, the arena.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::behind::Write;
use super::table::Name;
use crate::error::Error;
use crate::key::ObjectId;
use crate::upstream::{Source, Upstream};
use crate::wire::Hello;

/// Puts of one tenant on their way to the store, first in first out.
#[derive(Debug, Default)]
pub struct Queue {
    /// Waiting.
    pub jobs: VecDeque<Write>,
    /// A thread writes for it, or it is waiting for one.
    pub scheduled: bool,
    /// Jobs taken in so far.
    pub taken: u64,
    /// Jobs done so far, well or not.
    pub done: u64,
    /// Objects that the store did not take, from a number on that no other tenant of this agent began with.
    pub unwritten: u64,
}

/// Whoever says the same of itself.
pub struct Tenant {
    digest: u128,
    /// Who it is.
    pub who: Hello,
    /// Its store.
    pub upstream: Arc<dyn Upstream>,
    /// Failures of it that [`Tenants::trouble`] has told of.
    failures_seen: AtomicU64,
    queue: Mutex<Queue>,
    progress: Condvar,
}

impl std::fmt::Debug for Tenant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tenant").field("who", &self.who).finish_non_exhaustive()
    }
}

impl Tenant {
    /// The name of one of its objects among those of all tenants.
    pub fn name(&self, id: ObjectId) -> Name {
        Name { tenant: self.digest, id }
    }

    /// Its puts on their way.
    pub fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells those who wait in [`Tenant::wait`].
    pub fn progress(&self) {
        self.progress.notify_all();
    }

    /// Waits until `target` jobs are done, for a moment at most: whether they are.
    pub fn wait(&self, target: u64, moment: Duration) -> bool {
        let until = Instant::now() + moment;
        let mut queue = self.queue();
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if queue.done >= target || left.is_zero() {
                return queue.done >= target;
            }
            queue = self.progress.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// All of them.
pub struct Tenants {
    source: Arc<dyn Source>,
    most: usize,
    open: Mutex<Open>,
}

#[derive(Default)]
struct Open {
    /// Failures of stores that are no longer among them.
    failures_before: u64,
    /// Why the latest one seen failed.
    told: Option<String>,
    by_hello: HashMap<Hello, Arc<Tenant>>,
    opened: u64,
    block_sizes: HashMap<[u8; 16], u32>,
}

impl Tenants {
    /// None yet; `most` at once.
    pub fn new(source: Arc<dyn Source>, most: usize) -> Self {
        Self { source, most, open: Mutex::default() }
    }

    fn open(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The tenant of whoever says this of itself. One that nobody needs now makes room for another.
    ///
    /// # Errors
    /// [`Error::Full`], and as [`Source::open`].
    pub fn of(&self, who: &Hello) -> Result<Arc<Tenant>, Error> {
        let mut open = self.open();
        if let Some(tenant) = open.by_hello.get(who) {
            return Ok(Arc::clone(tenant));
        }
        if open.by_hello.len() >= self.most {
            let idle =
                open.by_hello.iter().find(|(_, tenant)| Arc::strong_count(tenant) == 1).map(|(who, _)| who.clone());
            let idle = idle.ok_or_else(|| Error::Full(format!("more than {} tenants at once", self.most)))?;
            if let Some(tenant) = open.by_hello.remove(&idle) {
                open.failures_before += tenant.upstream.failures();
            }
        }
        let upstream = self.source.open(who)?;
        open.opened += 1;
        let digest = blake3::hash(who.tenant.as_bytes());
        let digest = u128::from_le_bytes(*digest.as_bytes().first_chunk().unwrap_or(&[0; 16]));
        let queue = Mutex::new(Queue { unwritten: open.opened << 32, ..Queue::default() });
        let tenant = Arc::new(Tenant {
            digest,
            who: who.clone(),
            upstream,
            failures_seen: AtomicU64::new(0),
            queue,
            progress: Condvar::new(),
        });
        open.by_hello.insert(who.clone(), Arc::clone(&tenant));
        Ok(tenant)
    }

    /// All that are open.
    pub fn all(&self) -> Vec<Arc<Tenant>> {
        self.open().by_hello.values().cloned().collect()
    }

    /// How often the store has failed, whoever it was asked for, and why at last.
    pub fn trouble(&self) -> (u64, Option<String>) {
        let mut open = self.open();
        let Open { failures_before, by_hello, told, .. } = &mut *open;
        let mut all = *failures_before;
        for tenant in by_hello.values() {
            let failures = tenant.upstream.failures();
            all += failures;
            if failures > tenant.failures_seen.swap(failures, Ordering::Relaxed) {
                *told = tenant.upstream.trouble();
            }
        }
        (all, told.clone())
    }

    /// Another size of blocks in use under a fingerprint, or 0. That of a writer is noted.
    pub fn other_block_tokens(&self, who: &Hello, writes: bool) -> u32 {
        const MOST: usize = 4096;
        if who.fingerprint == [0; 16] || who.block_tokens == 0 {
            return 0;
        }
        let mut open = self.open();
        match open.block_sizes.get(&who.fingerprint) {
            Some(&known) if known != who.block_tokens => known,
            None if writes && open.block_sizes.len() < MOST => {
                open.block_sizes.insert(who.fingerprint, who.block_tokens);
                0
            }
            _ => 0,
        }
    }
}
