"""How evenly rows spread over experts, read without waiting for the device.

Owns: copies of the model's counts, and what they say. Never touches: routing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class ExpertLoads:
    """Reads a model's counts (`models.base.ExpertModel`).

    On a GPU a reading begins a copy on a stream of its own and gives the one begun before, so that nobody waits for a step.
    """

    def __init__(self, loads: Sequence[torch.Tensor]) -> None:
        self._loads = list(loads)
        self._before = torch.zeros((len(loads), loads[0].shape[0]), dtype=torch.int64)
        self._seen = self._before
        self._balance = torch.ones(len(loads), dtype=torch.float64)
        self._beside: _Copy | None = None  # made by the first reading: a start has nothing to read

    def counts(self) -> dict[str, float]:
        """``choices``: rows times experts that each chose, since loading. ``balance_ratio``: among the choices since the reading before
        (those of the one before that, where there were none), the mean over the layers of an expert's mean share against the busiest
        one's; 1 is even. ``balance_worst_ratio``: the least of any layer."""
        self._read()
        new = self._seen - self._before
        if int(new.sum()):
            self._before = self._seen
            busiest = new.amax(1).double()
            self._balance = torch.where(busiest > 0, new.double().mean(1) / busiest.clamp_min(1), self._balance)
        return {
            "choices": float(self._seen.sum()),
            "balance_ratio": float(self._balance.mean()),
            "balance_worst_ratio": float(self._balance.amin()),
        }

    @torch.inference_mode()
    def _read(self) -> None:
        if self._loads[0].device.type != "cuda":
            self._seen = torch.stack(self._loads)
            return
        if self._beside is None:
            self._beside = _Copy(self._before.shape, self._loads[0].device)
        self._seen = self._beside.next(self._loads, self._seen)


class _Copy:
    """Counts on their way to the host, on a stream of their own."""

    def __init__(self, shape: torch.Size, device: torch.device) -> None:
        self._stream, self._copied = torch.cuda.Stream(device), torch.cuda.Event()
        self._host = torch.zeros(shape, dtype=torch.int64, pin_memory=True)
        self._copied.record(self._stream)

    def next(self, loads: Sequence[torch.Tensor], seen: torch.Tensor) -> torch.Tensor:
        """What the copy begun last has brought, and begins another; ``seen`` while it is on its way."""
        if not self._copied.query():
            return seen
        brought = self._host.clone()
        with torch.cuda.stream(self._stream):
            for row, load in zip(self._host, loads, strict=True):
                row.copy_(load, non_blocking=True)
            self._copied.record(self._stream)
        return brought
