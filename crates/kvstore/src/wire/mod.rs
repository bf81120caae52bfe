//! What a client and a server say to each other: frames of little-endian fields over any stream of bytes.
//!
//! Owns: the words of the protocol, their bounds, how roles are proved. Never touches: sockets, the store.
//!
//! A frame is a header of 16 bytes and a body. Whoever reads one knows its length before it takes memory for it, and no count within a
//! body is believed before the body was seen to hold so many.
//!
//! A conversation: the server greets with a nonce; the client says who it is and proves the roles that it wants; then requests, each
//! answered in order by a frame with the same number. `Write` alone has no answer: what was wrong with it is told at the commit.

mod fields;
mod hello;
mod message;

pub use fields::{Malformed, Reader, decode_numbers, encode_numbers};
pub(crate) use fields::{decode_header, encode_header, push_chain, push_count, push_id, read_chain, read_id};
pub use hello::{Greeting, Hello, Proof, Role, Roles, Welcome};
pub use message::{
    Answer, AnswerStart, CheckAnswer, CheckRequest, GetItem, GetRequest, MetaFields, Outcome, WriteHead,
    decode_outcomes, decode_start, decode_started, encode_outcomes, encode_start, encode_started,
};

/// Raised whenever a word changes its meaning. A client and a server of different versions part at the greeting.
pub const VERSION: u16 = 2;

/// First bytes of a greeting: whoever connects to the wrong port learns it at once.
pub const MAGIC: [u8; 4] = *b"DIKV";

/// Bytes of a frame's header.
pub const HEADER: usize = 16;

/// Longest body of anything but bytes of objects: a chain of the greatest length, with room.
pub const MAX_BODY: usize = 1 << 20;

/// Most bytes of an object in one `Write`.
pub const MAX_WRITE: usize = 1 << 20;

/// Most objects named in one request.
pub const MAX_ITEMS: usize = 4096;

/// What a frame asks for, or what it answers with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Op {
    /// Longest present prefix of a chain.
    Check = 1,
    /// Bytes of objects.
    Get = 2,
    /// Begin puts.
    Start = 3,
    /// Bytes of a put: no answer.
    Write = 4,
    /// Make puts durable and visible.
    Commit = 5,
    /// Give puts up.
    Revoke = 6,
    /// Nothing: is anybody there?
    Ping = 7,
    /// A command of an operator: one word and its arguments, as JSON.
    Admin = 8,
    /// An answer.
    Answer = 9,
}

impl Op {
    /// All of them, in the order of their bytes, from 1.
    const ALL: [Self; 9] = [
        Self::Check,
        Self::Get,
        Self::Start,
        Self::Write,
        Self::Commit,
        Self::Revoke,
        Self::Ping,
        Self::Admin,
        Self::Answer,
    ];

    fn from_byte(byte: u8) -> Option<Self> {
        Self::ALL.get(usize::from(byte.checked_sub(1)?)).copied()
    }
}

/// How a request ended as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// Done: what became of each item is in the body.
    Done = 0,
    /// The request makes no sense; the body says why.
    Invalid = 1,
    /// The connection has not proved the role.
    Forbidden = 2,
    /// Too many connections or too much memory in use: try again later.
    Busy = 3,
    /// The server is going away.
    Leaving = 4,
    /// A disk or a service failed; the body says which.
    Failed = 5,
}

impl Status {
    /// All of them, in the order of their bytes.
    const ALL: [Self; 6] = [Self::Done, Self::Invalid, Self::Forbidden, Self::Busy, Self::Leaving, Self::Failed];

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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn headers_are_read_as_they_are_written() {
        for (op, byte) in Op::ALL.into_iter().zip(1..) {
            for (status, code) in Status::ALL.into_iter().zip(0..) {
                let header = Header { op, status, number: 0x0102_0304, len: 77 };
                assert_eq!(header.encode()[4..6], [byte, code]);
                assert_eq!(Header::decode(&header.encode()).unwrap(), header);
            }
        }
    }

    #[test]
    fn a_flipped_bit_of_the_first_bytes_is_no_header() {
        let good = Header { op: Op::Check, status: Status::Done, number: 1, len: 0 }.encode();
        for bit in 0..32 {
            let mut bytes = good;
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(Header::decode(&bytes).is_err(), "bit {bit}");
        }
        for (at, byte) in [(4, 0), (4, 200), (5, 9), (6, 1), (7, 1)] {
            let mut bytes = good;
            bytes[at] = byte;
            assert!(Header::decode(&bytes).is_err(), "byte {at}");
        }
    }
}
