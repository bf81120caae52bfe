//! `CoreConfig`, `PagedGroup`, `StateGroup`, `WindowRule`: the scheduler's configuration as Python writes it.

use deepinfer_kvindex::Root;
use deepinfer_scheduler::{
    ChunkCost, ChunkPolicy, Config, EngineType, GroupSpec, HitRule, Limits, Policy, Source, StepPolicy, WindowRule,
};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::error;

/// Pages of `page_tokens` tokens; the first group of a configuration sets the hash block.
#[pyclass(frozen, get_all, module = "deepinfer._core")]
pub struct PagedGroup {
    page_tokens: u32,
    num_pages: u32,
    sources: Vec<(u32, u64)>,
}

#[pymethods]
impl PagedGroup {
    #[new]
    #[pyo3(signature = (*, page_tokens, num_pages, sources))]
    fn new(page_tokens: u32, num_pages: u32, sources: Vec<(u32, u64)>) -> Self {
        Self { page_tokens, num_pages, sources }
    }

    fn __repr__(&self) -> String {
        let Self { page_tokens, num_pages, sources } = self;
        format!("PagedGroup(page_tokens={page_tokens}, num_pages={num_pages}, sources={sources:?})")
    }
}

/// Bytes of one sequence that do not page; the core hands out the slot only.
#[pyclass(frozen, get_all, module = "deepinfer._core")]
pub struct StateGroup {
    stored: u64,
    dropped: u64,
    replicas: u8,
    ring: u32,
    cut: u32,
}

#[pymethods]
impl StateGroup {
    #[new]
    #[pyo3(signature = (*, stored, dropped, replicas = 0, ring = 0, cut = 0))]
    fn new(stored: u64, dropped: u64, replicas: u8, ring: u32, cut: u32) -> Self {
        Self { stored, dropped, replicas, ring, cut }
    }

    fn __repr__(&self) -> String {
        let Self { stored, dropped, replicas, ring, cut } = self;
        format!("StateGroup(stored={stored}, dropped={dropped}, replicas={replicas}, ring={ring}, cut={cut})")
    }
}

/// Where sequences of a model with windows begin after a hit.
#[pyclass(frozen, get_all, name = "WindowRule", module = "deepinfer._core")]
pub struct PyWindowRule {
    encoder: u32,
    decoder: u32,
    window: u32,
    grain: u32,
    backtrack: u32,
    exact: bool,
    keep: u32,
    truncated: bool,
}

#[pymethods]
impl PyWindowRule {
    #[new]
    #[pyo3(signature = (*, encoder, decoder, window, grain, backtrack, exact = true, keep = 0, truncated = false))]
    // One keyword for each number of the rule.
    #[allow(clippy::too_many_arguments)]
    fn new(
        encoder: u32,
        decoder: u32,
        window: u32,
        grain: u32,
        backtrack: u32,
        exact: bool,
        keep: u32,
        truncated: bool,
    ) -> Self {
        Self { encoder, decoder, window, grain, backtrack, exact, keep, truncated }
    }

    fn longest_hit(&self, length: u32) -> u32 {
        self.rule().longest_hit(length)
    }

    fn last_slice(&self, length: u32) -> u32 {
        self.rule().last_slice(length)
    }

    fn rerun_start(&self, length: u32, hit: u32) -> u32 {
        self.rule().rerun_start(length, hit)
    }

    /// Python's own names of the two truth values.
    fn __repr__(&self) -> String {
        let Self { encoder, decoder, window, grain, backtrack, keep, .. } = self;
        let [exact, truncated] = [self.exact, self.truncated].map(|on| if on { "True" } else { "False" });
        format!(
            "WindowRule(encoder={encoder}, decoder={decoder}, window={window}, grain={grain}, backtrack={backtrack}, \
             exact={exact}, keep={keep}, truncated={truncated})"
        )
    }
}

impl PyWindowRule {
    fn rule(&self) -> WindowRule {
        let &Self { encoder, decoder, window, grain, backtrack, exact, keep, truncated } = self;
        WindowRule { encoder, decoder, window, grain, backtrack, exact, keep, truncated }
    }
}

fn hit_rule(rule: Option<&Bound<'_, PyAny>>) -> PyResult<HitRule> {
    let Some(rule) = rule else { return Ok(HitRule::All) };
    if let Ok(rule) = rule.cast::<PyWindowRule>() {
        return Ok(HitRule::Window(rule.get().rule()));
    }
    match rule.extract::<&str>() {
        Ok("all") => Ok(HitRule::All),
        Ok("state_slice") => Ok(HitRule::StateSlice),
        _ => {
            let text = format!("hit_rule is {}; use \"all\", \"state_slice\" or a WindowRule", rule.repr()?);
            Err(error::named(rule.py(), "ConfigError", text))
        }
    }
}

