"""The record that goes with a sequence's KV: what is read is what was written, and nothing else can be read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.errors import HandoverError
from deepinfer.kvcache.handover import Handover
from deepinfer.sampling import SamplingParams

PARAMS = SamplingParams(
    temperature=0.7, top_k=5, seed=9, repetition_penalty=1.3, stop=["é", "x"], stop_token_ids=[4], logit_bias={7: 0.1}, max_tokens=None
)


def record(**changes: Any) -> Handover:
    plain = Handover(
        request_id="r-1",
        prompt_ids=[5, 6, 7, 2**31 - 1],
        produced=[8],
        computed=4,
        params=PARAMS,
        seed=2**63 - 1,
        max_new=20,
        layout={"model": "tiny", "block size": [64]},
        eos_ids=(2, 3),
        bad_word_ids=((4, 5), (6,)),
        salt=b"\x00\xff",
        priority=-3,
        order=17,
        stream=True,
        cached_tokens=64,
        ticket=b"ticket",
    )
    return replace(plain, **changes)


def test_bytes_give_the_record_back() -> None:
    for made in (record(), record(grammar="json", params=SamplingParams(), produced=[1, 2, 3])):
        assert Handover.from_bytes(made.to_bytes()) == made


def test_the_digest_names_everything_but_the_ticket() -> None:
    base = record().digest()
    assert record(ticket=b"").digest() == base and len(base) == 16
    for changes in ({"seed": 1}, {"produced": [9]}, {"prompt_ids": [5, 6, 7, 8]}, {"params": SamplingParams()}, {"computed": 3}):
        assert record(**changes).digest() != base


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"computed": 5}, "5 of 5"),
        ({"computed": 0}, "0 of 5"),
        ({"produced": []}, "no produced"),
        ({"prompt_ids": []}, "no prompt"),
        ({"prompt_ids": [5, 6, 7, -1]}, "negative"),
        ({"seed": -1}, "seed"),
        ({"params": SamplingParams(n=2)}, "several answers"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(HandoverError, match=said):
        Handover.from_bytes(record(**changes).to_bytes())


@pytest.mark.parametrize("data", [b"", b"x" * 12, b"x" * 200, record().to_bytes()[:-1], record().to_bytes() + b"\0"])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(HandoverError):
        Handover.from_bytes(data)


def test_another_version_says_so() -> None:
    data = bytearray(record().to_bytes())
    data[4] += 1
    with pytest.raises(HandoverError, match="format 3"):
        Handover.from_bytes(bytes(data))


@given(st.integers(0, len(record().to_bytes()) - 1), st.integers(1, 255))
@settings(max_examples=300, deadline=None)
def test_a_changed_byte_is_another_record_or_a_typed_error(at: int, change: int) -> None:
    data = bytearray(record().to_bytes())
    data[at] ^= change
    try:
        found = Handover.from_bytes(bytes(data))
    except HandoverError:
        return
    assert found.digest() != record().digest() or found.ticket != record().ticket or found == record()
