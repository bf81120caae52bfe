//! One block: two nodes share a cache line.

use crate::ids::{Block, BlockHash};

/// State is derived from the fields, so that it cannot disagree with them:
///
/// | state | condition |
/// |---|---|
/// | held | `pins != [0, 0]` |
/// | cached | `pins == [0, 0]`, hashed |
/// | parked or free | `pins == [0, 0]`, not hashed; `parent` links the list |
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(32))]
pub(crate) struct Node {
    /// Chain hash, or none.
    pub(crate) hash: BlockHash,
    /// Block before it in the chain (null: first block or private); list link while free or parked.
    pub(crate) parent: Block,
    /// By owner kind: references plus children pinned by that kind.
    pub(crate) pins: [u32; 2],
    /// Number of its newest entry in the cached queue.
    pub(crate) stamp: u32,
}

impl Node {
    #[inline]
    pub(crate) const fn is_held(&self) -> bool {
        (self.pins[0] | self.pins[1]) != 0
    }

    #[inline]
    pub(crate) const fn is_cached(&self) -> bool {
        !self.is_held() && self.hash.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_nodes_share_a_cache_line() {
        assert_eq!((size_of::<Node>(), align_of::<Node>()), (32, 32));
    }
}
