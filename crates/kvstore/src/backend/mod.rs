//! Where objects lie that are no files of this machine's store: a mounted directory, a bucket of an S3 service.
//!
//! Owns: the contract [`Backend`], names of objects ([`Name`]) and its kinds. Never touches: what is in an object, where its parts lie
//! beside it, who may read it.
//!
//! An object is written whole and is then never changed: a reader sees all of it or nothing.

mod directory;
mod faults;
mod memory;
mod name;
#[cfg(feature = "s3")]
mod s3;
#[cfg(test)]
mod tests;

use std::fmt::Debug;
use std::ops::Range;

use async_trait::async_trait;
use bytes::Bytes;

pub use directory::MountedDir;
pub use faults::Faulty;
pub use memory::Memory;
pub use name::Name;
#[cfg(feature = "s3")]
pub use s3::{S3, S3Config};

use crate::Error;

/// What a back end can do beyond the contract.
#[expect(clippy::struct_excessive_bools, reason = "four independent facts")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Objects may be given a time after which they are gone.
    pub ttl: bool,
    /// [`Backend::put_object`] refuses a name that is taken, whoever wrote it. Without, it is an error.
    pub conditional_put: bool,
    /// Bytes on their way to it are held to a checksum.
    pub checksum: bool,
    /// A part of an object can be read without the rest.
    pub range: bool,
}

/// What became of a create-only write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Put {
    /// The object is there, durably.
    Created,
    /// One of that name was there before, and is as it was.
    Exists,
}

/// Objects by name. Calls may run beside each other; dropping one's future gives its answer up, not always its effect.
#[async_trait]
pub trait Backend: Send + Sync + Debug {
    /// What it is called in messages: its path or its address with the bucket.
    fn place(&self) -> &str;

    /// What it can do.
    fn capabilities(&self) -> Capabilities;

    /// Writes an object of several parts, instead of the one that may be there: durable and whole when this returns, invisible before.
    /// For names that only the caller gives.
    ///
    /// # Errors
    /// [`Error::Full`], [`Error::Io`], [`Error::Unavailable`].
    async fn put_segment(&self, name: &Name, parts: Vec<Bytes>) -> Result<(), Error>;

    /// The same for a name that must be free. An answer lost on its way may make the caller's own object [`Put::Exists`].
    ///
    /// # Errors
    /// As [`Backend::put_segment`], and [`Error::Invalid`] without [`Capabilities::conditional_put`].
    async fn put_object(&self, name: &Name, parts: Vec<Bytes>) -> Result<Put, Error>;

    /// Ranges of an object, in their order; `None` if there is none of that name.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a range beyond its end, [`Error::Io`], [`Error::Unavailable`].
    async fn get_ranges(&self, name: &Name, ranges: &[Range<u64>]) -> Result<Option<Vec<Bytes>>, Error>;

    /// Deletes objects; one that is not there is deleted.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Unavailable`]: some may be deleted.
    async fn delete_many(&self, names: &[Name]) -> Result<(), Error>;

    /// Names that begin so, with the bytes of their objects, in the order of names. What is no [`Name`] is left out.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Unavailable`].
    async fn list(&self, prefix: &str) -> Result<Vec<(Name, u64)>, Error>;
}

/// A range beyond the end of an object.
fn beyond(name: &Name, range: &Range<u64>, len: u64) -> Error {
    Error::Invalid(format!("bytes {} to {} of {name}, which has {len}", range.start, range.end))
}
