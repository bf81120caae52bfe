//! From the arena to the store, in the background: the backlog of puts.
//!
//! Owns: how much may wait, the order of one tenant's puts (parents before children), what is told of those that failed.
//! Never touches: sockets. What waits is pinned in the arena.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::arena::{Arena, Pin};
use super::counters::{Counters, add};
use super::tenants::Tenant;
use crate::key::{Key, Kind, ObjectId};
use crate::object::Class;
use crate::upstream::Save;
use crate::wire::Outcome;

/// Objects of one put that the store has to get.
#[derive(Debug)]
pub struct Write {
    chain: Vec<Key>,
    class: Class,
    items: Vec<Item>,
    bytes: u64,
}

#[derive(Debug)]
struct Item {
    kind: Kind,
    at: usize,
    pin: Pin,
}

#[derive(Default)]
struct Open {
    ready: VecDeque<Arc<Tenant>>,
    bytes: u64,
    busy: usize,
    closed: bool,
}

/// All puts on their way.
pub struct Backlog {
    arena: Arc<Arena>,
    counters: Arc<Counters>,
    most: u64,
    open: Mutex<Open>,
    wake: Condvar,
    freed: Condvar,
}

/// A share of the backlog, given back when dropped unless it was used.
pub struct Share<'a> {
    backlog: &'a Backlog,
    bytes: u64,
}

impl Drop for Share<'_> {
    fn drop(&mut self) {
        self.backlog.give_back(self.bytes);
    }
}

impl Backlog {
    /// Of `most` bytes.
    pub fn new(arena: Arc<Arena>, counters: Arc<Counters>, most: u64) -> Self {
        Self { arena, counters, most, open: Mutex::default(), wake: Condvar::new(), freed: Condvar::new() }
    }

