"""What is written on the way, by compilers about a gigabyte a process: gone with the process, or with the next; and no need for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from cli.running import environment
from deepinfer.errors import ConfigError, KernelBuildError
from deepinfer.kernels.toolchain import nvrtc
from deepinfer.scratch import ScratchFolder
from kernel_kit import needs_compiler

SOURCE = 'extern "C" __global__ void f_kernel(float* x) { x[0] = 1; }'
COMPILE = f"""
import os
from deepinfer.kernels.toolchain import nvrtc
def build():
    return nvrtc.compile_source({SOURCE!r}, "f", "sm_90a")[0]
first = build()
print(len(os.listdir(nvrtc._headers.path)), flush=True)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for temporary files, also of processes."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.setenv(name, str(tmp_path))
    return tmp_path


def beside(code: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, env=environment(), text=True)


HOLD = """
from deepinfer.scratch import ScratchFolder
with ScratchFolder({kind!r}) as folder:
    open(folder.place + "/file", "w").close()
    print(folder.place, flush=True)
    input()
"""


@pytest.mark.parametrize("end", [None, signal.SIGTERM, signal.SIGKILL], ids=["by itself", "terminated", "killed"])
@pytest.mark.parametrize("kind", ["meet", "counts"])
def test_what_a_process_leaves_goes_with_the_next_of_any_kind(kind: str, end: signal.Signals | None, place: Path) -> None:
    with beside(HOLD.format(kind=kind)) as process:
        assert process.stdout is not None and process.stdin is not None
        left = Path(process.stdout.readline().strip())
        assert list(place.iterdir()) == [left] and left.name.startswith(f"deepinfer-{kind}-")
        with ScratchFolder("build") as own:
            assert (left / "file").exists() and own.is_there, "in use"
        if end is None:
            process.stdin.write("\n")
            process.stdin.close()
        else:
            process.send_signal(end)
        process.wait(60)
    assert left.exists() is (end is not None)
    (foreign := place / "of somebody else").mkdir()
    with ScratchFolder("build"):
        assert not left.exists()
    assert list(place.iterdir()) == [foreign]


def test_only_its_own_are_swept(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what looks alike, nor a folder of another machine, whose locks are not seen here."""
    with ScratchFolder("meet") as folder:
        name = Path(folder.place).name
    others = [place / "deepinfer-build-logs", place / f"{name}x", place / f"deepinfer-meet-{'0' * 12}-{name[-8:]}"]
    for other in (*others, place / name):
        other.mkdir()
    with ScratchFolder("build"):
        assert sorted(path for path in place.iterdir() if "build" not in path.name or path in others) == sorted(others)


def test_a_folder_swept_before_it_was_locked_is_made_anew(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, made = tempfile.mkdtemp, []

    def swept_at_first(**named: str) -> str:
        made.append(real(**named))
        if len(made) < 3:
            Path(made[-1]).rmdir()
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", swept_at_first)
    with ScratchFolder("meet") as folder:
        assert folder.path == made[2] and folder.is_there


def test_no_place_for_temporary_files_is_told_to_who_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_place(**_: str) -> str:
        raise FileNotFoundError("no usable temporary folder")

    monkeypatch.setattr(tempfile, "mkdtemp", no_place)
    with ScratchFolder("meet") as folder, pytest.raises(ConfigError, match="name another by TMPDIR"):
        assert folder.place


@needs_compiler
def test_what_the_compiler_keeps_is_gone_with_the_process(place: Path) -> None:
    with beside(COMPILE) as process:
        assert process.communicate(timeout=60)[0].strip() != "0"
    assert process.returncode == 0 and not list(place.iterdir())


@needs_compiler
def test_what_a_killed_process_leaves_goes_with_the_next(place: Path) -> None:
    with beside(f"{COMPILE}input()") as process:
        assert process.stdout is not None and process.stdout.readline().strip() != "0"
        (left,) = place.iterdir()
        with ScratchFolder("build") as own:
            assert left.is_dir() and own.path is not None, "in use"
        assert list(place.iterdir()) == [left]
        process.kill()
    assert any(left.iterdir())
    (foreign := place / "of somebody else").mkdir()
    with ScratchFolder("build"):
        assert not left.exists()
    assert list(place.iterdir()) == [foreign]


@needs_compiler
def test_kernels_are_built_after_the_folder_was_cleaned_up(place: Path) -> None:
    clean_up = "import shutil; shutil.rmtree(nvrtc._headers.path)\n"
    with beside(f"{COMPILE}{clean_up}assert build() == first and nvrtc._headers.is_there") as process:
        process.communicate(timeout=60)
    assert process.returncode == 0 and not list(place.iterdir())


@needs_compiler
@pytest.mark.parametrize("room", ["no place", "a full disk", "a quota"])
def test_kernels_are_built_where_there_is_no_room(room: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits; and what is wrong with a source is still said."""
    want = nvrtc.compile_source(SOURCE, "f", "sm_90a")
    if room == "no place":

        def no_place(**_: str) -> str:
            raise FileNotFoundError("no usable temporary folder")

        monkeypatch.setattr(tempfile, "mkdtemp", no_place)
        monkeypatch.setattr(nvrtc, "_headers", None)
        assert not nvrtc._headers_options()
    elif room == "a full disk":  # on which a file that is mapped would end the process by SIGBUS
        monkeypatch.setattr(nvrtc, "_HEADERS_ROOM", 1 << 60)
        monkeypatch.setattr(nvrtc, "_headers", None)
        assert not nvrtc._headers_options()
    else:
        monkeypatch.setattr(nvrtc, "_headers_options", lambda: ["-pch", f"--pch-dir={place / 'gone'}"])
    assert nvrtc.compile_source(SOURCE, "f", "sm_90a") == want
    with pytest.raises(KernelBuildError, match=r"f does not compile for sm_90a: .*identifier \"y\" is undefined"):
        nvrtc.compile_source(SOURCE.replace("x[0]", "y[0]"), "f", "sm_90a")


def test_a_fork_removes_nothing(place: Path) -> None:
    with ScratchFolder("build") as folder:
        child = os.fork()
        if not child:
            folder.remove()
            os._exit(0)
        os.waitpid(child, 0)
        assert folder.is_there
    assert not folder.is_there and not list(place.iterdir())
