//! Python module `deepinfer._core`: the Rust core behind `PyO3`.
//!
//! Owns: conversion of arguments and results, the table from Rust errors to Python classes, letting go of the interpreter lock,
//! catching panics at the edge, references that keep the step ring's memory alive.
//!
//! Never touches: any decision. Each file mirrors one part of the Rust API and calls it; what a call means is written there
//! and in `python/deepinfer/_core.pyi`.

// PyO3 hands arguments over by value.
#![allow(clippy::needless_pass_by_value)]

mod bench;
mod config;
mod core;
mod error;
mod kvserver;
mod kvstore;
mod kvtransfer;
mod memory;
mod metrics;
mod output;
mod prepared;
mod ring;
mod speculative;
mod transfers;
mod vote;

use pyo3::prelude::*;

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("HEADER_WORDS", deepinfer_scheduler::HEADER_WORDS)?;
    module.add("OUTPUT_WORDS", deepinfer_scheduler::OUTPUT_WORDS)?;
    module.add("VOTE_WORDS", deepinfer_scheduler::VOTE_WORDS)?;
    module.add("DEBUG", cfg!(debug_assertions))?;
    module.add_class::<config::PagedGroup>()?;
    module.add_class::<config::StateGroup>()?;
    module.add_class::<config::PyWindowRule>()?;
    module.add_class::<config::CoreConfig>()?;
    module.add_class::<core::Core>()?;
    module.add_class::<speculative::MtpRuntime>()?;
    module.add("KV_SETTINGS_EXAMPLE", deepinfer_kvstore::settings::EXAMPLE)?;
    module.add_class::<kvserver::KvAgent>()?;
    module.add_class::<kvserver::KvOperator>()?;
    module.add_class::<kvserver::KvServer>()?;
    module.add_class::<kvstore::KvTier>()?;
    module.add_class::<kvtransfer::KvTicket>()?;
    module.add_class::<kvtransfer::KvTransfer>()?;
    module.add_function(wrap_pyfunction!(bench::bench_steps, module)?)?;
    module.add_function(wrap_pyfunction!(bench::bench_chain_hash, module)?)?;
    module.add_function(wrap_pyfunction!(bench::bench_prefix_match, module)?)?;
    module.add("KV_BENCH_PARTS", deepinfer_kvstore::bench::PARTS)?;
    module.add_function(wrap_pyfunction!(kvserver::kv_bench, module)?)?;
    module.add_function(wrap_pyfunction!(kvserver::kv_keys, module)?)?;
    Ok(())
}
