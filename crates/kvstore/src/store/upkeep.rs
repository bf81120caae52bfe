//! What has to be done now and then, in bounded pieces, by a thread or by whoever runs the store.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, MutexGuard, PoisonError, Weak};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use super::stats::add;
use super::{Kept, Store};
use crate::error::Error;

/// Entries looked at for expiry each time, and at once: so long nobody else comes to the index.
const ROWS: usize = 4096;
const ROWS_AT_ONCE: usize = 256;

/// What one round of upkeep did.
#[derive(Debug, Default)]
pub struct Tended {
    /// Puts dropped after their time.
    pub orphans: u64,
    /// Objects whose time to live was over.
    pub expired: u64,
    /// Collection has more to do now.
    pub more: bool,
    /// What collection or the catalogue met; the next round tries again.
    pub error: Option<Error>,
}

impl Store {
    fn upkeep(&self) -> MutexGuard<'_, Option<Thread>> {
        self.upkeep.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the thread that tends this store, if there is one, see to the policy now.
    pub(super) fn wake_upkeep(&self) {
        if let Some(thread) = &*self.upkeep() {
            thread.unpark();
        }
    }

    /// One round: orphans, expiry, a piece of collection, the catalogue's list and time.
    pub fn tend(&self) -> Tended {
        let orphans = self.drop_orphans();
        let now = self.now();
        self.apply_touches();
        let mut expired = 0;
        for _ in 0..ROWS / ROWS_AT_ONCE {
            let mut kept = self.kept_mut();
            let Kept { retention, live } = &mut *kept;
            expired += retention.expire(ROWS_AT_ONCE, now, &mut |removed| live.drop_removed(removed)) as u64;
        }
        add(&self.counters.expired, expired);
        let collected = self.collect(false);
        let noted = self.note_segments().and_then(|()| self.keep_time());
        let more = matches!(collected, Ok(true));
        Tended { orphans, expired, more, error: collected.err().or(noted.err()) }
    }
}

/// A thread that tends a store until this is dropped, or the store is.
pub struct Upkeep {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Upkeep {
    /// Tends every `pause`; at once while collection has more to do.
    ///
    /// # Errors
    /// [`Error::Io`]: no thread could be started.
    pub fn start(store: &Arc<Store>, pause: Duration) -> Result<Self, Error> {
        let stop = Arc::new(AtomicBool::new(false));
        let tended = Arc::clone(store);
        let (store, stopped): (Weak<Store>, _) = (Arc::downgrade(store), Arc::clone(&stop));
        let thread = std::thread::Builder::new()
            .name("kvstore-upkeep".to_owned())
            .spawn(move || {
                let mut due = Instant::now();
                while !stopped.load(Ordering::Relaxed) {
                    let Some(store) = store.upgrade() else { return };
                    if Instant::now() >= due {
                        let more = store.tend().more;
                        due = Instant::now() + if more { Duration::ZERO } else { pause };
                    } else {
                        // Woken: the policy is behind with what was found.
                        store.apply_touches();
                    }
                    drop(store);
                    std::thread::park_timeout(due.saturating_duration_since(Instant::now()));
                }
            })
            .map_err(Error::io("start the upkeep thread"))?;
        *tended.upkeep() = Some(thread.thread().clone());
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Upkeep {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // Its own panic was reported by the hook; nothing is left to undo.
            let _ = thread.join();
        }
    }
}
