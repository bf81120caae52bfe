//! Names of objects: a 128-bit chain hash, written as 32 lower-case hex digits, and what kind of object it names.
//!
//! Nothing else ever becomes part of a path, an object name or a key of a service.

use std::fmt;
use std::str::FromStr;

use crate::error::Error;

/// A chain hash: uniformly spread, so that its own bits serve as a table's hash and as a place on a ring of servers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key(pub u128);

impl Key {
    /// Digits of the written form.
    pub const DIGITS: usize = 32;

    /// The sixteen bytes, least significant first, as the engine has them.
    pub fn to_bytes(self) -> [u8; 16] {
        self.0.to_le_bytes()
    }

    /// The inverse of [`Key::to_bytes`].
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(u128::from_le_bytes(bytes))
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Key {
    type Err = Error;

    /// # Errors
    /// [`Error::Invalid`] for anything but 32 lower-case hex digits.
    fn from_str(text: &str) -> Result<Self, Error> {
        let digits = text.len() == Self::DIGITS && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        match u128::from_str_radix(text, 16) {
            Ok(value) if digits => Ok(Self(value)),
            _ => Err(Error::Invalid(format!("a key is {} lower-case hex digits", Self::DIGITS))),
        }
    }
}

/// The two kinds of object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Kind {
    /// Block KV of one grain of tokens, all layers together, under the chain hash of its last token.
    Block = 1,
    /// Window rows at a boundary, under the hash of the block that ends there.
    Slice = 2,
}

impl Kind {
    /// From its byte in a record or a frame.
    pub fn from_byte(byte: u8) -> Option<Self> {
        match byte {
            1 => Some(Self::Block),
            2 => Some(Self::Slice),
            _ => None,
        }
    }
}

/// Kind and key: what an object is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectId {
    /// Block or slice.
    pub kind: Kind,
    /// Chain hash.
    pub key: Key,
}

impl fmt::Display for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            Kind::Block => "block",
            Kind::Slice => "slice",
        };
        write!(f, "{kind} {}", self.key)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_key_is_read_as_it_is_written() {
        for value in [0, 1, u128::MAX, 0x0123_4567_89ab_cdef_0011_2233_4455_6677] {
            let key = Key(value);
            assert_eq!(key.to_string().len(), Key::DIGITS);
            assert_eq!(key.to_string().parse::<Key>().unwrap(), key);
            assert_eq!(Key::from_bytes(key.to_bytes()), key);
        }
        assert_eq!(Key(0xabc).to_string(), "00000000000000000000000000000abc");
    }

    #[test]
    fn whatever_is_no_key_is_refused() {
        let good = "00000000000000000000000000000abc";
        let long = format!("0{good}");
        let upper = good.to_uppercase();
        let signed = format!("+{}", &good[1..]);
        for text in [
            "",
            "abc",
            "../../../../../../etc/passwd00000",
            &good[1..],
            &long,
            &upper,
            &signed,
            "é0000000000000000000000000000abc",
        ] {
            assert!(text.parse::<Key>().is_err(), "{text}");
        }
    }
}
