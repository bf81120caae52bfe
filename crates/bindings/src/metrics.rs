//! Counts, counters and what is known of a sequence, as dictionaries. For metrics and tests, not for every step.

use deepinfer_scheduler::{Counters, Counts, Event, Finish, Histogram, Info, Metrics, Status};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyTuple};

/// A dictionary of the named fields of a struct.
macro_rules! fields {
    ($py:expr, $from:expr, $($name:ident),+ $(,)?) => {{
        let dict = PyDict::new($py);
        $(dict.set_item(stringify!($name), $from.$name)?;)+
        dict
    }};
}

fn pool_counts<'py>(py: Python<'py>, counts: &Counts) -> PyResult<Bound<'py, PyDict>> {
    Ok(fields!(
        py,
        counts,
        total,
        free,
        cached,
        held,
        parked,
        reserved,
        held_by_transfers,
        cached_fenced,
        sequence_refs,
        transfer_refs
    ))
}

/// `{"groups": [...], "slots": {...}, "host_blocks": {...}, "host_slots": {...}, "snapshots": {...}}`.
pub fn counts<'py>(py: Python<'py>, counters: &Counters) -> PyResult<Bound<'py, PyDict>> {
    let groups = counters.groups.iter().map(|counts| pool_counts(py, counts)).collect::<PyResult<Vec<_>>>()?;
    let dict = PyDict::new(py);
    dict.set_item("groups", groups)?;
    dict.set_item("slots", pool_counts(py, &counters.slots)?)?;
    dict.set_item("host_blocks", pool_counts(py, &counters.host_blocks)?)?;
    dict.set_item("host_slots", pool_counts(py, &counters.host_slots)?)?;
    dict.set_item("snapshots", pool_counts(py, &counters.snapshots)?)?;
    Ok(dict)
}

/// One flat dictionary of integers.
pub fn stats<'py>(py: Python<'py>, metrics: &Metrics) -> PyResult<Bound<'py, PyDict>> {
    let dict = fields!(
        py,
        metrics,
        steps,
        decode_steps,
        prefill_steps,
        mixed_steps,
        dummy_steps,
        idle_plans,
        prefill_tokens,
        recomputed_tokens,
        decode_rows,
        drafted,
        accepted,
        output_tokens,
        added,
        admitted,
        hit_tokens,
        rerun_tokens,
        asked_tokens,
        fetches,
        fetches_ended,
        fetches_failed,
        fetches_no_room,
        fetches_under_way,
        fetched_tokens,
        fetch_duplicates,
        fetch_waits_ended,
        fetch_leases_ended,
        saves_given,
        saves_failed,
        saves_lost,
        snapshots_taken,
        snapshots_evicted,
        slices_gone,
        preemptions,
        swapped_out,
        swapped_in,
        swap_out_pages,
        swap_in_pages,
        swaps_refused,
        row_waits,
        ghost_rows,
        forks,
        kv_leases_ended,
        handover_leases_ended,
        failed_steps,
        stale,
        misuse,
        count_faults,
        running,
        decoding,
        waiting,
        wait_preempted,
        wait_grammar,
        wait_kv,
        wait_fork,
        swapping_out,
        swapped,
        wait_handover,
        transfers,
        available_blocks,
        last_step,
        last_step_ns
    );
    for (name, count) in ["stop", "length", "abort", "error", "handover"].into_iter().zip(metrics.finished) {
        dict.set_item(format!("finished_{name}"), count)?;
    }
    for (name, count) in ["nothing", "snapshot", "slice", "rerun"].into_iter().zip(metrics.starts) {
        dict.set_item(format!("start_{name}"), count)?;
    }
    Ok(dict)
}

fn times<'py>(py: Python<'py>, histogram: &Histogram) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("counts", histogram.counts.to_vec())?;
    dict.set_item("sum_ns", histogram.sum)?;
    Ok(dict)
}

