//! What an engine and the agent say to each other over a Unix socket: frames of little-endian fields; bytes of objects never travel.
//!
//! Owns: the words and their bounds. Never touches: sockets, memory.
//!
//! The engine says hello; the agent's welcome carries the descriptor of the arena. Then requests follow, each answered in order by frames of its
//! number: while something is waited for, empty ones of [`Status::Waiting`], so that silence means that nobody is there. `Release` and
//! `Damaged` have no answer.

use std::time::Duration;

use crate::index::MAX_CHAIN;
use crate::key::{Key, Kind, ObjectId};
use crate::object::Class;
use crate::upstream::Found;
use crate::wire::{
    Hello, MAX_ITEMS, Malformed, Reader, decode_header, encode_header, push_chain, push_count, push_id, read_chain,
    read_id,
};

pub use crate::wire::{HEADER, decode_outcomes, encode_outcomes};

/// Raised whenever a word changes its meaning: both ends are of the same release.
pub const VERSION: u16 = 1;

/// First bytes of everything.
pub const MAGIC: [u8; 4] = *b"DIKA";

/// Longest body: a put of the longest chain.
pub const MAX_BODY: usize = 1 << 20;

/// What a frame asks for, or what it answers with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Op {
    /// Longest present prefix of a chain.
    Check = 1,
    /// Where objects lie, once they are there; they are pinned.
    Get = 2,
    /// Drops pins: no answer.
    Release = 3,
    /// One byte with the descriptor of the connection's stage.
    Stage = 4,
    /// Objects to be taken from the stage.
    Put = 5,
    /// Wait until the store has what this engine put.
    Flush = 6,
    /// Counters and sizes.
    Stats = 7,
    /// Bytes in the arena lack their checksum: no answer.
    Damaged = 8,
    /// An answer.
    Answer = 9,
}

impl Op {
    const ALL: [Self; 9] = [
        Self::Check,
        Self::Get,
        Self::Release,
        Self::Stage,
        Self::Put,
        Self::Flush,
        Self::Stats,
        Self::Damaged,
        Self::Answer,
    ];

    fn from_byte(byte: u8) -> Option<Self> {
        Self::ALL.get(usize::from(byte.checked_sub(1)?)).copied()
    }
}

/// What an answer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// The answer, or the next part of it.
    Done = 0,
    /// Not yet.
    Waiting = 1,
    /// The request makes no sense; the body says why.
    Invalid = 2,
    /// Not now: the agent is going away or the store does not answer; the body says why.
    Unavailable = 3,
}

impl Status {
    const ALL: [Self; 4] = [Self::Done, Self::Waiting, Self::Invalid, Self::Unavailable];

    fn from_byte(byte: u8) -> Option<Self> {
        Self::ALL.get(usize::from(byte)).copied()
    }
}

/// Header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What it is.
    pub op: Op,
    /// Of an answer; `Done` in a request.
    pub status: Status,
    /// Number of the request.
    pub number: u32,
    /// Bytes of the body.
    pub len: u32,
}

impl Header {
    /// As it travels.
    pub fn encode(self) -> [u8; HEADER] {
        encode_header(MAGIC, self.op as u8, self.status as u8, self.number, self.len)
    }

    /// # Errors
    /// [`Malformed`] for anything that is no header.
    pub fn decode(bytes: &[u8; HEADER]) -> Result<Self, Malformed> {
        let (op, status, number, len) = decode_header(bytes, MAGIC, Op::from_byte, Status::from_byte)?;
        Ok(Self { op, status, number, len })
    }
}

/// First words of an engine: fixed fields, then its tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Greeting {
    /// Version of the words that follow.
    pub version: u16,
    /// Who it is.
    pub who: Hello,
}

impl Greeting {
    /// Bytes before the tenant.
    pub const FIXED: usize = 32;

    /// Longest name of a tenant.
    pub const MAX_TENANT: usize = crate::client::MAX_TENANT;

