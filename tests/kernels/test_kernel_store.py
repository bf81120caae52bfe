"""Compiled kernels on disk: damage, several processes, folders of others; and what an operator does that has none."""

from __future__ import annotations

import ctypes
import dataclasses
import io
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cli.running import environment
from deepinfer.cli.app import main
from deepinfer.errors import KernelBuildError
from deepinfer.kernels import registry
from deepinfer.kernels.toolchain import (
    KernelStore,
    Program,
    StoredKernel,
    build_process,
    building,
    driver,
    loading,
    lowering,
    shape_config,
    store,
)
from deepinfer.kernels.toolchain.nvrtc import Resources
from deepinfer.kernels.toolchain.shapes import SMOLLM2_135M
from kernel_kit import needs_compiler

NORM, OTHER = registry.programs(SMOLLM2_135M, "rms_norm")[:2]
CPU = torch.device("cpu")


def made(program: Program, code: bytes = b"\x7fELF code", arch: str = "sm_90a", **more: Any) -> StoredKernel:
    """A kernel as if it had been built."""
    args, places = (("x", "ptr"), ("y", "ptr"), ("scale", "f32"), ("rows", "i32")), (1, 3, 0, 2)
    used = Resources(32, 0, 0, 0, 0)
    kernel = StoredKernel(program.name, arch, program.digest(arch), "NVRTC 13.2", "f_kernel", args, places, 96, 64 << 10, used, code)
    return dataclasses.replace(kernel, **more)


def put(folder: Path, program: Program, kernel: StoredKernel | None = None) -> Path:
    """Its file, written as the store writes it."""
    path = KernelStore(folder)._path(program.digest("sm_90a"))
    store.write_whole(path, (kernel or made(program)).packed(), 0o644)
    return path


@pytest.fixture
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KernelStore]:
    """The store that engines of this process would use."""
    monkeypatch.setenv(store.FOLDER_SWITCH, str(tmp_path / "store"))
    monkeypatch.setattr(loading, "_missing", {})
    store.default_store.cache_clear()
    yield store.default_store()
    store.default_store.cache_clear()


def test_the_folder_is_the_switch_or_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value, folder in (
        (store.FOLDER_SWITCH, "/a/b", "/a/b"),
        ("XDG_CACHE_HOME", "/c", "/c/deepinfer/kernels"),
        ("HOME", "/h", "/h/.cache/deepinfer/kernels"),
    ):
        for other in (store.FOLDER_SWITCH, "XDG_CACHE_HOME"):
            monkeypatch.delenv(other, raising=False)
        monkeypatch.setenv(name, value)
        store.default_store.cache_clear()
        assert str(store.default_store().folder) == folder
    store.default_store.cache_clear()


def _cut(data: bytes) -> bytes:
    return data[:-1]


def _flipped(data: bytes) -> bytes:
    return data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]


def _other_code(data: bytes) -> bytes:
    return data.partition(b"\n")[0] + b"\n" + made(NORM, b"other").packed().partition(b"\n")[2]


@pytest.mark.parametrize(
    "damage",
    [
        _cut,
        _flipped,
        _other_code,
        lambda data: b"",
        lambda data: b"\xff" * 40,
        lambda data: data.partition(b"\n")[2],
        lambda data: b"[]\n" + data,
        lambda data: b"{}\n" + data,
        lambda data: data.replace(b'"entry"', b'"exit"'),
        lambda data: data.replace(b'"registers"', b'"r"'),
    ],
)
def test_a_damaged_file_is_not_a_kernel(damage: Any, tmp_path: Path) -> None:
    path = put(tmp_path, NORM)
    assert KernelStore(tmp_path).find(NORM) == made(NORM)
    path.write_bytes(damage(path.read_bytes()))
    assert KernelStore(tmp_path).find(NORM) is None


def test_a_file_under_the_name_of_another_is_not_that_kernel(tmp_path: Path) -> None:
    """Of another program, another architecture, or of the same one from another source."""
    for kernel in (made(OTHER), made(NORM, arch="sm_100a"), made(NORM, digest="0" * 40)):
        put(tmp_path, NORM, kernel)
        assert KernelStore(tmp_path).find(NORM) is None


