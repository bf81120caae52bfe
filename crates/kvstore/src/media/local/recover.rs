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

/// Records of a batch that were met one after the other.
struct Group {
    met: Vec<Met>,
    /// All of the batch, so far.
    complete: bool,
    /// Records that are still to come.
    left: u32,
}

/// A record as it was met.
struct Met {
    place: Place,
    meta: Meta,
    whole: bool,
}

/// Reads records one by one, bytes and all. A batch counts if all of it is there with its checksums. Damage in what a later header says was
/// synced is decay: such records are listed, so that theirs is a counted miss and not their neighbours' end. Behind a header that is not whole the
/// next one that names its own place is looked for, so that one such header hides its own record only.
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
    let mut groups: Vec<Group> = Vec::new();
    let (mut at, mut synced) = (found.end, 0);
    let mut search = Search { io, file, number, media, size, bytes: Vec::new(), start: 0 };
    let mut buffer = vec![0; CHUNK];
    while let Some((start, header)) = search.next(at)? {
        let data = start + Header::BYTES as u64;
        let whole = sum(io, file, data, header.meta.len, &mut buffer).map_err(wrap)? == header.meta.checksum;
        let met = Met { place: header.place, meta: header.meta, whole };
        synced = header.synced.max(synced);
        let follows = |group: &&mut Group| {
            start == at && group.left == header.left + 1 && header.before as usize == group.met.len() && group.complete
        };
        match groups.last_mut().filter(follows) {
            Some(group) => {
                group.met.push(met);
                group.left = header.left;
            }
            None => groups.push(Group { met: vec![met], complete: header.before == 0, left: header.left }),
        }
        // What lies between was a record, or more: their batches lack it, and the list is made here for the last time.
        found.decayed |= start != at && start < synced;
        at = start + span(header.meta.len);
    }
    for group in groups {
        let good = group.complete && group.left == 0 && group.met.iter().all(|met| met.whole);
        for met in group.met {
            let end = u64::from(met.place.offset) * ALIGN + span(met.meta.len);
            if good || end <= synced {
                found.decayed |= !met.whole || !good;
                found.records.push((met.place, met.meta));
                found.end = end;
            }
        }
    }
    Ok(found)
}

/// Looks for headers of a segment.
struct Search<'a> {
    io: &'a dyn Io,
    file: &'a File,
    number: u32,
    media: u64,
    size: u64,
    /// Bytes of the file from `start` on, in memory while a header is looked for.
    bytes: Vec<u8>,
    start: u64,
}

impl Search<'_> {
    /// The first header at `at` or behind it that is whole, names its own place and has room for its bytes. Bytes of an object cannot pass for one
    /// unless their writer knows the media's id.
    fn next(&mut self, mut at: u64) -> Result<Option<(u64, Header)>, Error> {
        let wrap = |error| Error::io(format!("read segment {:08x}", self.number))(error);
        let mut bytes = [0; Header::BYTES];
        if at + Header::BYTES as u64 > self.size {
            return Ok(None);
        }
        read_exact(self.io, self.file, &mut bytes, at).map_err(wrap)?;
        loop {
            if let Some(header) = Header::decode(&bytes)?.filter(|header| self.fits(header, at)) {
                return Ok(Some((at, header)));
            }
            at += ALIGN;
            if at + Header::BYTES as u64 > self.size {
                return Ok(None);
            }
            let inside = at >= self.start && at + Header::BYTES as u64 <= self.start + self.bytes.len() as u64;
            if !inside {
                self.start = at;
                self.bytes.resize((self.size - at).min(CHUNK as u64) as usize, 0);
                read_exact(self.io, self.file, &mut self.bytes, at).map_err(wrap)?;
            }
            let from = (at - self.start) as usize;
            bytes.copy_from_slice(&self.bytes[from..from + Header::BYTES]);
        }
    }

    fn fits(&self, header: &Header, at: u64) -> bool {
        let place = Place { segment: self.number, offset: (at / ALIGN) as u32 };
        let end = at + Header::BYTES as u64 + u64::from(header.meta.len);
        header.place == place && header.media == self.media && end <= self.size
    }
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
