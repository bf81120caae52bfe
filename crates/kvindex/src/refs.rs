//! References: who holds a block, and with it the block's whole prefix.

use crate::error::PoolError;
use crate::ids::{Block, Fence, Owner, TransferId};
use crate::pool::{BlockPool, OpenTransfer};

impl BlockPool {
    /// Takes a reference on an indexed block and appends its prefix to `out`, first block first. Returns the length.
    ///
    /// # Errors
    /// [`PoolError::BadBlock`], [`PoolError::NotIndexed`].
    pub fn pin_chain(&mut self, leaf: Block, owner: Owner, out: &mut Vec<Block>) -> Result<usize, PoolError> {
        self.indexed(leaf)?;
        let start = out.len();
        self.refs[leaf.index()][owner.slot()] += 1;
        self.ref_totals[owner.slot()] += 1;
        let kind = owner.slot();
        let mut at = leaf;
        // Counters of blocks that were cached stay in registers over the walk; most of a cold prefix is.
        let mut left_cached = 0;
        loop {
            out.push(at);
            let node = &mut self.nodes[at.index()];
            let before = node.pins;
            node.pins[kind] += 1;
            let (parent, stamp) = (node.parent, node.stamp);
            if before == [0, 0] {
                self.cached.leave(stamp);
                left_cached += 1;
            } else if before[kind] == 0 {
                self.mixed_raised(owner);
            }
            at = parent;
            if at.is_null() || before[kind] != 0 {
                break;
            }
        }
        self.held += left_cached;
        if owner == Owner::Transfer {
            self.held_by_transfers += left_cached;
        }
        while !at.is_null() {
            out.push(at);
            at = self.nodes[at.index()].parent;
        }
        out[start..].reverse();
        Ok(out.len() - start)
    }

    /// Takes another reference on a block that is indexed, or private and held.
    ///
    /// # Errors
    /// [`PoolError::BadBlock`]; [`PoolError::NotHeld`] for a block that is free or parked.
    pub fn pin(&mut self, block: Block, owner: Owner) -> Result<(), PoolError> {
        let node = self.node(block)?;
        if !node.hash.is_some() && !node.is_held() {
            return Err(self.misuse(PoolError::NotHeld(block)));
        }
        self.add_ref(block, owner);
        Ok(())
    }

    /// Drops one reference on an indexed block. Blocks of its prefix that nothing holds any more become cached, leaf first.
    ///
    /// # Errors
    /// [`PoolError::BadBlock`], [`PoolError::NotIndexed`], [`PoolError::NotHeld`], [`PoolError::UnknownTransfer`].
    pub fn unpin(&mut self, block: Block, owner: Owner, fence: Fence) -> Result<(), PoolError> {
        self.indexed(block)?;
        self.release(block, owner, fence)
    }

    /// Drops one reference on a private block. With the last one the block is parked, or free if its fence is open.
    ///
    /// # Errors
    /// [`PoolError::BadBlock`], [`PoolError::NotPrivate`], [`PoolError::NotHeld`], [`PoolError::UnknownTransfer`].
    pub fn release_private(&mut self, block: Block, owner: Owner, fence: Fence) -> Result<(), PoolError> {
        if self.node(block)?.hash.is_some() {
            return Err(self.misuse(PoolError::NotPrivate(block)));
        }
        self.release(block, owner, fence)
    }

    // ---- transfers -----------------------------------------------------------------------------------------------------

    /// From now on fences may name this transfer. False if it is open already.
    pub fn open_transfer(&mut self, id: TransferId) -> bool {
        if self.transfers.iter().any(|t| t.id == id) {
            return false;
        }
        self.transfers.push(OpenTransfer { id, handed: Vec::new() });
        true
    }

