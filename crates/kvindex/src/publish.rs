//! The pool as an index: publishing, matching, parts, and the log of both.

use crate::error::PoolError;
use crate::events::Event;
use crate::ids::{Block, BlockHash, Owner};
use crate::parts::{Part, PartSet, Tier};
use crate::pool::{BlockPool, Hit, Published};

impl BlockPool {
    /// Longest indexed prefix of a chain of hashes. Takes no reference.
    #[inline]
    pub fn find_prefix(&self, hashes: &[BlockHash]) -> Hit {
        let (blocks, leaf) = self.index.longest_prefix(&self.nodes, hashes);
        Hit { blocks, leaf }
    }

    /// The indexed block with this hash.
    pub fn find(&self, hash: BlockHash) -> Option<Block> {
        self.index.find(&self.nodes, hash)
    }

    /// Shortens a hit to its deepest block that has `part` in some tier: the rule of models whose state does not page.
    pub fn shorten_to(&self, hit: Hit, part: Part) -> Hit {
        let Hit { mut blocks, mut leaf } = hit;
        while blocks > 0 && !leaf.is_null() && !self.parts(leaf).has_any(part) {
            leaf = self.parent(leaf);
            blocks -= 1;
        }
        if blocks == 0 || leaf.is_null() { Hit::default() } else { Hit { blocks, leaf } }
    }

    /// Shortens a hit to `blocks` blocks (cap of the prompt, tile rounding).
    pub fn truncate(&self, hit: Hit, blocks: usize) -> Hit {
        if blocks == 0 {
            return Hit::default();
        }
        let mut leaf = hit.leaf;
        for _ in blocks..hit.blocks {
            leaf = self.parent(leaf);
        }
        Hit { blocks: hit.blocks.min(blocks), leaf }
    }

    /// Makes a private block matchable. Call it only once the step that filled the block has completed.
    ///
    /// `cursor` is the deepest published block of the holder's chain (null: none yet), on which the holder has a reference;
    /// that reference moves to the new cursor. `namespace` is [`crate::ChainHasher::root`] of the chain. If the hash is
    /// indexed already the block stays private, a duplicate, and the cursor moves to the indexed one.
    ///
    /// # Errors
    /// [`PoolError::BadBlock`], [`PoolError::ZeroHash`], [`PoolError::NotHeld`], [`PoolError::NotPrivate`],
    /// [`PoolError::BadCursor`], [`PoolError::ParentMismatch`].
    pub fn publish(
        &mut self,
        block: Block,
        hash: BlockHash,
        cursor: Block,
        namespace: BlockHash,
    ) -> Result<Published, PoolError> {
        let node = self.node(block)?;
        if !hash.is_some() {
            return Err(self.misuse(PoolError::ZeroHash));
        }
        if node.hash.is_some() {
            return Err(self.misuse(PoolError::NotPrivate(block)));
        }
        let owner = match self.refs[block.index()] {
            [0, 0] => return Err(self.misuse(PoolError::NotHeld(block))),
            [0, _] => Owner::Transfer,
            _ => Owner::Sequence,
        };
        if !self.prefix_caching {
            return Ok(Published { cursor, duplicate: true });
        }
        let kind = owner.slot();
        let cursor_held = cursor.is_null()
            || (cursor != block
                && self.nodes.get(cursor.index()).is_some_and(|n| n.hash.is_some())
                && self.refs[cursor.index()][kind] > 0);
        if !cursor_held {
            return Err(self.misuse(PoolError::BadCursor(cursor)));
        }
        if let Some(other) = self.index.find(&self.nodes, hash) {
            return self.publish_duplicate(other, cursor, owner);
        }

        // The holder's reference on the cursor becomes the new child's pin: the cursor's pins do not change.
        if !cursor.is_null() {
            self.refs[cursor.index()][kind] -= 1;
            self.ref_totals[kind] -= 1;
        }
        let node = &mut self.nodes[block.index()];
        node.hash = hash;
        node.parent = cursor;
        let mixed = node.pins[1 - kind] > 0;
        self.parts[block.index()] = PartSet::PUBLISHED.and(self.slices.of(hash));
        self.index.insert(&self.nodes, block);
        if mixed && !cursor.is_null() {
            self.raise(cursor, if kind == 0 { Owner::Transfer } else { Owner::Sequence });
        }
        self.stats.published += 1;
        if self.events.is_some() {
            self.namespaces[block.index()] = namespace;
            self.log(block, true);
        }
        Ok(Published { cursor: block, duplicate: false })
    }

