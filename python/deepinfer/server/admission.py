"""How much may be in the engine at once.

Owns: the number of answers and tokens taken in; who is turned away before the engine hears of it. Never touches: the engine's own
queue, tenants' limits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from deepinfer.server.errors import ApiError, BadRequestError


class Admission:
    """Counts what is in flight.

    Args:
        most_answers: that run and wait together.
        most_tokens: prompt and longest answer tokens of all of them; 0 is no limit. A request that is alone is never too large for it.
    """

    def __init__(self, most_answers: int, most_tokens: int = 0) -> None:
        self.most_answers, self.most_tokens = most_answers, most_tokens
        self.answers = self.tokens = 0
        self.turned_away = 0

    @contextmanager
    def admit(self, answers: int) -> Iterator[Callable[[int], None]]:
        """Takes a request in for as long as the block lasts; gives what to call with its tokens, once they are counted.

        Raises:
            ApiError: there is no room now (503), or never (400).
        """
        if answers > self.most_answers:
            raise BadRequestError(
                f"the request asks for {answers} answers at once, at most {self.most_answers} are taken in; lower n or send fewer prompts"
            )
        if self.answers + answers > self.most_answers:
            raise self._busy("too many requests wait", "queue_full")
        taken = 0

        def take(tokens: int) -> None:
            nonlocal taken
            if self.most_tokens and self.tokens and self.tokens + tokens > self.most_tokens:
                raise self._busy("too many tokens are in flight", "tokens_full")
            taken += tokens
            self.tokens += tokens

        self.answers += answers
        try:
            yield take
        finally:
            self.answers -= answers
            self.tokens -= taken

    def _busy(self, why: str, code: str) -> ApiError:
        self.turned_away += 1
        return ApiError(503, f"the server is busy: {why}; try again", code=code, retry_after=1)
