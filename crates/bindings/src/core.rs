//! `Core`: the scheduler and its inbox. One lock around the scheduler, none around the inbox.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};

use deepinfer_scheduler::{
    BlockHash, ChainSave, Extra, Inbox, NgramConfig, Outcome, PrepFlags, Prepared, RingView, Saves, Scheduler, Seq,
    SliceCut, SlotMap, StepError, StepId, Tier, TransferError,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use pyo3::types::{PyBytes, PyDict, PyList};

use crate::config::CoreConfig;
use crate::error::{self, PythonError};
use crate::vote::PyVote;
use crate::{metrics, output, prepared, ring, transfers};

/// (sequence, state slot, boundary, key) of a slice to be cut.
type Cut<'py> = (u64, u32, u32, Bound<'py, PyBytes>);

/// The scheduler with what belongs to its ring. Fields drop in this order: the memory outlives who writes into it.
pub struct Inner {
    pub scheduler: Scheduler,
    /// Step in each ring slot, 0 before the first.
    pub steps: Vec<StepId>,
    pub views: Vec<RingView>,
    /// Time of the newest `schedule`.
    now_ns: u64,
    #[allow(dead_code, reason = "held for its lifetime only")]
    owners: Vec<ring::Owner>,
}

// SAFETY: the only part that is not `Send` by itself are the raw pointers in `views`. They point into memory that `owners`
// keeps alive and are used under the lock around `Inner` only (tests/core/test_ring.py runs steps from several threads).
unsafe impl Send for Inner {}

/// Scheduler, KV index and step buffers of one engine.
#[pyclass(frozen, module = "deepinfer._core")]
pub struct Core {
    /// None once closed.
    inner: Mutex<Option<Inner>>,
    inbox: Inbox,
    pub vocab: u32,
    /// The thread that has the scheduler, 0 = none. Python runs under the lock in a round of a rank group, and may come back here.
    holder: AtomicUsize,
    /// What a panic said; nothing is called any more then.
    fault: OnceLock<String>,
}

/// A number of this thread; no other living thread has it.
fn this_thread() -> usize {
    thread_local!(static PLACE: u8 = const { 0 });
    PLACE.with(|place| std::ptr::from_ref(place).addr())
}

/// Notes for its lifetime that this thread has the scheduler.
struct Holding<'a>(&'a AtomicUsize);

impl<'a> Holding<'a> {
    fn new(holder: &'a AtomicUsize) -> Self {
        // Each thread looks for its own number only, which nobody else writes.
        holder.store(this_thread(), Ordering::Relaxed);
        Self(holder)
    }
}

impl Drop for Holding<'_> {
    fn drop(&mut self) {
        self.0.store(0, Ordering::Relaxed);
    }
}

impl Core {
    /// A call from within a call would wait for itself.
    fn not_from_within(&self, py: Python<'_>) -> PyResult<()> {
        if self.holder.load(Ordering::Relaxed) == this_thread() {
            let said = "a round of the rank group, or a finalizer that ran in it, called the core that waits for the round; \
                        call it after the step";
            return Err(error::named(py, "StepOrderError", said.to_owned()));
        }
        Ok(())
    }

    fn dead(&self, py: Python<'_>) -> PyErr {
        let message = match self.fault.get() {
            Some(fault) => format!("the core stopped after a fault: {fault}"),
            None => "the engine is closed".to_owned(),
        };
        error::named(py, "EngineDeadError", message)
    }

    /// Runs `f` unless the core is dead; a panic in it makes it dead. None means dead.
    fn caught<T>(&self, f: impl FnOnce() -> Option<T>) -> Option<T> {
        if self.fault.get().is_some() {
            return None;
        }
        match catch_unwind(AssertUnwindSafe(f)) {
            Ok(result) => result,
            Err(panic) => {
                let text = panic
                    .downcast_ref::<String>()
                    .map(String::as_str)
                    .or_else(|| panic.downcast_ref::<&str>().copied());
                // A second fault changes nothing.
                let _ = self.fault.set(text.unwrap_or("panic").to_owned());
                None
            }
        }
    }

