//! The KV store as an engine sees it: buffers or host tensors in and out, the interpreter lock let go of while bytes move.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use deepinfer_kvstore::media::local::LocalConfig;
use deepinfer_kvstore::store::StoreConfig;
use deepinfer_kvstore::tier::{Batch, Tier, TierConfig};
use deepinfer_kvstore::tls::ClientTls;
use deepinfer_kvstore::wire::Role;
use deepinfer_kvstore::{Class, Error, Key, Kind};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::error;
use crate::kvtransfer::seconds;
use crate::memory::{CLASS, Memory};

/// Why a call did not end as hoped.
pub enum Fault {
    Error(Error),
    Panic,
}

impl Fault {
    pub fn raise(&self, py: Python<'_>) -> PyErr {
        match self {
            Self::Error(error) => error::raise(py, error),
            Self::Panic => error::named(py, "KvStoreError", "the KV store stopped at a fault of its own".to_owned()),
        }
    }
}

/// Runs `f` with the interpreter lock let go of; a panic in it becomes an error of this call.
pub fn detached<T: Send>(py: Python<'_>, f: impl FnOnce() -> Result<T, Error> + Send) -> PyResult<T> {
    let caught = || match catch_unwind(AssertUnwindSafe(f)) {
        Ok(result) => result.map_err(Fault::Error),
        Err(_) => Err(Fault::Panic),
    };
    py.detach(caught).map_err(|fault| fault.raise(py))
}

/// The store behind an address.
#[pyclass(frozen, module = "deepinfer._core")]
pub struct KvTier {
    /// None once closed.
    tier: Mutex<Option<Arc<Tier>>>,
    address: String,
}

impl KvTier {
    fn detached<T: Send>(&self, py: Python<'_>, f: impl FnOnce(&Tier) -> Result<T, Error> + Send) -> PyResult<T> {
        detached(py, || {
            let tier = self.tier.lock().unwrap_or_else(PoisonError::into_inner).clone();
            f(&*tier.ok_or_else(|| Error::Unavailable("this end of the KV store is closed".to_owned()))?)
        })
    }
}

#[pymethods]
impl KvTier {
    #[new]
    #[pyo3(signature = (
        address, *, tenant = "", fingerprint = Vec::new(), block_tokens = 0, first_stays = false, tokens = None, tls_ca = None,
        tls_name = None, capacity = None, slack = None, segment_bytes = None, max_object = None,
    ))]
    // Named in the stub.
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        address: String,
        tenant: &str,
        fingerprint: Vec<u8>,
        block_tokens: u32,
        first_stays: bool,
        tokens: Option<HashMap<String, Vec<u8>>>,
        tls_ca: Option<PathBuf>,
        tls_name: Option<String>,
        capacity: Option<u64>,
        slack: Option<u64>,
        segment_bytes: Option<u64>,
        max_object: Option<u32>,
    ) -> PyResult<Self> {
        let (store, local) = (StoreConfig::default(), LocalConfig::default());
        let config = TierConfig {
            tenant: tenant.to_owned(),
            fingerprint: fingerprint_of(py, &fingerprint)?,
            block_tokens,
            tokens: tokens_of(py, tokens.unwrap_or_default())?,
            tls: tls_of(&address, tls_ca, tls_name),
            first_stays,
            local: LocalConfig { segment_bytes: segment_bytes.unwrap_or(local.segment_bytes), ..local },
            store: StoreConfig {
                capacity: capacity.unwrap_or(store.capacity),
                slack: slack.unwrap_or(store.slack),
                max_object: max_object.unwrap_or(store.max_object),
                ..store
            },
        };
        let tier = detached(py, || Tier::open(&address, config))?;
        Ok(Self { tier: Mutex::new(Some(Arc::new(tier))), address })
    }

    #[getter]
    fn address(&self) -> &str {
        &self.address
    }

    #[pyo3(signature = (keys, slices = 1))]
    fn check(&self, py: Python<'_>, keys: &[u8], slices: usize) -> PyResult<(usize, Vec<usize>, usize)> {
        let chain = names(py, "keys", keys)?;
        let found = self.detached(py, |tier| tier.check(&chain, slices))?;
        Ok((found.blocks, found.slices, found.near))
    }

    fn get<'py>(
        &self,
        py: Python<'py>,
        kind: &str,
        keys: &[u8],
        into: &Bound<'py, PyAny>,
        each: usize,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let (kind, keys) = (kind_of(py, kind)?, names(py, "keys", keys)?);
        let mut memory = Memory::new(into, true)?;
        let hits = self.detached(py, |tier| {
            // SAFETY: the owner keeps its bytes in place until after the call, writable as was checked; that nobody else touches
            // them meanwhile is the caller's part, as for any buffer given to a system call (tests/core/test_kv_tier.py).
            tier.get(kind, &keys, unsafe { memory.bytes_mut() }, each)
        })?;
        let bytes: Vec<u8> = hits.into_iter().map(u8::from).collect();
        Ok(PyBytes::new(py, &bytes))
    }

    #[pyo3(signature = (kind, keys, parents, lengths, data, traffic_class = "chat"))]
    // Named in the stub.
    #[allow(clippy::too_many_arguments)]
    fn put<'py>(
        &self,
        py: Python<'py>,
        kind: &str,
        keys: &[u8],
        parents: &[u8],
        lengths: Vec<u32>,
        data: &Bound<'py, PyAny>,
        traffic_class: &str,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let (kind, class) = (kind_of(py, kind)?, class_of(py, traffic_class)?);
        let (keys, parents) = (names(py, "keys", keys)?, names(py, "parents", parents)?);
        let memory = Memory::new(data, false)?;
        let letters = self.detached(py, |tier| {
            // SAFETY: as in `get`; read only.
            let data = unsafe { memory.bytes() };
            tier.put(&Batch { kind, keys: &keys, parents: &parents, lengths: &lengths, data, class })
        })?;
        Ok(PyBytes::new(py, &letters))
    }

    #[pyo3(signature = (seconds, /))]
    fn flush(&self, py: Python<'_>, seconds: f64) -> PyResult<bool> {
        let patience = self::seconds(py, "seconds", seconds)?;
        self.detached(py, |tier| Ok(tier.flush(patience)))
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.detached(py, |tier| Ok(tier.stats()))?;
        let dict = PyDict::new(py);
        for (name, value) in stats {
            dict.set_item(name, value)?;
        }
        Ok(dict)
    }

    fn trouble(&self, py: Python<'_>) -> PyResult<Option<String>> {
        self.detached(py, |tier| Ok(tier.trouble()))
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let tier = self.tier.lock().unwrap_or_else(PoisonError::into_inner).take();
        // The files are let go of when the last call in there has ended.
        tier.map_or(Ok(()), |tier| detached(py, move || tier.close()))
    }
}

