//! The one table from Rust errors to Python classes. The classes live in `deepinfer.errors`, imported at the first error.

use deepinfer_kvstore::Error as StoreError;
use deepinfer_kvtransfer::Error as KvError;
use deepinfer_scheduler::{ConfigError, GroupError, LayoutError, Reject, StepError, TransferError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

static ERRORS: PyOnceLock<Py<PyModule>> = PyOnceLock::new();

/// A Rust error that has a class in Python; its text goes over as it is.
pub trait PythonError: std::fmt::Display {
    /// Name of the class in `deepinfer.errors`.
    fn class(&self) -> &'static str;
}

impl PythonError for ConfigError {
    fn class(&self) -> &'static str {
        "ConfigError"
    }
}

impl PythonError for LayoutError {
    fn class(&self) -> &'static str {
        "RingLayoutError"
    }
}

impl PythonError for StepError {
    fn class(&self) -> &'static str {
        match self {
            Self::Pool(_) => "ConfigError",
            Self::Group(group) => group.class(),
            Self::HalfPlanned
            | Self::NotBegun
            | Self::NoRing
            | Self::InFlight(_)
            | Self::NotInFlight(_)
            | Self::OutOfOrder { .. }
            | Self::RingBusy { .. } => "StepOrderError",
        }
    }
}

impl PythonError for GroupError {
    fn class(&self) -> &'static str {
        match self {
            Self::Mixed => "ConfigError",
            Self::Order(_) => "StepOrderError",
            Self::Failed => "GroupStepFailedError",
            Self::Lost(_) | Self::Malformed { .. } | Self::Mismatch { .. } => "RankGroupError",
        }
    }
}

impl PythonError for TransferError {
    fn class(&self) -> &'static str {
        "TransferError"
    }
}

impl PythonError for KvError {
    fn class(&self) -> &'static str {
        match self {
            Self::Gone(_) => "KvGoneError",
            Self::Corrupt(_) => "KvCorruptError",
            Self::Unreachable { .. } => "KvUnreachableError",
            Self::Refused(_) => "KvRefusedError",
            Self::TooLarge { .. } => "KvTooLargeError",
            Self::Full { .. } => "KvFullError",
            Self::Invalid(_) => "ConfigError",
            _ => "KvTransferError",
        }
    }
}

impl PythonError for StoreError {
    fn class(&self) -> &'static str {
        match self {
            Self::Invalid(_) | Self::Conflict(_) => "KvStoreRefusedError",
            Self::Full(_) => "KvStoreFullError",
            Self::Newer { .. } => "KvStoreFormatError",
            Self::Unavailable(_) => "KvStoreUnavailableError",
            Self::Damaged(..) | Self::Io { .. } => "KvStoreError",
        }
    }
}

impl PythonError for Reject {
    fn class(&self) -> &'static str {
        match self {
            Self::NeverFits { .. } | Self::TooLong { .. } => "PromptTooLongError",
            Self::Empty => "EmptyPromptError",
            Self::BadToken { .. } => "TokenOutOfRangeError",
            Self::Conflict(_) | Self::SpanTooLong { .. } => "InvalidRequestError",
            Self::Closed => "EngineDeadError",
        }
    }
}

/// The exception for a Rust error.
pub fn raise(py: Python<'_>, error: &impl PythonError) -> PyErr {
    named(py, error.class(), error.to_string())
}

/// An exception of a class of `deepinfer.errors`, for what only the edge can see.
pub fn named(py: Python<'_>, class: &str, message: String) -> PyErr {
    let found = ERRORS
        .get_or_try_init(py, || PyModule::import(py, "deepinfer.errors").map(Bound::unbind))
        .and_then(|module| module.bind(py).getattr(class))
        .and_then(|class| class.cast_into::<PyType>().map_err(PyErr::from));
    match found {
        Ok(class) => PyErr::from_type(class, (message,)),
        Err(error) => error,
    }
}
