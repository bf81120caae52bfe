"""What the bytes of a sequence's KV mean, and where each part lies in them.

Owns: the description of an engine's KV, its fingerprint, the sections of a payload. Never touches: tensors.

A payload is the pages of each tensor of each paged group, first page first, whole pages, then one row of each state group. Every
section starts at a multiple of 64 bytes. Two engines can read each other's payloads only if every field of their layouts is equal.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from deepinfer.models.base import PagedGroup, StateGroup

FORMAT = 2
"""Version of the payload and of the record beside it."""

_ALIGN = 64


@dataclass(frozen=True, slots=True)
class Section:
    """One tensor's part of a payload.

    Attributes:
        group, member: which tensor: of a paged group by its place in the group, or of the states (``group`` −1) by its place.
        offset: first byte.
        rows, row_bytes: pages of the tensor (1 for a state) and the bytes of one.
    """

    group: int
    member: int
    offset: int
    rows: int
    row_bytes: int

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.offset + self.rows * self.row_bytes


@dataclass(frozen=True)
class KvLayout:
    """An engine's KV, described.

    Args:
        identity: what the values depend on besides the tokens: model, revision, weights, run dtype, numerics. Texts by name.
        paged, state: the model's groups.
    """

    identity: Mapping[str, str]
    paged: Sequence[PagedGroup]
    state: Sequence[StateGroup]

    @cached_property
    def fields(self) -> dict[str, Any]:
        """Everything that must agree, by the name a message calls it by; JSON values."""
        sources = [
            [[name, s.entries_per_page, list(s.shape), str(s.dtype).removeprefix("torch.")] for s in g.sources for name in s.tensors]
            for g in self.paged
        ]
        return {
            "format": FORMAT,
            **self.identity,
            "block size": [g.page_tokens for g in self.paged],
            "KV format": sources,
            "state format": [[s.stored, s.dropped, s.replicas, s.ring, s.cut] for s in self.state],
        }

    @cached_property
    def canonical(self) -> bytes:
        """The fields as bytes; equal bytes mean equal layouts."""
        return json.dumps(self.fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()

    @cached_property
    def fingerprint(self) -> str:
        """128 bits of hash over :attr:`canonical`, as hex."""
        return hashlib.blake2b(self.canonical, digest_size=16).hexdigest()

    def differences(self, other: Mapping[str, Any]) -> list[str]:
        """One phrase for each field in which ``other`` (another layout's :attr:`fields`) is not this one."""
        mine = self.fields
        names = [*mine, *(name for name in other if name not in mine)]
        return [
            f"{name} is {json.dumps(other.get(name))} there and {json.dumps(mine.get(name))} here"
            for name in names
            if other.get(name) != mine.get(name)
        ]

    @property
    def block_tokens(self) -> int:
        """Tokens of a block, which is a page of group 0."""
        return self.paged[0].page_tokens

    def num_blocks(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` positions."""
        return -(-tokens // self.block_tokens)

    def sections(self, tokens: int) -> list[Section]:
        """Where everything of a sequence of ``tokens`` computed positions lies."""
        found: list[Section] = []
        at = 0
        for g, group in enumerate(self.paged):
            pages = self.num_blocks(tokens) * (self.block_tokens // group.page_tokens)
            members = [s.entries_per_page * s.entry_bytes // len(s.tensors) for s in group.sources for _ in s.tensors]
            for m, row_bytes in enumerate(members):
                found.append(Section(g, m, at, pages, row_bytes))
                at = _up(found[-1].end)
        for i, spec in enumerate(self.state):
            found.append(Section(-1, i, at, 1, spec.stored * (1 + spec.replicas) + spec.dropped))
            at = _up(found[-1].end)
        return found

    def num_bytes(self, tokens: int) -> int:
        """Length of a payload."""
        return max((_up(s.end) for s in self.sections(tokens)), default=0)


def form_of(paged: Sequence[PagedGroup], state: Sequence[StateGroup]) -> str:
    """128 bits of hash, as hex, over what pages and stored state are made of: equal where they have the same bytes for the same values."""
    fields = KvLayout({}, paged, state).fields
    kept = {"KV format": fields["KV format"], "state": [[s.stored, s.ring, s.cut] for s in state]}
    return hashlib.blake2b(json.dumps(kept, sort_keys=True).encode(), digest_size=16).hexdigest()


def _up(n: int) -> int:
    return -(-n // _ALIGN) * _ALIGN
