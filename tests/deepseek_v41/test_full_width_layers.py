"""Backbone layers of the engine at the released widths (sixteen experts, six chosen) against the plain reference: Engram with an encoder's
Full layer, a Reuse layer, the decoder's source with its candidates, a Reindex layer.

Weights are values of the released formats and go through the containers into the runtime layout. Two sequences share a step, one behind
70,000 tokens and one behind 2,000, whose entries lie on pages in no order and whose windows lie in rings. Each layer gets streams of its
own, so that no difference grows from layer to layer; nothing is rounded, since a sum in another order moves rounded rows.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import torch

from deepinfer.kernels.linear import row_quantum
from deepinfer.kernels.rope import RopeTable
from deepinfer.models.base import ForwardBatch, StateRows
from deepinfer.models.deepseek_v41.caches import plan_caches
from deepinfer.models.deepseek_v41.containers import DeepseekV41Parameters
from deepinfer.models.deepseek_v41.layer import Layer
from deepinfer.models.deepseek_v41.step import RopeTables, Step, make_step
from deepseek_v41.sequential import Run, Sequential, Shared, in_order
from deepseek_v41.weights_kit import RandomWeights, bell, full_width

pytestmark = pytest.mark.nightly

SEED, FIRST, ROWS = 2, (70_000, 2_000), (10, 6)
BOUND = 1e-5
"""Of the largest number in the streams."""
PLAIN = replace(full_width(), quantised_weights=False, quantised_caches=False)
CACHES = plan_caches(PLAIN, "float32")
SIZES, SOURCE = PLAIN.attention, PLAIN.shared.candidate_source


class OneLayer(Mapping[str, torch.Tensor]):
    """Numbers of one layer in the places of the containers; the other layers' are never touched and take no memory."""

    def __init__(self, index: int, device: str) -> None:
        self.parameters = DeepseekV41Parameters(PLAIN, torch.float32, device)
        drawn = RandomWeights(PLAIN, SEED, released=True, keep=False)
        self._names = [name for name in self.parameters.parameter_shapes() if name.startswith(f"layers.{index}.")]
        for name in self._names:
            place = self.parameters.parameter(name)
            place.copy_(drawn[name].view(place.shape))
        self._table = drawn["layers.1.engram.embed.weight"] if index == 1 else None

    def __getitem__(self, name: str) -> torch.Tensor:
        if name.endswith("engram.embed.weight"):
            assert self._table is not None
            return self._table
        return self.parameters.parameter(name).cpu()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def past(layer: int, sequence: int, what: str, width: int) -> torch.Tensor:
    """Entries of a source before a sequence's first row."""
    return bell(SEED, f"{what} {layer} {sequence}", (FIRST[sequence] // PLAIN.layers[layer].ratio, width))


def make_caches(device: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Pages with what the sequences have so far, and their block table."""
    need = [-(-(first + rows) // 128) for first, rows in zip(FIRST, ROWS, strict=True)]
    order = torch.randperm(sum(need), generator=torch.Generator().manual_seed(SEED)) + 1
    table = torch.zeros(2, max(need), dtype=torch.int32)
    for sequence, (pages, part) in enumerate(zip(need, order.split(need), strict=True)):
        table[sequence, :pages] = part.int()
    kv: dict[str, torch.Tensor] = {"state0": torch.full((4, 2 * CACHES.live_bytes), 255, dtype=torch.uint8, device=device)}
    for layer, entries in CACHES.sources:
        for what, width in (("kv", SIZES.head_dim), ("index", SIZES.index_dim)):
            pages = torch.full((sum(need) + 1, entries, width), torch.nan)
            for sequence in range(2):
                rows = past(layer, sequence, what, width)
                place = torch.arange(rows.shape[0])
                pages[table[sequence, place // entries].long(), place % entries] = rows
            kv[f"layers.{layer}.{what}"] = pages.to(device)
    return kv, table.to(device)


def history(layer: int, sequence: int) -> torch.Tensor:
    """Window rows before a sequence's first row, oldest first."""
    return bell(SEED, f"history {layer} {sequence}", (SIZES.window, SIZES.head_dim))


def made_step(device: str) -> Step:
    """The step of both sequences over caches that hold what was before."""
    kv, table = make_caches(device)
    pos = torch.cat([torch.arange(first, first + rows) for first, rows in zip(FIRST, ROWS, strict=True)])
    row_seq = torch.tensor([0, 1]).repeat_interleave(torch.tensor(ROWS))
    cu_q, ends = torch.tensor([0, ROWS[0], sum(ROWS)]), [first + rows for first, rows in zip(FIRST, ROWS, strict=True)]
    slots = []
    for entries in dict.fromkeys(entries for _, entries in CACHES.sources):
        ratio = 128 // entries
        page = table.cpu()[row_seq, pos // 128].long()
        slots.append(torch.where((pos + 1) % ratio == 0, page * entries + pos % 128 // ratio, -1))
    none = torch.zeros(2, dtype=torch.int32, device=device)
    state = StateRows(
        row_seq=row_seq.to(device), state_row=torch.tensor([3, 1], device=device), floor=none[:, None].repeat(1, 2), decoder_from=none,
        crossing=none[:0],
    )  # fmt: skip
    batch = ForwardBatch(
        ids=torch.zeros_like(pos).to(device), pos=pos.to(device), slots=[s.to(device) for s in slots], cu_q=cu_q.int().to(device),
        seq_len=torch.tensor(ends, dtype=torch.int32, device=device), block_table=table, num_decodes=0, max_q=max(ROWS), max_len=max(ends),
        state=state,
    )  # fmt: skip
    on = torch.device(device)
    ropes = RopeTables(RopeTable(PLAIN.rope_main, on), RopeTable(PLAIN.rope_compress, on))
    step = make_step(batch, kv, CACHES, SIZES.window, ropes, row_quantum(on))
    for plan in PLAIN.layers:
        for sequence, slot in enumerate((3, 1)):
            place = torch.arange(FIRST[sequence] - SIZES.window, FIRST[sequence]) % CACHES.ring
            step.state[f"layers.{plan.index}.window"][slot, place] = history(plan.index, sequence).to(device)
    return step


def test_layers_of_the_release_are_those_of_the_reference(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfer.kernels.linear.packed._CPU_LARGEST", 16)  # fewer row counts to compare with each other
    bound = BOUND if device == "cpu" else 3 * BOUND  # a GPU adds in another order
    step, shared = made_step(device), (Shared(), Shared())
    padded, rope = step.encoder.step.pos.shape[0], RopeTable(PLAIN.rope_compress, torch.device(device))
    for plan in PLAIN.layers[1:]:
        index, given = plan.index, OneLayer(plan.index, device)
        plain = Sequential(PLAIN, given, Run(caches=False))
        streams = [bell(SEED, f"streams {index} {s}", (rows, PLAIN.streams, PLAIN.hidden)) for s, rows in enumerate(ROWS)]
        mixes = [bell(SEED, f"pre {index} {s}", (rows, PLAIN.streams)).sigmoid() for s, rows in enumerate(ROWS)]
        table_rows = torch.arange(sum(ROWS) * 24).view(sum(ROWS), 24) * 61 % 25874
        x = torch.zeros(padded, PLAIN.streams, PLAIN.hidden, device=device)
        pre = torch.zeros(padded, PLAIN.streams, device=device)
        x[: sum(ROWS)], pre[: sum(ROWS)] = torch.cat(streams).to(device), torch.cat(mixes).to(device)
        wanted = []
        for sequence, own in enumerate(shared):
            own.history[index] = history(index, sequence)
            restored = None
            if index in PLAIN.shared.kv_sources:
                restored = (past(index, sequence, "kv", SIZES.head_dim), past(index, sequence, "index", SIZES.index_dim))
            wanted.append(
                plain.layer(
                    index, streams[sequence], mixes[sequence], own, first=FIRST[sequence], restored=restored,
                    rows=table_rows.split(ROWS)[sequence] if index == 1 else None,
                )
            )  # fmt: skip
        with torch.inference_mode():
            layer = Layer(given.parameters.layers[index], PLAIN, plan, torch.float32)
            if index == 1:
                found = torch.zeros(padded, 24 * 256, device=device)
                found[: sum(ROWS)] = given["layers.1.engram.embed.weight"][table_rows].flatten(1).to(device)
                added = layer.add_engram(x, found, torch.zeros(padded, dtype=torch.bool, device=device))
                assert float((added - x)[: sum(ROWS)].abs().mean()) > 0.05, "Engram adds something"
                x = added
            rows = step.decoder if plan.decoder else step.encoder
            ours, after = (made[: sum(ROWS)].cpu() for made in layer((x, pre), step, rows, CACHES, rope))
        del given, plain, layer
        gc.collect()
        for sequence, (out, mine, mix) in enumerate(zip(wanted, ours.split(ROWS), after.split(ROWS), strict=True)):
            own = shared[sequence]
            if index in own.selections:
                made = in_order(step.selections[index][: sum(ROWS)].cpu().split(ROWS)[sequence])
                assert made.shape[1] == SIZES.index_topk and bool((made[:, 0] >= 0).all())
                # two of 70,000 scores may be equal but for their last bits
                alike = (made == own.selections[index]).all(1)
                assert int((~alike).sum()) <= 1, (index, sequence)
                own.selections[index] = made
            else:
                alike = torch.ones(mine.shape[0], dtype=torch.bool)
            assert float((mine - out.streams)[alike].abs().max()) <= bound * float(out.streams.abs().max()), (index, sequence)
            assert float((mix - out.pre).abs().max()) <= bound, (index, sequence)
            if index in own.entries:
                made_rows = own.entries[index].shape[0] - FIRST[sequence] // plan.ratio
                new = FIRST[sequence] // plan.ratio + torch.arange(made_rows, device=device)
                at = torch.full_like(new, sequence)
                for pages, theirs in ((step.entries, own.entries), (step.index_keys, own.index_keys)):
                    kept = pages(index, CACHES).gather(at, new).cpu()
                    assert made_rows == ROWS[sequence] // plan.ratio
                    assert float((kept - theirs[index][-made_rows:]).abs().max()) <= 3 * bound, (index, sequence)
            if index == SOURCE:
                assert own.pool is not None and step.pool is not None
                blocks = own.pool.shape[1]
                pool = step.pool[: sum(ROWS), :blocks].cpu().split(ROWS)[sequence]
                assert int((pool != own.pool).any(1).sum()) <= 1
                assert pool.sum(1).tolist() == [min(SIZES.candidate_blocks, blocks)] * ROWS[sequence]
                own.pool = pool
    kinds = [plan.kind.value for plan in PLAIN.layers[1:]]
    assert kinds == ["full", "reuse", "full", "reindex"] and SOURCE == 3 and PLAIN.moe.experts == 16 and PLAIN.moe.chosen == 6
