"""TileLang function → CUDA source and what a launch must know; or a callable of the CPU target."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from deepinfer.errors import KernelBuildError

from .dialect import Dialect
from .program import TILELANG, Program

_PASSES = {"tl.disable_warp_specialized": True}
_SIGNATURE = re.compile(r'extern "C" __global__ void __launch_bounds__\((\d+)(?:, *\d+)?\) (\w+)\((.*?)\) \{', re.DOTALL)
_SCALARS = {"int": "i32", "float": "f32", "int64_t": "i64", "unsigned int": "u32"}


@dataclass(frozen=True)
class Lowered:
    """CUDA source of one kernel.

    ``args``: (name, kind) of what a launch is given, in the order of the factory's signature, numbers of dynamic shapes behind them as
    they first occur in it, all without what the kernel does not use; kind
    ``ptr``, ``i32``, ``i64``, ``u32`` or ``f32``. ``places``: index among them of each argument of the compiled kernel, whose order is the
    compiler's own. ``threads`` of a block; ``shared`` bytes of dynamic shared memory.
    """

    source: str
    entry: str
    args: tuple[tuple[str, str], ...]
    places: tuple[int, ...]
    threads: int
    shared: int


def check_tilelang() -> None:
    """Raises ``KernelBuildError`` unless the one version of TileLang is installed that kernels are lowered with."""
    try:
        found = version("tilelang")
    except PackageNotFoundError:
        raise KernelBuildError("TileLang is not installed; `pip install 'deepinfer[cuda]'`") from None
    if found != TILELANG:
        raise KernelBuildError(f"kernels are lowered with TileLang {TILELANG}, found {found}; `pip install 'deepinfer[cuda]'`")


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps TileLang from writing a factory's whole text to stderr when it fails: the error says what is wrong."""
    log = logging.getLogger("tilelang")
    before = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(before)


def lower(program: Program, arch: str) -> Lowered:
    """CUDA source of ``program`` for ``arch``; needs no GPU. Raises ``KernelBuildError``."""
    check_tilelang()
    import tilelang
    from tilelang import tvm

    try:
        with (
            quiet(),
            tvm.transform.PassContext(config={**_PASSES, **dict(program.passes)}),
            tvm.target.Target({"kind": "cuda", "arch": arch}) as target,
        ):
            function = program.build(Dialect())
            artifact = tilelang.lower(function, target=target)
    except Exception as e:  # of any kind: TileLang raises its own, TVM's and Python's
        raise KernelBuildError(f"{program.name} cannot be lowered for {arch}: {last_line(e)}") from e
    source = str(artifact.kernel_source)
    found = _SIGNATURE.findall(source)
    if len(found) != 1:
        raise KernelBuildError(f"{program.name} gives {len(found)} kernels, wanted one")
    threads, entry, parameters = found[0]
    attributes = {str(name.name_hint): device.attrs for name, device in artifact.device_mod.functions.items()}[entry]
    if any("CUtensorMap" in p for p in parameters.split(",")):
        raise KernelBuildError(f"{program.name} wants tensor maps made on the host, which are not supported: copy with disable_tma=True")
    shared = int(attributes["dyn_shared_memory_buf"]) if "dyn_shared_memory_buf" in attributes else 0
    taken = [_argument(p) for p in parameters.split(",")]
    buffers = [(v, function.buffer_map.get(v, None)) for v in function.params]
    declared = [str(v.name if buffer is None else buffer.name) for v, buffer in buffers]
    declared += [str(n.name) for _, buffer in buffers if buffer is not None for n in buffer.shape if isinstance(n, tvm.tirx.Var)]
    kinds = dict(taken)
    names = [n for n in dict.fromkeys(declared) if n in kinds]
    if len(names) != len(taken):
        raise KernelBuildError(f"{program.name} takes something that its signature does not name: {sorted(kinds.keys() - set(names))}")
    return Lowered(source, entry, tuple((n, kinds[n]) for n in names), tuple(names.index(n) for n, _ in taken), int(threads), shared)


def _argument(parameter: str) -> tuple[str, str]:
    kind, name = parameter.strip().rsplit(" ", 1)
    if "*" in kind:
        return name, "ptr"
    return name, _SCALARS[kind.replace("const ", "").strip()]


def last_line(error: BaseException) -> str:
    """Kind and last line of what TileLang raised, which holds its reason."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1].strip() if lines else ''}"


def on_cpu(program: Program) -> Callable[..., Any]:
    """The same kernel on TileLang's target ``c``: called with CPU tensors and scalars in the order of its signature. For tests only:
    it is slow, bfloat16 tensors are float32 there. Needs a C++ compiler; raises ``KernelBuildError``."""
    check_tilelang()
    import tilelang

    try:
        with quiet():
            return tilelang.compile(
                program.build(Dialect(cpu=True)), target="c", execution_backend="cython", pass_configs=dict(program.passes) or None
            )
    except Exception as e:
        raise KernelBuildError(f"{program.name} cannot be compiled for the CPU: {last_line(e)}") from e
