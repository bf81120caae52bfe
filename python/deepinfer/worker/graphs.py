"""Recording work of a GPU once and replaying it with one launch.

Owns: CUDA's graphs, their stream and their memory. Never touches: what is recorded, and when it is replayed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Protocol, TypeVar

import torch

from deepinfer.kernels.toolchain.driver import launch_graph

Work = Callable[[], None]
Replay = Callable[[], None]


class Recorder(Protocol):
    """What makes replays. Nothing else runs on the device meanwhile."""

    def recording(self) -> AbstractContextManager[None]:
        """A context around all calls of :meth:`record`."""

    def record(self, work: Work) -> Replay:
        """Runs ``work`` once and gives what runs it again, on the current stream: the same operations on the same memory."""


K = TypeVar("K")


def record_all(recorder: Recorder, work: Mapping[K, Work], progress: Callable[[int, int], None] | None) -> dict[K, Replay]:
    """A replay for each work, recorded in their order. ``progress``: called with (recorded, in all)."""
    tell = progress or (lambda done, total: None)
    replays: dict[K, Replay] = {}
    with recorder.recording():
        for done, (key, one) in enumerate(work.items()):
            tell(done, len(work))
            replays[key] = recorder.record(one)
    tell(len(work), len(work))
    return replays


class CudaRecorder:
    """CUDA graphs of one device, in one memory pool: they are replayed one at a time, so what one leaves there the next may overwrite."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """On a stream of its own, which is what CUDA records; the streams wait for each other at both ends.

        Garbage is collected before and not meanwhile: freeing what another stream uses asks the device, which ends a recording.
        """
        collects = gc.isenabled()
        gc.collect()
        gc.disable()
        outer, stream = torch.cuda.current_stream(self._device), torch.cuda.Stream(self._device)
        torch.cuda.synchronize(self._device)
        try:
            with torch.cuda.stream(stream):
                yield
            outer.wait_stream(stream)
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()  # what the first runs took on that stream
        finally:
            if collects:
                gc.enable()

    def record(self, work: Work) -> Replay:
        """See :class:`Recorder`. Recording does not run it, so ``work`` is called twice: kernels and handles are made the first time."""
        work()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(self._pool, capture_error_mode="thread_local")
        try:
            work()
        except BaseException:
            with suppress(Exception):  # the stream must leave its recording; that it failed is known
                graph.capture_end()
            raise
        graph.capture_end()
        self._graphs.append(graph)
        return self._launcher(graph)

    def _launcher(self, graph: torch.cuda.CUDAGraph) -> Replay:
        """Some versions of torch fill a generator's state ahead of each replay: two more launches, for numbers that nothing here draws."""
        if not hasattr(graph, "raw_cuda_graph_exec"):
            return graph.replay
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        instance, stream_of = graph.raw_cuda_graph_exec(), torch._C._cuda_getCurrentRawStream
        return lambda: launch_graph(instance, stream_of(index))


def can_record(device: torch.device) -> bool:
    """Whether work of a device can be recorded."""
    return device.type == "cuda"


def recorder_for(device: torch.device) -> Recorder:
    """What records on a device that can."""
    return CudaRecorder(device)
