//! A peer that speaks for itself, byte by byte.
#![allow(dead_code, clippy::unwrap_used, clippy::panic)]

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::Duration;

use deepinfer_kvtransfer::frame::{Greeting, Operation, Reply, Request};
use deepinfer_kvtransfer::{Address, Auth, Config, Ticket};

use super::Kind;

/// Either socket, blocking, with a timeout on reads.
pub enum Raw {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Raw {
    pub fn connect(address: &Address) -> Self {
        let raw = match address {
            Address::Tcp(to) => Self::Tcp(TcpStream::connect(to).unwrap()),
            Address::Shm(name) => {
                Self::Unix(UnixStream::connect_addr(&SocketAddr::from_abstract_name(name).unwrap()).unwrap())
            }
        };
        raw.patience(Duration::from_secs(10));
        raw
    }

    pub fn patience(&self, time: Duration) {
        match self {
            Self::Tcp(stream) => stream.set_read_timeout(Some(time)).unwrap(),
            Self::Unix(stream) => stream.set_read_timeout(Some(time)).unwrap(),
        }
    }

    pub fn cut(&self) {
        let _ = match self {
            Self::Tcp(stream) => stream.shutdown(Shutdown::Both),
            Self::Unix(stream) => stream.shutdown(Shutdown::Both),
        };
    }

    pub fn frame<const N: usize>(&mut self) -> [u8; N] {
        let mut frame = [0; N];
        self.read_exact(&mut frame).unwrap();
        frame
    }

    /// Whether the peer closes within the patience; what it still sends is dropped.
    pub fn is_closed(&mut self) -> bool {
        let mut sink = [0; 4096];
        loop {
            match self.read(&mut sink) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) => return !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut),
            }
        }
    }

    /// Greeting taken, request sent, as an honest puller does.
    pub fn ask(&mut self, ticket: &Ticket, config: &Config, operation: Operation) -> Reply {
        let greeting = Greeting::decode(&self.frame()).unwrap();
        let auth = Auth::new(config);
        let request = Request { operation, epoch: greeting.epoch, id: ticket.id(), layout: auth.layout() };
        self.write_all(&request.encode(&auth, &greeting.nonce)).unwrap();
        Reply::decode(&self.frame()).unwrap()
    }
}

impl AsFd for Raw {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(stream) => stream.as_fd(),
            Self::Unix(stream) => stream.as_fd(),
        }
    }
}

impl Read for Raw {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.read(buffer),
            Self::Unix(stream) => stream.read(buffer),
        }
    }
}

impl Write for Raw {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.write(bytes),
            Self::Unix(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// An owner that is none: serves every connection with `serve` for as long as the test runs; gives where.
pub fn impostor(kind: Kind, serve: impl Fn(Raw) + Send + Sync + 'static) -> Address {
    static NEXT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    match kind {
        Kind::Tcp => {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let address = Address::Tcp(listener.local_addr().unwrap());
            std::thread::spawn(move || listener.incoming().flatten().for_each(|stream| serve(Raw::Tcp(stream))));
            address
        }
        Kind::Shm => {
            let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let name = format!("deepinfer-kv.test.{}.{number}", std::process::id());
            let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
            std::thread::spawn(move || listener.incoming().flatten().for_each(|stream| serve(Raw::Unix(stream))));
            Address::Shm(name)
        }
    }
}

/// The ticket with another address; of ends without a token.
pub fn redirect(ticket: &Ticket, to: &Address) -> Ticket {
    let mut bytes = ticket.to_bytes();
    let (kind, text) = match to {
        Address::Shm(name) => (1, name.clone()),
        Address::Tcp(address) => (2, address.to_string()),
    };
    bytes.truncate(64);
    (bytes[6], bytes[7]) = (kind, text.len() as u8);
    bytes.extend_from_slice(text.as_bytes());
    bytes.extend_from_slice(&[0; 32]);
    Ticket::from_bytes(&bytes).unwrap()
}

/// Epoch in the ticket's bytes, as an impostor that saw the ticket knows it.
pub fn epoch(ticket: &Ticket) -> u64 {
    u64::from_le_bytes(ticket.to_bytes()[40..48].try_into().unwrap())
}
