"""CUDA source → machine code, by NVRTC; needs no GPU and no driver."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from deepinfer.errors import KernelBuildError
from deepinfer.scratch import ScratchFolder

_HEADERS = re.compile(r"^#include <(tl_templates/[\w/.]+)>$", re.MULTILINE)
_HEADERS_HEAP = 512 << 20  # bytes of address space for the headers that NVRTC keeps: its own 256 MB are too few for warpgroup products
_HEADERS_ROOM = 2 << 30
"""Free bytes of a disk below which no headers are kept: NVRTC maps their files, and a full disk would end the process. Others may keep
theirs at the same time, some 200 MB for a set of headers."""
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


def _packages(name: str) -> list[Path]:
    """Folders of the package ``name``, which is not imported; none if it is not installed."""
    spec = importlib.util.find_spec(name)
    return [Path(p) for p in (spec.submodule_search_locations or ())] if spec is not None else []


@cache
def _include_options() -> tuple[str, ...]:
    folders = [root / "cu13" / "include" for root in _packages("nvidia")]  # packages of one name may lie in several places
    headers = next((f for f in folders if (f / "cuda_runtime.h").exists()), None)
    if headers is None:
        raise KernelBuildError("the headers of CUDA 13 (nvidia-cuda-runtime) are not installed; `pip install 'deepinfer[cuda]'`")
    library = next((f / "cccl" for f in folders if (f / "cccl" / "cuda" / "std" / "utility").exists()), None)
    if library is None:
        raise KernelBuildError("the headers of CUDA's C++ library (nvidia-cuda-cccl) are not installed; `pip install 'deepinfer[cuda]'`")
    templates = _packages("tilelang")
    if not templates:
        raise KernelBuildError("the headers of TileLang are not installed; `pip install 'deepinfer[cuda]'`")
    places = [headers, library.parent, library, templates[0] / "src", templates[0] / "3rdparty" / "cutlass" / "include"]
    return tuple(f"-I{p}" for p in places)


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()  # the library itself is looked for at the first call
        nvrtc.nvrtcSetPCHHeapSize(_HEADERS_HEAP)
    except (ImportError, RuntimeError):
        raise KernelBuildError("NVRTC is not installed; `pip install 'deepinfer[cuda]'`") from None
    return nvrtc


_headers: ScratchFolder | None = None


def _headers_options() -> list[str]:
    """Has NVRTC keep the headers it has read, about a gigabyte, until this process ends: left to itself it leaves them there. Empty
    where there is no place or room for them: then they are read each time."""
    global _headers
    if _headers is None or not _headers.is_there:  # NVRTC refuses a folder that has gone
        if _headers is not None:
            _headers.remove()
        _headers = ScratchFolder("build")
        atexit.register(_headers.remove)
    return ["-pch", f"--pch-dir={_headers.path}"] if _headers.room() >= _HEADERS_ROOM else []


@cache
def compiler() -> str:
    """The compiler's name and version. Raises ``KernelBuildError`` if there is none."""
    nvrtc = _nvrtc()
    major, minor = nvrtc.nvrtcVersion()[1:]
    return f"NVRTC {major}.{minor}"


def compile_source(source: str, name: str, arch: str) -> tuple[bytes, Resources]:
    """Machine code (ELF) of ``source`` and what it takes. Products and sums are not contracted: a formula has the same bits in every
    kernel. Raises ``KernelBuildError`` with the first line of the compiler's complaint.

    Most of the code's bytes are names of constants in the headers, which the compiler keeps although nothing uses them; they compress
    well. The headers are read once a process (``-pch``) if the folder for temporary files has room, which changes no bit of the code.
    """
    nvrtc = _nvrtc()
    options = [
        f"--gpu-architecture={arch}", "-default-device", "--fmad=false", "--std=c++17", "--ptxas-options=-v", *_include_options(),
    ]  # fmt: skip
    headers = ["tl_templates/cuda/nvrtc_std.h", *_HEADERS.findall(source)]  # first of all: what comes before them is read each time
    text = "".join(f"#include <{header}>\n" for header in headers) + source
    if keeping := _headers_options():
        with contextlib.suppress(KernelBuildError):  # a limit or a quota may leave them less room than the disk has
            return _compiled(nvrtc, text, [*options, *keeping], name, arch)
    return _compiled(nvrtc, text, options, name, arch)


def _compiled(nvrtc: Any, text: str, options: Sequence[str], name: str, arch: str) -> tuple[bytes, Resources]:
    program = _checked(nvrtc, nvrtc.nvrtcCreateProgram(text.encode(), b"kernel", 0, [], []))
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
    used, spills, static = _USED.findall(log), _SPILLS.findall(log), _STATIC.findall(log)
    if not used or not spills:
        raise KernelBuildError(f"NVRTC does not say what the kernel uses: {log[:200]!r}")
    # One line each for the kernel and for every function that is called and not inlined.
    stack, stores, loads = ([int(line[i]) for line in spills] for i in range(3))
    return Resources(max(map(int, used)), max(stack), sum(stores), sum(loads), max(map(int, static), default=0))
