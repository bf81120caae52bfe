//! Caller-owned step memory: what Python gives, as the views that the scheduler writes through.

use deepinfer_scheduler::{Field, FieldView, RingView};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyKeyError;
use pyo3::prelude::*;

use crate::error;

/// What any fault of the given memory is raised as.
const CLASS: &str = "RingLayoutError";

/// Keeps the memory of one field alive, and with a buffer keeps its owner from resizing it.
pub enum Owner {
    /// A tensor.
    Tensor(#[allow(dead_code, reason = "held for its lifetime only")] Py<PyAny>),
    /// Anything with the buffer protocol.
    Buffer(#[allow(dead_code, reason = "held for its lifetime only")] PyBuffer<i32>),
}

/// Views of all slots and what keeps them valid. `slots` maps field names to int32 tensors or writable int32 buffers.
pub fn views(layout: &[Field], slots: &[Bound<'_, PyAny>]) -> PyResult<(Vec<RingView>, Vec<Owner>)> {
    let mut owners = Vec::new();
    let mut rings = Vec::new();
    for (index, slot) in slots.iter().enumerate() {
        let mut fields = Vec::new();
        for field in layout {
            let memory = slot.get_item(&field.name).map_err(|cause| {
                if cause.is_instance_of::<PyKeyError>(slot.py()) {
                    error::named(slot.py(), CLASS, format!("ring slot {index} has no field {:?}", field.name))
                } else {
                    cause
                }
            })?;
            let (view, owner) = memory_view(&memory).map_err(|cause| {
                error::named(
                    slot.py(),
                    CLASS,
                    format!("field {} of ring slot {index}: {}", field.name, cause.value(slot.py())),
                )
            })?;
            fields.push(view);
            owners.push(owner);
        }
        rings.push(RingView { fields });
    }
    Ok((rings, owners))
}

fn memory_view(memory: &Bound<'_, PyAny>) -> PyResult<(FieldView, Owner)> {
    if memory.hasattr("data_ptr")? { tensor_view(memory) } else { buffer_view(memory) }
}

fn tensor_view(tensor: &Bound<'_, PyAny>) -> PyResult<(FieldView, Owner)> {
    let py = tensor.py();
    let dtype = tensor.getattr("dtype")?.str()?.to_string();
    if dtype != "torch.int32" {
        return Err(error::named(py, CLASS, format!("the tensor is {dtype}; it must be torch.int32")));
    }
    let device: String = tensor.getattr("device")?.getattr("type")?.extract()?;
    if device != "cpu" {
        return Err(error::named(
            py,
            CLASS,
            format!("the tensor is on {device}; it must be in host memory, pinned or plain"),
        ));
    }
    if !tensor.call_method0("is_contiguous")?.extract::<bool>()? {
        return Err(error::named(py, CLASS, "the tensor is not contiguous".to_owned()));
    }
    let address: usize = tensor.call_method0("data_ptr")?.extract()?;
    let len: usize = tensor.call_method0("numel")?.extract()?;
    let words = std::ptr::with_exposed_provenance_mut(address);
    Ok((FieldView { words, len }, Owner::Tensor(tensor.clone().unbind())))
}

fn buffer_view(memory: &Bound<'_, PyAny>) -> PyResult<(FieldView, Owner)> {
    let py = memory.py();
    let buffer = PyBuffer::<i32>::get(memory)?;
    if buffer.readonly() {
        return Err(error::named(py, CLASS, "the buffer is read-only".to_owned()));
    }
    let Some(words) = buffer.as_slice_ptr() else {
        return Err(error::named(py, CLASS, "the buffer is not C-contiguous".to_owned()));
    };
    Ok((FieldView { words: words.as_ptr().cast(), len: words.len() }, Owner::Buffer(buffer)))
}
