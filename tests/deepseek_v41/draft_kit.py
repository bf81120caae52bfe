"""Engines of DeepSeek-V4.1 that draft, with drafts that are as right as a test wants them.

Random weights draft nothing that is right, so ``Told`` lets the stages run and then puts known continuations in place of their drafts:
``right(position)`` of them, wrong ones behind.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer.engine.engine import Engine
from deepinfer.models.base import Drafts
from deepinfer.models.deepseek_v41.forward import DeepseekV41Model
from deepinfer.sampling import SamplingParams
from deepinfer.worker.sync_guard import allow_device_sync
from deepseek_v41.forward_kit import make_model
from deepseek_v41.weights_kit import RandomWeights, config, plan
from engine_kit import Answer, collect, make_engine, request

DRAFTS = 5


def write_config(where: Path, name: str, **changes: Any) -> str:
    """A directory with the configuration alone; weights come from a seed."""
    where.mkdir(parents=True, exist_ok=True)
    (where / "config.json").write_text(json.dumps(config(name, **changes)), encoding="utf-8")
    return str(where)


@cache
def loaded(name: str, device: str = "cpu") -> DeepseekV41Model:
    """Random weights are slow to make: one model for all engines of a configuration, which set it up anew."""
    topology = plan(name)
    return make_model(topology, RandomWeights(topology, 3, released=True), device=device)


def engine_of(monkeypatch: pytest.MonkeyPatch, where: Path, name: str, device: str, **settings: Any) -> Engine:
    """A small engine with ``loaded(name)``; ``where`` is an empty directory, or one of an earlier call with this name."""
    monkeypatch.setattr("deepinfer.engine.assembly.load_model", lambda *_: loaded(name, device))
    defaults: dict[str, Any] = {
        "load_format": "dummy", "num_kv_blocks": 40, "max_num_seqs": 6, "max_num_batched_tokens": 160, "max_model_len": 640,
        "num_threads": 1,
    }  # fmt: skip
    return make_engine(write_config(where, name), device, **{**defaults, **settings})


def deepseek(engine: Engine) -> DeepseekV41Model:
    """The engine's model."""
    assert isinstance(engine.model, DeepseekV41Model)
    return engine.model


class Told:
    """Drafts that are right as often as told; see the module's note.

    Args:
        engine: whose drafts these become.
        streams: tokens of each sequence, prompt and answer, as they come out without drafts.
        right: how many drafts behind a position are right.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, engine: Engine, streams: Sequence[Sequence[int]], right: Callable[[int], int]
    ) -> None:
        model = deepseek(engine)
        self._draft, self._vocab, self._streams, self._right = model.draft, model.vocab_size, [list(s) for s in streams], right
        self.calls = 0
        monkeypatch.setattr(model, "draft", self)

    def __call__(self, batch: Any, hidden: Any, new: Any, kv: Any, draw: Any, count: int) -> Drafts:
        made = self._draft(batch, hidden, new, kv, draw, count)
        self.calls += 1
        with allow_device_sync():
            asked = zip(new.token.tolist(), new.position.tolist(), made.ids.tolist(), strict=True)
            rows = [self._told(token, at, ids) for token, at, ids in asked]
            return Drafts(torch.tensor(rows, device=made.ids.device), made.confidence)

    def _told(self, token: int, position: int, ids: list[int]) -> list[int]:
        known = next((s for s in self._streams if position < len(s) and s[position] == token), None)
        if known is None:
            return ids
        ahead = (known[position + 1 :] + [3] * len(ids))[: len(ids)]
        right = self._right(position)
        return [t if nth < right else (t + 1) % self._vocab for nth, t in enumerate(ahead)]


def answers(engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Answer]:
    """All requests at once; their answers in order."""
    for index, (prompt, values) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(request(f"r{index}", prompt, values))
    found = collect(engine)
    assert all(answer.finish in ("length", "stop") for answer in found.values()), found
    return [found[f"r{index}", 0] for index in range(len(prompts))]


Place = tuple[str, int, int]
"""Request, answer of it, position of its newest token."""


class Noted:
    """What an engine's stages draft, by place: the drafts, and the bits of their confidences. Of engines that run one step at a time.

    Made before a ``Told`` of the same engine, it sees what the stages made themselves.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
        model = deepseek(engine)
        self._engine, self._draft = engine, model.draft
        self.made: dict[Place, tuple[list[int], bytes]] = {}
        monkeypatch.setattr(model, "draft", self)

    def __call__(self, batch: Any, hidden: Any, new: Any, kv: Any, draw: Any, count: int) -> Drafts:
        made = self._draft(batch, hidden, new, kv, draw, count)
        known = self._engine._answers
        with allow_device_sync():
            slots = batch.state.state_row[new.sequence].tolist()
            for nth, (slot, position) in enumerate(zip(slots, new.position.tolist(), strict=True)):
                answer = known.by_handle[int(known.handle_of_slot[slot])]
                bits = made.confidence[nth].cpu().numpy().tobytes()
                self.made[answer.request.request_id, answer.index, position] = (made.ids[nth].tolist(), bits)
        return made

    def same_as(self, other: Noted) -> tuple[int, list[Place]]:
        """Places both drafted behind, and those of them where this one drafted otherwise, in order."""
        both = self.made.keys() & other.made.keys()
        return len(both), sorted(place for place in both if self.made[place] != other.made[place])
