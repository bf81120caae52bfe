"""Steps over ragged sequences, cut and batched in many ways, for operators whose rows must not notice."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from deepinfer.kernels.cache_rows import PagedRows, RowKind, StepRows


@dataclass(frozen=True)
class Work:
    """One step: (sequence, first position, end) of each sequence that has rows in it, and rows of padding."""

    spans: tuple[tuple[int, int, int], ...]
    padding: int = 0

    def rows(self, state: Sequence[int], device: str) -> StepRows:
        """The step; ``state[i]`` is the state slot of sequence ``i``."""
        cu_q = [0]
        for _, first, end in self.spans:
            cu_q.append(cu_q[-1] + end - first)
        numbers = [number for number, (_, first, end) in enumerate(self.spans) for _ in range(first, end)] + [0] * self.padding
        positions = [position for _, first, end in self.spans for position in range(first, end)] + [0] * self.padding
        return StepRows(
            torch.tensor(positions, dtype=torch.int64, device=device),
            torch.tensor(numbers, dtype=torch.int64, device=device),
            torch.tensor(cu_q, dtype=torch.int32, device=device),
            torch.tensor([state[sequence] for sequence, _, _ in self.spans], dtype=torch.int64, device=device),
        )

    def take(self, streams: Sequence[torch.Tensor]) -> torch.Tensor:
        """Rows of the step from ``streams[i]`` ``[length, ...]``; padding rows are NaN."""
        parts = [streams[sequence][first:end] for sequence, first, end in self.spans]
        if self.padding:
            filling = torch.nan if streams[0].is_floating_point() else 255
            parts.append(torch.full_like(streams[0][:1], filling).expand(self.padding, *streams[0].shape[1:]))
        return torch.cat(parts)


def schedules(lengths: Sequence[int], seed: int = 0, starts: Sequence[int] | None = None) -> Iterator[list[Work]]:
    """Ways to run sequences of ``lengths`` from ``starts`` (0): whole, one by one, fixed chunks, and mixed with padding."""
    starts = starts or [0] * len(lengths)
    yield [Work(((number, first, length),)) for number, (first, length) in enumerate(zip(starts, lengths, strict=True))]
    for sizes, padding in (((1,), 0), ((2,), 1), ((3, 1), 5), ((7,), 0), ((64, 1, 16), 3), ((1000,), 2)):
        at, step, work = list(starts), 0, []
        draw = random.Random(seed)
        while any(done < length for done, length in zip(at, lengths, strict=True)):
            spans = []
            for number, length in enumerate(lengths):
                take = min(sizes[(step + number) % len(sizes)], length - at[number])
                if take:
                    spans.append((number, at[number], at[number] + take))
                    at[number] += take
            draw.shuffle(spans)
            work.append(Work(tuple(spans), padding))
            step += 1
        yield work


class Pages:
    """Entries of several sequences on shuffled pages of ``size``; what is not written is NaN."""

    def __init__(self, kind: RowKind, entries: Sequence[torch.Tensor], size: int, device: str, seed: int = 0) -> None:
        counts = [-(-len(rows) // size) for rows in entries]
        order = list(range(1, sum(counts) + 1))
        random.Random(seed).shuffle(order)
        shape = (len(order) + 1, size, *kind.shape)
        dirty = torch.full(shape, 255, dtype=torch.uint8) if kind.packed else torch.full(shape, torch.nan, dtype=kind.dtype)
        self.kind, self.tensor = kind, dirty.to(device)
        self.tables: list[list[int]] = []
        for rows, count in zip(entries, counts, strict=True):
            table = [order.pop() for _ in range(count)]
            self.tables.append(table)
            stored = kind.store(rows.to(device))
            for number, page in enumerate(table):
                part = stored[number * size : (number + 1) * size]
                self.tensor[page, : len(part)] = part

    def of(self, sequences: Sequence[int], spare: int = 2) -> PagedRows:
        """What a step of ``sequences`` reads; ``spare`` columns of the table point at the null page."""
        width = max(len(self.tables[s]) for s in sequences) + spare
        table = torch.tensor([self.tables[s] + [0] * (width - len(self.tables[s])) for s in sequences], dtype=torch.int32)
        return PagedRows(self.tensor, table.to(self.tensor.device), self.kind)
