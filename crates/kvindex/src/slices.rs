//! Which boundaries have a state slice outside of the pool, by chain hash. The bytes are the keeper's.
//!
//! A slice has a name, not a block: it counts whenever a block of its hash is in the index, also one that was published after the
//! slice was noted, and it stays known when that block leaves. Notes are hints: a slice that is gone is found out by whoever reads it.

use hashbrown::HashTable;

use crate::ids::BlockHash;
use crate::parts::{Part, PartSet, Tier};
use crate::pool::BlockPool;

/// Most slices that are known at once; further ones are not noted.
const MOST: usize = 1 << 20;

#[derive(Clone, Copy, Debug)]
struct Known {
    hash: BlockHash,
    parts: PartSet,
}

/// The directory. Takes memory once there is a slice.
#[derive(Debug, Default)]
pub(crate) struct Slices {
    table: HashTable<Known>,
}

const fn address(hash: BlockHash) -> u64 {
    hash.0 as u64
}

impl Slices {
    /// Where the slice of a boundary lies; a look at nothing while none is known.
    #[inline]
    pub(crate) fn of(&self, hash: BlockHash) -> PartSet {
        if self.table.is_empty() { PartSet::EMPTY } else { self.look_up(hash) }
    }

    #[inline(never)]
    fn look_up(&self, hash: BlockHash) -> PartSet {
        self.table.find(address(hash), |known| known.hash == hash).map_or(PartSet::EMPTY, |known| known.parts)
    }

    /// False if there is no room for another one.
    fn note(&mut self, hash: BlockHash, tier: Tier, present: bool) -> bool {
        let parts = self.of(hash).with(Part::StateSlice, tier, present);
        let full = self.table.len() >= MOST;
        match self.table.find_entry(address(hash), |known| known.hash == hash) {
            Ok(entry) if parts == PartSet::EMPTY => {
                entry.remove();
            }
            Ok(mut entry) => entry.get_mut().parts = parts,
            Err(_) if parts == PartSet::EMPTY => {}
            Err(_) if full => return false,
            Err(_) => {
                self.table.insert_unique(address(hash), Known { hash, parts }, |known| address(known.hash));
            }
        }
        true
    }
}

impl BlockPool {
    /// Notes that the state at the end of the block with this hash lies in a tier, or does so no longer. False if it was not noted:
    /// a hash of nothing, or too many slices.
    pub fn note_slice(&mut self, hash: BlockHash, tier: Tier, present: bool) -> bool {
        if !hash.is_some() || !self.slices.note(hash, tier, present) {
            return false;
        }
        if let Some(block) = self.find(hash) {
            let parts = &mut self.parts[block.index()];
            *parts = parts.with(Part::StateSlice, tier, present);
        }
        true
    }

    /// Slices that are known, whether their block is indexed or not.
    pub fn known_slices(&self) -> usize {
        self.slices.table.len()
    }

    /// Every known slice whose block is indexed counts there.
    pub(crate) fn check_slices(&self) -> Result<(), String> {
        for known in &self.slices.table {
            let Some(block) = self.find(known.hash) else { continue };
            let parts = self.parts(block);
            for tier in [Tier::Device, Tier::Host, Tier::Store] {
                if known.parts.has(Part::StateSlice, tier) && !parts.has(Part::StateSlice, tier) {
                    return Err(format!("block {} has {parts:?}, its slice is known in {:?}", block.0, known.parts));
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_directory_is_bounded_and_what_is_gone_makes_room() {
        let mut slices = Slices::default();
        let hash = |n: usize| BlockHash(n as u128 + 1);
        for n in 0..MOST {
            assert!(slices.note(hash(n), Tier::Host, true));
        }
        assert!(!slices.note(hash(MOST), Tier::Host, true));
        assert!(slices.note(hash(0), Tier::Store, true), "a further tier of one that is known");
        assert!(slices.note(hash(MOST), Tier::Host, false), "what is not there may go");
        assert!(slices.note(hash(1), Tier::Host, false) && slices.note(hash(MOST), Tier::Host, true));
        assert_eq!(slices.of(hash(1)), PartSet::EMPTY);
        assert!(slices.note(hash(0), Tier::Host, false) && slices.of(hash(0)).has(Part::StateSlice, Tier::Store));
    }
}
