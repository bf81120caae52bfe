"""Where weights come from: a checkpoint in the released form (or with plain numbers under the same names), or a seed.

Both give numbers ready to be copied to the places of ``containers``, and Engram tables that stay where they are. Everything
that can be told from a checkpoint without its weights is told when a source is made, before the model has memory: missing and
unknown tensors, other shapes and packings (headers), NaN among the scales (a twentieth of the bytes), the map of token ids.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from ...errors import CheckpointError
from ...kernels.block_formats import decode_fp8_weight, decode_mxfp4_weight
from ..config import read_json
from ..loaders.safetensors_source import SafetensorsSource
from .checkpoint import check_tensors
from .drawn import Drawn, DrawnRows
from .engram import DEAD, Vocabulary, identity_map, token_map
from .engram_table import EngramTable
from .parameters import Form, Part, Weight, checkpoint_parameters, weights
from .strays import explain
from .topology import DeepseekV41Topology

_SCAN_BYTES = 1 << 26
_NAN_SCALE = 255
_PLAIN_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16}


class DeepseekV41Source(Protocol):
    """A ``WeightSource`` that opens tables, too."""

    def names(self) -> Iterable[str]:
        """See ``WeightSource``; tables are not among them, scales only where their weights are kept packed."""

    def shape(self, name: str) -> tuple[int, ...]:
        """See ``WeightSource``."""

    def read(self, name: str) -> torch.Tensor:
        """See ``WeightSource``; packed parts as float8_e4m3fn and uint8."""

    def where(self, name: str) -> str:
        """See ``WeightSource``."""

    def tables(self, cache_bytes: int | None) -> dict[int, EngramTable]:
        """By layer; each keeps at most ``cache_bytes`` of rows in memory, or all of them for None."""


class _Listed:
    """Names and shapes as the places of ``containers`` have them: decoded, or packed where ``keep_packed`` says so."""

    def __init__(self, topology: DeepseekV41Topology, keep_packed: Collection[Form]) -> None:
        self._packed: dict[str, Weight] = {}
        self._scales: dict[str, Weight] = {}
        self._decoded: dict[str, Weight] = {}
        self._tables: list[Weight] = []
        self._shapes: dict[str, tuple[int, ...]] = {}
        for weight in weights(topology):
            if weight.stored.part is Part.ENGRAM_TABLE:
                self._tables.append(weight)
            elif weight.scale is not None and weight.stored.form in keep_packed:
                self._packed[weight.name], self._scales[weight.scale.name] = weight, weight
                self._shapes[weight.name], self._shapes[weight.scale.name] = weight.stored.shape, weight.scale.shape
            else:
                self._decoded[weight.name] = weight
                self._shapes[weight.name] = weight.shape
        self._layers = () if topology.engram is None else topology.engram.layers

    def names(self) -> Iterable[str]:
        """See ``WeightSource``."""
        return self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        """See ``WeightSource``."""
        return self._shapes[name]


class ReleasedSource(_Listed):
    """A checkpoint on disk. Reads one tensor at a time, in any order, whichever file it is in."""

    def __init__(
        self,
        files: Sequence[Path],
        topology: DeepseekV41Topology,
        keep_packed: Collection[Form] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        """Checks everything but the numbers; ``CheckpointError`` lists what is wrong with names, files and what is needed.

        Packed weights travel to ``device`` as they are and are decoded there.
        """
        super().__init__(topology, keep_packed)
        self._device = torch.device(device)
        self.reads_ahead = self._device.type == "cpu"  # what is decoded on a GPU takes the room of its weights
        self._stored = SafetensorsSource(files)
        found = {name: (self._stored.dtypes[name], self._stored.shape(name)) for name in self._stored.names()}
        check_tensors(checkpoint_parameters(topology), found, str(files[0].parent), partial(explain, topology=topology))
        self._check_scales(topology)

    def _check_scales(self, topology: DeepseekV41Topology) -> None:
        for weight in weights(topology):
            if weight.scale is None:
                continue
            bad = self._first_nan(weight.scale.name)
            if bad is not None:
                raise CheckpointError(
                    f"scales {weight.scale.name!r} in {self.where(weight.scale.name)} hold NaN (byte 255) at {bad}: "
                    "the checkpoint is damaged or not in ue8m0; fetch it again"
                )

    def _first_nan(self, name: str) -> list[int] | None:
        mapped = self._stored.mapped(name)
        step = max(1, _SCAN_BYTES // max(mapped.shape[1], 1))
        for first in range(0, mapped.shape[0], step):
            part = mapped[first : first + step]
            if part.size and part.max() == _NAN_SCALE:
                row, column = np.argwhere(part == _NAN_SCALE)[0]
                return [first + int(row), int(column)]
        return None

    def where(self, name: str) -> str:
        """See ``WeightSource``."""
        return self._stored.where(name)

    def read(self, name: str) -> torch.Tensor:
        """See ``WeightSource``: decoded to float32, as stored, or the packed bytes."""
        if name in self._scales:
            return self._stored.read(name).view(torch.uint8)
        if name in self._packed:
            return self._read_packed(self._packed[name])
        weight = self._decoded[name]
        stored = self._stored.read(name)
        if weight.scale is None:
            return stored
        decode = decode_fp8_weight if weight.stored.form is Form.FP8 else decode_mxfp4_weight
        scale = self._stored.read(weight.scale.name)
        return decode(stored.to(self._device), scale.to(self._device), (weight.shape[0], weight.shape[1]), name=name)

    def _read_packed(self, weight: Weight) -> torch.Tensor:
        stored = self._stored.read(weight.name)
        if weight.stored.form is Form.FP4_PAIRS:
            return stored.view(torch.uint8)
        # e4m3 has one NaN of either sign, all other bits set; FP4 has none
        if bool(((stored.view(torch.uint8) & 0x7F) == 0x7F).any()):
            raise CheckpointError(f"values of {weight.name!r} in {self.where(weight.name)} hold NaN: the checkpoint is damaged")
        return stored

    def tables(self, cache_bytes: int | None) -> dict[int, EngramTable]:
        """See ``DeepseekV41Source``; mapped and never read whole, unless they are to be in memory."""
        opened: dict[int, EngramTable] = {}
        for layer, weight in zip(self._layers, self._tables, strict=True):
            values = self._rows(weight.name, cache_bytes)
            if weight.scale is None:
                dtype = _PLAIN_DTYPES[self._stored.dtypes[weight.name]]
                opened[layer] = EngramTable(values, None, cache_bytes or 0, weight.name, dtype)
            else:
                scales = self._rows(weight.scale.name, cache_bytes)
                opened[layer] = EngramTable(values, scales, cache_bytes or 0, weight.name)
        return opened

    def _rows(self, name: str, cache_bytes: int | None) -> np.ndarray:
        mapped = self._stored.mapped(name)
        return np.array(mapped) if cache_bytes is None else mapped


class DrawnSource(_Listed):
    """Random weights: what ``make-checkpoint`` writes with the same seed. Tables are drawn row by row when they are read."""

    def __init__(self, topology: DeepseekV41Topology, seed: int, keep_packed: Collection[Form] = ()) -> None:
        super().__init__(topology, keep_packed)
        self._seed = seed

    def where(self, name: str) -> str:
        """See ``WeightSource``."""
        return "random weights"

    def read(self, name: str) -> torch.Tensor:
        """See ``WeightSource``; drawn on the CPU, so every device gets the same values."""
        if name in self._scales:
            weight = self._scales[name]
            return torch.from_numpy(Drawn(weight, self._seed).scales(np.arange(self._shapes[name][0])))
        if name in self._packed:
            weight = self._packed[name]
            drawn = torch.from_numpy(np.ascontiguousarray(Drawn(weight, self._seed).values(np.arange(weight.shape[0]))))
            return drawn.view(torch.float8_e4m3fn) if weight.stored.form is Form.FP8 else drawn
        weight = self._decoded[name]
        drawn_weight = Drawn(weight, self._seed)
        return drawn_weight.decoded(0, drawn_weight.rows).view(weight.shape)

    def tables(self, cache_bytes: int | None) -> dict[int, EngramTable]:
        """See ``DeepseekV41Source``; rows are drawn when they are read."""
        opened: dict[int, EngramTable] = {}
        for layer, weight in zip(self._layers, self._tables, strict=True):
            drawn = Drawn(weight, self._seed)
            scales = None if weight.scale is None else DrawnRows(drawn, weight.scale)
            opened[layer] = EngramTable(DrawnRows(drawn, weight.stored), scales, cache_bytes or 0, weight.name)
        return opened


def read_token_map(topology: DeepseekV41Topology, directory: Path) -> torch.Tensor | None:
    """Compressed id of every token id, int64 ``[vocab]``, as ``x_engram_token_map`` says; None without Engram layers.

    ``derive`` reads ``tokenizer.json`` of the checkpoint's ``directory``; a file (JSON, ``{"ids": [...]}``, by token id, −1 for
    ids without one) is looked for there. Raises ``CheckpointError`` if it is absent or makes another number of compressed ids
    than ``engram_compressed_vocab_size``.
    """
    if topology.engram is None:
        return None
    compressed, vocab = topology.engram.vocab, topology.vocab
    if topology.token_map == "identity":
        return identity_map(compressed, vocab)
    if topology.token_map == "derive":
        return token_map(_vocabulary(directory / "tokenizer.json"), compressed, vocab)
    file = directory / topology.token_map
    if Path(topology.token_map).is_absolute() or ".." in file.parts[len(directory.parts) :]:
        raise CheckpointError(
            f"config field 'x_engram_token_map' = {topology.token_map!r} leads out of {directory}; put the map beside the weights"
        )
    ids = read_json(file).get("ids")
    if not isinstance(ids, list) or any(isinstance(item, bool) or not isinstance(item, int) or item < DEAD for item in ids):
        raise CheckpointError(f"{file}: 'ids' must list the compressed id of every token id (-1 for none)")
    distinct = {item for item in ids if item != DEAD}
    if len(ids) > vocab or distinct != set(range(compressed)):
        raise CheckpointError(
            f"{file} gives {len(ids)} tokens {len(distinct)} compressed ids (the largest is {max(distinct, default=DEAD)}), "
            f"'vocab_size' is {vocab} and 'engram_compressed_vocab_size' {compressed}; use the map the checkpoint was trained with"
        )
    mapped = torch.full((vocab,), DEAD, dtype=torch.int64)
    mapped[: len(ids)] = torch.tensor(ids, dtype=torch.int64)
    return mapped


def _vocabulary(file: Path) -> Vocabulary:
    from tokenizers import Tokenizer

    if not file.is_file():
        raise CheckpointError(f"{file} is missing: Engram rows are found by the texts of tokens; put the checkpoint's tokenizer there")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare exceptions
        raise CheckpointError(f"{file}: not a tokenizer that can be read ({error})") from error