    /// As it travels. A tenant's name longer than [`Greeting::MAX_TENANT`] is cut: clients refuse it before.
    pub fn encode(&self) -> Vec<u8> {
        let tenant = &self.who.tenant.as_bytes()[..self.who.tenant.len().min(Self::MAX_TENANT)];
        let mut bytes = MAGIC.to_vec();
        bytes.extend(self.version.to_le_bytes());
        bytes.extend([u8::from(self.who.first_stays), tenant.len() as u8]);
        bytes.extend(self.who.fingerprint);
        bytes.extend(self.who.block_tokens.to_le_bytes());
        bytes.extend([0; 4]);
        bytes.extend(tenant);
        bytes
    }

    /// How many bytes of tenant follow the fixed fields.
    ///
    /// # Errors
    /// [`Malformed`] for what is no greeting.
    pub fn tenant_len(fixed: &[u8; Self::FIXED]) -> Result<usize, Malformed> {
        if fixed[..4] != MAGIC {
            return Err(Malformed("no greeting of an engine"));
        }
        let len = usize::from(fixed[7]);
        if len > Self::MAX_TENANT { Err(Malformed("a tenant's name is too long")) } else { Ok(len) }
    }

    /// # Errors
    /// [`Malformed`] for what is no greeting. Of another version only that is known.
    pub fn decode(fixed: &[u8; Self::FIXED], tenant: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(&fixed[4..]);
        let version = reader.u16()?;
        let first_stays = match reader.u8()? {
            0 => false,
            1 => true,
            _ => return Err(Malformed("a flag is neither 0 nor 1")),
        };
        reader.u8()?;
        let (fingerprint, block_tokens) = (reader.array()?, reader.u32()?);
        let tenant = std::str::from_utf8(tenant).map_err(|_| Malformed("text is no UTF-8"))?.to_owned();
        Ok(Self { version, who: Hello { tenant, fingerprint, block_tokens, first_stays } })
    }
}

/// The agent's answer to a greeting; the descriptor of the arena comes with it, if it lets the engine in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Welcome {
    /// Version that the agent speaks.
    pub version: u16,
    /// Whether the engine may go on.
    pub admitted: bool,
    /// Chosen at the agent's start: another one has another arena.
    pub agent: u64,
    /// Bytes of the arena.
    pub arena: u64,
    /// Most bytes that one request may pin or put.
    pub at_once: u64,
    /// Longest object.
    pub max_object: u32,
    /// Objects of its tenant that were put and did not reach the store; does not begin at 0.
    pub unwritten: u64,
}

impl Welcome {
    /// Bytes of it.
    pub const LEN: usize = 48;

    /// As it travels.
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..6].copy_from_slice(&self.version.to_le_bytes());
        bytes[6] = u8::from(self.admitted);
        bytes[8..16].copy_from_slice(&self.agent.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.arena.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.at_once.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.max_object.to_le_bytes());
        bytes[40..].copy_from_slice(&self.unwritten.to_le_bytes());
        bytes
    }

    /// # Errors
    /// [`Malformed`] for another protocol.
    pub fn decode(bytes: &[u8; Self::LEN]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(bytes);
        if reader.array::<4>()? != MAGIC {
            return Err(Malformed("the other end is no agent of the KV store"));
        }
        let (version, admitted) = (reader.u16()?, reader.u8()? == 1);
        reader.u8()?;
        let (agent, arena, at_once, max_object) = (reader.u64()?, reader.u64()?, reader.u64()?, reader.u32()?);
        reader.u32()?;
        Ok(Self { version, admitted, agent, arena, at_once, max_object, unwritten: reader.u64()? })
    }
}

