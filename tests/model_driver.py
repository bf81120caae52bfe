"""Drives a model through ``ForwardBatch`` alone: pages, slots and chunks are made here, without scheduler or worker."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from deepinfer.models.base import ForwardBatch, Model


@dataclass
class Running:
    """One sequence: its tokens, how many are in KV, and its pages."""

    tokens: list[int]
    done: int = 0
    pages: list[int] = field(default_factory=list)


class Driver:
    """Owns KV tensors of a model and runs steps over chosen rows of chosen sequences."""

    def __init__(self, model: Model, pages: int = 256, block: int = 16, device: str = "cpu", shuffle: int = 0) -> None:
        groups, _ = model.kv_groups(block)
        self.model, self.block, self.device = model, block, device
        self.kv: dict[str, torch.Tensor] = {}
        for source in groups[0].sources:
            for name in source.tensors:
                # what was never written must never matter
                self.kv[name] = torch.full((pages, source.entries_per_page, *source.shape), float("nan"), dtype=source.dtype, device=device)
                self.kv[name][0] = 0
        self.free = list(range(1, pages))
        random.Random(shuffle).shuffle(self.free)

    def start(self, tokens: Sequence[int]) -> Running:
        """A sequence with nothing in KV."""
        return Running(list(tokens))

    def release(self, sequence: Running) -> None:
        """Gives the pages back; their contents stay."""
        self.free.extend(sequence.pages)
        sequence.pages, sequence.done = [], 0

    def step(self, work: Sequence[tuple[Running, int]]) -> list[torch.Tensor]:
        """Runs the next ``count`` tokens of each sequence (decoding ones first); float32 logits ``[count, vocab]`` of each."""
        work = sorted(work, key=lambda item: item[1] != 1)
        ids, pos, slots, cu_q, lengths = [], [], [], [0], []
        for sequence, count in work:
            end = sequence.done + count
            assert count >= 1 and end <= len(sequence.tokens)
            while len(sequence.pages) * self.block < end:
                sequence.pages.append(self.free.pop())
            for position in range(sequence.done, end):
                ids.append(sequence.tokens[position])
                pos.append(position)
                slots.append(sequence.pages[position // self.block] * self.block + position % self.block)
            cu_q.append(len(ids))
            lengths.append(end)
            sequence.done = end
        width = max(len(sequence.pages) for sequence, _ in work)
        table = [sequence.pages + [0] * (width - len(sequence.pages)) for sequence, _ in work]
        on = {"device": self.device}
        batch = ForwardBatch(
            ids=torch.tensor(ids, **on),
            pos=torch.tensor(pos, **on),
            slots=[torch.tensor(slots, **on)],
            cu_q=torch.tensor(cu_q, dtype=torch.int32, **on),
            seq_len=torch.tensor(lengths, dtype=torch.int32, **on),
            block_table=torch.tensor(table, dtype=torch.int32, **on),
            num_decodes=sum(count == 1 for _, count in work),
            max_q=max(count for _, count in work),
            max_len=max(lengths),
            cu_q_host=cu_q,
            seq_len_host=lengths,
        )
        logits = self.model.logits(self.model.forward(batch, self.kv))
        self.order = [sequence for sequence, _ in work]
        return list(logits.split([count for _, count in work]))

    def prefill(self, tokens: Sequence[int], chunk: int | None = None) -> tuple[Running, torch.Tensor]:
        """Runs all tokens of one sequence in chunks; logits ``[len, vocab]`` of every position."""
        sequence = self.start(tokens)
        rows = []
        while sequence.done < len(sequence.tokens):
            left = len(sequence.tokens) - sequence.done
            rows.append(self.step([(sequence, min(chunk or left, left))])[0])
        return sequence, torch.cat(rows)

    def greedy(
        self, tokens: Sequence[int], count: int, eos: Sequence[int] = (), chunk: int | None = None
    ) -> tuple[list[int], torch.Tensor]:
        """Greedy continuation of at most ``count`` tokens and the logits each was chosen from."""
        sequence, logits = self.prefill(tokens, chunk)
        chosen, rows = [], [logits[-1]]
        while True:
            chosen.append(int(rows[-1].argmax()))
            if chosen[-1] in eos or len(chosen) == count:
                return chosen, torch.stack(rows)
            sequence.tokens.append(chosen[-1])
            rows.append(self.step([(sequence, 1)])[0][0])