@needs_compiler
def test_a_damaged_file_is_built_anew(tmp_path: Path) -> None:
    path = put(tmp_path, NORM)
    path.write_bytes(b"damaged")
    told: list[tuple[int, int]] = []
    built = KernelStore(tmp_path).get_all([NORM, OTHER, NORM], lambda done, total: told.append((done, total)))
    assert list(built) == [NORM, OTHER] or set(built) == {NORM, OTHER}
    assert KernelStore(tmp_path).find(NORM) == built[NORM] and told == [(0, 2), (1, 2), (2, 2)]
    told.clear()
    assert KernelStore(tmp_path).get_all([NORM, OTHER], lambda done, total: told.append((done, total))) == built and told == []


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_a_file_that_others_may_write_is_not_loaded(mode: int, tmp_path: Path) -> None:
    put(tmp_path, NORM).chmod(mode)
    put(tmp_path, OTHER).chmod(mode)
    found = KernelStore(tmp_path)
    with pytest.warns(RuntimeWarning, match=rf"can be written by others .mode {mode:o}") as warned:
        assert found.find(NORM) is None and found.find(OTHER) is None
    assert len(warned) == 1 and len(found.refused) == 2
    assert found.census() == store.Census(0, 0, 2)


def test_a_file_of_another_user_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = put(tmp_path, NORM).stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    if owner == 0:
        assert KernelStore(tmp_path).find(NORM) == made(NORM), "root may decide what runs here"
        os.chown(next(tmp_path.iterdir()), 4242, -1)
        owner = 4242
    with pytest.warns(RuntimeWarning, match=f"belongs to user {owner}, who is neither this one nor root"):
        assert KernelStore(tmp_path).find(NORM) is None


