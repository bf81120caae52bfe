"""Every kernel is listed, compiles for the H200 without one, and takes what is recorded of it."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
from pathlib import Path

import pytest

from deepinfer.cli.app import main
from deepinfer.errors import ConfigError
from deepinfer.kernels import registry, resources
from deepinfer.kernels.toolchain import StoredKernel
from deepinfer.kernels.toolchain.nvrtc import Resources
from deepinfer.kernels.toolchain.shapes import NAMED
from kernel_kit import needs_compiler

ALWAYS = "smollm2-135m"
"""The shape whose kernels are compiled at every change, of all operators; the others are compiled at night."""


def test_every_operator_for_gpus_is_listed() -> None:
    """A file ``cuda.py`` is what makes an operator one; without ``programs_for`` nobody would compile it before it is wanted."""
    folder = Path(registry.__file__).parent
    assert set(registry.operators()) == {path.parent.name for path in folder.rglob("cuda.py")}
    for op in registry.operators():
        module = importlib.import_module(f"deepinfer.kernels.{op}.cuda")
        assert callable(getattr(module, "programs_for", None)), f"kernels/{op}/cuda.py: say in programs_for(shape) what models need"
        assert all(registry.refusals(shape) == {} for shape in NAMED.values())
        factories = {p.factory for shape in NAMED.values() for p in registry.programs(shape, op)}
        made = {name for path in folder.glob(f"{op}/*.py") if path.stem not in ("__init__", "asc") for name in _factories(op, path.stem)}
        assert factories == made, f"kernels/{op}: no named shape wants {made - factories}"


def _factories(op: str, form: str) -> list[str]:
    """Names of those that a file of an operator holds."""
    module = importlib.import_module(f"deepinfer.kernels.{op}.{form}")
    return [name for name, f in inspect.getmembers(module, inspect.isfunction) if f.__module__ == module.__name__ and _is_factory(f)]


def _is_factory(function: object) -> bool:
    """Whether it makes TileLang functions: it is public and its first parameter is the dialect."""
    parameters = list(inspect.signature(function).parameters.values())  # type: ignore[arg-type]
    return not function.__name__.startswith("_") and bool(parameters) and parameters[0].name == "d"  # type: ignore[attr-defined]


def test_every_run_dtype_is_listed() -> None:
    """Of each kernel whose text follows from it: what nobody compiles here may spill where somebody runs it."""
    made: dict[str, set[str]] = {}
    for entry in registry.entries():
        if entry.dtype != "-":
            made.setdefault(f"{entry.program.op}/{entry.program.factory}", set()).add(entry.dtype)
    of_packed = {name for name in made if name.startswith("linear_fp8/")}
    assert len(made) > 10 and all(made[name] >= {"bfloat16", "float16"} for name in made.keys() - of_packed)


def test_the_page_has_the_limit_of_every_operator() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "kernels.md").read_text(encoding="utf-8")
    section = page.split("\n## Limits\n")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == list(registry.operators())


def test_the_page_has_a_section_for_every_operator() -> None:
    """Its contract and what it reaches: before the walk, under a title of its own."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "kernels.md").read_text(encoding="utf-8")
    section = page.split("\n## Operators of a GPU path\n")[1].split("\n## ")[0]
    named = {op for part in section.split("\n### ")[1:] for op in re.findall(r"`(\w+)/cuda.py`", part.split("\n\n")[1])}
    assert named == set(registry.operators()), "each begins with the file it is about"


@pytest.mark.parametrize("name", NAMED)
def test_programs_of_a_shape_can_be_told_apart(name: str) -> None:
    wanted = registry.wanted(NAMED[name])
    assert wanted and len({p.name for p in wanted}) == len({p.digest("sm_90a") for p in wanted}) == len(wanted)
    assert all(p.op in registry.operators() for p in wanted)


@needs_compiler
def test_kernels_of_one_shape_compile(capsys: pytest.CaptureFixture[str]) -> None:
    _check(ALWAYS, capsys)


