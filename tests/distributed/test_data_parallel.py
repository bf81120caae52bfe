"""Engines of several processes that act as one: the answers of one rank, and nobody left behind when a rank ends."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deepinfer
import engine_kit
from deepinfer import LLM, AsyncLLM, SamplingParams
from deepinfer.engine.config import EngineConfig
from deepinfer.engine.data_parallel import group_engine
from deepinfer.engine.data_parallel.balancer import FewestTokens, RankLoad
from deepinfer.engine.data_parallel.group_engine import GroupEngine, rank_configs
from deepinfer.engine.step_log import EngineMetrics
from deepinfer.errors import ConfigError, EngineDeadError, InvalidRequestError
from deepinfer.models.deepseek_v41.make_checkpoint import make_checkpoint
from deepinfer.platforms.cuda import CudaPlatform
from deepinfer.scratch import ScratchFolder
from process_kit import children, gone, pause

TINY = Path(__file__).resolve().parents[1] / "data" / "deepseek_v41" / "tiny.json"
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 512, "max_num_seqs": 4, "num_kv_blocks": 24, "max_num_batched_tokens": 128, "num_threads": 1,
    "quiet": True, "swap_space_gib": 0, "state_snapshot_gib": 0,
}  # fmt: skip
DENSE: dict[str, Any] = {**SETTINGS, "block_size": 16, "num_kv_blocks": 100}
Answer = tuple[list[int], list[dict[int, float]]]


@pytest.fixture(scope="module")
def llama() -> str:
    return engine_kit.tiny_checkpoint("llama")


@pytest.fixture(scope="module")
def v41(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("ranks") / "v41"
    make_checkpoint(json.loads(TINY.read_text(encoding="utf-8")), directory, seed=3)
    return str(directory)


def work() -> tuple[list[dict[str, Any]], list[SamplingParams]]:
    """Prompts of very different lengths, some of which begin alike, drawn and greedy."""
    random = np.random.RandomState(0)
    shared = random.randint(10, 300, 150).tolist()
    prompts = [random.randint(10, 300, n).tolist() for n in (5, 90, 1, 200)]
    prompts += [[*shared, *random.randint(10, 300, n).tolist()] for n in (3, 40, 100)]
    params = [
        SamplingParams(temperature=(0, 0.8)[i % 2], seed=i, max_tokens=4 + 2 * i, ignore_eos=True, detokenize=False, logprobs=20)
        for i in range(len(prompts))
    ]
    return [{"prompt_token_ids": prompt} for prompt in prompts], params


def answers(llm: LLM) -> list[Answer]:
    """Tokens, and log-probabilities to the last bit."""
    found = []
    for output in llm.generate(*work(), use_tqdm=False):
        answer = output.outputs[0]
        assert answer.finish_reason == "length" and answer.logprobs is not None
        found.append((answer.token_ids, [{token: p.logprob for token, p in position.items()} for position in answer.logprobs]))
    return found


@pytest.fixture(scope="module")
def alone() -> Callable[..., list[Answer]]:
    """What one rank answers, by model and settings."""
    known: dict[str, list[Answer]] = {}

    def ask(model: str, **settings: Any) -> list[Answer]:
        key = repr((model, sorted(settings.items())))
        if key not in known:
            with LLM(model, **settings) as llm:
                known[key] = answers(llm)
        return known[key]

    return ask


def dummies_and_rounds(metrics: EngineMetrics) -> list[int]:
    return [metrics.steps["dummy"], metrics.second_rounds, *metrics.votes.values(), *map(int, metrics.group.values())]


def check_rounds(ranks: list[EngineMetrics], together: bool) -> None:
    """The same rounds everywhere, or none."""
    if not together:
        assert not any(any(dummies_and_rounds(m)) for m in ranks)
        return
    rounds = [{kind: count for kind, count in m.votes.items() if kind != "idle"} for m in ranks]  # they rest by their own clocks
    assert all(votes == rounds[0] for votes in rounds) and rounds[0]["decode"] > 0 == rounds[0]["error"]
    assert all(m.steps["mixed"] == 0 for m in ranks)


NGRAM = {**DENSE, "speculative": "ngram", "ngram_min": 1}


@pytest.mark.parametrize(
    ("model", "ranks", "settings", "policy"),
    [
        ("v41", 2, {}, None),
        ("v41", 4, {}, None),
        ("v41", 2, {"zero_overhead": False, "enable_prefix_caching": False, "yoco_prefill_truncation": "compact"}, "decode_first"),
        ("v41", 2, {"speculative": "dspark"}, None),
        ("llama", 4, NGRAM, None),
        pytest.param("llama", 4, NGRAM, "decode_first", marks=pytest.mark.nightly),
    ],
    ids=["2", "4", "serial-compact", "drafts", "dense", "dense-voted"],
)
def test_several_ranks_give_the_answers_of_one(
    alone: Callable[..., list[Answer]], request: pytest.FixtureRequest, model: str, ranks: int, settings: dict[str, Any], policy: str | None
) -> None:
    path, settings = request.getfixturevalue(model), {**SETTINGS, **settings}
    with LLM(path, **settings, data_parallel_size=ranks, expert_parallel=model == "v41", step_policy=policy) as llm:
        assert answers(llm) == alone(path, **settings)
        assert answers(llm) == alone(path, **settings), "behind cached prefixes"
        engine = llm.engine
        assert isinstance(engine, GroupEngine)
        metrics = engine.rank_metrics()
        assert all(m.totals["output_tokens"] > 0 for m in metrics), "every rank had some of them"
        check_rounds(metrics, model == "v41" or policy is not None)
        assert all(load.tokens == load.requests == 0 for load in engine.loads)
        for counts in engine.rank_counts():
            assert not any(c["held"] for c in [*counts["groups"], counts["slots"]])


@pytest.fixture(scope="module", params=[None, "decode_first"], ids=["free", "voted"])
def dense(request: pytest.FixtureRequest, llama: str) -> Iterator[LLM]:
    """Two ranks of a model that has nothing to exchange: each by itself, and by votes."""
    with LLM(llama, **DENSE, data_parallel_size=2, step_policy=request.param) as llm:
        yield llm


def ranks_of(llm: LLM) -> GroupEngine:
    assert isinstance(llm.engine, GroupEngine)
    return llm.engine


def test_two_dense_ranks_give_the_answers_of_one(dense: LLM, llama: str, alone: Callable[..., list[Answer]]) -> None:
    assert answers(dense) == alone(llama, **DENSE)
    check_rounds(ranks_of(dense).rank_metrics(), dense.config.steps_together)
    assert alone(llama, **DENSE, step_policy="decode_first") == alone(llama, **DENSE), "an engine alone may take turns, too"


def test_one_long_answer_beside_an_empty_rank(dense: LLM, llama: str) -> None:
    """300 steps in which the other rank has nothing: it makes them all or none, and gets in the way of nothing that comes later."""
    long = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True, detokenize=False)
    prompt = {"prompt_token_ids": [7, 8, 9]}
    with LLM(llama, **DENSE) as llm:
        want = llm.generate(prompt, long, use_tqdm=False)[0].outputs[0].token_ids
    engine = ranks_of(dense)
    time.sleep(3)  # the ranks have gone to rest by then
    before, blocks = engine.rank_metrics(), engine.rank_counts()[1]
    assert dense.generate(prompt, long, use_tqdm=False)[0].outputs[0].token_ids == want
    after = engine.rank_metrics()
    output, steps, dummies = (
        [read(new) - read(old) for old, new in zip(before, after, strict=True)]
        for read in (lambda m: m.totals["output_tokens"], lambda m: m.totals["steps"], lambda m: m.steps["dummy"])
    )
    assert output == [300, 0]
    if dense.config.steps_together:
        assert dummies[1] >= 299 and steps[0] == steps[1]
    else:
        assert 300 <= steps[0] <= 302 and steps[1] == 0
    assert engine.rank_counts()[1] == blocks, "dummy rows go to the null block"


def queue_steps(llm: LLM, nth: slice) -> list[dict[str, int]]:
    """Steps by kind of each rank for a queue that is there before the first of them."""
    engine = llm.engine
    pids = engine.pids if isinstance(engine, GroupEngine) else []
    read = engine.rank_metrics if isinstance(engine, GroupEngine) else lambda: [llm.metrics()]
    before = read()
    pause(pids)
    random = np.random.RandomState(7)
    queue = [(random.randint(10, 300, 40).tolist(), 3 + 7 * (i // 2 % 5)) for i in range(32)]  # pairs of one length
    for ids, tokens in queue[nth]:
        llm.add_request({"prompt_token_ids": ids}, SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False))
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    while llm.has_unfinished_requests():
        llm.step()
    return [
        {kind: count - old.steps[kind] for kind, count in new.steps.items() if kind != "idle"}
        for old, new in zip(before, read(), strict=True)
    ]


def test_a_queue_takes_each_rank_the_steps_of_one_engine_with_its_share(dense: LLM, llama: str) -> None:
    with LLM(llama, **DENSE) as llm:
        one = [queue_steps(llm, slice(rank, None, 2))[0] for rank in range(2)]
    many = queue_steps(dense, slice(None))
    assert all(steps["mixed"] > 0 == steps["dummy"] for steps in one)
    if not dense.config.steps_together:
        assert many == one
    else:  # prompts wait for answers
        assert all(sum(steps.values()) > 1.2 * sum(alone.values()) for steps, alone in zip(many, one, strict=True)), (many, one)
    check_rounds(ranks_of(dense).rank_metrics(), dense.config.steps_together)


def test_what_was_aborted_is_gone_from_every_rank(dense: LLM) -> None:
    engine = ranks_of(dense)
    for nth in range(6):
        dense.add_request({"prompt_token_ids": [nth + 1] * 50}, SamplingParams(max_tokens=400, ignore_eos=True, detokenize=False))
    assert [load.requests for load in engine.loads] == [3, 3]
    for _ in range(5):
        dense.step()
    for request_id in list(engine._flights):
        dense.abort(request_id)
    assert [(load.tokens, load.requests) for load in engine.loads] == [(0, 0), (0, 0)]
    end = time.monotonic() + 10
    while any(c["held"] for counts in engine.rank_counts() for c in [*counts["groups"], counts["slots"]]):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert dense.logits([1, 2, 3]).shape[0] == 3


def test_grammars_reach_the_ranks() -> None:
    pytest.importorskip("xgrammar")
    form = SamplingParams(temperature=1.0, seed=1, max_tokens=8, structured_outputs={"regex": "(ab|cd){4,}"})
    with LLM("smollm2", load_format="dummy", dtype="float32", max_model_len=64, num_kv_blocks=8, quiet=True, data_parallel_size=2) as llm:
        outputs = llm.generate(["one", "two", "three"], form, use_tqdm=False)
    for output in outputs:
        assert re.fullmatch("(ab|cd)*[ac]?", output.outputs[0].text) and len(output.outputs[0].text) > 3


@pytest.mark.parametrize(
    ("model", "settings", "end"),
    [
        ("v41", {**SETTINGS, "expert_parallel": True}, signal.SIGKILL),
        ("v41", {**SETTINGS, "expert_parallel": True}, signal.SIGTERM),
        ("llama", DENSE, signal.SIGKILL),
        pytest.param("llama", {**DENSE, "step_policy": "decode_first"}, signal.SIGKILL, marks=pytest.mark.nightly),
    ],
    ids=["experts", "experts-terminated", "free", "voted"],
)
def test_the_end_of_a_rank_is_told_and_leaves_nobody(
    request: pytest.FixtureRequest, model: str, settings: dict[str, Any], end: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    """By the name of the rank that ended, although the others fail because of it and say so first; without a trace, which would look like
    a fault of ours."""
    path, killed = request.getfixturevalue(model), list[float]()

    async def run() -> None:
        async with AsyncLLM(path, **settings, data_parallel_size=2) as llm:
            engine = llm.engine_pid
            await llm.ready()
            ranks = children(engine)
            assert len(ranks) == 2
            if model == "v41":
                with pytest.raises(InvalidRequestError, match="experts are spread"):
                    await llm.logits([1, 2, 3])

            async def ask(number: int) -> None:
                params = SamplingParams(max_tokens=480, ignore_eos=True, detokenize=False)
                async for output in llm.generate({"prompt_token_ids": [number + 1] * 9}, params):
                    if number == 0 and len(output.outputs[0].token_ids) >= 5 and not killed:
                        killed.append(time.monotonic())
                        os.kill(ranks[1], end)

            told = await asyncio.gather(*(ask(number) for number in range(3)), return_exceptions=True)
            assert time.monotonic() - killed[0] < 10
            for error in told:
                assert isinstance(error, EngineDeadError), told
                how = "was killed by SIGKILL" if end == signal.SIGKILL else "(ended with status 0|closed its connection)"
                assert re.search(f"the process of rank 1 of 2 {how}; .*group", str(error)), error
            assert not llm.is_running
            assert all(gone(pid, 10) for pid in (*ranks, engine))

    asyncio.run(run())
    assert "Traceback" not in capfd.readouterr().err


def test_a_free_rank_that_hangs_is_missed(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_engine, "_STEP_TIMEOUT", 3.0)
    with LLM(llama, **DENSE, data_parallel_size=2) as llm:
        pids = ranks_of(llm).pids
        pause(pids[:1])
        time.sleep(4)  # nobody looks, and nobody has work: that is no silence
        begin = time.monotonic()
        with pytest.raises(EngineDeadError, match=r"rank 0 of 2 \(pid \d+\) had work and gave no sign of life for 3") as error:
            llm.generate([{"prompt_token_ids": [1, 2]}] * 3, SamplingParams(max_tokens=4, detokenize=False), use_tqdm=False)
        assert 2.9 < time.monotonic() - begin < 20 and "group" in str(error.value)
        assert all(gone(pid, 10) for pid in pids)


def test_ranks_that_were_stopped_are_ended_together(llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    llm = LLM(llama, **DENSE, data_parallel_size=2, step_policy="decode_first")
    pids = ranks_of(llm).pids
    assert len(list(tmp_path.glob("deepinfer-meet-*"))) == 1
    pause(pids)
    begin = time.monotonic()
    llm.close()
    assert time.monotonic() - begin < 4 and all(gone(pid, 0) for pid in pids)
    assert not list(tmp_path.glob("deepinfer-*"))


def test_ranks_end_with_a_parent_that_was_killed(llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it could not remove goes with the next group."""
    script = (
        "import sys, time; from deepinfer import LLM\n"
        f"llm = LLM({llama!r}, **{DENSE!r}, data_parallel_size=2, step_policy='decode_first')\n"
        "print(*llm.engine.pids, flush=True); time.sleep(60)"
    )
    path = os.pathsep.join([str(Path(deepinfer.__file__).parent.parent), *sys.path])
    environment = os.environ | {"PYTHONPATH": path, "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment)
    try:
        assert parent.stdout is not None
        ranks = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(ranks) == 2
        (left,) = tmp_path.glob("deepinfer-*")
        parent.kill()
        assert all(gone(pid, 10) for pid in ranks)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        with ScratchFolder("meet"):
            assert not left.exists()
    finally:
        parent.kill()
        parent.wait()
    assert not list(tmp_path.glob("deepinfer-*"))


def test_requests_go_where_there_is_room_and_least_to_do() -> None:
    rule = FewestTokens()
    assert rule.choose([RankLoad(1000, 4), RankLoad(1000, 4)], 10, 1) == 0
    assert rule.choose([RankLoad(1000, 4, 50, 1), RankLoad(1000, 4, 40, 3)], 10, 1) == 1
    assert rule.choose([RankLoad(1000, 4, 50, 2), RankLoad(1000, 4, 50, 1)], 10, 1) == 1
    # the one with fewer tokens has no lane, or no room in its KV
    assert rule.choose([RankLoad(1000, 4, 50, 4), RankLoad(1000, 4, 400, 1)], 10, 1) == 1
    assert rule.choose([RankLoad(1000, 4, 50, 2), RankLoad(1000, 4, 400, 1)], 10, 3) == 1
    assert rule.choose([RankLoad(100, 4, 50, 1), RankLoad(1000, 4, 400, 1)], 60, 1) == 1
    # nobody has room
    assert rule.choose([RankLoad(100, 4, 90, 1), RankLoad(100, 4, 80, 1)], 60, 1) == 1


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"data_parallel_size": 0}, "data_parallel_size must be an integer of at least 1"),
        ({"expert_parallel": True}, "give data_parallel_size of at least 2"),
        ({"data_parallel_size": 2, "engine_type": "prompt"}, "leave data_parallel_size out"),
        ({"data_parallel_size": 2, "kv_store": "dir:/tmp/x"}, "belongs to one process"),
        ({"data_parallel_size": 2, "device": "cuda:0"}, "use device='cuda'"),
        ({"step_policy": "prefill_first"}, "step_policy must be one of mixed, decode_first"),
        ({"step_policy": "decode_first", "engine_type": "completion"}, "leave step_policy out"),
        ({"data_parallel_size": 2, "expert_parallel": True, "step_policy": "mixed"}, "leave step_policy='mixed' or expert_parallel out"),
    ],
    ids=range(8),
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EngineConfig.from_args("smollm2", **settings)


