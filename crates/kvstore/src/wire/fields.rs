//! Fields of frames and bodies, of this protocol and of the agent's: written, and read one after the other, never beyond the end.

use super::{HEADER, MAX_ITEMS};
use crate::error::Error;
use crate::index::MAX_CHAIN;
use crate::key::{Key, Kind, ObjectId};

/// A body that is none: says what is wrong with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Malformed(pub &'static str);

impl From<Malformed> for Error {
    fn from(malformed: Malformed) -> Self {
        Self::Invalid(malformed.0.to_owned())
    }
}

/// Takes fields from the front of a body.
pub struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    /// At the beginning of `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    /// The next `len` bytes.
    ///
    /// # Errors
    /// [`Malformed`]: fewer are left. So for all that follow.
    pub fn bytes(&mut self, len: usize) -> Result<&'a [u8], Malformed> {
        let (front, rest) = self.rest.split_at_checked(len).ok_or(Malformed("a body ends too soon"))?;
        self.rest = rest;
        Ok(front)
    }

    /// The next `N` bytes.
    ///
    /// # Errors
    /// See [`Reader::bytes`].
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let mut array = [0; N];
        array.copy_from_slice(self.bytes(N)?);
        Ok(array)
    }

    /// A byte.
    ///
    /// # Errors
    /// See [`Reader::bytes`].
    pub fn u8(&mut self) -> Result<u8, Malformed> {
        Ok(self.array::<1>()?[0])
    }

    /// Two bytes.
    ///
    /// # Errors
    /// See [`Reader::bytes`].
    pub fn u16(&mut self) -> Result<u16, Malformed> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    /// Four bytes.
    ///
    /// # Errors
    /// See [`Reader::bytes`].
    pub fn u32(&mut self) -> Result<u32, Malformed> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    /// Eight bytes.
    ///
    /// # Errors
    /// See [`Reader::bytes`].
    pub fn u64(&mut self) -> Result<u64, Malformed> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// A key.
    ///
    /// # Errors
    /// See [`Reader::bytes`].
    pub fn key(&mut self) -> Result<Key, Malformed> {
        Ok(Key::from_bytes(self.array()?))
    }

    /// A count of items of `each` bytes at least: believed only if so much is left, and no more than `most`.
    ///
    /// # Errors
    /// [`Malformed`] otherwise.
    pub fn count(&mut self, each: usize, most: usize) -> Result<usize, Malformed> {
        let count = self.u32()? as usize;
        if count > most {
            return Err(Malformed("too many items in one request"));
        }
        if count * each > self.rest.len() {
            return Err(Malformed("a body ends too soon"));
        }
        Ok(count)
    }

    /// Text of a length told before it in one byte.
    ///
    /// # Errors
    /// [`Malformed`] also for what is no UTF-8.
    pub fn text(&mut self) -> Result<&'a str, Malformed> {
        let len = usize::from(self.u8()?);
        std::str::from_utf8(self.bytes(len)?).map_err(|_| Malformed("text is no UTF-8"))
    }

    /// What is left.
    pub fn rest(self) -> &'a [u8] {
        self.rest
    }

    /// Checks that nothing is left.
    ///
    /// # Errors
    /// [`Malformed`] otherwise.
    pub fn end(self) -> Result<(), Malformed> {
        if self.rest.is_empty() { Ok(()) } else { Err(Malformed("a body goes on after its end")) }
    }
}

/// Header of a frame as it travels: operation and status by their bytes.
pub(crate) fn encode_header(magic: [u8; 4], op: u8, status: u8, number: u32, len: u32) -> [u8; HEADER] {
    let mut bytes = [0; HEADER];
    bytes[..4].copy_from_slice(&magic);
    bytes[4] = op;
    bytes[5] = status;
    bytes[8..12].copy_from_slice(&number.to_le_bytes());
    bytes[12..].copy_from_slice(&len.to_le_bytes());
    bytes
}

