//! What the threads of one end share: offers, connections, and the way they are told to stop.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::auth::Auth;
use crate::checksum::Checksum;
use crate::config::{Config, Limits};
use crate::error::Error;
use crate::memory::Memory;
use crate::offers::{Counts, Event, Grant, Offers};
use crate::stream::Stream;
use crate::ticket::{Address, OfferId, Ticket};

/// A lock whose holder panicked is still good: every change under it is whole or not begun.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Random bytes from the system.
pub fn random<const N: usize>() -> Result<[u8; N], Error> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| Error::System {
        what: "no random numbers",
        source: std::io::Error::other(error.to_string()),
    })?;
    Ok(bytes)
}

struct State {
    offers: Offers<Memory>,
    closed: bool,
}

struct Connection {
    stream: Arc<Stream>,
    /// It has not said yet what it wants.
    asking: bool,
}

#[derive(Default)]
struct Connections {
    open: HashMap<u64, Connection>,
    next: u64,
    /// Threads that serve, those of connections that were cut included.
    threads: usize,
    closed: bool,
}

impl Connections {
    fn evict(&mut self) -> bool {
        let asking = self.open.iter().filter(|(_, one)| one.asking).map(|(id, _)| *id);
        let oldest = asking.min().and_then(|id| self.open.remove(&id));
        oldest.map(|one| one.stream.cut()).is_some()
    }
}

/// One end's common ground.
pub struct Shared {
    pub auth: Auth,
    pub limits: Limits,
    /// This life of this owner.
    pub epoch: u64,
    start: Instant,
    /// The process whose threads serve; a forked child has none.
    process: u32,
    state: Mutex<State>,
    deadline: Condvar,
    connections: Mutex<Connections>,
    idle: Condvar,
}

impl Shared {
    pub fn new(config: &Config) -> Result<Self, Error> {
        config.check()?;
        let limits = config.limits.clone();
        Ok(Self {
            auth: Auth::new(config),
            epoch: u64::from_le_bytes(random()?),
            start: Instant::now(),
            process: std::process::id(),
            state: Mutex::new(State { offers: Offers::new(limits.offers, limits.bytes), closed: false }),
            deadline: Condvar::new(),
            connections: Mutex::default(),
            idle: Condvar::new(),
            limits,
        })
    }

    fn now(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Changes the offers. Memory that became nobody's is left to the thread that keeps leases: giving gigabytes back takes a while,
    /// and the caller may be a step loop.
    fn change<R>(&self, change: impl FnOnce(&mut State) -> R) -> R {
        let mut state = lock(&self.state);
        let result = change(&mut state);
        let dead = state.offers.has_dead();
        drop(state);
        if dead {
            self.deadline.notify_one();
        }
        result
    }

    pub fn offer(&self, meta: &[u8], segments: &[&[u8]], lease: Duration, address: &Address) -> Result<Ticket, Error> {
        if lease.is_zero() || lease > self.limits.lease {
            return Err(Error::Invalid(format!(
                "a lease of {lease:?}; it must be above 0 and at most {:?}",
                self.limits.lease
            )));
        }
        if meta.len() > self.limits.meta {
            let (need, have) = (meta.len() as u64, self.limits.meta as u64);
            return Err(Error::TooLarge { what: "the description", need, have });
        }
        let length = segments.iter().map(|segment| segment.len() as u64).sum::<u64>();
        let bytes = length + meta.len() as u64;
        if self.process != std::process::id() {
            return Err(Error::Invalid(
                "this end belongs to the process that was forked; make one in this process".to_owned(),
            ));
        }
        self.change(|state| if state.closed { Err(Error::Closed) } else { state.offers.reserve(bytes) })?;
        let made = || {
            let mut checksum = Checksum::new(meta);
            let memory = Memory::gather(segments, &mut checksum)?;
            Ok((memory, checksum.value(), OfferId(random()?)))
        };
        let (memory, checksum, id) = made().inspect_err(|_| self.change(|state| state.offers.cancel(bytes)))?;
        let ends = self.now().saturating_add(u64::try_from(lease.as_nanos()).unwrap_or(u64::MAX));
        self.change(|state| {
            if state.closed {
                state.offers.cancel(bytes);
                return Err(Error::Closed);
            }
            state.offers.insert(id, memory, meta, length, checksum, ends);
            Ok(())
        })?;
        self.deadline.notify_one();
        let (layout, epoch, mac) = (self.auth.layout(), self.epoch, [0; crate::auth::MAC]);
        Ok(Ticket { id, layout, epoch, length, checksum, address: address.clone(), mac }.sign(&self.auth))
    }

    pub fn begin_pull(&self, id: OfferId) -> Option<Pull<'_>> {
        let now = self.now();
        let grant = self.change(|state| state.offers.begin_pull(id, now))?;
        Some(Pull { shared: self, grant: Some(grant), verified: false })
    }

