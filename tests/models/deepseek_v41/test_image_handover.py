"""Prompts with images computed by one engine and gone on with by another: the bits of one engine, whatever happens on the way."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine_kit
from deepinfer import PrefillDecodePair, SamplingParams
from deepinfer.engine.config import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.image_input import place_images
from deepinfer.engine.request import EngineRequest
from deepinfer.errors import HandoverError, ImageError
from deepinfer.kvcache.handover import Handover
from deepinfer.models.images import ImageInput, ImageSpan, Pixels
from roles_kit import Pair

IMAGE = 2046
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "quiet": True, "max_model_len": 128, "max_num_seqs": 3, "num_threads": 1, "block_size": 16,
    "max_num_batched_tokens": 64, "swap_space_gib": 0,
}  # fmt: skip
PARAMS = SamplingParams(temperature=0.8, max_tokens=30, ignore_eos=True, detokenize=False, logprobs=1)


def picture(height: int, width: int, seed: int = 0) -> Pixels:
    return np.random.RandomState([seed, height, width]).randint(0, 256, (height, width, 3)).astype(np.uint8)


def requests(engine: Engine) -> list[EngineRequest]:
    """One or two images, and none."""
    made = []
    rules = engine.images
    assert rules is not None
    for name, pictures in (("one", [picture(56, 70)]), ("two", [picture(42, 42), picture(98, 56)]), ("none", [])):
        ids = list(range(100, 109)) + [IMAGE, 50] * len(pictures) + list(range(200, 205))
        placed, spans = place_images(ids, [rules.prepare(p) for p in pictures], IMAGE)
        made.append(engine_kit.request(name, placed, PARAMS, images=spans, stream=True))
    return made


@pytest.fixture(scope="module")
def alone(made: Path) -> list[engine_kit.Answer]:
    """Of one engine with room for all."""
    with Engine(EngineConfig(model=str(made), **SETTINGS, num_kv_blocks=40)) as engine:
        for request in requests(engine):
            engine.add_request(request)
        found = engine_kit.collect(engine)
        return [found[name, 0] for name in ("one", "two", "none")]


def test_a_handed_over_answer_is_that_of_one_engine(made: Path, alone: list[engine_kit.Answer], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the engine that goes on has to compute images again: it has room for few sequences and keeps nothing of them."""
    pair = Pair(monkeypatch, "cpu", model=str(made), completion={"num_kv_blocks": 8, "enable_prefix_caching": False}, **SETTINGS)
    for count in (3, 2):  # of three, the one without an image may be the only one that makes room
        which = [replace(r, request_id=f"{r.request_id} of {count}") for r in requests(pair.prompt)[:count]]
        for found, want in zip(pair.generate(which), alone, strict=False):
            assert engine_kit.same_bits(want, found), (want, found)
    assert pair.completion.core_stats()["preemptions"] > 0
    assert pair.completion.model._vision.computed > 0  # type: ignore[attr-defined]
    pair.check_rest()
    pair.close()


def test_a_record_whose_images_do_not_fit_is_refused_alone(
    made: Path, alone: list[engine_kit.Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(monkeypatch, "cpu", model=str(made), **SETTINGS)
    forged: list[Exception] = []
    passed = pair.pass_on

    def forge(request_id: str) -> None:
        record = Handover.from_bytes(pair.records[request_id])
        for number, span in enumerate(record.images):
            odd = ImageInput.of(span.image.pixels[:-1], span.image.tokens)
            moved = ImageSpan(span.start - 1, span.image)
            for other in (ImageSpan(span.start, odd), moved):
                images = (*record.images[:number], other, *record.images[number + 1 :])
                with pytest.raises(HandoverError) as told:
                    pair.completion.take_over(replace(record, request_id="forged", images=images, ticket=b"").to_bytes())
                forged.append(told.value)
        passed(request_id)

    monkeypatch.setattr(pair, "pass_on", forge)
    for found, want in zip(pair.generate(requests(pair.prompt)), alone, strict=True):
        assert engine_kit.same_bits(want, found)
    assert len(forged) == 6
    pair.check_rest()
    pair.close()


def test_a_pair_of_processes_takes_images(made: Path, alone: list[engine_kit.Answer]) -> None:
    """A killed completion process costs a rerun, whose pixels the front still has."""

    async def ask() -> None:
        pair = PrefillDecodePair(str(made), **{**SETTINGS, "num_kv_blocks": 40}, max_reruns=2)
        try:
            with pytest.raises(ImageError, match="array"):
                async for _ in pair.generate({"prompt_token_ids": [IMAGE, 5], "images": [np.zeros((2, 2), np.uint8)]}, PARAMS):
                    pass
            ids = [*range(100, 109), IMAGE, 50, *range(200, 205)]
            params = PARAMS.clone(seed=7)
            stream = pair.generate({"prompt_token_ids": ids, "images": [picture(56, 70)]}, params, mode="delta")
            pieces = [await anext(stream)]
            while sum(len(p.outputs[0].token_ids) for p in pieces) < 3:
                pieces.append(await anext(stream))
            os.kill(pair.completion_pid, signal.SIGKILL)
            pieces += [piece async for piece in stream]
            assert [i for p in pieces for i in p.outputs[0].token_ids] == alone[0].tokens
            assert pieces[-1].num_reruns == 1
        finally:
            await pair.aclose()

    asyncio.run(ask())
