//! The puller: asks an owner for the bytes of a ticket, or to let go of them.

use std::fs::File;
use std::io::Read;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::fs::SealFlags;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::checksum::Checksum;
use crate::error::{Broken, Error};
use crate::frame::{Bad, Greeting, Operation, Outcome, Reply, Request, Status};
use crate::memory::CHUNK;
use crate::server::is_own_user;
use crate::shared::Shared;
use crate::stream::{Patience, Stream};
use crate::ticket::{Address, Ticket, VERSION};

/// Times a request is made again when the owner closes before it answers: it had too many connections.
const ATTEMPTS: u32 = 3;

/// Where the bytes of a pull go.
pub enum Target<'a> {
    /// Into memory that is there, in order; its length must be the ticket's. After an error its contents mean nothing.
    Buffers(&'a mut [&'a mut [u8]]),
    /// Behind what the vector holds. After an error it is as before.
    Fresh(&'a mut Vec<u8>),
}

impl Target<'_> {
    /// Checks before connecting that so many bytes are welcome.
    fn check(&self, length: u64, most: u64) -> Result<(), Error> {
        let have = match self {
            Self::Buffers(buffers) => buffers.iter().map(|buffer| buffer.len() as u64).sum(),
            Self::Fresh(_) => most,
        };
        if length > have.min(most) {
            return Err(Error::TooLarge { what: "the payload", need: length, have: have.min(most) });
        }
        if matches!(self, Self::Buffers(_)) && length != have {
            return Err(Error::Refused(format!(
                "the payload is {length} bytes, the buffers hold {have}; they must be equal"
            )));
        }
        Ok(())
    }

    /// Has `read` fill `length` bytes, a chunk at a time.
    fn fill(&mut self, length: u64, mut read: impl FnMut(&mut [u8]) -> Result<(), Error>) -> Result<(), Error> {
        match self {
            Self::Buffers(buffers) => buffers.iter_mut().flat_map(|buffer| buffer.chunks_mut(CHUNK)).try_for_each(read),
            Self::Fresh(bytes) => {
                let start = bytes.len();
                let too_large = |_| Error::TooLarge { what: "the payload", need: length, have: 0 };
                let length = usize::try_from(length).unwrap_or(usize::MAX);
                bytes.try_reserve_exact(length).map_err(too_large)?;
                while bytes.len() < start + length {
                    let at = bytes.len();
                    bytes.resize(at + CHUNK.min(start + length - at), 0);
                    read(&mut bytes[at..]).inspect_err(|_| bytes.truncate(start))?;
                }
                Ok(())
            }
        }
    }

    fn forget(&mut self, length: u64) {
        if let Self::Fresh(bytes) = self {
            bytes.truncate(bytes.len() - length as usize);
        }
    }
}

/// A granted request.
struct Granted {
    stream: Stream,
    reply: Reply,
}

impl Shared {
    /// Pulls the bytes of a ticket; gives the description.
    pub fn pull(&self, ticket: &Ticket, mut into: Target<'_>) -> Result<Vec<u8>, Error> {
        into.check(ticket.length, self.limits.pull_bytes)?;
        let Granted { stream, reply } = self.ask(ticket, Operation::Pull)?;
        let patience = Patience::new(self.limits.stall, self.limits.pull);
        let at = |broken: Broken| broken.at(&ticket.address);
        if reply.length != ticket.length || reply.checksum != ticket.checksum {
            return Err(Error::Corrupt("length or checksum of the offer are not the ticket's"));
        }
        if reply.meta > self.limits.meta as u64 {
            return Err(Error::TooLarge { what: "the description", need: reply.meta, have: self.limits.meta as u64 });
        }
        let mut meta = vec![0; reply.meta as usize];
        stream.read_exact(&mut meta, &patience).map_err(at)?;
        let mut checksum = Checksum::new(&meta);
        if stream.passes_memory() {
            let memory =
                stream.receive_fd(&patience).map_err(at)?.ok_or(Error::Corrupt("no memory came with the offer"))?;
            // Sealed memory has all its bytes here: reading it cannot wait for anybody.
            if !rustix::fs::fcntl_get_seals(&memory)
                .is_ok_and(|seals| seals.contains(SealFlags::WRITE | SealFlags::GROW))
            {
                return Err(Error::Corrupt("what came with the offer is not sealed memory"));
            }
            let mut memory = File::from(memory);
            into.fill(reply.length, |chunk| {
                if Instant::now() >= patience.until {
                    return Err(at(Broken::Slow(patience.whole)));
                }
                memory
                    .read_exact(chunk)
                    .map_err(|_| Error::Gone("its memory was taken back in the middle of the pull"))?;
                checksum.update(chunk);
                Ok(())
            })?;
        } else {
            into.fill(reply.length, |chunk| {
                stream.read_exact(chunk, &patience).map_err(at)?;
                checksum.update(chunk);
                Ok(())
            })?;
        }
        let verified = checksum.value() == ticket.checksum;
        let outcome = if verified { Outcome::Verified } else { Outcome::Corrupt };
        // The bytes are here, whatever the owner hears of it.
        let _ = stream.write_all(&outcome.encode(), &patience);
        if verified {
            return Ok(meta);
        }
        into.forget(reply.length);
        Err(Error::Corrupt("the checksum is another one"))
    }

