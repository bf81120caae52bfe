"""Requests between two processes: a grammar that one of them cannot pack or read is that request's fault alone."""

from __future__ import annotations

import socket
import sys
import types
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from deepinfer.engine.async_engine import wire
from deepinfer.engine.async_engine.process import EngineLoop, _answer
from deepinfer.errors import InvalidRequestError
from deepinfer.sampling import SamplingParams
from engine_kit import request as made

request = partial(made, params=SamplingParams(max_tokens=4))


class Queue:
    """An engine that keeps what it is given."""

    def __init__(self) -> None:
        self.requests: list[Any] = []

    def add_request(self, request: Any) -> None:
        self.requests.append(request)

    def take_over(self, record: bytes, grammar: Any) -> None:
        self.requests.append(grammar)


@pytest.fixture
def foreign() -> Iterator[types.ModuleType]:
    """A module that only the sender can import."""
    module = types.ModuleType("only_here")
    exec("class Grammar:\n    pass\n", module.__dict__)
    sys.modules["only_here"] = module
    yield module
    sys.modules.pop("only_here", None)


def test_a_grammar_goes_along_with_its_request() -> None:
    sent = request("a", [1, 2, 3], grammar=partial(dict, a=1))
    back = wire.Add.of(sent).opened()
    assert back.grammar is not None and back.grammar() == {"a": 1}
    assert back.request_id == "a" and list(back.prompt_ids) == [1, 2, 3]
    assert wire.Add.of(request("b", [1])).opened().grammar is None


def test_a_grammar_that_does_not_pickle_is_refused_where_it_is_given() -> None:
    with pytest.raises(InvalidRequestError, match=r"grammar cannot be sent to the engine process.*picklable"):
        wire.Add.of(request("a", [1], grammar=lambda: None))


def test_a_grammar_the_engine_process_cannot_read_refuses_its_own_request_only(foreign: types.ModuleType) -> None:
    front, back = socket.socketpair()
    with front, back:
        loop, engine, unpacker = EngineLoop(back), Queue(), wire.Unpacker()
        messages = [wire.Add.of(request("bad", [1], grammar=foreign.Grammar)), wire.Add.of(request("good", [2]))]
        messages.append(wire.TakeOver("late", b"", wire.pack_grammar(foreign.Grammar)))
        packed = b"".join(wire.pack(message) for message in messages)
        del sys.modules["only_here"]
        for message in unpacker.feed(packed):
            loop._obey(engine, message)
        assert [r.request_id for r in engine.requests] == ["good"]
        refused = list(unpacker.feed(front.recv(1 << 16)))
        assert [r.request_id for r in refused] == ["bad", "late"]
        for rejected in refused:
            assert isinstance(rejected.error.exception(), InvalidRequestError)
            assert "cannot read the request's grammar (ModuleNotFoundError" in rejected.error.message


def test_an_answer_that_cannot_be_sent_is_an_error_of_who_asked() -> None:
    answer = _answer(wire.Measure(3), lambda: lambda: 0)
    assert answer.call == 3 and answer.value is None and answer.error is not None
    assert wire.pack(answer)
    assert _answer(wire.Measure(4), lambda: 5) == wire.Answer(4, 5)
