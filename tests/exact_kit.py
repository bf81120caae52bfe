"""Whole engines compared bit for bit: small random models of the Llama family, and what is left of a request that was computed.

A request leaves its tokens, log-probabilities of the whole vocabulary where they were asked for, and the KV of its positions, layer by
layer: where two runs differ, the first layer whose KV does says where the difference came in.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch

from deepinfer.engine.engine import Engine
from deepinfer.sampling import SamplingParams
from deepinfer.worker.device_queue import run_in_order
from engine_kit import Answer, make_engine, request

VOCAB = 1024
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "rms_norm_eps": 1e-5, "hidden_act": "silu", "max_position_embeddings": 4096, "rope_theta": 10000.0,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qk_norm": {
        "architectures": ["Qwen3ForCausalLM"], "num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": False,
    },
    "window_bias": {
        "architectures": ["Qwen2ForCausalLM"], "num_attention_heads": 4, "num_key_value_heads": 1, "tie_word_embeddings": False,
        "use_sliding_window": True, "sliding_window": 100, "max_window_layers": 1,
    },
}  # fmt: skip
"""Grouped queries; normalised heads; a window in all layers but the first, and biases."""

SIZES = {
    "cuda": {"hidden_size": 256, "num_hidden_layers": 4, "head_dim": 64, "intermediate_size": 512},
    "cpu": {"hidden_size": 64, "num_hidden_layers": 3, "head_dim": 16, "intermediate_size": 96},
}


def config_of(kind: str, place: str) -> dict[str, Any]:
    """``config.json`` of a kind of model, at the size for a place."""
    return {**COMMON, **KINDS[kind], **SIZES[place]}


@cache
def model_of(kind: str, place: str) -> str:
    """A folder with nothing but that configuration: weights are drawn at random."""
    where = Path(mkdtemp(prefix=f"exact-{kind}-"))
    (where / "config.json").write_text(json.dumps(config_of(kind, place)))
    return str(where)


def engine_of(place: str, kind: str, **settings: Any) -> Engine:
    """An engine of the place's run dtype; ``model``: another checkpoint. On a GPU the family's own kernels must be there, and its graphs
    unless they are off."""
    values: dict[str, Any] = {"max_num_seqs": 48, "max_model_len": 2048, "load_format": "dummy", "num_kv_blocks": 600, "block_size": 16}
    values["dtype"] = "bfloat16" if place == "cuda" else "float32"
    engine = make_engine(settings.pop("model", None) or model_of(kind, place), place, **{**values, **settings})
    if place == "cuda":
        assert engine.model._fused is not None, "see the warning"  # type: ignore[attr-defined]
        assert bool(engine.metrics().graphs) == (settings.get("cuda_graphs") != "off"), "see the warning"
    return engine


@dataclass
class Trail:
    """What is left of one answer. ``kv``: ``[positions, bytes]`` of every layer's keys and values, in the order of layers; ``None`` if
    it never stood still. ``pages``: where they were."""

    name: str
    positions: int
    answer: Answer = field(default_factory=Answer)
    kv: list[tuple[str, torch.Tensor]] | None = None
    pages: list[int] = field(default_factory=list)


_MORE = 12
"""Tokens behind the last one that is compared: a sequence has to be there still when its KV is read."""


def run(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    turns: Sequence[int] | None = None,
    mates: Sequence[int] = (),
    around: Callable[[int], None] = lambda turn: None,
    **values: Any,
) -> list[Trail]:
    """Trails of all prompts, which arrive in the turns given (all at once), up to ``max_tokens`` of each.

    ``mates``: prompts of which nothing is kept. ``around``: called before each turn. ``values``: of the requests.
    """
    many = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    asked = [p.max_tokens or 1 for p in many]
    waiting = sorted(range(len(prompts)), key=lambda i: 0 if turns is None else turns[i])
    trails: dict[int, Trail] = {}
    handles: dict[int, int] = {}
    turn = 0
    while waiting or engine.has_unfinished():
        while waiting and (turns is None or turns[waiting[0]] <= turn):
            i = waiting.pop(0)
            more = request(str(i), prompts[i], many[i].clone(max_tokens=asked[i] + _MORE, ignore_eos=True), stream=True, **values)
            trails[i] = Trail(str(i), len(prompts[i]) + asked[i] - 1)
            engine.add_request(more)
            handles[i] = next(h for h, a in engine._answers.by_handle.items() if a.request is more)
        around(turn)
        for delta in engine.step():
            answer = trails[int(delta.request_id)].answer
            answer.tokens += delta.new_token_ids
            answer.logprobs += delta.logprobs or []
            answer.finish, answer.error = delta.finish_reason, delta.error
            answer.cached_tokens = delta.cached_tokens
        for i, trail in trails.items():
            if i in handles and len(trail.answer.tokens) >= asked[i]:
                if i not in mates and trail.answer.finish is None and not _read_kv(engine, handles[i], trail):
                    continue  # preempted: until it has come back
                engine.abort(str(i))
                del handles[i]
        turn += 1
        assert turn < 20_000
    for i, trail in trails.items():
        assert trail.answer.error is None, trail.answer.error
        trail.answer.tokens, trail.answer.logprobs = trail.answer.tokens[: asked[i]], trail.answer.logprobs[: asked[i]]
        assert len(trail.answer.tokens) == asked[i]
    return [trails[i] for i in range(len(prompts)) if i not in mates]


def _read_kv(engine: Engine, handle: int, trail: Trail) -> bool:
    info = engine._core.info(handle)
    if info is None or info["status"] != "running" or not info["state_slot"] or info["computed_tokens"] < trail.positions:
        return False
    runner, slot = engine._runner, info["state_slot"]
    names = [name for pair in engine.model._names for name in pair]  # type: ignore[attr-defined]

    @torch.inference_mode()
    def read() -> None:
        first = runner.kv.tensors[names[0]]
        pages = runner.inputs.table[slot, : -(-trail.positions // first.shape[1])].long()
        trail.pages = pages.tolist()
        trail.kv = [(name, _bytes(runner.kv.tensors[name][pages].flatten(0, 1)[: trail.positions])) for name in names]

    run_in_order(runner.queue, read)
    return True


def _bytes(entries: torch.Tensor) -> torch.Tensor:
    return entries.flatten(1).contiguous().view(torch.uint8).cpu()


def difference(want: Trail, got: Trail) -> str:
    """Where two trails of one request differ in a bit; empty = nowhere. Layers first: the earliest layer whose KV differs was given
    something else by the layer before it."""
    told: list[str] = []
    if want.kv is not None and got.kv is not None:
        for (name, one), (_, other) in zip(want.kv, got.kv, strict=True):
            rows = (one != other).any(1).nonzero()
            if len(rows):
                told.append(f"{name} is the first to differ, at {len(rows)} of {len(one)} positions from {int(rows[0])} on")
                break
    a, b = want.answer, got.answer
    at = next((i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=True)) if x != y), None)
    if at is not None:
        told.append(f"token {at} is {b.tokens[at]} instead of {a.tokens[at]}")
    for i, (x, y) in enumerate(zip(a.logprobs, b.logprobs, strict=True)):
        if not np.array_equal(x.ids, y.ids) or x.values.tobytes() != y.values.tobytes() or x.rank != y.rank:
            told.append(f"log-probabilities differ from token {i} on")
            break
    return f"request {want.name}: {'; '.join(told)}" if told else ""


def check_same(want: Sequence[Trail], got: Sequence[Trail], what: object = "") -> None:
    """Fails with every difference, and if no KV was compared."""
    assert len(want) == len(got)
    told = [d for a, b in zip(want, got, strict=True) if (d := difference(a, b))]
    assert not told, f"{what}\n" + "\n".join(told)
    assert any(a.kv is not None and b.kv is not None for a, b in zip(want, got, strict=True))


_alone: dict[tuple[object, ...], list[Trail]] = {}


def alone(
    place: str, kind: str, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams], **settings: Any
) -> list[Trail]:
    """Each prompt by itself: one sequence, one chunk, no prefix cache, no graph, one step at a time. Computed once in a run.
    ``settings``: of the engine besides."""
    many = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    keys = [(place, kind, tuple(prompt), repr(p), repr(sorted(settings.items()))) for prompt, p in zip(prompts, many, strict=True)]
    missing = [i for i, key in enumerate(keys) if key not in _alone]
    if missing:
        plain: dict[str, Any] = {"max_num_seqs": 1, "enable_prefix_caching": False, "cuda_graphs": "off", "zero_overhead": False}
        with engine_of(place, kind, max_num_batched_tokens=2048, **plain, **settings) as engine:
            for i in missing:
                _alone[keys[i]] = run(engine, [prompts[i]], many[i])
    return [_alone[key][0] for key in keys]
