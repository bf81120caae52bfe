//! Bodies of requests and answers.

use super::fields::{Malformed, Reader, push_chain, push_count, push_id, read_chain, read_id};
use super::{MAX_ITEMS, MAX_WRITE};
use crate::index::MAX_CHAIN;
use crate::key::{Key, ObjectId};
use crate::object::Class;

/// Bytes of an object's name.
const ID: usize = 17;
/// Bytes of what a put says of an object.
const META: usize = ID + 17 + 1 + 4 + 8;

/// Longest present prefix of a chain, and which of its blocks have slices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckRequest {
    /// Most slices to be named, the deepest first.
    pub slices: u32,
    /// The chain, first block first.
    pub chain: Vec<Key>,
}

impl CheckRequest {
    /// As it travels.
    pub fn encode(slices: u32, chain: &[Key]) -> Vec<u8> {
        let mut body = Vec::with_capacity(8 + 16 * chain.len());
        body.extend(slices.to_le_bytes());
        push_chain(&mut body, chain);
        body
    }

    /// # Errors
    /// [`Malformed`], also for a chain longer than [`MAX_CHAIN`].
    pub fn decode(body: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(body);
        let (slices, chain) = (reader.u32()?, read_chain(&mut reader)?);
        reader.end()?;
        Ok(Self { slices, chain })
    }
}

/// What is there of a chain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CheckAnswer {
    /// Blocks from the first on.
    pub blocks: u32,
    /// Positions among them that have a slice, deepest first.
    pub slices: Vec<u32>,
}

impl CheckAnswer {
    /// As it travels.
    pub fn encode(&self) -> Vec<u8> {
        let mut body = self.blocks.to_le_bytes().to_vec();
        push_count(&mut body, self.slices.len());
        for position in &self.slices {
            body.extend(position.to_le_bytes());
        }
        body
    }

    /// # Errors
    /// [`Malformed`].
    pub fn decode(body: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(body);
        let blocks = reader.u32()?;
        let count = reader.count(4, MAX_CHAIN)?;
        let slices = (0..count).map(|_| reader.u32()).collect::<Result<Vec<_>, _>>()?;
        reader.end()?;
        if blocks as usize > MAX_CHAIN || slices.iter().any(|&position| position >= blocks) {
            return Err(Malformed("an answer names blocks that are not there"));
        }
        Ok(Self { blocks, slices })
    }
}

/// A range of one object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GetItem {
    /// Which object.
    pub id: ObjectId,
    /// First byte.
    pub start: u32,
    /// Bytes.
    pub len: u32,
}

/// Ranges of objects; what is found follows in the order asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GetRequest;

impl GetRequest {
    /// As it travels.
    pub fn encode(items: &[GetItem]) -> Vec<u8> {
        let mut body = Vec::with_capacity(4 + (ID + 8) * items.len());
        push_count(&mut body, items.len());
        for item in items {
            push_id(&mut body, item.id);
            body.extend(item.start.to_le_bytes());
            body.extend(item.len.to_le_bytes());
        }
        body
    }

    /// # Errors
    /// [`Malformed`], also for more than [`MAX_ITEMS`].
    pub fn decode(body: &[u8]) -> Result<Vec<GetItem>, Malformed> {
        let mut reader = Reader::new(body);
        let count = reader.count(ID + 8, MAX_ITEMS)?;
        let items = (0..count)
            .map(|_| Ok(GetItem { id: read_id(&mut reader)?, start: reader.u32()?, len: reader.u32()? }))
            .collect::<Result<_, _>>()?;
        reader.end()?;
        Ok(items)
    }
}

/// What precedes the bytes of one object in the answer to a get: whether they follow, and what they are held to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnswerStart {
    /// Bytes follow.
    pub hit: bool,
    /// Length of the whole object.
    pub len: u32,
    /// XXH3-64 of the bytes that follow.
    pub checksum: u64,
}

impl AnswerStart {
    /// Bytes of it.
    pub const LEN: usize = 16;

    /// As it travels.
    pub fn encode(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[0] = u8::from(self.hit);
        bytes[4..8].copy_from_slice(&self.len.to_le_bytes());
        bytes[8..].copy_from_slice(&self.checksum.to_le_bytes());
        bytes
    }

    /// # Errors
    /// [`Malformed`].
    pub fn decode(bytes: &[u8; Self::LEN]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(bytes);
        let hit = match reader.array::<4>()? {
            [0, 0, 0, 0] => false,
            [1, 0, 0, 0] => true,
            _ => return Err(Malformed("an answer is neither a hit nor a miss")),
        };
        Ok(Self { hit, len: reader.u32()?, checksum: reader.u64()? })
    }
}

