//! Collection: segments of which little lives are copied to the open one, a bounded piece at a time, and deleted.
//!
//! Nobody waits for more than a piece: the index is locked only to move entries that were already copied and synced, and the disk is
//! busy with one piece's write. A segment is looked at only when every append that began before it was sealed has reached the index.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError, TryLockError};
use std::time::Instant;

use super::Store;
use super::get::meta_of;
use super::stats::{add, longest};
use crate::error::Error;
use crate::index::Entry;
use crate::key::{Key, Kind, ObjectId};
use crate::media::{Place, Read, Record};
use crate::object::Meta;
use crate::record::span;

/// What is appended between two looks at whether collection is behind.
const LOOK_EVERY: u64 = 16 << 20;

/// A segment is not worth copying while more of it lives than this, in 64ths.
const WORTH: u64 = 58;

#[derive(Default)]
pub(super) struct Collection {
    /// When each sealed segment was first seen, in tickets.
    seen: HashMap<u32, u64>,
    job: Option<Job>,
    /// Segments that could not be read or copied whole, until the next open.
    stuck: Vec<u32>,
}

struct Job {
    segment: u32,
    records: Vec<(Place, Meta)>,
    next: usize,
}

impl Store {
    pub(super) fn collection(&self) -> MutexGuard<'_, Collection> {
        self.collection.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One bounded piece of collection: deletes what is empty, then copies up to `piece_bytes` of a segment if the slack is used up, or `force` is
    /// given. Whether there is more to do now.
    ///
    /// # Errors
    /// [`Error::Full`], [`Error::Io`], [`Error::Unavailable`].
    pub fn collect(&self, force: bool) -> Result<bool, Error> {
        let mut collection = self.collection();
        self.piece(&mut collection, force)
    }

