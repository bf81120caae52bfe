"""Runs the paged forward of DeepSeek-V4.1, or V4, over chosen rows of chosen sequences, on pages, slots and rings full of garbage.

Use: ``bench = Bench(make_model(topology, weights))``, ``run = bench.start(ids)``, then ``bench.step([(run, count), ...])`` → logits of
each; ``bench.prefill(ids, chunk=7)``. Steps are told to the model as the worker tells them (ring slot, block table, state places).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from deepinfer.models.base import ModelOptions, Truncation
from deepinfer.models.deepseek_v4.forward import DeepseekV4Model
from deepinfer.models.deepseek_v41.containers import DeepseekV41Parameters
from deepinfer.models.deepseek_v41.engram_table import EngramTable
from deepinfer.models.deepseek_v41.forward import DeepseekV41Model
from deepinfer.models.deepseek_v41.topology import DeepseekV41Topology
from deepinfer.models.images import ImageSpan
from deepinfer.worker.image_rows import ImageRows
from deepinfer.worker.input_batch import InputBatch
from deepinfer.worker.kv_cache import KVCache
from deepinfer.worker.resolve import SlotMap
from deepinfer.worker.state_places import StatePlaces, StateRules
from deepinfer.worker.step_ring import Header, StepRing

_ROWS, _SEQS = 2048, 16


def make_model(
    topology: DeepseekV41Topology,
    weights: Mapping[str, torch.Tensor],
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    options: ModelOptions = ModelOptions(),  # noqa: B008 (frozen)
) -> DeepseekV41Model:
    """A model with these weights (checkpoint names, logical shapes) and the identity map of ids."""
    parameters = DeepseekV41Parameters(topology, dtype, device)
    for name in parameters.parameter_shapes():
        place = parameters.parameter(name)
        place.copy_(weights[name].view(place.shape))
    tables: dict[int, EngramTable] = {}
    if topology.engram is not None:
        for layer in topology.engram.layers:
            rows = weights[f"layers.{layer}.engram.embed.weight"].contiguous()
            tables[layer] = EngramTable(rows.numpy().view(np.uint8), None, 1 << 18)
    parameters.attach_tables(tables, torch.arange(topology.vocab))
    model = DeepseekV41Model(parameters, dtype, torch.device(device))
    model.finish_loading()
    model.configure(options)
    return model


@dataclass
class Running:
    """One sequence: its tokens, how many are in KV, its pages and its state slot."""

    tokens: list[int]
    prompt: int
    slot: int
    done: int = 0
    pages: list[int] = field(default_factory=list)
    hit: int = 0
    """Positions below it are in the entries already and are not written again."""


class Bench:
    """Owns caches of a model. ``block``: tokens of a page; ``shuffle`` seeds the order in which pages and slots are handed out."""

    def __init__(
        self,
        model: DeepseekV41Model | DeepseekV4Model,
        block: int = 16,
        pages: int = 200,
        shuffle: int = 0,
        truncation: Truncation = "off",
        keep: int = 0,
    ) -> None:
        self.model, self.block, self.device = model, block, model.device
        paged, state = model.kv_groups(block)
        self.kv = KVCache(paged, [pages], state, _SEQS + 1, model.device)
        self.cut = state[0].cut
        for tensor in self.kv.tensors.values():
            tensor.view(torch.uint8).fill_(0x7F)  # what was never written must never matter: NaN in most formats
        sizes = list(dict.fromkeys(source.entries_per_page for source in paged[0].sources))
        maps = [SlotMap(0, block, entries) for entries in sizes]
        keeps = None if truncation == "off" else keep
        self.places = StatePlaces(StateRules(self.cut, 5, keeps, truncation == "compact", state[0].history), _SEQS + 1, 1, _SEQS, _ROWS)
        layout = [("header", 64), ("ids", _ROWS), ("pos", _ROWS), ("cu_q", _SEQS + 1), ("seq_len", _SEQS), ("state_row", _SEQS)]
        layout += [(f"slots{j}", _ROWS) for j in range(len(maps))] + [("tokens", 1), ("accepted", 1)]
        self.ring = StepRing(layout, self.places.fields, model.device, pinned=model.device.type != "cpu")
        self.inputs = InputBatch(_SEQS + 1, pages, None, maps, model.device)
        self.images = ImageRows()
        self._maps, self._turn = maps, 0
        self.free, self.slots = list(range(1, pages)), list(range(1, _SEQS + 1))
        random.Random(shuffle).shuffle(self.free)
        random.Random(shuffle).shuffle(self.slots)

    def start(self, tokens: Sequence[int] | torch.Tensor, prompt: int | None = None, images: Sequence[ImageSpan] = ()) -> Running:
        """A sequence with nothing in KV; its first ``prompt`` tokens (all by default) are its prompt, which shows ``images``."""
        ids = tokens.tolist() if isinstance(tokens, torch.Tensor) else list(tokens)
        run = Running(ids, len(ids) if prompt is None else prompt, self.slots.pop())
        self.kv.zero_states(torch.tensor([run.slot], dtype=torch.int32, device=self.device))
        self.places.admit(run.slot, run.prompt)
        self.images.admit(run.slot, images)
        return run

    def resume(self, run: Running, start: int, hit: int) -> Running:
        """The same tokens anew behind a hit of ``hit`` positions, on its pages: rows from ``start`` on, with no state before them."""
        again = self.start(run.tokens, run.prompt)
        self.places.admit(again.slot, again.prompt, start, start)
        self.places.begin(again.slot, start, run.tokens[:start])
        kept = hit // self.block
        again.done, again.hit, again.pages = start, hit, run.pages[:kept]
        return again

    def release(self, run: Running) -> None:
        """Gives pages and slot back; their contents stay."""
        self.free.extend(run.pages)
        self.slots.append(run.slot)
        run.pages, run.done = [], 0

    def step(self, work: Sequence[tuple[Running, int]], rejected: Sequence[int] | None = None) -> list[torch.Tensor]:
        """Runs the next ``count`` tokens of each sequence; logits ``[count, vocab]`` of each. The last ``rejected`` rows of each do not
        count: the sequence stands before them."""
        slot = self.ring.slots[self._turn % 3]
        self._turn += 1
        a, row, longest = slot.a, 0, 0
        for i, (run, count) in enumerate(work):
            end = run.done + count
            assert count >= 1 and end <= len(run.tokens)
            while len(run.pages) * self.block < end:
                run.pages.append(self.free.pop())
            self.inputs.table[run.slot, : len(run.pages)] = torch.tensor(run.pages, dtype=torch.int32, device=self.device)
            pos = np.arange(run.done, end)
            a["ids"][row : row + count], a["pos"][row : row + count] = run.tokens[run.done : end], pos
            page = np.asarray(run.pages)[pos // self.block]
            for j, of in enumerate(self._maps):
                ratio = of.page_tokens // of.entries
                place = page * of.entries + pos % of.page_tokens // ratio
                a[f"slots{j}"][row : row + count] = np.where(((pos + 1) % ratio == 0) & (pos >= run.hit), place, -1)
            a["cu_q"][i : i + 2] = row, row + count
            a["seq_len"][i], a["state_row"][i] = end, run.slot
            row, longest, run.done = row + count, max(longest, end), end
        values: dict[str, Any] = dict.fromkeys(Header._fields, 0)
        header = Header(**{**values, "rows": row, "seqs": len(work), "max_len": longest, "max_q": max(c for _, c in work)})
        counts = self.places.describe(slot, header)
        slot.upload()
        batch, _ = self.inputs.build(slot, header, None, counts)
        batch.block_table = batch.block_table[:, : -(-longest // self.block)]
        batch.images = self.images.pieces(slot, header)
        hidden = self.model.forward(batch, self.kv.tensors)
        taken_back = None if rejected is None else torch.tensor(rejected, dtype=torch.int32, device=self.device)
        self.model.end_step(batch, taken_back, self.kv.tensors)
        for (run, _), count in zip(work, rejected or (), strict=False):
            run.done -= count
        return list(self.model.logits(hidden).split([count for _, count in work]))

    def prefill(
        self, tokens: Sequence[int] | torch.Tensor, chunk: int | None = None, images: Sequence[ImageSpan] = ()
    ) -> tuple[Running, torch.Tensor]:
        """All tokens of one sequence in chunks; logits ``[len, vocab]`` of every position."""
        run, rows = self.start(tokens, images=images), []
        while run.done < len(run.tokens):
            left = len(run.tokens) - run.done
            rows.append(self.step([(run, min(chunk or left, left))])[0])
        return run, torch.cat(rows)

    def replica(self, run: Running) -> dict[str, torch.Tensor]:
        """Copies of the fields of a sequence's replica."""
        views = self.model.caches.views(self.kv.tensors["state0"], replica=True)
        return {name: view[run.slot].clone() for name, view in views.items()}

    def written(self, run: Running) -> dict[str, torch.Tensor]:
        """Bytes of the entries of a sequence, by tensor, ``[entries, bytes]``."""
        found = {}
        for layer, per_page in self.model.caches.sources:
            count = run.done * per_page // self.block
            for name in {f"layers.{layer}.kv", f"layers.{layer}.index"} & self.kv.tensors.keys():
                pages = self.kv.tensors[name][torch.tensor(run.pages)]
                found[name] = pages.flatten(0, 1)[:count].contiguous().view(torch.uint8).clone()
        return found


