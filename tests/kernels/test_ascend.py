"""Forms of operators for Ascend: lowered as far as TileLang goes without CANN's compiler, and what it refuses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from deepinfer.cli.app import main
from deepinfer.errors import KernelBuildError
from deepinfer.kernels import registry
from deepinfer.kernels.toolchain import Dialect, Program
from deepinfer.kernels.toolchain import ascend as ascend_module
from deepinfer.kernels.toolchain.ascend import lower_for_ascend
from deepinfer.kernels.toolchain.shapes import NAMED, SMOLLM2_135M
from kernel_kit import need_tilelang

PAGE = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"
FORMS = registry.wanted(SMOLLM2_135M, "asc")


def test_the_operators_that_have_a_form() -> None:
    """Elementwise, rotations, norms and top-k."""
    assert set(registry.operators("asc")) == {"embedding", "rms_norm", "rope", "swiglu", "top_k"} == {p.op for p in FORMS}
    table = re.findall(r"^\| `(\w+)/asc.py` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(table) == list(registry.operators("asc")), "docs/kernels.md lists others"


@pytest.mark.parametrize("program", FORMS, ids=lambda p: p.name)
def test_a_form_becomes_ascend_c(program: Program) -> None:
    need_tilelang()
    source = lower_for_ascend(program)
    assert f"__global__ __vector__ void {program.factory}_kernel(" in source and "__simt_vf__" in source
    assert source.count("asc_sync_notify") == source.count("asc_sync_wait"), "every signal between copies and vectors is waited for"
    assert "block_idx" in source and "int32_t rows)" in source


def test_zeros_of_both_signs_have_one_order() -> None:
    """A floating-point addition of 0 would do it and is simplified away: the source must have it in integers."""
    need_tilelang()
    (program,) = [p for p in FORMS if p.op == "top_k"]
    assert re.search(r"0 - \(bits & 2147483647\)|\(bits & 2147483647\) \* -1", lower_for_ascend(program))


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMED)
def test_forms_of_every_shape_become_ascend_c(name: str) -> None:
    need_tilelang()
    assert main(["kernels", "check", "--ascend", "--shape", name]) == 0


def test_check_names_what_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    need_tilelang()
    entries = [registry.Entry("smollm2-135m", p) for p in FORMS[:2]]

    def refuse(program: Program) -> str:
        if program == FORMS[1]:
            raise KernelBuildError("ValueError: not on this one")
        return "source"

    monkeypatch.setattr(registry, "entries", lambda shapes=None, form="cuda": iter(entries))
    monkeypatch.setattr(ascend_module, "lower_for_ascend", refuse)
    assert main(["kernels", "check", "--ascend"]) == 1
    said = capsys.readouterr()
    assert "2 kernels lowered for Ascend" in said.out and "1 refused" in said.out
    assert said.err == f"deepinfer: error: {FORMS[1].name} cannot be lowered for Ascend: ValueError: not on this one\n"


class _Plain(Program):
    """A program whose factory gets the common dialect, as those for a GPU do."""

    def build(self, dialect: Dialect) -> object:
        return super().build(Dialect())


def _refusals() -> Iterator[tuple[str, str]]:
    """(operator, TileLang's message) of the first kernel of every form for a GPU. Names of loops, and what TVM prints of a call, differ."""
    for op in registry.operators():
        first = next(programs[0] for shape in NAMED.values() if (programs := registry.programs(shape, op)))
        with pytest.raises(KernelBuildError) as refused:
            lower_for_ascend(_Plain(**{f.name: getattr(first, f.name) for f in fields(first)}))
        yield op, re.sub(r"loop '\w+'", "loop '…'", re.sub(r"ir\.Op\(.*?name=(\"[\w.]+\").*", r"\1", str(refused.value)))


def test_what_is_refused_stands_on_the_page() -> None:
    """Forms for a GPU are another dialect, not another target: the page has the reasons, each as TileLang gives it."""
    need_tilelang()
    section = PAGE.read_text(encoding="utf-8").split("### What is refused")[1].split("\n## ")[0]
    listed = set(re.findall(r"^\| `(.+?)` \|", section, re.MULTILINE))
    assert listed == {message for _, message in _refusals()}
