//! Which objects there are and where they lie: the table from key to entry, with the links between entries.
//!
//! Owns: entries, their places, parents, children and slices; bytes used by each tenant; the longest prefix of a chain.
//! Never touches: bytes of objects, disks, who is evicted next ([`crate::policy`] decides, by [`Slot`]).
//!
//! One invariant carries the search: a block is inserted after its parent and removed before it (only leaves go), so what is present
//! of a chain is a prefix of it, and the end of a prefix can be found by galloping.
//!
//! The table is cut into 64 by the key, so that a growth moves a 64th of it: its pause stays in the milliseconds at 10 M entries.

pub(crate) mod chunked;
mod recovery;
mod slab;
mod usage;

use hashbrown::HashTable;

pub use recovery::{Added, Recovery};
pub use slab::Slot;
use slab::{Row, Slab, State};
pub use usage::Usage;
use usage::Usages;

use crate::error::Error;
use crate::key::{Key, Kind, ObjectId};
use crate::media::Place;
use crate::object::{Class, Meta, TenantId};

/// Longest chain a caller may ask about: a million tokens in blocks of 128. Whoever takes chains from outside refuses more.
pub const MAX_CHAIN: usize = 8192;

/// Tables the index is cut into.
const SHARDS: usize = 64;

/// Ancestors looked at for the link of a chain's last entry: more than one only after the set of entry points has changed.
const LINK_STEPS: usize = 64;

/// Holds a chain from outside to [`MAX_CHAIN`].
///
/// # Errors
/// [`Error::Invalid`] if it is longer.
pub fn check_chain(keys: &[Key]) -> Result<(), Error> {
    if keys.len() > MAX_CHAIN {
        return Err(Error::Invalid(format!("a chain of {} blocks: ask for {MAX_CHAIN} at most", keys.len())));
    }
    Ok(())
}

/// What is known of an object that is present.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its name.
    pub id: ObjectId,
    /// Where it lies.
    pub place: Place,
    /// Bytes.
    pub len: u32,
    /// XXH3-64 of the bytes.
    pub checksum: u64,
    /// Traffic it came with.
    pub class: Class,
    /// Whose it is.
    pub tenant: TenantId,
    /// Block: its parent. Slice: its block.
    pub parent: Option<Slot>,
    /// Blocks whose parent it is, and those on their way.
    pub children: u32,
    /// Its slice.
    pub slice: Option<Slot>,
    /// Unix time it was last touched or written, seconds. Time to live counts from here, by class: no expiry is kept beside it.
    pub touched: u32,
    /// The bytes are gone; the entry stays while it has children.
    pub lost: bool,
}

/// Why an object was not inserted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The parent, or the block of a slice, is not here.
    #[error("its parent is not present")]
    NoParent,
    /// A slice names no block of its own key, or a block names itself.
    #[error("its parent does not fit its name")]
    BadParent,
    /// Here already, with the same bytes.
    #[error("it is present already")]
    Exists(Slot),
    /// Here already, with other bytes.
    #[error("it is present with other bytes")]
    Conflict(Slot),
    /// Every number is taken.
    #[error("the index has no number left")]
    Full,
}

/// The entry still has children, so it may not go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the block has {0} children")]
pub struct HasChildren(pub u32);

/// What a removal took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Removed {
    /// Its former number.
    pub slot: Slot,
    /// The entry as it was.
    pub entry: Entry,
    /// The slice that went with its block.
    pub slice: Option<(Slot, Entry)>,
    /// The parent, if this was its last child: it may go next.
    pub uncovered: Option<Slot>,
}

impl Removed {
    /// Bytes that are no longer referred to.
    pub fn bytes(&self) -> u64 {
        let block = if self.entry.lost { 0 } else { u64::from(self.entry.len) };
        block + self.slice.map_or(0, |(_, slice)| u64::from(slice.len))
    }
}

/// The table. Not locked: its owner keeps it behind one lock with the policy.
#[derive(Debug)]
pub struct Index {
    slab: Slab,
    tables: Vec<HashTable<Slot>>,
    usages: Usages,
}

impl Default for Index {
    fn default() -> Self {
        Self::new()
    }
}

fn shard(key: Key) -> usize {
    (key.0 >> 122) as usize
}