    /// With the scheduler, the interpreter lock kept: letting go of it may cost a switch interval, several hundred times the
    /// call, if another thread wants it. It is let go of only while another thread has the scheduler. `f` must make no Python
    /// object that the collector tracks.
    pub fn with<T>(&self, py: Python<'_>, f: impl FnOnce(&mut Inner) -> T) -> PyResult<T> {
        // A poisoned lock is a fault that `caught` has noted already. Whoever has the scheduler may need the interpreter for a
        // round of its rank group.
        self.not_from_within(py)?;
        let run = || {
            let mut inner = self.inner.lock_py_attached(py).ok()?;
            let _holding = Holding::new(&self.holder);
            inner.as_mut().map(f)
        };
        self.caught(run).ok_or_else(|| self.dead(py))
    }

    /// The same for what can be refused.
    fn tried<T, E: PythonError>(&self, py: Python<'_>, f: impl FnOnce(&mut Inner) -> Result<T, E>) -> PyResult<T> {
        self.with(py, f)?.map_err(|refused| error::raise(py, &refused))
    }

    /// With the scheduler, the interpreter lock let go of once: for what takes long.
    pub fn detached<T: Send, E: PythonError + Send>(
        &self,
        py: Python<'_>,
        f: impl FnOnce(&mut Inner) -> Result<T, E> + Send,
    ) -> PyResult<T> {
        self.not_from_within(py)?;
        let run = || {
            let mut inner = self.inner.lock().ok()?;
            let _holding = Holding::new(&self.holder);
            inner.as_mut().map(f)
        };
        match py.detach(|| self.caught(run)) {
            Some(Ok(value)) => Ok(value),
            Some(Err(refused)) => Err(error::raise(py, &refused)),
            None => Err(self.dead(py)),
        }
    }

    fn send<T, E: PythonError>(&self, py: Python<'_>, f: impl FnOnce(&Inbox) -> Result<T, E>) -> PyResult<T> {
        match self.caught(|| Some(f(&self.inbox))) {
            Some(Ok(value)) => Ok(value),
            Some(Err(refused)) => Err(error::raise(py, &refused)),
            None => Err(self.dead(py)),
        }
    }
}

impl Inner {
    fn step_of(&self, slot: usize) -> StepId {
        self.steps.get(slot).copied().unwrap_or_default()
    }

    /// Plans a step; its ring slot, −1 when there is nothing to run.
    pub fn schedule(&mut self, now_ns: u64) -> Result<i32, StepError> {
        self.now_ns = now_ns;
        let Some(plan) = self.scheduler.schedule(now_ns)? else { return Ok(-1) };
        self.steps[plan.slot] = plan.step;
        Ok(plan.slot as i32)
    }

    /// Completes the step in a ring slot; its output rows.
    pub fn complete(&mut self, slot: usize, now_ns: u64) -> Result<usize, StepError> {
        let step = self.step_of(slot);
        Ok(self.scheduler.complete(step, now_ns)?.len())
    }
}

#[pymethods]
impl Core {
    #[new]
    fn new(py: Python<'_>, config: &CoreConfig) -> PyResult<Self> {
        let built = catch_unwind(|| Scheduler::new(&config.config)).map_err(|_| {
            error::named(py, "ConfigError", "no core could be built from this configuration".to_owned())
        })?;
        let scheduler = built.map_err(|refused| error::raise(py, &refused))?;
        Ok(Self {
            inbox: scheduler.inbox(),
            inner: Mutex::new(Some(Inner {
                scheduler,
                steps: vec![StepId::default(); config.config.ring_slots as usize],
                views: Vec::new(),
                now_ns: 0,
                owners: Vec::new(),
            })),
            vocab: config.config.limits.vocab_size,
            holder: AtomicUsize::new(0),
            fault: OnceLock::new(),
        })
    }

    fn layout(&self, py: Python<'_>) -> PyResult<Vec<(String, usize)>> {
        self.with(py, |inner| inner.scheduler.layout().iter().map(|field| (field.name.clone(), field.words)).collect())
    }

    fn slot_maps(&self, py: Python<'_>) -> PyResult<Vec<(usize, u32)>> {
        let pair = |map: &SlotMap| (map.group, map.entries);
        self.with(py, |inner| inner.scheduler.slot_maps().iter().map(pair).collect())
    }

    fn table_columns(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        self.with(py, |inner| {
            let scheduler = &inner.scheduler;
            scheduler.sections().iter().map(|section| section.column).chain([scheduler.table_columns()]).collect()
        })
    }