/// The answer to a `Check`, with another size of blocks in use under the engine's fingerprint (0: none).
pub fn encode_found(found: &Found, other_block_tokens: u32) -> Vec<u8> {
    let mut body = other_block_tokens.to_le_bytes().to_vec();
    push_count(&mut body, found.blocks);
    push_count(&mut body, found.near);
    push_count(&mut body, found.slices.len());
    for &position in &found.slices {
        push_count(&mut body, position);
    }
    body
}

/// # Errors
/// [`Malformed`], also for more than was asked for.
pub fn decode_found(body: &[u8], chain: usize) -> Result<(Found, u32), Malformed> {
    let mut reader = Reader::new(body);
    let other = reader.u32()?;
    let (blocks, near) = (reader.u32()? as usize, reader.u32()? as usize);
    let count = reader.count(4, MAX_CHAIN)?;
    let slices = (0..count).map(|_| reader.u32().map(|at| at as usize)).collect::<Result<Vec<_>, _>>()?;
    reader.end()?;
    if blocks > chain || near > blocks || slices.iter().any(|&at| at >= blocks) {
        return Err(Malformed("an answer names blocks that are not there"));
    }
    Ok((Found { blocks, slices, near }, other))
}

/// A `Get`: objects with their lengths.
pub fn encode_get(items: impl ExactSizeIterator<Item = (ObjectId, u32)>) -> Vec<u8> {
    let mut body = Vec::with_capacity(4 + 21 * items.len());
    push_count(&mut body, items.len());
    for (id, len) in items {
        push_id(&mut body, id);
        body.extend(len.to_le_bytes());
    }
    body
}

/// # Errors
/// [`Malformed`], also for more than [`MAX_ITEMS`].
pub fn decode_get(body: &[u8]) -> Result<Vec<(ObjectId, u32)>, Malformed> {
    let mut reader = Reader::new(body);
    let count = reader.count(21, MAX_ITEMS)?;
    let items = (0..count).map(|_| Ok((read_id(&mut reader)?, reader.u32()?))).collect::<Result<_, _>>()?;
    reader.end()?;
    Ok(items)
}

/// Where an object lies that was asked for, and under which number it is pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Number of the pin.
    pub pin: u64,
    /// First byte in the arena.
    pub place: u64,
    /// XXH3-64 of its bytes.
    pub checksum: u64,
}

/// Bytes of one answer to a `Get`.
pub const PLACE: usize = 24;

/// One object of the answer to a `Get`: a miss is a pin of number 0.
pub fn push_place(body: &mut Vec<u8>, place: Option<Place>) {
    let place = place.unwrap_or(Place { pin: 0, place: 0, checksum: 0 });
    for field in [place.pin, place.place, place.checksum] {
        body.extend(field.to_le_bytes());
    }
}

/// The objects of one part of the answer to a `Get`.
///
/// # Errors
/// [`Malformed`].
pub fn decode_places(body: &[u8]) -> Result<Vec<Option<Place>>, Malformed> {
    if body.is_empty() || !body.len().is_multiple_of(PLACE) {
        return Err(Malformed("part of an answer is cut"));
    }
    let mut reader = Reader::new(body);
    (0..body.len() / PLACE)
        .map(|_| {
            let place = Place { pin: reader.u64()?, place: reader.u64()?, checksum: reader.u64()? };
            Ok((place.pin != 0).then_some(place))
        })
        .collect()
}

/// An object to be taken from the stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PutItem {
    /// Block or slice.
    pub kind: Kind,
    /// Where in the chain its key stands.
    pub at: u32,
    /// Bytes.
    pub len: u32,
    /// First byte in the stage.
    pub place: u64,
    /// XXH3-64 of its bytes.
    pub checksum: u64,
}

/// A `Put`.
pub fn encode_put(class: Class, chain: &[Key], items: &[PutItem]) -> Vec<u8> {
    let mut body = Vec::with_capacity(16 + 16 * chain.len() + 25 * items.len());
    body.push(class as u8);
    push_chain(&mut body, chain);
    push_count(&mut body, items.len());
    for item in items {
        body.push(item.kind as u8);
        body.extend(item.at.to_le_bytes());
        body.extend(item.len.to_le_bytes());
        body.extend(item.place.to_le_bytes());
        body.extend(item.checksum.to_le_bytes());
    }
    body
}