/// Operation, status, number and length of a header.
pub(crate) fn decode_header<O, S>(
    bytes: &[u8; HEADER],
    magic: [u8; 4],
    op: impl Fn(u8) -> Option<O>,
    status: impl Fn(u8) -> Option<S>,
) -> Result<(O, S, u32, u32), Malformed> {
    let mut reader = Reader::new(bytes);
    if reader.array::<4>()? != magic {
        return Err(Malformed("a frame does not begin as one"));
    }
    let op = op(reader.u8()?).ok_or(Malformed("an operation nobody knows"))?;
    let status = status(reader.u8()?).ok_or(Malformed("a status nobody knows"))?;
    if reader.array::<2>()? != [0; 2] {
        return Err(Malformed("reserved bytes are set"));
    }
    Ok((op, status, reader.u32()?, reader.u32()?))
}

pub(crate) fn push_id(body: &mut Vec<u8>, id: ObjectId) {
    body.push(id.kind as u8);
    body.extend(id.key.to_bytes());
}

pub(crate) fn read_id(reader: &mut Reader<'_>) -> Result<ObjectId, Malformed> {
    let kind = Kind::from_byte(reader.u8()?).ok_or(Malformed("a kind of object nobody knows"))?;
    Ok(ObjectId { kind, key: reader.key()? })
}

pub(crate) fn push_count(body: &mut Vec<u8>, count: usize) {
    body.extend((count as u32).to_le_bytes());
}

pub(crate) fn push_chain(body: &mut Vec<u8>, chain: &[Key]) {
    push_count(body, chain.len());
    for key in chain {
        body.extend(key.to_bytes());
    }
}

/// Also refuses a chain longer than [`MAX_CHAIN`].
pub(crate) fn read_chain(reader: &mut Reader<'_>) -> Result<Vec<Key>, Malformed> {
    let count = reader.count(16, MAX_CHAIN)?;
    let (keys, _) = reader.bytes(16 * count)?.as_chunks::<16>();
    Ok(keys.iter().map(|&bytes| Key::from_bytes(bytes)).collect())
}

/// Puts to be committed or revoked, or pins to be dropped, as they travel.
pub fn encode_numbers(numbers: &[u64]) -> Vec<u8> {
    let mut body = Vec::with_capacity(4 + 8 * numbers.len());
    push_count(&mut body, numbers.len());
    for number in numbers {
        body.extend(number.to_le_bytes());
    }
    body
}

/// # Errors
/// [`Malformed`], also for more than [`MAX_ITEMS`].
pub fn decode_numbers(body: &[u8]) -> Result<Vec<u64>, Malformed> {
    let mut reader = Reader::new(body);
    let count = reader.count(8, MAX_ITEMS)?;
    let numbers = (0..count).map(|_| reader.u64()).collect::<Result<_, _>>()?;
    reader.end()?;
    Ok(numbers)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn fields_end_with_the_body() {
        let bytes = [1, 2, 0, 3, 0, 0, 0, 2, b'h', b'i'];
        let mut reader = Reader::new(&bytes);
        assert_eq!((reader.u8().unwrap(), reader.u16().unwrap(), reader.u32().unwrap()), (1, 2, 3));
        assert_eq!(reader.text().unwrap(), "hi");
        assert!(reader.u8().is_err());
        assert!(reader.end().is_ok());
    }

    #[test]
    fn a_count_is_held_to_what_is_there() {
        let mut body = u32::MAX.to_le_bytes().to_vec();
        body.extend([0; 32]);
        assert_eq!(Reader::new(&body).count(16, 4096), Err(Malformed("too many items in one request")));
        assert_eq!(Reader::new(&body).count(16, usize::MAX), Err(Malformed("a body ends too soon")));
        body[..4].copy_from_slice(&3u32.to_le_bytes());
        assert!(Reader::new(&body).count(16, 4096).is_err());
        body[..4].copy_from_slice(&2u32.to_le_bytes());
        assert_eq!(Reader::new(&body).count(16, 4096), Ok(2));
    }
}
