//! What lies in an arena: extents with names, lengths and checksums, pins, and the order in which they go.
//!
//! Owns: who has which extent, and until when. Never touches: bytes, locks, sockets.
//!
//! An extent is *reserved* (being filled; nobody finds it), then *present* (found by its name), then gone. While it is pinned it stays where it is,
//! found or not; what is present and not pinned goes least recently used first, when room is needed.

use std::collections::HashMap;
use std::collections::hash_map;

use super::space::{Space, span};
use crate::key::ObjectId;

/// Name of an object among those of all tenants of this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Name {
    /// Digest of the tenant's name.
    pub tenant: u128,
    /// Its name there.
    pub id: ObjectId,
}

/// Where bytes lie and what they are held to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First byte in the arena.
    pub place: u64,
    /// Bytes.
    pub len: u32,
    /// XXH3-64 of them, once they are present.
    pub checksum: u64,
}

const NONE: u32 = u32::MAX;

#[derive(Debug)]
struct Row {
    extent: Extent,
    /// None while reserved, and once it was taken out of sight.
    name: Option<Name>,
    pins: u32,
    /// Neighbours in the order of eviction, while it is in it.
    older: u32,
    newer: u32,
}

/// Number of a row: good as long as whoever has it holds a pin or the reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RowId(u32);

/// The table of an arena.
#[derive(Debug)]
pub struct Table {
    space: Space,
    rows: Vec<Row>,
    unused: Vec<u32>,
    names: HashMap<Name, u32>,
    oldest: u32,
    newest: u32,
    evicted: u64,
    pinned_bytes: u64,
}

impl Table {
    /// Over an arena of `len` bytes.
    pub fn new(len: u64) -> Self {
        Self {
            space: Space::new(len),
            rows: Vec::new(),
            unused: Vec::new(),
            names: HashMap::new(),
            oldest: NONE,
            newest: NONE,
            evicted: 0,
            pinned_bytes: 0,
        }
    }

    /// Reserves an extent, at the cost of what was used longest ago. `None` where what is pinned leaves no such room.
    pub fn reserve(&mut self, len: u32) -> Option<(RowId, Extent)> {
        let place = loop {
            match self.space.take(span(len)) {
                Some(place) => break place,
                None if self.oldest == NONE => return None,
                None => {
                    let victim = self.oldest;
                    self.evicted += 1;
                    self.hide(victim);
                    self.leave_order(victim);
                    self.free(victim);
                }
            }
        };
        let extent = Extent { place, len, checksum: 0 };
        let row = Row { extent, name: None, pins: 1, older: NONE, newer: NONE };
        let at = if let Some(at) = self.unused.pop() {
            self.rows[at as usize] = row;
            at
        } else {
            self.rows.push(row);
            self.rows.len() as u32 - 1
        };
        self.pinned_bytes += span(len);
        Some((RowId(at), extent))
    }

    /// Makes a reservation an object of this name; its pin stays with the caller. `false` if there is one of that name: then it stays reserved.
    pub fn publish(&mut self, row: RowId, name: Name, checksum: u64) -> bool {
        match self.names.entry(name) {
            hash_map::Entry::Occupied(_) => false,
            hash_map::Entry::Vacant(free) => {
                free.insert(row.0);
                let row = &mut self.rows[row.0 as usize];
                row.extent.checksum = checksum;
                row.name = Some(name);
                true
            }
        }
    }

    /// Whether an object is present, and its extent.
    pub fn find(&self, name: Name) -> Option<Extent> {
        self.names.get(&name).map(|&at| self.rows[at as usize].extent)
    }

    /// Pins an object that is present: it stays where it is until [`Table::unpin`].
    pub fn pin(&mut self, name: Name) -> Option<(RowId, Extent)> {
        let &at = self.names.get(&name)?;
        if self.rows[at as usize].pins == 0 {
            self.leave_order(at);
            self.pinned_bytes += span(self.rows[at as usize].extent.len);
        }
        let row = &mut self.rows[at as usize];
        row.pins += 1;
        Some((RowId(at), row.extent))
    }

    /// Drops a pin, or a reservation. The last one of an object out of sight frees its extent.
    pub fn unpin(&mut self, row: RowId) {
        let at = row.0;
        let row = &mut self.rows[at as usize];
        row.pins -= 1;
        if row.pins > 0 {
            return;
        }
        let present = row.name.is_some();
        self.pinned_bytes -= span(row.extent.len);
        if present { self.enter_order(at) } else { self.free(at) }
    }

    /// Takes an object out of sight. Whoever has it pinned keeps its bytes.
    pub fn remove(&mut self, name: Name) -> bool {
        let Some(&at) = self.names.get(&name) else { return false };
        self.hide(at);
        if self.rows[at as usize].pins == 0 {
            self.leave_order(at);
            self.free(at);
        }
        true
    }

    fn hide(&mut self, at: u32) {
        if let Some(name) = self.rows[at as usize].name.take() {
            self.names.remove(&name);
        }
    }

    fn free(&mut self, at: u32) {
        let extent = self.rows[at as usize].extent;
        self.space.give(extent.place, span(extent.len));
        self.unused.push(at);
    }

    fn enter_order(&mut self, at: u32) {
        let newest = self.newest;
        self.rows[at as usize].older = newest;
        self.rows[at as usize].newer = NONE;
        match newest {
            NONE => self.oldest = at,
            _ => self.rows[newest as usize].newer = at,
        }
        self.newest = at;
    }

    fn leave_order(&mut self, at: u32) {
        let Row { older, newer, .. } = self.rows[at as usize];
        match older {
            NONE => self.oldest = newer,
            _ => self.rows[older as usize].newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            _ => self.rows[newer as usize].older = older,
        }
    }

    /// Objects present, bytes free, bytes pinned or reserved, objects evicted so far.
    pub fn sizes(&self) -> (u64, u64, u64, u64) {
        (self.names.len() as u64, self.space.free(), self.pinned_bytes, self.evicted)
    }
}

#[cfg(test)]
mod tests;
