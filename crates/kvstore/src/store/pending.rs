//! Puts between their start and their commit: in memory only, seen by nobody.

use std::collections::{HashMap, HashSet};
use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use super::Store;
use super::put::{Put, Rule};
use super::stats::add;
use crate::error::Error;
use crate::key::{Key, Kind};
use crate::media::Record;
use crate::object::Meta;

/// Names a put that was started. Never given twice by one open store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PutId(pub u64);

/// What became of a start.
#[derive(Debug)]
pub enum Started {
    /// Write its bytes.
    Write(PutId),
    /// Not needed or refused, as a put would be.
    Not(Put),
}

struct Open {
    meta: Meta,
    bytes: Vec<u8>,
    since: Duration,
}

/// All of them, with a bound on their bytes.
pub(super) struct Pending {
    next: u64,
    most: u64,
    bytes: u64,
    open: HashMap<PutId, Open>,
}

impl Pending {
    pub(super) fn new(most: u64) -> Self {
        Self { next: 0, most, bytes: 0, open: HashMap::new() }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Keys of what is being written.
    pub(super) fn keys(&self) -> impl Iterator<Item = Key> {
        self.open.values().map(|open| open.meta.id.key)
    }

    pub(super) fn clear(&mut self) {
        self.open.clear();
        self.bytes = 0;
    }

    fn start(&mut self, meta: Meta, since: Duration) -> Option<PutId> {
        let bytes = self.bytes + u64::from(meta.len);
        if bytes > self.most {
            return None;
        }
        self.bytes = bytes;
        self.next += 1;
        let id = PutId(self.next);
        self.open.insert(id, Open { meta, bytes: Vec::new(), since });
        Some(id)
    }

    fn take(&mut self, id: PutId) -> Option<Open> {
        let open = self.open.remove(&id)?;
        self.bytes -= u64::from(open.meta.len);
        Some(open)
    }

    fn drop_older(&mut self, than: Duration) -> u64 {
        let old: Vec<PutId> = self.open.iter().filter(|(_, open)| open.since < than).map(|(&id, _)| id).collect();
        old.iter().filter_map(|&id| self.take(id)).count() as u64
    }
}

impl Store {
    pub(super) fn pending(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins puts: tells for each whether its bytes are wanted. A parent must be present, or among these, or started before.
    pub fn start(&self, metas: &[Meta], rule: Rule) -> Vec<Started> {
        if let Err(error) = self.refuse_when_draining() {
            let text = error.to_string();
            return metas.iter().map(|_| Started::Not(Put::Failed(Error::Unavailable(text.clone())))).collect();
        }
        let adopted = self.adopted_metas(metas);
        let metas = adopted.as_deref().unwrap_or(metas);
        let now = self.clock.monotonic();
        let mut coming: HashSet<Key> = self.pending().keys().collect();
        coming.extend(metas.iter().filter(|meta| meta.id.kind == Kind::Block).map(|meta| meta.id.key));
        metas
            .iter()
            .map(|&meta| {
                if let Some(put) = self.judge(&meta, rule, &coming) {
                    return Started::Not(put);
                }
                let started = self.pending().start(meta, now);
                started.map_or_else(
                    || {
                        add(&self.counters.full, 1);
                        Started::Not(Put::Failed(Error::Full("memory for puts that are being written".to_owned())))
                    },
                    Started::Write,
                )
            })
            .collect()
    }

    /// The next bytes of a put, in order.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a put that is not open, bytes that do not follow, or too many of them.
    pub fn write(&self, id: PutId, offset: u32, bytes: &[u8]) -> Result<(), Error> {
        let mut pending = self.pending();
        let open = pending.open.get_mut(&id).ok_or_else(|| gone(id))?;
        if open.bytes.len() as u64 != u64::from(offset) {
            return Err(Error::Invalid(format!("bytes at {offset}: {} come next", open.bytes.len())));
        }
        if u64::from(offset) + bytes.len() as u64 > u64::from(open.meta.len) {
            return Err(Error::Invalid(format!("more than the {} bytes that were announced", open.meta.len)));
        }
        if open.bytes.is_empty() {
            open.bytes.reserve_exact(open.meta.len as usize);
        }
        open.bytes.extend_from_slice(bytes);
        Ok(())
    }

    /// Makes puts durable, then visible. What it says of each is final; none stays open.
    pub fn commit(&self, ids: &[PutId], rule: Rule) -> Vec<Put> {
        let taken: Vec<Option<Open>> = {
            let mut pending = self.pending();
            ids.iter().map(|&id| pending.take(id)).collect()
        };
        let pieces: Vec<[&[u8]; 1]> =
            taken.iter().map(|open| [open.as_ref().map_or(&[][..], |open| &open.bytes)]).collect();
        let records: Vec<Record<'_>> = taken
            .iter()
            .zip(&pieces)
            .filter_map(|(open, pieces)| open.as_ref().map(|open| Record { meta: open.meta, pieces }))
            .collect();
        let mut done = self.put(&records, rule).into_iter();
        let mut answer = |(&id, open): (&PutId, &Option<Open>)| match open {
            Some(_) => done.next().unwrap_or(Put::Failed(gone(id))),
            None => Put::Failed(gone(id)),
        };
        ids.iter().zip(&taken).map(&mut answer).collect()
    }

    /// Gives puts up. Those that are not open are passed over.
    pub fn revoke(&self, ids: &[PutId]) {
        let mut pending = self.pending();
        let count = ids.iter().filter_map(|&id| pending.take(id)).count();
        add(&self.counters.revoked, count as u64);
    }

    /// Drops puts that were begun too long ago.
    pub(super) fn drop_orphans(&self) -> u64 {
        let Some(than) = self.clock.monotonic().checked_sub(self.config.orphan_after) else { return 0 };
        let dropped = self.pending().drop_older(than);
        add(&self.counters.orphans, dropped);
        dropped
    }
}

fn gone(id: PutId) -> Error {
    Error::Invalid(format!("put {} is not open: it was committed, revoked, or dropped after its time", id.0))
}
