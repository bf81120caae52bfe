"""The real commands with the real demo model, each as a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cli.running import TIMEOUT, needs_smollm2, run, start
from cli.test_bad_input import write_config
from deepinfer.cli import bench_load

pytestmark = needs_smollm2
MODEL = ("--model", "smollm2", "--device", "cpu")
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."


def chat_line(custom_id: str, content: str = QUESTION, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": messages, "temperature": 0, "max_tokens": 12, **body},
    }


def completion_line(custom_id: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"temperature": 0, "max_tokens": 8, **body}}


def as_lines(*lines: Any) -> bytes:
    return b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)


def read_answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_generate_streams_the_answer_and_reports_it() -> None:
    began = time.monotonic()
    process = start("generate", *MODEL, "--temperature", "0", QUESTION)
    assert process.stdout is not None and process.stderr is not None
    first = os.read(process.stdout.fileno(), 1 << 16)
    waited = time.monotonic() - began
    out, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0 and err == b""
    assert (first + out).decode() == ANSWER + "\n"
    assert len(first) < len(first + out)  # it came in pieces
    # 20 s on a quiet machine of two cores; a loaded one gets more.
    assert waited < 60, f"first text after {waited:.1f} s"


def test_generate_json_from_stdin() -> None:
    result = run("generate", *MODEL, "--temperature", "0", "--json", "--logprobs", "1", "-", stdin=QUESTION.encode() + b"\n")
    assert (result.returncode, result.stderr) == (0, b"")
    (line,) = result.stdout.splitlines()
    value = json.loads(line)
    assert value["text"] == ANSWER and value["finish_reason"] == "stop" and value["model"] == "smollm2"
    assert len(value["token_ids"]) == 8 == len(value["logprobs"])
    assert value["logprobs"][0][0]["id"] == value["token_ids"][0]
    assert value["cached_tokens"] == 0 and len(value["prompt_token_ids"]) == 37
    assert 0 < value["timing"]["first_token_seconds"] <= value["timing"]["total_seconds"]


def test_generate_stops_quietly_when_the_reader_leaves() -> None:
    process = start("generate", *MODEL, "--temperature", "0", "--raw", "--ignore-eos", "--max-tokens", "400", "Once upon a time")
    assert process.stdout is not None and process.stderr is not None
    assert os.read(process.stdout.fileno(), 1)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=TIMEOUT) == 141


def test_chat_keeps_the_conversation_until_it_is_reset() -> None:
    name, asked = "My name is Zorblatt.", "What is my name?"
    script = "\n".join((name, asked, "/nonsense", "/reset", asked, "/system You are a pirate.", asked, "/exit", "never read", ""))
    result = run("chat", *MODEL, "--temperature", "0", "--max-tokens", "8", "--stop", ".", stdin=script.encode())
    assert result.returncode == 0
    _, remembered, forgotten, pirate = result.stdout.decode().splitlines()
    assert "Zorb" in remembered and "Zorb" not in forgotten
    assert pirate not in (remembered, forgotten)
    notes = result.stderr.decode().splitlines()
    assert notes == ["no such command: /nonsense; /help lists them", "conversation forgotten", "system message set"]


def test_batch_survives_bad_lines_and_an_interruption(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    good = [chat_line(f"chat-{i}", f"Say the number {i}.") for i in range(10)]
    source.write_bytes(
        as_lines(
            chat_line("capital"),
            b"\xff\xfe not utf-8\n",
            b"{broken\n",
            b"\n",
            chat_line("capital"),
            {**chat_line("url"), "url": "/v1/embeddings"},
            chat_line("hot", temperature=-1),
            chat_line("typo", temprature=0),
            chat_line("empty", max_tokens=0),
            chat_line("long", "word " * 9000),
            completion_line("no-prompt", prompt=""),
            completion_line("foreign-token", prompt=[1, 999_999]),
            completion_line("clash", prompt="x", min_tokens=9),
            completion_line("two", prompt=["Once upon a time", [28120, 2408, 253, 655]], n=1, logprobs=1),
            completion_line("sampled", prompt="Once upon", temperature=1, seed=7, n=2, max_tokens=4),
            *good,
        )
    )
    command = ("batch", *MODEL, "--max-num-seqs", "4", str(source), str(target))

    process = start(*command)
    deadline = time.monotonic() + TIMEOUT
    while not (target.exists() and any(a["error"] is None for a in read_whole_lines(target))):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=TIMEOUT)
    before = read_whole_lines(target)
    if process.returncode == 130:  # else it was quicker than the signal
        assert b"the same command goes on from there" in err and b"Traceback" not in err
        target.write_bytes(target.read_bytes() + b'{"id": "batch_req_cut off in the mid')

    result = run(*command[:1], "--json", *command[1:])
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout)
    answers = read_answers(target)
    assert answers[: len(before)] == before
    answered = {a["custom_id"]: a["response"]["body"] for a in answers if a["error"] is None}
    refused = {a["error"]["line"]: a for a in answers if a["error"] is not None}
    assert len(answers) == len(answered) + len(refused) == 24  # each line once
    assert summary["answered"] + summary["skipped"] + summary["bad"] == 24

    assert set(answered) == {"capital", "two", "sampled", *(line["custom_id"] for line in good)}
    assert answered["capital"]["choices"][0]["message"]["content"] == ANSWER
    assert answered["capital"]["usage"]["completion_tokens"] == 8
    first, second = answered["two"]["choices"]
    assert first["text"] and first["finish_reason"] == "length" and len(first["logprobs"]["tokens"]) == 8
    assert [first["index"], second["index"]] == [0, 1]
    assert [c["index"] for c in answered["sampled"]["choices"]] == [0, 1]
    assert {line: (a["custom_id"], a["error"]["code"]) for line, a in refused.items()} == {
        2: (None, "invalid_utf8"),
        3: (None, "invalid_json"),
        5: ("capital", "duplicate_custom_id"),
        6: ("url", "invalid_url"),
        7: ("hot", "sampling_params"),
        8: ("typo", "unknown_field"),
        9: ("empty", "sampling_params"),
        10: ("long", "prompt_too_long"),
        11: ("no-prompt", "empty_prompt"),
        12: ("foreign-token", "token_out_of_range"),
        13: ("clash", "sampling_params"),
    }

    content = target.read_bytes()
    began = time.monotonic()
    again = run(*command)
    assert again.returncode == 0 and b"0 answered, 24 done before" in again.stderr
    assert target.read_bytes() == content
    assert time.monotonic() - began < 10  # nothing was loaded


def read_whole_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def test_batch_through_pipes() -> None:
    result = run("batch", *MODEL, "-", "-", stdin=as_lines(chat_line("a"), b"nonsense\n"))
    assert result.returncode == 0
    bad, good = sorted((json.loads(line) for line in result.stdout.splitlines()), key=lambda a: a["error"] is None)
    assert bad["error"]["line"] == 2
    assert good["custom_id"] == "a" and good["response"]["body"]["choices"][0]["message"]["content"] == ANSWER
    assert result.stderr.decode().startswith("deepinfer: 1 answered, 0 done before, 1 bad line,")


@pytest.mark.parametrize("kind", ["throughput", "latency"])
def test_bench_measures_a_model_of_which_only_the_configuration_exists(kind: str, tmp_path: Path) -> None:
    model = write_config(tmp_path / "m")
    load = ("--input-len", "20", "--output-len", "6", "--num-seqs", "2")
    count = ("--num-prompts", "5", "--shared-prefix-len", "16", "--kv-cache-dtype", "fp8")
    count = count if kind == "throughput" else ("--num-iters", "2", "--no-batch-invariant")
    result = run("bench", kind, "--model", model, "--load-format", "dummy", "--device", "cpu", "--json", *load, *count)
    assert (result.returncode, result.stderr) == (0, b"")
    value = json.loads(result.stdout)
    assert value["batch_invariant"] == (kind == "throughput") == (value["kv_cache_dtype"] == "fp8")
    assert value["bench"] == kind and value["input_len"] == 20 and value["num_seqs"] == 2
    for name in ("ttft_ms", "tpot_ms" if kind == "throughput" else "itl_ms"):
        assert 0 < value[name]["p50"] <= value[name]["p99"]
    assert "from the first submission to the last answer" in value["counting"] and "2 torch threads" in value["machine"]
    if kind == "throughput":
        seconds = value["seconds"]  # rounded to 1e-4, of which a fast machine needs few hundred
        assert value["output_tokens_per_second"] == pytest.approx(30 / seconds, rel=1e-4 + 5e-5 / seconds)
        assert value["total_tokens_per_second"] == pytest.approx(130 / value["seconds"], rel=1e-3)
        assert "itl_ms" not in value and value["ttft_ms"]["p99"] + 5 * value["tpot_ms"]["p50"] <= 1.05e3 * value["seconds"]
    else:
        assert value["latency_ms"]["p50"] >= value["ttft_ms"]["p50"]
        assert value["decode_tokens_per_second"] > 0
    assert 0 <= value["bubble"] < 1 and value["device_ms_a_step"] > 0 and value["host_ms_a_step"] > 0
    assert value["max_num_seqs"] == 2


def test_bench_with_requests_that_arrive_one_after_the_other(tmp_path: Path) -> None:
    model = write_config(tmp_path / "m")
    load = ("--input-len", "40", "--output-len", "3", "--num-seqs", "4", "--num-prompts", "12", "--shared-prefix-len", "32")
    arriving = ("--request-rate", "40", "--shared-share", "0.5")
    result = run("bench", "throughput", "--model", model, "--load-format", "dummy", "--device", "cpu", "--json", *load, *arriving)
    assert (result.returncode, result.stderr) == (0, b"")
    value = json.loads(result.stdout)
    assert (value["request_rate"], value["shared_share"]) == (40, 0.5)
    last = bench_load.arrivals(12, 40.0, 0)[-1]
    assert last < value["seconds"] + bench_load.arrivals(12, 40.0, 0)[0] and value["ttft_ms"]["p50"] > 0


def test_arrivals_and_shared_beginnings_of_a_load() -> None:
    times = bench_load.arrivals(4000, 8.0, 3)
    gaps = [b - a for a, b in pairwise([0.0, *times])]
    assert times == bench_load.arrivals(4000, 8.0, 3) and min(gaps) > 0
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 8, rel=0.06) and sum(g > mean for g in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03)
    prompts = bench_load.random_prompts(9, 30, 1000, 5, shared=20, share=0.5)
    begun = [prompt[:20] == prompts[1][:20] for prompt in prompts]
    assert begun == [False, True] * 4 + [False] and {len(p) for p in prompts} == {30}
    assert len({tuple(p[20:]) for p in prompts}) == 9


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_generating_ends_with_its_code(number: signal.Signals, code: int) -> None:
    process = start("generate", *MODEL, "--temperature", "0", "--raw", "--ignore-eos", "--max-tokens", "4000", "Once upon a time")
    assert process.stdout is not None
    assert os.read(process.stdout.fileno(), 1)
    process.send_signal(number)
    _, err = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, err) == (code, b"")


def test_an_error_of_the_engine_is_one_line_there_too(tmp_path: Path) -> None:
    model = write_config(tmp_path / "m", architectures=["LlamaForCausalML"])
    result: subprocess.CompletedProcess[bytes] = run("generate", "--model", model, "--load-format", "dummy", "hello")
    lines = result.stderr.decode().splitlines()
    assert result.returncode == 2 and len(lines) == 1 and lines[0].startswith("deepinfer: error: "), lines
