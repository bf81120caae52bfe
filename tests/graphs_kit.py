"""Graphs where there is no GPU: what was recorded is run once more on the same buffers, so that engines take decode steps and steps with
prompts through the same code as on one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch

from deepinfer.models.base import DecodeRows, ForwardBatch, PromptRows, row_buckets
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


def read_prompts(model: LlamaModel, rows: PromptRows, kv: dict[str, torch.Tensor]) -> torch.Tensor:
    """`PromptGraphModel.prompt_step` by the family's own forward: what is a sequence is read from the units, which only a CPU allows.
    Hidden states of padding are NaN."""
    out = torch.full((len(rows.ids), model.topology.hidden), torch.nan, dtype=model.dtype)
    units = [u for u in zip(rows.unit_first.tolist(), rows.unit_count.tolist(), rows.unit_row.tolist(), strict=True) if u[1]]
    borders, table_rows = [0], []
    for first, count, row in sorted(units):
        assert first == borders[-1] and 0 < count <= UNIT_ROWS, "every row is in one unit"
        if table_rows and table_rows[-1] == row:
            borders[-1] += count
        else:
            table_rows.append(row)
            borders.append(first + count)
    total = borders[-1]
    if not total:
        return out
    lengths = [int(rows.pos[end - 1]) + 1 for end in borders[1:]]
    batch = ForwardBatch(
        ids=rows.ids[:total],
        pos=rows.pos[:total],
        slots=[slots[:total] for slots in rows.slots],
        cu_q=torch.tensor(borders, dtype=torch.int32),
        seq_len=torch.tensor(lengths, dtype=torch.int32),
        block_table=rows.block_table[table_rows],
        num_decodes=0,
        max_q=max(end - begin for begin, end in pairwise(borders)),
        max_len=max(lengths),
        cu_q_host=borders,
        seq_len_host=lengths,
    )
    out[:total] = model.forward(batch, kv)
    return out


UNIT_ROWS = 5
"""Most rows of a unit of ``read_prompts``."""


def prompts_of_references(patch: pytest.MonkeyPatch, buckets: Sequence[int]) -> None:
    """Gives the Llama family the step with prompts ``read_prompts``, for these row counts."""
    patch.setattr(LlamaModel, "prompt_step", read_prompts)
    patch.setattr(LlamaModel, "prompt_rows", lambda self, most: buckets)
    patch.setattr(LlamaModel, "unit_rows", UNIT_ROWS)


def graphs_on_cpu(patch: pytest.MonkeyPatch, buckets: Sequence[int] | None = None, prompts: Sequence[int] = ()) -> None:
    """Engines of the Llama family made from now on have their decode steps recorded, and steps of up to so many rows with prompts, on a
    CPU as well."""
    patch.setattr(graphs, "can_record", lambda device: True)
    patch.setattr(graphs, "recorder_for", lambda device: Recorded())
    decode_of_references(patch, buckets)
    prompts_of_references(patch, prompts)
