"""A toy model with windows in integers: a row that is missing, stale or not yet right changes every token that follows.

Layer after layer hashes the rows of the last ``WINDOW`` tokens that the layer before it made; the first ``ENCODER`` layers make what is
kept in pages, and every row reads all pages of its sequence. What is kept, moved and brought back is up to the engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Self

import torch

from deepinfer.kernels.state_replica.reference import ReplicaRing, save_replica
from deepinfer.models import register_model
from deepinfer.models.base import ForwardBatch, PagedGroup, Source, StateGroup, WindowHits

VOCAB = 97
ENCODER, DECODER, WINDOW, BACKTRACK = 2, 2, 6, 5
RING = WINDOW + BACKTRACK
_LAYERS = ENCODER + DECODER
_ROW = RING * 8  # bytes of a layer's ring
_LIVE = _LAYERS * _ROW


def _mix(a: torch.Tensor, b: torch.Tensor | int) -> torch.Tensor:
    """A hash of both, int64 with wrap-around; the sign bit stays clear, so that shifts are those of whole numbers."""
    z = (a * 6364136223846793005 + torch.as_tensor(b) * 1442695040888963407 + 11) & 0x7FFFFFFFFFFFFFFF
    return (z ^ (z >> 29)) * 5871781006564002453 & 0x7FFFFFFFFFFFFFFF


class WindowToy:
    """See the module's note. One sequence after the other: nothing here is fast."""

    vocab_size = VOCAB
    max_position = 512

    def __init__(self) -> None:
        self.reruns = 0

    @classmethod
    def from_config(cls, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> Self:
        return cls()

    @classmethod
    def position_limit(cls, config: Mapping[str, Any]) -> int:
        return cls.max_position

    def parameter_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {}

    def optional_tensors(self) -> tuple[str, ...]:
        return ()

    def parameter(self, name: str) -> torch.Tensor:
        raise KeyError(name)

    def finish_loading(self) -> None:
        pass

    def kv_groups(self, block_tokens: int) -> tuple[list[PagedGroup], list[StateGroup]]:
        hits = WindowHits(ENCODER, DECODER, WINDOW, block_tokens, BACKTRACK)
        sizes = (ENCODER * _ROW, 2 * DECODER * _ROW)
        state = StateGroup(*sizes, replicas=1, ring=RING, cut=block_tokens, replica_at=_LIVE, hits=hits)
        self._cut = block_tokens
        return [PagedGroup(block_tokens, (Source(("kv",), block_tokens, (1,), torch.int64),))], [state]

    def _rings(self, kv: dict[str, torch.Tensor], replica: bool) -> torch.Tensor:
        """int64 ``[slots, layers, RING]``."""
        at = _LIVE if replica else 0
        return kv["state0"][:, at : at + _LIVE].view(torch.int64).view(-1, _LAYERS, RING)

    def forward(self, batch: ForwardBatch, kv: dict[str, torch.Tensor]) -> torch.Tensor:
        assert batch.state is not None
        x = _mix(batch.ids, batch.pos)
        rings, pages = self._rings(kv, False), kv["kv"].view(-1)
        out = torch.zeros_like(x)
        for i in range(len(batch.cu_q_host) - 1):
            rows = slice(batch.cu_q_host[i], batch.cu_q_host[i + 1])
            ring, floors = rings[int(batch.state.state_row[i])], batch.state.floor[i].tolist()
            mine, pos = x[rows], batch.pos[rows]
            for layer in range(_LAYERS):
                if layer == ENCODER:
                    self._write(batch, rows, mine, pages)
                mine = self._layer(ring[layer], mine, layer, pos, floors[layer >= ENCODER])
            out[rows] = self._read(batch, i, rows, mine, pages)
        # Sixteen bits in each float.
        return torch.stack([(out >> shift & 0xFFFF).float() for shift in (0, 16, 32, 48)], 1)

    def _write(self, batch: ForwardBatch, rows: slice, x: torch.Tensor, pages: torch.Tensor) -> None:
        slots = batch.slots[0][rows]
        kept = slots >= 0
        self.reruns += int((~kept).sum())
        pages[slots[kept]] = _mix(x[kept], batch.ids[rows][kept])

    def _layer(self, ring: torch.Tensor, x: torch.Tensor, layer: int, pos: torch.Tensor, floor: int) -> torch.Tensor:
        made = _mix(x, 1000 + layer)
        first, out = int(pos[0]), x
        for back in range(WINDOW - 1, -1, -1):
            q = pos - back
            seen = torch.where(q >= first, made[(q - first).clamp_min(0)], ring[q % RING])
            out = torch.where(q >= max(floor, 0), _mix(out, seen), out)
        ring[pos[-RING:] % RING] = made[-RING:]
        return out

    def _read(self, batch: ForwardBatch, i: int, rows: slice, x: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        end = int(batch.pos[rows.stop - 1]) + 1
        seen = torch.arange(end)
        slots = batch.block_table[i][seen // self._cut].long() * self._cut + seen % self._cut
        return _mix(x, torch.cumsum(_mix(pages[slots], seen), 0)[batch.pos[rows]])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        mixed = hidden.long() @ torch.tensor([1, 7, 31, 57])
        # A few tokens only, so that prompt lookup has something to find.
        wanted = mixed % VOCAB % 13
        return -(torch.arange(VOCAB) - wanted[:, None]).abs().float()

    def end_step(self, batch: ForwardBatch, rejected: torch.Tensor | None, kv: dict[str, torch.Tensor]) -> None:
        assert batch.state is not None
        crossing = batch.state.crossing
        if not len(crossing):
            return
        start = batch.seq_len - (batch.cu_q[1:] - batch.cu_q[:-1])
        after = batch.seq_len if rejected is None else batch.seq_len - rejected
        live, copy = self._rings(kv, False), self._rings(kv, True)
        rings = [ReplicaRing(live[:, layer], copy[:, layer], WINDOW) for layer in range(_LAYERS)]
        save_replica(rings, batch.state.state_row[crossing], start[crossing], after[crossing], self._cut, BACKTRACK)


@cache
def toy_checkpoint() -> str:
    """A directory that names this model; it has no weights."""
    register_model("WindowToy", "window_toy:WindowToy")
    where = Path(mkdtemp(prefix="window-toy-"))
    (where / "config.json").write_text(json.dumps({"architectures": ["WindowToy"], "vocab_size": VOCAB, "eos_token_id": 96}))
    return str(where)
