//! What an owner offers: who may still pull, until when, and what is to be told. A plain state machine; time comes in.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use crate::error::Error;
use crate::ticket::OfferId;

/// Events kept for an owner that does not ask; older ones are dropped and counted.
pub const MAX_EVENTS: usize = 1 << 16;

/// What happened to an offer. At most one `Pulled`, exactly one of the other two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// A puller has verified all of it, for the first time.
    Pulled,
    /// Ended by a release, from either side.
    Released,
    /// Ended by its lease.
    Expired,
}

/// Something an owner learns by `poll`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Which offer.
    pub id: OfferId,
    /// What happened.
    pub kind: EventKind,
}

/// Gauges and totals of one end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Offers whose memory is held (ended ones with a pull in progress included).
    pub offers: usize,
    /// Their bytes, and those of offers being made.
    pub bytes: u64,
    /// Pulls in progress.
    pub pulls: usize,
    /// Events that nobody fetched in time.
    pub events_lost: u64,
}

/// What a pull reads; it keeps the memory until it is handed back.
pub struct Grant<P> {
    id: OfferId,
    /// The bytes.
    pub payload: Arc<P>,
    /// The description.
    pub meta: Arc<[u8]>,
    /// Bytes of the payload.
    pub length: u64,
    /// Over both.
    pub checksum: u64,
}

struct Entry<P> {
    payload: Arc<P>,
    meta: Arc<[u8]>,
    length: u64,
    checksum: u64,
    ends: u64,
    pulls: usize,
    pulled: bool,
    /// Ended while somebody pulled: no new pulls, memory goes with the last one.
    ended: Option<EventKind>,
}

/// The table. `P` is the memory of an offer.
pub struct Offers<P> {
    most_entries: usize,
    most_bytes: u64,
    entries: HashMap<OfferId, Entry<P>>,
    deadlines: BTreeSet<(u64, OfferId)>,
    making: usize,
    bytes: u64,
    events: VecDeque<Event>,
    events_lost: u64,
    /// Memory to drop, which takes long for gigabytes: without the lock.
    dead: Vec<Arc<P>>,
}

impl<P> Offers<P> {
    /// An empty table with its bounds.
    pub fn new(most_entries: usize, most_bytes: u64) -> Self {
        Self {
            most_entries,
            most_bytes,
            entries: HashMap::new(),
            deadlines: BTreeSet::new(),
            making: 0,
            bytes: 0,
            events: VecDeque::new(),
            events_lost: 0,
            dead: Vec::new(),
        }
    }

    /// Takes room for an offer of so many bytes, description included, before they are copied.
    ///
    /// # Errors
    /// [`Error::Full`].
    pub fn reserve(&mut self, bytes: u64) -> Result<(), Error> {
        let offers = self.entries.len() + self.making + 1;
        if offers > self.most_entries {
            return Err(Error::Full { what: "offers", need: offers as u64, have: self.most_entries as u64 });
        }
        let need = self.bytes.saturating_add(bytes);
        if need > self.most_bytes {
            return Err(Error::Full { what: "bytes", need, have: self.most_bytes });
        }
        self.bytes = need;
        self.making += 1;
        Ok(())
    }

    /// Gives the room back of an offer that was not made.
    pub fn cancel(&mut self, bytes: u64) {
        self.bytes -= bytes;
        self.making -= 1;
    }

    /// Makes an offer whose room was reserved; it may be pulled until `ends`.
    pub fn insert(&mut self, id: OfferId, payload: P, meta: &[u8], length: u64, checksum: u64, ends: u64) {
        self.making -= 1;
        let (payload, meta) = (Arc::new(payload), Arc::from(meta));
        let entry = Entry { payload, meta, length, checksum, ends, pulls: 0, pulled: false, ended: None };
        self.deadlines.insert((ends, id));
        self.entries.insert(id, entry);
    }

