//! Words of the core as Python reads them: memoryviews of int32 over a copy, valid for as long as they are kept.

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyMemoryView};

/// A copy of these words. Makes no object that the garbage collector tracks, so it may be called under the core's lock: no
/// finalizer can run and call the core again.
pub fn int32_bytes(py: Python<'_>, words: impl ExactSizeIterator<Item = i32>) -> PyResult<Bound<'_, PyBytes>> {
    PyBytes::new_with(py, 4 * words.len(), |to| {
        for (to, word) in to.chunks_exact_mut(4).zip(words) {
            to.copy_from_slice(&word.to_ne_bytes());
        }
        Ok(())
    })
}

/// The copy as a read-only, one-dimensional memoryview of format `i`.
pub fn int32_view<'py>(bytes: &Bound<'py, PyBytes>) -> PyResult<Bound<'py, PyAny>> {
    PyMemoryView::from(bytes)?.call_method1("cast", ("i",))
}
