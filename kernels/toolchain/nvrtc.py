"""CUDA source → machine code, by NVRTC; needs no GPU and no driver."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from deepinfer.errors import KernelBuildError

_USED = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_STATIC = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class Resources:
    """What one thread and one block take: registers, bytes of local memory by kind, bytes of static shared memory."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    static_shared: int


@cache
def _include_options() -> tuple[str, ...]:
    import nvidia
    import tilelang

    roots = [Path(p) for p in nvidia.__path__]
    headers = next((r / "cu13" / "include" for r in roots if (r / "cu13" / "include" / "cuda_runtime.h").exists()), None)
    if headers is None:
        raise KernelBuildError("the headers of CUDA are not installed; `pip install 'deepinfer[cuda]'`")
    base = Path(tilelang.__path__[0])
    places = [headers, headers / "cccl", base / "src", base / "3rdparty" / "cutlass" / "include"]
    return tuple(f"-I{p}" for p in places)


def compile_source(source: str, name: str, arch: str) -> tuple[bytes, Resources]:
    """Machine code (ELF) of ``source`` and what it takes. Products and sums are not contracted: a formula has the same bits in every
    kernel. Raises ``KernelBuildError`` with the first line of the compiler's complaint."""
    try:
        from cuda.bindings import nvrtc
    except ImportError:
        raise KernelBuildError("NVRTC is not installed; `pip install 'deepinfer[cuda]'`") from None
    options = [f"--gpu-architecture={arch}", "-default-device", "--fmad=false", "--std=c++17", "--ptxas-options=-v", *_include_options()]
    text = "#include <tl_templates/cuda/nvrtc_std.h>\n" + source
    program = _checked(nvrtc, nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), 0, [], []))
    try:
        (code,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        size = _checked(nvrtc, nvrtc.nvrtcGetProgramLogSize(program))
        log = bytearray(size)
        nvrtc.nvrtcGetProgramLog(program, log)
        said = log.decode(errors="replace").strip("\0")
        if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            complaint = next((line for line in said.splitlines() if "error" in line), said.splitlines()[0] if said else str(code))
            raise KernelBuildError(f"{name} does not compile for {arch}: {complaint.strip()}")
        cubin = bytearray(_checked(nvrtc, nvrtc.nvrtcGetCUBINSize(program)))
        nvrtc.nvrtcGetCUBIN(program, cubin)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return bytes(cubin), _resources(said)


def _checked(nvrtc: Any, answer: tuple[Any, ...]) -> Any:
    code, *values = answer
    if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise KernelBuildError(f"NVRTC: {code}")
    return values[0] if values else None


def _resources(log: str) -> Resources:
    used, spills, static = _USED.search(log), _SPILLS.search(log), _STATIC.search(log)
    if used is None or spills is None:
        raise KernelBuildError(f"NVRTC does not say what the kernel uses: {log[:200]!r}")
    stack, stores, loads = (int(x) for x in spills.groups())
    return Resources(int(used[1]), stack, stores, loads, int(static[1]) if static else 0)
