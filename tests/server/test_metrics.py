"""What a server counts: everything the engine does, what the front does, under bounded labels, whatever the engine is doing."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Histogram

import api_kit
from deepinfer import LLM
from deepinfer.engine.step_log import EngineMetrics
from deepinfer.sampling import SamplingParams
from deepinfer.server.metrics import engine as engine_metrics
from deepinfer.server.metrics import grammars
from deepinfer.server.metrics.engine import COUNTERS, ELSEWHERE, GAUGES, Snapshot, families
from deepinfer.server.metrics.front import GAP
from deepinfer.server.metrics.snapshots import Snapshots
from deepinfer.server.metrics.weighted import WeightedHistogram
from deepinfer.server.settings import ServerSettings
from engine_kit import collect, make_engine, random_prompts, request, tiny_checkpoint
from metrics_kit import read, total
from server_kit import Served, scripted, serving


@pytest.fixture(scope="module")
def snapshot(device: str) -> EngineMetrics:
    """Of an engine that has done something, with every part that only some engines have."""
    with make_engine(tiny_checkpoint("llama"), device) as engine:
        for i, prompt in enumerate(random_prompts([40, 70, 33])):
            engine.add_request(request(str(i), prompt, SamplingParams(max_tokens=12, ignore_eos=True, temperature=0)))
        collect(engine)
        made = engine.metrics()
    return dataclasses.replace(
        made,
        tables={"hits": 3, "capacity": 9},
        slices={"cut": 4, "bytes": 5},
        store={"lookups": 6},
        grammars={"fills": 7},
        moe={"balance_ratio": 1},
        graphs={"buckets": 2, "replays": 8},
    )


def shown(metrics: EngineMetrics) -> list[tuple[str, frozenset[tuple[str, str]], float]]:
    made = families("m", {"engine": Snapshot(metrics, 0.0)})
    return [(s.name, frozenset(s.labels.items()), s.value) for family in made for s in family.samples]


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], float]]:
    """Every number in a snapshot, with the way to it."""
    match value:
        case bool() | str() | None:
            return
        case int() | float():
            yield path, value
        case dict():
            for key, inner in value.items():
                yield from leaves(inner, (*path, key))
        case list() | tuple():
            for i, inner in enumerate(value):
                yield from leaves(inner, (*path, i))
        case _:
            for field in dataclasses.fields(value):
                yield from leaves(getattr(value, field.name), (*path, field.name))


def changed(value: Any, path: tuple[Any, ...]) -> Any:
    """A copy with one number larger."""
    if not path:
        return value + 1_000_003
    key, *rest = path
    match value:
        case dict():
            return {**value, key: changed(value[key], tuple(rest))}
        case list() | tuple():
            return type(value)([changed(v, tuple(rest)) if i == key else v for i, v in enumerate(value)])
        case _:
            return dataclasses.replace(value, **{key: changed(getattr(value, key), tuple(rest))})


TWICE = {"running", "decoding", "hit_tokens", "asked_tokens", "rerun_tokens"}
"""Fields that repeat a total, which is what is shown."""


def test_every_number_of_a_snapshot_is_shown(snapshot: EngineMetrics) -> None:
    before = shown(snapshot)
    missing = [path for path, _ in leaves(snapshot) if path[0] not in TWICE and shown(changed(snapshot, path)) == before]
    # Shown through the fields that are made of them; the total of a pool is the sum of its states.
    hidden = {("totals", name) for name in ELSEWHERE} | {("steps", "idle")}
    assert [path for path in missing if path not in hidden and path[-1] != "total"] == []
    assert set(snapshot.totals) == COUNTERS.keys() | GAUGES.keys() | ELSEWHERE
    names = [(name, labels) for name, labels, _ in before]
    assert len(names) == len(set(names))


def test_numbers_are_those_of_the_snapshot(snapshot: EngineMetrics) -> None:
    made = {(name, labels - {("model_name", "m"), ("engine", "engine")}): value for name, labels, value in shown(snapshot)}
    none: frozenset[tuple[str, str]] = frozenset()
    assert made["deepinfer:output_tokens_total", none] == 36
    assert made["deepinfer:finished_total", frozenset({("reason", "length")})] == 3
    assert made["deepinfer:step_device_seconds_count", none] == snapshot.totals["steps"]
    assert made["deepinfer:step_device_seconds_sum", none] == snapshot.device_time.sum_ns / 1e9
    pool = snapshot.blocks[0]
    held = made["deepinfer:kv_blocks", frozenset({("group", "0"), ("state", "held")})]
    assert (held, made["deepinfer:kv_usage_ratio", frozenset({("group", "0")})]) == (pool["held"], engine_metrics.used(pool))
    assert made["deepinfer:prefill_chunk_rows_total", none] == snapshot.chunk_rows == 40 + 70 + 33


def test_every_count_of_compiling_grammars_is_shown(device: str) -> None:
    with LLM(api_kit.tiny_model(), device=device, **api_kit.SETTINGS) as llm:
        stats = llm.structured_stats()
    assert grammars.unknown(stats) == set() and grammars.unknown({"new": 1.0}) == {"new"}
    registry = CollectorRegistry()
    metrics = grammars.GrammarMetrics(registry, "m")
    metrics.sync({})
    for factor in (1.0, 3.0):
        counts = {name: i * factor for i, name in enumerate(stats)}
        metrics.sync(counts)
    made = {s.name: s.value for m in registry.collect() for s in m.samples if not s.name.endswith(("_bucket", "_created", "seconds_count"))}
    assert sorted(made.values()) == sorted(value for name, value in counts.items() if "_le_" not in name and not name.endswith("_count"))
    buckets = [s.value for m in registry.collect() for s in m.samples if s.name.endswith("_bucket")]
    assert buckets == [value for name, value in counts.items() if "_le_" in name]


def test_accepted_lengths_are_told_from_what_was_taken_at_each_position(snapshot: EngineMetrics) -> None:
    """Five sequences with drafts; 0, 1, 1, 2 and 2 of them were accepted."""
    asked, taken = [5, 4, *[0] * 14], [4, 2, *[0] * 14]
    totals = snapshot.totals | {"accepted": 6}
    made = shown(dataclasses.replace(snapshot, totals=totals, drafts_asked=tuple(asked), drafts_taken=tuple(taken)))
    buckets = {dict(labels)["le"]: value for name, labels, value in made if name == "deepinfer:accepted_length_bucket"}
    assert [buckets[le] for le in ("0", "1", "2", "15", "+Inf")] == [1, 3, 5, 5, 5]
    assert next(value for name, _, value in made if name == "deepinfer:accepted_length_sum") == 6


def test_many_observations_at_once_are_as_many_alone() -> None:
    registries = CollectorRegistry(), CollectorRegistry()
    alone = Histogram("x", "x", registry=registries[0], buckets=GAP)
    at_once = WeightedHistogram("x", "x", registry=registries[1], buckets=GAP)
    for value, count in ((0.0005, 3), (0.0006, 1), (0.3, 4), (1e9, 2)):
        at_once.observe_many(value, count)
        for _ in range(count):
            alone.observe(value)

    def values(registry: CollectorRegistry) -> list[tuple[str, str, float]]:
        return [(s.name, s.labels.get("le", ""), s.value) for m in registry.collect() for s in m.samples if not s.name.endswith("_created")]

    assert [v[:2] for v in values(registries[0])] == [v[:2] for v in values(registries[1])]
    assert [v[2] for v in values(registries[1])] == pytest.approx([v[2] for v in values(registries[0])])


@pytest.fixture(scope="module")
def counted() -> Iterator[Served]:
    """A server with everything that is optional."""
    with serving(None, "--served-model-name", "tiny", "--vllm-metric-names", "--log-format", "json", "--speculative", "ngram") as made:
        yield made


def body(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "counted " * 9, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **more}


def test_a_run_is_counted_as_it_was(counted: Served) -> None:
    before = read(counted.get("/metrics").text)
    for stream in (False, True):
        if stream:
            counted.events("/v1/completions", body(stream=True))
        else:
            usage = counted.post("/v1/completions", body(n=2, temperature=1, seed=3)).json()["usage"]
    assert counted.post("/v1/completions", body(temperature=-1)).status_code == 400
    time.sleep(0.6)  # an older snapshot of the engine would do for half a second
    after = read(counted.get("/metrics").text)

    def rise(name: str, **labels: str) -> float:
        start = sum(v for (n, key), v in before.items() if n == name and set(labels.items()) <= key)
        return total(after, name, **labels) - start

    assert rise("deepinfer:http_requests_total", endpoint="/v1/completions", method="POST", status="200") == 2
    assert rise("deepinfer:http_requests_total", endpoint="/v1/completions", status="400") == 1
    assert rise("deepinfer:requests_total", endpoint="/v1/completions", finish_reason="length") == 3
    assert rise("deepinfer:prompts_total") == 2 == rise("deepinfer:tenant_requests_total", tenant="default")
    assert rise("deepinfer:prompt_tokens_total") == 2 * usage["prompt_tokens"] == rise("deepinfer:tenant_prompt_tokens_total")
    assert 0 < rise("deepinfer:prompt_tokens_cached_total") <= 2 * usage["prompt_tokens"]
    assert rise("deepinfer:generation_tokens_total") == 36 == rise("deepinfer:output_tokens_total")
    # Of a stream its first output may have several tokens, which had no gap.
    assert 33 - 11 <= rise("deepinfer:inter_token_latency_seconds_count") <= 33
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time"):
        assert rise(f"deepinfer:{name}_seconds_count") == 2 == rise(f"vllm:{name}_seconds_count"), name
    assert rise("deepinfer:e2e_request_latency_seconds_sum") >= rise("deepinfer:time_to_first_token_seconds_sum") > 0
    for name in ("http_requests_in_flight", "requests_in_flight", "running"):
        assert total(after, f"deepinfer:{name}") == 0, "who scrapes does not count"
    assert total(after, "deepinfer:engine_up") == 1 and total(after, "process_resident_memory_bytes") > 0
    assert rise("deepinfer:drafts_at_position_total", position="1") > 0
    assert rise("vllm:generation_tokens_total") == 36 == rise("deepinfer:tenant_generation_tokens_total")
    assert rise("vllm:request_success_total", finished_reason="length") == 3
    assert rise("vllm:prefix_cache_hits_total") == rise("deepinfer:hit_tokens_total") > 0
    assert rise("vllm:spec_decode_num_drafts_total") == rise("deepinfer:drafts_at_position_total", position="1")
    assert 0 <= total(after, "vllm:kv_cache_usage_perc", model_name="tiny", engine="0") < 1


def test_both_forms_of_the_page(counted: Served) -> None:
    plain = counted.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain; version=")
    open_metrics = counted.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert open_metrics.headers["content-type"].startswith("application/openmetrics-text") and open_metrics.text.endswith("# EOF\n")


def test_no_client_makes_a_label(counted: Served) -> None:
    """Paths, methods, ids, models and keys that nobody has heard of."""
    counted.get("/no/such/route")
    before = set(read(counted.get("/metrics").text))
    for i in range(5):
        with counted.client() as client:
            client.request(f"M{'x' * i}", "/v1/models")
            client.get(f"/nowhere/{i}", headers={"x-request-id": f"mine-{i}", "authorization": f"Bearer key-{i}"})
            client.get(f"/v1/models/model-{i}")
            client.post("/v1/completions", json=body(model=f"model-{i}", user=f"user-{i}"))
    new = set(read(counted.get("/metrics").text)) - before
    text = repr(new)
    assert not [i for i in range(5) if f"mine-{i}" in text or f"key-{i}" in text or f"model-{i}" in text or f"user-{i}" in text]
    assert {dict(key).get("method") for _, key in new} <= {None, "OTHER", "GET", "POST"}
    assert {dict(key).get("endpoint") for _, key in new} <= {None, "/v1/models", "/v1/models/{name:path}", "/v1/completions"}


class Ranks:
    """Two engines; the second one answers when it is told to."""

    engines = ("rank0", "rank1")

    def __init__(self, metrics: Any) -> None:
        self.metrics_now, self.asked = metrics, {"rank0": 0, "rank1": 0}
        self.answers = asyncio.Event()

    async def measure(self, engine: str) -> Any:
        self.asked[engine] += 1
        if engine == "rank1":
            await self.answers.wait()
        return self.metrics_now


def test_who_scrapes_never_waits_for_a_long_step(snapshot: EngineMetrics, monkeypatch: pytest.MonkeyPatch) -> None:
    """And sees who did not answer, beside the newest numbers of those who did."""
    monkeypatch.setattr("deepinfer.server.metrics.snapshots.PATIENCE", 0.2)
    monkeypatch.setattr("deepinfer.server.metrics.snapshots.FRESH", 0.0)

    def page(snapshots: dict[str, Snapshot]) -> dict[tuple[str, str], float]:
        made = (s for family in families("m", snapshots) for s in family.samples)
        return {(s.name.removeprefix("deepinfer:"), s.labels["engine"]): s.value for s in made if len(s.labels) == 2}

    async def look() -> None:
        ranks = Ranks(snapshot)
        snapshots = Snapshots(ranks)  # type: ignore[arg-type]
        shown = page(await snapshots.newest())
        assert shown["engine_answers", "rank0"] == 1 and shown["output_tokens_total", "rank0"] == 36
        assert shown["engine_answers", "rank1"] == 0 and ("output_tokens_total", "rank1") not in shown, "nothing is known yet"
        ranks.answers.set()
        while snapshots.asking:
            await asyncio.sleep(0)
        assert page(await snapshots.newest())["engine_answers", "rank1"] == 1
        ranks.answers.clear()
        asked, began = dict(ranks.asked), time.monotonic()
        both = await asyncio.gather(snapshots.newest(), snapshots.newest())
        assert ranks.asked == {name: count + 1 for name, count in asked.items()}, "who comes meanwhile waits for the same answer"
        for shown in map(page, both):
            assert [shown["engine_answers", name] for name in ranks.engines] == [1, 0]
            assert shown["output_tokens_total", "rank1"] == 36 and shown["snapshot_age_seconds", "rank1"] >= 0.2
        assert time.monotonic() - began < 5
        assert [task.cancel() for task in snapshots.asking] == [True]

    asyncio.run(look())


def test_a_dead_engine_leaves_its_last_numbers_and_is_down() -> None:
    async def die() -> None:
        async with scripted(ServerSettings(served_model_name=("m",))) as app:
            assert "deepinfer:engine_up" in (await app.send("GET", "/metrics").done()).body.decode()
            app.front.die()
            page = read((await app.send("GET", "/metrics").done()).body.decode())
            assert total(page, "deepinfer:engine_up") == 0
            assert total(page, "deepinfer:http_requests_total", endpoint="/metrics") == 1

    asyncio.run(die())


@pytest.mark.parametrize("protected", [False, True])
def test_a_key_is_asked_for_only_where_metrics_are_protected(protected: bool) -> None:
    async def ask() -> None:
        async with scripted(ServerSettings(served_model_name=("m",), api_key=("k",), protect_metrics=protected)) as app:
            assert (await app.send("GET", "/metrics").done()).status == (401 if protected else 200)
            assert (await app.send("GET", "/metrics", headers={"authorization": "Bearer k"}).done()).status == 200

    asyncio.run(ask())


SHARES = """
import sys
from deepinfer.server.metrics.front import FrontMetrics
from deepinfer.server.records import CallRecord
front = FrontMetrics(None, "m")
for _ in range(int(sys.argv[1])):
    front.observe(CallRecord("GET", "/health", "id", status=200, started=1.0, ended=1.5))
front.gap(0.2, 4)
"""


def test_front_processes_that_share_a_folder_are_added_up(tmp_path: Path) -> None:
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for count in (2, 3):
        subprocess.run([sys.executable, "-c", SHARES, str(count)], env=env, check=True, timeout=120)
    reading = """
        import os
        from prometheus_client import CollectorRegistry, generate_latest
        from prometheus_client.multiprocess import MultiProcessCollector
        registry = CollectorRegistry()
        MultiProcessCollector(registry, os.environ["PROMETHEUS_MULTIPROC_DIR"])
        print(generate_latest(registry).decode())
    """
    text = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(reading)], env=env, check=True, timeout=120, capture_output=True, text=True
    ).stdout
    samples = read(text)
    assert total(samples, "deepinfer:http_requests_total", endpoint="/health") == 5
    assert total(samples, "deepinfer:inter_token_latency_seconds_count") == 8
    assert total(samples, "deepinfer:http_request_duration_seconds_sum") == pytest.approx(2.5)
