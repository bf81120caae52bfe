"""Graphs where there is no GPU: what was recorded is run once more on the same buffers, so that engines take decode steps through the
same code as on one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from deepinfer.models.base import DecodeRows, ForwardBatch, row_buckets
from deepinfer.models.llama.forward import LlamaModel
from deepinfer.worker import graphs
from deepinfer.worker.graphs import Replay, Work


class Recorded:
    """Work that is run again instead of being replayed.

    Attributes:
        recorded: works recorded.
    """

    def __init__(self) -> None:
        self.recorded = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Nothing to prepare."""
        yield

    def record(self, work: Work) -> Replay:
        """See `deepinfer.worker.graphs.Recorder`."""
        self.recorded += 1
        work()
        return work


def wide_decode(model: LlamaModel, rows: DecodeRows, kv: dict[str, torch.Tensor]) -> torch.Tensor:
    """`GraphModel.decode` by the family's own forward: each row is a sequence as long as the table is wide, for all that the host knows.

    Slow, with the bits of ``forward``: of the operators' references, or of a GPU's kernels where the model has them. Fit to be recorded on
    a GPU as well: page-locked memory that a recorded copy reads is not used again.
    """
    count = len(rows.ids)
    widest = rows.block_table.shape[1] * next(iter(kv.values())).shape[1]
    batch = ForwardBatch(
        ids=rows.ids,
        pos=rows.pos,
        slots=rows.slots,
        cu_q=torch.arange(count + 1, dtype=torch.int32, device=rows.ids.device),
        seq_len=rows.seq_len,
        block_table=rows.block_table.index_select(0, rows.table_row),
        num_decodes=count,
        max_q=1,
        max_len=widest,
        cu_q_host=list(range(count + 1)),
        seq_len_host=[widest] * count,
    )
    return model.forward(batch, kv)


def decode_of_references(patch: pytest.MonkeyPatch, buckets: Sequence[int] | None = None) -> None:
    """Gives the Llama family the decode step ``wide_decode``, for these row counts."""
    patch.setattr(LlamaModel, "decode", wide_decode, raising=False)
    patch.setattr(LlamaModel, "graph_rows", lambda self, most: row_buckets(most) if buckets is None else buckets, raising=False)


def graphs_on_cpu(patch: pytest.MonkeyPatch, buckets: Sequence[int] | None = None) -> None:
    """Engines of the Llama family made from now on have their decode steps recorded, on a CPU as well."""
    patch.setattr(graphs, "can_record", lambda device: True)
    patch.setattr(graphs, "recorder_for", lambda device: Recorded())
    decode_of_references(patch, buckets)
