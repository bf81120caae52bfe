//! Segments as files of this machine.
//!
//! Owns: the files below `segments/` of a root, appending with shared syncs ([`active`]), reading with checksums, what is there after
//! any kind of end ([`recover`]). Never touches: which objects are kept.

mod active;
mod files;
pub mod io;
mod recover;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::ErrorKind;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use active::{Active, Broken, failed, seal_file};
use files::Files;
use io::{Io, System, read_exact};

use crate::checksum::{CHUNK, Sum, checksum};
use crate::error::Error;
use crate::media::segment::SegmentHeader;
use crate::media::{ALIGN, Media, Place, Read, Record};
use crate::object::Meta;
use crate::record::{Header, span};
use crate::root::Root;

/// Sizes and bounds.
#[derive(Clone, Debug)]
pub struct LocalConfig {
    /// Bytes after which a segment is sealed: 64 to 256 MiB serve disks well. From 64 KiB to 4 GiB.
    pub segment_bytes: u64,
    /// Bytes written beyond what is synced, over which a committer waits before it writes more.
    pub unsynced_bytes: u64,
    /// Sealed segments whose files stay open between reads.
    pub open_files: usize,
}

impl Default for LocalConfig {
    fn default() -> Self {
        Self { segment_bytes: 128 << 20, unsynced_bytes: 64 << 20, open_files: 512 }
    }
}

#[derive(Clone, Copy)]
struct Sealed {
    bytes: u64,
}

struct State {
    /// None until the first append after an end of one.
    active: Option<Active>,
    sealed: BTreeMap<u32, Sealed>,
    next: u32,
}

/// Segment files in one directory.
pub struct Local {
    io: Arc<dyn Io>,
    files: Files,
    config: LocalConfig,
    media: u64,
    state: Mutex<State>,
}

impl Local {
    /// Opens the segments of a root: cuts torn tails, seals what an earlier process left open but for the newest, which goes on.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a size out of bounds or a segment that is another store's, [`Error::Newer`], [`Error::Io`].
    pub fn open(root: &Root, config: LocalConfig) -> Result<Self, Error> {
        Self::open_with(root, config, Arc::new(System))
    }

    /// The same, over other calls to the system.
    ///
    /// # Errors
    /// As [`Local::open`].
    pub fn open_with(root: &Root, config: LocalConfig, io: Arc<dyn Io>) -> Result<Self, Error> {
        if !(64 << 10..=4 << 30).contains(&config.segment_bytes) {
            return Err(Error::Invalid(format!(
                "segment_bytes is {}: give 65536 (64 KiB) to 4294967296 (4 GiB)",
                config.segment_bytes
            )));
        }
        let dir = crate::root::open_dir(root.dir(), "segments").map_err(Error::io("open segments"))?;
        let local = Self {
            io,
            files: Files::new(dir, config.open_files.max(1)),
            config,
            media: root.media(),
            state: Mutex::new(State { active: None, sealed: BTreeMap::new(), next: 1 }),
        };
        local.take_up()?;
        Ok(local)
    }

