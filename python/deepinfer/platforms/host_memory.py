"""Memory of the host that a GPU reads by itself: what is too large for the device and is read a little at a time."""

from __future__ import annotations

import ctypes
import logging
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
    if device.type == "cuda" and host.numel():
        with torch.cuda.device(device):
            code = int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.numel(), _PORTABLE_AND_MAPPED))
        if code:
            raise CapacityError(
                f"CUDA could not page-lock {host.numel() / 2**30:.2f} GiB of host memory (error {code}); "
                "raise the limit of locked memory or leave the tables elsewhere"
            )
        weakref.finalize(host.untyped_storage(), _unlock, host.data_ptr()).atexit = False
    return host


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
