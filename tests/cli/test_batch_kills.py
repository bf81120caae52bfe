"""``deepinfer batch`` ended by signals in the middle of its work, again and again: whole lines, and each request answered once."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import api_kit
from cli.running import TIMEOUT, run, start
from deepinfer import LLM, SamplingParams

ENGINE = ("--dtype", "float32", "--num-kv-blocks", "64", "--block-size", "16", "--max-num-seqs", "2", "--device", "cpu")
LINES = 16
ENDS = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -9}


def body(number: int) -> dict[str, Any]:
    """Long ones, drawn and greedy."""
    return {"prompt": f"line {number}", "max_tokens": 80, "min_tokens": 80, "temperature": number % 2, "seed": number}


@pytest.mark.parametrize(
    "signals",
    [
        [signal.SIGTERM],
        pytest.param([signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGTERM], marks=pytest.mark.nightly),
    ],
    ids=len,
)
def test_a_batch_that_is_killed_again_and_again_answers_each_line_once(tmp_path: Path, signals: list[signal.Signals]) -> None:
    source, target, model, rng = tmp_path / "in.jsonl", tmp_path / "out.jsonl", api_kit.tiny_model(), random.Random(len(signals))
    lines = [{"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": body(i)} for i in range(LINES)]
    source.write_text("{broken\n" + "".join(json.dumps(line) + "\n" for line in lines))
    command = ("batch", "--model", model, *ENGINE, str(source), str(target))
    known: bytes = b""
    for number in signals:
        process = start(*command)
        enough = len(known) + rng.randrange(1, 1500)
        deadline = time.monotonic() + TIMEOUT
        while not target.exists() or target.stat().st_size <= enough:
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.002)
        process.send_signal(number)
        err = process.communicate(timeout=TIMEOUT)[1]
        assert process.returncode == ENDS[number], err
        assert number == signal.SIGKILL or (b"the same command goes on from there" in err and b"Traceback" not in err)
        found = target.read_bytes()
        assert found.startswith(known) and found.endswith(b"\n")
        assert all(isinstance(json.loads(line), dict) for line in found.splitlines())
        known = found
    assert known.count(b"\n") < LINES + 1, "it was quicker than the signals"
    last = run(*command)
    assert last.returncode == 0, last.stderr
    answers = [json.loads(line) for line in target.read_bytes().splitlines()]
    assert sorted(a["custom_id"] for a in answers if a["error"] is None) == sorted(f"c{i}" for i in range(LINES))
    assert [a["error"]["line"] for a in answers if a["error"] is not None] == [1]
    with LLM(model, dtype="float32", num_kv_blocks=64, block_size=16, device="cpu", quiet=True) as llm:
        params = [SamplingParams(max_tokens=80, min_tokens=80, temperature=i % 2, seed=i, top_p=0.9) for i in range(LINES)]
        alone = llm.generate([f"line {i}" for i in range(LINES)], params, use_tqdm=False)
    texts = {a["custom_id"]: a["response"]["body"]["choices"][0]["text"] for a in answers if a["error"] is None}
    assert texts == {f"c{i}": o.outputs[0].text for i, o in enumerate(alone)}
