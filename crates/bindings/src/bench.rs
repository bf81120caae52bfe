//! Timed loops for `deepinfer bench scheduler`: the calls that Python times, on the same core, without Python around them.

use std::time::Instant;

use deepinfer_kvindex::{
    BlockHash, BlockPool, ChainHasher, Fence, Owner, PoolConfig, PoolError, PoolGroup, Root, StepId,
};
use deepinfer_scheduler::{Prepared, Reject, header, out, seq_flag};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::core::{Core, Inner};
use crate::error::{self, PythonError};
use crate::prepared;

/// Most of anything that a loop takes memory for.
const MOST: usize = 1 << 24;

/// Refuses sizes that no bench needs and that would take all memory.
fn bounded(py: Python<'_>, sizes: &[(&str, usize)]) -> PyResult<()> {
    match sizes.iter().find(|(_, size)| *size > MOST) {
        Some((name, size)) => {
            Err(error::named(py, "ConfigError", format!("{name} is {size}; it must be at most {MOST}")))
        }
        None => Ok(()),
    }
}

/// A reproducible stream of token ids below `vocab`, clear of the small special ids.
struct Tokens {
    state: u64,
    vocab: u32,
}

impl Tokens {
    fn fill(&mut self, to: &mut Vec<u32>, len: usize) {
        while to.len() < len {
            self.state = self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            to.push(10 + (self.state >> 33) as u32 % (self.vocab - 10));
        }
    }
}

/// Positions, in the layout, of the fields that the loop plays the worker with.
struct Worker {
    header: usize,
    flags: usize,
    tokens: usize,
    accepted: usize,
}

impl Worker {
    fn new(inner: &Inner) -> Option<Self> {
        let at = |name: &str| inner.scheduler.layout().iter().position(|field| field.name == name);
        Some(Self { header: at("header")?, flags: at("seq_flags")?, tokens: at("tokens")?, accepted: at("accepted")? })
    }

    /// Writes one token for each sequence that samples.
    fn fill(&self, inner: &Inner, slot: usize, token: i32) {
        let field = |index: usize| inner.views[slot].fields[index];
        let (head, flags, tokens, accepted) =
            (field(self.header), field(self.flags), field(self.tokens), field(self.accepted));
        // SAFETY: the scheduler checked pointers and lengths when it took these views; their owners are alive, no call of it
        // runs, and the counts in its header are within the fields (tests/core/test_bench.py compares with Python's loop).
        unsafe {
            let seqs = *head.words.add(header::SEQS) as usize;
            let samples = *head.words.add(header::SAMPLES) as usize;
            for row in 0..samples.min(tokens.len) {
                *tokens.words.add(row) = token;
            }
            for seq in 0..seqs.min(accepted.len) {
                *accepted.words.add(seq) = *flags.words.add(seq) & seq_flag::SAMPLES;
            }
        }
    }
}

/// Why a timed loop ended early.
enum Stopped {
    Step(deepinfer_scheduler::StepError),
    Reject(Reject),
}

impl std::fmt::Display for Stopped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Step(error) => error.fmt(f),
            Self::Reject(error) => error.fmt(f),
        }
    }
}

impl PythonError for Stopped {
    fn class(&self) -> &'static str {
        match self {
            Self::Step(error) => error.class(),
            Self::Reject(error) => error.class(),
        }
    }
}

/// Nanoseconds of `schedule` + `complete` in each of `steps` steps; stops early when nothing is left to run.
#[pyfunction]
#[pyo3(signature = (core, steps, now_ns, token, shared, prompt_tokens, refill))]
// Named in the stub; a benchmark's knobs.
#[allow(clippy::too_many_arguments)]
pub fn bench_steps(
    py: Python<'_>,
    core: &Core,
    steps: usize,
    now_ns: u64,
    token: i32,
    shared: &Bound<'_, PyAny>,
    prompt_tokens: usize,
    refill: u32,
) -> PyResult<Vec<u64>> {
    bounded(py, &[("steps", steps), ("prompt_tokens", prompt_tokens)])?;
    let shared = prepared::tokens(shared, core.vocab)?;
    let mut stream = Tokens { state: now_ns, vocab: core.vocab.max(11) };
    core.detached(py, move |inner| {
        let mut samples = Vec::with_capacity(steps);
        let Some(worker) = Worker::new(inner) else { return Ok(samples) };
        for step in 0..steps as u64 {
            let now = now_ns.saturating_add(1 + step);
            let begin = Instant::now();
            let slot = inner.schedule(now).map_err(Stopped::Step)?;
            let planned = begin.elapsed();
            let Ok(slot) = usize::try_from(slot) else { break };
            worker.fill(inner, slot, token);
            let begin = Instant::now();
            inner.complete(slot, now).map_err(Stopped::Step)?;
            samples.push((planned + begin.elapsed()).as_nanos() as u64);
            if refill > 0 {
                replace_ended(inner, &shared, prompt_tokens, refill, &mut stream)?;
            }
        }
        Ok::<_, Stopped>(samples)
    })
}

