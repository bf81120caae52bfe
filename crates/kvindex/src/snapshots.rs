//! Which indexed blocks have a snapshot: a copy of a sequence's whole state as it stood at the end of the block, at one of a
//! bounded number of places outside the device. The bytes are the worker's.
//!
//! A place is free, being filled, or ready. Ready ones that nothing reads go least recently used first; one that is read or being
//! filled stays until that is done, even if its block leaves the index meanwhile: then it is free.

use std::collections::BTreeSet;

use crate::counts::Counts;
use crate::ids::Block;
use crate::pool::BlockPool;

/// A place for one snapshot, counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SnapshotPlace(pub u32);

#[derive(Clone, Copy, Debug, Default)]
struct Place {
    /// Null when it belongs to no block (any more).
    block: Block,
    /// Copies to and from it that have not ended.
    users: u32,
    ready: bool,
    /// When it was used last; its key in `order`.
    used: u64,
}

/// The directory. Takes its memory once.
#[derive(Debug, Default)]
pub(crate) struct Snapshots {
    places: Box<[Place]>,
    /// Place of each block plus 1, 0 = none; empty without places.
    of_block: Box<[u32]>,
    free: Vec<u32>,
    /// Ready places that nothing uses, least recently used first.
    order: BTreeSet<(u64, u32)>,
    clock: u64,
}

impl Snapshots {
    pub(crate) fn new(places: u32, blocks: usize) -> Self {
        Self {
            places: vec![Place::default(); places as usize].into_boxed_slice(),
            of_block: vec![0; if places == 0 { 0 } else { blocks }].into_boxed_slice(),
            free: (0..places).rev().collect(),
            order: BTreeSet::new(),
            clock: 0,
        }
    }

    fn of(&self, block: Block) -> Option<u32> {
        self.of_block.get(block.index()).filter(|&&place| place > 0).map(|place| place - 1)
    }

    /// A block leaves the index.
    #[inline]
    pub(crate) fn forget(&mut self, block: Block) {
        if !self.of_block.is_empty()
            && let Some(at) = self.of(block)
        {
            self.drop_place(at);
        }
    }

    /// The place stands for no block any more; it is free once nothing uses it.
    fn drop_place(&mut self, at: u32) {
        let place = &mut self.places[at as usize];
        self.of_block[place.block.index()] = 0;
        place.block = Block::NULL;
        self.order.remove(&(place.used, at));
        if place.users == 0 {
            place.ready = false;
            self.free.push(at);
        }
    }

    fn touch(&mut self, at: u32) {
        self.clock += 1;
        let place = &mut self.places[at as usize];
        let was = self.order.remove(&(place.used, at));
        place.used = self.clock;
        if was {
            self.order.insert((self.clock, at));
        }
    }

    fn end_use(&mut self, at: u32) {
        let place = &mut self.places[at as usize];
        place.users -= 1;
        if place.users > 0 {
            return;
        }
        if place.block.is_null() {
            place.ready = false;
            self.free.push(at);
        } else if place.ready {
            self.order.insert((place.used, at));
        }
    }

    pub(crate) fn check(&self) -> Result<(), String> {
        let unused: BTreeSet<u32> = self.free.iter().copied().collect();
        for (at, place) in self.places.iter().enumerate() {
            let at = at as u32;
            let (free, ordered) = (unused.contains(&at), self.order.contains(&(place.used, at)));
            let idle = place.ready && place.users == 0;
            let listed = if place.block.is_null() { None } else { self.of(place.block) };
            let sound = ordered == idle
                && free == (place.block.is_null() && place.users == 0)
                && (place.block.is_null() || listed == Some(at))
                && (place.ready || free || place.users > 0);
            if !sound {
                return Err(format!(
                    "snapshot place {at}: {place:?}, free {free}, in order {ordered}, listed {listed:?}"
                ));
            }
        }
        let listed = self.of_block.iter().filter(|&&place| place > 0).count();
        let owned = self.places.iter().filter(|place| !place.block.is_null()).count();
        if listed != owned || !self.counts().adds_up() {
            return Err(format!("{listed} blocks have a snapshot, {owned} places have a block, {:?}", self.counts()));
        }
        Ok(())
    }

