//! Offers of KV bytes as Python sees them: buffers or host tensors in and out, the interpreter lock let go of while bytes move.

use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use deepinfer_kvtransfer::{
    Config, Error, Event, EventKind, KvTransfer as Transfer, Limits, SharedMemory, Target, Tcp, TcpAddress, Ticket,
};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyDict, PyString, PyType};

use crate::error;
use crate::memory::{CLASS, Memory};

/// Permission to pull one offer.
#[pyclass(frozen, eq, hash, module = "deepinfer._core")]
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct KvTicket(Ticket);

#[pymethods]
impl KvTicket {
    #[new]
    #[pyo3(signature = (data, /))]
    fn new(data: &Bound<'_, PyAny>) -> PyResult<Self> {
        let ticket = if let Ok(text) = data.cast::<PyString>() {
            text.to_str()?.parse()
        } else if let Ok(bytes) = data.cast::<PyBytes>() {
            Ticket::from_bytes(bytes.as_bytes())
        } else {
            return Err(PyTypeError::new_err("a ticket is read from bytes or str"));
        };
        ticket.map(Self).map_err(|refused| error::raise(data.py(), &refused))
    }

    #[getter]
    fn id<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.id().0)
    }

    #[getter]
    fn length(&self) -> u64 {
        self.0.length()
    }

    #[getter]
    fn checksum(&self) -> u64 {
        self.0.checksum()
    }

    #[getter]
    fn address(&self) -> String {
        self.0.address().to_string()
    }

    fn to_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.to_bytes())
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __repr__(&self) -> String {
        // Not the id: whoever knows a ticket can pull.
        format!("KvTicket({} bytes at {})", self.0.length(), self.0.address())
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> (Bound<'py, PyType>, (Bound<'py, PyBytes>,)) {
        (py.get_type::<Self>(), (self.to_bytes(py),))
    }
}

/// One end of a hand-over.
#[pyclass(frozen, module = "deepinfer._core")]
pub struct KvTransfer {
    /// None once closed.
    end: Mutex<Option<Arc<dyn Transfer>>>,
    address: String,
}

impl KvTransfer {
    /// Runs `f` on the end; a panic in it becomes an error of this call.
    fn caught<T>(&self, f: impl FnOnce(&dyn Transfer) -> Result<T, Error>) -> Result<T, Fault> {
        let end = self.end.lock().unwrap_or_else(PoisonError::into_inner).clone().ok_or(Fault::Error(Error::Closed))?;
        match catch_unwind(AssertUnwindSafe(|| f(&*end))) {
            Ok(result) => result.map_err(Fault::Error),
            Err(_) => Err(Fault::Panic),
        }
    }

    /// The same with the interpreter lock let go of.
    fn detached<T: Send>(
        &self,
        py: Python<'_>,
        f: impl FnOnce(&dyn Transfer) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        py.detach(|| self.caught(f)).map_err(|fault| fault.raise(py))
    }
}

enum Fault {
    Error(Error),
    Panic,
}

impl Fault {
    fn raise(&self, py: Python<'_>) -> PyErr {
        match self {
            Self::Error(error) => error::raise(py, error),
            Self::Panic => error::named(py, "KvTransferError", "the transfer stopped at a fault of its own".to_owned()),
        }
    }
}