// The key is a hash; the low half serves the table, the top six bits chose it.
fn hash(key: Key) -> u64 {
    key.0 as u64
}

fn class_of(row: &Row) -> Class {
    Class::from_byte(row.class).unwrap_or(Class::Other)
}

impl Index {
    /// An empty one.
    pub fn new() -> Self {
        Self {
            slab: Slab::default(),
            tables: (0..SHARDS).map(|_| HashTable::new()).collect(),
            usages: Usages::default(),
        }
    }

    /// Entries: blocks and slices.
    pub fn len(&self) -> usize {
        self.slab.live()
    }

    /// Numbers given at least once: those of live entries are 1 to this.
    pub fn slots(&self) -> usize {
        self.slab.used()
    }

    /// The number `index`, if it names an entry now.
    pub fn slot(&self, index: usize) -> Option<Slot> {
        u32::try_from(index).ok().and_then(Slot::from_raw).filter(|&slot| self.slab.get(slot).is_some())
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Memory of the table and its rows, with the slack of their growth.
    pub fn memory(&self) -> usize {
        self.slab.bytes() + self.tables.iter().map(HashTable::allocation_size).sum::<usize>()
    }

    fn block(&self, key: Key) -> Option<Slot> {
        self.tables[shard(key)].find(hash(key), |&slot| self.slab[slot].key() == key).copied()
    }

    /// The number of an object; lost blocks are found too ([`Entry::lost`]).
    pub fn find(&self, id: ObjectId) -> Option<Slot> {
        let block = self.block(id.key)?;
        match id.kind {
            Kind::Block => Some(block),
            Kind::Slice => self.slab[block].slice,
        }
    }

    /// What is known under a number.
    pub fn entry(&self, slot: Slot) -> Option<Entry> {
        self.slab.get(slot).map(entry_of)
    }

    /// An object that can be read: its number and entry.
    pub fn get(&self, id: ObjectId) -> Option<(Slot, Entry)> {
        let slot = self.find(id)?;
        self.entry(slot).filter(|entry| !entry.lost).map(|entry| (slot, entry))
    }

    /// Whether an entry may be removed: a block without children, any slice.
    pub fn is_leaf(&self, slot: Slot) -> bool {
        self.slab.get(slot).is_some_and(|row| row.children == 0)
    }

    /// Every entry, in no order of meaning.
    pub fn iter(&self) -> impl Iterator<Item = (Slot, Entry)> {
        self.slab.iter().map(|(slot, row)| (slot, entry_of(row)))
    }

    /// Adds an object after its parent. A lost block of that name comes back to life with the new bytes.
    ///
    /// # Errors
    /// [`Refused`]; then nothing has changed.
    pub fn insert(&mut self, meta: &Meta, place: Place) -> Result<Slot, Refused> {
        let slice = meta.id.kind == Kind::Slice;
        if slice != (meta.parent == Some(meta.id.key)) {
            return Err(Refused::BadParent);
        }
        if let Some(slot) = self.find(meta.id) {
            return self.revive(slot, meta, place);
        }
        let parent = match meta.parent {
            None => None,
            Some(key) => Some(self.block(key).ok_or(Refused::NoParent)?),
        };
        let row = Row {
            key: Row::words(meta.id.key),
            checksum: meta.checksum,
            place,
            len: meta.len,
            parent,
            touched: meta.written,
            tenant: meta.tenant.0,
            class: meta.class as u8,
            state: if slice { State::Slice } else { State::Block },
            ..Row::default()
        };
        let slot = self.slab.insert(row).ok_or(Refused::Full)?;
        if slice {
            if let Some(block) = parent {
                self.slab[block].slice = Some(slot);
            }
        } else {
            if let Some(parent) = parent {
                self.slab[parent].children += 1;
            }
            let slab = &self.slab;
            let key = meta.id.key;
            self.tables[shard(key)].insert_unique(hash(key), slot, |&other| hash(slab[other].key()));
        }
        self.usages.add(meta.tenant, meta.id.kind, meta.len);
        Ok(slot)
    }

    fn revive(&mut self, slot: Slot, meta: &Meta, place: Place) -> Result<Slot, Refused> {
        let row = &mut self.slab[slot];
        if row.state != State::Lost {
            let same = row.len == meta.len && row.checksum == meta.checksum;
            return Err(if same { Refused::Exists(slot) } else { Refused::Conflict(slot) });
        }
        row.state = State::Block;
        row.place = place;
        row.len = meta.len;
        row.checksum = meta.checksum;
        row.touched = row.touched.max(meta.written);
        // Tenant and class stay: the policy has it in their order.
        let tenant = TenantId(row.tenant);
        self.usages.add(tenant, Kind::Block, meta.len);
        Ok(slot)
    }

    /// Removes an entry that nothing depends on; a block takes its slice with it. `None` for a number that names nothing.
    ///
    /// # Errors
    /// [`HasChildren`]; then nothing has changed.
    pub fn remove_leaf(&mut self, slot: Slot) -> Result<Option<Removed>, HasChildren> {
        let Some(row) = self.slab.get(slot).copied() else { return Ok(None) };
        if row.children > 0 {
            return Err(HasChildren(row.children));
        }
        let slice = row.slice.map(|slice| (slice, self.take(slice)));
        let mut uncovered = None;
        if row.state == State::Slice {
            if let Some(block) = row.parent {
                self.slab[block].slice = None;
            }
        } else {
            let key = row.key();
            if let Ok(found) = self.tables[shard(key)].find_entry(hash(key), |&other| other == slot) {
                found.remove();
            }
            if let Some(parent) = row.parent {
                let above = &mut self.slab[parent];
                above.children -= 1;
                uncovered = (above.children == 0).then_some(parent);
            }
        }
        Ok(Some(Removed { slot, entry: self.take(slot), slice, uncovered }))
    }

    fn take(&mut self, slot: Slot) -> Entry {
        let entry = entry_of(&self.slab.remove(slot));
        if !entry.lost {
            self.usages.sub(entry.tenant, entry.id.kind, entry.len);
        }
        entry
    }

    /// Counts a child that is on its way, so that the block stays until [`Index::release`].
    pub fn hold(&mut self, block: Slot) -> bool {
        let held = self.slab.get(block).is_some_and(|row| row.state != State::Slice);
        if held {
            self.slab[block].children += 1;
        }
        held
    }

    /// The child has come or will not: undoes one [`Index::hold`]. Whether the block may go now.
    pub fn release(&mut self, block: Slot) -> bool {
        if self.slab.get(block).is_none_or(|row| row.children == 0) {
            return false;
        }
        let row = &mut self.slab[block];
        row.children -= 1;
        row.children == 0
    }

    /// The bytes of an object are gone or wrong. A leaf is removed; a block with children stays as [`Entry::lost`], read as a miss, until its
    /// bytes are written again or its children are gone. Until then a chain through it is reported as if it were whole: entries are hints.
    pub fn lose(&mut self, slot: Slot) -> Option<Removed> {
        if let Ok(removed) = self.remove_leaf(slot) {
            return removed;
        }
        let row = &mut self.slab[slot];
        if row.state == State::Block {
            row.state = State::Lost;
            let (tenant, len) = (TenantId(row.tenant), row.len);
            self.usages.sub(tenant, Kind::Block, len);
        }
        None
    }

    /// Notes that an entry was used; a clock that went back changes nothing.
    pub fn touch(&mut self, slot: Slot, now: u32) {
        if self.slab.get(slot).is_some() {
            let row = &mut self.slab[slot];
            row.touched = row.touched.max(now);
        }
    }

    /// A record was copied: its entry points to the copy, if it still pointed to `from`.
    pub fn relocate(&mut self, id: ObjectId, from: Place, to: Place) -> bool {
        let Some(slot) = self.find(id) else { return false };
        let row = &mut self.slab[slot];
        let moved = row.place == from && row.state != State::Lost;
        if moved {
            row.place = to;
        }
        moved
    }

    /// Another record of the same name, with other bytes, counts from now on.
    pub(crate) fn replace(&mut self, slot: Slot, meta: &Meta, place: Place) {
        let row = &mut self.slab[slot];
        if row.state == State::Lost {
            return;
        }
        let (tenant, kind, before) = (TenantId(row.tenant), row.kind(), row.len);
        (row.place, row.len, row.checksum) = (place, meta.len, meta.checksum);
        self.usages.sub(tenant, kind, before);
        self.usages.add(tenant, kind, meta.len);
    }

    /// Blocks of a chain that are present, from its first on. The answer is exact for a true chain, because what is present of one is a prefix
    /// of it; the link of the last entry is checked, so that a key of another chain does not count.
    pub fn longest(&self, keys: &[Key]) -> usize {
        let mut found = self.gallop(keys);
        while found > 0 && !self.linked(keys, found - 1) {
            found -= 1;
        }
        debug_assert!(self.is_gallop_sound(keys, found));
        found
    }

    fn gallop(&self, keys: &[Key]) -> usize {
        let present = |at: usize| self.block(keys[at]).is_some();
        if keys.is_empty() || !present(0) {
            return 0;
        }
        // What was asked before is often here whole.
        if present(keys.len() - 1) {
            return keys.len();
        }
        // Invariant: `low` is present, `high` is absent.
        let (mut low, mut step) = (0, 1);
        let mut high = keys.len() - 1;
        while low + step < high {
            if present(low + step) {
                low += step;
                step *= 2;
            } else {
                high = low + step;
            }
        }
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if present(middle) {
                low = middle;
            } else {
                high = middle;
            }
        }
        high
    }

