"""Memory of the host that a GPU reads by itself: what is too large for the device and is read a little at a time."""

from __future__ import annotations

import ctypes
import logging
import threading
import weakref
from functools import cache

import torch

from deepinfer.errors import CapacityError
from deepinfer.platforms.context import make_current

log = logging.getLogger("deepinfer.platforms")

_PORTABLE_AND_MAPPED = 0x1 | 0x2
"""Flags of ``cudaHostRegister``: every context may read it, at an address of its own."""


def empty_on_host(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Uninitialised uint8 memory of the host, page-locked in place for a GPU (torch's pinned memory is rounded up to a power of two).

    Raises:
        CapacityError: the system does not lock so many pages.
    """
    host = torch.empty(shape, dtype=torch.uint8)
    if device.type == "cuda" and host.numel() and (code := _lock(host, device)):
        raise CapacityError(
            f"CUDA could not page-lock {host.numel() / 2**30:.2f} GiB of host memory (error {code}); "
            "raise the limit of locked memory or leave the tables elsewhere"
        )
    return host


def _lock(host: torch.Tensor, device: torch.device) -> int:
    """Page-locks memory in place as long as it lives; gives CUDA's code, 0 = it is locked."""
    with torch.cuda.device(device):
        code = int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.numel(), _PORTABLE_AND_MAPPED))
    if not code:
        weakref.finalize(host.untyped_storage(), _unlock, host.data_ptr()).atexit = False
    return code


_TOUCHED = 64 << 20
"""Bytes whose pages a thread has the system make at once; between such pieces it can be stopped."""


class LockedLater:
    """Memory of the host, uint8 of ``shape``, that a thread page-locks for a GPU while others go on. Making the pages of some GiB takes
    seconds, so it is done first, without CUDA: while CUDA locks them nobody else gets to the device.

    Args:
        shape: bytes of each axis.
        device: a GPU.
        purpose: what it is for, and ``change``: what to lower where it cannot be locked, for people.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device, purpose: str, change: str) -> None:
        self._host = torch.empty(shape, dtype=torch.uint8)
        self._failed: str | None = None
        self._stopped = threading.Event()
        about = (self._host.numel() / 2**30, purpose, change)
        self._thread = threading.Thread(target=self._run, args=(device, about), name="deepinfer-page-lock", daemon=True)
        self._end = weakref.finalize(self, _stop, self._stopped, self._thread)  # at the interpreter's end too
        self._thread.start()

    def _run(self, device: torch.device, about: tuple[float, str, str]) -> None:
        flat = self._host.view(-1)
        for first in range(0, flat.numel(), _TOUCHED):
            if self._stopped.is_set():
                self._failed = "it was not wanted any more"
                return
            flat[first : first + _TOUCHED].zero_()
        try:
            code: int | Exception = _lock(self._host, device)
        except Exception as e:  # of any kind: whoever wants the memory hears of it
            code = e
        if code:
            size, purpose, change = about
            self._failed = f"CUDA could not page-lock {size:.2f} GiB of host memory for {purpose} (error {code}); {change}"
            log.warning("%s", self._failed)

    @property
    def ready(self) -> bool:
        """Whether it is locked."""
        return not self._thread.is_alive() and self._failed is None

    def get(self) -> torch.Tensor:
        """The memory, once it is locked.

        Raises:
            CapacityError: it cannot be; that has been warned of.
        """
        self._thread.join()
        if self._failed is not None:
            raise CapacityError(self._failed)
        return self._host

    def close(self) -> None:
        """Stops the thread; idempotent."""
        self._end()


def _stop(stopped: threading.Event, thread: threading.Thread) -> None:
    stopped.set()
    if thread is not threading.current_thread():
        thread.join()


_ALREADY_REGISTERED, _NOT_REGISTERED = 712, 713
"""Codes of the driver for memory that already is what was asked for."""


def register_host(host: torch.Tensor, device: torch.device) -> bool:
    """Page-locks existing memory of the host in place, so that copies from it to ``device`` need no staging. For memory that somebody else
    made, a file's mapping say; it works without as well, only slower. ``host`` must stay until ``unregister_host``.

    Returns whether the memory is page-locked now. That it had been before is no news; every other refusal is warned of each time.
    """
    if device.type != "cuda" or not host.numel():
        return False
    with torch.cuda.device(device):
        make_current(device)
        code = int(_driver().cuMemHostRegister_v2(ctypes.c_void_p(host.data_ptr()), ctypes.c_size_t(host.nbytes), _PORTABLE_AND_MAPPED))
    if code not in (0, _ALREADY_REGISTERED):
        log.warning("CUDA could not page-lock %d bytes of host memory, copies from it wait: %s", host.nbytes, _name(code))
    return code in (0, _ALREADY_REGISTERED)


def unregister_host(host: torch.Tensor, device: torch.device) -> None:
    """Undoes ``register_host``. Memory that is not registered (any more) is no news; every other refusal is warned of each time."""
    if device.type != "cuda" or not host.numel():
        return
    with torch.cuda.device(device):
        code = int(_driver().cuMemHostUnregister(ctypes.c_void_p(host.data_ptr())))
    if code not in (0, _NOT_REGISTERED):
        log.warning("CUDA could not release %d bytes of page-locked host memory: %s", host.nbytes, _name(code))


@cache
def _driver() -> ctypes.CDLL:
    """The driver itself: a failure there is not what the runtime blames the next launch for."""
    return ctypes.CDLL("libcuda.so.1")


def _name(code: int) -> str:
    name = ctypes.c_char_p()
    _driver().cuGetErrorName(code, ctypes.byref(name))
    return f"{(name.value or b'unknown error').decode()} ({code})"


def _unlock(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)


class _Mapped:
    """A tensor's memory under the device's address, which for registered memory is the host's."""

    def __init__(self, host: torch.Tensor) -> None:
        self._host = host  # whoever has the view keeps the memory
        self.__cuda_array_interface__ = {
            "shape": tuple(host.shape), "typestr": "|u1", "data": (host.data_ptr(), False), "strides": None, "version": 3,
        }  # fmt: skip


def seen_by_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``host``, of ``empty_on_host``, as a tensor of ``device`` over the same bytes: reading it goes over the bus."""
    return host if device.type == "cpu" or not host.numel() else torch.as_tensor(_Mapped(host), device=device)