    fn counts(&self) -> Counts {
        let (total, free, cached) = (self.places.len() as u32, self.free.len() as u32, self.order.len() as u32);
        Counts { total, free, cached, held: total - free - cached, ..Counts::default() }
    }
}

impl BlockPool {
    /// Keeps snapshots at so many places from now on; the ones there are, are given up.
    pub fn set_snapshot_places(&mut self, places: u32) {
        self.snapshots = Snapshots::new(if self.prefix_caching { places } else { 0 }, self.nodes.len());
    }

    /// Places by state: `cached` ones are ready and may be given up, `held` ones are being filled or read.
    pub fn snapshot_counts(&self) -> Counts {
        self.snapshots.counts()
    }

    /// Copies to and from snapshots that have not ended.
    pub fn snapshot_users(&self) -> usize {
        self.snapshots.places.iter().map(|place| place.users as usize).sum()
    }

    /// Whether a snapshot of this block is ready, or about to be.
    #[inline]
    pub fn has_snapshot(&self, block: Block) -> bool {
        self.snapshots.of(block).is_some()
    }

    /// Place of the ready snapshot of a block.
    pub fn snapshot_of(&self, block: Block) -> Option<SnapshotPlace> {
        let at = self.snapshots.of(block)?;
        self.snapshots.places[at as usize].ready.then_some(SnapshotPlace(at))
    }

    /// A place that is to be filled with the state at the end of an indexed block; it gives up the snapshot used longest ago if
    /// none is free. None if the block has one, is not indexed, or every place is in use. [`BlockPool::end_snapshot`] ends it.
    pub fn begin_snapshot(&mut self, block: Block) -> Option<SnapshotPlace> {
        let snapshots = &mut self.snapshots;
        if snapshots.places.is_empty() || !self.nodes.get(block.index()).is_some_and(|node| node.hash.is_some()) {
            return None;
        }
        if let Some(at) = snapshots.of(block) {
            snapshots.touch(at);
            return None;
        }
        if snapshots.free.is_empty() {
            let &(_, oldest) = snapshots.order.first()?;
            snapshots.drop_place(oldest);
            self.stats.snapshots_evicted += 1;
        }
        let at = snapshots.free.pop()?;
        snapshots.clock += 1;
        snapshots.places[at as usize] = Place { block, users: 1, ready: false, used: snapshots.clock };
        snapshots.of_block[block.index()] = at + 1;
        Some(SnapshotPlace(at))
    }

    /// The copy to a place has ended; `ok`: the state is there.
    pub fn end_snapshot(&mut self, place: SnapshotPlace, ok: bool) {
        let Some(entry) = self.snapshots.places.get_mut(place.0 as usize).filter(|entry| entry.users > 0) else {
            self.stats.misuse += 1;
            return;
        };
        entry.ready = true;
        if !ok && !entry.block.is_null() {
            self.snapshots.drop_place(place.0);
        }
        self.snapshots.end_use(place.0);
    }

    /// Holds a block's snapshot, ready or being filled, for a copy from it. [`BlockPool::unpin_snapshot`] ends it.
    pub fn pin_snapshot(&mut self, block: Block) -> Option<SnapshotPlace> {
        let at = self.snapshots.of(block)?;
        self.snapshots.touch(at);
        let place = &mut self.snapshots.places[at as usize];
        self.snapshots.order.remove(&(place.used, at));
        place.users += 1;
        Some(SnapshotPlace(at))
    }

    /// The copy from a place has ended.
    pub fn unpin_snapshot(&mut self, place: SnapshotPlace) {
        if self.snapshots.places.get(place.0 as usize).is_some_and(|entry| entry.users > 0) {
            self.snapshots.end_use(place.0);
        } else {
            self.stats.misuse += 1;
        }
    }
}
