"""Compiled kernels on the GPU: loaded and launched through the driver's C interface.

A launch takes pointers and numbers as they are and goes to torch's current stream, so it can be captured in a CUDA graph. It checks
nothing: operators check shapes once, when they are made.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

import torch

from deepinfer.errors import KernelBuildError
from deepinfer.platforms.context import make_current

from .lowering import TensorMap
from .store import StoredKernel

_CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_PROGRAMMATIC = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PLAIN_SHARED = 48 * 1024  # a block may have so much without asking, what the kernel itself declares included

_MAP_BYTES, _MAP_ALIGNMENT = 128, 64  # of a CUtensorMap
_MOST_MAPS = 4096
"""Maps that a kernel keeps: one a layer for weights, one a buffer for what comes and goes."""

_TYPES: dict[str, Any] = {
    "ptr": ctypes.c_uint64,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "u32": ctypes.c_uint32,
    "f32": ctypes.c_float,
}


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint32 * 16)]


class _Config(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")],
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


@cache
def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as e:
        raise KernelBuildError(f"the NVIDIA driver's library cannot be loaded: {e}") from None


def _check(code: int, what: str) -> None:
    if code:
        name = ctypes.c_char_p()
        _library().cuGetErrorName(code, ctypes.byref(name))
        raise KernelBuildError(f"{what}: {(name.value or b'error').decode()} ({code})")


def launch_graph(graph: int, stream: int) -> None:
    """Launches an instantiated CUDA graph on a stream, both as the addresses that torch gives. Raises ``KernelBuildError``."""
    code = _library().cuGraphLaunch(ctypes.c_void_p(graph), ctypes.c_void_p(stream))
    if code:
        _check(code, "launching a graph")


class Launchable(Protocol):
    """What operators launch; tests put kernels of the CPU target in its place."""

    def launch(self, grid: tuple[int, ...], *args: torch.Tensor | int | float) -> None:
        """See ``Kernel.launch``."""


def raw_stream(device: torch.device) -> int:
    """The driver's handle of torch's current stream on ``device``, without making an object of it."""
    index = device.index
    return int(torch._C._cuda_getCurrentRawStream(torch.cuda.current_device() if index is None else index))


class _Map:
    """A tensor map among a kernel's arguments, made anew when the tensor's address or a size is another than before."""

    def __init__(self, described: TensorMap, names: Sequence[str]) -> None:
        rank = len(described.extents)
        self._described = described
        self._wanted = [described.tensor, *(names.index(n) for n in (*described.extents, *described.strides) if isinstance(n, str))]
        self._place = [n if isinstance(n, int) else names.index(n) for n in (*described.extents, *described.strides)]
        self._named = [isinstance(n, str) for n in (*described.extents, *described.strides)]
        self._extents, self._strides = (ctypes.c_uint64 * rank)(), (ctypes.c_uint64 * (rank - 1))()
        self._box, self._steps = (ctypes.c_uint32 * rank)(*described.box), (ctypes.c_uint32 * rank)(*[1] * rank)
        self._memory = ctypes.create_string_buffer(2 * _MAP_BYTES)
        self.address = -(-ctypes.addressof(self._memory) // _MAP_ALIGNMENT) * _MAP_ALIGNMENT
        self._made: dict[tuple[int, ...], bytes] = {}
        self._now: tuple[int, ...] = ()

    def fill(self, values: Sequence[Any]) -> None:
        """Makes it what a launch with ``values`` needs. Raises ``KernelBuildError`` if the driver has no such map."""
        key = tuple([values[i].value for i in self._wanted])
        if key == self._now:
            return
        kept = self._made.get(key)
        if kept is None:
            kept = self._encode(key[0], values)
            if len(self._made) >= _MOST_MAPS:
                self._made.clear()
            self._made[key] = kept
        ctypes.memmove(self.address, kept, _MAP_BYTES)
        self._now = key

    def _encode(self, tensor: int, values: Sequence[Any]) -> bytes:
        described, rank = self._described, len(self._extents)
        numbers = [values[place].value if named else place for place, named in zip(self._place, self._named, strict=True)]
        self._extents[:], self._strides[:] = numbers[:rank], numbers[rank:]
        code = _library().cuTensorMapEncodeTiled(
            ctypes.c_void_p(self.address), described.dtype, rank, ctypes.c_void_p(tensor), self._extents, self._strides, self._box,
            self._steps, 0, described.swizzle, described.promotion, 0,
        )  # fmt: skip
        _check(code, "describing a tensor to the copy engine")
        return ctypes.string_at(self.address, _MAP_BYTES)


class Kernel:
    """A kernel loaded on one device.

    Args:
        stored: what to load.
        device: where. Its context must have been made by torch, which ``torch.cuda.init`` and any allocation do.
        after: whether a launch may begin while the kernel before it in the stream still runs (programmatic launch); only for kernels that
            wait before they read what others write.

    Raises ``KernelBuildError`` if the driver does not take it.
    """

    __slots__ = ("_config", "_device", "_function", "_keep", "_maps", "_pointers", "_reference", "_start", "_values", "stored")

    def __init__(self, stored: StoredKernel, device: torch.device, after: bool = False) -> None:
        self.stored = stored
        self._device = device
        cuda = _library()
        with torch.cuda.device(device):
            make_current(device)
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            _check(cuda.cuModuleLoadData(ctypes.byref(module), stored.code), f"loading {stored.name}")
            _check(cuda.cuModuleGetFunction(ctypes.byref(function), module, stored.entry.encode()), f"finding {stored.entry}")
            if stored.shared_bytes > _PLAIN_SHARED:
                _check(cuda.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, stored.shared), f"shared memory of {stored.name}")
        self._function = function
        attributes = (_Attribute * 2)()
        count = 0
        for wanted, kind, value in ((after, _PROGRAMMATIC, [1]), (stored.cluster > 1, _CLUSTER, [stored.cluster, 1, 1])):
            if wanted:
                attributes[count].id = kind
                attributes[count].value[: len(value)] = value
                count += 1
        self._config = _Config(1, 1, 1, stored.threads, 1, 1, stored.shared, None, attributes, count)
        self._values = [_TYPES[kind]() for _, kind in stored.args]
        names = [name for name, _ in stored.args]
        self._maps = [_Map(described, names) for described in stored.maps]
        places = [ctypes.addressof(value) for value in self._values] + [one.address for one in self._maps]
        self._pointers = (ctypes.c_void_p * len(stored.places))(*[places[i] for i in stored.places])
        self._reference, self._start = ctypes.byref(self._config), cuda.cuLaunchKernelEx
        self._keep = (module, attributes)

    def launch(self, grid: tuple[int, ...], *args: torch.Tensor | int | float) -> None:
        """Launches ``grid`` blocks (x, y, z). ``args`` in the order of ``stored.args``: contiguous tensors of the device, or numbers."""
        config = self._config
        config.grid_x, config.grid_y, config.grid_z = (*grid, 1, 1)[:3]
        config.stream = raw_stream(self._device)
        for value, given in zip(self._values, args, strict=True):
            value.value = given.data_ptr() if isinstance(given, torch.Tensor) else given
        for one in self._maps:
            one.fill(self._values)
        code = self._start(self._reference, self._function, self._pointers, None)
        if code:
            _check(code, f"launching {self.stored.name}")