    /// Ends the offer of a ticket; false if it had ended.
    pub fn release_ticket(&self, ticket: &Ticket, own: &Address) -> Result<bool, Error> {
        self.check_ticket(ticket)?;
        if ticket.address == *own && ticket.epoch == self.epoch {
            return Ok(self.release(ticket.id));
        }
        match self.ask(ticket, Operation::Release) {
            Ok(_) => Ok(true),
            Err(Error::Gone(_)) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn check_ticket(&self, ticket: &Ticket) -> Result<(), Error> {
        if self.is_closed() {
            return Err(Error::Closed);
        }
        if !ticket.is_signed_by(&self.auth) {
            return Err(Error::Refused("the ticket was not signed with this end's token".to_owned()));
        }
        if ticket.layout != self.auth.layout() {
            return Err(Error::Refused("the ticket is for another layout".to_owned()));
        }
        Ok(())
    }

    fn ask(&self, ticket: &Ticket, operation: Operation) -> Result<Granted, Error> {
        self.check_ticket(ticket)?;
        for attempt in 1.. {
            match self.ask_once(ticket, operation)? {
                Ok(granted) => return Ok(granted),
                Err(Broken::Ended) if attempt < ATTEMPTS => std::thread::sleep(Duration::from_millis(20) * attempt),
                Err(broken) => return Err(broken.at(&ticket.address)),
            }
        }
        Err(Broken::Ended.at(&ticket.address))
    }

    /// One connection, up to the reply. The inner error is of the connection.
    fn ask_once(&self, ticket: &Ticket, operation: Operation) -> Result<Result<Granted, Broken>, Error> {
        let stream = match self.connect(&ticket.address)? {
            Ok(stream) => stream,
            Err(broken) => return Ok(Err(broken)),
        };
        let shake = Patience::new(self.limits.handshake, self.limits.handshake);
        let bad = |bad: Bad| {
            Error::Refused(match bad {
                Bad::Magic => "what listens there is no owner of offers".to_owned(),
                Bad::Version(other) => format!("the owner speaks version {other}, this end {VERSION}"),
                Bad::Field => "the owner answers in a way this version does not know".to_owned(),
            })
        };
        let greeting = match stream.read_frame(&shake) {
            Ok(frame) => Greeting::decode(&frame).map_err(bad)?,
            Err(broken) => return Ok(Err(broken)),
        };
        if greeting.epoch != ticket.epoch {
            return Err(Error::Gone("its owner has restarted"));
        }
        let request = Request { operation, epoch: ticket.epoch, id: ticket.id, layout: self.auth.layout() };
        let asked = stream.write_all(&request.encode(&self.auth, &greeting.nonce), &shake);
        let reply = match asked.and_then(|()| stream.read_frame(&shake)) {
            Ok(frame) => Reply::decode(&frame).map_err(bad)?,
            Err(broken) => return Ok(Err(broken)),
        };
        match reply.status {
            Status::Granted => Ok(Ok(Granted { stream, reply })),
            Status::Gone => Err(Error::Gone("released, or its lease is over")),
            Status::Layout => Err(Error::Refused("the owner has another layout".to_owned())),
            Status::Token => Err(Error::Refused("the owner has another token".to_owned())),
            Status::Frame => Err(Error::Refused("the owner does not know this request".to_owned())),
        }
    }

    fn connect(&self, address: &Address) -> Result<Result<Stream, Broken>, Error> {
        let unreachable =
            |error: std::io::Error| Error::Unreachable { address: address.to_string(), why: error.to_string() };
        match address {
            Address::Tcp(to) => {
                let stream = TcpStream::connect_timeout(to, self.limits.connect).map_err(unreachable)?;
                Ok(Stream::tcp(stream).map_err(Broken::System))
            }
            Address::Shm(name) => self.connect_here(name, address),
        }
    }

    fn connect_here(&self, name: &str, address: &Address) -> Result<Result<Stream, Broken>, Error> {
        let unreachable = |errno: Errno| Error::Unreachable { address: address.to_string(), why: errno.to_string() };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
            .map_err(Error::system("no socket"))?;
        let to = SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(unreachable)?;
        let until = Instant::now() + self.limits.connect;
        loop {
            match rustix::net::connect(&socket, &to) {
                Ok(()) => break,
                Err(Errno::INTR) => {}
                // The name is the owner's alone, and nobody answers to it.
                Err(Errno::CONNREFUSED) => {
                    return Err(Error::Gone(
                        "its owner has ended, or runs in another network namespace of this machine",
                    ));
                }
                // The owner's queue of connections is full.
                Err(Errno::AGAIN) if Instant::now() < until => std::thread::sleep(Duration::from_millis(2)),
                Err(errno) => return Err(unreachable(errno)),
            }
        }
        if !is_own_user(&socket) {
            return Err(Error::Refused("the owner's name is in the hands of another user".to_owned()));
        }
        Ok(Stream::unix(UnixStream::from(socket)).map_err(Broken::System))
    }
}
