//! What a segment's file still holds after any kind of end: its footer, or its records one by one.

use std::fs::File;
use std::io;

use super::io::{Io, read_exact};
use crate::checksum::{CHUNK, Sum};
use crate::error::Error;
use crate::media::footer::{TAIL, Tail};
use crate::media::segment::SegmentHeader;
use crate::media::{ALIGN, Place};
use crate::object::Meta;
use crate::record::{Header, span};

/// The records of a segment and where they end.
pub(crate) struct Found {
    pub records: Vec<(Place, Meta)>,
    pub end: u64,
    /// Some of them are damaged: only a later record says that they count, so it must not be cut off, nor the list be made anew.
    pub decayed: bool,
}

/// Reads the footer. `None`: there is none, or it is damaged.
pub(crate) fn by_footer(io: &dyn Io, file: &File, number: u32, media: u64) -> Result<Option<Found>, Error> {
    let wrap = |error| Error::io(format!("read segment {number:08x}"))(error);
    let size = file.metadata().map_err(wrap)?.len();
    if size < (SegmentHeader::BYTES + TAIL) as u64 {
        return Ok(None);
    }
    let mut bytes = [0; TAIL];
    read_exact(io, file, &mut bytes, size - TAIL as u64).map_err(wrap)?;
    let Some(tail) = Tail::decode(&bytes, size)? else { return Ok(None) };
    same(number, media, tail.segment, tail.media)?;
    // No longer than the file: the tail's numbers were held against its size.
    let mut entries = vec![0; tail.entries_bytes()];
    read_exact(io, file, &mut entries, tail.start).map_err(wrap)?;
    Ok(tail.records(&entries).map(|records| Found { records, end: tail.start, decayed: false }))
}

fn same(number: u32, media: u64, found: u32, owner: u64) -> Result<(), Error> {
    if owner != media {
        return Err(Error::Invalid(format!("segment {number:08x} belongs to another store: move it out of this root")));
    }
    if found != number {
        return Err(Error::Invalid(format!("segment {found:08x} has the name of {number:08x}: name it back")));
    }
    Ok(())
}

/// A record as it was met.
struct Met {
    place: Place,
    meta: Meta,
    whole: bool,
}

/// Reads records one by one, bytes and all, up to the first header that is not whole. A batch counts if all of it is there with its checksums.
/// Damage in what a later header says was synced is decay: such records are listed, so that theirs is a counted miss and not their neighbours' end.
pub(crate) fn by_records(io: &dyn Io, file: &File, number: u32, media: u64) -> Result<Found, Error> {
    let wrap = |error| Error::io(format!("read segment {number:08x}"))(error);
    let size = file.metadata().map_err(wrap)?.len();
    let mut found = Found { records: Vec::new(), end: SegmentHeader::BYTES as u64, decayed: false };
    let mut first = [0; SegmentHeader::BYTES];
    match read_exact(io, file, &mut first, 0) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(found),
        Err(error) => return Err(wrap(error)),
    }
    // A damaged header of the segment costs nothing: each record names its segment and media, too.
    if let Some(header) = SegmentHeader::decode(&first)? {
        same(number, media, header.number, header.media)?;
    }
    let mut batches: Vec<Vec<Met>> = Vec::new();
    let (mut at, mut synced, mut left) = (found.end, 0, 0);
    let mut buffer = vec![0; CHUNK];
    while at + Header::BYTES as u64 <= size {
        let mut bytes = [0; Header::BYTES];
        read_exact(io, file, &mut bytes, at).map_err(wrap)?;
        let Some(header) = Header::decode(&bytes)? else { break };
        let place = Place { segment: number, offset: (at / ALIGN) as u32 };
        let data = at + Header::BYTES as u64;
        if header.place != place || header.media != media || data + u64::from(header.meta.len) > size {
            break;
        }
        synced = header.synced.max(synced);
        match batches.last_mut() {
            Some(batch) if left > 0 => {
                if header.left + 1 != left || header.before as usize != batch.len() {
                    break;
                }
            }
            _ => batches.push(Vec::new()),
        }
        left = header.left;
        let whole = sum(io, file, data, header.meta.len, &mut buffer).map_err(wrap)? == header.meta.checksum;
        if let Some(batch) = batches.last_mut() {
            batch.push(Met { place, meta: header.meta, whole });
        }
        at += span(header.meta.len);
    }
    let torn = if left > 0 { batches.pop() } else { None };
    let mut keep = |batch: Vec<Met>, complete: bool| {
        let good = complete && batch.iter().all(|met| met.whole);
        for met in batch {
            let end = u64::from(met.place.offset) * ALIGN + span(met.meta.len);
            if good || end <= synced {
                found.decayed |= !met.whole;
                found.records.push((met.place, met.meta));
                found.end = end;
            }
        }
    };
    for batch in batches {
        keep(batch, true);
    }
    if let Some(batch) = torn {
        keep(batch, false);
    }
    Ok(found)
}

fn sum(io: &dyn Io, file: &File, mut at: u64, len: u32, buffer: &mut [u8]) -> io::Result<u64> {
    let mut sum = Sum::default();
    let mut rest = len as usize;
    while rest > 0 {
        let piece = &mut buffer[..rest.min(CHUNK)];
        read_exact(io, file, piece, at)?;
        sum.add(piece);
        at += piece.len() as u64;
        rest -= piece.len();
    }
    Ok(sum.value())
}
