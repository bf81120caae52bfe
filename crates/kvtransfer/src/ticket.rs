//! A ticket: all that a puller needs, small enough for a header of another protocol.
//!
//! ```text
//! 0  magic "DIKT"      4     8  id             16    48  length    8    64  address n (back end 1: abstract socket name, 2: "ip:port")
//! 4  version           2    24  layout digest  16    56  checksum  8    64+n  MAC  32
//! 6  back end          1    40  owner's epoch   8
//! 7  address length n  1
//! ```
//! Little-endian. As text: the bytes in lower-case hex.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;

use crate::auth::{Auth, MAC};
use crate::error::Error;

const MAGIC: [u8; 4] = *b"DIKT";
/// Version of tickets and of the wire; both change together.
pub const VERSION: u16 = 1;
const FIXED: usize = 64;
/// Longest address.
pub const MAX_ADDRESS: usize = 100;
const PURPOSE: u8 = b'T';

/// Unguessable name of an offer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OfferId(pub [u8; 16]);

impl fmt::Debug for OfferId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Where the owner listens.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Address {
    /// Abstract Unix socket of this machine's network namespace; the payload is shared memory.
    Shm(String),
    /// The payload comes over the connection.
    Tcp(SocketAddr),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shm(name) => write!(f, "shm:{name}"),
            Self::Tcp(address) => write!(f, "tcp:{address}"),
        }
    }
}

/// Permission to pull one offer. Whoever holds it can pull: keep it as secret as the KV itself.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Ticket {
    pub(crate) id: OfferId,
    pub(crate) layout: [u8; 16],
    pub(crate) epoch: u64,
    pub(crate) length: u64,
    pub(crate) checksum: u64,
    pub(crate) address: Address,
    pub(crate) mac: [u8; MAC],
}

impl Ticket {
    /// Name of the offer, as in the owner's events.
    pub const fn id(&self) -> OfferId {
        self.id
    }

    /// Payload bytes.
    pub const fn length(&self) -> u64 {
        self.length
    }

    /// XXH3-64 of description and payload.
    pub const fn checksum(&self) -> u64 {
        self.checksum
    }

    /// Where the owner listens.
    pub const fn address(&self) -> &Address {
        &self.address
    }

    /// The ticket as bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = self.unsigned();
        bytes.extend_from_slice(&self.mac);
        bytes
    }

    fn unsigned(&self) -> Vec<u8> {
        let (kind, address) = match &self.address {
            Address::Shm(name) => (1, name.clone()),
            Address::Tcp(address) => (2, address.to_string()),
        };
        let mut bytes = Vec::with_capacity(FIXED + address.len() + MAC);
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&[kind, address.len() as u8]);
        bytes.extend_from_slice(&self.id.0);
        bytes.extend_from_slice(&self.layout);
        bytes.extend_from_slice(&self.epoch.to_le_bytes());
        bytes.extend_from_slice(&self.length.to_le_bytes());
        bytes.extend_from_slice(&self.checksum.to_le_bytes());
        bytes.extend_from_slice(address.as_bytes());
        bytes
    }

    pub(crate) fn sign(mut self, auth: &Auth) -> Self {
        self.mac = auth.mac(PURPOSE, &[&self.unsigned()]);
        self
    }

    pub(crate) fn is_signed_by(&self, auth: &Auth) -> bool {
        auth.verify(PURPOSE, &[&self.unsigned()], &self.mac)
    }

    /// Reads a ticket.
    ///
    /// # Errors
    /// [`Error::Refused`]: not a ticket, of another version, cut, or with something after it.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Error> {
        let not = |what: &str| Error::Refused(format!("not a ticket: {what}"));
        let (head, rest) = bytes.split_at_checked(FIXED).ok_or_else(|| not("too short"))?;
        let mut head = Reader(head);
        if head.take::<4>() != MAGIC {
            return Err(not("no magic number"));
        }
        let version = u16::from_le_bytes(head.take());
        if version != VERSION {
            return Err(Error::Refused(format!("ticket of version {version}, this end speaks {VERSION}")));
        }
        let [kind, address_len] = head.take();
        let (id, layout) = (OfferId(head.take()), head.take());
        let (epoch, length) = (u64::from_le_bytes(head.take()), u64::from_le_bytes(head.take()));
        let checksum = u64::from_le_bytes(head.take());
        let (address, mac) = rest.split_at_checked(usize::from(address_len)).ok_or_else(|| not("too short"))?;
        let mac = mac.try_into().map_err(|_| not("wrong length"))?;
        let address = std::str::from_utf8(address).map_err(|_| not("address is not text"))?;
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
        let address = match kind {
            1 if (1..=MAX_ADDRESS).contains(&address.len()) && address.bytes().all(plain) => {
                Address::Shm(address.to_owned())
            }
            2 => {
                let parsed: SocketAddr = address.parse().map_err(|_| not("address is no ip:port"))?;
                // One text for one ticket.
                if parsed.to_string() != address {
                    return Err(not("address is not in its plain form"));
                }
                Address::Tcp(parsed)
            }
            _ => return Err(not("unknown back end or address")),
        };
        Ok(Self { id, layout, epoch, length, checksum, address, mac })
    }
}

impl fmt::Display for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.to_bytes().iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl FromStr for Ticket {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let not = || Error::Refused("not a ticket: not hex".to_owned());
        let digit = |byte: u8| match byte {
            b'0'..=b'9' => Ok(byte - b'0'),
            b'a'..=b'f' => Ok(byte - b'a' + 10),
            _ => Err(not()),
        };
        if text.len() > 2 * (FIXED + MAX_ADDRESS + MAC) || !text.len().is_multiple_of(2) {
            return Err(not());
        }
        let bytes = text.as_bytes().chunks_exact(2).map(|pair| Ok(digit(pair[0])? << 4 | digit(pair[1])?));
        Self::from_bytes(&bytes.collect::<Result<Vec<u8>, Error>>()?)
    }
}

/// Takes fields off the front of a slice whose length was checked.
pub(crate) struct Reader<'a>(pub &'a [u8]);

impl Reader<'_> {
    /// The next `N` bytes; zeroes past the end.
    pub fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut field = [0; N];
        if let Some((head, rest)) = self.0.split_at_checked(N) {
            field.copy_from_slice(head);
            self.0 = rest;
        }
        field
    }
}
