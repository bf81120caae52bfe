//! What an index entry has, and where: parts (block KV, state slice) by tier.

use std::fmt;

/// A part of an index entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// Paged KV of the block, in every paged group.
    BlockKv,
    /// Per-sequence state as it stood at the end of the block.
    StateSlice,
}

/// Where a part lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tier {
    /// In the pool's own pages or replica rows.
    Device,
    /// In host memory.
    Host,
    /// In the KV store.
    Store,
}

/// Set of (part, tier) pairs.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct PartSet(pub(crate) u8);

const fn bit(part: Part, tier: Tier) -> u8 {
    1 << (part as u8 * 3 + tier as u8)
}

impl PartSet {
    /// Nothing anywhere.
    pub const EMPTY: Self = Self(0);
    /// What a block has when it is published: its KV on the device.
    pub const PUBLISHED: Self = Self(bit(Part::BlockKv, Tier::Device));

    /// True if the part lies in that tier.
    #[inline]
    pub const fn has(self, part: Part, tier: Tier) -> bool {
        self.0 & bit(part, tier) != 0
    }

    /// True if the part lies in any tier.
    #[inline]
    pub const fn has_any(self, part: Part) -> bool {
        self.0 & (0b111 << (part as u8 * 3)) != 0
    }

    /// The fastest tier that has the part.
    pub const fn nearest(self, part: Part) -> Option<Tier> {
        if self.has(part, Tier::Device) {
            Some(Tier::Device)
        } else if self.has(part, Tier::Host) {
            Some(Tier::Host)
        } else if self.has(part, Tier::Store) {
            Some(Tier::Store)
        } else {
            None
        }
    }

    /// Both sets together.
    #[inline]
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// The same set with one pair added or taken away.
    #[inline]
    #[must_use]
    pub const fn with(self, part: Part, tier: Tier, present: bool) -> Self {
        if present { Self(self.0 | bit(part, tier)) } else { Self(self.0 & !bit(part, tier)) }
    }
}

impl fmt::Debug for PartSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut set = f.debug_set();
        for part in [Part::BlockKv, Part::StateSlice] {
            for tier in [Tier::Device, Tier::Host, Tier::Store] {
                if self.has(part, tier) {
                    set.entry(&(part, tier));
                }
            }
        }
        set.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_and_tiers_are_independent() {
        let set = PartSet::PUBLISHED.with(Part::StateSlice, Tier::Store, true);
        assert!(set.has(Part::BlockKv, Tier::Device) && !set.has(Part::BlockKv, Tier::Store));
        assert_eq!(set.nearest(Part::StateSlice), Some(Tier::Store));
        assert!(set.has_any(Part::StateSlice));
        let set = set.with(Part::StateSlice, Tier::Host, true).with(Part::BlockKv, Tier::Device, false);
        assert_eq!((set.nearest(Part::BlockKv), set.nearest(Part::StateSlice)), (None, Some(Tier::Host)));
        assert_eq!(format!("{set:?}"), "{(StateSlice, Host), (StateSlice, Store)}");
    }
}
