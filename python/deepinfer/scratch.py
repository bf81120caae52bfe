"""Folders for what is written on the way and nobody keeps.

Owns: making and removing them, also those of processes that were ended by force. Never touches: what is in them. A leaf: anybody may have
one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, get_args

from deepinfer.errors import ConfigError

Kind = Literal["build", "meet", "counts"]
"""What is in it: what the compiler of kernels writes (a gigabyte a process), the file in which ranks find each other, what front processes
count."""


class ScratchFolder:
    """A folder that is this process's until :meth:`remove`. A process that could not remove its own, since it was killed, leaves that to
    whoever makes the next one, of any kind.

    It is in use as long as its process holds a lock on it, which no end of a process leaves behind.

    Args:
        kind: what is to be in it; its name tells.

    Attributes:
        path: where it is; ``None`` if there is no place for temporary files.
    """

    def __init__(self, kind: Kind) -> None:
        self.path: str | None = None
        self._lock = -1
        self._process = os.getpid()
        with contextlib.suppress(OSError):
            _sweep(Path(tempfile.gettempdir()))
            while self.path is None:
                self._take(tempfile.mkdtemp(prefix=_prefix(kind)))

    def _take(self, path: str) -> None:
        """Makes ``path`` this process's, unless it was swept before it was locked."""
        try:
            lock = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.isdir(path):
                self.path, self._lock, lock = path, lock, -1
        finally:
            if lock >= 0:
                os.close(lock)

    @property
    def place(self) -> str:
        """Where it is. Raises ConfigError if there is no place for temporary files."""
        if self.path is None:
            raise ConfigError("there is no folder for temporary files in which one may write; make one, or name another by TMPDIR")
        return self.path

    @property
    def is_there(self) -> bool:
        """Whether it exists: who cleans up may have removed it."""
        return self.path is not None and os.path.isdir(self.path)

    def room(self) -> int:
        """Bytes that are free where it is; 0 if it is nowhere."""
        with contextlib.suppress(OSError):
            return 0 if self.path is None else shutil.disk_usage(self.path).free
        return 0

    def remove(self) -> None:
        """Removes it with all that is in it; idempotent. Nothing in a fork, to which it does not belong."""
        if self._lock >= 0 and os.getpid() == self._process:
            assert self.path is not None
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()


@cache
def _machine() -> str:
    """Of this start of this machine: locks say nothing of processes of another, with which a folder for temporary files may be shared."""
    try:
        start = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        start = os.uname().nodename
    return hashlib.sha256(start.encode()).hexdigest()[:12]


def _prefix(kind: Kind) -> str:
    return f"deepinfer-{kind}-{_machine()}-"


def _sweep(parent: Path) -> None:
    """Removes folders that this class made on this machine for this user and that no process holds."""
    made = re.compile(rf"deepinfer-(?:{'|'.join(get_args(Kind))})-{_machine()}-[a-z0-9_]{{8}}")
    for path in [path for path in parent.iterdir() if made.fullmatch(path.name)]:
        with contextlib.suppress(OSError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.geteuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
