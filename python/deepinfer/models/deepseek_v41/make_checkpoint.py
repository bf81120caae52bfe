"""Writes a random checkpoint as the release lays its own out: packed weights, shards, index, configuration, tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...errors import ConfigError, UnsupportedModelError
from ..loaders.safetensors_writer import StoredTensor, write_sharded
from ..registry import architecture_of
from .drawn import Drawn
from .made_tokenizer import build_tokenizer, control_tokens, save_tokenizer
from .parameters import Form, Weight, weights
from .topology import DeepseekV41Topology, read_topology

ARCHITECTURE = "DeepseekV41ForCausalLM"
SHARD_BYTES = 10 * 10**9
_PIECE_NUMBERS = 1 << 18
"""Numbers drawn at a time."""

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in total)."""


@dataclass(frozen=True)
class MadeCheckpoint:
    """What was written."""

    directory: Path
    tensors: int
    nbytes: int
    shards: int


def _plan(topology: DeepseekV41Topology, plain: bool) -> dict[str, tuple[StoredTensor, Weight, bool]]:
    """By name: what is written, the weight it belongs to, and whether it is that weight's scales."""
    planned: dict[str, tuple[StoredTensor, Weight, bool]] = {}
    for weight in weights(topology):
        if plain:
            planned[weight.name] = (StoredTensor(weight.name, "F32", weight.shape), weight, False)
            continue
        stored = weight.stored
        planned[weight.name] = (StoredTensor(weight.name, stored.form.value[0], stored.shape), weight, False)
        if weight.scale is not None:
            scale = StoredTensor(weight.scale.name, weight.scale.form.value[0], weight.scale.shape)
            planned[scale.name] = (scale, weight, True)
    return planned


def _pieces(drawn: Drawn, scales: bool, plain: bool) -> Iterator[memoryview]:
    spec = drawn.weight.scale if scales and drawn.weight.scale is not None else drawn.weight.stored
    rows = spec.shape[0] if len(spec.shape) > 1 else 1
    # whole blocks of scales, so that each piece is decoded by itself
    step = max(1, _PIECE_NUMBERS // drawn.weight.shape[-1] // 32) * 32
    for first in range(0, rows, step):
        count = min(step, rows - first)
        if plain:
            piece = drawn.decoded(first, count).numpy()
        else:
            numbers = np.arange(first, first + count)
            piece = drawn.scales(numbers) if scales else drawn.values(numbers)
            if spec.form is Form.PLAIN:
                piece = torch.from_numpy(piece).bfloat16().view(torch.int16).numpy()
        yield np.ascontiguousarray(piece).data.cast("B")


def _plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Without what says that weights are packed."""
    kept = {name: value for name, value in config.items() if name not in ("quantization_config", "expert_dtype")}
    text = kept.get("text_config")
    if isinstance(text, Mapping):
        kept["text_config"] = _plain_config(text)
    return kept


def make_checkpoint(
    config: Mapping[str, Any],
    directory: Path,
    seed: int,
    plain: bool = False,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> MadeCheckpoint:
    """Writes random weights for ``config`` (fields of config.json) to ``directory``, which must be empty or absent.

    The same configuration and seed give the same bytes. ``plain`` writes float32 under the same names instead: the numbers the
    packed form decodes to. Memory stays at one piece of a tensor. ``config.json`` is written last; what was written is taken
    away again if something fails.

    Raises ``UnsupportedModelError`` for another architecture, ``UnsupportedConfigError`` as ``read_topology``, ``ConfigError``
    if no tokenizer fits the configuration, there is something in the directory or too little room on the disk, ``OSError``.
    """
    if architecture_of(config) != ARCHITECTURE:
        raise UnsupportedModelError(
            f"random checkpoints are made for {ARCHITECTURE}, not {architecture_of(config)}; "
            "load_format='dummy' runs any model on random weights"
        )
    topology = read_topology(config)
    if topology.token_map not in ("derive", "identity"):
        raise ConfigError(
            f"config field 'x_engram_token_map' = {topology.token_map!r} names a file; a made checkpoint has 'derive' or 'identity'"
        )
    tokenizer = build_tokenizer(topology, control_tokens(dict(config), topology))
    planned = _plan(topology, plain)
    total = sum(tensor.nbytes for tensor, _, _ in planned.values())
    existed = directory.exists()
    if existed and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} is not an empty directory; name a new one")
    directory.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(directory).free
    try:
        if total > free:
            raise ConfigError(
                f"the checkpoint takes {total / 1e9:.1f} GB and {free / 1e9:.1f} GB are free at {directory}; name another disk"
            )
        done = 0

        def note(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if progress is not None:
                progress(done, total)

        def pieces(name: str) -> Iterator[memoryview]:
            _, weight, scales = planned[name]
            return _pieces(Drawn(weight, seed), scales, plain)

        files = write_sharded(directory, [tensor for tensor, _, _ in planned.values()], pieces, shard_bytes, note)
        save_tokenizer(tokenizer, directory, topology.max_position)
        written = _plain_config(config) if plain else dict(config)
        (directory / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    except BaseException:
        for file in directory.iterdir():
            file.unlink()
        if not existed:
            directory.rmdir()
        raise
    return MadeCheckpoint(directory, len(planned), total, len(files))