fn group_spec(group: &Bound<'_, PyAny>) -> PyResult<GroupSpec> {
    if let Ok(paged) = group.cast::<PagedGroup>() {
        let paged = paged.get();
        let sources =
            paged.sources.iter().map(|&(entries_per_page, entry_bytes)| Source { entries_per_page, entry_bytes });
        return Ok(GroupSpec::Paged {
            page_tokens: paged.page_tokens,
            num_pages: paged.num_pages,
            sources: sources.collect(),
        });
    }
    if let Ok(state) = group.cast::<StateGroup>() {
        let &StateGroup { stored, dropped, replicas, ring, cut } = state.get();
        return Ok(GroupSpec::State { stored, dropped, replicas, ring, cut });
    }
    Err(PyTypeError::new_err(format!("a KV group is a PagedGroup or a StateGroup, not {}", group.get_type())))
}

fn step_policy_named(py: Python<'_>, name: Option<&str>) -> PyResult<Option<StepPolicy>> {
    match name {
        None => Ok(None),
        Some("mixed") => Ok(Some(StepPolicy::Mixed)),
        Some("decode_first") => Ok(Some(StepPolicy::DecodeFirst)),
        Some(other) => {
            let text = format!("step_policy is {other:?}; use \"mixed\", \"decode_first\" or None");
            Err(error::named(py, "ConfigError", text))
        }
    }
}

fn chunk_policy(
    py: Python<'_>,
    tokens: u32,
    budget_ns: Option<u64>,
    (a, b, d, e): (f64, f64, f64, f64),
) -> PyResult<ChunkPolicy> {
    match budget_ns {
        None => Ok(ChunkPolicy::Tokens(tokens)),
        Some(_) if tokens > 0 => {
            let text = "max_chunk_tokens and chunk_budget_ns are both given; a chunk has one limit".to_owned();
            Err(error::named(py, "ConfigError", text))
        }
        Some(budget_ns) => Ok(ChunkPolicy::Time { budget_ns, cost: ChunkCost { a, b, d, e } }),
    }
}

/// Everything a core is built from. Values are checked together by `Core`.
#[pyclass(frozen, module = "deepinfer._core")]
pub struct CoreConfig {
    pub config: Config,
}

