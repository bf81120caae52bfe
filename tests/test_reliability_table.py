"""docs/reliability.md names tests; every one of them exists, and no fault is without one. So do files that other pages name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs" / "reliability.md"
REFERENCE = re.compile(r"`((?:tests|crates)/[\w./-]+\.(?:py|rs))::(\w+)`")


def rows() -> list[tuple[str, str]]:
    """(fault, cell of tests) of every row of the tables."""
    found = []
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 3 and cells[0] != "fault" and not set(cells[0]) <= set("-: "):
            found.append((cells[0], cells[2]))
    return found


def defines(path: Path, name: str) -> bool:
    """Whether a file defines a test of that name."""
    keyword = "def" if path.suffix == ".py" else "fn"
    return re.search(rf"^\s*(?:async )?{keyword} {name}\b", path.read_text(encoding="utf-8"), re.MULTILINE) is not None


def test_the_table_is_read_whole() -> None:
    assert len(rows()) >= 21


@pytest.mark.parametrize(("fault", "tests"), rows(), ids=lambda text: re.sub(r"\W+", "-", text)[:50])
def test_every_named_test_exists(fault: str, tests: str) -> None:
    named = REFERENCE.findall(tests)
    assert named, f"no test stands beside: {fault}"
    missing = [f"{file}::{name}" for file, name in named if not (ROOT / file).is_file() or not defines(ROOT / file, name)]
    assert missing == []


def test_a_name_that_is_not_there_is_noticed() -> None:
    assert defines(Path(__file__), "test_a_name_that_is_not_there_is_noticed")
    assert not defines(Path(__file__), "test_a_name_that_is_not")


MADE_ON_A_PAGE = {"test_mixtral.py", "test_row_scale_cuda.py"}
"""Files that a reader of a walk writes."""


@pytest.mark.parametrize("page", [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"], ids=lambda path: path.stem)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    """Tests and kits, named from the repository, from ``tests`` or by themselves, and benches."""
    text = page.read_text(encoding="utf-8")
    here = {path.relative_to(ROOT).as_posix() for folder in ("tests", "benches") for path in (ROOT / folder).rglob("*.py")}
    named = set(re.findall(r"[\w/.]*\b(?:test_\w+|\w+_kit)\.py|\bbenches/\w+\.py", text))
    missing = {name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in here)}
    assert {name for name in missing if name.rsplit("/", 1)[-1] not in MADE_ON_A_PAGE} == set()
