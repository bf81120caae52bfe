//! What can go wrong, by what the caller does next: ask again elsewhere, recompute, or mend a setting.

use std::time::Duration;

/// Why an offer, a pull or a release did not happen. Nothing stays taken after any of them.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The offer was released, its lease is over, or its owner has ended. Asking again cannot help: compute it anew.
    #[error("the offer is gone: {0}")]
    Gone(&'static str),
    /// The bytes that came are not those that were offered.
    #[error("the bytes are not those that were offered: {0}; pull again or compute them anew")]
    Corrupt(&'static str),
    /// The owner could not be reached, fell silent, or died on the way.
    #[error("{address} cannot be reached: {why}")]
    Unreachable {
        /// Address in the ticket.
        address: String,
        /// What happened.
        why: String,
    },
    /// The two sides do not belong together: another layout, version, back end or token.
    #[error("refused: {0}")]
    Refused(String),
    /// More bytes than a bound or the given buffers hold; found before anything was allocated.
    #[error("{what} is {need} bytes, at most {have} fit")]
    TooLarge {
        /// Which length.
        what: &'static str,
        /// Bytes wanted.
        need: u64,
        /// Bytes there are.
        have: u64,
    },
    /// This owner's bound on offers or bytes is reached; it goes down when offers are released or end.
    #[error(
        "no room for another offer: {what} would be {need}, the limit is {have}; release offers or raise the limit"
    )]
    Full {
        /// Which bound.
        what: &'static str,
        /// With this offer.
        need: u64,
        /// The bound.
        have: u64,
    },
    /// An argument or a setting makes no sense.
    #[error("{0}")]
    Invalid(String),
    /// This end was closed.
    #[error("this end of the transfer is closed")]
    Closed,
    /// The operating system refused memory, a file or a thread.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// Its answer.
        source: std::io::Error,
    },
}

impl Error {
    pub(crate) fn system(what: &'static str) -> impl Fn(rustix::io::Errno) -> Self {
        move |errno| Self::System { what, source: errno.into() }
    }

    pub(crate) fn io(what: &'static str) -> impl Fn(std::io::Error) -> Self {
        move |source| Self::System { what, source }
    }
}

/// Why talking to a peer ended; [`Error`] once the peer's address is known.
#[derive(Debug)]
pub(crate) enum Broken {
    /// The peer closed, or is dead.
    Ended,
    /// Nothing moved for this long, or the whole took longer than it may.
    Slow(Duration),
    /// The system's word.
    System(std::io::Error),
}

impl From<rustix::io::Errno> for Broken {
    fn from(errno: rustix::io::Errno) -> Self {
        match errno {
            rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET => Self::Ended,
            other => Self::System(other.into()),
        }
    }
}

impl Broken {
    pub(crate) fn at(self, address: &impl ToString) -> Error {
        let why = match self {
            Self::Ended => "the connection was closed before the end".to_owned(),
            Self::Slow(waited) => format!("nothing more within {waited:?}"),
            Self::System(error) => error.to_string(),
        };
        Error::Unreachable { address: address.to_string(), why }
    }
}
