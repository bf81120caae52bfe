"""Which torch operations make the launching thread wait for a device, told from their arguments.

The debug half of ``worker.sync_guard``: a dispatch mode sees every operation, also those that C++ code calls, on real tensors as
on fake ones. It knows what torch's own check misses: a copy called non-blocking whose host side is not page-locked memory is
staged, and the thread stands still meanwhile.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepinfer.errors import HiddenSyncError

_aten = torch.ops.aten
_DYNAMIC = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
_INDEXED = {_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default, _aten._index_put_impl_.default}
_MASKS = (torch.bool, torch.uint8)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)


def _copy_waits(host: torch.Tensor | None, other: torch.Tensor, non_blocking: bool, pinned: Callable[[torch.Tensor], bool]) -> str | None:
    """Why a copy between host and device waits; ``host`` is ``None`` where the copy itself makes the host's tensor."""
    if not non_blocking:
        return "a blocking copy between host and device"
    if host is None:
        return "a copy to host memory that is made for it; copy into page-locked memory that is there"
    if not pinned(host):
        return "a copy called non-blocking whose host side is not page-locked"
    if not host.is_contiguous() or host.shape != other.shape:
        return "a copy called non-blocking that is staged: its host side is not contiguous or not of the device's shape"
    return None


def why_it_waits(
    op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], device: str, pinned: Callable[[torch.Tensor], bool]
) -> str | None:
    """Why calling ``op`` makes the thread wait for a device of type ``device``; ``None`` if it does not.

    Args:
        pinned: whether a host tensor lies in page-locked memory.
    """
    if op is _aten.copy_.default:
        target, source = args[0], args[1]
        if device not in (target.device.type, source.device.type) or target.device.type == source.device.type:
            return None
        non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        host, other = (source, target) if target.device.type == device else (target, source)
        return _copy_waits(host, other, non_blocking, pinned)
    if op is _aten._to_copy.default:
        source, wanted = args[0], kwargs.get("device")
        to = source.device.type if wanted is None else torch.device(wanted).type
        if device not in (to, source.device.type) or to == source.device.type:
            return None
        return _copy_waits(source if to == device else None, source, bool(kwargs.get("non_blocking", False)), pinned)
    if op in _INDEXED:
        if args[0].device.type != device:
            return None
        indices = list(_tensors(args[1]))
        if any(i.dtype in _MASKS for i in indices):
            return "indexing with a mask, whose number of hits the host has to know"
        return "indexing with a tensor of the host" if any(i.device.type != device for i in indices) else None
    if any(tag in op.tags for tag in _DYNAMIC):
        if op is _aten.repeat_interleave.Tensor and kwargs.get("output_size") is not None:
            return None
        if any(t.device.type == device for t in _tensors([*args, *kwargs.values()])):
            return f"{op.name()} reads a value of the device"
    return None


@cache
def is_made_of_others(func: Any) -> bool:
    """Whether an operator only calls others: in inference mode these arrive whole, and what they call decides."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


class DeviceRules(TorchDispatchMode):
    """Refuses, while ``active()``, operations of its thread that wait for a device of type ``device``.

    Raises:
        HiddenSyncError: from the operation, which is then not carried out.
    """

    def __init__(
        self, active: Callable[[], bool], device: str = "cuda", pinned: Callable[[torch.Tensor], bool] = torch.Tensor.is_pinned
    ) -> None:
        super().__init__()
        self._active, self._device, self._pinned = active, device, pinned

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a property of a fake tensor
            return func(*args, **kwargs)
        if is_made_of_others(func):
            with self:
                return func.decompose(*args, **kwargs)
        self.check(func, args, kwargs)
        return func(*args, **kwargs)

    def check(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Raises if the operation waits and waiting is refused now."""
        if self._active() and (why := why_it_waits(func, args, kwargs, self._device, self._pinned)) is not None:
            raise HiddenSyncError(f"{why}: it waits for the device where waiting is forbidden")


class WaitRecorder:
    """Notes where torch synchronised a device, stream or event while ``active()`` held in the thread that did it.

    Its callbacks are private to torch (2.11 to 2.15 have them); where they are missing nothing is noted. An error in
    a callback is only logged, therefore the place is kept and told at the end of the region.
    """

    def __init__(self, active: Callable[[], bool]) -> None:
        self._active = active
        self._found = threading.local()
        self.works = False
        activate = getattr(torch._C, "_activate_gpu_trace", None)
        try:
            from torch.cuda import _gpu_trace as trace

            trace.register_callback_for_device_synchronization(self._device)
            trace.register_callback_for_stream_synchronization(self._stream)
            trace.register_callback_for_event_synchronization(self._event)
        except (ImportError, AttributeError):
            return
        if activate is not None:
            activate()
            self.works = True

    def take(self) -> list[str]:
        """What this thread's waits were since the last call, one text each."""
        found: list[str] = getattr(self._found, "waits", [])
        self._found.waits = []
        return found

    def _device(self) -> None:
        self._note("device")

    def _stream(self, _: int) -> None:
        self._note("stream")

    def _event(self, _: int) -> None:
        self._note("event")

    def _note(self, what: str) -> None:
        if self._active():
            if not hasattr(self._found, "waits"):
                self._found.waits = []
            self._found.waits.append(f"{what} synchronised at\n{''.join(traceback.format_stack(limit=8)[:-2])}")