    /// Whether the entry of `keys[at]` follows that of `keys[at - 1]`. After a change of the set of entry points a link may pass over keys that
    /// are another one's now, so a few ancestors count as well.
    fn linked(&self, keys: &[Key], at: usize) -> bool {
        let Some(slot) = self.block(keys[at]) else { return false };
        let parent = self.slab[slot].parent;
        let Some(before) = at.checked_sub(1).map(|before| keys[before]) else {
            return parent.is_none();
        };
        let ancestors = std::iter::successors(parent, |&above| self.slab[above].parent);
        ancestors.take(LINK_STEPS).any(|above| self.slab[above].key() == before)
    }

    /// For a chain whose links are those of the index up to the block found, a linear scan finds as much.
    fn is_gallop_sound(&self, keys: &[Key], found: usize) -> bool {
        let parent_key = |at: usize| -> Option<Option<Key>> {
            let row = &self.slab[self.block(keys[at])?];
            Some(row.parent.map(|parent| self.slab[parent].key()))
        };
        let follows = |at: usize| parent_key(at) == Some(at.checked_sub(1).map(|before| keys[before]));
        let linear = (0..keys.len()).take_while(|&at| follows(at)).count();
        let true_chain = (0..found).all(follows);
        !true_chain || linear == found
    }

