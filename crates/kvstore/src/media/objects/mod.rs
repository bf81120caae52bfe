//! Objects of one back end: each batch is one, laid out as a sealed segment of local files is.
//!
//! Owns: how a batch becomes an object and is found again, by its own store and by others over the same back end: names begin with the
//! store's id. Never touches: redundancy, which is the back end's own (see [`super::striped`] for ours).

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use futures_util::future::join_all;
use futures_util::{StreamExt, stream};

use super::footer::{self, TAIL, Tail};
use super::segment::SegmentHeader;
use super::waiter::Waiter;
use super::{ALIGN, Media, Place, Read, Record};
use crate::Error;
use crate::backend::{Backend, Name, Put};
use crate::checksum::checksum;
use crate::object::Meta;
use crate::record::{Header, span, take};

/// Footers read side by side at a start.
const FOOTERS: usize = 32;

type Records = Vec<(Place, Meta)>;

/// A segment with the reads in it, and whether it is being deleted.
#[derive(Clone, Copy, Debug, Default)]
struct Segment {
    size: u64,
    readers: u32,
    gone: bool,
}

/// [`Media`] over one back end.
#[derive(Debug)]
pub struct Objects {
    backend: Arc<dyn Backend>,
    media: u64,
    segments: Mutex<BTreeMap<u32, Segment>>,
    /// Told when a reader leaves.
    left: Condvar,
    next: AtomicU32,
    waiter: Waiter,
}

impl Objects {
    /// Of the store with this id. [`Media::recover`] must be called before anything else; one process at a time may write.
    ///
    /// # Errors
    /// [`Error::Invalid`]: the back end lacks what is needed; [`Error::Io`]: no threads.
    pub fn new(backend: Arc<dyn Backend>, media: u64) -> Result<Self, Error> {
        let can = backend.capabilities();
        if !can.conditional_put || !can.range {
            return Err(Error::Invalid(format!("{} lacks conditional writes or reads of ranges", backend.place())));
        }
        let (segments, left) = Default::default();
        Ok(Self { backend, media, segments, left, next: AtomicU32::new(1), waiter: Waiter::new()? })
    }

