"""Shapes that several protocols' answers have in common: log-probabilities and token counts, as JSON values.

Owns: these shapes. Never touches: HTTP, where the values come from. Whatever is made here is valid JSON: a log-probability of minus
infinity shows as the number that OpenAI's service gives.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from deepinfer.outputs import Logprob, PositionLogprobs

IMPOSSIBLE = -9999.0
"""Stands for a log-probability of minus infinity, which JSON has no number for."""


def number(logprob: float) -> float:
    """A log-probability as JSON can hold it."""
    return logprob if logprob > IMPOSSIBLE else IMPOSSIBLE


def most_likely(position: PositionLogprobs, count: int) -> list[Logprob]:
    """The ``count`` most likely tokens of one position (all for −1), most likely first; ties by token id."""
    entries = [entry for _, entry in sorted(position.items(), key=lambda item: (-item[1].logprob, item[0]))]
    return entries if count < 0 else entries[:count]


def chat_entry(entry: Logprob, data: bytes | None = None) -> dict[str, Any]:
    """One token as chat completions show it; ``data``: its bytes, where they are part of a character."""
    text = entry.decoded_token or ""
    return {"token": text, "logprob": number(entry.logprob), "bytes": list(text.encode("utf-8", "replace") if data is None else data)}


class LegacyLogprobs:
    """Log-probabilities as completions show them: four lists, over the whole answer or piece by piece.

    Args:
        count: most likely tokens shown at each position; −1 is all. The token itself is always among them, with the identical value;
            of tokens that read the same the most likely one is shown.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._offset = 0

    def take(self, token_ids: Iterable[int], positions: Iterable[PositionLogprobs | None]) -> dict[str, list[Any]]:
        """The next tokens; ``None`` stands for the first of a prompt, which nothing comes before. Its text is given by `first`."""
        made: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, position in zip(token_ids, positions, strict=False):
            assert position is not None
            chosen = position[token]
            text = chosen.decoded_token or ""
            top: dict[str, float] = {}
            for entry in (*most_likely(position, self._count), chosen):
                top.setdefault(entry.decoded_token or "", number(entry.logprob))
            self._add(made, text, number(chosen.logprob), top)
        return made

    def first(self, text: str) -> dict[str, list[Any]]:
        """A prompt's first token, which has no probability."""
        made: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        self._add(made, text, None, None)
        return made

    def _add(self, made: dict[str, list[Any]], text: str, logprob: float | None, top: dict[str, float] | None) -> None:
        made["tokens"].append(text)
        made["token_logprobs"].append(logprob)
        made["top_logprobs"].append(top)
        made["text_offset"].append(self._offset)
        self._offset += len(text)


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int, reasoning_tokens: int | None = None) -> dict[str, Any]:
    """Token counts as OpenAI's protocols show them."""
    made: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    if reasoning_tokens is not None:
        made["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return made


def prompt_logprobs(positions: Iterable[PositionLogprobs | None]) -> list[dict[str, Any] | None]:
    """Log-probabilities of a prompt, by token id as text, as vLLM shows them."""
    return [
        None
        if position is None
        else {str(i): {"logprob": number(e.logprob), "rank": e.rank, "decoded_token": e.decoded_token} for i, e in position.items()}
        for position in positions
    ]
