//! Transfers as Python sees them: one int as the handle, block ids as an int32 memoryview.

use deepinfer_scheduler::{Block, BlockHash, ChainSave, Fetch, Load, Save, Scheduler, StateSlot, TransferId};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

use crate::output;

/// `generation << 32 | index`, as for sequences.
const fn to_u64(id: TransferId) -> u64 {
    ((id.generation as u64) << 32) | id.index as u64
}

/// Inverse of [`to_u64`].
pub const fn from_u64(word: u64) -> TransferId {
    TransferId { index: word as u32, generation: (word >> 32) as u32 }
}

/// Page ids of blocks in each paged group, first block first.
pub fn pages(scheduler: &Scheduler, blocks: &[Block]) -> Vec<Vec<u32>> {
    let of_group = |(group, section): (usize, &deepinfer_scheduler::Section)| {
        blocks
            .iter()
            .flat_map(|&block| (0..1usize << section.pages_shift).map(move |j| scheduler.page(group, block, j)))
            .collect()
    };
    scheduler.sections().iter().enumerate().map(of_group).collect()
}

/// What a save may read.
pub fn save<'py>(py: Python<'py>, save: &Save, pages: &[Vec<u32>]) -> PyResult<Bound<'py, PyDict>> {
    dict(py, save.transfer, &save.blocks, pages, save.slot, save.tokens)
}

/// What a load must write.
pub fn load<'py>(py: Python<'py>, load: &Load, pages: &[Vec<u32>]) -> PyResult<Bound<'py, PyDict>> {
    let dict = dict(py, load.transfer, &load.blocks, pages, load.slot, load.tokens)?;
    dict.set_item("present", load.present)?;
    dict.set_item("after_step", load.after.0)?;
    Ok(dict)
}

/// Hashes as Python has them, 16 bytes each.
pub fn hash_bytes<'py>(py: Python<'py>, hashes: &[BlockHash]) -> Bound<'py, PyBytes> {
    PyBytes::new(py, hashes.iter().map(|hash| hash.0.to_le_bytes()).collect::<Vec<_>>().as_flattened())
}

/// What a fetch must write.
pub fn fetch<'py>(py: Python<'py>, fetch: &Fetch, pages: &[Vec<u32>]) -> PyResult<Bound<'py, PyDict>> {
    let dict = open(py, fetch.transfer, &fetch.blocks, pages)?;
    dict.set_item("present", fetch.present)?;
    dict.set_item("tokens", fetch.tokens)?;
    dict.set_item("after_step", fetch.after.0)?;
    dict.set_item("pending", 0)?;
    Ok(dict)
}

/// Nothing to write: another fetch is bringing what follows the first `present` positions.
pub fn pending(py: Python<'_>, other: TransferId, present: u32, groups: usize) -> PyResult<Bound<'_, PyDict>> {
    let dict = open(py, TransferId::default(), &[], &vec![Vec::new(); groups])?;
    dict.set_item("present", present)?;
    dict.set_item("tokens", present)?;
    dict.set_item("after_step", 0)?;
    dict.set_item("pending", to_u64(other))?;
    Ok(dict)
}

/// Grains to be saved.
pub fn chain_save<'py>(py: Python<'py>, save: &ChainSave, pages: &[Vec<u32>]) -> PyResult<Bound<'py, PyDict>> {
    let parents: Vec<BlockHash> = [save.parent].iter().chain(&save.keys).take(save.keys.len()).copied().collect();
    let dict = open(py, save.transfer, &save.blocks, pages)?;
    dict.set_item("seq", save.seq.to_u64())?;
    dict.set_item("keys", hash_bytes(py, &save.keys))?;
    dict.set_item("parents", hash_bytes(py, &parents))?;
    dict.set_item("first", save.first)?;
    Ok(dict)
}

fn dict<'py>(
    py: Python<'py>,
    transfer: TransferId,
    blocks: &[Block],
    pages: &[Vec<u32>],
    slot: StateSlot,
    tokens: u32,
) -> PyResult<Bound<'py, PyDict>> {
    let dict = open(py, transfer, blocks, pages)?;
    dict.set_item("state_slot", slot.0)?;
    dict.set_item("tokens", tokens)?;
    Ok(dict)
}

/// What all of them have.
fn open<'py>(
    py: Python<'py>,
    transfer: TransferId,
    blocks: &[Block],
    pages: &[Vec<u32>],
) -> PyResult<Bound<'py, PyDict>> {
    let blocks = output::int32_bytes(py, blocks.iter().map(|block| block.0.cast_signed()))?;
    let by_group = PyList::empty(py);
    for group in pages {
        let ids = output::int32_bytes(py, group.iter().map(|page| page.cast_signed()))?;
        by_group.append(output::int32_view(&ids)?)?;
    }
    let dict = PyDict::new(py);
    dict.set_item("pages", by_group)?;
    dict.set_item("transfer", to_u64(transfer))?;
    dict.set_item("blocks", output::int32_view(&blocks)?)?;
    Ok(dict)
}
