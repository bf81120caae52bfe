"""The way from a kernel's source to a launch: what names it, what compiles it, what goes wrong and how that is said."""

from __future__ import annotations

import dataclasses
import logging
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from deepinfer.errors import KernelBuildError
from deepinfer.kernels.rms_norm.cuda import RmsNorm
from deepinfer.kernels.toolchain import SM90A, KernelStore, Program, StoredKernel, lowering, nvrtc, program, shape_config
from deepinfer.kernels.toolchain import store as store_module
from deepinfer.kernels.toolchain.lowering import Lowered, check_tilelang, lower
from deepinfer.kernels.toolchain.nvrtc import compile_source, compiler
from kernel_kit import needs_compiler

NORM = Program("rms_norm", "add_rms_norm", shape_config(hidden=576, steps=1, threads=160, dtype="bfloat16"), ("toolchain/device_code.py",))

COPY = """
extern "C" __global__ void __launch_bounds__(128) copy_kernel(float* __restrict__ y, const float* __restrict__ x, int n) {
  if (threadIdx.x < n) y[threadIdx.x] = x[threadIdx.x];
}
"""
SPILLING = """
extern "C" __global__ void __launch_bounds__(1024) spilling_kernel(float* x) {
  float v[160];
  #pragma unroll
  for (int i = 0; i < 160; ++i) v[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < 160; ++i) x[threadIdx.x * 160 + i] = v[159 - i] / v[(i * 7) % 160];
}
"""


def of_source(source: str, entry: str = "copy_kernel", shared: int = 0) -> Lowered:
    """What lowering would give for a kernel written in CUDA."""
    return Lowered(source, entry, (("x", "ptr"), ("y", "ptr"), ("n", "i32")), (1, 0, 2), 128, shared)


