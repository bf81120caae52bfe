//! One connection to a server, after its hello.

use std::io::{self, IoSlice, Read, Write};
use std::time::Duration;

use crate::error::Error;
use crate::lost::Lost;
use crate::net::{Address, Connection, Socket, Timed};
use crate::tls::Connector;
use crate::wire::{Greeting, HEADER, Header, Hello, MAX_BODY, Op, Proof, Role, Status, Welcome};

/// What came is no answer.
pub(super) fn nonsense(why: impl std::fmt::Display) -> Lost {
    Lost::nonsense_of("the KV store", why)
}

pub(super) struct Link {
    connection: Connection,
    number: u32,
    body: Vec<u8>,
}

impl Link {
    pub fn open(
        address: &Address,
        connector: Option<&Connector>,
        hello: &Hello,
        proofs: &[(Role, Option<Proof>)],
        time: Duration,
    ) -> Result<(Self, Welcome), Lost> {
        let timed = Timed::new(Socket::connect(address, time)?);
        let mut connection = match connector {
            Some(connector) => connector.connect(timed).map_err(Lost::Refused)?,
            None => Connection::Plain(timed),
        };
        connection.allow(time);
        let mut greeting = [0; Greeting::LEN];
        connection.read_exact(&mut greeting).map_err(|error| match error.kind() {
            // It has no place for us, or takes what we say for something else.
            io::ErrorKind::UnexpectedEof => Lost::Gone(Error::Unavailable(
                "it closed the connection unheard: it has all the connections that it allows, or wants TLS".to_owned(),
            )),
            _ => error.into(),
        })?;
        let greeting = Greeting::decode(&greeting).map_err(|error| Lost::Refused(error.into()))?;
        connection.write_all(&hello.encode(&greeting.nonce, proofs))?;
        connection.flush()?;
        let mut welcome = [0; Welcome::LEN];
        connection.read_exact(&mut welcome)?;
        let welcome = Welcome::decode(&welcome).map_err(nonsense)?;
        if !welcome.all {
            let missing: Vec<&str> =
                proofs.iter().filter(|(role, _)| !welcome.roles.has(*role)).map(|(role, _)| role.name()).collect();
            return Err(Lost::Refused(Error::Invalid(format!(
                "the KV store at {address} does not accept the token of role {}",
                missing.join(", ")
            ))));
        }
        Ok((Self { connection, number: 0, body: Vec::new() }, welcome))
    }

    pub fn allow(&mut self, time: Duration) {
        self.connection.allow(time);
    }

    /// Sends a request whose answer is read next.
    pub fn ask(&mut self, op: Op, body: &[u8]) -> Result<(), Lost> {
        self.number = self.number.wrapping_add(1);
        self.say(op, &mut [IoSlice::new(body)])
    }

    /// Sends a frame whose body comes in pieces.
    pub fn say(&mut self, op: Op, pieces: &mut [IoSlice<'_>]) -> Result<(), Lost> {
        let len = pieces.iter().map(|piece| piece.len()).sum::<usize>() as u32;
        let head = Header { op, status: Status::Done, number: self.number, len }.encode();
        let mut all = [IoSlice::new(&head), IoSlice::new(&[]), IoSlice::new(&[])];
        for (place, piece) in all[1..].iter_mut().zip(pieces.iter()) {
            *place = *piece;
        }
        Ok(self.connection.write_pieces(&mut all[..=pieces.len()])?)
    }

    /// The body of the answer to the newest request.
    pub fn answer(&mut self) -> Result<&[u8], Lost> {
        let header = Header::decode(&self.array::<HEADER>()?).map_err(nonsense)?;
        if header.op != Op::Answer || header.number != self.number {
            return Err(nonsense("an answer to something else"));
        }
        if header.len as usize > MAX_BODY {
            return Err(nonsense("an answer that is too long"));
        }
        self.body.resize(header.len as usize, 0);
        self.connection.read_exact(&mut self.body)?;
        let text = || String::from_utf8_lossy(&self.body).into_owned();
        match header.status {
            Status::Done => Ok(&self.body),
            Status::Invalid | Status::Forbidden => Err(Lost::Told(Error::Invalid(text()))),
            Status::Busy => Err(Lost::Told(Error::Full(text()))),
            Status::Leaving | Status::Failed => Err(Lost::Told(Error::Unavailable(text()))),
        }
    }

    pub fn read(&mut self, into: &mut [u8]) -> Result<(), Lost> {
        Ok(self.connection.read_exact(into)?)
    }

    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], Lost> {
        let mut array = [0; N];
        self.read(&mut array)?;
        Ok(array)
    }
}
