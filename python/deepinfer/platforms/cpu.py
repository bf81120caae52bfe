"""Running on the host's processor."""

from __future__ import annotations

import os
import platform as host
from pathlib import Path

import torch

from deepinfer.platforms.targets import set_default_target

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_VECTOR = ("sse", "ssse", "avx", "fma", "f16c", "amx", "asimd", "sve", "sme", "bf16", "i8mm", "fphp")
_CGROUP_USED = ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes")


class CpuPlatform:
    """The processor: plain memory, no pinning, bf16 by default only where the processor multiplies it natively."""

    name = "cpu"
    pinned = False

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.default_dtype = torch.bfloat16 if has_fast_bf16() else torch.float32

    @property
    def arithmetic(self) -> str:
        """See `Platform.arithmetic`: libraries choose their kernels by maker and instruction sets."""
        vector = sorted(flag for flag in _cpu_flags() if flag.startswith(_VECTOR))
        return f"torch {torch.__version__} {_cpu_maker()} {torch.backends.cpu.get_cpu_capability()} {' '.join(vector)}"

    def describe(self) -> str:
        """Processor, cores and memory in one line."""
        return f"{processor_name()}, {os.cpu_count()} cores, {self.memory_total() / 2**30:.1f} GiB"

    def prepare(self, num_threads: int | None, batch_invariant: bool = True) -> None:
        """Fixes the thread count: a row's bits may only depend on it where an operator splits a row, which ours do not. Libraries have
        nothing to be held to here."""
        del batch_invariant
        set_default_target(self.kernel_target)
        if num_threads is not None and num_threads != torch.get_num_threads():
            torch.set_num_threads(num_threads)

    def memory_total(self) -> int:
        """Physical memory, or the control group's limit if that is smaller."""
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 8 << 30
        return min(physical, *[v for v in map(_read_int, _CGROUP_LIMITS) if v], physical)

    def memory_available(self) -> int:
        """Memory that can be used without swapping, within the control group's limit."""
        free = self.memory_total()
        try:
            for line in Path("/proc/meminfo").read_text().splitlines():
                if line.startswith("MemAvailable:"):
                    free = int(line.split()[1]) * 1024
        except OSError:
            free //= 2  # not Linux: assume that half is in use
        for limit, used in zip(map(_read_int, _CGROUP_LIMITS), map(_read_int, _CGROUP_USED), strict=True):
            if limit and used:
                free = min(free, max(limit - used, 0))
        return free

    @property
    def kernel_target(self) -> dict[str, str]:
        """C source."""
        return {"kind": "c"}

    def stream_handle(self) -> int:
        """No stream."""
        return 0

    def synchronize(self) -> None:
        """Nothing to wait for."""


def has_fast_bf16() -> bool:
    """Whether the processor has bf16 dot products (AVX512-BF16, AMX, or Arm's BF16); elsewhere float32 is faster."""
    flags = _cpu_flags()
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & flags)


def processor_name() -> str:
    """The processor's own name, where the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return host.processor() or host.machine()


def _cpu_maker() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("vendor_id", "CPU implementer")):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return host.machine()


def _cpu_flags() -> frozenset[str]:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


def _read_int(path: str) -> int:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):  # absent, or "max"
        return 0
