"""Many kernels built at once: in processes of their own, since TileLang and NVRTC each work on one kernel at a time."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deepinfer.errors import KernelBuildError
from deepinfer.scratch import ScratchFolder

from .build_process import packed
from .program import SM90A, Program
from .store import StoredKernel, compile_program

_WORTH_A_PROCESS = 6
"""Kernels that each further process must have to do: starting one takes as long as building about as many."""


@dataclass(frozen=True)
class Built:
    """What became of one program: the kernel or why there is none, and the seconds it took."""

    program: Program
    kernel: StoredKernel | None
    error: str | None
    seconds: float


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def build_all(programs: Sequence[Program], arch: str = SM90A, jobs: int | None = None) -> Iterator[Built]:
    """Compiles every program, in at most ``jobs`` processes (``None``: usable cores), in the order they get done.

    A process that dies takes nothing along but the kernel it worked on.
    """
    workers = min(usable_cores() if jobs is None else jobs, len(programs) // _WORTH_A_PROCESS)
    if workers <= 1:
        for program in programs:
            yield _build(program, arch)
        return
    waiting: queue.SimpleQueue[Program] = queue.SimpleQueue()
    for program in programs:
        waiting.put(program)
    done: queue.SimpleQueue[Built] = queue.SimpleQueue()
    with ScratchFolder("build") as folder:
        builders = [_Builder(waiting, done, arch, folder.path) for _ in range(workers)]
        try:
            for _ in programs:
                yield done.get()
        finally:
            for builder in builders:
                builder.stop()


def _build(program: Program, arch: str) -> Built:
    start = time.perf_counter()
    try:
        kernel, error = compile_program(program, arch), None
    except KernelBuildError as e:
        kernel, error = None, str(e)
    return Built(program, kernel, error, time.perf_counter() - start)


class _Builder:
    """Takes programs until there are none, and has a process build them; another one if that dies. Files of the processes, which are
    ended by force, lie in ``folder``."""

    def __init__(self, waiting: queue.SimpleQueue[Program], done: queue.SimpleQueue[Built], arch: str, folder: str | None) -> None:
        self._waiting, self._done, self._arch, self._folder = waiting, done, arch, folder
        self._process: subprocess.Popen[str] | None = None
        self._open = True
        self._thread = threading.Thread(target=self._run, name="kernel builder", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self._open:
            try:
                program = self._waiting.get_nowait()
            except queue.Empty:
                break
            start = time.perf_counter()
            try:
                self._done.put(self._build(program))
            except Exception as e:  # of any kind: the caller waits for an answer to each program
                died = f"{program.name}: the process that built it died ({e})"
                self._done.put(Built(program, None, died, time.perf_counter() - start))
        self._end()

    def stop(self) -> None:
        """Ends the process, whatever it does, and waits for the thread."""
        self._open = False
        if self._process is not None:
            self._process.kill()
        self._thread.join()

    def _build(self, program: Program) -> Built:
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._process = self._start()
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(packed(program) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        if not answer:
            raise ValueError(f"exit code {process.wait()}")
        error, seconds, kernel = json.loads(answer)
        return Built(program, None if kernel is None else StoredKernel.unpacked(base64.b64decode(kernel)), error, seconds)

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-P", "-m", "deepinfer.kernels.toolchain.build_process", self._arch]
        # PYTHONPATH: what this process imports from, which may be more than a fresh one would.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
        if self._folder is not None:
            environment |= dict.fromkeys(("TMPDIR", "TEMP", "TMP"), self._folder)
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment, text=True)

    def _end(self) -> None:
        process = self._process
        if process is not None:
            process.kill()
            with contextlib.suppress(OSError):
                process.communicate()
