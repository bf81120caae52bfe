"""Compiled kernels on disk: built once on a machine (or beforehand, without a GPU), read at every later start.

One file a kernel, named by everything its code follows from (``Program.digest``): a line of JSON with what a launch must know, then the
machine code. Files appear whole by renaming, so several processes may share a folder; a damaged file is built anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from deepinfer.errors import KernelBuildError

from .lowering import Lowered, lower
from .nvrtc import Resources, compile_source
from .program import SM90A, Program

FOLDER_SWITCH = "DEEPINFER_KERNEL_CACHE"


@dataclass(frozen=True)
class StoredKernel:
    """Machine code and what a launch must know (see ``lowering.Lowered``)."""

    name: str
    arch: str
    entry: str
    args: tuple[tuple[str, str], ...]
    places: tuple[int, ...]
    threads: int
    shared: int
    resources: Resources
    code: bytes

    def packed(self) -> bytes:
        """The file's bytes."""
        head = asdict(self)
        del head["code"]
        head["sha256"] = hashlib.sha256(self.code).hexdigest()
        return json.dumps(head).encode() + b"\n" + self.code

    @classmethod
    def unpacked(cls, data: bytes) -> StoredKernel:
        """From a file's bytes. Raises ``ValueError`` if they are damaged."""
        line, _, code = data.partition(b"\n")
        head = json.loads(line)
        if not isinstance(head, dict) or hashlib.sha256(code).hexdigest() != head.pop("sha256", None):
            raise ValueError("damaged")
        try:
            head["args"] = tuple((str(n), str(k)) for n, k in head["args"])
            head["places"] = tuple(int(i) for i in head["places"])
            head["resources"] = Resources(**head["resources"])
            return cls(code=code, **head)
        except (KeyError, TypeError) as e:
            raise ValueError(f"damaged: {e}") from e


class KernelStore:
    """Kernels in ``folder``, which is made when the first one is built."""

    def __init__(self, folder: Path, arch: str = SM90A) -> None:
        self.folder, self.arch = folder, arch

    def find(self, program: Program) -> StoredKernel | None:
        """The kernel if it has been built."""
        try:
            found = StoredKernel.unpacked(self._path(program).read_bytes())
        except (OSError, ValueError):
            return None
        return found if found.name == program.name and found.arch == self.arch else None

    def build(self, program: Program) -> StoredKernel:
        """Lowers and compiles ``program`` and keeps it. Raises ``KernelBuildError``, also for a kernel that spills registers."""
        lowered = lower(program, self.arch)
        return self._compile(program, lowered)

    def get_all(
        self, programs: Sequence[Program], progress: Callable[[int, int], None] | None = None
    ) -> dict[Program, StoredKernel | KernelBuildError]:
        """Each program's kernel, built if need be, or why there is none. ``progress`` is told (built so far, to be built).

        Lowering runs one after another, compiling beside it on all cores.
        """
        found: dict[Program, StoredKernel | KernelBuildError] = {}
        missing: list[Program] = []
        for program in dict.fromkeys(programs):
            kept = self.find(program)
            if kept is None:
                missing.append(program)
            else:
                found[program] = kept
        if not missing:
            return found
        done = 0

        def note() -> None:
            nonlocal done
            done += 1
            if progress is not None:
                progress(done, len(missing))

        if progress is not None:
            progress(0, len(missing))
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            waiting = []
            for program in missing:
                try:
                    lowered = lower(program, self.arch)
                except KernelBuildError as e:
                    found[program] = e
                    note()
                    continue
                waiting.append((program, pool.submit(self._compile, program, lowered)))
            for program, future in waiting:
                try:
                    found[program] = future.result()
                except KernelBuildError as e:
                    found[program] = e
                note()
        return found

    def _compile(self, program: Program, lowered: Lowered) -> StoredKernel:
        code, resources = compile_source(lowered.source, program.name, self.arch)
        if resources.spill_stores or resources.spill_loads:
            raise KernelBuildError(
                f"{program.name} spills {resources.spill_stores} + {resources.spill_loads} bytes of registers on {self.arch}"
            )
        kernel = StoredKernel(
            program.name, self.arch, lowered.entry, lowered.args, lowered.places, lowered.threads, lowered.shared, resources, code
        )
        self._write(self._path(program), kernel.packed())
        return kernel

    def _path(self, program: Program) -> Path:
        return self.folder / f"{program.digest(self.arch)}.kernel"

    def _write(self, path: Path, data: bytes) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(temporary, path)
        except OSError:
            pass  # a folder that cannot be written costs time at the next start, not this one


def total_bytes(kernels: Iterable[StoredKernel]) -> int:
    """Bytes of machine code."""
    return sum(len(k.code) for k in kernels)


@cache
def default_store() -> KernelStore:
    """The store of this user: ``$DEEPINFER_KERNEL_CACHE``, else ``deepinfer/kernels`` in the user's cache folder."""
    chosen = os.environ.get(FOLDER_SWITCH)
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return KernelStore(Path(chosen) if chosen else base / "deepinfer" / "kernels")
