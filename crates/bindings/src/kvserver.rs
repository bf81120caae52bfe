//! The KV store as a server and as operators see it: settings in, addresses out, commands as JSON.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use deepinfer_kvindex::{BlockHash, ChainHasher, Root};
use deepinfer_kvstore::Error;
use deepinfer_kvstore::bench;
use deepinfer_kvstore::node::{AgentNode, Node};
use deepinfer_kvstore::operator::{Operator, OperatorConfig};
use deepinfer_kvstore::policy::PolicyKind;
use deepinfer_kvstore::settings::Settings;
use deepinfer_kvstore::wire::Role;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::error;
use crate::kvstore::{detached, names, tls_of};
use crate::kvtransfer::seconds;

/// A server with everything that belongs to it.
#[pyclass(frozen, module = "deepinfer._core")]
pub struct KvServer {
    node: Mutex<Option<Node>>,
    settings: Settings,
}

#[pymethods]
impl KvServer {
    #[new]
    #[pyo3(signature = (settings = None, given = Vec::new()))]
    fn new(py: Python<'_>, settings: Option<PathBuf>, given: Vec<(String, String)>) -> PyResult<Self> {
        let (settings, node) = detached(py, || {
            let settings = load(settings, &given)?;
            let node = Node::start(&settings)?;
            Ok((settings, node))
        })?;
        Ok(Self { node: Mutex::new(Some(node)), settings })
    }

    fn describe<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let guard = self.node.lock().unwrap_or_else(PoisonError::into_inner);
        let node = guard.as_ref().ok_or_else(|| error::raise(py, &closed()))?;
        let stats = node.store().stats();
        let dict = PyDict::new(py);
        dict.set_item("addresses", node.addresses().iter().map(ToString::to_string).collect::<Vec<_>>())?;
        dict.set_item("metrics", node.metrics().map(|address| address.to_string()))?;
        dict.set_item("media", self.settings.media.kind())?;
        dict.set_item("root", self.settings.root.display().to_string())?;
        dict.set_item("capacity", self.settings.store.capacity)?;
        let policy = match self.settings.store.policy {
            PolicyKind::Lru => "lru",
            PolicyKind::Ttl => "ttl",
            PolicyKind::MarginalHit => "marginal",
        };
        dict.set_item("policy", policy)?;
        dict.set_item("directory", node.directory())?;
        dict.set_item("blocks", stats.blocks)?;
        dict.set_item("slices", stats.slices)?;
        Ok(dict)
    }

    fn trouble(&self, py: Python<'_>) -> (u64, Option<String>) {
        py.detach(|| self.node.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(Node::trouble))
            .unwrap_or_default()
    }

    fn drain(&self, py: Python<'_>) -> PyResult<()> {
        let node = self.node.lock().unwrap_or_else(PoisonError::into_inner).take();
        // Metrics say until the end that it drains.
        node.map_or(Ok(()), |mut node| detached(py, move || node.drain()))
    }
}

/// Settings of a file, the environment and a command line.
fn load(settings: Option<PathBuf>, given: &[(String, String)]) -> Result<Settings, Error> {
    // One that is no UTF-8 is none of ours.
    let variables: BTreeMap<String, String> = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect();
    Settings::load(settings.as_deref(), &variables, given)
}

/// The agent of a host.
#[pyclass(frozen, module = "deepinfer._core")]
pub struct KvAgent(Mutex<Option<AgentNode>>);

#[pymethods]
impl KvAgent {
    #[new]
    #[pyo3(signature = (settings = None, given = Vec::new()))]
    fn new(py: Python<'_>, settings: Option<PathBuf>, given: Vec<(String, String)>) -> PyResult<Self> {
        let node = detached(py, || AgentNode::start(&load(settings, &given)?))?;
        Ok(Self(Mutex::new(Some(node))))
    }

    fn describe<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let guard = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let node = guard.as_ref().ok_or_else(|| error::raise(py, &closed()))?;
        let dict = PyDict::new(py);
        dict.set_item("address", format!("agent:{}", node.agent().socket().display()))?;
        dict.set_item("metrics", node.metrics().map(|address| address.to_string()))?;
        dict.set_item("arena", node.agent().sizes().bytes)?;
        dict.set_item("directory", node.directory())?;
        Ok(dict)
    }

    fn trouble(&self, py: Python<'_>) -> (u64, Option<String>) {
        py.detach(|| self.0.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(AgentNode::trouble))
            .unwrap_or_default()
    }

    fn drain(&self, py: Python<'_>) -> PyResult<()> {
        let node = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        node.map_or(Ok(()), |mut node| detached(py, move || node.drain()))
    }
}

