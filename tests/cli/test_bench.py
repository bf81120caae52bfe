"""What `deepinfer bench latency` and `throughput` count, on clocks that tests move, and on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from cli.running import TIMEOUT, environment, run
from cli.test_bad_input import write_config
from deepinfer import LLM, CompletionOutput, RequestOutput, SamplingParams
from deepinfer.cli import bench_load
from deepinfer.cli.app import exit_code
from deepinfer.engine.step_log import EngineMetrics, Times
from deepinfer.errors import CapacityError

BENCHES = Path(__file__).resolve().parents[2] / "benches"


def test_latency_of_several_sizes_on_one_engine(tmp_path: Path) -> None:
    """A line of JSON for each, and decode steps that fit what answers took."""
    model = write_config(tmp_path / "m")
    load = ("--input-len", "20", "--output-len", "40", "--num-seqs", "1", "3", "--num-iters", "3", "--no-stream")
    result = run("bench", "latency", "--model", model, "--load-format", "dummy", "--device", "cpu", "--json", *load)
    assert (result.returncode, result.stderr) == (0, b"")
    values = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(v["num_seqs"], v["max_num_seqs"], v["stream"]) for v in values] == [(1, 3, False), (3, 3, False)]
    for value in values:
        assert "itl_ms" not in value and value["decode_tokens_per_second"] > 0
        assert value["step_ms"]["median"] > 0 and 0 < value["step_ms"]["mean"] * 35 < value["latency_ms"]["p99"]
        assert "between two returns of LLM.step" in value["step_counting"]
    people = run("bench", "latency", "--model", model, "--load-format", "dummy", "--device", "cpu", *load)
    assert people.returncode == 0 and people.stdout.count(b" at once, 20 tokens in, 40 out, 3 batches") == 2
    assert values[0]["data_parallel"] == 1 and people.stdout.count(b"a step of an engine: device ") == 2
    assert people.stdout.count(b"decode step: mean ") == 2 and b"time between tokens" not in people.stdout


@pytest.mark.parametrize("given", [(), ("--max-model-len", "5000")])
def test_a_load_that_is_too_long_is_told_by_the_options_that_make_it(given: tuple[str, ...], tmp_path: Path) -> None:
    model = write_config(tmp_path / "m")
    load = ("--load-format", "dummy", "--device", "cpu", "--input-len", "4000", "--output-len", "200", *given)
    result = run("bench", "throughput", "--model", model, *load)
    (line,) = result.stderr.decode().splitlines()
    assert (result.returncode, result.stdout) == (2, b"")
    if given:
        assert line.startswith("deepinfer: error: max_model_len 5000 is above the ")
    else:
        assert line.startswith("deepinfer: error: --input-len 4000 and --output-len 200 are too much: 4200 tokens are above the "), line
        assert line.endswith("; lower their sum")


@pytest.mark.parametrize("bench", ["latency", "throughput"])
def test_figures_of_several_engines_say_so_and_count_no_steps(bench: str, tmp_path: Path) -> None:
    model = write_config(tmp_path / "m")
    engines = ("--load-format", "dummy", "--device", "cpu", "--data-parallel", "2")
    load = (*engines, "--input-len", "20", "--output-len", "40", "--num-seqs", "2")
    result = run("bench", bench, "--model", model, *load, "--json")
    assert (result.returncode, result.stderr) == (0, b"")
    value = json.loads(result.stdout)
    assert [value[name] for name in ("data_parallel", "expert_parallel", "step_policy")] == [2, False, "mixed"]
    assert value["device_ms_a_step"] > 0 and value["host_ms_a_step"] > 0
    people = run("bench", bench, "--model", model, *load, "--step-policy", "decode_first").stdout.decode()
    assert "; 2 engines, each up to 2 at once; steps decode_first\n" in people
    assert "a step of an engine: device " in people
    if bench == "latency":
        assert value["step_ms"] == {"mean": None, "median": None} and "none is counted with several engines" in value["step_counting"]
        assert "decode step: none is counted with several engines" in people and "decode step: mean" not in people
    else:
        assert "40 out, up to 4 at once, " in people


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_a_trace_on_a_cpu_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's profiler has nothing to say of GPUs that are not there."""
    monkeypatch.chdir(tmp_path)
    model = write_config(tmp_path / "m")
    load = ("--load-format", "dummy", "--device", "cpu", "--input-len", "8", "--output-len", "4", "--num-iters", "1", "--trace", "2")
    result = run("bench", "latency", "--model", model, *load)
    (line,) = result.stderr.decode().splitlines()
    assert result.returncode == 0 and line.startswith("deepinfer: trace of the steps written to deepinfer-trace-"), line


