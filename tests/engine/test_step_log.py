"""What is told of steps: the metrics of an engine, the line every ten seconds, the trace."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from deepinfer.engine.step_log import EngineMetrics, StepLog, keep_off
from deepinfer.errors import ConfigError
from deepinfer.sampling import SamplingParams
from deepinfer.worker.device_queue import StepTimes
from engine_kit import collect, make_engine, random_prompts, request, tiny_checkpoint

LONG = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0)


@pytest.mark.parametrize("overlap", [False, True])
def test_metrics_agree_with_what_was_run(device: str, overlap: bool) -> None:
    with make_engine(tiny_checkpoint("llama"), device, zero_overhead=overlap) as engine:
        for i, prompt in enumerate(random_prompts([40, 70, 33])):
            engine.add_request(request(str(i), prompt, LONG))
        collect(engine)
        m = engine.metrics()
        assert m.totals == engine.core_stats()
        assert m.totals["output_tokens"] == 3 * 12
        assert sum(m.steps[kind] for kind in ("decode", "prefill", "mixed")) == m.totals["steps"] == engine.counters.steps
        assert (m.running, m.waiting["resources"]) == (0, 0)
        assert sum(m.chunk_fill) == m.steps["prefill"] + m.steps["mixed"]
        assert sum(m.device_time.counts) == sum(m.host_time.counts) == m.totals["steps"]
        assert m.device_time.sum_ns == pytest.approx(engine.counters.device_s * 1e9, rel=1e-3)
        assert 0 < m.host_time.mean_ms < 1000 and 0 <= m.bubble < 1 and 0 <= m.overlap <= 1
        pool = m.blocks[0]
        assert pool["free"] + pool["cached"] + pool["held"] + pool["parked"] + pool["reserved"] == pool["total"]


def test_time_without_work_is_no_bubble(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step says that the device idled for 7 s before it: the first one after a rest does not count."""
    with make_engine(tiny_checkpoint("llama"), device) as engine:
        monkeypatch.setattr(engine._runner, "times", lambda step: StepTimes(7.0, 0.0, 0.25, 0.0))
        for name in ("a", "b", "c"):
            engine.add_request(request(name, [5, 6, 7], LONG))
            collect(engine)
        assert engine.counters.steps > 30
        assert engine.counters.idle_s == 7.0 * (engine.counters.steps - 3)
        assert engine.counters.device_s == 0.25 * engine.counters.steps


def test_a_line_is_due_after_the_interval_and_only_if_a_step_ran(device: str) -> None:
    now, out = [0.0], io.StringIO()
    with make_engine(tiny_checkpoint("llama"), device) as engine:
        log = StepLog(engine.metrics, 10.0, out, lambda: now[0])
        log.tick()
        now[0] = 10.0
        log.tick()
        assert out.getvalue() == "", "nothing ran"
        engine.add_request(request("a", [5, 6, 7], LONG))
        collect(engine)
        now[0] = 19.9
        log.tick()
        assert out.getvalue() == "", "not due yet"
        now[0] = 20.5
        log.tick()
        now[0] = 60.0
        log.tick()
    lines = out.getvalue().splitlines()
    assert len(lines) == 1
    assert "12 steps" in lines[0] and "decode 11" in lines[0] and "running 0, waiting 0" in lines[0] and "hits 0 %" in lines[0]
    assert f"{12 / 10.5:.1f} tok/s out" in lines[0]


def test_a_line_waits_until_nobody_writes_one(device: str) -> None:
    now, out, open_line = [0.0], io.StringIO(), [True]
    with make_engine(tiny_checkpoint("llama"), device) as engine:
        log = StepLog(engine.metrics, 10.0, out, lambda: now[0])
        engine.add_request(request("a", [5, 6, 7], LONG))
        collect(engine)
        with keep_off(lambda: open_line[0]):
            for now[0] in (10.5, 15.0, 24.9):
                log.tick()
            assert out.getvalue() == ""
            open_line[0] = False
            now[0] = 25.0
            log.tick()
            assert out.getvalue().count("\n") == 1 and f"{12 / 25:.1f} tok/s out" in out.getvalue(), "of all the time that passed"
            open_line[0] = True
        engine.add_request(request("b", [5, 6, 7], LONG))
        collect(engine)
        now[0] = 40.0
        log.tick()
        assert out.getvalue().count("\n") == 2, "nobody writes any more"


def test_quiet_engines_write_no_line(device: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfer.engine.engine.INTERVAL", 1e-9)
    for quiet, expected in ((True, False), (False, True)):
        with make_engine(tiny_checkpoint("llama"), device, quiet=quiet) as engine:
            engine.add_request(request("a", [5, 6, 7], LONG))
            collect(engine)
        assert ("tok/s out" in capfd.readouterr().err) is expected


def test_reading_metrics_of_a_fresh_engine(device: str) -> None:
    with make_engine(tiny_checkpoint("llama"), device) as engine:
        m = engine.metrics()
        assert isinstance(m, EngineMetrics)
        assert (m.bubble, m.overlap, m.device_time.mean_ms) == (0.0, 0.0, 0.0)
        assert m.drafts_asked == m.drafts_taken == (0,) * 16


@pytest.mark.parametrize("overlap", [False, True])
def test_a_trace_holds_that_many_steps_and_the_operators_in_them(
    device: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], overlap: bool
) -> None:
    path = tmp_path / "trace.json"
    with make_engine(tiny_checkpoint("llama", layers=1), device, zero_overhead=overlap) as engine:
        engine.add_request(request("a", [5, 6, 7], LONG))
        engine.trace(3, path)
        collect(engine)
        names = [e.get("name") for e in json.loads(path.read_text())["traceEvents"]]
        lookups = names.count("aten::embedding")  # ids, keys and values: three a step of one layer
        assert 9 <= lookups <= (15 if overlap else 9), "the steps in flight at the end were launched within it"
        assert str(path) in capfd.readouterr().err
        with pytest.raises(ConfigError, match="at least one step"):
            engine.trace(0, path)


def test_a_trace_that_outlasts_the_work_is_written_at_the_end(device: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with make_engine(tiny_checkpoint("llama", layers=1), device) as engine:
        engine.add_request(request("a", [5, 6, 7], SamplingParams(max_tokens=2, ignore_eos=True)))
        engine.trace(100, path)
        collect(engine)
        assert not path.exists()
    assert json.loads(path.read_text())["traceEvents"]