    pub fn release(&self, id: OfferId) -> bool {
        let now = self.now();
        self.change(|state| state.offers.release(id, now))
    }

    pub fn poll(&self, events: &mut Vec<Event>) {
        let now = self.now();
        self.change(|state| {
            state.offers.expire(now);
            state.offers.drain_events(events);
        });
    }

    pub fn counts(&self) -> Counts {
        lock(&self.state).offers.counts()
    }

    pub fn is_closed(&self) -> bool {
        lock(&self.state).closed
    }

    /// Ends offers when their leases end, traffic or not, until the end is closed.
    pub fn keep_leases(&self) {
        let mut state = lock(&self.state);
        while !state.closed {
            let next = state.offers.expire(self.now());
            let dead = state.offers.take_dead();
            if !dead.is_empty() {
                drop(state);
                drop(dead);
                state = lock(&self.state);
                continue;
            }
            state = match next {
                None => self.deadline.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(at) => {
                    let left = Duration::from_nanos(at.saturating_sub(self.now()));
                    self.deadline.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    /// Takes a new connection in; None when it cannot be served. One too many costs the oldest that still asks: somebody who
    /// connects and says nothing cannot keep others out.
    pub fn admit(&self, stream: Stream) -> Option<(u64, Arc<Stream>)> {
        let mut connections = lock(&self.connections);
        if connections.closed || connections.threads >= 2 * self.limits.connections {
            return None;
        }
        if connections.open.len() >= self.limits.connections && !connections.evict() {
            return None;
        }
        let id = connections.next;
        connections.next += 1;
        connections.threads += 1;
        let stream = Arc::new(stream);
        connections.open.insert(id, Connection { stream: Arc::clone(&stream), asking: true });
        Some((id, stream))
    }

    /// Cuts the oldest connection that still asks.
    pub fn evict(&self) {
        lock(&self.connections).evict();
    }

    /// A connection has shown that it knows what it wants. False: it was cut meanwhile.
    pub fn settle(&self, id: u64) -> bool {
        lock(&self.connections).open.get_mut(&id).map(|one| one.asking = false).is_some()
    }

    /// A connection's thread ends.
    pub fn leave(&self, id: u64) {
        let mut connections = lock(&self.connections);
        connections.open.remove(&id);
        connections.threads -= 1;
        drop(connections);
        self.idle.notify_all();
    }

    /// Cuts every connection, waits for their threads, and forgets every offer.
    pub fn close(&self) {
        self.change(|state| state.closed = true);
        self.deadline.notify_all();
        let mut connections = lock(&self.connections);
        connections.closed = true;
        connections.open.values().for_each(|one| one.stream.cut());
        while connections.threads > 0 {
            connections = self.idle.wait(connections).unwrap_or_else(PoisonError::into_inner);
        }
        drop(connections);
        let dead = {
            let mut state = lock(&self.state);
            state.offers.clear();
            state.offers.take_dead()
        };
        drop(dead);
    }
}

/// A pull in progress; dropping it ends it.
pub struct Pull<'a> {
    shared: &'a Shared,
    grant: Option<Grant<Memory>>,
    verified: bool,
}

impl Pull<'_> {
    /// What it reads.
    pub fn grant(&self) -> Option<&Grant<Memory>> {
        self.grant.as_ref()
    }

    /// The puller says that it has everything.
    pub fn verified(mut self) {
        self.verified = true;
    }
}

impl Drop for Pull<'_> {
    fn drop(&mut self) {
        if let Some(grant) = self.grant.take() {
            self.shared.change(|state| state.offers.end_pull(grant, self.verified));
        }
    }
}