    fn register_ring(&self, py: Python<'_>, slots: Vec<Bound<'_, PyAny>>) -> PyResult<()> {
        let layout = self.with(py, |inner| inner.scheduler.layout().to_vec())?;
        let (views, owners) = ring::views(&layout, &slots)?;
        let registered = self.with(py, |inner| {
            // SAFETY: each view comes from an int32 tensor in host memory or a writable buffer; `owners` keeps them alive for
            // longer than the scheduler, and the stub tells the caller to leave a slot alone while a call runs.
            unsafe { inner.scheduler.register_ring(&views) }?;
            inner.views = views;
            inner.owners = owners;
            Ok(())
        })?;
        registered.map_err(|refused: deepinfer_scheduler::LayoutError| error::raise(py, &refused))
    }

    #[pyo3(signature = (
        tokens, *, max_new_tokens, min_new_tokens = 0, eos_ids = Vec::new(), stop_ids = Vec::new(), ignore_eos = false,
        priority = 0, salt = Vec::new(), extras = Vec::new(), spans = Vec::new(), stream = false, prompt_logprobs = false, grammar = false,
        wait_kv = false, fetch = false, hold = false, produced = 0, n = 1, user = 0, arrival = 0
    ))]
    // One keyword for each property of a request.
    #[allow(clippy::too_many_arguments, clippy::fn_params_excessive_bools)]
    fn add(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        max_new_tokens: u32,
        min_new_tokens: u32,
        eos_ids: Vec<u32>,
        stop_ids: Vec<u32>,
        ignore_eos: bool,
        priority: i32,
        salt: Vec<u8>,
        extras: Vec<(Bound<'_, PyAny>, u32, Vec<u8>)>,
        spans: Vec<(u32, u32)>,
        stream: bool,
        prompt_logprobs: bool,
        grammar: bool,
        wait_kv: bool,
        fetch: bool,
        hold: bool,
        produced: u32,
        n: u32,
        user: u64,
        arrival: u64,
    ) -> PyResult<Vec<u64>> {
        let converted = prepared::extras(extras).and_then(|e| Ok((e, prepared::tokens(tokens, self.vocab)?)));
        if wait_kv && converted.is_err() {
            self.inbox.refuse(user);
        }
        let (extras, tokens): (Vec<Extra>, Vec<u32>) = converted?;
        let prepared = Prepared {
            tokens,
            produced,
            max_new: max_new_tokens,
            min_new: min_new_tokens,
            eos: eos_ids,
            stop_ids,
            ignore_eos,
            priority,
            arrival,
            salt,
            extras,
            spans: spans.into_iter().map(|(start, end)| start..end).collect(),
            flags: PrepFlags { stream, prompt_logprobs, grammar, wait_kv, fetch, hold },
            forks: n,
            user,
        };
        self.send(py, |inbox| inbox.add(&prepared)).map(|seqs| seqs.into_iter().map(Seq::to_u64).collect())
    }

    fn abort(&self, py: Python<'_>, seq: u64) -> PyResult<()> {
        self.send(py, |inbox| inbox.abort(Seq::from_u64(seq)))
    }

    #[pyo3(signature = (seq, num_tokens, reason = "stop"))]
    fn stop_at(&self, py: Python<'_>, seq: u64, num_tokens: u32, reason: &str) -> PyResult<()> {
        let finish = metrics::finish_named(reason).ok_or_else(|| {
            PyValueError::new_err(format!("reason is {reason:?}; use \"stop\", \"length\", \"abort\" or \"error\""))
        })?;
        self.send(py, |inbox| inbox.stop_at(Seq::from_u64(seq), num_tokens, finish))
    }

    fn grammar_ready(&self, py: Python<'_>, seq: u64, ok: bool) -> PyResult<()> {
        self.send(py, |inbox| inbox.grammar_ready(Seq::from_u64(seq), ok))
    }

    fn propose(&self, py: Python<'_>, seq: u64, tokens: &Bound<'_, PyAny>) -> PyResult<bool> {
        let drafts = prepared::tokens(tokens, self.vocab)?;
        self.with(py, |inner| inner.scheduler.propose(Seq::from_u64(seq), &drafts))?
            .map_err(|refused| error::raise(py, &refused))
    }

    fn set_draft_budget(&self, py: Python<'_>, rows: u32) -> PyResult<()> {
        self.with(py, |inner| inner.scheduler.set_draft_budget(rows))
    }

    #[pyo3(signature = (tokens, *, shortest = 2, longest = 4, candidates = 16, catch_up = 16_384))]
    fn set_ngram(
        &self,
        py: Python<'_>,
        tokens: u32,
        shortest: u32,
        longest: u32,
        candidates: u32,
        catch_up: u32,
    ) -> PyResult<()> {
        let config = NgramConfig { shortest, longest, tokens, candidates, catch_up };
        self.with(py, |inner| inner.scheduler.set_ngram(config))?.map_err(|refused| error::raise(py, &refused))
    }

    fn propose_ngram(&self, py: Python<'_>) -> PyResult<u32> {
        self.with(py, |inner| inner.scheduler.propose_ngram())
    }

    fn schedule(&self, py: Python<'_>, now_ns: u64) -> PyResult<i32> {
        self.tried(py, |inner| inner.schedule(now_ns))
    }

    fn set_vote(&self, py: Python<'_>, vote: Py<PyAny>) -> PyResult<()> {
        self.detached(py, |inner| inner.scheduler.set_vote(Box::new(PyVote::new(vote))))
    }

    fn fail_group(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |inner| inner.scheduler.fail_group())
    }

    fn is_group_asleep(&self, py: Python<'_>) -> PyResult<bool> {
        self.with(py, |inner| inner.scheduler.is_group_asleep())
    }

    fn plan_dummy(&self, py: Python<'_>, now_ns: u64) -> PyResult<usize> {
        self.tried(py, |inner| {
            let plan = inner.scheduler.plan_dummy(now_ns)?;
            inner.steps[plan.slot] = plan.step;
            Ok::<_, StepError>(plan.slot)
        })
    }

    fn complete(&self, py: Python<'_>, slot: usize, now_ns: u64) -> PyResult<usize> {
        self.tried(py, |inner| inner.complete(slot, now_ns))
    }

    #[pyo3(signature = (slot, now_ns = None))]
    fn fail_step(&self, py: Python<'_>, slot: usize, now_ns: Option<u64>) -> PyResult<usize> {
        self.tried(py, |inner| {
            let (step, now_ns) = (inner.step_of(slot), now_ns.unwrap_or(inner.now_ns));
            Ok::<_, StepError>(inner.scheduler.fail_step(step, now_ns)?.len())
        })
    }

    fn flush(&self, py: Python<'_>) -> PyResult<usize> {
        self.with(py, |inner| inner.scheduler.flush().len())
    }

    fn outputs<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let copy = |inner: &mut Inner| output::int32_bytes(py, inner.scheduler.outputs().rows.iter().copied());
        output::int32_view(&self.with(py, copy)??)
    }

    fn notify<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let copy = |inner: &mut Inner| {
            output::int32_bytes(py, inner.scheduler.outputs().notify.iter().map(|row| row.cast_signed()))
        };
        output::int32_view(&self.with(py, copy)??)
    }

    fn output_tokens<'py>(&self, py: Python<'py>, seq: u64) -> PyResult<Option<Bound<'py, PyAny>>> {
        let copy = |inner: &mut Inner| {
            let tokens = inner.scheduler.output_tokens(Seq::from_u64(seq))?;
            Some(output::int32_bytes(py, tokens.iter().map(|token| token.cast_signed())))
        };
        self.with(py, copy)?.map(|bytes| output::int32_view(&bytes?)).transpose()
    }

    fn history<'py>(&self, py: Python<'py>, seq: u64) -> PyResult<Option<Bound<'py, PyAny>>> {
        let copy = |inner: &mut Inner| {
            let tokens = inner.scheduler.history(Seq::from_u64(seq))?;
            Some(output::int32_bytes(py, tokens.iter().map(|token| token.cast_signed())))
        };
        self.with(py, copy)?.map(|bytes| output::int32_view(&bytes?)).transpose()
    }

    fn info<'py>(&self, py: Python<'py>, seq: u64) -> PyResult<Option<Bound<'py, PyDict>>> {
        let info = self.with(py, |inner| inner.scheduler.info(Seq::from_u64(seq)))?;
        info.map(|info| metrics::info(py, &info)).transpose()
    }

    fn begin_save<'py>(&self, py: Python<'py>, seq: u64) -> PyResult<Bound<'py, PyDict>> {
        let save = self.with(py, |inner| {
            let save = inner.scheduler.begin_save(Seq::from_u64(seq))?;
            let pages = transfers::pages(&inner.scheduler, &save.blocks);
            Ok((save, pages))
        })?;
        let (save, pages) = save.map_err(|refused: TransferError| error::raise(py, &refused))?;
        transfers::save(py, &save, &pages)
    }

    fn begin_load<'py>(&self, py: Python<'py>, seq: u64, tokens: u32) -> PyResult<Bound<'py, PyDict>> {
        let load = self.with(py, |inner| {
            let load = inner.scheduler.begin_load(Seq::from_u64(seq), tokens)?;
            let pages = transfers::pages(&inner.scheduler, &load.blocks);
            Ok((load, pages))
        })?;
        let (load, pages) = load.map_err(|refused: TransferError| error::raise(py, &refused))?;
        transfers::load(py, &load, &pages)
    }

    fn transfer_ended(&self, py: Python<'_>, transfer: u64, ok: bool) -> PyResult<()> {
        let outcome = if ok { Outcome::Done } else { Outcome::Failed };
        self.send(py, |inbox| inbox.transfer(transfers::from_u64(transfer), outcome))
    }

    fn drain_remote_releases(&self, py: Python<'_>) -> PyResult<Vec<(u64, u64)>> {
        let drained = self.with(py, |inner| inner.scheduler.drain_remote_releases())?;
        Ok(drained.into_iter().map(|(seq, user)| (seq.to_u64(), user)).collect())
    }

    fn next_lease_ns(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        self.with(py, |inner| inner.scheduler.next_lease())
    }

    fn set_rates(&self, py: Python<'_>, swap_bytes_per_s: f64, prefill_tokens_per_s: f64) -> PyResult<()> {
        self.with(py, |inner| inner.scheduler.set_rates(swap_bytes_per_s, prefill_tokens_per_s))
    }

    fn release(&self, py: Python<'_>, seq: u64) -> PyResult<bool> {
        self.with(py, |inner| inner.scheduler.release(Seq::from_u64(seq)))
    }

    fn set_state_slices(&self, py: Python<'_>, on: bool) -> PyResult<()> {
        self.tried(py, |inner| inner.scheduler.set_state_slices(on))
    }

    fn take_state_slices<'py>(&self, py: Python<'py>) -> PyResult<Vec<Cut<'py>>> {
        let cuts = self.with(py, |inner| inner.scheduler.take_slices().collect::<Vec<_>>())?;
        let tuple =
            |cut: SliceCut| (cut.seq.to_u64(), cut.slot, cut.boundary, PyBytes::new(py, &cut.hash.0.to_le_bytes()));
        Ok(cuts.into_iter().map(tuple).collect())
    }

    fn note_state_slice(&self, py: Python<'_>, key: [u8; 16], tier: &str, present: bool) -> PyResult<bool> {
        let tier = match tier {
            "host" => Tier::Host,
            "store" => Tier::Store,
            other => return Err(PyValueError::new_err(format!("tier is {other:?}; use \"host\" or \"store\""))),
        };
        let hash = BlockHash(u128::from_le_bytes(key));
        self.with(py, |inner| inner.scheduler.note_slice(hash, tier, present))
    }

    fn chain_hash<'py>(&self, py: Python<'py>, seq: u64, tokens: u32) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let hash = self.with(py, |inner| inner.scheduler.chain_hash(Seq::from_u64(seq), tokens))?;
        Ok(hash.map(|hash| PyBytes::new(py, &hash.0.to_le_bytes())))
    }

    fn give_up_start(&self, py: Python<'_>, seq: u64) -> PyResult<bool> {
        self.with(py, |inner| inner.scheduler.give_up_start(Seq::from_u64(seq)))
    }

    fn chain<'py>(&self, py: Python<'py>, seq: u64) -> PyResult<Bound<'py, PyBytes>> {
        let hashes = self.with(py, |inner| inner.scheduler.chain(Seq::from_u64(seq)))?;
        Ok(transfers::hash_bytes(py, &hashes))
    }

    fn begin_fetch<'py>(&self, py: Python<'py>, seq: u64, tokens: u32) -> PyResult<Bound<'py, PyDict>> {
        let begun = self.with(py, |inner| {
            let fetch = inner.scheduler.begin_fetch(Seq::from_u64(seq), tokens)?;
            let pages = transfers::pages(&inner.scheduler, &fetch.blocks);
            Ok((fetch, pages))
        })?;
        match begun {
            Ok((fetch, pages)) => transfers::fetch(py, &fetch, &pages),
            Err(TransferError::UnderWay { transfer, present }) => {
                let groups = self.with(py, |inner| inner.scheduler.sections().len())?;
                transfers::pending(py, transfer, present, groups)
            }
            Err(refused) => Err(error::raise(py, &refused)),
        }
    }

    fn end_fetch(&self, py: Python<'_>, transfer: u64, tokens: u32) -> PyResult<bool> {
        self.with(py, |inner| inner.scheduler.end_fetch(transfers::from_u64(transfer), tokens))
    }

    fn end_wait(&self, py: Python<'_>, seq: u64) -> PyResult<bool> {
        self.with(py, |inner| inner.scheduler.end_wait(Seq::from_u64(seq)))
    }

    #[pyo3(signature = (mode, grain_blocks = 1))]
    fn set_saves(&self, py: Python<'_>, mode: &str, grain_blocks: u32) -> PyResult<()> {
        let saves = match mode {
            "off" => Saves::Off,
            "on_finish" => Saves::OnFinish,
            "write_through" => Saves::Through,
            other => {
                let text = format!("mode is {other:?}; use \"off\", \"on_finish\" or \"write_through\"");
                return Err(PyValueError::new_err(text));
            }
        };
        self.tried(py, |inner| inner.scheduler.set_saves(saves, grain_blocks))
    }

    fn take_saves<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let taken = self.with(py, |inner| {
            let saves = inner.scheduler.take_saves();
            let with_pages = |save: ChainSave| (transfers::pages(&inner.scheduler, &save.blocks), save);
            saves.into_iter().map(with_pages).collect::<Vec<_>>()
        })?;
        taken.iter().map(|(pages, save)| transfers::chain_save(py, save, pages)).collect()
    }

    fn end_save(&self, py: Python<'_>, transfer: u64, ok: bool) -> PyResult<bool> {
        self.with(py, |inner| inner.scheduler.end_save(transfers::from_u64(transfer), ok))
    }

    fn has_work(&self, py: Python<'_>) -> PyResult<bool> {
        self.with(py, |inner| inner.scheduler.has_work())
    }

    fn counts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counters = self.with(py, |inner| inner.scheduler.counts())?;
        metrics::counts(py, &counters)
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let snapshot = self.with(py, |inner| inner.scheduler.snapshot())?;
        metrics::stats(py, &snapshot)
    }

    fn metrics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (snapshot, counters) = self.with(py, |inner| (inner.scheduler.snapshot(), inner.scheduler.counts()))?;
        metrics::metrics(py, &snapshot, &counters)
    }

    fn note_step_times(&self, py: Python<'_>, step: u64, device_ns: u64, idle_ns: u64, host_ns: u64) -> PyResult<bool> {
        self.with(py, |inner| inner.scheduler.note_step_times(StepId(step), device_ns, idle_ns, host_ns))
    }

    fn check(&self, py: Python<'_>) -> PyResult<Option<String>> {
        self.with(py, |inner| inner.scheduler.check().err())
    }

    fn drain_events<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let drained = self.with(py, |inner| {
            let mut events = Vec::new();
            inner.scheduler.events(&mut events);
            events
        })?;
        metrics::events(py, &drained)
    }

    /// Makes the core panic, as a fault in it would.
    fn inject_fault(&self, py: Python<'_>, message: String) -> PyResult<()> {
        // The one panic written on purpose: the tests' way to see what a real one leads to.
        #[allow(clippy::panic)]
        self.with(py, |_| panic!("{message}"))
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.not_from_within(py)?;
        // Whoever has the scheduler may need the interpreter for a round of its rank group.
        let taken = self
            .inner
            .lock_py_attached(py)
            .map_or_else(|poisoned| poisoned.into_inner().take(), |mut inner| inner.take());
        // The scheduler drops outside of the interpreter lock, the memory's owners inside of it.
        if let Some(inner) = taken {
            let Inner { scheduler, owners, .. } = inner;
            py.detach(|| drop(scheduler));
            drop(owners);
        }
        Ok(())
    }
}