@pytest.fixture
def copying(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every program is a kernel that copies: no TileLang, and little to compile."""
    monkeypatch.setattr(store_module, "lower", lambda program, arch: of_source(COPY))


@needs_compiler
def test_a_kernel_says_what_a_launch_must_know() -> None:
    found = lower(NORM, "sm_90a")
    assert found.args == (("x", "ptr"), ("delta", "ptr"), ("weight", "ptr"), ("y", "ptr"), ("eps", "f32"), ("rows", "i32"))
    head = found.source[found.source.rindex(f"{found.entry}(") :].split(") {")[0]
    compiled = [parameter.split()[-1].lstrip("*") for parameter in head.split("(", 1)[1].split(",")]
    assert [found.args[place][0] for place in found.places] == compiled
    assert sorted(found.places) == list(range(len(found.args)))
    assert found.threads == 160 and found.shared == 0


@needs_compiler
def test_machine_code_depends_on_the_source_alone() -> None:
    """Neither on what was compiled before it in the process nor on the program's name."""
    source = lower(NORM, "sm_90a").source
    first = compile_source(source, "first", "sm_90a")
    compile_source(COPY, "between", "sm_90a")
    assert compile_source(source, "another", "sm_90a") == first
    assert first[0][:4] == b"\x7fELF" and len(first[0]) > 1000 and first[1].registers > 0


@needs_compiler
def test_products_and_sums_stay_apart() -> None:
    """A fused multiply-add rounds once: the code of a sum of products must be as long as its formula says."""
    kernel = 'extern "C" __global__ void f_kernel(float* x, float a, float b) { x[0] = %s; }'
    both = compile_source(kernel % "x[1] * a + b", "f", "sm_90a")[0]
    fused = compile_source(kernel % "fmaf(x[1], a, b)", "f", "sm_90a")[0]
    assert _text(both) != _text(fused)


def _text(elf: bytes) -> bytes:
    """Instructions of a kernel's machine code: the contents of its section ``.text.*``."""
    offset, size, count, names = (int.from_bytes(elf[at : at + n], "little") for at, n in ((40, 8), (58, 2), (60, 2), (62, 2)))
    headers = [elf[offset + i * size : offset + (i + 1) * size] for i in range(count)]

    def word(header: bytes, at: int) -> int:
        return int.from_bytes(header[at : at + 8], "little")

    for header in headers:
        start = word(headers[names], 24) + int.from_bytes(header[:4], "little")
        if elf[start:].startswith(b".text."):
            return elf[word(header, 24) : word(header, 24) + word(header, 32)]
    raise AssertionError("no code")


@needs_compiler
def test_the_compilers_complaint_is_one_line_and_names_the_kernel() -> None:
    with pytest.raises(KernelBuildError, match=r"^op/f\[\] does not compile for sm_90a: .*error.*\"nonsense\" is undefined$"):
        compile_source('extern "C" __global__ void f_kernel(float* x) {\n  x[0] = nonsense;\n}', "op/f[]", "sm_90a")
    with pytest.raises(KernelBuildError, match=r"does not compile for sm_1: .*architecture") as refused:
        compile_source(COPY, "op/f[]", "sm_1")
    assert "\n" not in str(refused.value)


@needs_compiler
@pytest.mark.parametrize(("constants", "said"), [({"nonsense": 1}, "nonsense"), ({}, "missing")])
def test_a_factory_that_fails_is_named(constants: dict[str, int], said: str) -> None:
    """In one line; what TileLang has to say besides, which is the factory's whole text, goes nowhere (``lowering.quiet``)."""
    wrong = Program("rms_norm", "add_rms_norm", shape_config(**constants))
    with pytest.raises(KernelBuildError, match=f"cannot be lowered for sm_90a: TypeError: .*{said}") as error:
        lower(wrong, "sm_90a")
    assert "\n" not in str(error.value)


@needs_compiler
def test_tilelang_keeps_quiet_while_a_kernel_is_lowered(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("tilelang.language.eager.builder")
    with lowering.quiet():
        log.critical("eight hundred lines")
    assert caplog.records == []
    log.critical("and not beyond")
    assert [record.getMessage() for record in caplog.records] == ["and not beyond"] or not log.isEnabledFor(logging.CRITICAL)


@needs_compiler
def test_a_kernel_that_spills_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "lower", lambda program, arch: of_source(SPILLING, "spilling_kernel"))
    with pytest.raises(KernelBuildError, match=r"spills [1-9]\d* \+ [1-9]\d* bytes of registers on sm_90a"):
        KernelStore(tmp_path).build(NORM)
    assert list(tmp_path.iterdir()) == []


@needs_compiler
def test_more_shared_memory_than_a_block_may_have_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "lower", lambda program, arch: of_source(COPY, shared=227 * 1024 + 4))
    with pytest.raises(KernelBuildError, match="wants 232452 bytes of shared memory, a block may have 232448"):
        KernelStore(tmp_path).build(NORM)
    monkeypatch.setattr(store_module, "lower", lambda program, arch: of_source(COPY, shared=227 * 1024))
    assert KernelStore(tmp_path).build(NORM).shared_bytes == 227 * 1024


@needs_compiler
def test_functions_that_are_not_inlined_count() -> None:
    """Each has lines of its own in what the compiler says; a kernel's resources are those of all of them."""
    helper = SPILLING.replace('extern "C" __global__ void __launch_bounds__(1024) spilling_kernel(', "__device__ __noinline__ void spill(")
    _, used = compile_source(
        f'{helper}extern "C" __global__ void __launch_bounds__(1024) f_kernel(float* x) {{ spill(x); }}', "f", "sm_90a"
    )
    assert used.spill_stores > 0 and used.spill_loads > 0


# What is missing


def _not_found(name: str) -> str:
    raise PackageNotFoundError(name)


def test_another_version_of_tilelang_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering, "version", lambda name: "0.1.14")
    with pytest.raises(KernelBuildError, match=r"TileLang 0\.1\.15, found 0\.1\.14; `pip install 'deepinfer\[cuda\]'`"):
        check_tilelang()


def test_without_tilelang_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(lowering, "version", _not_found)
    with pytest.raises(KernelBuildError, match=r"TileLang is not installed; `pip install 'deepinfer\[cuda\]'`"):
        KernelStore(tmp_path).build(NORM)


def test_without_nvrtc_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    compiler.cache_clear()
    for call in (compiler, lambda: compile_source(COPY, "f", "sm_90a")):
        with pytest.raises(KernelBuildError, match=r"NVRTC is not installed; `pip install 'deepinfer\[cuda\]'`"):
            call()


