"""From a checkpoint that was found to parameters that are filled."""

from __future__ import annotations

from collections.abc import Collection

import torch

from ...errors import UnsupportedFormatError
from ..loaders.load import check_load_format
from ..loaders.resolved import ResolvedModel
from ..loaders.source import Progress, fill
from .containers import DeepseekV41Parameters
from .parameters import Form
from .sources import DeepseekV41Source, DrawnSource, ReleasedSource, read_token_map
from .topology import read_topology

ENGRAM_CACHE_BYTES = 1 << 28
"""Rows of each Engram table kept in memory unless another bound is given: a million of the full model's."""


def load_parameters(
    resolved: ResolvedModel,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    load_format: str = "auto",
    seed: int = 0,
    keep_packed: Collection[Form] = (),
    engram_cache_bytes: int | None = ENGRAM_CACHE_BYTES,
    progress: Progress | None = None,
) -> DeepseekV41Parameters:
    """Checks the configuration and the checkpoint, allocates parameters on ``device``, fills them, opens the tables.

    ``load_format="dummy"`` draws weights from ``seed`` instead (needs a tokenizer only if the token map is derived from one).
    ``keep_packed`` leaves weights of those forms as the checkpoint stores them. ``engram_cache_bytes`` bounds the rows of each
    table kept in memory, which otherwise stays in its file; None reads tables into memory whole. Raises ``UnsupportedConfigError``,
    ``UnsupportedFormatError``, ``ConfigError`` or ``CheckpointError``, all but those about a tensor's numbers before anything
    is allocated.
    """
    topology = read_topology(resolved.config)
    found = check_load_format(resolved, load_format)
    if found == "gguf":
        raise UnsupportedFormatError(f"{resolved.name}: this family is read from safetensors only, not from GGUF")
    token_map = read_token_map(topology, resolved.tokenizer.path)
    source: DeepseekV41Source
    if found == "dummy":
        source = DrawnSource(topology, seed, keep_packed)
    else:
        source = ReleasedSource(resolved.weight_files, topology, keep_packed, device)
    parameters = DeepseekV41Parameters(topology, dtype, device, keep_packed)
    fill(parameters, source, progress)
    parameters.attach_tables(source.tables(engram_cache_bytes), token_map)
    return parameters