    fn take_up(&self) -> Result<(), Error> {
        let numbers = self.files.list().map_err(Error::io("list segments"))?;
        let newest = numbers.last().copied();
        let mut state = self.state();
        state.next = newest.map_or(Some(1), |newest| newest.checked_add(1)).ok_or_else(no_numbers)?;
        for number in numbers {
            let file = self.files.open_to_write(number).map_err(Error::io(format!("open segment {number:08x}")))?;
            let wrap = |what: &str| Error::io(format!("{what} segment {number:08x}"));
            if recover::by_footer(&*self.io, &file, number, self.media)?.is_some() {
                let bytes = file.metadata().map_err(wrap("look at"))?.len();
                state.sealed.insert(number, Sealed { bytes });
                continue;
            }
            let found = recover::by_records(&*self.io, &file, number, self.media)?;
            if found.records.is_empty() && Some(number) != newest {
                self.files.delete(number).map_err(wrap("delete"))?;
                continue;
            }
            self.io.truncate(&file, found.end).map_err(wrap("cut"))?;
            if found.records.is_empty() {
                // Its own header may be what was torn.
                state.active = Some(Active::begin(&*self.io, file, number, self.media)?);
            } else if Some(number) == newest && !found.decayed && found.end < self.config.segment_bytes {
                // What was read may be in memory only: the process, not the machine, was killed before the sync.
                self.io.sync(&file).map_err(wrap("sync"))?;
                state.active = Some(Active::new(file, number, found.end, found.records));
            } else {
                // Without room for a footer its records are read one by one again next time.
                let sealed = seal_file(&*self.io, &file, number, self.media, found.end, &found.records);
                state.sealed.insert(number, Sealed { bytes: sealed.unwrap_or(found.end) });
            }
        }
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes of all segments, the open one among them.
    pub fn bytes(&self) -> u64 {
        let state = self.state();
        let open = state.active.as_ref().map_or(0, |active| active.tail);
        open + state.sealed.values().map(|sealed| sealed.bytes).sum::<u64>()
    }

    /// The segment to append to, with room for `bytes` more.
    fn active<'a>(&self, state: &'a mut State, bytes: u64) -> Result<&'a mut Active, Error> {
        let full = state.active.as_ref().is_some_and(|active| {
            active.failed()
                || active.tail.saturating_add(bytes) > self.config.segment_bytes && !active.records.is_empty()
        });
        if full {
            self.end(state);
        }
        if state.active.is_none() {
            state.active = Some(self.begin(state)?);
        }
        state.active.as_mut().ok_or_else(|| Error::Unavailable("no open segment".to_owned()))
    }

    fn begin(&self, state: &mut State) -> Result<Active, Error> {
        let number = state.next;
        let file = self.files.create(number).map_err(|error| failed("create", number, error.kind(), error))?;
        match Active::begin(&*self.io, file, number, self.media) {
            Ok(active) => {
                state.next = number.checked_add(1).ok_or_else(no_numbers)?;
                Ok(active)
            }
            Err(error) => {
                // A number that was used for nothing may be used again.
                let _ = self.files.delete(number);
                Err(error)
            }
        }
    }

    /// Takes the open segment out of use: sealed, or without a footer where a write or a sync of it has failed.
    fn end(&self, state: &mut State) {
        let Some(active) = state.active.take() else { return };
        let bytes = active.seal(&*self.io, self.media).unwrap_or_else(|_| active.synced.durable());
        state.sealed.insert(active.number(), Sealed { bytes });
    }

    fn read_one(&self, read: &mut Read<'_>) -> Result<(), Error> {
        let Read { place, meta, start, into } = read;
        let end = u64::from(*start) + into.len() as u64;
        if end > u64::from(meta.len) {
            return Err(Error::Invalid(format!("{} has {} bytes: {end} were asked for", meta.id, meta.len)));
        }
        let file = self.files.get(place.segment).map_err(|error| match error.kind() {
            // Collected, and the object lies elsewhere by now; or somebody else deleted it.
            ErrorKind::NotFound => Error::Damaged(meta.id, format!("segment {:08x} is gone", place.segment)),
            _ => Error::io(format!("open segment {:08x}", place.segment))(error),
        })?;
        let at = u64::from(place.offset) * ALIGN;
        let data = at + Header::BYTES as u64;
        let fault = |error: std::io::Error| match error.kind() {
            ErrorKind::UnexpectedEof => Error::Damaged(meta.id, "its segment ends before it".to_owned()),
            _ => Error::io(format!("read segment {:08x}", place.segment))(error),
        };
        if *start == 0 && end == u64::from(meta.len) {
            let whole = self.read_whole(&file, data, into).map_err(fault)? == meta.checksum;
            return if whole {
                Ok(())
            } else {
                Err(Error::Damaged(meta.id, "its bytes lack their checksum".to_owned()))
            };
        }
        let mut bytes = [0; Header::BYTES];
        read_exact(&*self.io, &file, &mut bytes, at).map_err(fault)?;
        match Header::decode(&bytes)? {
            Some(header) if header.names(meta) && header.place == *place && header.media == self.media => {
                read_exact(&*self.io, &file, into, data + u64::from(*start)).map_err(fault)
            }
            _ => Err(Error::Damaged(meta.id, "its header is another one".to_owned())),
        }
    }

    /// Reads and sums in pieces that stay in the cache between the two.
    fn read_whole(&self, file: &File, mut at: u64, into: &mut [u8]) -> std::io::Result<u64> {
        if into.len() <= CHUNK {
            read_exact(&*self.io, file, into, at)?;
            // All at once is summed faster than in pieces.
            return Ok(checksum(into));
        }
        let mut sum = Sum::default();
        for piece in into.chunks_mut(CHUNK) {
            read_exact(&*self.io, file, piece, at)?;
            sum.add(piece);
            at += piece.len() as u64;
        }
        Ok(sum.value())
    }

    /// The records of a segment that is not appended to.
    fn closed(&self, number: u32) -> Result<Vec<(Place, Meta)>, Error> {
        let file = self.files.get(number).map_err(Error::io(format!("open segment {number:08x}")))?;
        let found = recover::by_footer(&*self.io, &file, number, self.media)?;
        Ok(found.map_or_else(|| recover::by_records(&*self.io, &file, number, self.media), Ok)?.records)
    }
}

