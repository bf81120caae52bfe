"""KV tensors, laid out as the model's groups say, and the commands of a step that move whole pages or states.

Page 0 of every group and state slot 0 are null: padding may write there, nobody reads it as data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from deepinfer.models.base import PagedGroup, StateGroup

_ALIGN = 64  # bytes, a cache line


class KVCache:
    """One tensor ``[num_pages, entries_per_page, *shape]`` per name a source declares, one byte row per state slot and group.

    Args:
        paged: the model's paged groups.
        num_pages: pages of each paged group, the null page included.
        state: the model's state groups.
        num_slots: state slots, the null slot included.
        device: where the tensors live. They start as zeros, so that masked reads never meet a NaN.
    """

    def __init__(
        self, paged: Sequence[PagedGroup], num_pages: Sequence[int], state: Sequence[StateGroup], num_slots: int, device: torch.device
    ) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.groups: list[list[torch.Tensor]] = []
        for group, pages in zip(paged, num_pages, strict=True):
            members = []
            for source in group.sources:
                for name in source.tensors:
                    if name in self.tensors:
                        raise ValueError(f"KV tensor name {name!r} is declared twice")
                    tensor = zeros((pages, source.entries_per_page, *source.shape), source.dtype, device)
                    self.tensors[name] = tensor
                    members.append(tensor)
            self.groups.append(members)
        self.states: list[torch.Tensor] = []
        for i, spec in enumerate(state):
            tensor = zeros((num_slots, state_bytes(spec)), torch.uint8, device)
            self.tensors[f"state{i}"] = tensor
            self.states.append(tensor)

    def clone_blocks(self, commands: torch.Tensor) -> None:
        """Copies pages: int32 ``[c, 3]`` rows of (group, source page, destination page), on the tensors' device.

        A command of another group becomes null page to null page, so that no mask has to be read on the host.
        """
        group, src, dst = commands.long().unbind(1)
        for g, members in enumerate(self.groups):
            mine = group == g
            s = torch.where(mine, src, 0)
            d = torch.where(mine, dst, 0)
            for tensor in members:
                whole = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor  # torch copies no 8-bit floats by index
                whole.index_copy_(0, d, whole.index_select(0, s))

    def clone_states(self, commands: torch.Tensor) -> None:
        """Copies state rows: int32 ``[c, 2]`` rows of (source slot, destination slot)."""
        src, dst = commands.long().unbind(1)
        for tensor in self.states:
            tensor.index_copy_(0, dst, tensor.index_select(0, src))

    def zero_states(self, slots: torch.Tensor) -> None:
        """Clears state rows: int32 ``[c]`` slots."""
        for tensor in self.states:
            tensor.index_fill_(0, slots.long(), 0)


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of zeros; on a CPU its pages take memory only once they are written, so a large pool costs no time to start."""
    if device.type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    raw = np.zeros(size + _ALIGN, np.uint8)  # the system hands out untouched zero pages; torch.zeros would write them all
    start = -raw.ctypes.data % _ALIGN
    return torch.from_numpy(raw[start : start + size]).view(dtype).view(*shape)


def state_bytes(spec: StateGroup) -> int:
    """Bytes of one state slot: both regions, and each replica of the stored one."""
    return spec.stored * (1 + spec.replicas) + spec.dropped