SCRIPTS = {
    "steps.py": ("--model", "smollm2"),
    "ranks.py": ("--model", "smollm2"),
    "overlap.py": ("--model", "smollm2"),
    "decode_launch.py": (),
    "first_token.py": ("--model", "smollm2"),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_say_in_one_line_that_there_is_no_gpu(script: str) -> None:
    command = [sys.executable, str(BENCHES / script), *SCRIPTS[script], "--device", "cuda"]
    made = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=TIMEOUT)
    assert made.returncode == 2 and made.stdout == ""
    (line,) = made.stderr.splitlines()
    assert line.startswith("deepinfer: error: device 'cuda' is not there: ") and line.endswith("Use device='cpu' instead")


def test_a_scripts_failures_become_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    def ends(how: BaseException) -> Callable[[], int]:
        def script() -> int:
            raise how

        return script

    assert exit_code(lambda: None) == 0 and exit_code(lambda: 3) == 3 and exit_code(ends(SystemExit(4))) == 4
    assert capsys.readouterr().err == ""
    assert exit_code(ends(SystemExit("no GPU here"))) == 2 and capsys.readouterr().err == "no GPU here\n"
    assert exit_code(ends(CapacityError("too\nlarge"))) == 2 and capsys.readouterr().err == "deepinfer: error: too large\n"


def test_which_steps_are_decode_steps() -> None:
    """Of 256 tokens those of the last 230 steps but 10, whatever prompts took before them."""
    steps = [9.0] * 7 + [float(i) for i in range(256)]
    assert bench_load.decode_steps(steps, 256) == [float(i) for i in range(26, 246)]
    assert bench_load.decode_steps(steps[:7] + steps[7:17], 10) == [float(i) for i in range(1, 10)]
    assert bench_load.decode_steps([1.0, 2.0], 2) == [2.0]
    assert bench_load.decode_steps([1.0], 1) == [] and bench_load.step_times([[1.0]], 1) == {"mean": None, "median": None}
    batches = [[1.0, 0.002, 0.004], [1.0, 0.5, 0.5], [1.0, 0.001, 0.001]]
    assert bench_load.step_times(batches, 3) == {"mean": 3.0, "median": 3.0}


class ScriptedLLM:
    """Answers every prompt with a token a step, a step taking 10 ms of a clock that only it moves."""

    def __init__(self, now: list[float]) -> None:
        self.now, self.left = now, dict[str, int]()

    def add_request(self, prompt: list[int], params: SamplingParams, *, request_id: str, stream: bool) -> None:
        self.now[0] += 0.001
        self.left[request_id] = params.max_tokens or 0

    def step(self) -> list[RequestOutput]:
        self.now[0] += 0.010
        self.left = {name: n - 1 for name, n in self.left.items()}
        done = [name for name, n in self.left.items() if not n]
        self.left = {name: n for name, n in self.left.items() if n}
        return [_whole(name, 50, self.now[0]) for name in done]


def _whole(name: str, tokens: int, now: float) -> RequestOutput:
    answer = CompletionOutput(index=0, text="", token_ids=[1] * tokens, cumulative_logprob=None, logprobs=None, finish_reason="length")
    return cast(
        RequestOutput, SimpleNamespace(request_id=name, outputs=[answer], finished=True, metrics=SimpleNamespace(first_token_time=now))
    )


def test_steps_are_timed_between_their_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(bench_load.time, "monotonic", lambda: now[0])
    made = bench_load.timed_run(cast(LLM, ScriptedLLM(now)), [[1]] * 4, 50, "r", stream=False)
    assert made.submit_seconds == pytest.approx(0.004) and len(made.steps) == 50 and len(made.times) == 4
    assert made.steps == pytest.approx([0.010] * 50)
    assert bench_load.step_times([made.steps], 50) == {"mean": 10.0, "median": 10.0}


def test_the_devices_part_is_that_of_the_time_between_two_snapshots() -> None:
    def at(device: int, host: int, idle: int, steps: int) -> EngineMetrics:
        def times(total: int) -> Times:
            return Times((0, steps), total)

        return cast(EngineMetrics, SimpleNamespace(device_time=times(device), host_time=times(host), idle_ns=idle))

    before, after = at(50_000_000, 9_000_000, 40_000_000, 5), at(149_000_000, 11_000_000, 41_000_000, 15)
    assert bench_load.device_figures(before, after) == {"bubble": 0.01, "device_ms_a_step": 9.9, "host_ms_a_step": 0.2}
    assert set(bench_load.device_figures(after, after).values()) == {None}
