//! A store and the others over its back end, joined by a directory server.
//!
//! Owns: when the server is told of what came, went and moved, when all is told again, and that nobody waits for a server that does not answer.
//! Never touches: what is kept, bytes of objects.
//!
//! One thread tells, in pieces; it alone tries a server that failed. Questions of requests go to a few threads and are waited for a bounded
//! time, whatever a server or one of many members of a cluster does.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, SyncSender};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use super::Hint;
use super::soft::{Settings, SoftDirectory};
use crate::error::Error;
use crate::key::ObjectId;
use crate::store::{Elsewhere, Store, Told};
use crate::trouble::Trouble;

/// Threads that ask, and questions that wait for one. Further ones are misses.
const ASKERS: usize = 4;
const WAITING: usize = 64;

/// Objects told of in one round trip.
const PIECE: usize = 1024;

/// All is told again so often, whatever happens: a member of a cluster may have lost its part unseen, and times to live go on here.
const TELL_AGAIN: Duration = Duration::from_secs(1800);

/// What the thread that tells sleeps at most.
const LOOK: Duration = Duration::from_millis(500);

type Answer = SyncSender<Vec<Option<Hint>>>;
type Question = (Vec<ObjectId>, Answer);

#[derive(Default)]
struct Counters {
    told: AtomicU64,
    taken_back: AtomicU64,
    told_again: AtomicU64,
    not_asked: AtomicU64,
    late: AtomicU64,
    backlog: AtomicUsize,
}

struct Inner {
    directory: SoftDirectory,
    timeout: Duration,
    retry: Duration,
    /// The last call was answered.
    up: AtomicBool,
    stop: AtomicBool,
    asking: Mutex<Option<SyncSender<Question>>>,
    /// Hints that were not so.
    stale: Mutex<Vec<Hint>>,
    teller: OnceLock<Thread>,
    counters: Counters,
}

/// Joins a store with the others until it is dropped, when it tells what is left.
pub struct Share {
    inner: Arc<Inner>,
    threads: Vec<JoinHandle<()>>,
}

impl Share {
    /// Begins to ask and to tell. A server that is down is no error: then nothing is found elsewhere, until it is back.
    ///
    /// # Errors
    /// As [`SoftDirectory::new`]; [`Error::Io`]: no threads.
    pub fn start(store: &Arc<Store>, settings: Settings) -> Result<Self, Error> {
        let (timeout, retry) = (settings.timeout, settings.retry);
        let (asking, questions) = mpsc::sync_channel::<Question>(WAITING);
        let directory = SoftDirectory::new(settings)?;
        // Known before anybody is told that the store is open.
        let up = directory.remembers(store.media(), 1).is_ok();
        let inner = Arc::new(Inner {
            directory,
            timeout,
            retry,
            up: AtomicBool::new(up),
            stop: AtomicBool::new(false),
            asking: Mutex::new(Some(asking)),
            stale: Mutex::default(),
            teller: OnceLock::new(),
            counters: Counters::default(),
        });
        let mut share = Self { inner: Arc::clone(&inner), threads: Vec::new() };
        let questions = Arc::new(Mutex::new(questions));
        for at in 0..ASKERS {
            let (inner, questions) = (Arc::clone(&inner), Arc::clone(&questions));
            share.spawn(format!("kvstore-ask-{at}"), move || {
                loop {
                    let next = questions.lock().unwrap_or_else(PoisonError::into_inner).recv();
                    let Ok((ids, answer)) = next else { return };
                    let hints = inner.ask(&ids);
                    // Nobody waits for it any more: it was late.
                    let _ = answer.try_send(hints);
                }
            })?;
        }
        store.share(Arc::clone(&inner) as Arc<dyn Elsewhere>);
        let (weak, telling) = (Arc::downgrade(store), Arc::clone(&inner));
        share.spawn("kvstore-tell".to_owned(), move || Teller::new(&telling).run(&weak))?;
        if let Some(thread) = share.threads.last() {
            let _ = inner.teller.set(thread.thread().clone());
        }
        Ok(share)
    }

