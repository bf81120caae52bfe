//! Objects in memory that the engines of a host have mapped.
//!
//! Owns: joining the table of extents with their bytes, so that nobody has bytes without a pin or a reservation. Never touches: sockets.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::shm::Shared;
use super::table::{Extent, Name, RowId, Table};
use crate::checksum::checksum;
use crate::error::Error;

/// Memory and what lies in it. All calls are safe from any thread.
#[derive(Debug)]
pub struct Arena {
    shared: Shared,
    table: Mutex<Table>,
    /// A pin or a reservation was dropped.
    freed: Condvar,
}

/// A hold on an extent; dropped, it lets go.
#[derive(Debug)]
struct Hold {
    arena: Arc<Arena>,
    row: RowId,
    extent: Extent,
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.arena.table().unpin(self.row);
        self.arena.freed.notify_all();
    }
}

/// An extent reserved for an object: nobody else has its bytes.
#[derive(Debug)]
pub struct Room(Hold);

impl Room {
    /// To be filled.
    pub fn bytes(&mut self) -> &mut [u8] {
        let extent = self.0.extent;
        // SAFETY: extents do not overlap, this one is reserved until it is published or dropped, and there is one `Room` of it, borrowed as long as
        // the slice lives.
        unsafe { self.0.arena.shared.bytes_mut(extent.place, extent.len as usize) }
    }

    /// Lets everybody find it, if nothing is found under that name yet.
    ///
    /// # Errors
    /// The room again, if there is something.
    pub fn publish(mut self, name: Name, checksum: u64) -> Result<Pin, Self> {
        if self.0.arena.table().publish(self.0.row, name, checksum) {
            self.0.extent.checksum = checksum;
            Ok(Pin(self.0))
        } else {
            Err(self)
        }
    }
}

/// An object that stays where it is as long as this lives.
#[derive(Debug)]
pub struct Pin(Hold);

impl Pin {
    /// Where it lies and what it is held to.
    pub fn extent(&self) -> Extent {
        self.0.extent
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        let extent = self.0.extent;
        // SAFETY: what was published is written to by nobody, and its extent is not reserved again while it is pinned.
        unsafe { self.0.arena.shared.bytes(extent.place, extent.len as usize) }
    }

    /// Whether its bytes lack their checksum.
    pub fn is_damaged(&self) -> bool {
        checksum(self.bytes()) != self.0.extent.checksum
    }
}

/// How much there is of what.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sizes {
    /// Bytes of the arena.
    pub bytes: u64,
    /// Objects that are found.
    pub objects: u64,
    /// Bytes free.
    pub free: u64,
    /// Bytes pinned or being filled.
    pub pinned: u64,
    /// Objects that made room for others so far.
    pub evicted: u64,
}

impl Arena {
    /// An empty one.
    ///
    /// # Errors
    /// As [`Shared::new`].
    pub fn new(len: u64) -> Result<Arc<Self>, Error> {
        let shared = Shared::new(len)?;
        Ok(Arc::new(Self { table: Mutex::new(Table::new(len)), shared, freed: Condvar::new() }))
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The memory itself.
    pub fn shared(&self) -> &Shared {
        &self.shared
    }

    /// Room for an object, at the cost of what was used longest ago; waits up to `patience` for pins to go.
    pub fn reserve(self: &Arc<Self>, len: u32, patience: Duration) -> Option<Room> {
        let until = Instant::now() + patience;
        let mut table = self.table();
        loop {
            if let Some((row, extent)) = table.reserve(len) {
                return Some(Room(Hold { arena: Arc::clone(self), row, extent }));
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            table = self.freed.wait_timeout(table, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// An object that is present.
    pub fn pin(self: &Arc<Self>, name: Name) -> Option<Pin> {
        let (row, extent) = self.table().pin(name)?;
        Some(Pin(Hold { arena: Arc::clone(self), row, extent }))
    }

    /// Where an object lies, if it is present: for whoever does not want its bytes.
    pub fn find(&self, name: Name) -> Option<Extent> {
        self.table().find(name)
    }

    /// How many of `names` are present before the first that is not.
    pub fn run(&self, names: impl Iterator<Item = Name>) -> usize {
        let table = self.table();
        names.take_while(|&name| table.find(name).is_some()).count()
    }

    /// Takes an object out of sight.
    pub fn remove(&self, name: Name) -> bool {
        let removed = self.table().remove(name);
        self.freed.notify_all();
        removed
    }

    /// Its sizes.
    pub fn sizes(&self) -> Sizes {
        let (objects, free, pinned, evicted) = self.table().sizes();
        Sizes { bytes: self.shared.len(), objects, free, pinned, evicted }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::key::{Key, Kind, ObjectId};

    fn name(number: u64) -> Name {
        Name { tenant: 0, id: ObjectId { kind: Kind::Block, key: Key(number.into()) } }
    }

    fn bytes(number: u64, len: usize) -> Vec<u8> {
        (0..len).map(|at| (number as usize * 7 + at) as u8).collect()
    }

    /// Threads fill, read and drop at random; whoever has a pin sees the bytes of its object throughout.
    #[test]
    fn threads_share_an_arena() {
        let arena = Arena::new(64 << 12).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..4u64 {
                let arena = &arena;
                scope.spawn(move || {
                    let mut state = thread + 1;
                    let mut held: Vec<(u64, Pin)> = Vec::new();
                    for _ in 0..3000 {
                        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        let number = (state >> 33) % 40;
                        let len = 1 + number as usize * 400;
                        let pin = arena.pin(name(number)).or_else(|| {
                            let mut room = arena.reserve(len as u32, Duration::ZERO)?;
                            room.bytes().copy_from_slice(&bytes(number, len));
                            room.publish(name(number), checksum(&bytes(number, len))).ok()
                        });
                        held.extend(pin.map(|pin| (number, pin)));
                        if held.len() > 5 || state & 1 == 0 {
                            let at = (state >> 20) as usize % held.len().max(1);
                            if at < held.len() {
                                let (number, pin) = held.swap_remove(at);
                                assert_eq!(pin.bytes(), bytes(number, 1 + number as usize * 400));
                            }
                        }
                        if state.is_multiple_of(11) {
                            arena.remove(name(number));
                        }
                    }
                });
            }
        });
        assert_eq!(arena.sizes().pinned, 0);
        assert!(arena.sizes().evicted > 0);
        assert!(arena.reserve(64 << 12, Duration::ZERO).is_some());
    }

    #[test]
    fn room_is_waited_for() {
        let arena = Arena::new(8 << 12).unwrap();
        let all = arena.reserve(8 << 12, Duration::ZERO).unwrap();
        assert!(arena.reserve(1, Duration::from_millis(5)).is_none());
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| arena.reserve(1, Duration::from_secs(20)).is_some());
            drop(all);
            assert!(waits.join().unwrap());
        });
    }
}
