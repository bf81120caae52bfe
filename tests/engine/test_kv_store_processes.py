"""A store on disk between processes: one engine is killed in mid-run, another goes on with the same bits and the predicted counts."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import api_kit
from cli.running import environment
from cli.running import run as command
from cli.test_kvstore_agent import agent
from deepinfer import LLM, AsyncLLM, PrefillDecodePair, RequestOutput, SamplingParams, _core
from deepinfer.errors import ConfigError, DeepInferError
from engine_kit import random_prompts
from process_kit import Run, event_loop, gone
from store_kit import hit

SETTINGS: dict[str, Any] = {**api_kit.SETTINGS, "num_kv_blocks": 256, "max_num_batched_tokens": 128}
P = SamplingParams(temperature=0, max_tokens=8, logprobs=3, ignore_eos=True)
LENGTHS = (200, 256, 300, 440)
PROMPTS = random_prompts(LENGTHS, seed=41)

FIRST = """
    import json, sys
    from deepinfer import LLM, SamplingParams
    given = json.loads(sys.stdin.readline())
    with LLM(given["model"], **given["settings"]) as llm:
        params = SamplingParams(**given["params"])
        for prompt in given["prompts"]:
            made = llm.generate(prompt, params)[0].outputs[0]
            print(json.dumps([made.token_ids, [p.logprob.hex() for step in made.logprobs for p in step.values()]]), flush=True)
        assert llm.engine._store.settle(60)
        print("stored", flush=True)
        llm.generate(given["prompts"], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))  # killed somewhere in here
        while True:
            llm.generate(given["prompts"][0], SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
"""


@pytest.fixture(scope="module")
def run() -> Iterator[Run[Any]]:
    """Runs a coroutine in one event loop that lives as long as the module."""
    with event_loop(180) as run:
        yield run


async def last_of(stream: Any) -> RequestOutput:
    return [output async for output in stream][-1]


def said(output: RequestOutput) -> list[Any]:
    """Tokens and log-probabilities to the bit, as the first process writes them."""
    made = output.outputs[0]
    return [made.token_ids, [p.logprob.hex() for step in made.logprobs or () for p in step.values()]]


def test_an_engine_goes_on_with_what_a_killed_one_stored(run: Run[Any], device: str, tmp_path: Path) -> None:
    settings = {**SETTINGS, "device": device, "kv_store": f"dir:{tmp_path / 'kv'}"}
    params = {"temperature": 0, "max_tokens": 8, "logprobs": 3, "ignore_eos": True}
    told = {"model": api_kit.tiny_model(), "settings": settings, "params": params, "prompts": PROMPTS}
    command = [sys.executable, "-c", textwrap.dedent(FIRST)]
    first = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(), text=True)
    try:
        assert first.stdin is not None and first.stdout is not None
        first.stdin.write(json.dumps(told) + "\n")
        first.stdin.flush()
        answers = [json.loads(first.stdout.readline()) for _ in PROMPTS]
        assert first.stdout.readline().strip() == "stored"
        with pytest.raises(DeepInferError, match="kv"):  # one process at a time
            LLM(api_kit.tiny_model(), **settings)
    finally:
        first.kill()
        first.wait()

    async def ask(llm: AsyncLLM) -> list[RequestOutput]:
        return [await last_of(llm.generate({"prompt_token_ids": prompt}, P, mode="final")) for prompt in PROMPTS]

    second = AsyncLLM(api_kit.tiny_model(), **settings)
    run(second.ready())
    try:
        found = run(ask(second))
        assert [said(output) for output in found] == answers
        assert [output.num_cached_tokens for output in found] == [hit(n, n + 7, 16) for n in LENGTHS]
        pid = second._child.process.pid
    finally:
        run(second.aclose())
    assert gone(pid, 10)


def test_the_prompt_engine_of_a_pair_has_the_store(run: Run[Any], device: str, tmp_path: Path) -> None:
    """The second pair finds what the first one stored; answers are the same."""
    settings = {**SETTINGS, "device": device, "kv_store": f"dir:{tmp_path / 'kv'}", "handover_lease": 20.0}

    async def once() -> list[RequestOutput]:
        pair = PrefillDecodePair(api_kit.tiny_model(), **settings)
        await pair.ready()
        try:
            return list(await asyncio.gather(*(last_of(pair.generate({"prompt_token_ids": p}, P, mode="final")) for p in PROMPTS)))
        finally:
            await pair.aclose()

    first, second = run(once()), run(once())
    assert [said(output) for output in first] == [said(output) for output in second]
    assert [output.num_cached_tokens for output in first] == [0] * len(LENGTHS)
    assert [output.num_cached_tokens for output in second] == [hit(n, n, 16) for n in LENGTHS]


def test_a_check_of_tokens_finds_what_an_engine_stored(device: str, tmp_path: Path) -> None:
    """By the identity that a command prints for the engine's options; not by that of another salt."""
    address = f"dir:{tmp_path / 'kv'}"
    salted = P.clone(cache_salt="mine")
    with LLM(api_kit.tiny_model(), **{**SETTINGS, "device": device, "kv_store": address, "kv_store_tenant": "team"}) as llm:
        llm.generate([{"prompt_token_ids": PROMPTS[2]}, {"prompt_token_ids": PROMPTS[3]}], [P, salted])
    options = ("--device", device, "--dtype", "float32", "--block-size", "16", "--kv-store", address, "--kv-store-tenant", "team")
    for salt, prompts in (((), ((PROMPTS[2], 2), (PROMPTS[3], 0))), (("--cache-salt", "mine"), ((PROMPTS[3], 3),))):
        identity = command("kvstore", "identity", "--model", api_kit.tiny_model(), *options, *salt)
        assert identity.returncode == 0, identity.stderr
        (tmp_path / "engine.json").write_bytes(identity.stdout)
        for prompt, blocks in prompts:
            (tmp_path / "prompt.json").write_text(json.dumps(prompt))
            argv = ("--address", address, "--tokens", str(tmp_path / "prompt.json"), "--identity", str(tmp_path / "engine.json"))
            found = command("kvstore", "check", *argv, "--json")
            assert found.returncode == 0 and json.loads(found.stdout)["blocks"] == blocks, (salt, found)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"kv_store": "here"}, "dir:PATH"),
        ({"kv_store": "tcp:1.2.3.4:5"}, "tcp://HOST:PORT"),
        ({"kv_store": "dir:"}, "dir:PATH"),
        ({"kv_store": 7}, "dir:PATH"),
        ({"kv_store": "dir:/x", "enable_prefix_caching": False}, "enable_prefix_caching=True"),
        ({"kv_store": "dir:/x", "engine_type": "completion"}, "prompt engine"),
        ({"kv_store": "tcp://h:1", "kv_store_gib": 1}, "size of its own"),
        ({"kv_store_gib": 1}, "set kv_store"),
        ({"kv_store": "dir:/x", "kv_store_tls_ca": "ca.pem"}, "tcp://HOST:PORT"),
        ({"kv_store": "tcp://h:1", "kv_store_tls_name": "h"}, "leave them out"),
        ({"kv_store": "dir:/x", "kv_store_gib": 0}, "above 0"),
        ({"kv_store_tenant": "a b"}, "letters, digits"),
        ({"kv_store_token": ""}, "kv_store_token"),
        ({"kv_store_token": {"admin": "a secret of many words"}}, "by role, of check, get, put"),
        ({"kv_store_token": {"put": ""}}, "by role, of check, get, put"),
        ({"kv_store_write": "never"}, "on_finish, write_through"),
        ({"kv_prefetch": "always"}, "best_effort, wait, timeout"),
        ({"kv_prefetch_timeout": 0}, "between 0.001 and 3600"),
        ({"kv_prefetch_min_tokens": -1}, "at least 0"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        LLM(api_kit.tiny_model(), **wrong)


def test_a_store_that_cannot_be_opened_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(DeepInferError, match="file"):
        LLM(api_kit.tiny_model(), kv_store=f"dir:{tmp_path / 'file'}", **SETTINGS)


def test_engines_find_what_others_stored_behind_a_server(device: str, tmp_path: Path) -> None:
    """Their own tenant's only, and with the secret that the server asks for."""
    secret = "a secret of many words"
    for role in ("check", "get", "put", "admin"):
        (tmp_path / role).write_text(secret)
    (tmp_path / "settings.toml").write_text(
        f"root = '{tmp_path / 'root'}'\nlisten = ['127.0.0.1:0']\nmetrics = 'off'\n[tokens]\n"
        + "".join(f"{role}_file = '{tmp_path / role}'\n" for role in ("check", "get", "put", "admin"))
    )
    server = _core.KvServer(tmp_path / "settings.toml")
    try:
        settings = {**SETTINGS, "device": device, "kv_store": f"tcp://{server.describe()['addresses'][0].removeprefix('tcp://')}"}
        right = None
        for tenant, token, found in (
            ("a", secret, False),
            ("a", secret, True),
            ("b", secret, False),
            ("a", "another secret of words", False),
        ):
            with LLM(api_kit.tiny_model(), kv_store_tenant=tenant, kv_store_token=token, **settings) as llm:
                made = llm.generate(PROMPTS, P)
                assert right in (None, [said(o) for o in made])
                right = [said(o) for o in made]
                assert [o.num_cached_tokens for o in made] == [hit(n, n + 7, 16) * found for n in LENGTHS], (tenant, token)
                assert llm.engine._store is not None and llm.engine._store.settle(20)
                assert (llm.metrics().store["saved"] > 0) is (token == secret and not found)
    finally:
        server.drain()


def test_each_role_has_its_own_token_and_a_wrong_one_is_told(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """By settings or by the variables that the commands take."""
    tokens = {role: f"what is asked for {role}" for role in ("check", "get", "put", "admin")}
    for role, token in tokens.items():
        (tmp_path / role).write_text(token)
    (tmp_path / "settings.toml").write_text(
        f"root = '{tmp_path / 'root'}'\nlisten = ['127.0.0.1:0']\nmetrics = 'off'\n[tokens]\n"
        + "".join(f"{role}_file = '{tmp_path / role}'\n" for role in tokens)
    )
    server = _core.KvServer(tmp_path / "settings.toml")
    try:
        address = server.describe()["addresses"][0].removeprefix("tcp://")
        settings = {**SETTINGS, "quiet": False, "device": device, "kv_store": f"tcp://{address}"}
        of_engines = {role: tokens[role] for role in ("check", "get", "put")}

        def cached(**more: Any) -> tuple[list[int | None], str]:
            capfd.readouterr()
            with LLM(api_kit.tiny_model(), **settings, **more) as llm:
                made = llm.generate(PROMPTS[:1], P)
                assert llm.engine._store is not None and llm.engine._store.settle(20)
            return [o.num_cached_tokens for o in made], capfd.readouterr().err

        found, said = cached(kv_store_token={**of_engines, "get": tokens["put"]})
        assert found == [0] and f"fails (the KV store at {address} does not accept the token of role get)" in said
        assert all(token not in said for token in tokens.values())
        found, said = cached(kv_store_token=of_engines)
        assert found == [0] and "fails" not in said
        for role, token in of_engines.items():
            monkeypatch.setenv(f"DEEPINFER_KVSTORE_TOKEN_{role.upper()}", token)
        found, said = cached()
        assert found == [hit(LENGTHS[0], LENGTHS[0], 16)] and "fails" not in said
    finally:
        server.drain()


def test_engines_of_a_host_share_an_agent_and_outlive_it(device: str, tmp_path: Path) -> None:
    """What one put another one reads from memory; a killed agent is misses, also for the engine that was using it."""
    with agent(tmp_path, "own", f"root={tmp_path / 'kv'}") as (process, about):
        settings = {**SETTINGS, "device": device, "kv_store": about["address"]}
        with LLM(api_kit.tiny_model(), **settings) as first, LLM(api_kit.tiny_model(), **settings) as second:
            right = [said(o) for o in first.generate(PROMPTS, P)]
            assert first.engine._store is not None and first.engine._store.settle(20)
            found = second.generate(PROMPTS, P)
            assert [said(o) for o in found] == right
            assert [o.num_cached_tokens for o in found] == [hit(n, n + 7, 16) for n in LENGTHS]
            counters = second.metrics().store
            assert counters["host_tokens"] > 0 == counters["store_tokens"] and counters["fetched"] == 1 + 2 + 2 + 3
            process.kill()
            process.wait(60)
            begin = time.monotonic()
            (other,) = second.generate([{"prompt_token_ids": PROMPTS[0][::-1]}], P)
            assert other.num_cached_tokens == 0 and time.monotonic() - begin < 20
            assert [said(o) for o in second.generate(PROMPTS, P)] == right


@pytest.mark.parametrize("quiet", [True, False])
def test_a_server_that_is_away_is_misses(quiet: bool, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody listens there; answers come all the same, and soon, and one line says so."""
    settings = {**SETTINGS, "device": device}
    with LLM(api_kit.tiny_model(), **settings) as llm:
        right = [said(o) for o in llm.generate(PROMPTS, P)]
    with LLM(api_kit.tiny_model(), kv_store="tcp://127.0.0.1:9", **{**settings, "quiet": quiet}) as llm:
        assert [said(o) for o in llm.generate(PROMPTS, P)] == right
        counters = llm.metrics().store
        assert counters["lookups"] == len(PROMPTS) and counters["fetched"] == counters["saved"] == counters["leases"] == 0
    told = [line for line in capsys.readouterr().err.splitlines() if "fails" in line]
    assert len(told) == (not quiet)
    for line in told:
        assert line.startswith("deepinfer: the KV store tcp://127.0.0.1:9 fails (") and "Connection refused" in line
        assert line.endswith("); what it lacks is computed")
