//! `MtpRuntime`: the budget of draft rows from times of completed steps.

use std::sync::{Mutex, PoisonError};

use deepinfer_scheduler::{MtpConfig, MtpRuntime as Runtime};
use pyo3::prelude::*;

use crate::error;

/// Budget of draft rows, fed with completed steps.
#[pyclass(frozen, module = "deepinfer._core")]
pub struct MtpRuntime {
    runtime: Mutex<Runtime>,
}

impl MtpRuntime {
    fn with<T>(&self, f: impl FnOnce(&mut Runtime) -> T) -> T {
        // Nothing in the runtime panics; if it did, its tables would still be tables.
        f(&mut self.runtime.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[pymethods]
impl MtpRuntime {
    #[new]
    #[pyo3(signature = (max_draft, *, sizes = Vec::new(), rows = 0, full_below = 4, explore_every = 200))]
    fn new(
        py: Python<'_>,
        max_draft: u32,
        sizes: Vec<u32>,
        rows: u32,
        full_below: u32,
        explore_every: u32,
    ) -> PyResult<Self> {
        let sizes = if sizes.is_empty() { MtpConfig::with_rows(max_draft, rows).sizes } else { sizes };
        let config = MtpConfig { max_draft, sizes, full_below, explore_every };
        let runtime = Runtime::new(config).map_err(|refused| error::raise(py, &refused))?;
        Ok(Self { runtime: Mutex::new(runtime) })
    }

    fn update(&self, num_seqs: u32, graph_size: u32, forward_ms: f64, sampler_ms: f64) -> u32 {
        self.with(|runtime| runtime.update(num_seqs, graph_size, forward_ms, sampler_ms))
    }

    fn note_accepted(&self, drafted: Vec<u32>, accepted: Vec<u32>) {
        self.with(|runtime| runtime.note_accepted(&drafted, &accepted));
    }

    fn survival(&self, place: usize) -> f64 {
        self.with(|runtime| runtime.survival(place))
    }

    fn expected_ms(&self, rows: u32) -> f64 {
        self.with(|runtime| runtime.expected_time(rows))
    }
}
