"""What the tests of GPU kernels share: the places an operator is tried in, and what is read from its CUDA source.

An operator is tried as its torch reference, as its kernel on TileLang's CPU target (``c``) and on a GPU. On ``c`` bfloat16 is float32.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer.kernels.toolchain import SM90A, KernelStore, Program
from deepinfer.kernels.toolchain.lowering import Lowered, lower, on_cpu
from deepinfer.kernels.toolchain.nvrtc import compile_source

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("tilelang") is None or importlib.util.find_spec("cuda") is None,
    reason="kernels are compiled by TileLang and NVRTC: pip install 'deepinfer[cuda]'",
)

PLACES = ["reference", "c", pytest.param("cuda", marks=pytest.mark.gpu)]
KERNEL_PLACES = PLACES[1:]
DTYPES = [torch.bfloat16, torch.float16]

ONE_ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
"""Largest relative error of rounding once to a type; bfloat16 with room, for its error is that of the last step alone."""


def need_tilelang() -> None:
    """Skips the test where kernels cannot be lowered."""
    pytest.importorskip("tilelang", reason="kernels are lowered by TileLang: pip install 'deepinfer[cuda]'")


def device_of(place: str) -> torch.device:
    """Where the tensors of a place lie."""
    return torch.device("cuda" if place == "cuda" else "cpu")


def kept_as(place: str, dtype: torch.dtype) -> torch.dtype:
    """The type that tensors of ``dtype`` have in a place."""
    return torch.float32 if place == "c" and dtype == torch.bfloat16 else dtype


@cache
def cpu_kernel(program: Program) -> Callable[..., Any]:
    """``program`` on the CPU target, compiled once in a run."""
    need_tilelang()
    return on_cpu(program)


class OnCpu:
    """A kernel of the CPU target, launched as one on a GPU is; compiled when first launched."""

    def __init__(self, program: Program) -> None:
        self._program = program

    def launch(self, grid: tuple[int, ...], *args: torch.Tensor | int | float) -> None:
        """Launches. ``args`` are those of the GPU's kernel: without what it does not read, and with numbers of dynamic shapes, which
        tensors tell here. 8-bit floats are given as bytes."""
        args = tuple(a.view(torch.uint8) if isinstance(a, torch.Tensor) and a.dtype == torch.float8_e4m3fn else a for a in args)
        call = cpu_kernel(self._program)
        function = call.prim_func  # type: ignore[attr-defined]
        named: dict[str, Any] = dict(zip([name for name, _ in lowered(self._program).args], args, strict=True))
        given, sizes = [], {}
        for parameter in function.params:
            if parameter not in function.buffer_map:
                given.append(named.pop(parameter.name, 0))
                continue
            buffer = function.buffer_map[parameter]
            fixed = [int(x) if hasattr(x, "value") else -1 for x in buffer.shape]
            tensor = named.pop(buffer.name) if buffer.name in named else torch.empty(fixed, dtype=getattr(torch, str(buffer.dtype)))
            if fixed.count(-1) <= 1:  # a launch takes the memory, whatever its shape is called
                tensor = tensor.view(fixed)
            sizes |= {x.name: tensor.shape[k] for k, x in enumerate(buffer.shape) if hasattr(x, "name")}
            given.append(tensor)
        assert all(sizes.get(name, number) == number for name, number in named.items())
        call(*given)


def kernels_at(place: str, programs: list[Program]) -> list[OnCpu] | None:
    """What an operator takes as ``kernels``: stand-ins on the CPU target; on a GPU it loads its own."""
    return [OnCpu(p) for p in programs] if place == "c" else None


@cache
def lowered(program: Program) -> Lowered:
    """CUDA source of ``program``, made once in a run."""
    need_tilelang()
    return lower(program, SM90A)


def random_rows(*shape: int, place: str = "reference", dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """The same numbers in every place: of ``dtype``, then kept as that place keeps them."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return x.to(device=device_of(place), dtype=kept_as(place, dtype))


def check_machine_code(program: Program, folder: Path, blocks: int = 2) -> None:
    """``program`` becomes machine code for the GPU that does not spill and leaves room for ``blocks`` a multiprocessor, and a second start
    finds it."""
    need_tilelang()
    pytest.importorskip("cuda.bindings", reason="kernels are compiled by NVRTC: pip install 'deepinfer[cuda]'")
    store = KernelStore(folder)
    built = store.build(program)
    assert built.code[:4] == b"\x7fELF"
    assert built.resources.spill_stores == built.resources.spill_loads == built.resources.stack == 0
    assert built.resources.registers * built.threads <= 65536 // blocks, f"{blocks} blocks at a time on a multiprocessor"
    assert store.find(program) == built


def read_before_waiting(program: Program, late: bool = False) -> set[str]:
    """Parameters that ``program`` names or copies before it waits for the kernel before. Fails unless it lets the next one start first
    (``late``: not before it has waited) and waits."""
    found = lowered(program)
    body = found.source[found.source.rindex(f"{found.entry}(") :]
    head, body = body.split("{", 1)
    assert "__restrict__" not in head, "a read through such a pointer may move over the wait"
    before, behind = body.split("cudaGridDependencySynchronize();")
    assert [part.count("cudaTriggerProgrammaticLaunchCompletion();") for part in (before, behind)] == [not late, late]
    copied = set(re.findall(r"\btma_\w+\((\w+)_desc\b", before))
    return copied | {name for name, kind in found.args if kind == "ptr" and re.search(rf"(?<![.\w]){name}\b", before)}


def narrowest_access(program: Program, name: str) -> int:
    """Bytes of the narrowest access to parameter ``name`` in the CUDA source of ``program``."""
    sizes = {"float4": 16, "uint4": 16, "float2": 8, "uint2": 8, "uint1": 4}
    found = lowered(program)
    body = found.source[found.source.rindex("__launch_bounds__") :].split("{", 1)[1]
    uses = re.findall(rf"(?:\*\((\w+)\*\)\()?(?<![.\w]){name}\b", body)
    assert uses, f"{name} is not used"
    return min(sizes.get(kind, 1) for kind in uses)


def machine_accesses(program: Program) -> dict[str, list[int]]:
    """Bits of a thread's reads (``LDG``) and writes (``STG``) of global memory in the machine code of ``program``, ascending. What the
    source says is not enough: the compiler may cut wide accesses into narrow ones."""
    disassembler = _disassembler()
    if disassembler is None:
        pytest.skip("no nvdisasm here: it comes with Triton or CUDA")
    found = lowered(program)
    code, resources = compile_source(found.source, program.name, SM90A)
    assert resources.spill_stores == resources.spill_loads == 0
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        text = subprocess.run([disassembler, "-c", file.name], capture_output=True, text=True, check=True).stdout
    widths: dict[str, list[int]] = {"LDG": [], "STG": []}
    for kind, suffixes in re.findall(r"\b(LDG|STG)((?:\.\w+)*)", text):
        parts = suffixes.split(".")
        assert "CONSTANT" not in parts, "such a read may move over the wait"
        widths[kind].append(next((bits for bits in (128, 64, 16, 8) if {str(bits), f"U{bits}", f"S{bits}"} & set(parts)), 32))
    return {kind: sorted(bits) for kind, bits in widths.items()}


def _disassembler() -> str | None:
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        own = Path(triton.origin).parent / "backends/nvidia/bin/nvdisasm"
        if own.exists():
            return str(own)
    return shutil.which("nvdisasm")


def replayed(step: Callable[[], None]) -> Callable[[], None]:
    """``step`` captured in a CUDA graph after one run; call the answer to replay it."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