@needs_compiler
@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in NAMED if name != ALWAYS])
def test_kernels_of_other_shapes_compile(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    _check(name, capsys)


def _check(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["kernels", "check", "--shape", name])
    said = capsys.readouterr()
    with capsys.disabled():
        print(f"\n{said.out}{said.err}", end="")
    assert code == 0, said.err
    for program in registry.wanted(NAMED[name]):
        assert program.name in said.out


@needs_compiler
def test_check_reports_what_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    good = registry.wanted(NAMED[ALWAYS])[0]
    entries = [registry.Entry(ALWAYS, good), registry.Entry(ALWAYS, dataclasses.replace(good, factory="gone"))]
    monkeypatch.setattr(registry, "entries", lambda shapes=None, form="cuda": iter(entries))
    assert main(["kernels", "check", "--jobs", "1"]) == 1
    said = capsys.readouterr()
    assert "2 kernels for sm_90a" in said.out and "1 failures" in said.out
    assert said.err.count("\n") == 1 and said.err.startswith("deepinfer: error: ") and "gone" in said.err


def stored(registers: int, compiler: str = "NVRTC 13.2") -> StoredKernel:
    return StoredKernel("op/f[]", "sm_90a", "0", compiler, "f", (), (), 128, 1024, Resources(registers, 0, 0, 0, 16), b"code")


def test_more_registers_than_recorded_fail(tmp_path: Path) -> None:
    table = tmp_path / "resources.json"
    assert resources.compare([stored(40)], "sm_90a", table).changes == ["op/f[] is new"]
    resources.record([stored(40)], "sm_90a", {"op/f[]"}, table)
    assert resources.recorded("sm_90a", table)["kernels"] == {"op/f[]": {"registers": 40, "shared": 1040, "threads": 128}}
    same, more, many = (resources.compare([stored(n)], "sm_90a", table) for n in (40, 48, 49))
    assert (same.changes, same.failures) == ([], [])
    assert (more.changes, more.failures) == (["op/f[]: registers 40 → 48"], [])
    assert (many.changes, many.failures) == ([], ["op/f[]: registers 40 → 49"])
    other = resources.compare([stored(64, "NVRTC 14.0")], "sm_90a", table)
    assert (other.changes, other.failures) == (["op/f[]: registers 40 → 64 (recorded with NVRTC 13.2)"], [])


def test_a_record_keeps_other_kernels_and_drops_those_that_are_gone(tmp_path: Path) -> None:
    table = tmp_path / "resources.json"
    other = dataclasses.replace(stored(20), name="op/g[]")
    resources.record([stored(40), other], "sm_90a", {"op/f[]", "op/g[]"}, table)
    resources.record([stored(41)], "sm_90a", {"op/f[]", "op/g[]"}, table)
    assert {name: k["registers"] for name, k in resources.recorded("sm_90a", table)["kernels"].items()} == {"op/f[]": 41, "op/g[]": 20}
    resources.record([stored(10)], "sm_100a", {"op/f[]"}, table)
    resources.record([], "sm_90a", {"op/f[]"}, table)
    assert list(resources.recorded("sm_90a", table)["kernels"]) == ["op/f[]"]
    assert list(json.loads(table.read_text())) == ["sm_100a", "sm_90a"]


@pytest.mark.parametrize("text", ["", "[]", '{"sm_90a": 1}', '{"sm_90a": {"kernels": []}}'])
def test_a_damaged_record_is_named(tmp_path: Path, text: str) -> None:
    table = tmp_path / "resources.json"
    table.write_text(text)
    with pytest.raises(ConfigError, match="--record"):
        resources.recorded("sm_90a", table)


@pytest.mark.nightly
def test_every_kernel_is_recorded() -> None:
    """And nothing else: what a kernel takes is part of the change that makes it."""
    names = {entry.program.name for entry in registry.entries()}
    assert set(resources.recorded("sm_90a")["kernels"]) == names, "run deepinfer kernels check --record"


def test_an_operator_may_refuse_sizes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    odd = dataclasses.replace(NAMED[ALWAYS], hidden=6)
    assert "rms_norm" in registry.refusals(odd)
    assert "rms_norm" not in {p.op for p in registry.wanted(odd)}
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 6, "num_attention_heads": 1, "head_dim": 64, "intermediate_size": 8,
        "vocab_size": 64, "num_hidden_layers": 1,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["kernels", "list", "--model", str(tmp_path / "config.json"), "--json"]) == 0
    assert "operator rms_norm stays with its reference: " in capsys.readouterr().err


@needs_compiler
def test_build_and_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    program = registry.wanted(NAMED[ALWAYS])[0]
    monkeypatch.setattr(registry, "entries", lambda shapes=None, form="cuda": iter([registry.Entry(ALWAYS, program)]))
    assert main(["kernels", "build", "--output", str(tmp_path / "a" / "b"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["built"], told["kept"], told["failed"]) == (1, 0, {})
    assert main(["kernels", "build", "--output", str(tmp_path / "a" / "b")]) == 0
    assert capsys.readouterr().out.startswith("0 kernels built, 1 were there, 0 failed")
    from deepinfer.kernels.toolchain import store

    monkeypatch.setenv(store.FOLDER_SWITCH, str(tmp_path / "a" / "b"))
    store.default_store.cache_clear()
    try:
        assert main(["kernels", "list", "--json"]) == 0
    finally:
        store.default_store.cache_clear()
    (kernel,) = json.loads(capsys.readouterr().out)["kernels"]
    assert kernel["stored"] is True and kernel["operator"] == program.op and kernel["constants"] == dict(program.constants)


def test_a_store_that_cannot_be_made_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["kernels", "build", "--output", str(tmp_path / "file")]) == 2
    assert "cannot be made a store of kernels" in capsys.readouterr().err


def test_shape_of_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {
        "architectures": ["Qwen3ForCausalLM"], "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 12288, "vocab_size": 151936, "num_hidden_layers": 36,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    from deepinfer.models.kernel_shape import read_kernel_shape

    assert read_kernel_shape(config) == NAMED["qwen3-8b"]
    assert main(["kernels", "list", "--model", str(tmp_path / "config.json"), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["kernels"]
    assert [k["constants"] for k in listed] == [dict(p.constants) for p in registry.wanted(NAMED["qwen3-8b"])]
    deepseek = Path(__file__).resolve().parents[1] / "data" / "deepseek_v41" / "tiny.json"
    assert main(["kernels", "list", "--model", str(deepseek)]) == 2
    assert "there are no kernels to build" in capsys.readouterr().err
