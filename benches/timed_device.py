"""A device that is a clock: a model whose every step waits, as a host does for its device, and computes nothing.

``python benches/timed_device.py serve DIR …`` is ``deepinfer serve`` with this model known to it; :func:`write_model` writes ``DIR``.
The wait happens on the device's queue, without the interpreter's lock, so that host work of the engine runs beside it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch

from deepinfer.models import register_model
from deepinfer.models.base import ForwardBatch, PagedGroup, Source, StateGroup

ARCHITECTURE = "TimedDevice"
FAVOURITE = 1000
"""The token that this model always wants; an ordinary word piece in SmolLM2's vocabulary."""


class TimedDevice:
    """Wants one token always. A byte of KV for a token, which nobody reads."""

    def __init__(self, vocab_size: int, max_position: int, step_seconds: float) -> None:
        self.vocab_size, self.max_position = vocab_size, max_position
        self._seconds = step_seconds

    @classmethod
    def from_config(cls, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> Self:
        return cls(config["vocab_size"], config["max_position_embeddings"], config["step_seconds"])

    @classmethod
    def position_limit(cls, config: Mapping[str, Any]) -> int:
        return int(config["max_position_embeddings"])

    def parameter_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {}

    def optional_tensors(self) -> tuple[str, ...]:
        return ()

    def parameter(self, name: str) -> torch.Tensor:
        raise KeyError(name)

    def finish_loading(self) -> None:
        pass

    def kv_groups(self, block_tokens: int) -> tuple[list[PagedGroup], list[StateGroup]]:
        return [PagedGroup(block_tokens, (Source(("kv",), block_tokens, (1,), torch.uint8),))], []

    def forward(self, batch: ForwardBatch, kv: dict[str, torch.Tensor]) -> torch.Tensor:
        time.sleep(self._seconds)
        return torch.zeros(len(batch.ids), 1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        found = torch.zeros(len(hidden), self.vocab_size)
        found[:, FAVOURITE] = 1.0
        return found


def write_model(folder: Path, vocab_size: int, max_position: int, step_seconds: float, eos: int) -> None:
    """A configuration; there are no weights."""
    config = {
        "architectures": [ARCHITECTURE], "vocab_size": vocab_size, "max_position_embeddings": max_position, "eos_token_id": eos,
        "step_seconds": step_seconds, "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def main(arguments: list[str]) -> int:
    """The command line of `deepinfer`."""
    from deepinfer.cli import main as command

    register_model(ARCHITECTURE, "timed_device:TimedDevice")
    return command(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
