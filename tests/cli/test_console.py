"""What commands know of the terminal that they write to."""

from __future__ import annotations

import io
import sys

import pytest

from deepinfer.cli import console


class Stream(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.mark.parametrize(("out", "err"), [(True, True), (True, False), (False, True)])
def test_a_line_is_open_while_an_answer_stands_half_written_on_a_shared_terminal(
    monkeypatch: pytest.MonkeyPatch, out: bool, err: bool
) -> None:
    monkeypatch.setattr(sys, "stdout", Stream(out))
    monkeypatch.setattr(sys, "stderr", Stream(err))
    seen = []
    for piece in ("Once", " upon\n", "", "a", " time\n"):
        console.write_out(piece)
        seen.append(console.line_open())
    assert seen == [out and err and open_line for open_line in (True, False, False, True, False)]