    /// Drops every reference that was released behind the transfer. False, and no effect, if it is not open. References that
    /// the transfer took itself (`Owner::Transfer`) are its user's to drop.
    pub fn close_transfer(&mut self, id: TransferId) -> bool {
        let Some(at) = self.transfers.iter().position(|t| t.id == id) else {
            return false;
        };
        for block in self.transfers.swap_remove(at).handed {
            self.drop_ref(block, Owner::Transfer);
        }
        true
    }

    // ---- inside --------------------------------------------------------------------------------------------------------

    #[inline]
    pub(crate) fn raise_private(&mut self, block: Block, owner: Owner) {
        let kind = owner.slot();
        self.refs[block.index()][kind] += 1;
        self.ref_totals[kind] += 1;
        self.nodes[block.index()].pins[kind] += 1;
        if owner == Owner::Transfer {
            self.held_by_transfers += 1;
        }
    }

    /// A block that only the other kind held is now held by `owner` too.
    #[inline]
    fn mixed_raised(&mut self, owner: Owner) {
        if owner == Owner::Sequence {
            self.held_by_transfers -= 1;
        }
    }

    pub(crate) fn add_ref(&mut self, block: Block, owner: Owner) {
        self.refs[block.index()][owner.slot()] += 1;
        self.ref_totals[owner.slot()] += 1;
        self.raise(block, owner);
    }

    /// One more holder of that kind: up the chain until a block already had one.
    pub(crate) fn raise(&mut self, block: Block, owner: Owner) {
        let kind = owner.slot();
        let mut at = block;
        while !at.is_null() {
            let node = &mut self.nodes[at.index()];
            let before = node.pins;
            node.pins[kind] += 1;
            let (parent, stamp) = (node.parent, node.stamp);
            if before[kind] != 0 {
                return;
            }
            if before == [0, 0] {
                self.cached.leave(stamp);
                self.held += 1;
                if owner == Owner::Transfer {
                    self.held_by_transfers += 1;
                }
            } else {
                self.mixed_raised(owner);
            }
            at = parent;
        }
    }

    fn release(&mut self, block: Block, owner: Owner, fence: Fence) -> Result<(), PoolError> {
        if self.refs[block.index()][owner.slot()] == 0 {
            return Err(self.misuse(PoolError::NotHeld(block)));
        }
        match fence {
            Fence::Open => self.drop_ref(block, owner),
            Fence::Step(step) => {
                self.last_fence = self.last_fence.max(step.0);
                self.drop_ref(block, owner);
            }
            Fence::Transfer(id) => {
                let Some(at) = self.transfers.iter().position(|t| t.id == id) else {
                    return Err(self.misuse(PoolError::UnknownTransfer(id)));
                };
                self.transfers[at].handed.push(block);
                if owner == Owner::Sequence {
                    self.add_ref(block, Owner::Transfer);
                    self.drop_ref(block, Owner::Sequence);
                }
            }
        }
        Ok(())
    }

    /// One reference less: up the chain until a block keeps one of that kind.
    fn drop_ref(&mut self, block: Block, owner: Owner) {
        let kind = owner.slot();
        self.refs[block.index()][kind] -= 1;
        self.ref_totals[kind] -= 1;
        let fence = if self.last_fence < self.opened { 0 } else { self.last_fence };
        let mut at = block;
        while !at.is_null() {
            let node = &mut self.nodes[at.index()];
            node.pins[kind] -= 1;
            let (pins, parent, hashed) = (node.pins, node.parent, node.hash.is_some());
            if pins[kind] != 0 {
                return;
            }
            if pins == [0, 0] {
                self.held -= 1;
                if owner == Owner::Transfer {
                    self.held_by_transfers -= 1;
                }
                if hashed {
                    self.cached.push(&mut self.nodes, at, fence);
                } else if fence == 0 {
                    self.free_block(at);
                } else {
                    self.parked.push(&mut self.nodes, at, fence);
                }
            } else if owner == Owner::Sequence {
                self.held_by_transfers += 1;
            }
            at = parent;
        }
    }
}