@needs_compiler
@pytest.mark.parametrize(("absent", "said"), [("nvidia", "nvidia-cuda-runtime"), ("tilelang", "TileLang")])
def test_without_headers_it_says_what_to_install(absent: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = nvrtc._packages
    monkeypatch.setattr(nvrtc, "_packages", lambda name: [] if name == absent else real(name))
    nvrtc._include_options.cache_clear()
    with pytest.raises(KernelBuildError, match=rf"headers of .*{said}.* are not installed; `pip install 'deepinfer\[cuda\]'`"):
        compile_source(COPY, "f", "sm_90a")


@needs_compiler
def test_headers_may_lie_in_several_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Packages of one name, of which one folder has CUDA's headers and another its C++ library's."""
    packages = nvrtc._packages
    whole = next(f for f in (p / "cu13" / "include" for p in packages("nvidia")) if (f / "cccl").exists())
    first, second = tmp_path / "a" / "cu13" / "include", tmp_path / "b" / "cu13" / "include"
    first.mkdir(parents=True)
    second.mkdir(parents=True)
    for entry in whole.iterdir():
        (second if entry.name == "cccl" else first).joinpath(entry.name).symlink_to(entry)
    monkeypatch.setattr(nvrtc, "_packages", lambda name: [tmp_path / "a", tmp_path / "b"] if name == "nvidia" else packages(name))
    nvrtc._include_options.cache_clear()
    try:
        kernel = RmsNorm.programs(576, "bfloat16")[0]
        code, _ = compile_source(lower(kernel, SM90A).source, kernel.name, SM90A)
    finally:
        monkeypatch.undo()
        nvrtc._include_options.cache_clear()
    assert code[:4] == b"\x7fELF"


def test_without_the_headers_of_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    header = tmp_path / "cu13" / "include" / "cuda_runtime.h"
    header.parent.mkdir(parents=True)
    header.touch()
    monkeypatch.setattr(nvrtc, "_packages", lambda name: [tmp_path])
    nvrtc._include_options.cache_clear()
    try:
        with pytest.raises(KernelBuildError, match="nvidia-cuda-cccl"):
            nvrtc._include_options()
    finally:
        nvrtc._include_options.cache_clear()


# What names a kernel


def test_the_name_of_what_is_stored_follows_from_all_that_makes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("op/cuda.py", "op/part.py", "toolchain/dialect.py", "toolchain/lowering.py", "toolchain/nvrtc.py"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("one")
    monkeypatch.setattr(program, "_KERNELS", tmp_path)
    one = Program("op", "f", shape_config(n=1), ("op/part.py",))
    seen = {one.digest("sm_90a")}
    assert one.digest("sm_90a") in seen
    for other in (
        dataclasses.replace(one, constants=shape_config(n=2)),
        dataclasses.replace(one, factory="g"),
        dataclasses.replace(one, passes=(("tl.fast", True),)),
        dataclasses.replace(one, uses=()),
    ):
        seen.add(other.digest("sm_90a"))
    seen.add(one.digest("sm_100a"))
    for path in ("op/cuda.py", "op/part.py", "toolchain/dialect.py", "toolchain/lowering.py", "toolchain/nvrtc.py"):
        (tmp_path / path).write_text("two")
        seen.add(one.digest("sm_90a"))
    monkeypatch.setattr(program, "TILELANG", "0.1.16")
    seen.add(one.digest("sm_90a"))
    assert len(seen) == 1 + 4 + 1 + 5 + 1


@needs_compiler
@pytest.mark.usefixtures("copying")
def test_what_is_stored_is_what_was_built(tmp_path: Path) -> None:
    built = KernelStore(tmp_path).build(NORM)
    assert KernelStore(tmp_path).find(NORM) == built == StoredKernel.unpacked(built.packed())
    assert (built.name, built.arch, built.digest) == (NORM.name, "sm_90a", NORM.digest("sm_90a"))
    assert built.compiler.startswith("NVRTC ") and built.entry == "copy_kernel"
    assert KernelStore(tmp_path, "sm_100a").find(NORM) is None


@needs_compiler
def test_a_kernels_file_is_a_fifth_of_its_code(tmp_path: Path) -> None:
    """The code is mostly names of constants in TileLang's headers, which nothing uses."""
    built = KernelStore(tmp_path).build(NORM)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size < len(built.code) / 5