    /// Writers help when the slack is used up twice: nothing else holds them back.
    pub(super) fn collect_if_behind(&self) {
        if self.appended.load(Ordering::Relaxed) < LOOK_EVERY.min(self.config.slack) {
            return;
        }
        self.appended.store(0, Ordering::Relaxed);
        if self.garbage() <= self.config.slack.saturating_mul(2) {
            return;
        }
        let mut collection = match self.collection.try_lock() {
            Ok(collection) => collection,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        // An error here is met again by whoever collects next, and is theirs to report.
        let _ = self.piece(&mut collection, false);
    }

    /// Bytes of sealed segments that nothing needs.
    fn garbage(&self) -> u64 {
        let segments = self.media.segments();
        let kept = self.kept();
        segments.iter().map(|&(number, bytes)| bytes.saturating_sub(kept.live.of(number))).sum()
    }

    /// Deletes sealed segments of which nothing lives. Whether any went.
    pub(super) fn delete_empty(&self) -> bool {
        let mut collection = self.collection();
        let before = self.counters.segments_deleted.load(Ordering::Relaxed);
        let mut settled = self.settled(&mut collection);
        // What could not be deleted is no room; the append says so again.
        let _ = self.delete_dead(&mut collection, &mut settled);
        self.counters.segments_deleted.load(Ordering::Relaxed) > before
    }

    /// Sealed segments whose live bytes say all, with their bytes.
    fn settled(&self, collection: &mut Collection) -> Vec<(u32, u64)> {
        let mut segments = self.media.segments();
        let tickets = self.tickets();
        let now = tickets.now();
        collection.seen.retain(|number, _| segments.binary_search_by_key(number, |&(number, _)| number).is_ok());
        segments.retain(|&(number, _)| tickets.is_past(*collection.seen.entry(number).or_insert(now)));
        segments
    }

    fn delete_dead(&self, collection: &mut Collection, settled: &mut Vec<(u32, u64)>) -> Result<(), Error> {
        let dead: Vec<u32> = {
            let kept = self.kept();
            settled.iter().map(|&(number, _)| number).filter(|&number| kept.live.of(number) == 0).collect()
        };
        for number in dead {
            if collection.job.as_ref().is_some_and(|job| job.segment == number) {
                collection.job = None;
            }
            // Forgotten first: a segment that is listed and gone would count as lost at the next open.
            self.catalogue.remove_segment(number)?;
            self.media.delete(number)?;
            let oldest = self.media.segments().first().map_or(number + 1, |&(oldest, _)| oldest);
            self.catalogue.remove_bad(number, oldest)?;
            settled.retain(|&(there, _)| there != number);
            add(&self.counters.segments_deleted, 1);
        }
        Ok(())
    }

    fn piece(&self, collection: &mut Collection, force: bool) -> Result<bool, Error> {
        let begun = Instant::now();
        let more = self.piece_untimed(collection, force);
        longest(&self.counters.collect_piece_us, begun.elapsed());
        more
    }

    fn piece_untimed(&self, collection: &mut Collection, force: bool) -> Result<bool, Error> {
        let mut settled = self.settled(collection);
        self.delete_dead(collection, &mut settled)?;
        if collection.job.is_none() {
            if !force && self.garbage() <= self.config.slack {
                return Ok(false);
            }
            let Some(segment) = self.poorest(collection, &settled) else { return Ok(false) };
            let mut records = Vec::new();
            if let Err(error) = self.media.records(segment, &mut |place, meta| records.push((place, meta))) {
                collection.stuck.push(segment);
                return Err(error);
            }
            collection.job = Some(Job { segment, records, next: 0 });
        }
        let Some(mut job) = collection.job.take() else { return Ok(false) };
        match self.copy(&mut job) {
            Ok(()) => {}
            Err(error) => {
                // A full disk may have room later; what cannot be read cannot be copied.
                if !matches!(error, Error::Full(_)) {
                    collection.stuck.push(job.segment);
                }
                return Err(error);
            }
        }
        if job.next < job.records.len() {
            collection.job = Some(job);
        } else {
            if self.kept().live.of(job.segment) > 0 {
                collection.stuck.push(job.segment);
            }
            let mut settled = self.settled(collection);
            self.delete_dead(collection, &mut settled)?;
        }
        Ok(true)
    }

    /// The settled segment with the smallest part alive.
    fn poorest(&self, collection: &Collection, settled: &[(u32, u64)]) -> Option<u32> {
        let kept = self.kept();
        settled
            .iter()
            .filter(|(number, _)| !collection.stuck.contains(number))
            .map(|&(number, bytes)| (kept.live.of(number) * 64 / bytes.max(1), number))
            .filter(|&(part, _)| part < WORTH)
            .min()
            .map(|(_, number)| number)
    }

    /// Copies the next live records of a job.
    fn copy(&self, job: &mut Job) -> Result<(), Error> {
        let mut bytes = 0;
        let mut live: Vec<(Entry, Option<Key>)> = Vec::new();
        {
            let kept = self.kept();
            while let Some(&(place, meta)) = job.records.get(job.next) {
                if bytes > 0 && bytes + span(meta.len) > self.config.piece_bytes {
                    break;
                }
                job.next += 1;
                if let Some((_, entry)) = kept.retention.get(meta.id).filter(|(_, entry)| entry.place == place) {
                    bytes += span(meta.len);
                    live.push((entry, meta.parent));
                }
            }
        }
        let mut buffers: Vec<Vec<u8>> = live.iter().map(|(entry, _)| vec![0; entry.len as usize]).collect();
        let mut reads: Vec<Read<'_>> = live
            .iter()
            .zip(&mut buffers)
            .map(|((entry, _), into)| Read { place: entry.place, meta: meta_of(entry), start: 0, into })
            .collect();
        let results = self.media.read(&mut reads);
        drop(reads);
        let mut whole: Vec<(Meta, Place, &[u8])> = Vec::new();
        let mut failed = None;
        for (((entry, parent), result), buffer) in live.iter().zip(results).zip(&buffers) {
            match result {
                // The copy says when it was last used, so that its life goes on from there after a restart.
                Ok(()) => whole.push((Meta { parent: *parent, ..meta_of(entry) }, entry.place, buffer)),
                Err(Error::Damaged(..)) => {
                    self.quarantine(entry);
                }
                Err(error) => failed = Some(error),
            }
        }
        self.move_to_open(&whole)?;
        failed.map_or(Ok(()), Err)
    }

    fn move_to_open(&self, whole: &[(Meta, Place, &[u8])]) -> Result<(), Error> {
        if whole.is_empty() {
            return Ok(());
        }
        let pieces: Vec<[&[u8]; 1]> = whole.iter().map(|&(_, _, bytes)| [bytes]).collect();
        let batch: Vec<Record<'_>> =
            whole.iter().zip(&pieces).map(|(&(meta, _, _), pieces)| Record { meta, pieces }).collect();
        // The copies are entered before anybody may look at the segment that they lie in: it counts as a write on its way.
        let ticket = self.tickets().take();
        let places = self.media.append(&batch);
        if let Ok(places) = &places {
            let begun = Instant::now();
            let mut kept = self.kept_mut();
            let mut strays = Vec::new();
            for (&(meta, from, _), &to) in whole.iter().zip(places) {
                if kept.retention.relocate(meta.id, from, to) {
                    kept.live.sub(from, meta.len);
                    kept.live.add(meta.id, to, meta.len);
                    add(&self.counters.copied_bytes, u64::from(meta.len));
                } else {
                    // Evicted meanwhile, and maybe written again, before the copy even, with its entry still to come.
                    let gone = kept.retention.index().find(meta.id).is_none();
                    strays.extend((gone || kept.is_stray(&meta, to)).then_some((to, meta.id)));
                }
            }
            drop(kept);
            self.note_strays(&strays);
            longest(&self.counters.collect_pause_us, begun.elapsed());
        }
        self.tickets().give_back(ticket);
        places.map(|_| ())
    }

    /// Lists sealed segments in the catalogue.
    pub(super) fn note_segments(&self) -> Result<(), Error> {
        // None of them is deleted between the look and the note: it would count as lost at the next open.
        let _collection = self.collection();
        self.catalogue.add_segments(&self.media.segments())
    }

    /// Where an object lies: for tests and tools.
    pub fn place(&self, kind: Kind, key: Key) -> Option<Place> {
        self.kept().retention.get(ObjectId { kind, key }).map(|(_, entry)| entry.place)
    }
}
