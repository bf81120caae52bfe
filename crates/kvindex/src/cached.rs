//! Eviction order of cached blocks: a sequential queue of (block, stamp), oldest first.
//!
//! An entry is live while its block is still cached under the same stamp; a block that was pinned in between leaves a
//! stale entry behind, which is skipped. Pinning therefore never touches neighbours in a list. Stale entries are swept
//! out a few at a time with each push, so that the queue stays below twice the pool and no single call pays for it.
//!
//! Fences only grow along the queue (the pool sees to it), so the blocks whose fence is open form its head and one
//! counter per distinct fence tells how many they are.

use std::collections::VecDeque;

use crate::ids::Block;
use crate::node::Node;

#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    block: Block,
    stamp: u32,
}

/// Live entries behind one closed fence.
#[derive(Clone, Copy, Debug)]
struct Fenced {
    step: u64,
    first_stamp: u32,
    live: u32,
}

/// Entries the sweep looks at with each push.
const SWEEP: u32 = 4;

/// Positions grow without bound and are masked into the ring. Live spans: `head..kept` and `sweep..tail`; between sweeps
/// the first is empty and `sweep == head`.
#[derive(Debug)]
pub(crate) struct CachedQueue {
    ring: Box<[Entry]>,
    mask: u64,
    head: u64,
    kept: u64,
    sweep: u64,
    tail: u64,
    sweeping: bool,
    start_sweep: u64,
    next_stamp: u32,
    open: u32,
    fences: VecDeque<Fenced>,
    fenced: u32,
}

fn live(nodes: &[Node], entry: Entry) -> bool {
    let node = &nodes[entry.block.index()];
    node.stamp == entry.stamp && node.is_cached()
}

impl CachedQueue {
    pub(crate) fn new(blocks: usize) -> Self {
        let size = (blocks * 2 + 64).next_power_of_two();
        Self {
            ring: vec![Entry::default(); size].into_boxed_slice(),
            mask: size as u64 - 1,
            head: 0,
            kept: 0,
            sweep: 0,
            tail: 0,
            sweeping: false,
            start_sweep: (blocks + blocks / 2) as u64,
            next_stamp: 0,
            open: 0,
            fences: VecDeque::with_capacity(16),
            fenced: 0,
        }
    }

    #[inline]
    fn at(&self, position: u64) -> Entry {
        self.ring[(position & self.mask) as usize]
    }

    #[inline]
    fn put(&mut self, position: u64, entry: Entry) {
        self.ring[(position & self.mask) as usize] = entry;
    }

    /// Cached blocks in all.
    #[inline]
    pub(crate) fn len(&self) -> u32 {
        self.open + self.fenced
    }

    /// Cached blocks whose fence was closed at the last [`CachedQueue::open_fences`].
    #[inline]
    pub(crate) fn fenced(&self) -> u32 {
        self.fenced
    }

    /// Cached blocks that may be evicted once `now` is planned.
    #[inline]
    pub(crate) fn open_at(&self, now: u64) -> u32 {
        self.open + self.fences.iter().take_while(|f| f.step < now).map(|f| f.live).sum::<u32>()
    }

    pub(crate) fn open_fences(&mut self, now: u64) {
        while let Some(front) = self.fences.front()
            && front.step < now
        {
            self.open += front.live;
            self.fenced -= front.live;
            self.fences.pop_front();
        }
    }

    /// Queues a block that has just become cached. `fence` is 0 if open, else a step not smaller than any before it.
    pub(crate) fn push(&mut self, nodes: &mut [Node], block: Block, fence: u64) {
        if self.tail - self.head > self.mask || self.next_stamp == u32::MAX {
            // The block is cached again already: its last entry, left stale by the pin, must not come back to life.
            nodes[block.index()].stamp = u32::MAX;
            self.renumber(nodes);
        }
        let stamp = self.next_stamp;
        self.next_stamp += 1;
        nodes[block.index()].stamp = stamp;
        self.put(self.tail, Entry { block, stamp });
        self.tail += 1;
        if fence == 0 {
            self.open += 1;
        } else {
            self.fenced += 1;
            match self.fences.back_mut() {
                Some(back) if back.step == fence => back.live += 1,
                _ => self.fences.push_back(Fenced { step: fence, first_stamp: stamp, live: 1 }),
            }
        }
        if self.sweeping {
            self.sweep_some(nodes, SWEEP);
        } else if self.tail - self.head > self.start_sweep {
            self.begin_sweep();
        }
    }

