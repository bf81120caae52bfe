//! The wire, little-endian. Sizes are fixed, so that nothing is read whose length a peer chose, until a reply was checked.
//!
//! ```text
//! greeting  owner → puller  32   magic "DIKV" 4 · version 2 · zero 2 · epoch 8 · nonce 16
//! request   puller → owner  80   magic 4 · version 2 · operation 1 · zero 1 · epoch 8 · id 16 · layout digest 16 · MAC 32
//! reply     owner → puller  32   magic 4 · version 2 · status 1 · zero 1 · meta length 8 · payload length 8 · checksum 8
//! then, after a pull that is granted:
//! meta                           meta length bytes
//! payload                        TCP: payload length bytes.  Shared memory: one byte with the file descriptor of the memory
//! receipt   puller → owner   8   magic 4 · outcome 1 · zero 3
//! ```
//! Operations: 1 pull, 2 release. Status: 0 granted (release: it was this call), 1 gone, 2 refused layout, 3 refused token, 4 refused
//! version or operation. Outcome: 1 verified, 2 corrupt, 3 given up. The MAC covers the nonce and the request before it, under the shared token: a
//! recorded request is worth nothing on another connection. Magic and version keep their place in every version.
//! Not encrypted: between machines it belongs into a trusted network or a tunnel.

use crate::auth::{Auth, MAC};
use crate::ticket::{OfferId, Reader, VERSION};

const MAGIC: [u8; 4] = *b"DIKV";
const PURPOSE: u8 = b'R';

/// A frame of another protocol or version, or one that is against the rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bad {
    /// No frame of ours.
    Magic,
    /// Of this version.
    Version(u16),
    /// A field has a value that it cannot have.
    Field,
}

fn head(reader: &mut Reader<'_>) -> Result<(), Bad> {
    if reader.take::<4>() != MAGIC {
        return Err(Bad::Magic);
    }
    match u16::from_le_bytes(reader.take()) {
        VERSION => Ok(()),
        other => Err(Bad::Version(other)),
    }
}

fn put<const N: usize>(fields: &[&[u8]]) -> [u8; N] {
    let mut bytes = [0; N];
    let mut at = 0;
    for field in fields {
        bytes[at..at + field.len()].copy_from_slice(field);
        at += field.len();
    }
    bytes
}

/// First words of an owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Greeting {
    /// The owner's life.
    pub epoch: u64,
    /// Fresh for each connection.
    pub nonce: [u8; 16],
}

impl Greeting {
    /// Bytes on the wire.
    pub const SIZE: usize = 32;

    /// To the wire.
    pub fn encode(&self) -> [u8; Self::SIZE] {
        put(&[&MAGIC, &VERSION.to_le_bytes(), &[0; 2], &self.epoch.to_le_bytes(), &self.nonce])
    }

    /// From the wire.
    ///
    /// # Errors
    /// Not such a frame.
    pub fn decode(bytes: &[u8; Self::SIZE]) -> Result<Self, Bad> {
        let mut reader = Reader(bytes);
        head(&mut reader)?;
        if reader.take() != [0; 2] {
            return Err(Bad::Field);
        }
        Ok(Self { epoch: u64::from_le_bytes(reader.take()), nonce: reader.take() })
    }
}

/// What a puller may ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// The bytes.
    Pull = 1,
    /// The end of the offer.
    Release = 2,
}

/// A puller's only frame before the reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// What is asked for.
    pub operation: Operation,
    /// Life of the owner that made the offer.
    pub epoch: u64,
    /// Which offer.
    pub id: OfferId,
    /// The puller's layout.
    pub layout: [u8; 16],
}

impl Request {
    /// Bytes on the wire.
    pub const SIZE: usize = 80;

    /// To the wire, signed for one connection.
    pub fn encode(&self, auth: &Auth, nonce: &[u8; 16]) -> [u8; Self::SIZE] {
        let head = self.unsigned();
        put(&[&head, &auth.mac(PURPOSE, &[nonce, &head])])
    }

