"""Questions to ranks that wait for their answers.

Owns: which answer is whose, and giving up. Never touches: what is asked, whether a rank lives. All of it belongs to the thread that drives
the group; nothing here waits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

from deepinfer.engine.async_engine import wire
from deepinfer.engine.data_parallel.rank_line import RankLine
from deepinfer.errors import EngineDeadError, ErrorData, NoAnswerError


@dataclass(slots=True)
class _Asked:
    line: RankLine
    call: int  # as who asked numbers it
    seconds: float
    left: float
    answered: Callable[[wire.Answer], None]


class Questions:
    """Questions by number until each is answered, given up, or the group ends: ``answered`` is called once."""

    def __init__(self) -> None:
        self._open: dict[int, _Asked] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def patience(self) -> float:
        """Seconds until the next one is given up; infinite without one."""
        return max(0.0, min((asked.left for asked in self._open.values()), default=float("inf")))

    def ask(self, line: RankLine, question: wire.Question, seconds: float, answered: Callable[[wire.Answer], None]) -> None:
        """Sends a question under a number of its own; it is given up after so many seconds of :meth:`wait`."""
        number = next(self._numbers)
        self._open[number] = _Asked(line, question.call, seconds, seconds, answered)
        line.send(replace(question, call=number))

    def hear(self, answer: wire.Answer) -> None:
        """Hands an answer on; one that comes when its question was given up is dropped."""
        if (asked := self._open.pop(answer.call, None)) is not None:
            error = None if answer.error is None else answer.error.told_by(asked.line.name)
            asked.answered(replace(answer, call=asked.call, error=error))

    def wait(self, passed: float) -> None:
        """So many seconds have passed, and what had come by then was heard."""
        for number, asked in list(self._open.items()):
            asked.left -= passed
            if asked.left <= 0:
                del self._open[number]
                late = f"{asked.line.name} (pid {asked.line.child.pid}) gave no answer within {asked.seconds:g} s; it may be in a long step"
                asked.answered(wire.Answer(asked.call, error=ErrorData.of(NoAnswerError(late))))

    def fail(self, error: EngineDeadError) -> None:
        """Nobody will answer any more."""
        asked, self._open = self._open, {}
        for one in asked.values():
            one.answered(wire.Answer(one.call, error=ErrorData.of(error)))
