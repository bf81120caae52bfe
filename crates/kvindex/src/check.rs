//! Full recount of a pool from its nodes, for tests and for a debug endpoint. Never on a step path.

use crate::ids::{Block, Owner};
use crate::parts::PartSet;
use crate::pool::BlockPool;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Free,
    Cached,
    Held,
    Parked,
}

impl BlockPool {
    /// Recounts everything that is kept incrementally and checks every invariant of the pool.
    ///
    /// # Errors
    /// What disagrees.
    pub fn check(&self) -> Result<(), String> {
        let states = self.recount_lists()?;
        self.recount_states(&states)?;
        self.recount_pins(&states)?;
        self.check_index(&states)?;
        self.check_eviction_order()?;
        self.snapshots.check()?;
        self.check_slices()?;
        self.check_pages(&states)
    }

    /// [`BlockPool::check`], and that the direct references are exactly those in `holders` (one entry a reference).
    ///
    /// # Errors
    /// What disagrees.
    pub fn check_holders(&self, holders: impl IntoIterator<Item = (Block, Owner)>) -> Result<(), String> {
        self.check()?;
        let mut refs = vec![[0u32; 2]; self.nodes.len()];
        for (block, owner) in holders {
            refs[block.index()][owner.slot()] += 1;
        }
        for transfer in &self.transfers {
            for block in &transfer.handed {
                refs[block.index()][Owner::Transfer.slot()] += 1;
            }
        }
        for (id, (kept, seen)) in self.refs.iter().zip(&refs).enumerate() {
            if kept != seen {
                return Err(format!("block {id}: references kept {kept:?}, holders say {seen:?}"));
            }
        }
        Ok(())
    }

    fn recount_lists(&self) -> Result<Vec<Option<State>>, String> {
        let mut states = vec![None; self.nodes.len()];
        let mut put = |block: Block, state: State| {
            if block.is_null() || states[block.index()].replace(state).is_some() {
                Err(format!("block {} is in two states at once", block.0))
            } else {
                Ok(())
            }
        };
        let mut at = self.free_head;
        let mut free = 0;
        while !at.is_null() {
            put(at, State::Free)?;
            free += 1;
            at = self.nodes[at.index()].parent;
        }
        if free != self.free {
            return Err(format!("free list has {free} blocks, counter says {}", self.free));
        }
        for run in self.parked.runs() {
            let (mut at, mut last, mut blocks) = (run.first, Block::NULL, 0);
            while !at.is_null() {
                put(at, State::Parked)?;
                blocks += 1;
                last = at;
                at = self.nodes[at.index()].parent;
            }
            if (last, blocks) != (run.last, run.blocks) {
                return Err(format!("parked run behind step {} has {blocks} blocks, kept {}", run.step, run.blocks));
            }
        }
        for (id, node) in self.nodes.iter().enumerate().skip(1) {
            if node.is_held() {
                put(Block(id as u32), State::Held)?;
            } else if node.is_cached() {
                put(Block(id as u32), State::Cached)?;
            }
        }
        Ok(states)
    }

    fn recount_states(&self, states: &[Option<State>]) -> Result<(), String> {
        if let Some(id) = states.iter().skip(1).position(Option::is_none) {
            return Err(format!("block {} is in no state", id + 1));
        }
        let number = |state| states.iter().filter(|&&s| s == Some(state)).count() as u32;
        let counts = self.counts(0);
        let seen = [State::Free, State::Cached, State::Held, State::Parked].map(number);
        if seen != [counts.free, counts.cached, counts.held, counts.parked] {
            return Err(format!("recounted (free, cached, held, parked) = {seen:?}, kept {counts:?}"));
        }
        for group in 0..self.groups() {
            if !self.counts(group).adds_up() {
                return Err(format!("counts of group {group} do not add up: {:?}", self.counts(group)));
            }
        }
        Ok(())
    }