def play(bench: Bench, ids: Sequence[torch.Tensor], seed: int, drafts: bool = False) -> list[torch.Tensor]:
    """All sequences at once in random chunks, with drafts taken and taken back on the way; logits of every position that counts."""
    rng, vocab = random.Random(seed), bench.model.vocab_size
    runs = [bench.start(tokens) for tokens in ids]
    out: list[list[torch.Tensor]] = [[] for _ in runs]
    while any(run.done < len(run.tokens) for run in runs):
        work: list[tuple[int, int]] = []
        for k, run in enumerate(runs):
            left = len(ids[k]) - run.done
            if left and rng.random() < 0.9:
                work.append((k, min(left, rng.choice([1, 2, 5, 6, 6, 25]))))
        rng.shuffle(work)
        wrong = []
        for k, count in work:
            run, bad = runs[k], rng.randrange(count) if drafts and 1 < count <= 6 else 0
            run.tokens = ids[k].tolist()
            for place in range(run.done + count - bad, run.done + count):
                run.tokens[place] = (run.tokens[place] + 1 + rng.randrange(vocab // 2)) % (vocab - vocab // 50)
            wrong.append(bad)
        if not work:
            continue
        for (k, count), bad, logits in zip(work, wrong, bench.step([(runs[k], c) for k, c in work], wrong), strict=True):
            out[k].append(logits[: count - bad])
            runs[k].tokens = ids[k].tolist()
    return [torch.cat(rows) for rows in out]
