//! Chains on their way between the index and a store, and sequences that wait for one to arrive.
//!
//! A fetch fills blocks of its own; what has arrived enters the index and is anybody's, so no sequence holds it and none has to
//! live until then. A save holds a chain of the index while it is read. Both are open transfers like others; the bytes, and where
//! they lie, are the mover's.

use crate::config::ConfigError;
use crate::error::TransferError;
use crate::pool::Status;
use crate::scheduler::Scheduler;
use crate::transfers::{Kind, Open};
use deepinfer_kvindex::{Block, BlockHash, Fence, Owner, Part, Seq, StepId, Tier, TransferId};

/// What a fetch must write before it is ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fetch {
    /// To be ended.
    pub transfer: TransferId,
    /// Leading positions that are in place already.
    pub present: u32,
    /// Positions in all.
    pub tokens: u32,
    /// Blocks of the positions from `present` on, first block first.
    pub blocks: Vec<Block>,
    /// Newest planned step, 0 when none is in flight: whoever wrote or reads these blocks before does so in it at the latest. The
    /// mover writes behind it in the device's order, and ahead of the next step that is planned after the end of the fetch.
    pub after: StepId,
}

/// Which chains are given to be saved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Saves {
    /// None.
    #[default]
    Off,
    /// Of prompts whose prefill has completed, and of requests that end by themselves or are handed over.
    OnFinish,
    /// Also of every step that completed a grain.
    Through,
}

/// Grains of a chain that may be read until the save is ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChainSave {
    /// To be ended.
    pub transfer: TransferId,
    /// Whose they are. It may have ended.
    pub seq: Seq,
    /// Chain hash of the last block of each grain.
    pub keys: Vec<BlockHash>,
    /// That of the grain before the first of them; none at the begin of a chain.
    pub parent: BlockHash,
    /// Position that the first grain begins at.
    pub first: u32,
    /// Their blocks, first block first.
    pub blocks: Vec<Block>,
}

/// An open fetch.
pub(crate) struct Fetching {
    /// What the index had, held; null for nothing.
    pub leaf: Block,
    /// Blocks up to there.
    present: u32,
    /// Those to be written, held, and the hash of each.
    pub blocks: Vec<Block>,
    hashes: Vec<BlockHash>,
    /// That of the chain.
    root: BlockHash,
}

/// An open save.
pub(crate) struct Saving {
    /// Last block, held.
    pub leaf: Block,
    /// Last block of each grain: those that are marked.
    ends: Vec<Block>,
}

/// A chain that may have something to save.
#[derive(Clone, Copy, Debug)]
struct Noted {
    seq: Seq,
    /// Whole grains, in blocks.
    blocks: u32,
    hash: BlockHash,
}

/// What is worth saving.
#[derive(Default)]
pub(crate) struct StoreSide {
    saves: Saves,
    /// Blocks of a grain.
    grain: u32,
    /// Not held, and bounded: what nobody takes costs nothing.
    noted: Vec<Noted>,
    most: usize,
}

impl Scheduler {
    /// Chain hashes of the full blocks of a sequence, as far as they are hashed: those of its prompt from the start. Empty for a handle
    /// that names nothing.
    pub fn chain(&self, seq: Seq) -> Vec<BlockHash> {
        let known = self.seqs.get(seq).map(|cold| cold.hashes.clone());
        known.or_else(|| self.shared.queued(seq, |cold| cold.hashes.clone())).unwrap_or_default()
    }

    /// A request that was added with `fetch` waits no longer: it is admitted like any other. False if it was not waiting for that.
    pub fn end_wait(&mut self, seq: Seq) -> bool {
        let ended = match self.seqs.status(seq) {
            Some(Status::WaitKv) => self.stop_waiting(seq),
            // It has not begun to wait, and will not.
            Some(Status::WaitGrammar) => {
                self.seqs.get_mut(seq).is_some_and(|cold| std::mem::take(&mut cold.flags.fetch))
            }
            Some(_) => false,
            None => self.shared.queued(seq, |cold| std::mem::take(&mut cold.flags.fetch)).unwrap_or_default(),
        };
        let count = if ended { &mut self.metrics.fetch_waits_ended } else { &mut self.metrics.stale };
        *count += 1;
        ended
    }

