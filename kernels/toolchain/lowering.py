"""TileLang function → CUDA source and what a launch must know; or a callable of the CPU target."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from deepinfer.errors import KernelBuildError

from .dialect import Dialect
from .program import TILELANG, Program

_PASSES = {"tl.disable_warp_specialized": True}
_SIGNATURE = re.compile(r'extern "C" __global__ void __launch_bounds__\((\d+)(?:, *\d+)?\) (\w+)\((.*?)\) \{', re.DOTALL)
_ACCUMULATORS = re.compile(r"^\s*float (\w+)\[(\d+)\];", re.MULTILINE)
_FENCES = re.compile(r"(warpgroup_fence_operand\(reinterpret_cast<float\*>\((\w+) \+ 0\), )(\d+)\)")
_SCALARS = {"int": "i32", "float": "f32", "int64_t": "i64", "unsigned int": "u32"}


@dataclass(frozen=True)
class TensorMap:
    """What the GPU's copy engine is told of a tensor: made from its address at a launch and passed to the kernel as an argument.

    Attributes:
        tensor: index among ``Lowered.args`` of the tensor.
        dtype: the driver's number for the type of its elements (``CUtensorMapDataType``).
        extents: of its axes, the innermost first: numbers, or the name of a number in ``Lowered.args``.
        strides: bytes from one element to the next along each axis but the innermost; as ``extents``.
        box: elements along each axis that one copy moves.
        swizzle, promotion: the driver's numbers for how a box lies in shared memory and for what is fetched into L2 along with it.
    """

    tensor: int
    dtype: int
    extents: tuple[int | str, ...]
    strides: tuple[int | str, ...]
    box: tuple[int, ...]
    swizzle: int
    promotion: int


@dataclass(frozen=True)
class Lowered:
    """CUDA source of one kernel.

    ``args``: (name, kind) of what a launch is given, in the order of the factory's signature, numbers of dynamic shapes behind them as
    they first occur in it, all without what the kernel does not use; kind
    ``ptr``, ``i32``, ``i64``, ``u32`` or ``f32``. ``maps``: tensor maps that a launch makes from them. ``places``: index among both, maps
    last, of each argument of the compiled kernel, whose order is the compiler's own. ``threads`` of a block; ``shared`` bytes of dynamic
    shared memory; ``cluster`` blocks along x run side by side and reach each other's.
    """

    source: str
    entry: str
    args: tuple[tuple[str, str], ...]
    places: tuple[int, ...]
    threads: int
    shared: int
    maps: tuple[TensorMap, ...] = ()
    cluster: int = 1


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
    source = _fenced(str(artifact.kernel_source))
    found = _SIGNATURE.findall(source)
    if len(found) != 1:
        raise KernelBuildError(f"{program.name} gives {len(found)} kernels, wanted one")
    threads, entry, parameters = found[0]
    attributes = {str(name.name_hint): device.attrs for name, device in artifact.device_mod.functions.items()}[entry]
    shared = int(attributes["dyn_shared_memory_buf"]) if "dyn_shared_memory_buf" in attributes else 0
    cluster, *others = (int(n) for n in attributes["cluster_dims"]) if "cluster_dims" in attributes else (1,)
    if any(n != 1 for n in others):
        raise KernelBuildError(f"{program.name} wants clusters along another axis than x")
    taken = [_argument(p) for p in parameters.split(",")]
    described = _described(artifact.host_mod, program.name) if any(kind == "map" for _, kind in taken) else {}
    buffers = [(v, function.buffer_map.get(v, None)) for v in function.params]
    kinds = {name: kind for name, kind in taken if kind != "map"}
    for tensor, numbers in described.values():
        kinds |= {tensor: "ptr"} | {n: "i32" for n in (*numbers.extents, *numbers.strides) if isinstance(n, str) and n not in kinds}
    declared = [str(v.name if buffer is None else buffer.name) for v, buffer in buffers]
    declared += [str(n.name) for _, buffer in buffers if buffer is not None for n in buffer.shape if isinstance(n, tvm.tirx.Var)]
    names = [n for n in dict.fromkeys(declared) if n in kinds]
    if len(names) != len(kinds) or any(kind == "map" and name not in described for name, kind in taken):
        raise KernelBuildError(f"{program.name} takes something that its signature does not name: {sorted(kinds.keys() - set(names))}")
    order = [*names, *(name for name, kind in taken if kind == "map")]
    maps = tuple(replace(described[name][1], tensor=names.index(described[name][0])) for name in order[len(names) :])
    places = tuple(order.index(n) for n, _ in taken)
    return Lowered(source, entry, tuple((n, kinds[n]) for n in names), places, int(threads), shared, maps, cluster)


def _fenced(source: str) -> str:
    """``source`` with fences over as many registers as an accumulator has: TileLang counts those of all warpgroups of a block."""
    sizes = dict(_ACCUMULATORS.findall(source))
    return _FENCES.sub(lambda found: f"{found[1]}{min(int(found[3]), int(sizes[found[2]]))})", source)


def _argument(parameter: str) -> tuple[str, str]:
    kind, name = parameter.strip().rsplit(" ", 1)
    if "CUtensorMap" in kind:
        return name, "map"
    if "*" in kind:
        return name, "ptr"
    return name, _SCALARS[kind.replace("const ", "").strip()]


def _described(host: Any, program: str) -> dict[str, tuple[str, TensorMap]]:
    """Of each tensor map that the host is to make: the tensor's name and the map."""
    from tilelang import tvm

    def number(value: Any) -> int | str:
        if isinstance(value, tvm.tirx.IntImm | int):
            return int(value)
        while isinstance(value, tvm.tirx.Cast):
            value = value.value
        if isinstance(value, tvm.tirx.Var):
            return str(value.name)
        raise KernelBuildError(f"{program} wants a tensor map of a size that is neither a number nor an argument: {value}")

    found: dict[str, tuple[str, TensorMap]] = {}
    for _, function in host.functions.items():
        for variable, given in (function.attrs.get("tma_descriptor_args") or {}).items():
            kind, _, dtype, rank, tensor, *rest = given
            axes = int(rank)
            extents, strides, box, steps = ([number(n) for n in rest[i * axes : (i + 1) * axes]] for i in range(4))
            interleave, swizzle, promotion, fill = (int(n) for n in rest[4 * axes :])
            if kind != "__tvm_tensormap_create_tiled" or interleave or fill or any(s != 1 for s in steps):
                raise KernelBuildError(f"{program} wants a tensor map of a kind that launches do not make")
            sides = tuple(int(n) for n in box)
            made = TensorMap(0, int(dtype), tuple(extents), tuple(strides[1:]), sides, swizzle, promotion)
            found[str(variable.name)] = (str(tensor.name), made)
    return found


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
