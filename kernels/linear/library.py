"""cuBLAS called directly: torch's way to the same function takes 48 us of the host where its workspace is set by the environment, and 13 us
where it is not; a step of a small model has 120 of them. The library, its choice of kernels and the bits are the same.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import Any

import torch

from deepinfer.platforms.context import make_current
from deepinfer.platforms.cuda import cublas_workspace

from ..toolchain.driver import raw_stream

_TRANSPOSED, _PLAIN = 1, 0  # CUBLAS_OP_T, CUBLAS_OP_N
_TYPES = {torch.bfloat16: 14, torch.float16: 2}  # CUDA_R_16BF, CUDA_R_16F
_COMPUTE_FLOAT32 = 68  # CUBLAS_COMPUTE_32F
_DEFAULT_ALGORITHM = 99  # CUBLAS_GEMM_DEFAULT_TENSOR_OP
_EXACT_SUMS = 16  # CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION


class Library:
    """A handle of cuBLAS for one device, for all threads: they may be on different streams, of which a handle has one at a time. Its
    workspace is what ``CUBLAS_WORKSPACE_CONFIG`` says, as for torch's own, or ``workspace`` bytes a stream if that says nothing: of memory
    that torch made, since the library cannot allocate its own while a graph is recorded."""

    def __init__(self, functions: ctypes.CDLL, device: torch.device, workspace: int = 0) -> None:
        self._functions, self._device = functions, device
        self._workspace, self._workspaces = workspace, dict[int, torch.Tensor]()
        self._handle = ctypes.c_void_p()
        with torch.cuda.device(device):
            make_current(device)
            self._check(functions.cublasCreate_v2(ctypes.byref(self._handle)))
            self._check(functions.cublasSetMathMode(self._handle, _EXACT_SUMS))
        self._one, self._zero = ctypes.byref(ctypes.c_float(1.0)), ctypes.byref(ctypes.c_float(0.0))
        self._stream: int | None = None
        self._lock = threading.Lock()

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``x @ weight.T``: ``x`` ``[R, in]`` and ``weight`` ``[out, in]``, contiguous, of one 16-bit type. Raises ``RuntimeError``."""
        rows, width = x.shape
        out_features = weight.shape[0]
        out = torch.empty((rows, out_features), dtype=x.dtype, device=x.device)
        stream = raw_stream(self._device)
        kind, pointer = _TYPES[x.dtype], ctypes.c_void_p
        with self._lock:  # a call gives way to other threads
            if stream != self._stream:
                self._set_stream(stream)
            self._check(
                self._functions.cublasGemmEx(
                    self._handle, _TRANSPOSED, _PLAIN, out_features, rows, width,
                    self._one, pointer(weight.data_ptr()), kind, width, pointer(x.data_ptr()), kind, width,
                    self._zero, pointer(out.data_ptr()), kind, out_features, _COMPUTE_FLOAT32, _DEFAULT_ALGORITHM,
                )
            )  # fmt: skip
        return out

    def _set_stream(self, stream: int) -> None:
        self._check(self._functions.cublasSetStream_v2(self._handle, ctypes.c_void_p(stream)))  # and takes the workspace away
        if self._workspace:
            if stream not in self._workspaces:
                self._workspaces[stream] = torch.empty(self._workspace, dtype=torch.uint8, device=self._device)
            memory = ctypes.c_void_p(self._workspaces[stream].data_ptr())
            self._check(self._functions.cublasSetWorkspace_v2(self._handle, memory, ctypes.c_size_t(self._workspace)))
        self._stream = stream

    @staticmethod
    def _check(status: int) -> None:
        if status:
            raise RuntimeError(f"cuBLAS failed with status {status}")


@cache
def _functions() -> ctypes.CDLL | None:
    major = (torch.version.cuda or "").split(".")[0]
    try:
        found = ctypes.CDLL(f"libcublas.so.{major}")  # the one that torch has loaded
    except OSError:
        return None
    names = ("cublasCreate_v2", "cublasSetMathMode", "cublasSetStream_v2", "cublasSetWorkspace_v2", "cublasGemmEx")
    return found if all(hasattr(found, name) for name in names) else None


@cache
def library(device: torch.device) -> Library | None:
    """The library on ``device``; ``None`` where it cannot be called directly: torch's way remains."""
    functions: Any = _functions() if device.type == "cuda" else None
    try:
        return None if functions is None else Library(functions, device, cublas_workspace())
    except RuntimeError:
        return None
