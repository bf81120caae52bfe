"""What this machine is, read from the operating system. Imports no torch."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

# Flags that decide which CPU code torch and its libraries pick.
_CPU_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8")
_ARM_FLAGS = ("asimd", "sve", "sve2", "bf16", "i8mm")


def cpu() -> dict[str, Any]:
    """Model, core counts and the flags of interest."""
    fields: dict[str, str] = {}
    cores: set[tuple[str, str]] = set()
    package = "0"
    for line in _read("/proc/cpuinfo").splitlines():
        key, _, value = (part.strip() for part in line.partition(":"))
        fields.setdefault(key, value)
        if key == "physical id":
            package = value
        elif key == "core id":
            cores.add((package, value))
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    return {
        "model": fields.get("model name") or platform.processor() or platform.machine(),
        "machine": platform.machine(),
        "logical_cores": os.cpu_count(),
        "physical_cores": len(cores) or None,
        "usable_cores": usable_cores(),
        "flags": [f for f in (*_CPU_FLAGS, *_ARM_FLAGS) if f in flags],
        "missing_flags": [f for f in (_CPU_FLAGS if platform.machine() == "x86_64" else ()) if f not in flags],
    }


def usable_cores() -> float:
    """Cores this process may use: its affinity, cut by the container's quota."""
    usable = float(len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else float(os.cpu_count() or 1)
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").strip().partition(" ")
    if quota.isdigit() and period.isdigit():
        usable = min(usable, int(quota) / int(period))
    return usable


def memory() -> dict[str, int | None]:
    """Bytes of memory: in the machine, available now, and the container's limit."""
    info: dict[str, int] = {}
    for line in _read("/proc/meminfo").splitlines():
        key, _, value = line.partition(":")
        number = value.split()
        if number and number[0].isdigit():
            info[key] = int(number[0]) * 1024
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    return {"total": info.get("MemTotal"), "available": info.get("MemAvailable"), "limit": int(limit) if limit.isdigit() else None}


def load() -> float | None:
    """Mean number of runnable threads over the last minute, where the system tells."""
    try:
        return round(os.getloadavg()[0], 2)
    except OSError:
        return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def in_words(device: str, threads: int | None) -> str:
    """One line that stands beside a measurement: ``device`` is the device the model runs on (``cpu``, ``cuda:0``)."""
    this = cpu()
    words = f"{this['model']}, {this['usable_cores']:g} cores"
    if threads:
        words += f", {threads} torch threads"
    if device.startswith("cuda"):
        import torch

        words += f", {torch.cuda.get_device_name(torch.device(device))}"
    return words
