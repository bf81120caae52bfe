"""Kernels of a model on a device: found in the store or built, loaded, or missing with one warning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

import torch

from deepinfer.errors import KernelBuildError

from .driver import Kernel
from .program import Program
from .store import KernelStore, default_store

_CAPABILITY = (9, 0)
"""Of the GPUs that ``program.SM90A`` is machine code for."""

_missing: dict[str, str] = {}


def load(programs: Sequence[Program], device: torch.device, after: bool = False, store: KernelStore | None = None) -> list[Kernel] | None:
    """``programs`` on ``device``, in their order; ``None`` if one of them cannot be had: the operator then stays with its reference, which
    is said once in a warning and kept for ``missing_kernels``, in the store also for `deepinfer doctor`. ``after``: see ``Kernel``. Builds
    what is not in the store, with a progress bar on terminals."""
    store = store or default_store()
    op = programs[0].op
    try:
        _check_device(device)
        found = store.get_all(programs, _Progress())
        kernels = []
        for program in programs:
            kept = found[program]
            if isinstance(kept, KernelBuildError):
                raise kept
            kernels.append(Kernel(kept, device, after))
    except KernelBuildError as e:
        if op not in _missing:
            warnings.warn(f"operator {op} runs on its slow reference form on {device}: {e}", RuntimeWarning, stacklevel=2)
        _missing[op] = str(e)
        store.note_failure(op, str(e))
        return None
    store.note_failure(op, None)
    return kernels


def require(programs: Sequence[Program], device: torch.device, after: bool = False) -> list[Kernel]:
    """As ``load``; raises ``KernelBuildError`` where that gives ``None``."""
    kernels = load(programs, device, after)
    if kernels is None:
        raise KernelBuildError(_missing[programs[0].op])
    return kernels


def prepare(programs: Sequence[Program], device: torch.device) -> None:
    """Builds those of ``programs`` that are not in the store, all under one progress bar. Who needs one that cannot be built hears of
    it when loading it."""
    if device.type == "cuda" and _capability(device) == _CAPABILITY:
        default_store().get_all(programs, _Progress())


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _check_device(device: torch.device) -> None:
    if device.type == "cuda" and (found := _capability(device)) != _CAPABILITY:
        need, have = (f"{major}.{minor}" for major, minor in (_CAPABILITY, found))
        raise KernelBuildError(f"kernels are compiled for compute capability {need}, this GPU has {have}")


def missing_kernels() -> dict[str, str]:
    """Operators of this process that run on their reference although a kernel was wanted, and why."""
    return dict(_missing)


class _Progress:
    """A progress bar on terminals, made when there is something to build."""

    def __init__(self) -> None:
        self._bar: object = None

    def __call__(self, done: int, total: int) -> None:
        if not sys.stderr.isatty():
            return
        from tqdm import tqdm

        if self._bar is None:
            self._bar = tqdm(total=total, desc="building kernels", unit="kernel")
        self._bar.update(done - self._bar.n)  # type: ignore[attr-defined]
        if done == total:
            self._bar.close()  # type: ignore[attr-defined]
