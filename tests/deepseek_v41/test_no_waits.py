"""A step of the whole model makes the host wait for nothing, whatever kind of step it is.

On a fake device everywhere, and unchanged on a GPU with ``--device cuda -m "gpu or not gpu"``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch

from deepinfer.errors import HiddenSyncError
from deepinfer.models.base import ForwardBatch, StateRows
from deepinfer.models.deepseek_v4.forward import DeepseekV4Model
from deepinfer.models.deepseek_v41.containers import DeepseekV41Parameters
from deepinfer.models.deepseek_v41.engram_table import EngramTable
from deepinfer.models.deepseek_v41.forward import DeepseekV41Model
from deepinfer.models.deepseek_v41.vision_forward import VisionTower
from deepinfer.models.images import ImageInput, ImagePiece
from deepinfer.worker.kv_cache import KVCache
from deepinfer.worker.sync_guard import forbid_device_sync
from deepseek_v41 import v4_kit
from deepseek_v41.weights_kit import plan
from fake_cuda import watched_cuda

BLOCK, SEQS = 16, 3


@pytest.fixture(params=["fake", pytest.param("gpu", marks=pytest.mark.gpu)])
def guard(request: pytest.FixtureRequest) -> Iterator[None]:
    """A device called "cuda", whose waits are told from operations."""
    with watched_cuda(request.param):
        yield


def numbers(values: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).to("cuda")


def step(counts: list[int], compact: bool) -> ForwardBatch:
    """Sequences of ``counts`` rows, each at the start of its text; with ``compact`` the decoder runs two rows of each."""
    rows, borders = sum(counts), [0]
    for count in counts:
        borders.append(borders[-1] + count)
    last = [row for first, end in pairwise(borders) for row in range(max(first, end - 2), end)]
    state = StateRows(
        row_seq=numbers([k for k, count in enumerate(counts) for _ in range(count)]),
        state_row=numbers(list(range(1, len(counts) + 1))),
        floor=numbers([0] * 2 * len(counts), torch.int32).view(-1, 2),
        decoder_from=numbers([0] * len(counts), torch.int32),
        crossing=numbers(list(range(len(counts)))),
        decoder_rows=numbers(last) if compact else None,
        decoder_cu_q=numbers([0, *[2 * (k + 1) for k in range(len(counts))]], torch.int32) if compact else None,
        begun=numbers([1, 4, -1, 7, 8]).view(1, 5),
    )
    return ForwardBatch(
        ids=numbers([3] * rows),
        pos=numbers([p for count in counts for p in range(count)]),
        slots=[numbers([-1] * rows), numbers([0] * rows)],
        cu_q=numbers(borders, torch.int32),
        seq_len=numbers(counts, torch.int32),
        block_table=numbers([1, 2] * len(counts), torch.int32).view(-1, 2),
        num_decodes=0,
        max_q=max(counts),
        max_len=max(counts),
        state=state,
    )


def made() -> DeepseekV41Model:
    """``tiny`` with zeros for weights."""
    topology = plan("tiny")
    parameters = DeepseekV41Parameters(topology, torch.bfloat16, "cuda")
    for name in parameters.parameter_shapes():
        parameters.parameter(name).zero_()
    assert topology.engram is not None
    sizes = zip(topology.engram.layers, topology.engram.rows, strict=True)
    tables = {layer: EngramTable(np.zeros((rows, 32), np.uint8), np.zeros((rows, 1), np.uint8), 0) for layer, rows in sizes}
    parameters.attach_tables(tables, torch.arange(topology.vocab))
    model = DeepseekV41Model(parameters, torch.bfloat16, torch.device("cuda"))
    model.finish_loading()
    return model


def test_no_step_waits(guard: None) -> None:
    model = made()
    paged, state = model.kv_groups(BLOCK)
    kv = KVCache(paged, [8], state, SEQS + 1, torch.device("cuda")).tensors
    for counts, compact in (([1, 1, 1], False), ([20, 9, 4], True)):
        batch, rejected = step(counts, compact), numbers([0, 0, 0], torch.int32)
        with forbid_device_sync():
            hidden = model.forward(batch, kv)
            model.logits(hidden)
            model.end_step(batch, rejected, kv)
        assert hidden.shape == (sum(counts), 256)
    with pytest.raises(HiddenSyncError), forbid_device_sync():
        bool(hidden[0, 0] > 0)


def test_no_step_of_deepseek_v4_waits(guard: None) -> None:
    """One layer of each kind, experts given by token in the first."""
    kinds = ["sliding_attention", v4_kit.CSA, v4_kit.HCA]
    fields = v4_kit.config(num_hidden_layers=3, layer_types=kinds, mlp_layer_types=["hash_moe", "moe", "moe"], n_routed_experts=2)
    model = DeepseekV4Model.from_config(fields, torch.bfloat16, torch.device("cuda"))
    for name in model.parameter_shapes():
        model.parameter(name).zero_()
    model.finish_loading()
    paged, state = model.kv_groups(2 * BLOCK)
    kv = KVCache(paged, [8], state, SEQS + 1, torch.device("cuda")).tensors
    for counts in ([1, 1, 1], [34, 9, 4]):
        batch, rejected = step(counts, False), numbers([0, 0, 0], torch.int32)
        with forbid_device_sync():
            hidden = model.forward(batch, kv)
            model.logits(hidden)
            model.end_step(batch, rejected, kv)
        assert hidden.shape == (sum(counts), 128)


def test_images_of_a_step_make_it_wait_for_nothing(guard: None) -> None:
    parameters = DeepseekV41Parameters(plan("tiny"), torch.bfloat16, "cuda")
    topology = plan("tiny").vision
    assert topology is not None
    tower, embedded = VisionTower(parameters, topology, torch.bfloat16), torch.zeros(40, 256, dtype=torch.bfloat16).to("cuda")
    image = ImageInput.of(np.zeros((56, 70, 3), np.uint8), 8)
    with torch.inference_mode(), forbid_device_sync():
        marked = tower.place(embedded, [ImagePiece(image, 4, 0, 8), ImagePiece(image, 20, 3, 5)])
    assert tower.computed == 1 and marked.shape == (40,)
