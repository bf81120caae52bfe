//! Who may be connected, and how much memory all of them together may use for answers.

use std::collections::HashMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::net::Socket;

struct Guest {
    handle: Socket,
    known: bool,
    since: Instant,
}

#[derive(Default)]
struct Guests {
    next: u64,
    here: HashMap<u64, Guest>,
    closed: bool,
}

/// The connections of a server: a bounded number, of which those that have not proved who they are make room for others.
pub struct Gate {
    most: usize,
    most_unknown: usize,
    guests: Mutex<Guests>,
    left: Condvar,
}

impl Gate {
    pub fn new(most: usize, most_unknown: usize) -> Self {
        Self { most, most_unknown, guests: Mutex::default(), left: Condvar::new() }
    }

    fn guests(&self) -> MutexGuard<'_, Guests> {
        self.guests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets a connection in under a number. Above the bound of unknown ones the oldest of them goes; `None`: all places are taken.
    pub fn enter(&self, handle: Socket) -> Option<u64> {
        let mut guests = self.guests();
        let unknown = || guests.here.iter().filter(|(_, guest)| !guest.known);
        let (full, crowded) = (guests.here.len() >= self.most, unknown().count() >= self.most_unknown);
        if guests.closed {
            return None;
        }
        if full || crowded {
            let oldest = unknown().min_by_key(|(_, guest)| guest.since).map(|(&id, _)| id)?;
            if let Some(guest) = guests.here.remove(&oldest) {
                guest.handle.shut_down();
            }
        }
        guests.next += 1;
        let id = guests.next;
        guests.here.insert(id, Guest { handle, known: false, since: Instant::now() });
        Some(id)
    }

    /// Notes that a connection has proved who it is.
    pub fn known(&self, id: u64) {
        if let Some(guest) = self.guests().here.get_mut(&id) {
            guest.known = true;
        }
    }

    /// A connection has ended.
    pub fn leave(&self, id: u64) {
        self.guests().here.remove(&id);
        self.left.notify_all();
    }

    /// Connections there are.
    pub fn count(&self) -> usize {
        self.guests().here.len()
    }

    /// Lets nobody in any more.
    pub fn close(&self) {
        self.guests().closed = true;
    }

    /// Waits until all have left, then shuts down those that have not.
    pub fn empty(&self, patience: Duration) {
        let until = Instant::now() + patience;
        let mut guests = self.guests();
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if guests.here.is_empty() || left.is_zero() {
                break;
            }
            guests = self.left.wait_timeout(guests, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        for guest in guests.here.values() {
            guest.handle.shut_down();
        }
    }
}

/// Bytes that may be held at once by all together.
pub struct Budget {
    free: Mutex<u64>,
    freed: Condvar,
}

/// A share of a budget, given back when dropped.
pub struct Share<'a> {
    budget: &'a Budget,
    bytes: u64,
}

impl Budget {
    pub fn new(bytes: u64) -> Self {
        Self { free: Mutex::new(bytes), freed: Condvar::new() }
    }

    /// Waits for `bytes` of it.  `None` if they are not to be had in time.
    pub fn take(&self, bytes: u64, patience: Duration) -> Option<Share<'_>> {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut free, _) =
            self.freed.wait_timeout_while(free, patience, |free| *free < bytes).unwrap_or_else(PoisonError::into_inner);
        if *free < bytes {
            return None;
        }
        *free -= bytes;
        Some(Share { budget: self, bytes })
    }
}

impl Drop for Share<'_> {
    fn drop(&mut self) {
        *self.budget.free.lock().unwrap_or_else(PoisonError::into_inner) += self.bytes;
        self.budget.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    #[test]
    fn the_oldest_unknown_makes_room_and_known_ones_stay() {
        let gate = Gate::new(3, 2);
        let mut theirs = Vec::new();
        let mut enter = || {
            let (ours, other) = UnixStream::pair().unwrap();
            theirs.push(other);
            gate.enter(Socket::Unix(ours))
        };
        let (one, two) = (enter().unwrap(), enter().unwrap());
        gate.known(two);
        let three = enter().unwrap();
        let four = enter().unwrap();
        assert_eq!(gate.count(), 3, "{one} went for {four}");
        gate.known(three);
        gate.known(four);
        let (ours, other) = UnixStream::pair().unwrap();
        theirs.push(other);
        assert!(gate.enter(Socket::Unix(ours)).is_none(), "all are known");
        assert_eq!(theirs[0].read(&mut [0]).unwrap(), 0, "the first one was shut down");
        gate.leave(three);
        gate.close();
        let (ours, _other) = UnixStream::pair().unwrap();
        assert!(gate.enter(Socket::Unix(ours)).is_none());
        gate.empty(Duration::from_millis(10));
        assert_eq!(theirs[1].read(&mut [0]).unwrap(), 0);
    }

    #[test]
    fn a_budget_is_waited_for() {
        let budget = Budget::new(10);
        let share = budget.take(8, Duration::ZERO).unwrap();
        assert!(budget.take(3, Duration::from_millis(5)).is_none());
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| budget.take(3, Duration::from_secs(20)).is_some());
            drop(share);
            assert!(waits.join().unwrap());
        });
        assert!(budget.take(10, Duration::ZERO).is_some());
        assert!(budget.take(11, Duration::ZERO).is_none());
    }
}
