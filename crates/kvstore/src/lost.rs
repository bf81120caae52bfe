//! Why a conversation with a server or an agent did not end as hoped.

use std::fmt::Display;
use std::io;

use crate::error::Error;

pub(crate) enum Lost {
    /// The connection ended: on a kept one the other end may merely have been started again.
    Gone(Error),
    /// Nobody says anything, or not in time.
    Slow(Error),
    /// The other end does not let us in, or is none.
    Refused(Error),
    /// It answered with an error; the conversation may go on.
    Told(Error),
}

impl Lost {
    /// What came from `whom` is no answer.
    pub fn nonsense_of(whom: &str, why: impl Display) -> Self {
        Self::Refused(Error::Unavailable(format!("{whom} answers what makes no sense: {why}")))
    }
}

impl From<io::Error> for Lost {
    fn from(error: io::Error) -> Self {
        let text = Error::Unavailable(match error.kind() {
            io::ErrorKind::UnexpectedEof => "it closed the connection".to_owned(),
            io::ErrorKind::TimedOut => "it does not answer in time".to_owned(),
            _ => error.to_string(),
        });
        if error.kind() == io::ErrorKind::TimedOut { Self::Slow(text) } else { Self::Gone(text) }
    }
}
