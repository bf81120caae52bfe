"""What launches tell the copy engine: maps read from what TileLang wants, made from tensors and numbers, kept while they hold."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from deepinfer.errors import KernelBuildError
from deepinfer.kernels.linear.many_rows import Many
from deepinfer.kernels.toolchain import Program, StoredKernel, driver, lowering
from deepinfer.kernels.toolchain.lowering import TensorMap
from deepinfer.kernels.toolchain.nvrtc import Resources
from kernel_kit import lowered, needs_compiler

X_MAP = TensorMap(0, 9, (576, "rows"), (1152,), (64, 64), 3, 2)
NAMES = ["x", "weight", "out", "rows"]


class Driver:
    """The driver's library: a map is the number of maps made so far, in every byte."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.made = code, []  # type: ignore[var-annotated]

    def cuTensorMapEncodeTiled(self, place: Any, dtype: int, rank: int, tensor: Any, *rest: Any) -> int:
        extents, strides, box, steps, interleave, swizzle, promotion, fill = rest
        assert place.value % 64 == 0 and list(steps) == [1] * rank and interleave == fill == 0
        self.made.append((tensor.value, dtype, tuple(extents), tuple(strides), tuple(box), swizzle, promotion))
        ctypes.memset(place.value, len(self.made), 128)
        return self.code

    def cuGetErrorName(self, code: int, name: Any) -> None:
        ctypes.cast(name, ctypes.POINTER(ctypes.c_char_p))[0] = b"CUDA_ERROR_INVALID_VALUE"


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(driver, "_library", lambda: made)
    return made


def values(x: int, rows: int) -> list[Any]:
    return [ctypes.c_uint64(x), ctypes.c_uint64(1), ctypes.c_uint64(2), ctypes.c_int32(rows)]


def test_a_map_is_made_once_for_a_tensor_and_a_size(library: Driver) -> None:
    one = driver._Map(X_MAP, NAMES)
    for x, rows, nth in ((4096, 7, 1), (4096, 7, 1), (8192, 7, 2), (4096, 8, 3), (4096, 7, 1), (8192, 7, 2)):
        one.fill(values(x, rows))
        assert ctypes.string_at(one.address, 128) == bytes([nth]) * 128 and one.address % 64 == 0
    assert [(m[0], m[2]) for m in library.made] == [(4096, (576, 7)), (8192, (576, 7)), (4096, (576, 8))]
    assert {m[1:2] + m[3:] for m in library.made} == {(9, (1152,), (64, 64), 3, 2)}


def test_what_is_kept_of_maps_has_a_bound(library: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_MOST_MAPS", 2)
    one = driver._Map(X_MAP, NAMES)
    for x in (1, 2, 3, 1, 3):
        one.fill(values(x, 7))
        assert len(one._made) <= 2
    assert [m[0] for m in library.made] == [1, 2, 3, 1]


def test_a_map_that_the_driver_refuses_is_an_error(library: Driver) -> None:
    library.code = 1
    one = driver._Map(X_MAP, NAMES)
    for _ in range(2):  # a map that failed is not taken for made
        with pytest.raises(KernelBuildError, match="copy engine: CUDA_ERROR_INVALID_VALUE"):
            one.fill(values(4096, 7))
    assert len(library.made) == 2


def test_a_stored_kernel_keeps_its_maps_and_its_cluster() -> None:
    kernel = StoredKernel("a/b[]", "sm_90a", "0", "", "f", (("x", "ptr"),), (1, 0), 96, 64, Resources(32, 0, 0, 0, 0), b"code", (X_MAP,), 2)
    assert StoredKernel.unpacked(kernel.packed()) == kernel


@needs_compiler
def test_maps_are_read_from_what_tilelang_wants() -> None:
    """Rows are a number of the launch, all else follows from the constants; the compiled kernel's own order is in ``places``."""
    found = lowered(Many(64, 32, 64, 9, 9, cluster=2).program(576, 960, "bfloat16"))
    assert found.args == (("x", "ptr"), ("weight", "ptr"), ("out", "ptr"), ("rows", "i32")) and found.cluster == 2
    assert set(found.maps) == {X_MAP, TensorMap(1, 9, (576, 960), (1152,), (64, 32), 3, 2)}
    head = found.source[found.source.rindex(f"{found.entry}(") :].split(") {")[0]
    compiled = [parameter.split()[-1].lstrip("*") for parameter in head.split("(", 1)[1].split(",")]
    maps = [f"{found.args[m.tensor][0]}_desc" for m in found.maps]
    assert [[*(n for n, _ in found.args), *maps][place] for place in found.places] == compiled


@needs_compiler
def test_clusters_stand_before_anything_is_sent_to_them() -> None:
    """A block must not write into another's memory before that one has its barriers."""
    source = lowered(Many(64, 32, 64, 3, 3, cluster=2).program(576, 960, "bfloat16")).source
    body = source[source.rindex("__launch_bounds__") :]
    assert body.index(".init(") < body.index("tl::cluster_sync();") < body.index("tma_load")
    assert "multicast" in body


@pytest.mark.parametrize("axis", [1, 2])
def test_clusters_along_another_axis_are_refused(axis: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tilelang = pytest.importorskip("tilelang")
    source = 'extern "C" __global__ void __launch_bounds__(128) f_kernel(float* x) {'
    dims = [1, 1, 1]
    dims[axis] = 2
    functions = [(SimpleNamespace(name_hint="f_kernel"), SimpleNamespace(attrs={"cluster_dims": dims}))]
    device = SimpleNamespace(functions=SimpleNamespace(items=lambda: functions))
    artifact = SimpleNamespace(kernel_source=source, device_mod=device, host_mod=None)
    monkeypatch.setattr(tilelang, "lower", lambda function, target: artifact)
    monkeypatch.setattr(Program, "build", lambda self, dialect: None)
    with pytest.raises(KernelBuildError, match="another axis than x"):
        lowering.lower(Program("a", "f"), "sm_90a")


def test_fences_are_over_the_registers_that_there_are() -> None:
    source = "  float total[56];\n  float up[8];\n tl::warpgroup_fence_operand(reinterpret_cast<float*>(%s + 0), %d);"
    assert lowering._fenced(source % ("total", 112)) == source % ("total", 56)
    assert lowering._fenced(source % ("up", 8)) == source % ("up", 8)
    assert lowering._fenced(source % ("total", 28)) == source % ("total", 28)
