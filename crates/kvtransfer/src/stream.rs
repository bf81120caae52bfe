//! A connection of either kind. Every wait has an end: none longer than `stall` without a byte, none past the deadline.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    Shutdown,
};

use crate::error::Broken;

/// Limits on waiting.
#[derive(Clone, Copy)]
pub struct Patience {
    /// Longest silence.
    pub stall: Duration,
    /// End of it all.
    pub until: Instant,
    /// What `until` was made from, for messages.
    pub whole: Duration,
}

impl Patience {
    /// From now.
    pub fn new(stall: Duration, whole: Duration) -> Self {
        Self { stall, until: Instant::now() + whole, whole }
    }
}

/// A connected socket that never blocks by itself.
pub enum Stream {
    /// Between machines.
    Tcp(TcpStream),
    /// Within one.
    Unix(UnixStream),
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(stream) => stream.as_fd(),
            Self::Unix(stream) => stream.as_fd(),
        }
    }
}

impl Stream {
    /// Takes a connected socket.
    pub fn tcp(stream: TcpStream) -> std::io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Self::Tcp(stream))
    }

    /// Takes a connected socket.
    pub fn unix(stream: UnixStream) -> std::io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self::Unix(stream))
    }

    /// Whether payloads pass as descriptors.
    pub const fn passes_memory(&self) -> bool {
        matches!(self, Self::Unix(_))
    }

    /// Ends the connection for whoever waits on it.
    pub fn cut(&self) {
        // Fails only if it is not connected any more.
        let _ = rustix::net::shutdown(self, Shutdown::Both);
    }

    /// Repeats `attempt` until it is done with something, waiting in between.
    fn retry<T>(
        &self,
        patience: &Patience,
        flags: PollFlags,
        mut attempt: impl FnMut() -> Result<T, Errno>,
    ) -> Result<T, Broken> {
        let quiet = Instant::now() + patience.stall;
        loop {
            // Also when bytes keep coming: a peer must not hold the connection by feeding it.
            if Instant::now() >= patience.until {
                return Err(Broken::Slow(patience.whole));
            }
            match attempt() {
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => {}
                other => return other.map_err(Broken::from),
            }
            let end = quiet.min(patience.until);
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Broken::Slow(patience.stall.min(patience.whole)));
            }
            let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
            match rustix::event::poll(&mut [PollFd::new(self, flags)], Some(&timeout)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Fills the buffer.
    pub fn read_exact(&self, buffer: &mut [u8], patience: &Patience) -> Result<(), Broken> {
        let mut at = 0;
        while at < buffer.len() {
            let read = self.retry(patience, PollFlags::IN, || {
                rustix::net::recv(self, &mut buffer[at..], RecvFlags::empty()).map(|(read, _)| read)
            })?;
            if read == 0 {
                return Err(Broken::Ended);
            }
            at += read;
        }
        Ok(())
    }

    /// Reads a frame.
    pub fn read_frame<const N: usize>(&self, patience: &Patience) -> Result<[u8; N], Broken> {
        let mut frame = [0; N];
        self.read_exact(&mut frame, patience)?;
        Ok(frame)
    }

    /// Writes all bytes.
    pub fn write_all(&self, mut bytes: &[u8], patience: &Patience) -> Result<(), Broken> {
        while !bytes.is_empty() {
            let sent = self.retry(patience, PollFlags::OUT, || rustix::net::send(self, bytes, SendFlags::NOSIGNAL))?;
            bytes = &bytes[sent..];
        }
        Ok(())
    }

    /// Writes a file's first bytes without taking them through this process.
    pub fn write_file(&self, file: impl AsFd, length: u64, patience: &Patience) -> Result<(), Broken> {
        let mut at = 0;
        while at < length {
            // Short enough to look at the clock often.
            let most = (length - at).min(4 << 20) as usize;
            let sent =
                self.retry(patience, PollFlags::OUT, || rustix::fs::sendfile(self, file.as_fd(), Some(&mut at), most))?;
            if sent == 0 {
                return Err(Broken::Ended);
            }
        }
        Ok(())
    }

    /// Passes a descriptor, with one byte to carry it.
    pub fn send_fd(&self, fd: &OwnedFd, patience: &Patience) -> Result<(), Broken> {
        let fds = [fd.as_fd()];
        self.retry(patience, PollFlags::OUT, || {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            control.push(SendAncillaryMessage::ScmRights(&fds));
            rustix::net::sendmsg(self, &[IoSlice::new(b"M")], &mut control, SendFlags::NOSIGNAL)
        })?;
        Ok(())
    }

    /// Receives a descriptor. None: the byte came without exactly one.
    pub fn receive_fd(&self, patience: &Patience) -> Result<Option<OwnedFd>, Broken> {
        self.retry(patience, PollFlags::IN, || {
            let mut byte = [0];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let got =
                rustix::net::recvmsg(self, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
            if got.bytes == 0 {
                return Err(Errno::CONNRESET);
            }
            // What is not taken is closed when the buffer goes.
            let fds = control.drain().filter_map(|message| match message {
                RecvAncillaryMessage::ScmRights(fds) => Some(fds),
                _ => None,
            });
            Ok(fds.flatten().next())
        })
    }
}