    fn recount_pins(&self, states: &[Option<State>]) -> Result<(), String> {
        let mut pins = self.refs.to_vec();
        for node in self.nodes.iter().skip(1).filter(|n| n.hash.is_some() && !n.parent.is_null()) {
            for (pin, &by) in pins[node.parent.index()].iter_mut().zip(&node.pins) {
                *pin += u32::from(by > 0);
            }
        }
        let mut totals = [0; 2];
        let mut by_transfers = 0;
        for (id, node) in self.nodes.iter().enumerate() {
            if node.pins != pins[id] {
                return Err(format!("block {id}: pins kept {:?}, recounted {:?}", node.pins, pins[id]));
            }
            totals[0] += u64::from(self.refs[id][0]);
            totals[1] += u64::from(self.refs[id][1]);
            by_transfers += u32::from(node.pins[0] == 0 && node.pins[1] > 0);
        }
        if totals != self.ref_totals || by_transfers != self.held_by_transfers {
            return Err(format!(
                "references {totals:?} and {by_transfers} blocks held by transfers, kept {:?} and {}",
                self.ref_totals, self.held_by_transfers
            ));
        }
        for (id, node) in self.nodes.iter().enumerate().skip(1) {
            let is_private = states[id] == Some(State::Held) && !node.hash.is_some();
            if is_private && !node.parent.is_null() {
                return Err(format!("private block {id} has a parent"));
            }
        }
        Ok(())
    }

    fn check_index(&self, states: &[Option<State>]) -> Result<(), String> {
        let mut hashed = 0;
        for (id, node) in self.nodes.iter().enumerate().skip(1).filter(|(_, n)| n.hash.is_some()) {
            hashed += 1;
            if self.index.find(&self.nodes, node.hash) != Some(Block(id as u32)) {
                return Err(format!("block {id} carries a hash that the index does not find"));
            }
            if !node.parent.is_null() && !self.nodes[node.parent.index()].hash.is_some() {
                return Err(format!("the parent of indexed block {id} is not indexed"));
            }
        }
        if hashed != self.index.len() {
            return Err(format!("{hashed} blocks carry a hash, the index has {}", self.index.len()));
        }
        for (id, parts) in self.parts.iter().enumerate() {
            let indexed = matches!(states[id], Some(State::Cached)) || self.nodes[id].hash.is_some();
            if !indexed && *parts != PartSet::EMPTY {
                return Err(format!("block {id} is not indexed and has parts"));
            }
        }
        Ok(())
    }

    fn check_eviction_order(&self) -> Result<(), String> {
        let order = self.cached.live_blocks(&self.nodes);
        if order.len() != self.cached.len() as usize {
            return Err(format!("cached queue has {} live entries, counter says {}", order.len(), self.cached.len()));
        }
        let mut place = vec![usize::MAX; self.nodes.len()];
        for (at, (block, _)) in order.iter().enumerate() {
            place[block.index()] = at;
        }
        for (id, node) in self.nodes.iter().enumerate().skip(1).filter(|(_, n)| n.hash.is_some()) {
            let (own, parents) = (place[id], place[node.parent.index()]);
            if !node.parent.is_null() && parents != usize::MAX && own >= parents {
                return Err(format!("block {id} would be evicted after its parent {}", node.parent.0));
            }
        }
        if order.windows(2).any(|w| w[0].1 > w[1].1) {
            return Err("fences of the cached queue go back".to_owned());
        }
        let fenced = order.iter().filter(|(_, step)| *step != 0).count() as u32;
        if fenced != self.cached.fenced() {
            return Err(format!("{fenced} cached blocks are fenced, counter says {}", self.cached.fenced()));
        }
        if self.cached.span() > 2 * self.nodes.len() as u64 + 4 {
            return Err("the cached queue is longer than twice the pool".to_owned());
        }
        Ok(())
    }

    fn check_pages(&self, states: &[Option<State>]) -> Result<(), String> {
        for (number, group) in self.further.iter().enumerate() {
            let mut seen = vec![false; group.total as usize];
            let mut once = |page: u32| {
                if page == 0 || std::mem::replace(&mut seen[page as usize], true) {
                    Err(format!("group {}: page {page} is null or owned twice", number + 1))
                } else {
                    Ok(())
                }
            };
            group.free.iter().try_for_each(|&p| once(p))?;
            for (id, state) in states.iter().enumerate() {
                let pages = group.pages(Block(id as u32));
                if matches!(state, None | Some(State::Free)) {
                    if pages.iter().any(|&p| p != 0) {
                        return Err(format!("group {}: unused block {id} has pages", number + 1));
                    }
                } else {
                    pages.iter().try_for_each(|&p| once(p))?;
                }
            }
        }
        Ok(())
    }
}