    /// Queues a sequence that waits for a fetch.
    pub(crate) fn stop_waiting(&mut self, seq: Seq) -> bool {
        let waits = self.seqs.status(seq) == Some(Status::WaitKv)
            && self.seqs.get_mut(seq).is_some_and(|cold| std::mem::take(&mut cold.flags.fetch));
        if waits {
            self.stop_lease(seq);
            self.enqueue(seq);
        }
        waits
    }

    /// Reserves blocks for what the index lacks of the first `tokens` positions of a sequence that waits, whatever for, and holds what
    /// comes before them; whole blocks only. Leaves what the oldest waiting sequence and the growth of those who run may need.
    ///
    /// # Errors
    /// [`TransferError`]; [`TransferError::UnderWay`] where another fetch is bringing the block behind those that are there.
    pub fn begin_fetch(&mut self, seq: Seq, tokens: u32) -> Result<Fetch, TransferError> {
        let least = self.geometry.block_tokens;
        let wanted = (tokens >> self.geometry.shift) as usize;
        let own_root = self.shared.hasher().root();
        let part = |cold: &crate::pool::Cold| {
            let root = cold.hasher.as_ref().map_or(own_root, deepinfer_kvindex::ChainHasher::root);
            let most = (cold.hashes.len() as u32) << least.trailing_zeros();
            let hashes = cold.hashes.get(..wanted).filter(|some| !some.is_empty()).map(<[BlockHash]>::to_vec);
            hashes.map(|hashes| (hashes, root)).ok_or(TransferError::NoBlocks { tokens, least, most })
        };
        let (mut hashes, root) = match self.seqs.status(seq) {
            Some(Status::WaitGrammar | Status::WaitKv | Status::WaitFork | Status::Ready | Status::Swapped) => {
                self.seqs.get(seq).map_or(Err(TransferError::Stale(seq)), part)?
            }
            Some(Status::Finished) => return Err(TransferError::Stale(seq)),
            Some(_) => return Err(TransferError::Status(seq)),
            None => self.shared.queued(seq, |cold| part(cold)).unwrap_or(Err(TransferError::Stale(seq)))?,
        };
        let hit = self.kv.blocks.find_prefix(&hashes);
        let present = hit.blocks as u32;
        if let Some(next) = hashes.get(hit.blocks)
            && let Some(transfer) = self.brought_by(present, *next)
        {
            self.metrics.fetches_under_way += 1;
            return Err(TransferError::UnderWay { transfer, present: present << self.geometry.shift });
        }
        let need = (hashes.len() - hit.blocks) as u32;
        // Where nothing is missing, nothing is held for it.
        let leaf = if need > 0 { hit.leaf } else { Block::NULL };
        let cost = need + self.kv.blocks.pin_cost(leaf) + self.kept_for_head() + self.headroom();
        if need > 0 && cost > self.kv.available() {
            self.metrics.fetches_no_room += 1;
            return Err(TransferError::NoRoom { need });
        }
        let mut blocks = Vec::with_capacity(need as usize);
        if !leaf.is_null() {
            let held = self.kv.blocks.pin(leaf, Owner::Transfer);
            self.kv.misuse += u64::from(held.is_err());
        }
        // Cannot be refused: the cost was compared with what is available.
        let taken = self.kv.blocks.alloc_many(self.kv.now, Owner::Transfer, need, &mut blocks);
        self.kv.misuse += u64::from(!taken);
        hashes.drain(..hit.blocks);
        let fetching = Fetching { leaf, present, blocks: blocks.clone(), hashes, root };
        let transfer = self.transfers.insert(Open { seq, kind: Kind::Fetch(fetching) });
        self.metrics.fetches += 1;
        let at = |blocks: u32| blocks << self.geometry.shift;
        let (present, tokens) = (at(present), at(present + need));
        Ok(Fetch { transfer, present, tokens, blocks, after: self.newest_in_flight() })
    }

