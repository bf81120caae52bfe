"""Running on an NVIDIA GPU."""

from __future__ import annotations

import logging
import os

import torch

from deepinfer.errors import ConfigError
from deepinfer.platforms.targets import set_default_target

NO_WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"}
"""Variables under which cuBLAS has no room for another order of additions, and their values: the second, in KiB, is of products with a
bias, for which torch wants a share of the first."""


log = logging.getLogger("deepinfer.platforms")

_DEFAULT_WORKSPACE = 32 << 20
"""Bytes that NVIDIA recommends for cuBLAS on GPUs of compute capability 9.0 and above, and torch takes there."""


def cublas_workspace() -> int:
    """Bytes that a handle of cuBLAS is to be given for each stream; 0 where a variable of the environment says what it takes itself."""
    return 0 if os.environ.get("CUBLAS_WORKSPACE_CONFIG") else _DEFAULT_WORKSPACE


class CudaPlatform:
    """One GPU: pinned step buffers, bf16 by default, cuBLAS held to one reduction order for every row count where that is asked for."""

    name = "cuda"
    pinned = True

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)
        self.default_dtype = torch.bfloat16

    @staticmethod
    def count() -> int:
        """How many GPUs this process sees; 0 with a CPU build of torch or without a driver."""
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    @staticmethod
    def why_missing() -> str:
        """One sentence for a person whose GPU is not seen."""
        if torch.version.cuda is None:
            return "this torch is a CPU build."
        return "torch sees no usable NVIDIA driver, or CUDA_VISIBLE_DEVICES hides the GPUs."

    @property
    def arithmetic(self) -> str:
        """See `Platform.arithmetic`: libraries choose their kernels by the GPU's kind."""
        p = torch.cuda.get_device_properties(self.device)
        return f"torch {torch.__version__} {p.name} {p.major}.{p.minor}"

    def describe(self) -> str:
        """Name and memory of the GPU in one line."""
        p = torch.cuda.get_device_properties(self.device)
        return f"{p.name}, compute capability {p.major}.{p.minor}, {p.total_memory / 2**30:.1f} GiB"

    def prepare(self, num_threads: int | None, batch_invariant: bool = True) -> None:
        """Zero cuBLAS workspace (no split-K, so a row's bits do not follow the row count), no TF32, no reduced reductions.

        Without ``batch_invariant`` cuBLAS has the workspace that it has by default, or a user's own other than none.

        Raises:
            ConfigError: CUDA has already started in this process with another workspace setting, and ``batch_invariant`` needs none.
        """
        if batch_invariant:
            self._take_workspace()
        else:
            self._leave_workspace()
        if num_threads is not None and num_threads != torch.get_num_threads():
            torch.set_num_threads(num_threads)
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.cuda.set_device(self.device)
        set_default_target(self.kernel_target)

    @staticmethod
    def _take_workspace() -> None:
        if torch.cuda.is_initialized() and any(os.environ.get(name) != value for name, value in NO_WORKSPACE.items()):
            wanted = " and ".join(f"{name}={value}" for name, value in NO_WORKSPACE.items())
            raise ConfigError(
                f"CUDA was started in this process before the engine could set {wanted}, which batch invariance needs; "
                "create the engine first, or start the process with them"
            )
        os.environ.update(NO_WORKSPACE)

    @staticmethod
    def _leave_workspace() -> None:
        for name, value in NO_WORKSPACE.items():
            if os.environ.get(name) != value:
                continue
            if torch.cuda.is_initialized():
                log.warning("CUDA was started in this process with %s=%s, so products run without workspace; some are slower", name, value)
                return
            del os.environ[name]  # of an engine before this one, in this process or the one that started it

    def memory_total(self) -> int:
        """Bytes on the card."""
        return torch.cuda.get_device_properties(self.device).total_memory

    def memory_available(self) -> int:
        """Bytes free on the card plus what torch has cached."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return free + torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)

    @property
    def kernel_target(self) -> dict[str, str]:
        """The GPU's own architecture, with the instructions that only it has."""
        major, minor = torch.cuda.get_device_capability(self.device)
        return {"kind": "cuda", "arch": f"sm_{major}{minor}{'a' if major >= 9 else ''}"}

    def stream_handle(self) -> int:
        """torch's current stream as a ``cudaStream_t``; 0 is CUDA's default stream."""
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def synchronize(self) -> None:
        """Waits for the GPU."""
        torch.cuda.synchronize(self.device)