def test_what_is_written_can_be_read_by_others_and_written_by_nobody_else(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert put(tmp_path, NORM).stat().st_mode & 0o777 == 0o644
        os.umask(0o077)
        assert put(tmp_path, OTHER).stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(before)


@needs_compiler
def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = KernelStore(tmp_path / "file" / "store")
    with pytest.warns(RuntimeWarning, match="cannot be kept and the next start builds them again.*DEEPINFER_KERNEL_CACHE") as warned:
        built = found.get_all([NORM, OTHER])
    assert len(warned) == 1 and found.unwritten and all(isinstance(kernel, StoredKernel) for kernel in built.values())


BUILD = """
import sys
from pathlib import Path
from deepinfer.kernels import registry
from deepinfer.kernels.toolchain import KernelStore, StoredKernel
from deepinfer.kernels.toolchain.shapes import SMOLLM2_135M
found = KernelStore(Path(sys.argv[1])).get_all(registry.programs(SMOLLM2_135M, "rms_norm"))
assert all(isinstance(kernel, StoredKernel) for kernel in found.values()), found
print(sorted(kernel.digest for kernel in found.values()))
"""


def beside(code: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """Another process that runs ``code``."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(**variables))


@needs_compiler
def test_processes_may_build_into_one_folder_at_a_time(tmp_path: Path) -> None:
    processes = [beside(BUILD, str(tmp_path)) for _ in range(2)]
    said = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert said[0][0] == said[1][0]
    programs = registry.programs(SMOLLM2_135M, "rms_norm")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"{p.digest('sm_90a')}.kernel" for p in programs)
    assert all(KernelStore(tmp_path).find(p) for p in programs)


@needs_compiler
def test_many_are_built_in_processes_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same bits, through the death of one of them, and an error goes to its own kernel."""
    monkeypatch.setattr(building, "_WORTH_A_PROCESS", 1)
    wrong = dataclasses.replace(NORM, factory="gone")
    seen = {one.program: one for one in building.build_all([wrong, NORM, OTHER], jobs=2)}
    assert seen[NORM].kernel == building._build(NORM, "sm_90a").kernel and seen[OTHER].kernel is not None
    assert seen[wrong].kernel is None and "gone" in (seen[wrong].error or "")
    monkeypatch.setattr(building, "packed", lambda program: "no JSON" if program == wrong else build_process.packed(program))
    seen = {one.program: one for one in building.build_all([wrong, NORM, OTHER], jobs=2)}
    assert seen[wrong].error == f"{wrong.name}: the process that built it died (exit code 1)"
    assert seen[NORM].kernel is not None and seen[OTHER].kernel is not None


@needs_compiler
def test_who_stops_listening_leaves_no_process_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler keeps the headers it has read in files of a gigabyte, and processes are ended by force."""
    monkeypatch.setattr(building, "_WORTH_A_PROCESS", 1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    started: list[subprocess.Popen[str]] = []
    real = building._Builder._start
    monkeypatch.setattr(building._Builder, "_start", lambda builder: started.append(process := real(builder)) or process)
    building_now = building.build_all([NORM, OTHER, NORM, OTHER, NORM, OTHER], jobs=2)
    next(building_now)
    (folder,) = tmp_path.iterdir()
    assert any(folder.rglob("*"))
    building_now.close()  # type: ignore[attr-defined]
    assert started and all(process.returncode is not None for process in started)
    assert not list(tmp_path.iterdir())


def test_a_program_survives_the_way_to_another_process() -> None:
    program = Program("op", "f", shape_config(n=1, x=0.5, fast=True, dtype="bfloat16"), ("op/part.py",), (("tl.a", 1),))
    assert build_process.unpacked(build_process.packed(program)) == program


START = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from deepinfer.kernels import registry
from deepinfer.kernels.toolchain import default_store
from deepinfer.kernels.toolchain.loading import load
from deepinfer.kernels.toolchain.shapes import SMOLLM2_135M
programs = registry.programs(SMOLLM2_135M, "rms_norm")
assert all(default_store().find(p) for p in programs)
load(programs, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
print(sorted({"tilelang", "tvm", "cuda.bindings.nvrtc"} & set(sys.modules)))
"""


def test_a_start_with_a_full_store_needs_neither_tilelang_nor_a_compiler(tmp_path: Path) -> None:
    for program in registry.programs(SMOLLM2_135M, "rms_norm"):
        put(tmp_path, program)
    process = beside(START, **{store.FOLDER_SWITCH: str(tmp_path)})
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out == "[]\n"


def test_deepinfer_starts_without_tilelang() -> None:
    process = beside("import sys, deepinfer; deepinfer.LLM; print(sorted({'tilelang', 'tvm', 'cuda.bindings.nvrtc'} & set(sys.modules)))")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (0, "[]\n"), err


def test_an_operator_without_kernels_is_told_once_and_shown(
    own_store: KernelStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lowering, "version", lambda name: "0.0.1")
    with pytest.warns(
        RuntimeWarning, match=r"operator rms_norm runs on its slow reference form on cpu: kernels are lowered with"
    ) as warned:
        assert loading.load([NORM], CPU) is None
        assert loading.load([NORM], CPU) is None
    assert len(warned) == 1
    assert loading.missing_kernels().keys() == {"rms_norm"} == own_store.failures().keys()
    with pytest.raises(KernelBuildError, match=r"found 0\.0\.1"), warnings.catch_warnings():
        loading.require([NORM], CPU)
    assert main(["doctor", "--json"]) in (0, 1)
    shown = json.loads(capsys.readouterr().out)["kernels"]
    assert "found 0.0.1" in shown["on_reference"]["rms_norm"] and shown["folder"] == str(own_store.folder)
    assert shown["builds"] is False and "found 0.0.1" in shown["why_not"]
    main(["doctor"])
    text = capsys.readouterr().out
    assert "kernels    none can be built: " in text and "operator rms_norm runs on its slow reference form: " in text


class Screen(io.StringIO):
    """Somebody's terminal, or a file."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.mark.parametrize("terminal", [True, False])
def test_what_is_built_at_a_start_shows_on_terminals(terminal: bool, own_store: KernelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many of how many; nothing in a file, and nothing where all of them are there."""

    def built(programs: Sequence[Program], arch: str) -> Iterator[building.Built]:
        for program in programs:
            yield building.Built(program, made(program), None, 0.1)

    monkeypatch.setattr(building, "build_all", built)
    monkeypatch.setattr(loading, "_capability", lambda device: (9, 0))
    screen = Screen(terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    loading.prepare([NORM, OTHER], torch.device("cuda"))
    said = screen.getvalue()
    assert ("building kernels: 100%" in said and "2/2" in said) == terminal and bool(said) == terminal
    assert own_store.census().kept == 2
    loading.prepare([NORM, OTHER], torch.device("cuda"))
    assert screen.getvalue() == said


class FakeDriver:
    """The driver's library, as far as a launch calls it: keeps what it is given."""

    def __init__(self, fails: str = "") -> None:
        self.fails, self.launched, self.attributes = fails, [], []  # type: ignore[var-annotated]

    def __getattr__(self, name: str) -> Any:
        return lambda *args: 700 if name == self.fails else 0

    def cuGetErrorName(self, code: int, name: Any) -> int:
        name._obj.value = b"CUDA_ERROR_ILLEGAL_ADDRESS"
        return 0

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:
        self.attributes.append((attribute, value))
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, pointers: Any, extra: None) -> int:
        if self.fails == "cuLaunchKernelEx":
            return 700
        kinds = (ctypes.c_uint64, ctypes.c_int32, ctypes.c_uint64, ctypes.c_float)  # of the compiled kernel's order: y, rows, x, scale
        c = config._obj
        values = [kind.from_address(pointer).value for kind, pointer in zip(kinds, pointers, strict=True)]
        grid, block = (c.grid_x, c.grid_y, c.grid_z), (c.block_x, c.block_y, c.block_z)
        said = [(c.attributes[i].id, list(c.attributes[i].value)[:3]) for i in range(c.count)]
        self.launched.append((values, grid, block, c.shared, c.stream, said))
        return 0


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """A driver in place of NVIDIA's, torch's current stream being 77."""
    found = FakeDriver()
    monkeypatch.setattr(driver, "_library", lambda: found)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=77, synchronize=lambda: None))
    monkeypatch.setattr(driver, "raw_stream", lambda device: 77)
    return found


