//! Transfers as Python sees them: one int as the handle, block ids as an int32 memoryview.

use deepinfer_scheduler::{Block, Load, Save, StateSlot, TransferId};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::output;

/// `generation << 32 | index`, as for sequences.
const fn to_u64(id: TransferId) -> u64 {
    ((id.generation as u64) << 32) | id.index as u64
}

/// Inverse of [`to_u64`].
pub const fn from_u64(word: u64) -> TransferId {
    TransferId { index: word as u32, generation: (word >> 32) as u32 }
}

/// What a save may read.
pub fn save<'py>(py: Python<'py>, save: &Save) -> PyResult<Bound<'py, PyDict>> {
    dict(py, save.transfer, &save.blocks, save.slot, save.tokens)
}

/// What a load must write.
pub fn load<'py>(py: Python<'py>, load: &Load) -> PyResult<Bound<'py, PyDict>> {
    let dict = dict(py, load.transfer, &load.blocks, load.slot, load.tokens)?;
    dict.set_item("present", load.present)?;
    Ok(dict)
}

fn dict<'py>(
    py: Python<'py>,
    transfer: TransferId,
    blocks: &[Block],
    slot: StateSlot,
    tokens: u32,
) -> PyResult<Bound<'py, PyDict>> {
    let blocks = output::int32_bytes(py, blocks.iter().map(|block| block.0.cast_signed()))?;
    let dict = PyDict::new(py);
    dict.set_item("transfer", to_u64(transfer))?;
    dict.set_item("blocks", output::int32_view(&blocks)?)?;
    dict.set_item("state_slot", slot.0)?;
    dict.set_item("tokens", tokens)?;
    Ok(dict)
}