/// # Errors
/// [`Malformed`], also for positions outside of the chain.
pub fn decode_put(body: &[u8]) -> Result<(Class, Vec<Key>, Vec<PutItem>), Malformed> {
    let mut reader = Reader::new(body);
    let class = Class::from_byte(reader.u8()?).ok_or(Malformed("a class of traffic nobody knows"))?;
    let chain = read_chain(&mut reader)?;
    let count = reader.count(25, MAX_ITEMS)?;
    let mut items = Vec::with_capacity(count);
    for _ in 0..count {
        let kind = Kind::from_byte(reader.u8()?).ok_or(Malformed("a kind of object nobody knows"))?;
        let (at, len) = (reader.u32()?, reader.u32()?);
        if at as usize >= chain.len() {
            return Err(Malformed("an object stands outside of its chain"));
        }
        items.push(PutItem { kind, at, len, place: reader.u64()?, checksum: reader.u64()? });
    }
    reader.end()?;
    Ok((class, chain, items))
}

/// A `Flush`: for how long to wait, at most.
pub fn encode_flush(patience: Duration) -> Vec<u8> {
    u64::try_from(patience.as_millis()).unwrap_or(u64::MAX).to_le_bytes().to_vec()
}

/// # Errors
/// [`Malformed`].
pub fn decode_flush(body: &[u8]) -> Result<Duration, Malformed> {
    let mut reader = Reader::new(body);
    let patience = Duration::from_millis(reader.u64()?);
    reader.end()?;
    Ok(patience)
}

/// The answer to a `Flush`: whether all was tried in time, and [`Welcome::unwritten`] now.
pub fn encode_flushed(all: bool, unwritten: u64) -> Vec<u8> {
    let mut body = vec![u8::from(all)];
    body.extend(unwritten.to_le_bytes());
    body
}

/// # Errors
/// [`Malformed`].
pub fn decode_flushed(body: &[u8]) -> Result<(bool, u64), Malformed> {
    let mut reader = Reader::new(body);
    let flushed = (reader.u8()? == 1, reader.u64()?);
    reader.end()?;
    Ok(flushed)
}

/// A `Damaged`: the object and the checksum that its bytes lacked.
pub fn encode_damaged(id: ObjectId, checksum: u64) -> Vec<u8> {
    let mut body = Vec::with_capacity(25);
    push_id(&mut body, id);
    body.extend(checksum.to_le_bytes());
    body
}

/// # Errors
/// [`Malformed`].
pub fn decode_damaged(body: &[u8]) -> Result<(ObjectId, u64), Malformed> {
    let mut reader = Reader::new(body);
    let damaged = (read_id(&mut reader)?, reader.u64()?);
    reader.end()?;
    Ok(damaged)
}

/// The answer to a `Stats`: names and values.
pub fn encode_stats(stats: &[(String, u64)]) -> Vec<u8> {
    let mut body = Vec::new();
    push_count(&mut body, stats.len());
    for (name, value) in stats {
        let name = &name.as_bytes()[..name.len().min(255)];
        body.push(name.len() as u8);
        body.extend(name);
        body.extend(value.to_le_bytes());
    }
    body
}

/// # Errors
/// [`Malformed`].
pub fn decode_stats(body: &[u8]) -> Result<Vec<(String, u64)>, Malformed> {
    let mut reader = Reader::new(body);
    let count = reader.count(9, MAX_ITEMS)?;
    let stats = (0..count).map(|_| Ok((reader.text()?.to_owned(), reader.u64()?))).collect::<Result<_, _>>()?;
    reader.end()?;
    Ok(stats)
}

#[cfg(test)]
mod tests;
