//! A request as Python writes it, turned into `Prepared`.

use deepinfer_kvindex::{Extra, ExtraKind};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyString, PyTuple};

use crate::error;

/// Token ids of a sequence of ints or of a one-dimensional buffer of 32- or 64-bit integers.
pub fn tokens(ids: &Bound<'_, PyAny>, vocab: u32) -> PyResult<Vec<u32>> {
    if ids.is_instance_of::<PyList>() || ids.is_instance_of::<PyTuple>() {
        return match ids.extract::<Vec<u32>>() {
            Ok(found) => Ok(found),
            Err(_) => checked(ids, vocab),
        };
    }
    if let Ok(buffer) = PyBuffer::<u32>::get(ids) {
        return buffer.to_vec(ids.py());
    }
    if let Ok(buffer) = PyBuffer::<i32>::get(ids) {
        let signed = buffer.to_vec(ids.py())?;
        return signed.into_iter().map(|id| in_range(ids.py(), i64::from(id), vocab)).collect();
    }
    if let Ok(buffer) = PyBuffer::<i64>::get(ids) {
        let signed = buffer.to_vec(ids.py())?;
        return signed.into_iter().map(|id| in_range(ids.py(), id, vocab)).collect();
    }
    checked(ids, vocab)
}

fn checked(ids: &Bound<'_, PyAny>, vocab: u32) -> PyResult<Vec<u32>> {
    if ids.is_instance_of::<PyString>() {
        return Err(PyTypeError::new_err("token ids are integers; encode the text first"));
    }
    ids.try_iter()?.map(|id| in_range(ids.py(), id?.extract()?, vocab)).collect()
}

fn in_range(py: Python<'_>, id: i64, vocab: u32) -> PyResult<u32> {
    u32::try_from(id).map_err(|_| {
        error::named(py, "TokenOutOfRangeError", format!("token id {id} is outside the vocabulary of {vocab}"))
    })
}

/// Extras of the chain hash: `(kind, position, data)`, kind being "image", "adapter" or a caller's own 16-bit number.
pub fn extras(given: Vec<(Bound<'_, PyAny>, u32, Vec<u8>)>) -> PyResult<Vec<Extra>> {
    given
        .into_iter()
        .map(|(kind, position, data)| {
            let kind = if let Ok(name) = kind.extract::<String>() {
                match name.as_str() {
                    "image" => ExtraKind::Image,
                    "adapter" => ExtraKind::Adapter,
                    _ => {
                        return Err(PyValueError::new_err(format!(
                            "extra kind {name:?}: use \"image\", \"adapter\" or a number"
                        )));
                    }
                }
            } else {
                ExtraKind::Other(kind.extract()?)
            };
            Ok(Extra { kind, position, data })
        })
        .collect()
}
