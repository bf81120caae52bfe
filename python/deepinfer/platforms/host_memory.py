"""Memory of the host that a GPU reads by itself: what is too large for the device and is read a little at a time."""

from __future__ import annotations

import weakref

import torch

from deepinfer.errors import CapacityError

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