    /// Takes note that the cached block with this stamp has been pinned.
    #[inline]
    pub(crate) fn leave(&mut self, stamp: u32) {
        match self.fences.front() {
            Some(front) if stamp >= front.first_stamp => self.leave_fenced(stamp),
            _ => self.open -= 1,
        }
    }

    fn leave_fenced(&mut self, stamp: u32) {
        if let Some(fence) = self.fences.iter_mut().rev().find(|f| f.first_stamp <= stamp) {
            fence.live -= 1;
            self.fenced -= 1;
        }
    }

    /// Takes the oldest block whose fence is open. It is a leaf: its children, if any, are older and gone.
    pub(crate) fn pop(&mut self, nodes: &[Node]) -> Option<Block> {
        if self.open == 0 {
            return None;
        }
        while self.head < self.tail {
            if self.sweeping && self.head == self.kept {
                // Everything swept so far has been taken: what remains starts at the sweep.
                self.head = self.sweep;
                self.sweeping = false;
                continue;
            }
            let entry = self.at(self.head);
            self.head += 1;
            if live(nodes, entry) {
                self.open -= 1;
                return Some(entry.block);
            }
        }
        None
    }

    fn begin_sweep(&mut self) {
        self.kept = self.head;
        self.sweep = self.head;
        self.sweeping = true;
    }

    fn sweep_some(&mut self, nodes: &[Node], steps: u32) {
        for _ in 0..steps {
            if self.sweep == self.tail {
                self.tail = self.kept;
                self.sweeping = false;
                return;
            }
            let entry = self.at(self.sweep);
            self.sweep += 1;
            if live(nodes, entry) {
                self.put(self.kept, entry);
                self.kept += 1;
            }
        }
    }

    /// Sweeps everything and restarts the stamps: once in 2³² pushes.
    fn renumber(&mut self, nodes: &mut [Node]) {
        let (head, mut kept) = (self.head, self.head);
        let resume = if self.sweeping { self.kept..self.sweep } else { head..head };
        for position in head..self.tail {
            let entry = self.at(position);
            if !resume.contains(&position) && live(nodes, entry) {
                self.put(kept, entry);
                kept += 1;
            }
        }
        self.tail = kept;
        self.sweeping = false;
        for (stamp, position) in (head..kept).enumerate() {
            let block = self.at(position).block;
            let stamp = stamp as u32;
            self.put(position, Entry { block, stamp });
            nodes[block.index()].stamp = stamp;
        }
        self.next_stamp = (kept - head) as u32;
        let mut first = self.open;
        for fence in &mut self.fences {
            fence.first_stamp = first;
            first += fence.live;
        }
    }

    /// Live blocks, oldest first, with the step of their fence (0: open). For the recount.
    pub(crate) fn live_blocks(&self, nodes: &[Node]) -> Vec<(Block, u64)> {
        let hole = if self.sweeping { self.kept..self.sweep } else { self.head..self.head };
        (self.head..self.tail)
            .filter(|p| !hole.contains(p))
            .map(|p| self.at(p))
            .filter(|&e| live(nodes, e))
            .map(|e| {
                let fence = self.fences.iter().rev().find(|f| f.first_stamp <= e.stamp);
                (e.block, fence.map_or(0, |f| f.step))
            })
            .collect()
    }

    /// Entries in the ring, stale ones included.
    pub(crate) fn span(&self) -> u64 {
        self.tail - self.head
    }

