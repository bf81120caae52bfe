"""What two engines must agree on before one reads the other's KV, and where each part of a payload lies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepinfer.kvcache.layout import KvLayout
from deepinfer.models.base import PagedGroup, Source, StateGroup

IDENTITY = {"model": "tiny", "revision": "1", "weights": "bf16", "dtype": "bfloat16", "numerics": "cpu/1/bfloat16"}
PAGED = (
    PagedGroup(64, (Source(("k0", "v0"), 64, (2, 16), torch.bfloat16), Source(("idx",), 16, (68,), torch.uint8))),
    PagedGroup(16, (Source(("c",), 4, (33,), torch.uint8),)),
)
STATE = (StateGroup(stored=100, dropped=28, replicas=1),)


def layout(paged: Any = PAGED, state: Any = STATE, **identity: str) -> KvLayout:
    return KvLayout({**IDENTITY, **identity}, paged, state)


def test_equal_layouts_have_one_fingerprint() -> None:
    a, b = layout(), KvLayout(dict(reversed(IDENTITY.items())), list(PAGED), list(STATE))
    assert a.canonical == b.canonical and a.fingerprint == b.fingerprint and len(a.fingerprint) == 32
    assert a.differences(b.fields) == []


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (layout(model="other"), 'model is "other" there and "tiny" here'),
        (layout(weights="fp8"), "weights"),
        (layout(dtype="float32"), "dtype"),
        (layout(numerics="cuda/1/bfloat16"), "numerics"),
        (layout(paged=(PagedGroup(32, PAGED[0].sources),)), "block size is [32] there and [64, 16] here"),
        (layout(paged=(PagedGroup(64, (Source(("k0", "v0"), 64, (2, 16), torch.float16),)), PAGED[1])), "KV format"),
        (layout(paged=(PagedGroup(64, (Source(("v0", "k0"), 64, (2, 16), torch.bfloat16), PAGED[0].sources[1])), PAGED[1])), "KV format"),
        (layout(state=(StateGroup(stored=100, dropped=28),)), "state format"),
        (layout(state=()), "state format"),
        (layout(more="field"), "more"),
    ],
)
def test_every_field_counts_and_is_named(other: KvLayout, said: str) -> None:
    found = layout().differences(other.fields)
    assert other.fingerprint != layout().fingerprint
    assert any(said in phrase for phrase in found), found


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200])
def test_sections_are_disjoint_aligned_and_as_large_as_their_tensors(tokens: int) -> None:
    at = layout()
    blocks = at.num_blocks(tokens)
    sections = at.sections(tokens)
    assert [(s.group, s.member) for s in sections] == [(0, 0), (0, 1), (0, 2), (1, 0), (-1, 0)]
    assert [s.rows for s in sections] == [blocks, blocks, blocks, 4 * blocks, 1]
    assert [s.row_bytes for s in sections] == [64 * 2 * 16 * 2, 64 * 2 * 16 * 2, 16 * 68, 4 * 33, 228]
    end = 0
    for s in sections:
        assert s.offset % 64 == 0 and s.offset >= end
        end = s.end
    assert end <= at.num_bytes(tokens) < end + 64