/// What a put says of an object: tenant and time are the server's to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MetaFields {
    /// Its name.
    pub id: ObjectId,
    /// See [`crate::Meta::parent`].
    pub parent: Option<Key>,
    /// What kind of traffic it came with.
    pub class: Class,
    /// Bytes.
    pub len: u32,
    /// XXH3-64 of them.
    pub checksum: u64,
}

/// A `Start`, as it travels.
pub fn encode_start(items: &[MetaFields]) -> Vec<u8> {
    let mut body = Vec::with_capacity(4 + META * items.len());
    push_count(&mut body, items.len());
    for item in items {
        push_id(&mut body, item.id);
        body.push(u8::from(item.parent.is_some()));
        body.extend(item.parent.unwrap_or(Key(0)).to_bytes());
        body.push(item.class as u8);
        body.extend(item.len.to_le_bytes());
        body.extend(item.checksum.to_le_bytes());
    }
    body
}

/// The items of a `Start`.
///
/// # Errors
/// [`Malformed`], also for more than [`MAX_ITEMS`].
pub fn decode_start(body: &[u8]) -> Result<Vec<MetaFields>, Malformed> {
    let mut reader = Reader::new(body);
    let count = reader.count(META, MAX_ITEMS)?;
    let mut items = Vec::with_capacity(count);
    for _ in 0..count {
        let id = read_id(&mut reader)?;
        let has = reader.u8()?;
        let parent = reader.key()?;
        let parent = match has {
            0 => None,
            1 => Some(parent),
            _ => return Err(Malformed("a flag is neither 0 nor 1")),
        };
        let class = Class::from_byte(reader.u8()?).ok_or(Malformed("a class of traffic nobody knows"))?;
        items.push(MetaFields { id, parent, class, len: reader.u32()?, checksum: reader.u64()? });
    }
    reader.end()?;
    Ok(items)
}

/// What became of an object that was to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Outcome {
    /// Durable and visible.
    Stored = 0,
    /// It was there.
    Exists = 1,
    /// It is there with other bytes, which stay.
    Conflict = 2,
    /// Its parent, or the block of a slice, is not there.
    NoParent = 3,
    /// No room: capacity, quota, memory or disk.
    Full = 4,
    /// It makes no sense: too long, bytes missing, unknown put.
    Invalid = 5,
    /// A disk or a service failed.
    Failed = 6,
}

impl Outcome {
    /// All of them, in the order of their bytes.
    const ALL: [Self; 7] =
        [Self::Stored, Self::Exists, Self::Conflict, Self::NoParent, Self::Full, Self::Invalid, Self::Failed];

    fn from_byte(byte: u8) -> Option<Self> {
        Self::ALL.get(usize::from(byte)).copied()
    }

    /// Whether the object is there now.
    pub const fn is_there(self) -> bool {
        matches!(self, Self::Stored | Self::Exists)
    }
}

/// The answer to a start, an item: a put to write to, or what became of the object.
pub type Answer = Result<u64, Outcome>;

/// The answer to a `Start`, as it travels.
pub fn encode_started(answers: &[Answer]) -> Vec<u8> {
    let mut body = Vec::with_capacity(4 + 9 * answers.len());
    push_count(&mut body, answers.len());
    for answer in answers {
        let (byte, id) = match *answer {
            Ok(id) => (u8::MAX, id),
            Err(outcome) => (outcome as u8, 0),
        };
        body.push(byte);
        body.extend(id.to_le_bytes());
    }
    body
}

/// # Errors
/// [`Malformed`].
pub fn decode_started(body: &[u8]) -> Result<Vec<Answer>, Malformed> {
    let mut reader = Reader::new(body);
    let count = reader.count(9, MAX_ITEMS)?;
    let mut answers = Vec::with_capacity(count);
    for _ in 0..count {
        let (byte, id) = (reader.u8()?, reader.u64()?);
        answers.push(match byte {
            u8::MAX => Ok(id),
            other => Err(Outcome::from_byte(other).ok_or(Malformed("an outcome nobody knows"))?),
        });
    }
    reader.end()?;
    Ok(answers)
}

/// What precedes the bytes of a `Write`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteHead {
    /// Which put.
    pub put: u64,
    /// Offset of the first byte.
    pub offset: u32,
}

impl WriteHead {
    /// Bytes of it.
    pub const LEN: usize = 12;

    /// As it travels.
    pub fn encode(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..8].copy_from_slice(&self.put.to_le_bytes());
        bytes[8..].copy_from_slice(&self.offset.to_le_bytes());
        bytes
    }

    /// The head and the bytes of a `Write`.
    ///
    /// # Errors
    /// [`Malformed`], also for more than [`MAX_WRITE`].
    pub fn decode(body: &[u8]) -> Result<(Self, &[u8]), Malformed> {
        let mut reader = Reader::new(body);
        let head = Self { put: reader.u64()?, offset: reader.u32()? };
        let bytes = reader.rest();
        if bytes.len() > MAX_WRITE { Err(Malformed("too many bytes in one write")) } else { Ok((head, bytes)) }
    }
}

