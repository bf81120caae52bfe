//! Connections whose waits all end: TCP, Unix sockets, and TLS over TCP.
//!
//! Owns: sockets of either kind, deadlines. Never touches: what is said over them.

use std::io::{self, IoSlice, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{Duration, Instant};

use crate::error::Error;

/// Where a server listens: `host:port`, or `unix:/path`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Address {
    /// Between machines.
    Tcp(String),
    /// Within one.
    Unix(PathBuf),
}

impl FromStr for Address {
    type Err = Error;

    /// # Errors
    /// [`Error::Invalid`] for what is neither.
    fn from_str(text: &str) -> Result<Self, Error> {
        if let Some(path) = text.strip_prefix("unix:") {
            if path.starts_with('/') {
                return Ok(Self::Unix(path.into()));
            }
        } else if let Some((host, port)) = text.rsplit_once(':')
            && !host.is_empty()
            && port.parse::<u16>().is_ok()
        {
            return Ok(Self::Tcp(text.to_owned()));
        }
        Err(Error::Invalid(format!("{text:?} is no address: give host:port or unix:/path")))
    }
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tcp(name) => f.write_str(name),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl Address {
    /// Its socket addresses; none for a Unix socket.
    ///
    /// # Errors
    /// Of the resolver.
    pub fn resolve(&self) -> io::Result<Vec<SocketAddr>> {
        match self {
            Self::Tcp(name) => Ok(name.to_socket_addrs()?.collect()),
            Self::Unix(_) => Ok(Vec::new()),
        }
    }
}

/// A socket without its protection.
pub enum Socket {
    /// TCP.
    Tcp(TcpStream),
    /// Unix.
    Unix(UnixStream),
}

impl Socket {
    /// Connects within `patience`.
    ///
    /// # Errors
    /// Of the socket, or a time-out.
    pub fn connect(address: &Address, patience: Duration) -> io::Result<Self> {
        match address {
            Address::Unix(path) => unix(path, patience).map(Self::Unix),
            Address::Tcp(_) => {
                let until = Instant::now() + patience;
                let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
                for one in address.resolve()? {
                    let left = until.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Err(io::ErrorKind::TimedOut.into());
                    }
                    match TcpStream::connect_timeout(&one, left) {
                        Ok(stream) => return Self::tcp(stream),
                        Err(error) => last = error,
                    }
                }
                Err(last)
            }
        }
    }

    /// A connected TCP socket, without delay.
    ///
    /// # Errors
    /// Of the socket.
    pub fn tcp(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        Ok(Self::Tcp(stream))
    }

    /// Another handle on it, with which it can be shut down from another thread.
    ///
    /// # Errors
    /// Of the system: no descriptors left.
    pub fn handle(&self) -> io::Result<Self> {
        Ok(match self {
            Self::Tcp(stream) => Self::Tcp(stream.try_clone()?),
            Self::Unix(stream) => Self::Unix(stream.try_clone()?),
        })
    }

    /// Ends both directions; whoever waits for it wakes.
    pub fn shut_down(&self) {
        let _ = match self {
            Self::Tcp(stream) => stream.shutdown(std::net::Shutdown::Both),
            Self::Unix(stream) => stream.shutdown(std::net::Shutdown::Both),
        };
    }

    fn set_timeouts(&self, wait: Duration) -> io::Result<()> {
        // Zero means for ever.
        let wait = Some(wait.max(Duration::from_millis(1)));
        match self {
            Self::Tcp(stream) => {
                stream.set_read_timeout(wait)?;
                stream.set_write_timeout(wait)
            }
            Self::Unix(stream) => {
                stream.set_read_timeout(wait)?;
                stream.set_write_timeout(wait)
            }
        }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(stream) => stream.as_fd(),
            Self::Unix(stream) => stream.as_fd(),
        }
    }
}

impl Read for Socket {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.read(into),
            Self::Unix(stream) => stream.read(into),
        }
    }
}

impl Write for Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.write(bytes),
            Self::Unix(stream) => stream.write(bytes),
        }
    }

    fn write_vectored(&mut self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.write_vectored(pieces),
            Self::Unix(stream) => stream.write_vectored(pieces),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Whoever listens and accepts nobody any more makes others wait once its queue is full: the time to send bounds that, too.
fn unix(path: &Path, patience: Duration) -> io::Result<UnixStream> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with, sockopt};
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    let patience = patience.max(Duration::from_millis(1));
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(patience))?;
    connect(&socket, &SocketAddrUnix::new(path)?).map_err(|error| timed_out(error.into()))?;
    Ok(UnixStream::from(socket))
}

/// A socket under a deadline: each read and write gets what is left of it.
pub struct Timed {
    socket: Socket,
    until: Instant,
    set: Option<Duration>,
}