    /// The open fetch that brings the block at place `index` of a chain.
    fn brought_by(&self, index: u32, hash: BlockHash) -> Option<TransferId> {
        let brings = |fetching: &Fetching| {
            let at = index.checked_sub(fetching.present);
            at.and_then(|at| fetching.hashes.get(at as usize)) == Some(&hash)
        };
        self.transfers.fetches().find(|(_, fetching)| brings(fetching)).map(|(id, _)| id)
    }

    /// Positions up to `tokens` of a fetch have arrived, and its mover touches the blocks no more: those that are full may be hit from
    /// the next planned step on. The others go back. False, and only counted, if no such fetch is open.
    pub fn end_fetch(&mut self, transfer: TransferId, tokens: u32) -> bool {
        let Some(Open { kind: Kind::Fetch(fetching), .. }) =
            self.transfers.remove_if(transfer, |kind| matches!(kind, Kind::Fetch(_)))
        else {
            self.metrics.stale += 1;
            return false;
        };
        self.finish_fetch(fetching, tokens);
        true
    }

    pub(crate) fn finish_fetch(&mut self, fetching: Fetching, tokens: u32) {
        let Fetching { leaf, present, blocks, hashes, root } = fetching;
        let arrived = ((tokens >> self.geometry.shift).saturating_sub(present) as usize).min(blocks.len());
        self.metrics.fetches_ended += 1;
        self.metrics.fetches_failed += u64::from(arrived < blocks.len());
        let fence = Fence::Step(self.kv.launched);
        let mut cursor = leaf;
        let mut private = Vec::new();
        let mut at = 0;
        while at < arrived {
            let Some(done) = self.kv.publish(blocks[at], hashes[at], cursor, root) else { break };
            cursor = done.cursor;
            let marked = self.kv.blocks.set_part(cursor, Part::BlockKv, Tier::Store, true);
            self.kv.misuse += u64::from(marked.is_err());
            if done.duplicate {
                private.push(blocks[at]);
            }
            at += 1;
        }
        let duplicates = private.len() as u64;
        self.metrics.fetch_duplicates += duplicates;
        self.metrics.fetched_tokens += (at as u64 - duplicates) << self.geometry.shift;
        for &block in private.iter().chain(&blocks[at..]).rev() {
            self.kv.release_private(block, Owner::Transfer, fence);
        }
        if !cursor.is_null() {
            self.kv.unpin(cursor, Owner::Transfer, fence);
        }
    }

    /// Which chains [`Scheduler::take_saves`] gives from now on, in grains of `grain` blocks.
    ///
    /// # Errors
    /// [`ConfigError::NoSaves`] without an index; [`ConfigError::TooSmall`] for a grain of nothing.
    pub fn set_saves(&mut self, saves: Saves, grain: u32) -> Result<(), ConfigError> {
        if saves != Saves::Off && !self.prefix_caching {
            return Err(ConfigError::NoSaves);
        }
        if saves != Saves::Off && grain == 0 {
            return Err(ConfigError::TooSmall { what: "grain_blocks", value: 0, least: 1 });
        }
        self.store.saves = saves;
        self.store.grain = grain.max(1);
        self.store.noted.clear();
        // A sequence is noted once a step, when its prompt has been computed and at its end.
        self.store.most = 8 * self.limits.max_num_seqs as usize;
        self.store.noted.reserve_exact(if saves == Saves::Off { 0 } else { self.store.most });
        Ok(())
    }

    /// A lane has published blocks `before..after`.
    #[inline]
    pub(crate) fn note_grains(&mut self, lane: usize, before: u32, after: u32) {
        if self.store.saves == Saves::Through && before / self.store.grain != after / self.store.grain {
            self.note_whole_grains(lane);
        }
    }