    fn unsigned(&self) -> [u8; Self::SIZE - MAC] {
        let operation = [self.operation as u8, 0];
        put(&[&MAGIC, &VERSION.to_le_bytes(), &operation, &self.epoch.to_le_bytes(), &self.id.0, &self.layout])
    }

    /// From the wire, with whether it carries the right MAC.
    ///
    /// # Errors
    /// Not such a frame.
    pub fn decode(bytes: &[u8; Self::SIZE], auth: &Auth, nonce: &[u8; 16]) -> Result<(Self, bool), Bad> {
        let mut reader = Reader(bytes);
        head(&mut reader)?;
        let operation = match reader.take() {
            [1, 0] => Operation::Pull,
            [2, 0] => Operation::Release,
            _ => return Err(Bad::Field),
        };
        let epoch = u64::from_le_bytes(reader.take());
        let request = Self { operation, epoch, id: OfferId(reader.take()), layout: reader.take() };
        Ok((request, auth.verify(PURPOSE, &[nonce, &bytes[..Self::SIZE - MAC]], &reader.take())))
    }
}

/// How an owner answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Here it comes; of a release: this call ended the offer.
    Granted = 0,
    /// No such offer any more.
    Gone = 1,
    /// The layouts differ.
    Layout = 2,
    /// No token, or another one.
    Token = 3,
    /// A frame this end does not know.
    Frame = 4,
}

/// An owner's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// Yes or why not.
    pub status: Status,
    /// Bytes of the description.
    pub meta: u64,
    /// Bytes of the payload.
    pub length: u64,
    /// Over both.
    pub checksum: u64,
}

impl Reply {
    /// Bytes on the wire.
    pub const SIZE: usize = 32;

    /// An answer without anything behind it.
    pub const fn empty(status: Status) -> Self {
        Self { status, meta: 0, length: 0, checksum: 0 }
    }

    /// To the wire.
    pub fn encode(&self) -> [u8; Self::SIZE] {
        let status = [self.status as u8, 0];
        let numbers = [self.meta, self.length, self.checksum].map(u64::to_le_bytes);
        put(&[&MAGIC, &VERSION.to_le_bytes(), &status, &numbers[0], &numbers[1], &numbers[2]])
    }

    /// From the wire.
    ///
    /// # Errors
    /// Not such a frame.
    pub fn decode(bytes: &[u8; Self::SIZE]) -> Result<Self, Bad> {
        let mut reader = Reader(bytes);
        head(&mut reader)?;
        let status = match reader.take() {
            [0, 0] => Status::Granted,
            [1, 0] => Status::Gone,
            [2, 0] => Status::Layout,
            [3, 0] => Status::Token,
            [4, 0] => Status::Frame,
            _ => return Err(Bad::Field),
        };
        let mut number = || u64::from_le_bytes(reader.take());
        Ok(Self { status, meta: number(), length: number(), checksum: number() })
    }
}

/// How a pull ended on the puller's side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Length and checksum are right.
    Verified = 1,
    /// They are not.
    Corrupt = 2,
    /// The puller wants no more of it.
    GivenUp = 3,
}

impl Outcome {
    /// Bytes on the wire.
    pub const SIZE: usize = 8;

    /// To the wire.
    pub fn encode(self) -> [u8; Self::SIZE] {
        put(&[&MAGIC, &[self as u8]])
    }

    /// From the wire.
    ///
    /// # Errors
    /// Not such a frame.
    pub fn decode(bytes: &[u8; Self::SIZE]) -> Result<Self, Bad> {
        let mut reader = Reader(bytes);
        if reader.take::<4>() != MAGIC {
            return Err(Bad::Magic);
        }
        match reader.take() {
            [1, 0, 0, 0] => Ok(Self::Verified),
            [2, 0, 0, 0] => Ok(Self::Corrupt),
            [3, 0, 0, 0] => Ok(Self::GivenUp),
            _ => Err(Bad::Field),
        }
    }
}
