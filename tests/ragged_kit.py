"""Steps over ragged sequences, cut and batched in many ways, for operators whose rows must not notice."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from deepinfer.kernels.cache_rows import StepRows


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
