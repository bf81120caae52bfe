//! What can go wrong, by what the caller has to do about it.

use crate::key::ObjectId;

/// Errors of the store. A missing object is none: reads say so in their result.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The caller's words do not make sense: names what to change.
    #[error("{0}")]
    Invalid(String),
    /// Nothing may be written: the disk, the quota or the bound named is full.
    #[error("no room: {0}")]
    Full(String),
    /// An object of that name has other bytes. The first write stays.
    #[error("{0} is stored with other bytes")]
    Conflict(ObjectId),
    /// Stored bytes lack their checksum, or too many parts of them are lost.
    #[error("{0} is damaged: {1}")]
    Damaged(ObjectId, String),
    /// The files were written by a newer version.
    #[error(
        "format {found} of {what} is newer than this version reads ({known}): upgrade deepinfer, or name another root"
    )]
    Newer {
        /// What has the format.
        what: String,
        /// The format found.
        found: u32,
        /// The newest one known.
        known: u32,
    },
    /// A disk or a service answered with an error.
    #[error("{what}: {source}")]
    Io {
        /// What was being done, with the path or address.
        what: String,
        /// The error itself.
        source: std::io::Error,
    },
    /// The store is closing, or a service it needs does not answer.
    #[error("unavailable: {0}")]
    Unavailable(String),
}

impl Error {
    /// For `map_err`: an input or output error with what was being done.
    pub fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }
}