pub fn names(py: Python<'_>, what: &str, bytes: &[u8]) -> PyResult<Vec<Key>> {
    let (keys, rest) = bytes.as_chunks::<16>();
    if !rest.is_empty() {
        let said = format!("{what} has {} bytes: give 16 for each object", bytes.len());
        return Err(error::named(py, CLASS, said));
    }
    Ok(keys.iter().map(|&key| Key::from_bytes(key)).collect())
}

/// How a server is known: the authority its certificate is from, and the name in it, by default the host of the address.
pub fn tls_of(address: &str, authorities: Option<PathBuf>, name: Option<String>) -> Option<ClientTls> {
    let host = || Some(address.strip_prefix("tcp://")?.split(',').next()?.rsplit_once(':')?.0.to_owned());
    authorities.map(|authorities| ClientTls { authorities, server_name: name.or_else(host).unwrap_or_default() })
}

fn fingerprint_of(py: Python<'_>, bytes: &[u8]) -> PyResult<[u8; 16]> {
    let whole = if bytes.is_empty() { Ok([0; 16]) } else { bytes.try_into() };
    whole.map_err(|_| {
        error::named(py, "ConfigError", format!("fingerprint has {} bytes: give 16, or none", bytes.len()))
    })
}

/// Tokens by the names of their roles.
pub fn tokens_of(py: Python<'_>, given: HashMap<String, Vec<u8>>) -> PyResult<Vec<(Role, Vec<u8>)>> {
    let role = |(name, token): (String, Vec<u8>)| {
        let role = Role::ALL.into_iter().find(|role| role.name() == name);
        let unknown = || error::named(py, "ConfigError", format!("{name:?} is no role: check, get, put and admin are"));
        role.map(|role| (role, token)).ok_or_else(unknown)
    };
    given.into_iter().map(role).collect()
}

fn kind_of(py: Python<'_>, kind: &str) -> PyResult<Kind> {
    match kind {
        "block" => Ok(Kind::Block),
        "slice" => Ok(Kind::Slice),
        _ => Err(error::named(py, CLASS, format!("kind is {kind:?}: give \"block\" or \"slice\""))),
    }
}

fn class_of(py: Python<'_>, name: &str) -> PyResult<Class> {
    match name {
        "chat" => Ok(Class::Chat),
        "agent" => Ok(Class::Agent),
        "other" => Ok(Class::Other),
        _ => Err(error::named(py, CLASS, format!("traffic_class is {name:?}: give \"chat\", \"agent\" or \"other\""))),
    }
}
