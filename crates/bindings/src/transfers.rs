//! Transfers as Python sees them: one int as the handle, block ids as an int32 memoryview.

use deepinfer_scheduler::{Block, Load, Save, Scheduler, StateSlot, TransferId};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

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

fn dict<'py>(
    py: Python<'py>,
    transfer: TransferId,
    blocks: &[Block],
    pages: &[Vec<u32>],
    slot: StateSlot,
    tokens: u32,
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
    dict.set_item("state_slot", slot.0)?;
    dict.set_item("tokens", tokens)?;
    Ok(dict)
}
