//! The segment that is appended to: batches go in one after the other, and whoever waits for the disk shares the wait.
//!
//! A batch is written under the writer's lock, with one call; its committer then waits until a sync has begun after that and ended. One
//! committer syncs at a time, for all that was written when it began, so that n of them cost two syncs, not n. A failed write is cut off
//! again. After a failed sync nobody knows what the disk holds: all that was not synced before it counts as not written, and nothing more
//! is appended to that segment.

use std::fs::File;
use std::io::{self, IoSlice};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::io::{Io, write_all};
use crate::error::Error;
use crate::media::footer;
use crate::media::segment::SegmentHeader;
use crate::media::{ALIGN, Place, Record};
use crate::object::Meta;
use crate::record::{Header, span};

/// Zeros to fill a record up to its alignment.
const ZEROS: [u8; ALIGN as usize] = [0; ALIGN as usize];

#[derive(Debug)]
struct Progress {
    written: u64,
    synced: u64,
    syncing: bool,
    failed: Option<(io::ErrorKind, String)>,
}

/// How far a segment was written and synced: shared by its committers.
pub(crate) struct Synced {
    file: Arc<File>,
    number: u32,
    progress: Mutex<Progress>,
    changed: Condvar,
}

/// The end of the open segment, for the one who holds the writer's lock.
pub(crate) struct Active {
    pub synced: Arc<Synced>,
    pub tail: u64,
    pub records: Vec<(Place, Meta)>,
}

/// Whether a failed write left the segment as it was before.
pub(crate) enum Broken {
    /// Yes: the next batch may be appended.
    No(Error),
    /// What it wrote could not be cut off: nothing may follow.
    Yes(Error),
}

/// An error of the system, told apart by what the caller does about it.
pub(crate) fn failed(what: &str, number: u32, kind: io::ErrorKind, error: io::Error) -> Error {
    use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    match kind {
        StorageFull | QuotaExceeded | FileTooLarge => Error::Full(format!("{what} segment {number:08x}: {error}")),
        _ => Error::io(format!("{what} segment {number:08x}"))(error),
    }
}

impl Synced {
    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes that are certain to be on the disk.
    pub(crate) fn durable(&self) -> u64 {
        self.progress().synced
    }

    /// What is written to a file whose name was deleted is lost when it is closed: it must not count as kept.
    fn is_there(&self) -> io::Result<()> {
        match rustix::fs::fstat(&self.file)?.st_nlink {
            0 => Err(io::Error::new(io::ErrorKind::NotFound, "somebody has deleted its file")),
            _ => Ok(()),
        }
    }

    /// Waits until all before `end` is on the disk.
    pub(crate) fn wait(&self, io: &dyn Io, end: u64) -> Result<(), Error> {
        let mut progress = self.progress();
        loop {
            if progress.synced >= end {
                return Ok(());
            }
            if let Some((kind, text)) = &progress.failed {
                return Err(failed("sync", self.number, *kind, io::Error::new(*kind, text.clone())));
            }
            if progress.syncing {
                progress = self.changed.wait(progress).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            progress.syncing = true;
            let target = progress.written;
            drop(progress);
            let result = io.sync(&self.file).and_then(|()| self.is_there());
            progress = self.progress();
            progress.syncing = false;
            match result {
                Ok(()) => progress.synced = progress.synced.max(target),
                Err(error) => progress.failed = Some((error.kind(), error.to_string())),
            }
            self.changed.notify_all();
        }
    }
}

impl Active {
    /// A segment whose first `tail` bytes are on the disk and hold `records`.
    pub(crate) fn new(file: Arc<File>, number: u32, tail: u64, records: Vec<(Place, Meta)>) -> Self {
        let progress = Progress { written: tail, synced: tail, syncing: false, failed: None };
        let synced = Synced { file, number, progress: Mutex::new(progress), changed: Condvar::new() };
        Self { synced: Arc::new(synced), tail, records }
    }

