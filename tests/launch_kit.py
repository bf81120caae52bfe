"""Kernels that compute nothing and look at what they are launched with: on a fake GPU a whole engine passes by them.

A launch hands over addresses. Nothing else would notice a tensor of another type, one whose rows lie apart, or one on the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepinfer.engine import decode_graphs
from deepinfer.kernels.linear import cuda as linear
from deepinfer.kernels.toolchain import Dialect, Program, loading
from deepinfer.worker.sync_guard import forbidden
from fake_cuda import ones_land, watched_cuda
from kernel_kit import lowered

APART = {("paged_attention", "table"): "width"}
"""Parameters, with their operators, whose rows may lie apart, and the number that says how far."""

_MOST_BLOCKS = (2**31 - 1, 65535, 65535)


class Checked:
    """A kernel in place of one on a GPU: every launch is compared with the signature of its program.

    Attributes:
        launches: how often each program was launched, of all objects since ``checked_launches`` began.
    """

    launches: Counter[str] = Counter()
    # two blocks fit a multiprocessor
    stored = SimpleNamespace(resources=SimpleNamespace(registers=256), threads=128, shared=0)

    def __init__(self, program: Program) -> None:
        self._program = program
        self._args = lowered(program).args
        function = program.build(Dialect())
        buffers = [function.buffer_map[v] for v in function.params if v in function.buffer_map]
        self._shapes = {str(b.name): [str(x.name) if hasattr(x, "name") else int(x) for x in b.shape] for b in buffers}
        self._types = {str(b.name): str(b.dtype) for b in buffers}

    def launch(self, grid: tuple[int, ...], *args: torch.Tensor | int | float) -> None:
        """Fails with the kernel's and the parameter's name."""
        Checked.launches[self._program.name] += 1
        where = self._program.name
        assert len(args) == len(self._args), f"{where} takes {[name for name, _ in self._args]}, given {len(args)}"
        assert all(0 < n <= most for n, most in zip(grid, _MOST_BLOCKS, strict=False)), f"{where}: no grid of {grid}"
        given = dict(zip([name for name, _ in self._args], args, strict=True))
        numbers = {name: value for name, value in given.items() if not isinstance(value, torch.Tensor)}
        for name, kind in self._args:
            value = given[name]
            if kind == "ptr":
                assert isinstance(value, torch.Tensor), f"{where}: {name} is {value!r}"
                self._check(f"{where}: {name}", name, value, numbers)
            elif kind == "f32":
                assert isinstance(value, float), f"{where}: {name} is {value!r}"
            else:
                assert isinstance(value, int) and -(2**31) <= value < 2**31, f"{where}: {name} is {value!r}"

    def _check(self, what: str, name: str, value: torch.Tensor, numbers: dict[str, Any]) -> None:
        assert value.device.type == "cuda", f"{what} is on {value.device}"
        assert str(value.dtype).removeprefix("torch.") == self._types[name], f"{what} is {value.dtype}, wanted {self._types[name]}"
        if (apart := APART.get((self._program.op, name))) is not None:
            assert value.stride(-1) == 1 and numbers[apart] == value.stride(0), f"{what} has strides {value.stride()}"
            return
        assert value.is_contiguous(), f"{what} has strides {value.stride()} of {tuple(value.shape)}"
        sizes = [numbers.get(n, n) for n in self._shapes[name]]
        known = prod(n for n in sizes if not isinstance(n, str))
        if any(isinstance(n, str) for n in sizes):
            assert value.numel() % known == 0, f"{what} has {value.numel()} numbers, wanted rows of {known}"
        else:
            assert value.numel() >= known, f"{what} has {value.numel()} numbers, {known} are used"


class _Library:
    """`kernels.linear.library.Library`, as strict."""

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        assert x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16) and x.shape[1] == weight.shape[1]
        for tensor in (x, weight):
            assert tensor.is_contiguous() and tensor.device.type == "cuda"
        return x.new_empty((x.shape[0], weight.shape[0]))


def _load(programs: Sequence[Program], device: torch.device, after: bool = False, store: object = None) -> list[Checked]:
    assert device.type == "cuda" and not forbidden(), f"loading {programs[0].name} waits for the device"
    return [Checked(program) for program in programs]


_HostGenerator = torch.Generator  # there is no device to have one on


@contextmanager
def checked_launches() -> Iterator[Counter[str]]:
    """Within it, a device called "cuda" on which operators have their kernels, checked ones; waits are told, too. Gives the launches."""
    Checked.launches = Counter()
    with watched_cuda("fake", ones_land), pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "load", _load)
        patch.setattr(loading, "_capability", lambda device: (0, 0))  # nothing is built ahead
        patch.setattr(linear, "library", lambda device: _Library())
        patch.setattr(torch, "Generator", lambda device="cpu": _HostGenerator())
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=4))
        patch.setattr(decode_graphs, "_taken", lambda device: 0)
        yield Checked.launches
