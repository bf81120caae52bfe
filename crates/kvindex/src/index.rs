//! Prefix index: hash → block, 8 bytes an entry.
//!
//! Addressed by the low 64 bits of the hash; the entry keeps the top 32 as a tag, so that a probe rarely touches a node
//! for nothing. A match is decided by all 128 bits, which live in the node.

use hashbrown::HashTable;

use crate::ids::{Block, BlockHash};
use crate::node::Node;

#[derive(Clone, Copy, Debug)]
struct Entry {
    tag: u32,
    block: Block,
}

#[derive(Debug)]
pub(crate) struct PrefixIndex {
    table: HashTable<Entry>,
}

const fn address(hash: BlockHash) -> u64 {
    hash.0 as u64
}

const fn tag(hash: BlockHash) -> u32 {
    (hash.0 >> 96) as u32
}

impl PrefixIndex {
    /// Room for every block at less than half load: removals then leave no tombstones and the table never rehashes.
    pub(crate) fn new(blocks: usize) -> Self {
        Self { table: HashTable::with_capacity(blocks * 2) }
    }

    pub(crate) fn len(&self) -> usize {
        self.table.len()
    }

    #[inline]
    pub(crate) fn find(&self, nodes: &[Node], hash: BlockHash) -> Option<Block> {
        let tag = tag(hash);
        self.table.find(address(hash), |e| e.tag == tag && nodes[e.block.index()].hash == hash).map(|e| e.block)
    }

    /// The caller has made sure that the hash is absent and that the node carries it.
    pub(crate) fn insert(&mut self, nodes: &[Node], block: Block) {
        let hash = nodes[block.index()].hash;
        self.table
            .insert_unique(address(hash), Entry { tag: tag(hash), block }, |e| address(nodes[e.block.index()].hash));
    }

    /// Removes the entry of a block whose node still carries the hash.
    pub(crate) fn remove(&mut self, nodes: &[Node], block: Block) -> bool {
        let hash = nodes[block.index()].hash;
        match self.table.find_entry(address(hash), |e| e.block == block) {
            Ok(entry) => {
                entry.remove();
                true
            }
            Err(_) => false,
        }
    }

    /// Longest prefix of `hashes` that is indexed, as (length, its last block).
    ///
    /// What is indexed is closed under prefixes, so lengths 1, 4, 16, … are tried and the last gap is bisected.
    pub(crate) fn longest_prefix(&self, nodes: &[Node], hashes: &[BlockHash]) -> (usize, Block) {
        let mut found = (0, Block::NULL);
        let mut absent = hashes.len() + 1;
        let mut probe = 1;
        while found.0 < hashes.len() {
            let length = probe.min(hashes.len());
            if let Some(block) = self.find(nodes, hashes[length - 1]) {
                found = (length, block);
                probe = length * 4;
            } else {
                absent = length;
                break;
            }
        }
        while absent - found.0 > 1 {
            let middle = found.0 + (absent - found.0) / 2;
            match self.find(nodes, hashes[middle - 1]) {
                Some(block) => found = (middle, block),
                None => absent = middle,
            }
        }
        found
    }
}