    fn open(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes in it.
    pub fn bytes(&self) -> u64 {
        self.open().bytes
    }

    fn give_back(&self, bytes: u64) {
        self.open().bytes -= bytes;
        self.freed.notify_all();
    }

    /// Waits for room for `bytes`, for a moment at most.
    pub fn take(&self, bytes: u64, moment: Duration) -> Option<Share<'_>> {
        let until = Instant::now() + moment;
        let mut open = self.open();
        loop {
            if open.bytes + bytes <= self.most {
                open.bytes += bytes;
                return Some(Share { backlog: self, bytes });
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            open = self.freed.wait_timeout(open, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Queues objects under a share that covers them; what it has too much goes back.
    pub fn push(
        &self,
        mut share: Share<'_>,
        tenant: &Arc<Tenant>,
        chain: Vec<Key>,
        class: Class,
        items: Vec<(Kind, usize, Pin)>,
    ) {
        if items.is_empty() {
            return;
        }
        let bytes: u64 = items.iter().map(|(_, _, pin)| u64::from(pin.extent().len)).sum();
        share.bytes -= bytes.min(share.bytes);
        let items = items.into_iter().map(|(kind, at, pin)| Item { kind, at, pin }).collect();
        let schedule = {
            let mut queue = tenant.queue();
            queue.jobs.push_back(Write { chain, class, items, bytes });
            queue.taken += 1;
            !std::mem::replace(&mut queue.scheduled, true)
        };
        if schedule {
            self.open().ready.push_back(Arc::clone(tenant));
            self.wake.notify_one();
        }
    }

    /// Writes until [`Backlog::close`], and then what is left: the body of a thread.
    pub fn work(&self) {
        loop {
            let tenant = {
                let mut open = self.open();
                loop {
                    if let Some(tenant) = open.ready.pop_front() {
                        open.busy += 1;
                        break tenant;
                    }
                    if open.closed {
                        return;
                    }
                    open = self.wake.wait(open).unwrap_or_else(PoisonError::into_inner);
                }
            };
            let job = tenant.queue().jobs.pop_front();
            if let Some(job) = job {
                let bytes = job.bytes;
                let failed = self.write(&tenant, job);
                self.give_back(bytes);
                add(&self.counters.unwritten, failed);
                let mut queue = tenant.queue();
                queue.done += 1;
                queue.unwritten += failed;
            }
            tenant.progress();
            let more = {
                let mut queue = tenant.queue();
                queue.scheduled = !queue.jobs.is_empty();
                queue.scheduled
            };
            let mut open = self.open();
            open.busy -= 1;
            if more {
                open.ready.push_back(tenant);
                self.wake.notify_one();
            }
            drop(open);
            self.freed.notify_all();
        }
    }

    /// How many of a job's objects the store did not take.
    fn write(&self, tenant: &Tenant, job: Write) -> u64 {
        let outcomes = put(tenant, &job.chain, job.class, &job.items);
        let mut failed = 0;
        let mut orphans = Vec::new();
        for (item, outcome) in job.items.into_iter().zip(outcomes) {
            let id = ObjectId { kind: item.kind, key: job.chain[item.at] };
            match outcome {
                Outcome::Stored | Outcome::Exists => add(&self.counters.written, 1),
                Outcome::NoParent => orphans.push(item),
                outcome => {
                    failed += 1;
                    if outcome == Outcome::Conflict {
                        // The store's bytes are the first: here, too, from now on.
                        add(&self.counters.conflicts, 1);
                        self.arena.remove(tenant.name(id));
                    } else if outcome == Outcome::Invalid && item.pin.is_damaged() {
                        add(&self.counters.quarantined, 1);
                        self.arena.remove(tenant.name(id));
                    }
                }
            }
        }
        failed + self.write_with_parents(tenant, &job.chain, job.class, orphans)
    }

    /// The store has lost ancestors that may still lie here: writes them again, with those that need them.
    fn write_with_parents(&self, tenant: &Tenant, chain: &[Key], class: Class, orphans: Vec<Item>) -> u64 {
        let Some(last) = orphans.iter().map(|item| item.at).max() else { return 0 };
        let count = orphans.len() as u64;
        let Ok(found) = tenant.upstream.check(&chain[..=last], 0) else { return count };
        let mut items = Vec::new();
        for (at, &key) in chain.iter().enumerate().take(last + 1).skip(found.blocks) {
            let block = tenant.name(ObjectId { kind: Kind::Block, key });
            match self.arena.pin(block) {
                Some(pin) => items.push(Item { kind: Kind::Block, at, pin }),
                // What is behind it has no parent, whatever else is done.
                None => break,
            }
        }
        items.extend(orphans.into_iter().filter(|item| item.kind == Kind::Slice));
        let outcomes = put(tenant, chain, class, &items);
        let there = outcomes.iter().filter(|outcome| outcome.is_there()).count() as u64;
        add(&self.counters.written, there);
        // A chain that is written whole has written those that were refused.
        if there == items.len() as u64 && items.iter().any(|item| item.at == last) { 0 } else { count }
    }

    /// Waits until nothing is left, or time is over: whether all was tried.
    pub fn drain(&self, patience: Duration) -> bool {
        let until = Instant::now() + patience;
        let mut open = self.open();
        loop {
            if open.ready.is_empty() && open.busy == 0 {
                return true;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            open = self.freed.wait_timeout(open, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Ends the threads: what waits is given up.
    pub fn close(&self) {
        let left = {
            let mut open = self.open();
            open.closed = true;
            std::mem::take(&mut open.ready)
        };
        for tenant in left {
            tenant.queue().jobs.clear();
        }
        self.wake.notify_all();
    }
}

fn put(tenant: &Tenant, chain: &[Key], class: Class, items: &[Item]) -> Vec<Outcome> {
    let pieces: Vec<[&[u8]; 1]> = items.iter().map(|item| [item.pin.bytes()]).collect();
    let saves: Vec<Save<'_>> = items
        .iter()
        .zip(&pieces)
        .map(|(item, pieces)| Save { kind: item.kind, at: item.at, pieces, checksum: Some(item.pin.extent().checksum) })
        .collect();
    let mut outcomes = tenant.upstream.put(chain, &saves, class);
    outcomes.resize(items.len(), Outcome::Failed);
    outcomes
}
