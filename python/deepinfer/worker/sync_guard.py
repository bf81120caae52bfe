"""Turns a hidden wait for the device into an error, region by region.

``forbid_device_sync()`` and ``allow_device_sync()`` are context managers and decorators; the innermost one of a thread holds,
and leaving it, also by an exception, restores the one around it.

What raises :class:`HiddenSyncError` in a forbidden region: what torch's sync debug mode sees (``.item()``, ``nonzero``, boolean
masks, blocking copies), and waits that it does not see and that Python asks for (event, stream and device synchronise, elapsed
time, emptying the allocator's cache). With ``configure(debug=True)`` also every copy between host and device that is not from or
to page-locked memory (``worker.sync_rules``); this costs microseconds an operation and is meant for tests. ``record=True`` adds
a second net, torch's own record of waits.

Scopes belong to threads, torch's mode to the process: it is on while any thread forbids. Another thread may wait explicitly
meanwhile; an implicit wait of it raises too. Helper threads therefore wait on events.
"""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, ParamSpec, TypeVar

import torch

from deepinfer.errors import HiddenSyncError
from deepinfer.worker.sync_rules import DeviceRules, WaitRecorder

_P = ParamSpec("_P")
_R = TypeVar("_R")

_ERROR: Final = 2
_TORCH_SAYS: Final = "synchronizing CUDA operation"  # in the error of the sync debug mode

# A build of torch without CUDA has neither.
_get_mode: Callable[[], int] | None = getattr(torch._C, "_cuda_get_sync_debug_mode", None)
_set_mode: Callable[[int], None] | None = getattr(torch._C, "_cuda_set_sync_debug_mode", None)


class _Here:
    """What holds in one thread: whether waits are forbidden, and what held around each open scope."""

    __slots__ = ("forbids", "outer", "rules")

    def __init__(self) -> None:
        self.forbids = False
        self.outer: list[bool] = []
        self.rules: DeviceRules | None = None


class _Thread(threading.local):
    def __init__(self) -> None:
        self.here = _Here()


_thread = _Thread()


def forbidden() -> bool:
    """Whether this thread is in a forbidden region."""
    return _thread.here.forbids


class _Process:
    """Torch's process-wide mode, on while at least one thread forbids; and the waits that are wrapped once for good."""

    def __init__(self) -> None:
        self.enabled = True
        self.debug = False
        self.recorder: WaitRecorder | None = None
        self._lock = threading.Lock()
        self._forbidding = 0
        self._before = 0
        self._wrapped = False

    def add(self, change: int) -> None:
        """A thread has begun (+1) or ceased (−1) to forbid."""
        with self._lock:
            self._forbidding += change
            if _set_mode is None or _get_mode is None:
                return
            if change > 0 and self._forbidding == 1:
                self._before = _get_mode()
                _set_mode(_ERROR)
            elif self._forbidding == 0:
                _set_mode(self._before)

    def prepare(self) -> None:
        """Once: wraps the waits that Python can ask for, and has torch say now that its mode is a prototype."""
        with self._lock:
            if self._wrapped:
                return
            if _set_mode is not None and _get_mode is not None:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    _set_mode(_get_mode())
            for owner, name in _waits():
                setattr(owner, name, _refusing(getattr(owner, name), f"{owner.__name__}.{name}"))
            self._wrapped = True


_process = _Process()


def _waits() -> list[tuple[Any, str]]:
    named = [(torch.cuda, "synchronize"), (torch.cuda, "empty_cache"), (torch.cuda, "ipc_collect"), (torch.cuda.Event, "synchronize")]
    named += [(torch.cuda.Event, "elapsed_time"), (torch.cuda.Stream, "synchronize"), (getattr(torch, "accelerator", None), "synchronize")]
    return [(owner, name) for owner, name in named if hasattr(owner, name)]


def _refusing(wait: Callable[_P, _R], name: str) -> Callable[_P, _R]:
    @functools.wraps(wait)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if _thread.here.forbids:
            raise HiddenSyncError(f"{name} waits for the device where waiting is forbidden; wait after the launch instead")
        return wait(*args, **kwargs)

    return checked


def configure(*, enabled: bool | None = None, debug: bool | None = None, record: bool = False) -> None:
    """Sets what regions entered from now on do, in the whole process; regions that are open stay as they are.

    Args:
        enabled: off, regions change nothing (``DEEPINFER_DISABLE_SYNC_GUARD``).
        debug: also check every copy; slow, for tests.
        record: with ``debug``, also note whatever made torch wait and raise at the region's end. It stays for the life of the
            process, in which torch then loses the text of some errors of its own (a tensor freed while one is pending).
    """
    if enabled is not None:
        _process.enabled = enabled
    if debug is not None:
        _process.debug = debug
        if debug and record and _process.recorder is None:
            _process.recorder = WaitRecorder(forbidden)


class _Scope:
    """One kind of region. It keeps nothing itself, so that one object serves every thread and every nesting."""

    __slots__ = ("_forbids", "_name")

    def __init__(self, forbids: bool, name: str) -> None:
        self._forbids, self._name = forbids, name

    def __enter__(self) -> None:
        here = _thread.here
        before = here.forbids
        here.outer.append(before)
        try:
            forbids = self._forbids if _process.enabled else before
            if forbids is not before:
                if forbids:
                    _process.prepare()
                    if _process.debug and here.rules is None:
                        _open_debug(here)
                _process.add(1 if forbids else -1)
                here.forbids = forbids
        except BaseException:
            here.outer.pop()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        here = _thread.here
        inside, before = here.forbids, here.outer.pop()
        if inside is not before:
            here.forbids = before
            _process.add(1 if before else -1)
        waits: list[str] = []
        if here.rules is not None and not before and not any(here.outer):
            waits = _close_debug(here)
        if not inside:
            return
        if isinstance(error, RuntimeError) and not isinstance(error, HiddenSyncError) and _TORCH_SAYS in str(error):
            raise HiddenSyncError("an operation waits for the device where waiting is forbidden") from error
        if waits and error is None:
            raise HiddenSyncError("something waited for the device where waiting is forbidden:\n" + "\n".join(waits))

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        """As a decorator: the whole call is the region."""
        if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"{self._name} cannot decorate {function.__qualname__}: its body runs after the call has returned; use with inside"
            )

        @functools.wraps(function)
        def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with self:
                return function(*args, **kwargs)

        return guarded


def _open_debug(here: _Here) -> None:
    if _process.recorder is not None:
        _process.recorder.take()
    rules = DeviceRules(forbidden)
    rules.__enter__()
    here.rules = rules


def _close_debug(here: _Here) -> list[str]:
    rules, here.rules = here.rules, None
    if rules is not None:
        rules.__exit__(None, None, None)
    return _process.recorder.take() if _process.recorder is not None else []


_FORBID = _Scope(True, "forbid_device_sync")
_ALLOW = _Scope(False, "allow_device_sync")


def forbid_device_sync() -> _Scope:
    """A region in which this thread must not wait for the device: ``with forbid_device_sync():`` or ``@forbid_device_sync()``.

    Raises:
        HiddenSyncError: from what waits, at the place; a wait that only torch's callbacks see, at the end of the region.
    """
    return _FORBID


def allow_device_sync() -> _Scope:
    """A region, inside a forbidden one, in which this thread may wait; without one around it, it changes nothing."""
    return _ALLOW