@pytest.mark.parametrize(
    ("ranks", "experts", "policy", "together"),
    [
        (1, False, None, False),
        (1, False, "decode_first", False),
        (2, False, None, False),
        (2, False, "mixed", False),
        (2, False, "decode_first", True),
        (2, True, None, True),
        (2, True, "decode_first", True),
    ],
)
def test_who_steps_together(ranks: int, experts: bool, policy: Any, together: bool) -> None:
    config = EngineConfig(model="m", data_parallel_size=ranks, expert_parallel=experts, step_policy=policy)
    assert config.steps_together is together


def test_what_a_rank_finds_wrong_while_loading_is_told(llama: str) -> None:
    before = set(children(os.getpid()))
    with pytest.raises(ConfigError, match=r"rank \d of 2: .*has no experts to spread"):
        LLM(llama, **SETTINGS | {"block_size": 16}, data_parallel_size=2, expert_parallel=True)
    assert set(children(os.getpid())) <= before


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_each_rank_has_a_gpu_of_its_own(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaPlatform, "count", staticmethod(lambda: 2))
    config = EngineConfig(model="m", device=device, data_parallel_size=2, expert_parallel=True)
    ranks = rank_configs(config, CudaPlatform(0), "meet")
    assert [one.device for one in ranks] == ["cuda:0", "cuda:1"]
    assert [(one.rank.rank, one.rank.size) for one in ranks if one.rank] == [(0, 2), (1, 2)]
    assert [one.quiet for one in ranks] == [config.quiet, True]
    with pytest.raises(ConfigError, match="cuda:2"):
        rank_configs(EngineConfig(model="m", device=device, data_parallel_size=3), CudaPlatform(0), "meet")
    with pytest.raises(ConfigError, match="is one GPU"):
        EngineConfig(model="m", device="cuda:1", data_parallel_size=2)