    /// Lets tests reach the end of the stamps.
    #[cfg(test)]
    pub(crate) fn set_next_stamp(&mut self, stamp: u32) {
        self.next_stamp = stamp;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::BlockHash;

    fn nodes(count: u32) -> Vec<Node> {
        (0..count).map(|i| Node { hash: BlockHash(u128::from(i)), ..Node::default() }).collect()
    }

    #[test]
    fn oldest_first_and_stale_entries_are_skipped() {
        let mut nodes = nodes(5);
        let mut queue = CachedQueue::new(5);
        for i in [1, 2, 3] {
            queue.push(&mut nodes, Block(i), 0);
        }
        queue.leave(nodes[1].stamp);
        queue.push(&mut nodes, Block(1), 0);
        assert_eq!(queue.len(), 3);
        let order: Vec<_> = std::iter::from_fn(|| queue.pop(&nodes)).map(|b| b.0).collect();
        assert_eq!(order, [2, 3, 1]);
        assert_eq!((queue.len(), queue.pop(&nodes)), (0, None));
    }

    #[test]
    fn a_closed_fence_holds_back_its_blocks_and_no_others() {
        let mut nodes = nodes(6);
        let mut queue = CachedQueue::new(6);
        for (i, fence) in [(1, 0), (2, 7), (3, 7), (4, 9)] {
            queue.push(&mut nodes, Block(i), fence);
        }
        assert_eq!([1, 7, 8, 9, 10].map(|now| queue.open_at(now)), [1, 1, 3, 3, 4]);
        assert_eq!(queue.pop(&nodes), Some(Block(1)));
        assert_eq!(queue.pop(&nodes), None);
        queue.leave(nodes[3].stamp);
        nodes[3].pins[0] = 1;
        queue.open_fences(8);
        assert_eq!((queue.open_at(8), queue.fenced()), (1, 1));
        assert_eq!(queue.pop(&nodes), Some(Block(2)));
        assert_eq!(queue.pop(&nodes), None);
        queue.open_fences(10);
        assert_eq!(queue.pop(&nodes), Some(Block(4)));
    }

    #[test]
    fn order_and_length_survive_sweeps_and_the_end_of_the_stamps() {
        let blocks = 40;
        let mut nodes = nodes(blocks);
        let mut queue = CachedQueue::new(blocks as usize);
        // Blocks with the step of their fence, oldest first.
        let mut order: Vec<(Block, u64)> = Vec::new();
        let mut seed = 1u32;
        let (mut swept, mut restarted) = (0, 0);
        for round in 0..20_000u64 {
            let sweeping = queue.sweeping;
            if round % 101 == 0 && queue.next_stamp < u32::MAX - 30_000 {
                queue.set_next_stamp(u32::MAX - 20);
            }
            let (stamp, step) = (queue.next_stamp, 3 + round / 10);
            queue.open_fences(step - 2);
            for entry in order.iter_mut().filter(|e| e.1 < step - 2) {
                entry.1 = 0;
            }
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let pick = Block(1 + (seed >> 8) % (blocks - 1));
            if let Some(at) = order.iter().position(|e| e.0 == pick) {
                order.remove(at);
                queue.leave(nodes[pick.index()].stamp);
                nodes[pick.index()].pins[0] = 1;
            } else {
                nodes[pick.index()].pins[0] = 0;
                queue.push(&mut nodes, pick, step);
                order.push((pick, step));
            }
            if round % 997 == 0 && order.first().is_some_and(|e| e.1 == 0) {
                let (oldest, _) = order.remove(0);
                assert_eq!(queue.pop(&nodes), Some(oldest));
                nodes[oldest.index()].pins[0] = 1;
            }
            assert_eq!(queue.len() as usize, order.len());
            assert_eq!(queue.fenced() as usize, order.iter().filter(|e| e.1 != 0).count());
            assert!(queue.span() <= 2 * u64::from(blocks) + 4);
            restarted += usize::from(queue.next_stamp < stamp);
            swept += usize::from(sweeping && !queue.sweeping);
            assert_eq!(queue.live_blocks(&nodes), order);
        }
        assert!(swept > 100 && restarted > 100, "only {swept} sweeps ended, stamps restarted {restarted} times");
    }
}
