"""Picking a device by name, or saying why it cannot be had."""

from __future__ import annotations

from typing import Protocol

import torch

from deepinfer.errors import ConfigError
from deepinfer.platforms.cpu import CpuPlatform
from deepinfer.platforms.cuda import CudaPlatform
from deepinfer.platforms.visible import check_visible_devices


class Platform(Protocol):
    """The device-dependent part of a worker."""

    name: str
    device: torch.device
    default_dtype: torch.dtype
    pinned: bool

    @property
    def arithmetic(self) -> str:
        """What the bits of results depend on besides the operators asked for: the library, and what it finds to run on."""

    def describe(self) -> str:
        """One line for people: device name and memory."""

    def prepare(self, num_threads: int | None, batch_invariant: bool = True) -> None:
        """Sets process-wide numerics and threads; call before tensors are made. Idempotent.

        ``batch_invariant``: libraries are held to one order of additions for every number of rows.
        """

    def memory_total(self) -> int:
        """Bytes of the device's memory (or of this process's limit, if smaller)."""

    def memory_available(self) -> int:
        """Bytes that can be allocated now."""

    @property
    def kernel_target(self) -> dict[str, str]:
        """What TileLang is told to compile for, as its target's fields."""

    def stream_handle(self) -> int:
        """Address of the current stream, for libraries that launch by themselves; 0 = none, work is done when a call returns."""

    def synchronize(self) -> None:
        """Waits until the device has finished what was launched."""


def get_platform(device: str = "auto") -> Platform:
    """The platform of a device name: ``auto`` (a GPU if there is one), ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        ConfigError: unknown name, or a device that is not there; the message names the CPU way. Or variables that say which GPUs this
            process sees disagree (``check_visible_devices``), unless it is the CPU that is asked for.
    """
    kind, _, index = device.partition(":")
    if kind in ("auto", "cuda"):
        check_visible_devices()
    if kind == "auto" and not index:
        return CudaPlatform(0) if CudaPlatform.count() else CpuPlatform()
    if kind == "cpu" and not index:
        return CpuPlatform()
    if kind == "cuda" and (not index or index.isdecimal()):
        count = CudaPlatform.count()
        number = int(index or 0)
        if number >= count:
            have = "none" if count == 0 else f"{count} (cuda:0 to cuda:{count - 1})"
            raise ConfigError(f"device {device!r} is not there: {CudaPlatform.why_missing()} GPUs found: {have}. Use device='cpu' instead")
        return CudaPlatform(number)
    raise ConfigError(f"device {device!r} is unknown; use 'auto', 'cpu', 'cuda' or 'cuda:N'")


def available_devices() -> list[Platform]:
    """Every device that can be used here, the preferred one first."""
    gpus: list[Platform] = [CudaPlatform(i) for i in range(CudaPlatform.count())]
    return [*gpus, CpuPlatform()]