impl Timed {
    /// With no time at all until [`Timed::allow`].
    pub fn new(socket: Socket) -> Self {
        Self { socket, until: Instant::now(), set: None }
    }

    /// What follows has to be done within `time` from now.
    pub fn allow(&mut self, time: Duration) {
        self.until = Instant::now() + time;
    }

    /// The socket, with what time is left set on it: for calls that streams do not have.
    ///
    /// # Errors
    /// Of the socket, or a time-out.
    pub fn armed(&mut self) -> io::Result<BorrowedFd<'_>> {
        self.arm()?;
        Ok(self.socket.as_fd())
    }

    fn arm(&mut self) -> io::Result<()> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        // A system call each time would cost more than it saves: what was set lately and is not far too long stays.
        if self.set.is_none_or(|wait| wait > left + left / 4 || wait < left / 2) {
            self.socket.set_timeouts(left)?;
            self.set = Some(left);
        }
        Ok(())
    }
}

/// What a socket says when its time is over.
pub(crate) fn timed_out(error: io::Error) -> io::Error {
    if error.kind() == io::ErrorKind::WouldBlock { io::ErrorKind::TimedOut.into() } else { error }
}

impl Read for Timed {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.arm()?;
        self.socket.read(into).map_err(timed_out)
    }
}

impl Write for Timed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.arm()?;
        self.socket.write(bytes).map_err(timed_out)
    }

    fn write_vectored(&mut self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        self.arm()?;
        self.socket.write_vectored(pieces).map_err(timed_out)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A connection, protected or not.
pub enum Connection {
    /// As it is.
    Plain(Timed),
    /// TLS, this end the client.
    Client(Box<rustls::StreamOwned<rustls::ClientConnection, Timed>>),
    /// TLS, this end the server.
    Server(Box<rustls::StreamOwned<rustls::ServerConnection, Timed>>),
}

impl Connection {
    /// See [`Timed::allow`].
    pub fn allow(&mut self, time: Duration) {
        match self {
            Self::Plain(timed) => timed.allow(time),
            Self::Client(stream) => stream.sock.allow(time),
            Self::Server(stream) => stream.sock.allow(time),
        }
    }

    /// Writes all pieces, as few system calls as can be.
    ///
    /// # Errors
    /// Of the socket, or a time-out.
    pub fn write_pieces(&mut self, pieces: &mut [IoSlice<'_>]) -> io::Result<()> {
        write_pieces(self, pieces)?;
        self.flush()
    }
}

/// Writes all pieces, as few system calls as can be.
pub(crate) fn write_pieces(to: &mut impl Write, pieces: &mut [IoSlice<'_>]) -> io::Result<()> {
    let mut pieces = pieces;
    while !pieces.is_empty() {
        match to.write_vectored(pieces) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => IoSlice::advance_slices(&mut pieces, written),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

impl Read for Connection {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(timed) => timed.read(into),
            Self::Client(stream) => stream.read(into),
            Self::Server(stream) => stream.read(into),
        }
    }
}

impl Write for Connection {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(timed) => timed.write(bytes),
            Self::Client(stream) => stream.write(bytes),
            Self::Server(stream) => stream.write(bytes),
        }
    }

    fn write_vectored(&mut self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Self::Plain(timed) => timed.write_vectored(pieces),
            Self::Client(stream) => stream.write_vectored(pieces),
            Self::Server(stream) => stream.write_vectored(pieces),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Plain(timed) => timed.flush(),
            Self::Client(stream) => stream.flush(),
            Self::Server(stream) => stream.flush(),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn addresses_are_read_as_they_are_written() {
        for text in ["127.0.0.1:7000", "[::1]:80", "store-3.example:443", "unix:/run/store.sock"] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
        for text in ["", "host", ":80", "host:", "host:70000", "unix:", "unix:relative"] {
            assert!(text.parse::<Address>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_wait_ends_whoever_drips() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut timed = Timed::new(Socket::Unix(ours));
        assert_eq!(timed.read(&mut [0; 4]).unwrap_err().kind(), io::ErrorKind::TimedOut);
        timed.allow(Duration::from_millis(120));
        let began = Instant::now();
        let drip = std::thread::spawn(move || {
            while theirs.write_all(b"x").is_ok() {
                std::thread::sleep(Duration::from_millis(15));
            }
        });
        let mut all = [0; 1000];
        assert_eq!(timed.read_exact(&mut all).unwrap_err().kind(), io::ErrorKind::TimedOut);
        let took = began.elapsed();
        assert!(took >= Duration::from_millis(100) && took < Duration::from_secs(5), "{took:?}");
        drop(timed);
        drip.join().unwrap();
    }
}
