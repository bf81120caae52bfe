"""README.md's programs: each is one, and what a comment says one prints is what it prints."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cli.running import TIMEOUT, environment, needs_smollm2

TEXT = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
PRINTS = re.compile(r"^ *print\(.*\) +# (\{.*\})$", re.MULTILINE)
"""A line whose comment is the JSON that it prints."""


def test_every_block_is_a_program() -> None:
    assert len(PROGRAMS) >= 4
    for program in PROGRAMS:
        compile(program, "README.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@needs_smollm2
def test_the_answer_that_is_held_to_a_schema_is_the_one_that_is_shown() -> None:
    pytest.importorskip("xgrammar")
    (program,) = (program for program in PROGRAMS if "StructuredOutputs(" in program)
    (shown,) = PRINTS.findall(program)
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment(), timeout=TIMEOUT, check=False)
    assert (made.returncode, made.stdout) == (0, f"{shown}\n"), made.stderr
