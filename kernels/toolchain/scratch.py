"""Folders for what the compiler writes on its way and nobody keeps, a gigabyte a process.

Owns: making and removing them, also those of processes that were ended by force. Never touches: what is in them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

_PREFIX = "deepinfer-build-"


class ScratchFolder:
    """A folder that is this process's until :meth:`remove`, which whoever makes the next one does for a process that could not.

    It is in use as long as somebody holds its lock, which no end of a process leaves behind.

    Attributes:
        path: where it is; ``None`` if there is no place for temporary files.
    """

    def __init__(self) -> None:
        self.path: str | None = None
        self._lock = -1
        self._process = os.getpid()
        with contextlib.suppress(OSError):
            _sweep(Path(tempfile.gettempdir()))
            while self.path is None:
                path = tempfile.mkdtemp(prefix=_PREFIX)
                lock = os.open(path, os.O_RDONLY)
                fcntl.flock(lock, fcntl.LOCK_EX)
                if os.path.isdir(path):
                    self.path, self._lock = path, lock
                else:  # swept before it was locked
                    os.close(lock)

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


def _sweep(parent: Path) -> None:
    """Removes folders of this user that no process holds."""
    for path in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.geteuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