    /// Starts a pull: the memory stays until [`Self::end_pull`]. None: there is no such offer any more.
    pub fn begin_pull(&mut self, id: OfferId, now: u64) -> Option<Grant<P>> {
        let entry = self.entries.get_mut(&id).filter(|entry| entry.ended.is_none() && now < entry.ends)?;
        entry.pulls += 1;
        let (payload, meta) = (Arc::clone(&entry.payload), Arc::clone(&entry.meta));
        Some(Grant { id, payload, meta, length: entry.length, checksum: entry.checksum })
    }

    /// Ends a pull, however it went.
    pub fn end_pull(&mut self, grant: Grant<P>, verified: bool) {
        let id = grant.id;
        self.dead.push(grant.payload);
        let Some(entry) = self.entries.get_mut(&id) else { return };
        entry.pulls -= 1;
        let first = verified && !entry.pulled;
        entry.pulled |= verified;
        let over = entry.ended.filter(|_| entry.pulls == 0);
        if first {
            self.tell(id, EventKind::Pulled);
        }
        if let Some(kind) = over {
            if kind == EventKind::Expired {
                self.tell(id, kind);
            }
            self.remove(id);
        }
    }

    /// Ends an offer; false if it has ended before or never was.
    pub fn release(&mut self, id: OfferId, now: u64) -> bool {
        let Some(entry) = self.entries.get_mut(&id).filter(|entry| entry.ended.is_none() && now < entry.ends) else {
            return false;
        };
        entry.ended = Some(EventKind::Released);
        let idle = entry.pulls == 0;
        self.deadlines.remove(&(entry.ends, id));
        self.tell(id, EventKind::Released);
        if idle {
            self.remove(id);
        }
        true
    }

    /// Ends offers whose lease is over; gives the time of the next one.
    pub fn expire(&mut self, now: u64) -> Option<u64> {
        while let Some(&(ends, id)) = self.deadlines.first().filter(|(ends, _)| *ends <= now) {
            self.deadlines.remove(&(ends, id));
            let Some(entry) = self.entries.get_mut(&id) else { continue };
            entry.ended = Some(EventKind::Expired);
            if entry.pulls == 0 {
                self.tell(id, EventKind::Expired);
                self.remove(id);
            }
        }
        self.deadlines.first().map(|(ends, _)| *ends)
    }

    /// Forgets every offer, without events; pulls in progress keep their memory.
    pub fn clear(&mut self) {
        for (_, entry) in self.entries.drain() {
            self.bytes -= entry.length + entry.meta.len() as u64;
            self.dead.push(entry.payload);
        }
        self.deadlines.clear();
    }

    /// Moves what happened since the last call to the end of `into`.
    pub fn drain_events(&mut self, into: &mut Vec<Event>) {
        into.extend(self.events.drain(..));
    }

    /// Memory that is nobody's any more, to be dropped without the lock.
    pub fn take_dead(&mut self) -> Vec<Arc<P>> {
        std::mem::take(&mut self.dead)
    }

    /// Whether there is such memory.
    pub fn has_dead(&self) -> bool {
        !self.dead.is_empty()
    }

    /// Gauges.
    pub fn counts(&self) -> Counts {
        Counts {
            offers: self.entries.len() + self.making,
            bytes: self.bytes,
            pulls: self.entries.values().map(|entry| entry.pulls).sum(),
            events_lost: self.events_lost,
        }
    }

    fn tell(&mut self, id: OfferId, kind: EventKind) {
        if self.events.len() == MAX_EVENTS {
            self.events.pop_front();
            self.events_lost += 1;
        }
        self.events.push_back(Event { id, kind });
    }

    fn remove(&mut self, id: OfferId) {
        if let Some(entry) = self.entries.remove(&id) {
            self.bytes -= entry.length + entry.meta.len() as u64;
            self.dead.push(entry.payload);
        }
    }
}

#[cfg(test)]
mod tests;