#[pymethods]
impl KvTransfer {
    #[new]
    #[pyo3(signature = (
        back_end, *, layout = Vec::new(), token = None, listen = None, advertise = None, max_offers = None, max_bytes = None,
        max_pull_bytes = None, max_meta_bytes = None, max_connections = None, max_lease = None, connect_timeout = None,
        handshake_timeout = None, stall_timeout = None, pull_timeout = None,
    ))]
    // Named in the stub.
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        back_end: &str,
        layout: Vec<u8>,
        token: Option<Vec<u8>>,
        listen: Option<&str>,
        advertise: Option<&str>,
        max_offers: Option<usize>,
        max_bytes: Option<u64>,
        max_pull_bytes: Option<u64>,
        max_meta_bytes: Option<usize>,
        max_connections: Option<usize>,
        max_lease: Option<f64>,
        connect_timeout: Option<f64>,
        handshake_timeout: Option<f64>,
        stall_timeout: Option<f64>,
        pull_timeout: Option<f64>,
    ) -> PyResult<Self> {
        let base = Limits::default();
        let time = |name, given: Option<f64>, base| given.map_or(Ok(base), |given| seconds(py, name, given));
        let limits = Limits {
            offers: max_offers.unwrap_or(base.offers),
            bytes: max_bytes.unwrap_or(base.bytes),
            pull_bytes: max_pull_bytes.unwrap_or(base.pull_bytes),
            meta: max_meta_bytes.unwrap_or(base.meta),
            connections: max_connections.unwrap_or(base.connections),
            lease: time("max_lease", max_lease, base.lease)?,
            connect: time("connect_timeout", connect_timeout, base.connect)?,
            handshake: time("handshake_timeout", handshake_timeout, base.handshake)?,
            stall: time("stall_timeout", stall_timeout, base.stall)?,
            pull: time("pull_timeout", pull_timeout, base.pull)?,
        };
        let config = Config { layout, token, limits };
        let made: Result<Arc<dyn Transfer>, Error> = match back_end {
            "shm" if listen.is_none() && advertise.is_none() => {
                SharedMemory::new(&config).map(|end| Arc::new(end) as _)
            }
            "shm" => Err(Error::Invalid("listen and advertise are for the TCP back end".to_owned())),
            "tcp" => {
                let mut at = TcpAddress::default();
                if let Some(listen) = listen {
                    at.listen = address(py, "listen", listen)?;
                }
                at.advertise = advertise.map(|given| address(py, "advertise", given)).transpose()?;
                Tcp::new(&config, &at).map(|end| Arc::new(end) as _)
            }
            other => Err(Error::Invalid(format!("back end {other:?}: use \"shm\" or \"tcp\""))),
        };
        let end = made.map_err(|refused| error::raise(py, &refused))?;
        Ok(Self { address: end.address().to_string(), end: Mutex::new(Some(end)) })
    }

    #[getter]
    fn address(&self) -> &str {
        &self.address
    }

    fn offer(&self, py: Python<'_>, meta: &[u8], segments: Vec<Bound<'_, PyAny>>, lease: f64) -> PyResult<KvTicket> {
        let lease = seconds(py, "lease", lease)?;
        let memory = segments.iter().map(|segment| Memory::new(segment, false)).collect::<PyResult<Vec<_>>>()?;
        let ticket = self.detached(py, |end| {
            // SAFETY: each owner keeps its bytes in place until after the call; that nobody writes meanwhile is the caller's
            // part, as for any buffer that is handed to a system call (tests/core/test_kvtransfer.py).
            let segments: Vec<&[u8]> = memory.iter().map(|one| unsafe { one.bytes() }).collect();
            end.offer(meta, &segments, lease)
        });
        drop(memory);
        ticket.map(KvTicket)
    }

    fn pull<'py>(
        &self,
        py: Python<'py>,
        ticket: &KvTicket,
    ) -> PyResult<(Bound<'py, PyBytes>, Bound<'py, PyByteArray>)> {
        let mut payload = Vec::new();
        let meta = self.detached(py, |end| end.pull(&ticket.0, Target::Fresh(&mut payload)))?;
        Ok((PyBytes::new(py, &meta), PyByteArray::new(py, &payload)))
    }

    fn pull_into<'py>(
        &self,
        py: Python<'py>,
        ticket: &KvTicket,
        buffers: Vec<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let mut memory = buffers.iter().map(|buffer| Memory::new(buffer, true)).collect::<PyResult<Vec<_>>>()?;
        let mut ranges: Vec<_> = memory.iter().map(Memory::range).filter(|range| !range.is_empty()).collect();
        ranges.sort_by_key(|range| range.start);
        if ranges.windows(2).any(|pair| pair[0].end > pair[1].start) {
            return Err(error::named(py, CLASS, "two of the buffers overlap".to_owned()));
        }
        let meta = self.detached(py, |end| {
            // SAFETY: as in `offer`; writable and without overlap, both checked.
            let mut buffers: Vec<&mut [u8]> = memory.iter_mut().map(|one| unsafe { one.bytes_mut() }).collect();
            end.pull(&ticket.0, Target::Buffers(&mut buffers))
        });
        drop(memory);
        Ok(PyBytes::new(py, &meta?))
    }

    fn release(&self, py: Python<'_>, ticket: &KvTicket) -> PyResult<bool> {
        self.detached(py, |end| end.release(&ticket.0))
    }

    fn poll<'py>(&self, py: Python<'py>) -> PyResult<Vec<(Bound<'py, PyBytes>, &'static str)>> {
        let mut events: Vec<Event> = Vec::new();
        let told = self.caught(|end| {
            end.poll(&mut events);
            Ok(())
        });
        told.map_err(|fault| fault.raise(py))?;
        let name = |kind| match kind {
            EventKind::Pulled => "pulled",
            EventKind::Released => "released",
            EventKind::Expired => "expired",
        };
        Ok(events.into_iter().map(|event| (PyBytes::new(py, &event.id.0), name(event.kind))).collect())
    }

    fn counts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counts = self.caught(|end| Ok(end.counts())).map_err(|fault| fault.raise(py))?;
        let dict = PyDict::new(py);
        dict.set_item("offers", counts.offers)?;
        dict.set_item("bytes", counts.bytes)?;
        dict.set_item("pulls", counts.pulls)?;
        dict.set_item("events_lost", counts.events_lost)?;
        Ok(dict)
    }

    fn close(&self, py: Python<'_>) {
        let end = self.end.lock().unwrap_or_else(PoisonError::into_inner).take();
        // Waits for the threads, or leaves that to a call that is still in there.
        py.detach(|| drop(end));
    }
}

pub(crate) fn seconds(py: Python<'_>, name: &str, given: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(given)
        .map_err(|_| error::named(py, "ConfigError", format!("{name} is {given}; it must be a number of seconds")))
}

fn address(py: Python<'_>, name: &str, given: &str) -> PyResult<SocketAddr> {
    given.parse().map_err(|_| {
        error::named(py, "ConfigError", format!("{name} is {given:?}; it must be an address and port, as 127.0.0.1:0"))
    })
}