fn closed() -> Error {
    Error::Unavailable("this end of the KV store is closed".to_owned())
}

/// One end that asks a server, or a store in a directory.
#[pyclass(frozen, module = "deepinfer._core")]
pub struct KvOperator(Arc<Operator>);

#[pymethods]
impl KvOperator {
    #[new]
    #[pyo3(signature = (address, *, role = "admin", token = None, tenant = "", tls_ca = None, tls_name = None, timeout = 30.0))]
    // Named in the stub.
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        address: &str,
        role: &str,
        token: Option<Vec<u8>>,
        tenant: &str,
        tls_ca: Option<PathBuf>,
        tls_name: Option<String>,
        timeout: f64,
    ) -> PyResult<Self> {
        let role = Role::ALL.into_iter().find(|known| known.name() == role);
        let role = role
            .ok_or_else(|| error::named(py, "ConfigError", "role is none: check, get, put and admin are".to_owned()))?;
        let tls = tls_of(address, tls_ca, tls_name);
        let config =
            OperatorConfig { role, token, tenant: tenant.to_owned(), tls, timeout: seconds(py, "timeout", timeout)? };
        Ok(Self(Arc::new(detached(py, || Operator::open(address, config))?)))
    }

    fn admin(&self, py: Python<'_>, command: &str) -> PyResult<String> {
        detached(py, || self.0.admin(command))
    }

    #[pyo3(signature = (keys, slices = 1))]
    fn check(&self, py: Python<'_>, keys: &[u8], slices: u32) -> PyResult<(usize, Vec<usize>, u32)> {
        let chain = names(py, "keys", keys)?;
        detached(py, || self.0.check(&chain, slices))
    }
}

/// Keys of the objects of a sequence: of every `grain` tokens the chain hash of the last block.
#[pyfunction]
#[pyo3(signature = (
    tokens, *, block_tokens, grain = 128, model = "", revision = "", weight_format = "", kv_format = "", numerics = "",
    hit_policy = "exact", salt = Vec::new(),
))]
// Named in the stub.
#[allow(clippy::too_many_arguments)]
pub fn kv_keys<'py>(
    py: Python<'py>,
    tokens: Vec<u32>,
    block_tokens: u32,
    grain: u32,
    model: &str,
    revision: &str,
    weight_format: &str,
    kv_format: &str,
    numerics: &str,
    hit_policy: &str,
    salt: Vec<u8>,
) -> PyResult<Bound<'py, PyBytes>> {
    if block_tokens == 0 || grain == 0 || !grain.is_multiple_of(block_tokens) {
        let said = format!("block_tokens is {block_tokens}: give a divisor of {grain}, the tokens of an object");
        return Err(error::named(py, "ConfigError", said));
    }
    let root = Root {
        model: model.to_owned(),
        revision: revision.to_owned(),
        weight_format: weight_format.to_owned(),
        kv_format: kv_format.to_owned(),
        numerics: numerics.to_owned(),
        hit_policy: hit_policy.to_owned(),
        block_tokens,
        salt,
    };
    let keys: Vec<u8> = py.detach(|| {
        let hashes: Vec<BlockHash> = ChainHasher::new(&root).hash_all(&tokens, &[]);
        let each = (grain / block_tokens) as usize;
        hashes.chunks_exact(each).flat_map(|grain| grain[each - 1].0.to_le_bytes()).collect()
    });
    Ok(PyBytes::new(py, &keys))
}

/// One part of the bench: a dictionary for each figure.
#[pyfunction]
pub fn kv_bench<'py>(
    py: Python<'py>,
    part: &str,
    dir: PathBuf,
    entries: u64,
    round_bytes: u64,
) -> PyResult<Vec<Bound<'py, PyDict>>> {
    let figures = detached(py, || bench::run(part, &bench::Plan { dir: &dir, entries, round_bytes }))?;
    let each = |figure: bench::Figure| {
        let dict = PyDict::new(py);
        dict.set_item("name", figure.name)?;
        dict.set_item("unit", figure.unit)?;
        dict.set_item("value", figure.value)?;
        dict.set_item("beside", figure.beside)?;
        dict.set_item("ratio", figure.ratio)?;
        Ok(dict)
    };
    figures.into_iter().map(each).collect()
}
