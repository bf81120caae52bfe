"""Compiled kernels on disk: built once on a machine (or beforehand, without a GPU), read at every later start.

One file a kernel, named by everything its code follows from (``Program.digest``): a line of JSON with what a launch must know, then the
machine code, compressed. Files appear whole by renaming, so several processes may share a folder; a damaged file is built anew.

What is loaded runs on the GPU with this process's data, so a file counts only if it belongs to this user or to root and nobody else may
write it; the folder may be anyone's, since a file is judged by itself and names what it was made from. Others are built anew, with one
warning.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from deepinfer.errors import KernelBuildError

from .lowering import TensorMap, lower
from .nvrtc import Resources, compile_source, compiler
from .program import SM90A, Program

FOLDER_SWITCH = "DEEPINFER_KERNEL_CACHE"

_KERNEL, _FAILED = ".kernel", ".failed"

_FOR_ALL = 0o644
"""Mode of a file of the store: one user's may serve others."""

MOST_SHARED = 227 * 1024
"""Bytes of shared memory that a block may have on the architecture kernels are compiled for."""


@dataclass(frozen=True)
class StoredKernel:
    """Machine code and what a launch must know (see ``lowering.Lowered``); ``digest`` says what it was made from, ``compiler`` by what."""

    name: str
    arch: str
    digest: str
    compiler: str
    entry: str
    args: tuple[tuple[str, str], ...]
    places: tuple[int, ...]
    threads: int
    shared: int
    resources: Resources
    code: bytes
    maps: tuple[TensorMap, ...] = ()
    cluster: int = 1

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: dynamic and static."""
        return self.shared + self.resources.static_shared

    def packed(self) -> bytes:
        """The file's bytes."""
        head = asdict(self)
        del head["code"]
        head["sha256"] = hashlib.sha256(self.code).hexdigest()
        return json.dumps(head).encode() + b"\n" + zlib.compress(self.code)

    @classmethod
    def unpacked(cls, data: bytes) -> StoredKernel:
        """From a file's bytes. Raises ``ValueError`` if they are damaged."""
        line, _, packed = data.partition(b"\n")
        head = json.loads(line)
        try:
            code = zlib.decompress(packed)
        except zlib.error as e:
            raise ValueError(f"damaged: {e}") from e
        if not isinstance(head, dict) or hashlib.sha256(code).hexdigest() != head.pop("sha256", None):
            raise ValueError("damaged")
        try:
            head["args"] = tuple((str(n), str(k)) for n, k in head["args"])
            head["maps"] = tuple(_tensor_map(one) for one in head["maps"])
            head["places"] = tuple(int(i) for i in head["places"])
            head["resources"] = Resources(**head["resources"])
            return cls(code=code, **head)
        except (AttributeError, KeyError, TypeError) as e:
            raise ValueError(f"damaged: {e}") from e


@dataclass(frozen=True)
class Census:
    """Kernels in a folder, the bytes of their files, and files that are not used (see ``distrust``)."""

    kept: int
    nbytes: int
    refused: int


