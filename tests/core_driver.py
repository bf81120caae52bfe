"""Drives the Rust core from a test: a ring of plain numpy memory and a worker that makes tokens by a rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer import _core

EOS = 2
VOCAB = 1000
Ring = list[dict[str, NDArray[np.int32]]]
# (sequence handle, position of the token to draw) -> token
TokenRule = Callable[[int, int], int]


def make_config(**changes: Any) -> _core.CoreConfig:
    """A small core: 4 sequences, blocks of 16 tokens, 32 blocks."""
    settings: dict[str, Any] = {
        "groups": [_core.PagedGroup(page_tokens=16, num_pages=33, sources=[(16, 64)])],
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 128,
        "vocab_size": VOCAB,
        "device_ordered": True,
        "model": "toy",
    }
    return _core.CoreConfig(**(settings | changes))


def make_ring(core: _core.Core, slots: int = 3) -> Ring:
    """Memory of the ring, every field an array of its own."""
    return [{name: np.zeros(words, np.int32) for name, words in core.layout()} for _ in range(slots)]


def prompt(length: int, start: int = 100) -> list[int]:
    """Distinct token ids for a prompt; another ``start`` gives another prompt."""
    return [10 + (start + 7 * i) % (VOCAB - 10) for i in range(length)]


class Driver:
    """A core, its ring, and who is in which state slot."""

    def __init__(self, rule: TokenRule | None = None, **changes: Any) -> None:
        self.core = _core.Core(make_config(**changes))
        self.ring = make_ring(self.core)
        self.core.register_ring(self.ring)
        self.rule = rule or (lambda _seq, position: 10 + position % 500)
        self.in_slot: dict[int, int] = {}
        self.now = 0

    def schedule(self) -> int:
        """Plans a step; the ring slot or −1."""
        self.now += 1000
        slot = self.core.schedule(self.now)
        if slot >= 0:
            fields = self.ring[slot]
            for state, index, generation, *_ in fields["admitted"].reshape(-1, 6)[: int(fields["header"][11])].tolist():
                self.in_slot[state] = generation << 32 | index
        return slot

    def sample(self, slot: int) -> None:
        """Writes one token for each sequence that samples."""
        f = self.ring[slot]
        for i in range(int(f["header"][4])):
            samples = f["seq_flags"][i] & 1
            f["accepted"][i] = samples
            if samples:
                row = int(f["sample_off"][i])
                f["tokens"][row] = self.rule(self.in_slot[int(f["state_row"][i])], int(f["rng_pos"][row]))

    def complete(self, slot: int) -> list[list[int]]:
        """Completes a step; its output rows."""
        self.now += 1000
        rows = self.core.complete(slot, self.now)
        found = np.asarray(self.core.outputs()).reshape(-1, _core.OUTPUT_WORDS).tolist()
        assert len(found) == rows
        return found

    def step(self) -> list[list[int]] | None:
        """One whole step; None when there was nothing to run."""
        slot = self.schedule()
        if slot < 0:
            return None
        self.sample(slot)
        return self.complete(slot)

    def run(self, limit: int = 10_000) -> Iterator[list[int]]:
        """Output rows until nothing is left to run."""
        for _ in range(limit):
            rows = self.step()
            if rows is None:
                return
            yield from rows
        raise AssertionError(f"still running after {limit} steps")

    def check_counts(self) -> None:
        """The counts identity of every pool, and a full recount."""
        counts = self.core.counts()
        for c in [*counts["groups"], counts["slots"]]:
            assert c["free"] + c["cached"] + c["held"] + c["parked"] + c["reserved"] == c["total"]
        assert self.core.check() is None
