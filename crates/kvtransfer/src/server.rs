//! The owner's threads: one that accepts, one that ends leases, one for each connection.

use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::{Broken, Error};
use crate::frame::{Bad, Greeting, Operation, Outcome, Reply, Request, Status};
use crate::memory::Memory;
use crate::shared::{Shared, random};
use crate::stream::{Patience, Stream};

/// A bound socket of either kind.
pub enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(listener) => listener.as_fd(),
            Self::Unix(listener) => listener.as_fd(),
        }
    }
}

impl Listener {
    fn accept(&self) -> std::io::Result<Stream> {
        match self {
            Self::Tcp(listener) => Stream::tcp(listener.accept()?.0),
            Self::Unix(listener) => Stream::unix(listener.accept()?.0),
        }
    }
}

/// Whether the process at the other end of a Unix socket is one that could read our memory anyway.
pub fn is_own_user(stream: &impl AsFd) -> bool {
    rustix::net::sockopt::socket_peercred(stream)
        .is_ok_and(|peer| peer.uid.is_root() || peer.uid == rustix::process::geteuid())
}

/// Running threads; stopped when dropped.
pub struct Server {
    shared: Arc<Shared>,
    listener: Arc<Listener>,
    threads: Vec<JoinHandle<()>>,
    owner: u32,
}

impl Server {
    pub fn start(shared: Arc<Shared>, listener: Listener) -> Result<Self, Error> {
        let listener = Arc::new(listener);
        let mut server = Self { shared, listener, threads: Vec::new(), owner: std::process::id() };
        let shared = Arc::clone(&server.shared);
        server
            .threads
            .push(spawn("kv-leases", move || shared.keep_leases()).map_err(Error::io("no thread for leases"))?);
        let (shared, listener) = (Arc::clone(&server.shared), Arc::clone(&server.listener));
        let accept = spawn("kv-accept", move || accept(&shared, &listener));
        server.threads.push(accept.map_err(Error::io("no thread for connections"))?);
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // After a fork the child has neither the threads nor a say over the sockets.
        if self.owner != std::process::id() {
            std::mem::take(&mut self.threads).into_iter().for_each(std::mem::forget);
            return;
        }
        // Wakes the thread that accepts.
        let _ = rustix::net::shutdown(&*self.listener, rustix::net::Shutdown::Both);
        self.shared.close();
        for thread in self.threads.drain(..) {
            // It ended, or panicked and ended.
            let _ = thread.join();
        }
    }
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> std::io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name.to_owned()).stack_size(256 << 10).spawn(move || {
        crate::signals::block();
        body();
    })
}

fn accept(shared: &Arc<Shared>, listener: &Listener) {
    while !shared.is_closed() {
        let stream = match listener.accept() {
            Ok(stream) => stream,
            Err(_) if shared.is_closed() => return,
            Err(error) => {
                // Somebody who says nothing must not keep the process's last descriptors.
                if is_out_of_descriptors(&error) {
                    shared.evict();
                }
                // A connection that died before it was taken, or no descriptors left: neither may spin.
                std::thread::sleep(Duration::from_millis(5));
                continue;
            }
        };
        if matches!(stream, Stream::Unix(_)) && !is_own_user(&stream) {
            continue;
        }
        let Some((id, stream)) = shared.admit(stream) else { continue };
        let here = Arc::clone(shared);
        let served = spawn("kv-serve", move || {
            let leaving = Leaving(&here, id);
            // A peer that goes away is its own affair.
            let _ = serve(&here, &stream, id);
            drop(leaving);
        });
        if served.is_err() {
            shared.leave(id);
        }
    }
}

/// Ends a connection, panic or not.
struct Leaving<'a>(&'a Shared, u64);

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        self.0.leave(self.1);
    }
}

fn serve(shared: &Shared, stream: &Stream, connection: u64) -> Result<(), Broken> {
    let limits = &shared.limits;
    let shake = Patience::new(limits.handshake, limits.handshake);
    let nonce = random().map_err(|_| Broken::Ended)?;
    stream.write_all(&Greeting { epoch: shared.epoch, nonce }.encode(), &shake)?;
    let answer = |status| stream.write_all(&Reply::empty(status).encode(), &shake);
    let frame = stream.read_frame(&shake)?;
    let request = match Request::decode(&frame, &shared.auth, &nonce) {
        Ok((request, true)) => request,
        Ok((_, false)) => return answer(Status::Token),
        // Not one of us: no word.
        Err(Bad::Magic) => return Ok(()),
        Err(Bad::Version(_) | Bad::Field) => return answer(Status::Frame),
    };
    if request.layout != shared.auth.layout() {
        return answer(Status::Layout);
    }
    if request.epoch != shared.epoch {
        return answer(Status::Gone);
    }
    match request.operation {
        Operation::Release => answer(if shared.release(request.id) { Status::Granted } else { Status::Gone }),
        Operation::Pull => match shared.begin_pull(request.id) {
            None => answer(Status::Gone),
            Some(pull) => {
                if !shared.settle(connection) {
                    return Ok(());
                }
                let patience = Patience::new(limits.stall, limits.pull);
                if let Some(grant) = pull.grant() {
                    // Before the grant is given: nobody is told half of it.
                    let reader = stream.passes_memory().then(|| reader(shared, &grant.payload)).transpose()?;
                    let (meta, length, checksum) = (grant.meta.len() as u64, grant.length, grant.checksum);
                    let reply = Reply { status: Status::Granted, meta, length, checksum };
                    stream.write_all(&reply.encode(), &patience)?;
                    stream.write_all(&grant.meta, &patience)?;
                    match reader {
                        Some(reader) => stream.send_fd(&reader, &patience)?,
                        None => stream.write_file(&*grant.payload, length, &patience)?,
                    }
                }
                // The puller is silent while it copies.
                let outcome = stream.read_frame(&Patience { stall: limits.pull, ..patience })?;
                if Outcome::decode(&outcome) == Ok(Outcome::Verified) {
                    pull.verified();
                }
                Ok(())
            }
        },
    }
}

fn is_out_of_descriptors(error: &std::io::Error) -> bool {
    [libc::EMFILE, libc::ENFILE].map(Some).contains(&error.raw_os_error())
}

/// A descriptor for the puller. The connection that asks may have taken the last one: silent connections make room for another, once
/// their threads have run.
fn reader(shared: &Shared, payload: &Memory) -> Result<OwnedFd, Broken> {
    let until = Instant::now() + shared.limits.stall;
    loop {
        match payload.reader() {
            Ok(reader) => return Ok(reader),
            Err(Error::System { source, .. }) if is_out_of_descriptors(&source) && Instant::now() < until => {
                shared.evict();
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(_) => return Err(Broken::Ended),
        }
    }
}
