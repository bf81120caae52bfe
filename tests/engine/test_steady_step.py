"""A decode step with nothing to tell costs Python the same for any number of sequences."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest

from deepinfer.engine.engine import Engine
from deepinfer.sampling import SamplingParams
from engine_kit import make_engine, random_prompts, request, tiny_checkpoint


def decoding(device: str, count: int, overlap: bool, **values: Any) -> Engine:
    """An engine in the middle of decoding ``count`` sequences."""
    engine = make_engine(tiny_checkpoint("llama"), device, max_num_seqs=64, zero_overhead=overlap)
    params = SamplingParams(max_tokens=200, ignore_eos=True, **values)
    for i, prompt in enumerate(random_prompts([40] * count)):
        engine.add_request(request(str(i), prompt, params))
    while engine.core_stats()["decoding"] < count:
        engine.step()
    for _ in range(3):
        engine.step()
    return engine


def calls_of_a_step(engine: Engine) -> Counter[str]:
    """Python and C functions called in one step, by name."""
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            calls[f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}"] += 1
        elif event == "c_call":
            calls[str(getattr(arg, "__qualname__", arg))] += 1

    sys.setprofile(note)
    try:
        told = engine.step()
    finally:
        sys.setprofile(None)
    assert told == []
    return calls


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("values", [{"temperature": 0}, {"temperature": 0.8, "top_k": 20}, {"temperature": 1.0, "repetition_penalty": 1.2}])
def test_python_calls_of_a_steady_step_do_not_grow_with_sequences(device: str, values: dict[str, Any], overlap: bool) -> None:
    least = 8 if device == "cpu" else 32  # a GPU pads fewer rows to 32, which is a call of its own
    with decoding(device, least, overlap, **values) as few:
        small = calls_of_a_step(few)
    with decoding(device, 64, overlap, **values) as many:
        large = calls_of_a_step(many)
    assert small.total() > (15 if overlap and device == "cpu" else 50)  # the forward's calls are another thread's
    assert small == large
