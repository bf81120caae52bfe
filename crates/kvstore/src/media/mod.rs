//! Where bytes lie: segments, into which records are appended and from which ranges are read.
//!
//! Owns: the contract [`Media`] of the kinds of segment: files of this machine, objects of a back end, stripes over twelve of them.
//! Never touches: which objects are kept and who may read them.

pub mod footer;
pub mod local;
pub mod objects;
pub mod segment;
pub mod striped;
mod waiter;

pub use striped::{Repaired, Scrubbed as Shards};

use crate::error::Error;
use crate::object::Meta;

/// Offsets are in units of this many bytes, at which every record begins.
pub const ALIGN: u64 = 64;

/// Where a record lies: 8 bytes in the index. What was appended later is greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    /// Number of the segment, from 1, never given twice.
    pub segment: u32,
    /// Offset of the record's header, in units of [`ALIGN`].
    pub offset: u32,
}

/// One object of a batch to be appended: its bytes may come in pieces.
pub struct Record<'a> {
    /// Name, parent, tenant, class, length, checksum.
    pub meta: Meta,
    /// The bytes, one after the other; together `meta.len`.
    pub pieces: &'a [&'a [u8]],
}

/// A range of a stored object to be read.
pub struct Read<'a> {
    /// Where it lies.
    pub place: Place,
    /// Length and checksum to hold it to.
    pub meta: Meta,
    /// First byte of the range.
    pub start: u32,
    /// Filled whole: its length is the range's.
    pub into: &'a mut [u8],
}

/// Kinds of storage behind the store. All calls are safe from any thread and may wait for disks or services.
pub trait Media: Send + Sync {
    /// Appends a batch; what it returns is durable. All of the batch or nothing of it counts.
    ///
    /// # Errors
    /// [`Error::Full`], [`Error::Io`], [`Error::Unavailable`].
    fn append(&self, batch: &[Record<'_>]) -> Result<Vec<Place>, Error>;

    /// Reads ranges. A whole object is held to its checksum, a part of one to its header only (say so where it matters: the store reads whole ones for engines).
    /// Each read has a result of its own: damage or loss of one says nothing of the others.
    fn read(&self, reads: &mut [Read<'_>]) -> Vec<Result<(), Error>>;

    /// Every record of every segment that survived, oldest first, for a start after any kind of end. Torn tails are cut, not reported.
    ///
    /// # Errors
    /// [`Error::Newer`], [`Error::Io`], [`Error::Unavailable`].
    fn recover(&self, each: &mut dyn FnMut(Place, Meta)) -> Result<(), Error>;

    /// Every record of one sealed segment, for its collection.
    ///
    /// # Errors
    /// As [`Media::recover`]; [`Error::Invalid`] where a media can tell that the segment is not a sealed one.
    fn records(&self, segment: u32, each: &mut dyn FnMut(Place, Meta)) -> Result<(), Error> {
        self.recover(&mut |place, meta| {
            if place.segment == segment {
                each(place, meta);
            }
        })
    }

    /// Ends the segment that is being appended to, so that it may be deleted when nothing of it lives.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Unavailable`].
    fn seal(&self) -> Result<(), Error>;

    /// Deletes a sealed segment. Reads that have begun end well.
    ///
    /// # Errors
    /// [`Error::Invalid`] for the segment being appended to, [`Error::Io`], [`Error::Unavailable`].
    fn delete(&self, segment: u32) -> Result<(), Error>;

    /// Sealed segments with their bytes on the media.
    fn segments(&self) -> Vec<(u32, u64)>;

    /// Reads what another store has written to the same place, as [`Media::read`] does; what is not there is [`Error::Damaged`].
    fn read_of(&self, media: u64, reads: &mut [Read<'_>]) -> Vec<Result<(), Error>> {
        let none = || Error::Unavailable(format!("nothing of store {media:016x} can be read from here"));
        reads.iter().map(|_| Err(none())).collect()
    }

    /// What it counts, by name; `backlog` is what waits for repair.
    fn counts(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    /// Makes up to `limit` parts again that were lost. None: it has no redundancy of its own.
    ///
    /// # Errors
    /// [`Error::Newer`], [`Error::Unavailable`].
    fn repair(&self, limit: usize) -> Result<Option<Repaired>, Error> {
        let _ = limit;
        Ok(None)
    }

    /// Compares every part of a segment with its checksums and queues what is wrong for repair. None: it has no redundancy of its own.
    ///
    /// # Errors
    /// [`Error::Invalid`]: there is no such segment; [`Error::Newer`], [`Error::Unavailable`].
    fn scrub_segment(&self, segment: u32) -> Result<Option<Shards>, Error> {
        let _ = segment;
        Ok(None)
    }
}