    /// Begins the empty file of a segment. Its header is synced with the first batch.
    pub(crate) fn begin(io: &dyn Io, file: Arc<File>, number: u32, media: u64) -> Result<Self, Error> {
        let header = SegmentHeader { number, media }.encode();
        write_all(io, &file, &mut [IoSlice::new(&header)], 0)
            .map_err(|error| failed("begin", number, error.kind(), error))?;
        Ok(Self::new(file, number, header.len() as u64, Vec::new()))
    }

    pub(crate) fn number(&self) -> u32 {
        self.synced.number
    }

    /// Whether a sync of it failed.
    pub(crate) fn failed(&self) -> bool {
        self.synced.progress().failed.is_some()
    }

    /// Bytes written that no sync has covered yet.
    pub(crate) fn unsynced(&self) -> u64 {
        self.tail.saturating_sub(self.synced.durable())
    }

    /// Writes a batch behind the others. It counts once [`Synced::wait`] for the new tail is through.
    pub(crate) fn write(&mut self, io: &dyn Io, media: u64, batch: &[Record<'_>]) -> Result<Vec<Place>, Broken> {
        let number = self.number();
        let mut end = self.tail;
        let synced = self.synced.durable();
        let headers: Vec<[u8; Header::BYTES]> = batch
            .iter()
            .enumerate()
            .map(|(at, record)| {
                let place = Place { segment: number, offset: (end / ALIGN) as u32 };
                end += span(record.meta.len);
                let left = (batch.len() - 1 - at) as u32;
                Header { meta: record.meta, place, left, before: at as u32, synced, media }.encode()
            })
            .collect();
        let mut slices = Vec::with_capacity(batch.len() * 3);
        let mut places = Vec::with_capacity(batch.len());
        let mut at = self.tail;
        for (record, header) in batch.iter().zip(&headers) {
            places.push(Place { segment: number, offset: (at / ALIGN) as u32 });
            let bytes = span(record.meta.len);
            slices.push(IoSlice::new(header));
            slices.extend(record.pieces.iter().filter(|piece| !piece.is_empty()).map(|piece| IoSlice::new(piece)));
            let gap = bytes - Header::BYTES as u64 - u64::from(record.meta.len);
            if gap > 0 {
                slices.push(IoSlice::new(&ZEROS[..gap as usize]));
            }
            at += bytes;
        }
        if let Err(error) = write_all(io, &self.synced.file, &mut slices, self.tail) {
            let cut = io.truncate(&self.synced.file, self.tail);
            let error = failed("append to", number, error.kind(), error);
            return Err(if cut.is_ok() { Broken::No(error) } else { Broken::Yes(error) });
        }
        self.tail = end;
        self.synced.progress().written = end;
        self.records.extend(places.iter().copied().zip(batch.iter().map(|record| record.meta)));
        Ok(places)
    }

    /// Waits for what was written, then writes and syncs the footer. Returns the segment's bytes.
    pub(crate) fn seal(&self, io: &dyn Io, media: u64) -> Result<u64, Error> {
        self.synced.wait(io, self.tail)?;
        seal_file(io, &self.synced.file, self.number(), media, self.tail, &self.records)
    }
}

/// Ends the file of a segment whose records end at `tail`. On an error the file is cut back to its records.
pub(crate) fn seal_file(
    io: &dyn Io,
    file: &File,
    number: u32,
    media: u64,
    tail: u64,
    records: &[(Place, Meta)],
) -> Result<u64, Error> {
    let footer = footer::encode(number, media, tail, records);
    let written = write_all(io, file, &mut [IoSlice::new(&footer)], tail).and_then(|()| io.sync(file));
    written.map_err(|error| {
        // Best effort: a footer that is not whole is no footer, and the records before it are read one by one.
        let _ = io.truncate(file, tail);
        failed("seal", number, error.kind(), error)
    })?;
    Ok(tail + footer.len() as u64)
}