@pytest.mark.parametrize("after", [False, True])
def test_a_launch_hands_over_what_the_kernel_wants(after: bool, fake: FakeDriver, own_store: KernelStore) -> None:
    put(own_store.folder, NORM)
    (kernel,) = loading.load([NORM], CPU, after) or [None]
    assert kernel is not None and fake.attributes == [(8, 64 << 10)]
    x, y = torch.zeros(3), torch.ones(3)
    kernel.launch((5, 2), x, y, 0.5, 12)
    kernel.launch((7,), y, x, 1.5, 13)
    first = ([y.data_ptr(), 12, x.data_ptr(), 0.5], (5, 2, 1), (96, 1, 1), 64 << 10, 77, [(6, [1, 0, 0])] if after else [])
    assert fake.launched == [first, ([x.data_ptr(), 13, y.data_ptr(), 1.5], (7, 1, 1), *first[2:])]
    with pytest.raises(ValueError, match="zip"):
        kernel.launch((1,), x, y, 0.5)


@pytest.mark.parametrize("after", [False, True])
def test_a_launch_of_clusters_says_how_many_blocks_they_have(after: bool, fake: FakeDriver, own_store: KernelStore) -> None:
    put(own_store.folder, NORM, made(NORM, cluster=4))
    (kernel,) = loading.load([NORM], CPU, after) or [None]
    assert kernel is not None
    kernel.launch((8,), torch.zeros(3), torch.ones(3), 0.5, 12)
    assert fake.launched[0][-1] == ([(6, [1, 0, 0])] if after else []) + [(4, [4, 1, 1])]


def test_an_operator_whose_kernels_come_back_is_shown_no_more(fake: FakeDriver, own_store: KernelStore) -> None:
    own_store.note_failure("rms_norm", "for a while")
    put(own_store.folder, NORM)
    assert own_store.failures() == {"rms_norm": "for a while"}
    assert loading.load([NORM], CPU) is not None and own_store.failures() == {}


@pytest.mark.parametrize("call", ["cuModuleLoadData", "cuModuleGetFunction"])
def test_a_kernel_that_the_driver_does_not_take_is_missing(call: str, fake: FakeDriver, own_store: KernelStore) -> None:
    put(own_store.folder, NORM)
    fake.fails = call
    with pytest.warns(RuntimeWarning, match=r"CUDA_ERROR_ILLEGAL_ADDRESS \(700\)"):
        assert loading.load([NORM], CPU) is None


def test_a_launch_that_fails_says_of_what(fake: FakeDriver, own_store: KernelStore) -> None:
    put(own_store.folder, NORM)
    (kernel,) = loading.load([NORM], CPU) or [None]
    fake.fails = "cuLaunchKernelEx"
    assert kernel is not None
    with pytest.raises(KernelBuildError, match=r"launching rms_norm/.*: CUDA_ERROR_ILLEGAL_ADDRESS"):
        kernel.launch((1,), torch.zeros(1), torch.zeros(1), 0.5, 1)


def test_another_kind_of_gpu_stays_with_its_references(own_store: KernelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is built for it first."""
    put(own_store.folder, NORM)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(KernelStore, "get_all", lambda *_: pytest.fail("builds"))
    with pytest.warns(RuntimeWarning, match=r"compiled for compute capability 9\.0, this GPU has 8\.0"):
        assert loading.load([NORM], torch.device("cuda")) is None
    loading.prepare([NORM], torch.device("cuda"))


def test_without_a_driver_an_operator_stays_with_its_reference(own_store: KernelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    driver._library.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", none)
    put(own_store.folder, NORM)
    with pytest.warns(RuntimeWarning, match="the NVIDIA driver's library cannot be loaded: libcuda"):
        assert loading.load([NORM], CPU) is None


def test_constants_have_one_order() -> None:
    assert Program("a", "b", shape_config(y=1, x=2)) == Program("a", "b", shape_config(x=2, y=1)) != Program("a", "b", shape_config(x=2))