    /// Positions of `keys` at which a slice is present, deepest first, at most `want`; walks up the links from the last key.
    pub fn slices(&self, keys: &[Key], want: usize) -> Vec<usize> {
        let mut positions = Vec::new();
        if want == 0 || self.usages.total().slices == 0 {
            return positions;
        }
        let mut slot = keys.last().and_then(|&key| self.block(key));
        let mut at = keys.len();
        while let Some(block) = slot {
            let row = &self.slab[block];
            // Keys that the links pass over have no entry of this chain.
            let Some(here) = keys[..at].iter().rposition(|&key| key == row.key()) else { break };
            at = here;
            if row.slice.is_some() {
                positions.push(at);
            }
            if positions.len() >= want {
                break;
            }
            slot = row.parent;
        }
        positions
    }

    /// What a tenant uses.
    pub fn usage(&self, tenant: TenantId) -> Usage {
        self.usages.of(tenant)
    }

    /// What all use.
    pub fn total(&self) -> Usage {
        self.usages.total()
    }

    /// Tenants that use anything.
    pub fn tenants(&self) -> impl Iterator<Item = (TenantId, Usage)> {
        self.usages.iter()
    }
}

fn entry_of(row: &Row) -> Entry {
    Entry {
        id: ObjectId { kind: row.kind(), key: row.key() },
        place: row.place,
        len: row.len,
        checksum: row.checksum,
        class: class_of(row),
        tenant: TenantId(row.tenant),
        parent: row.parent,
        children: row.children,
        slice: row.slice,
        touched: row.touched,
        lost: row.state == State::Lost,
    }
}