class KernelStore:
    """Kernels in ``folder``, which is made when the first one is built.

    Attributes:
        refused: files that are there and not used, with the reason.
        unwritten: why the last kernel could not be kept, if it could not.
    """

    def __init__(self, folder: Path, arch: str = SM90A) -> None:
        self.folder, self.arch = folder, arch
        self.refused: dict[Path, str] = {}
        self.unwritten: str | None = None

    def find(self, program: Program) -> StoredKernel | None:
        """The kernel if it has been built, and by somebody who may decide what runs here."""
        digest = program.digest(self.arch)
        path = self._path(digest)
        try:
            with open(path, "rb") as file:
                reason = distrust(os.fstat(file.fileno()))
                found = None if reason else StoredKernel.unpacked(file.read())
        except (OSError, ValueError):
            return None
        if reason is not None:
            if not self.refused:
                warnings.warn(f"kernels in {self.folder} are not used and built anew: {path.name} {reason}", RuntimeWarning, stacklevel=3)
            self.refused[path] = reason
        return found if found is not None and (found.name, found.arch, found.digest) == (program.name, self.arch, digest) else None

    def census(self) -> Census:
        """What lies in the folder, of any program."""
        kept = refused = nbytes = 0
        with contextlib.suppress(OSError):
            for entry in os.scandir(self.folder):
                if entry.name.endswith(_KERNEL) and not entry.name.startswith("."):
                    status = entry.stat()
                    if distrust(status):
                        refused += 1
                    else:
                        kept, nbytes = kept + 1, nbytes + status.st_size
        return Census(kept, nbytes, refused)

    def note_failure(self, op: str, reason: str | None) -> None:
        """Keeps why the kernels of an operator could not be had, for people who look later; ``None``: they could, after all."""
        path = self.folder / f"{op}{_FAILED}"
        with contextlib.suppress(OSError):
            if reason is not None:
                write_whole(path, reason.encode(), _FOR_ALL)
            elif path.exists():
                path.unlink()

    def failures(self) -> dict[str, str]:
        """Operators whose kernels could not be had at the last try of any process that uses this folder, and why."""
        found = {}
        with contextlib.suppress(OSError):
            for path in sorted(self.folder.glob(f"*{_FAILED}")):
                found[path.name.removesuffix(_FAILED)] = path.read_bytes()[:4096].decode(errors="replace")
        return found

    def build(self, program: Program) -> StoredKernel:
        """Lowers and compiles ``program`` and keeps it. Raises ``KernelBuildError``, also for a kernel that spills registers."""
        kernel = compile_program(program, self.arch)
        self.keep(kernel)
        return kernel

    def keep(self, kernel: StoredKernel) -> None:
        """Writes a kernel. A folder that cannot be written costs time at the next start, not this one: it is a warning."""
        try:
            write_whole(self._path(kernel.digest), kernel.packed(), _FOR_ALL)
        except OSError as e:
            if self.unwritten is None:
                warnings.warn(
                    f"compiled kernels cannot be kept and the next start builds them again: {e}; set {FOLDER_SWITCH} to a folder of yours",
                    RuntimeWarning,
                    stacklevel=3,
                )
            self.unwritten = str(e)

    def get_all(
        self, programs: Sequence[Program], progress: Callable[[int, int], None] | None = None
    ) -> dict[Program, StoredKernel | KernelBuildError]:
        """Each program's kernel, built if need be, or why there is none. ``progress`` is told (built so far, to be built).

        Many are built in processes of their own (``building.build_all``).
        """
        from .building import build_all

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
        if progress is not None:
            progress(0, len(missing))
        for done, one in enumerate(build_all(missing, self.arch), 1):
            if one.kernel is not None:
                self.keep(one.kernel)
            found[one.program] = one.kernel or KernelBuildError(one.error)
            if progress is not None:
                progress(done, len(missing))
        return found

    def _path(self, digest: str) -> Path:
        return self.folder / f"{digest}{_KERNEL}"


def _tensor_map(said: dict[str, Any]) -> TensorMap:
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in said.items()}
    return TensorMap(**values)


def compile_program(program: Program, arch: str) -> StoredKernel:
    """Lowers and compiles ``program``; needs no GPU. Raises ``KernelBuildError``, also for a kernel that spills registers."""
    lowered = lower(program, arch)
    code, used = compile_source(lowered.source, program.name, arch)
    if used.spill_stores or used.spill_loads:
        raise KernelBuildError(f"{program.name} spills {used.spill_stores} + {used.spill_loads} bytes of registers on {arch}")
    shared = lowered.shared + used.static_shared
    if shared > MOST_SHARED:
        raise KernelBuildError(f"{program.name} wants {shared} bytes of shared memory, a block may have {MOST_SHARED}")
    launch = (lowered.entry, lowered.args, lowered.places, lowered.threads, lowered.shared)
    return StoredKernel(program.name, arch, program.digest(arch), compiler(), *launch, used, code, lowered.maps, lowered.cluster)


def write_whole(path: Path, data: bytes, mode: int = 0o600) -> None:
    """A file that others see whole or not at all, in a folder that is made if need be. Raises ``OSError``, and leaves nothing then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(file.fileno(), mode)  # whatever this user's mask says
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def user_cache(name: str) -> Path:
    """Where DeepInfer keeps ``name`` for this user, if nothing else is said."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deepinfer" / name


def distrust(status: os.stat_result) -> str | None:
    """Why a file of that status is not loaded; None if it is (see the module's text)."""
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {status.st_uid}, who is neither this one nor root"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"can be written by others (mode {stat.S_IMODE(status.st_mode):o})"
    return None


def total_bytes(kernels: Iterable[StoredKernel]) -> int:
    """Bytes of machine code."""
    return sum(len(k.code) for k in kernels)


@cache
def default_store() -> KernelStore:
    """The store of this user: ``$DEEPINFER_KERNEL_CACHE``, else ``deepinfer/kernels`` in the user's cache folder."""
    chosen = os.environ.get(FOLDER_SWITCH)
    return KernelStore(Path(chosen) if chosen else user_cache("kernels"))