fn no_numbers() -> Error {
    Error::Full("the numbers of segments are used up: begin a new root".to_owned())
}

impl Media for Local {
    fn append(&self, batch: &[Record<'_>]) -> Result<Vec<Place>, Error> {
        let mut bytes = 0u64;
        for Record { meta, pieces } in batch {
            let given: usize = pieces.iter().map(|piece| piece.len()).sum();
            if given as u64 != u64::from(meta.len) {
                return Err(Error::Invalid(format!("{} has {} bytes: {given} were given", meta.id, meta.len)));
            }
            bytes += span(meta.len);
        }
        if batch.is_empty() {
            return Ok(Vec::new());
        }
        let most = self.config.segment_bytes - SegmentHeader::BYTES as u64;
        if bytes > most {
            return Err(Error::Invalid(format!(
                "a batch of {bytes} bytes fits no segment: {most} is the most, split it"
            )));
        }
        let mut state = self.state();
        let active = self.active(&mut state, bytes)?;
        if active.unsynced() > self.config.unsynced_bytes {
            active.synced.wait(&*self.io, active.tail)?;
        }
        match active.write(&*self.io, self.media, batch) {
            Ok(places) => {
                let (synced, tail) = (Arc::clone(&active.synced), active.tail);
                drop(state);
                synced.wait(&*self.io, tail).map(|()| places)
            }
            Err(Broken::No(error)) => Err(error),
            Err(Broken::Yes(error)) => {
                // Those written before it still wait for their sync; a footer could not be found behind what is left there.
                let active = state.active.take();
                if let Some(active) = active {
                    let durable = active
                        .synced
                        .wait(&*self.io, active.tail)
                        .map_or_else(|_| active.synced.durable(), |()| active.tail);
                    state.sealed.insert(active.number(), Sealed { bytes: durable });
                }
                Err(error)
            }
        }
    }

    fn read(&self, reads: &mut [Read<'_>]) -> Vec<Result<(), Error>> {
        reads.iter_mut().map(|read| self.read_one(read)).collect()
    }

    fn recover(&self, each: &mut dyn FnMut(Place, Meta)) -> Result<(), Error> {
        let (sealed, open) = {
            let state = self.state();
            let durable = state.active.as_ref().map_or(0, |active| active.synced.durable());
            let records = state.active.as_ref().map_or(&[][..], |active| &active.records);
            let open: Vec<_> =
                records.iter().filter(|(place, _)| u64::from(place.offset) * ALIGN < durable).copied().collect();
            (state.sealed.keys().copied().collect::<Vec<_>>(), open)
        };
        for number in sealed {
            self.closed(number)?.into_iter().for_each(|(place, meta)| each(place, meta));
        }
        for (place, meta) in open {
            each(place, meta);
        }
        Ok(())
    }

    fn records(&self, segment: u32, each: &mut dyn FnMut(Place, Meta)) -> Result<(), Error> {
        if !self.state().sealed.contains_key(&segment) {
            return Err(Error::Invalid(format!("segment {segment:08x} is not sealed")));
        }
        self.closed(segment)?.into_iter().for_each(|(place, meta)| each(place, meta));
        Ok(())
    }

    fn seal(&self) -> Result<(), Error> {
        let mut state = self.state();
        if state.active.as_ref().is_some_and(|active| !active.records.is_empty()) {
            self.end(&mut state);
        }
        Ok(())
    }

    fn delete(&self, segment: u32) -> Result<(), Error> {
        let mut state = self.state();
        if !state.sealed.contains_key(&segment) {
            return Err(Error::Invalid(format!("segment {segment:08x} is not sealed")));
        }
        if state.active.is_none() && state.next == segment + 1 {
            // The newest file keeps the numbers: they are never given twice.
            state.active = Some(self.begin(&mut state)?);
        }
        self.files.delete(segment).map_err(Error::io(format!("delete segment {segment:08x}")))?;
        state.sealed.remove(&segment);
        Ok(())
    }

    fn segments(&self) -> Vec<(u32, u64)> {
        self.state().sealed.iter().map(|(&number, sealed)| (number, sealed.bytes)).collect()
    }
}