    fn publish_duplicate(&mut self, other: Block, cursor: Block, owner: Owner) -> Result<Published, PoolError> {
        if self.nodes[other.index()].parent != cursor {
            return Err(self.misuse(PoolError::ParentMismatch(other)));
        }
        self.stats.duplicates += 1;
        self.add_ref(other, owner);
        if !cursor.is_null() {
            // `other` pins the cursor, so this never releases it.
            let kind = owner.slot();
            self.refs[cursor.index()][kind] -= 1;
            self.ref_totals[kind] -= 1;
            self.nodes[cursor.index()].pins[kind] -= 1;
        }
        Ok(Published { cursor: other, duplicate: true })
    }

    /// Notes that a part of an indexed block is, or is no longer, in a tier.
    ///
    /// # Errors
    /// [`PoolError::BadBlock`], [`PoolError::NotIndexed`].
    pub fn set_part(&mut self, block: Block, part: Part, tier: Tier, present: bool) -> Result<(), PoolError> {
        self.indexed(block)?;
        let parts = &mut self.parts[block.index()];
        *parts = parts.with(part, tier, present);
        Ok(())
    }

    /// Parts of an indexed block; empty for any other.
    pub fn parts(&self, block: Block) -> PartSet {
        self.parts.get(block.index()).copied().unwrap_or_default()
    }

    /// Moves the events since the last drain to `out`; see [`crate::Event`] for the replay rule.
    pub fn drain_events(&mut self, out: &mut Vec<Event>) {
        let Some(log) = &mut self.events else { return };
        if log.drain(out) > 0 {
            self.snapshot_events(out);
        }
    }

    /// Appends a `Stored` for everything that is indexed, parents first. Nothing unless events are on.
    pub fn snapshot_events(&self, out: &mut Vec<Event>) {
        if self.events.is_none() {
            return;
        }
        let mut seen = vec![false; self.nodes.len()];
        let mut path = Vec::new();
        for id in 1..self.nodes.len() as u32 {
            let mut at = Block(id);
            while !at.is_null()
                && self.nodes[at.index()].hash.is_some()
                && !std::mem::replace(&mut seen[at.index()], true)
            {
                path.push(at);
                at = self.nodes[at.index()].parent;
            }
            while let Some(block) = path.pop() {
                out.push(self.event(block, true));
            }
        }
    }

    // ---- inside --------------------------------------------------------------------------------------------------------

    /// Takes a block that has just left the cached queue out of the index.
    pub(crate) fn unindex(&mut self, block: Block) {
        if self.events.is_some() {
            self.log(block, false);
        }
        self.index.remove(&self.nodes, block);
        self.nodes[block.index()].hash = BlockHash::NONE;
        self.nodes[block.index()].parent = Block::NULL;
        self.parts[block.index()] = PartSet::EMPTY;
        self.snapshots.forget(block);
    }

    fn event(&self, block: Block, stored: bool) -> Event {
        let node = self.nodes[block.index()];
        let namespace = self.namespaces[block.index()];
        let parent = if node.parent.is_null() { namespace } else { self.nodes[node.parent.index()].hash };
        if stored {
            Event::Stored { hash: node.hash, parent, namespace }
        } else {
            Event::Removed { hash: node.hash, parent, namespace }
        }
    }

    fn log(&mut self, block: Block, stored: bool) {
        let event = self.event(block, stored);
        if let Some(log) = &mut self.events {
            self.stats.events_lost += log.push(event);
        }
    }
}