    /// A prompt has been computed.
    #[inline]
    pub(crate) fn note_chain(&mut self, lane: usize) {
        if self.store.saves != Saves::Off {
            self.note_whole_grains(lane);
        }
    }

    /// A request ends by itself.
    #[inline]
    pub(crate) fn note_end(&mut self, lane: usize) {
        if self.store.saves != Saves::Off {
            self.publish_filled(lane);
            self.note_whole_grains(lane);
        }
    }

    #[inline(never)]
    fn note_whole_grains(&mut self, lane: usize) {
        let seq = self.lanes.seq[lane];
        let Some(cold) = self.seqs.get(seq) else { return };
        let blocks = cold.published / self.store.grain * self.store.grain;
        let Some(&hash) = blocks.checked_sub(1).and_then(|last| cold.hashes.get(last as usize)) else { return };
        if self.store.noted.len() < self.store.most {
            self.store.noted.push(Noted { seq, blocks, hash });
        } else {
            self.metrics.saves_lost += 1;
        }
    }

    /// Whole grains that were completed since the last call and are in the store neither by a save nor by a fetch. Each is held, and
    /// given once, until [`Scheduler::end_save`].
    pub fn take_saves(&mut self) -> Vec<ChainSave> {
        if self.store.noted.is_empty() {
            return Vec::new();
        }
        let mut saves = Vec::new();
        // Newest first: it has what the older ones of its chain have.
        while let Some(noted) = self.store.noted.pop() {
            saves.extend(self.give_save(noted));
        }
        saves
    }

    fn give_save(&mut self, noted: Noted) -> Option<ChainSave> {
        let Noted { seq, blocks: mut first, hash } = noted;
        let Some(leaf) = self.kv.blocks.find(hash) else {
            self.metrics.saves_lost += 1;
            return None;
        };
        let (mut blocks, mut ends, mut at) = (Vec::new(), Vec::new(), leaf);
        while !at.is_null() && !self.kv.blocks.parts(at).has(Part::BlockKv, Tier::Store) {
            ends.push(at);
            for _ in 0..self.store.grain {
                blocks.push(at);
                at = self.kv.blocks.parent(at);
            }
            first -= self.store.grain;
        }
        if ends.is_empty() {
            return None;
        }
        blocks.reverse();
        ends.reverse();
        let keys = ends.iter().map(|&end| self.kv.blocks.hash(end)).collect();
        let parent = self.kv.blocks.hash(at);
        let mut refused = u64::from(self.kv.blocks.pin(leaf, Owner::Transfer).is_err());
        for &end in &ends {
            refused += u64::from(self.kv.blocks.set_part(end, Part::BlockKv, Tier::Store, true).is_err());
        }
        self.kv.misuse += refused;
        let transfer = self.transfers.insert(Open { seq, kind: Kind::Chain(Saving { leaf, ends }) });
        self.metrics.saves_given += 1;
        Some(ChainSave { transfer, seq, keys, parent, first: first << self.geometry.shift, blocks })
    }

    /// A save has been read and stored, or has failed: then it counts as not saved. False, and only counted, if no such save is open.
    pub fn end_save(&mut self, transfer: TransferId, ok: bool) -> bool {
        let Some(Open { kind: Kind::Chain(saving), .. }) =
            self.transfers.remove_if(transfer, |kind| matches!(kind, Kind::Chain(_)))
        else {
            self.metrics.stale += 1;
            return false;
        };
        self.finish_save(&saving, ok);
        true
    }

    pub(crate) fn finish_save(&mut self, saving: &Saving, ok: bool) {
        if !ok {
            self.metrics.saves_failed += 1;
            for &end in &saving.ends {
                let cleared = self.kv.blocks.set_part(end, Part::BlockKv, Tier::Store, false);
                self.kv.misuse += u64::from(cleared.is_err());
            }
        }
        self.kv.unpin(saving.leaf, Owner::Transfer, Fence::Step(self.kv.launched));
    }
}