    fn spawn(&mut self, name: String, work: impl FnOnce() + Send + 'static) -> Result<(), Error> {
        let thread = std::thread::Builder::new().name(name).spawn(work);
        self.threads.push(thread.map_err(Error::io("start a thread of the directory"))?);
        Ok(())
    }

    /// Whether the server answered when it was last asked.
    pub fn is_up(&self) -> bool {
        self.inner.up.load(Ordering::Relaxed)
    }

    /// See [`SoftDirectory::trouble`].
    pub fn trouble(&self) -> &Trouble {
        self.inner.directory.trouble()
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.inner.stop.store(true, Ordering::Relaxed);
        *self.inner.asking.lock().unwrap_or_else(PoisonError::into_inner) = None;
        for thread in self.threads.drain(..) {
            thread.thread().unpark();
            // Its own panic was reported by the hook; nothing is left to undo.
            let _ = thread.join();
        }
    }
}

impl Inner {
    fn ask(&self, ids: &[ObjectId]) -> Vec<Option<Hint>> {
        let before = self.directory.counters().failures;
        let hints = self.directory.find(ids);
        if self.directory.counters().failures > before {
            self.up.store(false, Ordering::Relaxed);
        }
        hints
    }
}

impl Elsewhere for Inner {
    fn find(&self, ids: &[ObjectId]) -> Vec<Option<Hint>> {
        let none = || vec![None; ids.len()];
        let not_asked = || {
            self.counters.not_asked.fetch_add(ids.len() as u64, Ordering::Relaxed);
            none()
        };
        if !self.up.load(Ordering::Relaxed) {
            return not_asked();
        }
        let Some(asking) = self.asking.lock().unwrap_or_else(PoisonError::into_inner).clone() else {
            return not_asked();
        };
        let (answer, waiting) = mpsc::sync_channel(1);
        if asking.try_send((ids.to_vec(), answer)).is_err() {
            return not_asked();
        }
        waiting.recv_timeout(self.timeout).unwrap_or_else(|_| {
            // Whatever it is that takes so long: the thread that tells finds out whether it is over.
            self.up.store(false, Ordering::Relaxed);
            self.counters.late.fetch_add(ids.len() as u64, Ordering::Relaxed);
            none()
        })
    }

    fn stale(&self, hints: &[Hint]) {
        let mut stale = self.stale.lock().unwrap_or_else(PoisonError::into_inner);
        // Beyond that they are found stale again.
        let room = PIECE.saturating_sub(stale.len());
        stale.extend(hints.iter().take(room));
        drop(stale);
        self.wake();
    }

    fn wake(&self) {
        if let Some(teller) = self.teller.get() {
            teller.unpark();
        }
    }

    fn counts(&self) -> Vec<(&'static str, u64)> {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let asked = self.directory.counters();
        vec![
            ("up", self.up.load(Ordering::Relaxed).into()),
            ("backlog", self.counters.backlog.load(Ordering::Relaxed) as u64),
            ("asked", asked.asked),
            ("found", asked.found),
            ("unanswered", asked.unanswered + of(&self.counters.not_asked) + of(&self.counters.late)),
            ("failures", asked.failures),
            ("malformed", asked.malformed),
            ("told", of(&self.counters.told)),
            ("taken_back", of(&self.counters.taken_back)),
            ("told_again", of(&self.counters.told_again)),
        ]
    }
}

/// Tells the server, one piece after the other.
struct Teller<'a> {
    inner: &'a Inner,
    /// Changes that the server was not told of yet, as it failed.
    left: VecDeque<(ObjectId, Option<Told>)>,
    /// The row of the index behind which telling all goes on.
    row: Option<usize>,
    told_all: Instant,
    tried: Instant,
}

impl<'a> Teller<'a> {
    fn new(inner: &'a Inner) -> Self {
        let now = Instant::now();
        Self { inner, left: VecDeque::new(), row: Some(0), told_all: now, tried: now }
    }