/// The whole snapshot: `totals` as [`stats`] has them, and what is no single number.
pub fn metrics<'py>(py: Python<'py>, metrics: &Metrics, counters: &Counters) -> PyResult<Bound<'py, PyDict>> {
    let (asked, taken) = metrics.drafts.at_positions();
    let shares = fields!(py, metrics.chunk_fill, part, whole);
    shares.set_item("counts", metrics.chunk_fill.counts.to_vec())?;
    let votes = fields!(py, metrics.votes, rounds, second_rounds);
    for (name, count) in ["idle", "decode", "prefill", "fallback", "error"].into_iter().zip(metrics.votes.outcomes) {
        votes.set_item(name, count)?;
    }
    let dict = PyDict::new(py);
    dict.set_item("totals", stats(py, metrics)?)?;
    dict.set_item("pools", counts(py, counters)?)?;
    dict.set_item("chunk_fill", shares)?;
    dict.set_item("votes", votes)?;
    dict.set_item("drafts_asked", asked.to_vec())?;
    dict.set_item("drafts_taken", taken.to_vec())?;
    dict.set_item("device_time", times(py, &metrics.times.device)?)?;
    dict.set_item("host_time", times(py, &metrics.times.host)?)?;
    dict.set_item("idle_ns", metrics.times.idle_ns)?;
    dict.set_item("hidden_ns", metrics.times.hidden_ns)?;
    dict.set_item("bubble", metrics.bubble_ppm() as f64 / 1e6)?;
    dict.set_item("overlap", metrics.overlap_ppm() as f64 / 1e6)?;
    Ok(dict)
}

const fn status_name(status: Status) -> &'static str {
    match status {
        Status::WaitGrammar => "wait_grammar",
        Status::WaitKv => "wait_kv",
        Status::WaitFork => "wait_fork",
        Status::Ready => "ready",
        Status::Running => "running",
        Status::SwappingOut => "swapping_out",
        Status::Swapped => "swapped",
        Status::Handover => "handover",
        Status::Finished => "finished",
    }
}

/// Name of a way to end, as outputs and requests use it.
pub const fn finish_name(finish: Finish) -> &'static str {
    match finish {
        Finish::Stop => "stop",
        Finish::Length => "length",
        Finish::Abort => "abort",
        Finish::Error => "error",
        Finish::Handover => "handover",
    }
}

/// Inverse of [`finish_name`], for the ways in which a caller can end a sequence.
pub fn finish_named(name: &str) -> Option<Finish> {
    [Finish::Stop, Finish::Length, Finish::Abort, Finish::Error].into_iter().find(|&finish| finish_name(finish) == name)
}

/// What is known of one sequence.
pub fn info<'py>(py: Python<'py>, info: &Info) -> PyResult<Bound<'py, PyDict>> {
    let dict = fields!(
        py,
        info,
        prompt_tokens,
        output_tokens,
        computed_tokens,
        cached_tokens,
        preemptions,
        priority,
        arrival,
        user
    );
    dict.set_item("status", status_name(info.status))?;
    dict.set_item("finish", info.finish.map(finish_name))?;
    dict.set_item("state_slot", info.slot)?;
    dict.set_item("arrived_ns", info.times.arrived)?;
    dict.set_item("admitted_ns", info.times.admitted)?;
    dict.set_item("first_token_ns", info.times.first_token)?;
    dict.set_item("finished_ns", info.times.finished)?;
    Ok(dict)
}

/// `("stored" | "removed", hash, parent, namespace)` with 16-byte hashes, or `("reset", lost)`.
pub fn events<'py>(py: Python<'py>, events: &[Event]) -> PyResult<Bound<'py, PyList>> {
    let list = PyList::empty(py);
    for event in events {
        let tuple = match *event {
            Event::Stored { hash, parent, namespace } => change(py, "stored", [hash.0, parent.0, namespace.0])?,
            Event::Removed { hash, parent, namespace } => change(py, "removed", [hash.0, parent.0, namespace.0])?,
            Event::Reset { lost } => ("reset", lost).into_pyobject(py)?,
        };
        list.append(tuple)?;
    }
    Ok(list)
}

fn change<'py>(py: Python<'py>, kind: &str, hashes: [u128; 3]) -> PyResult<Bound<'py, PyTuple>> {
    let [hash, parent, namespace] = hashes.map(|hash| PyBytes::new(py, &hash.to_le_bytes()));
    (kind, hash, parent, namespace).into_pyobject(py)
}