fn replace_ended(
    inner: &Inner,
    shared: &[u32],
    prompt_tokens: usize,
    max_new: u32,
    stream: &mut Tokens,
) -> Result<(), Stopped> {
    let outputs = inner.scheduler.outputs();
    let ended = outputs.notify.iter().filter(|&&row| outputs.row(row as usize)[out::FINISH] != 0).count();
    for _ in 0..ended {
        let mut tokens = shared.to_vec();
        stream.fill(&mut tokens, prompt_tokens);
        let prepared = Prepared { eos: vec![2], ..Prepared::new(tokens, max_new) };
        inner.scheduler.inbox().add(&prepared).map_err(Stopped::Reject)?;
    }
    Ok(())
}

fn chain_of(block: u32) -> ChainHasher {
    ChainHasher::new(&Root { model: "bench".to_owned(), block_tokens: block, ..Root::default() })
}

/// Nanoseconds of hashing a chain of `tokens` tokens, `repeats` times.
#[pyfunction]
pub fn bench_chain_hash(py: Python<'_>, tokens: usize, block: u32, repeats: usize) -> PyResult<Vec<u64>> {
    bounded(py, &[("tokens", tokens), ("block", block as usize), ("repeats", repeats)])?;
    Ok(py.detach(|| {
        let mut ids = Vec::new();
        Tokens { state: 1, vocab: 32_000 }.fill(&mut ids, tokens);
        let chain = chain_of(block);
        let mut hashes = Vec::with_capacity(tokens);
        let time = |_| {
            hashes.clear();
            let begin = Instant::now();
            chain.hash_into(std::hint::black_box(&ids), &[], &mut hashes);
            begin.elapsed().as_nanos() as u64
        };
        (0..repeats).map(time).collect()
    }))
}

/// Nanoseconds of finding a cached prefix of `tokens` tokens, taking the references and listing its blocks, `repeats` times,
/// each time another chain of a pool of `pool_blocks` blocks that holds nothing but such chains.
#[pyfunction]
pub fn bench_prefix_match(
    py: Python<'_>,
    tokens: usize,
    block: u32,
    pool_blocks: u32,
    repeats: usize,
) -> PyResult<Vec<u64>> {
    bounded(
        py,
        &[("tokens", tokens), ("block", block as usize), ("pool_blocks", pool_blocks as usize), ("repeats", repeats)],
    )?;
    let length = tokens / (block as usize).max(1);
    if length == 0 || length > pool_blocks as usize {
        let message =
            format!("{tokens} tokens are not between one block of {block} and the pool of {pool_blocks} blocks");
        return Err(error::named(py, "ConfigError", message));
    }
    py.detach(|| match_chains(length, block, pool_blocks, repeats)).map_err(PyRuntimeError::new_err)
}

fn match_chains(length: usize, block: u32, pool_blocks: u32, repeats: usize) -> Result<Vec<u64>, String> {
    let refused = |error: PoolError| error.to_string();
    let groups = vec![PoolGroup { num_pages: pool_blocks + 1, pages_per_block: 1 }];
    let mut pool = BlockPool::new(&PoolConfig { groups, prefix_caching: true, event_capacity: 0 }).map_err(refused)?;
    let chain = chain_of(block);
    let now = StepId(1);
    let mut stream = Tokens { state: 2, vocab: 32_000 };
    let mut chains: Vec<Vec<BlockHash>> = Vec::new();
    for _ in 0..pool_blocks as usize / length {
        let mut ids = Vec::new();
        stream.fill(&mut ids, length * block as usize);
        let hashes = chain.hash_all(&ids, &[]);
        let mut cursor = deepinfer_kvindex::Block::NULL;
        for &hash in &hashes {
            let Some(private) = pool.alloc(now, Owner::Sequence) else { break };
            cursor = pool.publish(private, hash, cursor, chain.root()).map_err(refused)?.cursor;
        }
        pool.unpin(cursor, Owner::Sequence, Fence::Open).map_err(refused)?;
        chains.push(hashes);
    }
    let mut blocks = Vec::with_capacity(length);
    let mut samples = Vec::with_capacity(repeats);
    for repeat in 0..repeats {
        // A stride that is prime to most numbers of chains: neighbours in memory are not met in turn.
        let hashes = &chains[repeat * 7919 % chains.len()];
        blocks.clear();
        let begin = Instant::now();
        let hit = pool.find_prefix(hashes);
        pool.pin_chain(hit.leaf, Owner::Sequence, &mut blocks).map_err(refused)?;
        samples.push(begin.elapsed().as_nanos() as u64);
        if std::hint::black_box(&blocks).len() != length {
            return Err(format!("{} of {length} cached blocks were found", blocks.len()));
        }
        pool.unpin(hit.leaf, Owner::Sequence, Fence::Open).map_err(refused)?;
    }
    Ok(samples)
}