/// The answer to a `Commit`, as it travels.
pub fn encode_outcomes(outcomes: &[Outcome]) -> Vec<u8> {
    let mut body = Vec::with_capacity(4 + outcomes.len());
    push_count(&mut body, outcomes.len());
    body.extend(outcomes.iter().map(|&outcome| outcome as u8));
    body
}

/// # Errors
/// [`Malformed`].
pub fn decode_outcomes(body: &[u8]) -> Result<Vec<Outcome>, Malformed> {
    let mut reader = Reader::new(body);
    let count = reader.count(1, MAX_ITEMS)?;
    let outcomes = reader
        .bytes(count)?
        .iter()
        .map(|&byte| Outcome::from_byte(byte).ok_or(Malformed("an outcome nobody knows")))
        .collect::<Result<_, _>>()?;
    reader.end()?;
    Ok(outcomes)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::{decode_numbers, encode_numbers};
    use super::*;
    use crate::key::Kind;
    use proptest::prelude::*;

    fn ids() -> impl Strategy<Value = ObjectId> {
        (any::<u128>(), any::<bool>())
            .prop_map(|(key, slice)| ObjectId { kind: if slice { Kind::Slice } else { Kind::Block }, key: Key(key) })
    }

    fn outcomes() -> impl Strategy<Value = Outcome> {
        (0u8..7).prop_map(|byte| Outcome::from_byte(byte).unwrap())
    }

    proptest! {
        #[test]
        fn messages_are_read_as_they_are_written(
            chain in prop::collection::vec(any::<u128>().prop_map(Key), 0..50), slices in any::<u32>(),
            items in prop::collection::vec((ids(), any::<u32>(), any::<u32>()), 0..20),
            metas in prop::collection::vec((ids(), any::<Option<u128>>(), 0u8..3, any::<u32>(), any::<u64>()), 0..20),
            started in prop::collection::vec(prop_oneof![any::<u64>().prop_map(Ok), outcomes().prop_map(Err)], 0..20),
            puts in prop::collection::vec(any::<u64>(), 0..20), ends in prop::collection::vec(outcomes(), 0..20),
        ) {
            let check = CheckRequest::decode(&CheckRequest::encode(slices, &chain)).unwrap();
            prop_assert_eq!(check, CheckRequest { slices, chain });
            let items: Vec<_> = items.into_iter().map(|(id, start, len)| GetItem { id, start, len }).collect();
            prop_assert_eq!(GetRequest::decode(&GetRequest::encode(&items)).unwrap(), items);
            let metas: Vec<_> = metas
                .into_iter()
                .map(|(id, parent, class, len, checksum)| {
                    MetaFields { id, parent: parent.map(Key), class: Class::from_byte(class).unwrap(), len, checksum }
                })
                .collect();
            prop_assert_eq!(decode_start(&encode_start(&metas)).unwrap(), metas);
            prop_assert_eq!(decode_started(&encode_started(&started)).unwrap(), started);
            prop_assert_eq!(decode_numbers(&encode_numbers(&puts)).unwrap(), puts);
            prop_assert_eq!(decode_outcomes(&encode_outcomes(&ends)).unwrap(), ends);
        }

        #[test]
        fn no_bytes_at_all_panic_or_take_memory_for_what_is_not_there(body in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = CheckRequest::decode(&body);
            let _ = CheckAnswer::decode(&body);
            let _ = GetRequest::decode(&body);
            let _ = decode_start(&body);
            let _ = decode_started(&body);
            let _ = decode_numbers(&body);
            let _ = decode_outcomes(&body);
            let _ = WriteHead::decode(&body);
        }
    }

    #[test]
    fn outcomes_have_the_bytes_of_their_order() {
        assert!(Outcome::ALL.iter().zip(0..).all(|(&outcome, byte)| outcome as u8 == byte));
        assert!(Outcome::from_byte(7).is_none());
    }

    #[test]
    fn answers_that_contradict_themselves_are_refused() {
        let good = CheckAnswer { blocks: 3, slices: vec![2, 0] };
        assert_eq!(CheckAnswer::decode(&good.encode()).unwrap(), good);
        assert!(CheckAnswer::decode(&CheckAnswer { blocks: 3, slices: vec![3] }.encode()).is_err());
        assert!(CheckRequest::decode(&CheckRequest::encode(0, &vec![Key(1); MAX_CHAIN + 1])).is_err());
        for start in [AnswerStart { hit: true, len: 7, checksum: 5 }, AnswerStart { hit: false, len: 0, checksum: 0 }] {
            assert_eq!(AnswerStart::decode(&start.encode()).unwrap(), start);
        }
        assert!(AnswerStart::decode(&[2; AnswerStart::LEN]).is_err());
    }
}
