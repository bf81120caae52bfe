"""Many kernels built at once: in processes of their own, since TileLang and NVRTC each work on one kernel at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from deepinfer.errors import KernelBuildError

from .program import SM90A, Program
from .store import KernelStore, StoredKernel

_WORTH_A_PROCESS = 12
"""Kernels a further process must have to do: starting one takes as long as building about as many."""


@dataclass(frozen=True)
class Built:
    """What became of one program: the kernel or why there is none, and the seconds it took."""

    program: Program
    kernel: StoredKernel | None
    error: str | None
    seconds: float


def build_all(programs: Sequence[Program], folder: Path, arch: str = SM90A, jobs: int = 1) -> Iterator[Built]:
    """Builds every program into the store ``folder``, in at most ``jobs`` processes, in the order they get done.

    A process that dies takes nothing along but the kernel it worked on. Programs that the store has are built all the same.
    """
    workers = min(jobs, -(-len(programs) // _WORTH_A_PROCESS))
    if workers <= 1:
        for program in programs:
            yield _build(program, folder, arch)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        waiting: dict[Future[Built], Program] = {pool.submit(_build, program, folder, arch): program for program in programs}
        lost: list[Program] = []
        try:
            while waiting:
                done, _ = wait(waiting, return_when=FIRST_COMPLETED)
                for future in done:
                    program = waiting.pop(future)
                    try:
                        yield future.result()
                    except BrokenExecutor:
                        lost.append(program)
        finally:
            pool.shutdown(cancel_futures=True)
    for program in lost:  # which of them it was shows when each has a process for itself
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
            try:
                yield alone.submit(_build, program, folder, arch).result()
            except BrokenExecutor:
                yield Built(program, None, f"{program.name}: the compiler's process died", 0.0)


def _build(program: Program, folder: Path, arch: str) -> Built:
    start = time.perf_counter()
    try:
        kernel, error = KernelStore(folder, arch).build(program), None
    except KernelBuildError as e:
        kernel, error = None, str(e)
    return Built(program, kernel, error, time.perf_counter() - start)
