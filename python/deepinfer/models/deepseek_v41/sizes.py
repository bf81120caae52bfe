"""Sizes of a DeepSeek-V4.1 model by part, packed and in the run dtype."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..registry import architecture_of
from ..sizes import ModelSizes, PartSize, resident_bytes
from .caches import packs, plan_caches
from .containers import DeepseekV41Parameters
from .parameters import Form, Part, count
from .topology import read_topology


def read_sizes(config: Mapping[str, Any], dtype: torch.dtype) -> ModelSizes:
    """See ``models.sizes.read_sizes``; rows are kept packed where the configuration rounds them, else in ``dtype``."""
    topology = read_topology(config)
    census = count(topology)
    caches = plan_caches(topology, "packed" if packs(topology) else "float32" if dtype == torch.float32 else "bfloat16")
    paged, state = caches.kv_groups()
    forms: dict[str, int] = {}
    if topology.quantised_weights:
        packed = DeepseekV41Parameters(topology, dtype, "meta", keep_packed=(Form.FP8, Form.FP4_PAIRS))
        forms["packed"] = resident_bytes(packed)
    forms[str(dtype).removeprefix("torch.")] = resident_bytes(DeepseekV41Parameters(topology, dtype, "meta"))
    return ModelSizes(
        architecture=architecture_of(config),
        parts=tuple(PartSize(part.value, census.parameters[part], census.nbytes[part]) for part in Part if census.parameters[part]),
        weight_bytes=forms,
        table_bytes=census.nbytes[Part.ENGRAM_TABLE],
        paged=tuple(paged),
        state=tuple(state),
        vocab=topology.vocab,
        max_position=topology.max_position,
    )
