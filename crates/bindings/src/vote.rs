//! A rank group that Python reaches: an object with `start`, `wait` and `close`. The interpreter lock is taken for the calls
//! only; whatever the object raises or answers wrongly becomes a group error.

use deepinfer_scheduler::{GroupError, StepVote, VoteWords};
use pyo3::prelude::*;

/// An object of Python's with the methods of `StepVote`.
pub struct PyVote {
    object: Py<PyAny>,
}

impl PyVote {
    pub fn new(object: Py<PyAny>) -> Self {
        Self { object }
    }
}

fn lost(py: Python<'_>, error: &PyErr) -> GroupError {
    GroupError::Lost(error.value(py).to_string())
}

impl StepVote for PyVote {
    fn start(&mut self, words: VoteWords) -> Result<(), GroupError> {
        Python::attach(|py| {
            self.object.call_method1(py, "start", (words,)).map(|_| ()).map_err(|error| lost(py, &error))
        })
    }

    fn wait(&mut self) -> Result<VoteWords, GroupError> {
        Python::attach(|py| {
            let words = self.object.call_method0(py, "wait").and_then(|words| words.extract::<VoteWords>(py));
            words.map_err(|error| lost(py, &error))
        })
    }
}

impl Drop for PyVote {
    fn drop(&mut self) {
        // While the interpreter ends there is nobody left to tell.
        let _ = Python::try_attach(|py| self.object.call_method0(py, "close").map(drop));
    }
}