    fn run(mut self, store: &Weak<Store>) {
        loop {
            let stopping = self.inner.stop.load(Ordering::Relaxed);
            let Some(store) = store.upgrade() else { return };
            let more = self.round(&store);
            drop(store);
            // What is left at the end is told once, if the server takes it.
            if stopping && (!more || !self.inner.up.load(Ordering::Relaxed)) {
                return;
            }
            if !more {
                std::thread::park_timeout(LOOK.min(self.inner.retry));
            }
        }
    }

    /// One piece of what is to be told; whether there is more that can be told now.
    fn round(&mut self, store: &Store) -> bool {
        let (changes, lost) = store.take_changes(PIECE.saturating_sub(self.left.len()));
        let full = changes.len() + self.left.len() >= PIECE;
        self.left.extend(changes);
        if lost {
            self.row = Some(0);
        }
        self.inner.counters.backlog.store(self.left.len(), Ordering::Relaxed);
        if !self.is_up(store.media()) {
            return false;
        }
        if self.tell(store).is_ok() {
            return full || self.row.is_some();
        }
        // Counted by the directory. What it was not told it is told later; what it had may be gone.
        self.inner.up.store(false, Ordering::Relaxed);
        self.row = Some(0);
        false
    }

    /// Looks after the server: one that failed is tried again after a while, one that lost what it had is told all of it.
    fn is_up(&mut self, media: u64) -> bool {
        let was = self.inner.up.load(Ordering::Relaxed);
        if self.tried.elapsed() >= self.inner.retry {
            self.tried = Instant::now();
            // Longer than all is told again.
            match self.inner.directory.remembers(media, 4 * TELL_AGAIN.as_secs() as u32) {
                Ok(remembers) => {
                    if !remembers || !was || self.told_all.elapsed() >= TELL_AGAIN {
                        self.row = Some(0);
                        self.told_all = Instant::now();
                    }
                    self.inner.up.store(true, Ordering::Relaxed);
                }
                Err(_) => self.inner.up.store(false, Ordering::Relaxed),
            }
        }
        self.inner.up.load(Ordering::Relaxed)
    }

    fn tell(&mut self, store: &Store) -> Result<(), Error> {
        let directory = &self.inner.directory;
        let there: Vec<Told> = self.left.iter().filter_map(|(_, told)| *told).collect();
        directory.publish(&there)?;
        let gone: Vec<ObjectId> = self.left.iter().filter(|(_, told)| told.is_none()).map(|&(id, _)| id).collect();
        self.take_back(&gone, |hint| hint.media == store.media())?;
        self.inner.counters.told.fetch_add(there.len() as u64, Ordering::Relaxed);
        self.left.clear();
        self.inner.counters.backlog.store(0, Ordering::Relaxed);
        let stale = std::mem::take(&mut *self.inner.stale.lock().unwrap_or_else(PoisonError::into_inner));
        let ids: Vec<ObjectId> = stale.iter().map(|hint| hint.meta.id).collect();
        self.take_back(&ids, |hint| stale.contains(hint))?;
        if let Some(row) = self.row {
            let (told, last) = store.told_of(row, PIECE);
            directory.publish(&told)?;
            self.inner.counters.told_again.fetch_add(told.len() as u64, Ordering::Relaxed);
            self.row = last;
        }
        Ok(())
    }

    /// Deletes entries that say so still: another store may hold the object as well, or say by now where it moved.
    fn take_back(&self, ids: &[ObjectId], is_wrong: impl Fn(&Hint) -> bool) -> Result<(), Error> {
        if ids.is_empty() {
            return Ok(());
        }
        let hints = self.inner.directory.find(ids).into_iter().zip(ids);
        let wrong: Vec<ObjectId> =
            hints.filter(|(hint, _)| hint.as_ref().is_some_and(&is_wrong)).map(|(_, &id)| id).collect();
        self.inner.directory.forget(&wrong)?;
        self.inner.counters.taken_back.fetch_add(wrong.len() as u64, Ordering::Relaxed);
        Ok(())
    }
}
