//! Memory of Python objects that a call reads or fills with the interpreter lock let go of.

use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;

use crate::error;

/// What a fault of a given buffer is raised as.
pub const CLASS: &str = "InvalidRequestError";

/// Host memory of a Python object, kept in place while this lives.
pub struct Memory {
    start: *mut u8,
    len: usize,
    _owner: Owner,
}

enum Owner {
    Tensor(#[allow(dead_code, reason = "held for its lifetime only")] Py<PyAny>),
    Buffer(#[allow(dead_code, reason = "held for its lifetime only")] PyUntypedBuffer),
}

// SAFETY: the pointer is used by the one call that made it, on the thread of that call or not at all; the owners are only kept.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Of a tensor or buffer; refused where it is not whole, not here, or not writable though it has to be.
    pub fn new(object: &Bound<'_, PyAny>, writable: bool) -> PyResult<Self> {
        let py = object.py();
        let wrong = |what: &str| error::named(py, CLASS, what.to_owned());
        if object.hasattr("data_ptr")? {
            let device: String = object.getattr("device")?.getattr("type")?.extract()?;
            if device != "cpu" {
                return Err(wrong("a tensor is not in host memory; copy it to the host first"));
            }
            if !object.call_method0("is_contiguous")?.extract::<bool>()? {
                return Err(wrong("a tensor is not contiguous"));
            }
            let start: usize = object.call_method0("data_ptr")?.extract()?;
            let len = object.getattr("nbytes")?.extract()?;
            let start = std::ptr::with_exposed_provenance_mut(start);
            return Ok(Self { start, len, _owner: Owner::Tensor(object.clone().unbind()) });
        }
        let buffer = PyUntypedBuffer::get(object)?;
        if !buffer.is_c_contiguous() {
            return Err(wrong("a buffer is not C-contiguous"));
        }
        if writable && buffer.readonly() {
            return Err(wrong("a buffer is read-only"));
        }
        Ok(Self { start: buffer.buf_ptr().cast(), len: buffer.len_bytes(), _owner: Owner::Buffer(buffer) })
    }

    /// Addresses of the bytes.
    pub fn range(&self) -> std::ops::Range<usize> {
        self.start.addr()..self.start.addr() + self.len
    }

    /// # Safety
    /// Nobody writes to the memory meanwhile.
    pub unsafe fn bytes(&self) -> &[u8] {
        // An empty buffer may have no address.
        if self.len == 0 {
            return &[];
        }
        // SAFETY: the owner keeps that many bytes there.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }

    /// # Safety
    /// Nobody reads or writes the memory meanwhile.
    pub unsafe fn bytes_mut(&mut self) -> &mut [u8] {
        if self.len == 0 {
            return &mut [];
        }
        // SAFETY: the owner keeps that many writable bytes there.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}
