"""A "cuda" device for machines without one: shapes and devices are followed, nothing is computed.

Tensors on it are fake, host tensors are real. Page-locked memory is ordinary memory that is remembered; a copy from the device
to the host writes what the test says. Waits mean what they mean on a GPU: the rules of ``worker.sync_rules`` see every operation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Self
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deepinfer.kernels.toolchain import Program, loading
from deepinfer.platforms import host_memory
from deepinfer.platforms.cuda import CudaPlatform
from deepinfer.worker import graphs
from deepinfer.worker.sync_guard import configure, forbid_device_sync
from deepinfer.worker.sync_rules import is_made_of_others

_aten = torch.ops.aten


class FakeEvent(torch.cuda.Event):
    """A CUDA event that has passed as soon as it is recorded; waiting for it on the host is what it is on a GPU."""

    def record(self, stream: object = None) -> None:
        """Nothing to mark."""

    def wait(self, stream: object = None) -> None:
        """A wait of the device, not of the host."""

    def query(self) -> bool:
        """Whether it has passed."""
        return True

    def elapsed_time(self, end: torch.cuda.Event) -> float:
        """Milliseconds; reading them needs both events passed."""
        self.synchronize()
        return 1.0


class FakeRecorder:
    """CUDA graphs of work that computes nothing: recording checks that it never waits, a replay is counted.

    Attributes:
        replays: replays so far, of all recorders.
    """

    replays = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Nothing to prepare."""
        yield

    def record(self, work: graphs.Work) -> graphs.Replay:
        """See `deepinfer.worker.graphs.Recorder`."""
        work()
        with forbid_device_sync():
            work()
        return self._replay

    def _replay(self) -> None:
        FakeRecorder.replays += 1


class FakeCuda(TorchDispatchMode):
    """Within it, ``device="cuda"`` works.

    Args:
        landed: called with each page-locked host tensor that a copy from the device has filled, to put values there.
    """

    def __init__(self, landed: Callable[[torch.Tensor], None] | None = None) -> None:
        super().__init__()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._pinned: dict[int, torch.Tensor] = {}
        self._landed = landed
        self.times_pinned = 0  # page-locked memory taken
        self.copies: list[tuple[str, int]] = []  # (direction, bytes) of each copy between host and device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if is_made_of_others(func):
            with self._inside():
                return func.decompose(*args, **kwargs)
        leaves = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        fakes = [t for t in leaves if isinstance(t, FakeTensor)]
        if func is _aten.is_pinned.default:
            return self._is_pinned(args[0])
        device = kwargs.get("device")
        on_device = bool(fakes) or (device is not None and torch.device(device).type == "cuda")
        if not on_device:
            with unset_fake_temporarily():
                if func in (_aten._pin_memory.default, _aten.pin_memory.default):
                    return self._pin(args[0].clone())
                return self._pin(func(*args, **kwargs)) if kwargs.pop("pin_memory", False) else func(*args, **kwargs)
        if func is _aten.equal.default:
            return True  # a census of operators at load: without values all are taken to agree
        self._note_copy(func, args, kwargs)
        if func is _aten._to_copy.default and not fakes:
            return torch.empty(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device=device)
        if func is _aten.copy_.default and not isinstance(args[0], FakeTensor):
            if args[0].shape != args[1].shape:
                raise RuntimeError(f"copy of {tuple(args[1].shape)} to {tuple(args[0].shape)}")
            if self._landed is not None:
                with unset_fake_temporarily():
                    self._landed(args[0])
            return args[0]
        return func(*args, **kwargs)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        super().__enter__()
        try:
            yield
        finally:
            super().__exit__(None, None, None)

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        self.times_pinned += 1
        return tensor

    def _lock(self, host: torch.Tensor, device: torch.device) -> int:
        """Page-locks memory in place: beside the steps, so it is not counted among what they take."""
        self._pinned[host.untyped_storage().data_ptr()] = host
        return 0

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return not isinstance(tensor, FakeTensor) and tensor.untyped_storage().data_ptr() in self._pinned

    def _note_copy(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if func is _aten.copy_.default:
            target, source = args[0].device.type, args[1].device.type
        elif func is _aten._to_copy.default and kwargs.get("device") is not None:
            target, source = torch.device(kwargs["device"]).type, args[0].device.type
        else:
            return
        if target != source:
            self.copies.append((f"{source} to {target}", args[0].nbytes))

    def __enter__(self) -> Self:
        self._patches = ExitStack()
        for owner, name, value in _PATCHES:
            self._patches.enter_context(patch.object(owner, name, value))
        self._patches.enter_context(patch.object(host_memory, "_lock", self._lock))
        self._patches.enter_context(self._fake)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()
        self._pinned.clear()


def _no_kernels(programs: Sequence[Program], *_: Any) -> None:
    """Operators run on their references, of which shapes and waits are known."""
    loading._missing[programs[0].op] = "a fake GPU runs no kernels"


_PATCHES: tuple[tuple[Any, str, Any], ...] = (
    (torch.cuda, "Event", FakeEvent),
    (torch.cuda, "device", lambda _device: nullcontext()),
    (loading, "load", _no_kernels),
    (graphs, "recorder_for", lambda _device: FakeRecorder()),
    (CudaPlatform, "count", staticmethod(lambda: 1)),
    (CudaPlatform, "describe", lambda _self: "a fake GPU"),
    (CudaPlatform, "prepare", lambda _self, _threads, _invariant: None),
    (CudaPlatform, "memory_total", lambda _self: 8 << 30),
    (CudaPlatform, "memory_available", lambda _self: 8 << 30),
    (CudaPlatform, "synchronize", lambda _self: None),
)


def ones_land(host: torch.Tensor) -> None:
    """What a copy of sampled tokens, or of how many of them count, ends with: 1 is good as either."""
    if host.dtype == torch.int32:
        host.fill_(1)


@contextmanager
def watched_cuda(kind: str, landed: Callable[[torch.Tensor], None] | None = None) -> Iterator[None]:
    """A device called "cuda" whose waits are told from operations: of this module if ``kind`` is "fake", else the machine's."""
    configure(debug=True)
    try:
        with FakeCuda(landed) if kind == "fake" else nullcontext():
            yield
    finally:
        configure(debug=False)


class Operations(TorchDispatchMode):
    """Counts operations that are more than another view of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "prim" and not func.is_view:
            self.seen[func.name()] += 1
        return func(*args, **(kwargs or {}))