#[pymethods]
impl CoreConfig {
    #[new]
    #[pyo3(signature = (
        *, groups, max_num_seqs, max_num_batched_tokens, max_model_len, vocab_size, max_draft = 0, device_drafts = 0, ring_slots = 3,
        max_in_flight = 1, device_ordered = false, prefix_caching = true, event_capacity = 0, max_chunk_tokens = 0, chunk_align = 1,
        step_policy = None, all_interval = 70, any_interval = 100, chunk_budget_ns = None, chunk_cost = (0.0, 0.0, 0.0, 0.0),
        bypass = 16, headroom_tokens = 16, kv_lease_ns = 60_000_000_000, fetch_lease_ns = 10_000_000_000,
        handover_lease_ns = 60_000_000_000, engine_type = "normal", host_blocks = 0, host_slots = 0, snapshot_slots = 0, hit_rule = None, model = "",
        revision = "", weight_format = "", kv_format = "", numerics = "", hit_policy = "exact", salt = Vec::new()
    ))]
    // One keyword for each setting, so that a call reads like a configuration file.
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        groups: Vec<Bound<'_, PyAny>>,
        max_num_seqs: u32,
        max_num_batched_tokens: u32,
        max_model_len: u32,
        vocab_size: u32,
        max_draft: u32,
        device_drafts: u32,
        ring_slots: u32,
        max_in_flight: u32,
        device_ordered: bool,
        prefix_caching: bool,
        event_capacity: usize,
        max_chunk_tokens: u32,
        chunk_align: u32,
        step_policy: Option<&str>,
        all_interval: u32,
        any_interval: u32,
        chunk_budget_ns: Option<u64>,
        chunk_cost: (f64, f64, f64, f64),
        bypass: u32,
        headroom_tokens: u32,
        kv_lease_ns: u64,
        fetch_lease_ns: u64,
        handover_lease_ns: u64,
        engine_type: &str,
        host_blocks: u32,
        host_slots: u32,
        snapshot_slots: u32,
        hit_rule: Option<Bound<'_, PyAny>>,
        model: &str,
        revision: &str,
        weight_format: &str,
        kv_format: &str,
        numerics: &str,
        hit_policy: &str,
        salt: Vec<u8>,
    ) -> PyResult<Self> {
        let groups = groups.iter().map(group_spec).collect::<PyResult<Vec<_>>>()?;
        let hit_rule = self::hit_rule(hit_rule.as_ref())?;
        let step_policy = step_policy_named(py, step_policy)?;
        let chunk = chunk_policy(py, max_chunk_tokens, chunk_budget_ns, chunk_cost)?;
        let engine = match engine_type {
            "normal" => EngineType::Normal,
            "prompt" => EngineType::Prompt,
            "completion" => EngineType::Completion,
            other => {
                return Err(error::named(
                    py,
                    "ConfigError",
                    format!("engine_type is {other:?}; use \"normal\", \"prompt\" or \"completion\""),
                ));
            }
        };
        let block_tokens = match groups.first() {
            Some(GroupSpec::Paged { page_tokens, .. }) => *page_tokens,
            _ => 0,
        };
        Ok(Self {
            config: Config {
                engine,
                groups,
                limits: Limits { max_num_seqs, max_num_batched_tokens, max_model_len, vocab_size, max_draft },
                policy: Policy {
                    step_policy,
                    all_interval,
                    any_interval,
                    chunk,
                    chunk_align,
                    bypass,
                    headroom_tokens,
                    kv_lease_ns,
                    fetch_lease_ns,
                    handover_lease_ns,
                    hit_rule,
                },
                device_ordered,
                prefix_caching,
                event_capacity,
                root: Root {
                    model: model.to_owned(),
                    revision: revision.to_owned(),
                    weight_format: weight_format.to_owned(),
                    kv_format: kv_format.to_owned(),
                    numerics: numerics.to_owned(),
                    hit_policy: hit_policy.to_owned(),
                    block_tokens,
                    salt,
                },
                ring_slots,
                max_in_flight,
                host_blocks,
                host_slots,
                snapshot_slots,
                device_drafts,
            },
        })
    }

    #[getter]
    fn block_tokens(&self) -> u32 {
        self.config.root.block_tokens
    }

    #[getter]
    fn max_num_seqs(&self) -> u32 {
        self.config.limits.max_num_seqs
    }

    #[getter]
    fn max_num_batched_tokens(&self) -> u32 {
        self.config.limits.max_num_batched_tokens
    }

    #[getter]
    fn max_model_len(&self) -> u32 {
        self.config.limits.max_model_len
    }

    #[getter]
    fn vocab_size(&self) -> u32 {
        self.config.limits.vocab_size
    }

    #[getter]
    fn max_draft(&self) -> u32 {
        self.config.limits.max_draft
    }

    #[getter]
    fn device_drafts(&self) -> u32 {
        self.config.device_drafts
    }

    #[getter]
    fn ring_slots(&self) -> u32 {
        self.config.ring_slots
    }

    #[getter]
    fn host_blocks(&self) -> u32 {
        self.config.host_blocks
    }

    #[getter]
    fn host_slots(&self) -> u32 {
        self.config.host_slots
    }

    #[getter]
    fn snapshot_slots(&self) -> u32 {
        self.config.snapshot_slots
    }

    #[getter]
    fn engine_type(&self) -> &'static str {
        match self.config.engine {
            EngineType::Normal => "normal",
            EngineType::Prompt => "prompt",
            EngineType::Completion => "completion",
        }
    }

    #[getter]
    fn max_in_flight(&self) -> u32 {
        self.config.max_in_flight
    }

    #[getter]
    fn prefix_caching(&self) -> bool {
        self.config.prefix_caching
    }

    #[getter]
    fn device_ordered(&self) -> bool {
        self.config.device_ordered
    }

    /// Everything but the salt, which is a secret.
    fn __repr__(&self) -> String {
        let Config { limits, root, ring_slots, prefix_caching, groups, .. } = &self.config;
        format!(
            "CoreConfig(model={:?}, groups={}, block_tokens={}, max_num_seqs={}, max_num_batched_tokens={}, \
             max_model_len={}, max_draft={}, ring_slots={ring_slots}, prefix_caching={prefix_caching})",
            root.model,
            groups.len(),
            root.block_tokens,
            limits.max_num_seqs,
            limits.max_num_batched_tokens,
            limits.max_model_len,
            limits.max_draft,
        )
    }
}
