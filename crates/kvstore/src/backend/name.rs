//! Names of objects in back ends.

use std::fmt;
use std::str::FromStr;

use crate::Error;

/// Lower-case hex digits, then perhaps a dot and lower-case letters: nothing that a path, a URL or a service could take for anything else.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name(String);

impl Name {
    /// Hex digits at most.
    pub const DIGITS: usize = 64;
    /// Letters after the dot at most.
    pub const LETTERS: usize = 8;

    /// The object of a numbered segment.
    pub fn segment(number: u32) -> Self {
        Self(format!("{number:08x}.seg"))
    }

    /// The object of a numbered segment of the store with this id: several may write to one place.
    pub fn segment_of(media: u64, number: u32) -> Self {
        Self(format!("{media:016x}{number:08x}.seg"))
    }

    /// The number, of a segment of the store with this id.
    pub fn number_of(&self, media: u64) -> Option<u32> {
        let digits = self.0.strip_prefix(&format!("{media:016x}"))?.strip_suffix(".seg")?;
        (digits.len() == 8).then(|| u32::from_str_radix(digits, 16).ok()).flatten()
    }

    /// The number, of a segment's name.
    pub fn number(&self) -> Option<u32> {
        let digits = self.0.strip_suffix(".seg")?;
        (digits.len() == 8).then(|| u32::from_str_radix(digits, 16).ok()).flatten()
    }

    /// As it is written.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Name {
    type Err = Error;

    /// # Errors
    /// [`Error::Invalid`] for anything but such a name.
    fn from_str(text: &str) -> Result<Self, Error> {
        let (digits, letters) = text.split_once('.').map_or((text, None), |(digits, letters)| (digits, Some(letters)));
        let hex = (1..=Self::DIGITS).contains(&digits.len())
            && digits.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        let suffix = letters.is_none_or(|letters| {
            (1..=Self::LETTERS).contains(&letters.len()) && letters.bytes().all(|b| b.is_ascii_lowercase())
        });
        if hex && suffix {
            return Ok(Self(text.to_owned()));
        }
        Err(Error::Invalid(
            "a name of an object is 1 to 64 lower-case hex digits, with or without a dot and 1 to 8 letters".into(),
        ))
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