    fn table(&self) -> MutexGuard<'_, BTreeMap<u32, Segment>> {
        self.segments.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn encode(&self, batch: &[Record<'_>], segment: u32) -> Result<(Records, Vec<u8>), Error> {
        let total: u64 = batch.iter().map(|record| span(record.meta.len)).sum();
        let mut object = Vec::with_capacity(SegmentHeader::BYTES + total as usize + batch.len() * footer::ENTRY + TAIL);
        object.extend_from_slice(&SegmentHeader { number: segment, media: self.media }.encode());
        let mut records = Vec::with_capacity(batch.len());
        for (at, record) in batch.iter().enumerate() {
            let given: usize = record.pieces.iter().map(|piece| piece.len()).sum();
            if given != record.meta.len as usize {
                return Err(Error::Invalid(format!(
                    "{} has {} bytes, its pieces {given}",
                    record.meta.id, record.meta.len
                )));
            }
            let offset = u32::try_from(object.len() as u64 / ALIGN)
                .map_err(|_| Error::Invalid("a batch of more than 256 GiB".into()))?;
            let place = Place { segment, offset };
            let (before, left) = (at as u32, (batch.len() - at - 1) as u32);
            // Written whole: nothing of it was there before.
            let header = Header { meta: record.meta, place, before, left, synced: 0, media: self.media };
            object.extend_from_slice(&header.encode());
            record.pieces.iter().for_each(|piece| object.extend_from_slice(piece));
            object.resize(object.len().next_multiple_of(ALIGN as usize), 0);
            records.push((place, record.meta));
        }
        object.extend(footer::encode(segment, self.media, object.len() as u64, &records));
        Ok((records, object))
    }

    /// Takes the answer for one read: its header and its part.
    fn fill(media: u64, read: &mut Read<'_>, header: &[u8], part: &[u8]) -> Result<(), Error> {
        let id = read.meta.id;
        let header = header.first_chunk().map(Header::decode).transpose()?.flatten();
        if !header.is_some_and(|header| header.names(&read.meta) && header.place == read.place && header.media == media)
        {
            return Err(Error::Damaged(id, "another record is where it should be".into()));
        }
        if part.len() == read.meta.len as usize && checksum(part) != read.meta.checksum {
            return Err(Error::Damaged(id, "its bytes lack their checksum".into()));
        }
        read.into.copy_from_slice(part);
        Ok(())
    }

    /// Asks the back end for reads in segments of one store, and holds what comes to their headers and checksums.
    fn fetch(
        &self,
        media: u64,
        groups: BTreeMap<u32, Vec<usize>>,
        reads: &mut [Read<'_>],
        results: &mut [Option<Result<(), Error>>],
    ) {
        let requests: Vec<(u32, Vec<usize>, Vec<Range<u64>>)> = groups
            .into_iter()
            .map(|(segment, items)| {
                let ranges = items.iter().flat_map(|at| ranges(&reads[*at])).collect();
                (segment, items, ranges)
            })
            .collect();
        let backend = self.backend.clone();
        let answers = self.waiter.wait(async move {
            let each = requests.into_iter().map(|(segment, items, ranges)| {
                let backend = &backend;
                async move { (items, backend.get_ranges(&Name::segment_of(media, segment), &ranges).await) }
            });
            join_all(each).await
        });
        for (items, answer) in answers.unwrap_or_default() {
            for (at, item) in items.iter().enumerate() {
                let read = &mut reads[*item];
                results[*item] = Some(match &answer {
                    Ok(Some(parts)) => Self::fill(media, read, &parts[2 * at], &parts[2 * at + 1]),
                    Ok(None) => Err(Error::Damaged(read.meta.id, format!("segment {} is lost", read.place.segment))),
                    Err(Error::Invalid(said)) => Err(Error::Damaged(read.meta.id, said.clone())),
                    Err(error) => Err(Error::Unavailable(error.to_string())),
                });
            }
        }
    }

    fn enter(&self, segment: u32) -> bool {
        match self.table().get_mut(&segment) {
            Some(found) if !found.gone => {
                found.readers += 1;
                true
            }
            _ => false,
        }
    }

    fn leave(&self, segment: u32) {
        if let Some(found) = self.table().get_mut(&segment) {
            found.readers -= 1;
        }
        self.left.notify_all();
    }
}

/// What is known of reads before anybody is asked, and those left to be asked for by their segment.
type Grouped = (Vec<Option<Result<(), Error>>>, BTreeMap<u32, Vec<usize>>);

fn grouped(reads: &[Read<'_>]) -> Grouped {
    let mut results = Vec::with_capacity(reads.len());
    let mut groups: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    for (at, read) in reads.iter().enumerate() {
        let end = u64::from(read.start) + read.into.len() as u64;
        if end > u64::from(read.meta.len) {
            let said = format!("bytes {} to {end} of {}, which has {}", read.start, read.meta.id, read.meta.len);
            results.push(Some(Err(Error::Invalid(said))));
            continue;
        }
        results.push(None);
        groups.entry(read.place.segment).or_default().push(at);
    }
    (results, groups)
}

/// An answer for each: what has none lies in a segment that is not there.
fn answered(results: Vec<Option<Result<(), Error>>>, reads: &[Read<'_>]) -> Vec<Result<(), Error>> {
    let missing =
        |read: &Read<'_>| Error::Unavailable(format!("{}: there is no segment {}", read.meta.id, read.place.segment));
    results.into_iter().zip(reads).map(|(result, read)| result.unwrap_or_else(|| Err(missing(read)))).collect()
}

/// The ranges of a read: header and part.
fn ranges(read: &Read<'_>) -> [Range<u64>; 2] {
    let header = u64::from(read.place.offset) * ALIGN;
    let bytes = header + Header::BYTES as u64;
    let start = bytes + u64::from(read.start);
    [header..bytes, start..start + read.into.len() as u64]
}

/// The records of an object of `size` bytes. `None`: it is none of this store, or not whole.
async fn records(backend: Arc<dyn Backend>, media: u64, segment: u32, size: u64) -> Result<Option<Records>, Error> {
    let name = Name::segment_of(media, segment);
    let read = |start: u64, end: u64| {
        let (backend, name) = (&backend, &name);
        async move {
            Ok::<_, Error>(
                backend.get_ranges(name, std::slice::from_ref(&(start..end))).await?.and_then(|mut parts| parts.pop()),
            )
        }
    };
    let Some(start) = size.checked_sub(TAIL as u64) else { return Ok(None) };
    let Some(bytes) = read(start, size).await? else { return Ok(None) };
    let tail = Tail::decode(&take(&bytes, 0), size)?.filter(|tail| tail.segment == segment && tail.media == media);
    let Some(tail) = tail else { return Ok(None) };
    let entries = read(start - tail.entries_bytes() as u64, start).await?;
    Ok(entries.and_then(|entries| tail.records(&entries)))
}

impl Media for Objects {
    fn append(&self, batch: &[Record<'_>]) -> Result<Vec<Place>, Error> {
        if batch.is_empty() {
            return Ok(Vec::new());
        }
        let segment = self.next.fetch_add(1, Relaxed);
        let (records, object) = self.encode(batch, segment)?;
        let (size, backend, media) = (object.len() as u64, self.backend.clone(), self.media);
        let object = Bytes::from(object);
        self.waiter.wait(async move {
            let name = Name::segment_of(media, segment);
            let tail = object.slice(object.len() - TAIL..);
            match backend.put_object(&name, vec![object]).await? {
                Put::Created => Ok(()),
                // A lost answer makes the own object look like another's.
                Put::Exists => {
                    match backend.get_ranges(&name, std::slice::from_ref(&(size - TAIL as u64..size))).await? {
                        Some(found) if found[0] == tail => Ok(()),
                        _ => Err(Error::Unavailable(format!("{} has another object {name}", backend.place()))),
                    }
                }
            }
        })??;
        self.table().insert(segment, Segment { size, ..Segment::default() });
        Ok(records.into_iter().map(|(place, _)| place).collect())
    }

    fn read(&self, reads: &mut [Read<'_>]) -> Vec<Result<(), Error>> {
        let (mut results, mut groups) = grouped(reads);
        groups.retain(|segment, _| self.enter(*segment));
        let entered: Vec<u32> = groups.keys().copied().collect();
        self.fetch(self.media, groups, reads, &mut results);
        for segment in entered {
            self.leave(segment);
        }
        answered(results, reads)
    }

    fn read_of(&self, media: u64, reads: &mut [Read<'_>]) -> Vec<Result<(), Error>> {
        let (mut results, groups) = grouped(reads);
        self.fetch(media, groups, reads, &mut results);
        answered(results, reads)
    }

    fn recover(&self, each: &mut dyn FnMut(Place, Meta)) -> Result<(), Error> {
        let (backend, media) = (self.backend.clone(), self.media);
        let found = self.waiter.wait(async move {
            let list = backend.list(&format!("{media:016x}")).await?.into_iter();
            let list = list.filter_map(|(name, size)| Some((name.number_of(media)?, size)));
            let read = stream::iter(list).map(|(segment, size)| {
                let backend = backend.clone();
                async move { Ok::<_, Error>((segment, size, records(backend, media, segment, size).await?)) }
            });
            let all: Vec<Result<_, Error>> = read.buffered(FOOTERS).collect().await;
            all.into_iter().collect::<Result<Vec<_>, Error>>()
        })??;
        for (segment, size, records) in found {
            self.next.fetch_max(segment + 1, Relaxed);
            // Objects are written whole: one without a footer is damaged, or another's. It is left where it is.
            let Some(records) = records else { continue };
            self.table().insert(segment, Segment { size, ..Segment::default() });
            for (place, meta) in records {
                each(place, meta);
            }
        }
        Ok(())
    }

    fn records(&self, segment: u32, each: &mut dyn FnMut(Place, Meta)) -> Result<(), Error> {
        let Some(found) = self.table().get(&segment).copied() else {
            return Err(Error::Invalid(format!("there is no segment {segment}")));
        };
        let read = records(self.backend.clone(), self.media, segment, found.size);
        let Some(records) = self.waiter.wait(read)?? else {
            return Err(Error::Unavailable(format!("the footer of segment {segment} is damaged")));
        };
        for (place, meta) in records {
            each(place, meta);
        }
        Ok(())
    }

    /// Does nothing: every batch is a segment, sealed when it counts.
    fn seal(&self) -> Result<(), Error> {
        Ok(())
    }

    fn delete(&self, segment: u32) -> Result<(), Error> {
        let mut segments = self.table();
        match segments.get_mut(&segment) {
            Some(found) if !found.gone => found.gone = true,
            _ => return Err(Error::Invalid(format!("there is no segment {segment}"))),
        }
        while segments.get(&segment).is_some_and(|found| found.readers > 0) {
            segments = self.left.wait(segments).unwrap_or_else(PoisonError::into_inner);
        }
        drop(segments);
        let backend = self.backend.clone();
        let name = Name::segment_of(self.media, segment);
        let deleted = self.waiter.wait(async move { backend.delete_many(&[name]).await }).flatten();
        let mut segments = self.table();
        if deleted.is_ok() {
            segments.remove(&segment);
        } else if let Some(found) = segments.get_mut(&segment) {
            // Still there: it can be deleted again.
            found.gone = false;
        }
        drop(segments);
        deleted
    }

    fn segments(&self) -> Vec<(u32, u64)> {
        self.table().iter().filter(|(_, found)| !found.gone).map(|(segment, found)| (*segment, found.size)).collect()
    }
}
