"""Errors on their way to another process, or to several callers."""

from __future__ import annotations

import json
import pickle
from dataclasses import asdict

import pytest

from deepinfer import errors
from deepinfer.engine.async_engine import wire
from deepinfer.engine.request import SequenceDelta
from deepinfer.errors import DeepInferError, EngineDeadError, ErrorData, GrammarBusyError, KvLayoutError, RankGroupError, fresh


class FullError(errors.KvStoreFullError):
    """Says more than a text."""

    def __init__(self, path: str, room: int) -> None:
        super().__init__(f"{path} has {room} bytes left")
        self.path, self.room, self.owner = path, room, object()

    def __str__(self) -> str:
        return f"{self.args[0]}; make room"


@pytest.fixture(autouse=True)
def defined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "FullError", FullError, raising=False)


def travelled(error: BaseException) -> DeepInferError:
    """Through both forms that processes use."""
    data = ErrorData.of(error)
    made = pickle.loads(pickle.dumps(data)).exception()
    again = ErrorData(**json.loads(json.dumps(asdict(data)))).exception()
    assert (type(made), made.args, vars(made)) == (type(again), again.args, vars(again))
    assert isinstance(made, DeepInferError)
    return made


def test_every_error_arrives_as_what_it_was() -> None:
    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, DeepInferError) and kind is not FullError
    ]
    assert len(kinds) > 40
    for kind in kinds:
        made = travelled(kind("what is wrong: \N{GREEK SMALL LETTER ALPHA}"))
        assert type(made) is kind and str(made) == "what is wrong: \N{GREEK SMALL LETTER ALPHA}"


def test_a_constructor_of_more_than_a_text_is_not_called() -> None:
    error = FullError("/disk", 7)
    made = travelled(error)
    assert type(made) is FullError and made.args == ("/disk has 7 bytes left; make room",)
    assert vars(made) == {"path": "/disk", "room": 7}, "what is no plain value stays"
    told = ErrorData.of(error).told_by("rank 1 of 2").exception()
    assert type(told) is FullError and told.args[0].startswith("rank 1 of 2: /disk has 7")
    again = fresh(error)
    assert again is not error and (type(again), str(again), vars(again)) == (FullError, str(error), vars(error))


def test_an_error_defined_elsewhere_is_the_nearest_one_of_ours() -> None:
    class OfAPluginError(KvLayoutError):
        """In a package that who reads it does not have."""

    assert type(travelled(OfAPluginError("no"))) is KvLayoutError
    assert type(travelled(RankGroupError("no"))) is RankGroupError
    made = travelled(OSError(28, "no space"))
    assert type(made) is EngineDeadError and str(made) == "OSError: [Errno 28] no space"

    class GrammarError(ValueError):  # a foreign class of a name that is used here, too
        pass

    assert str(travelled(GrammarError("no"))) == "GrammarError: no"


def test_tracebacks_do_not_gather_in_an_error_that_is_raised_to_many() -> None:
    error = GrammarBusyError("busy")
    for _ in range(3):
        with pytest.raises(GrammarBusyError, match=r"^busy$"):
            raise fresh(error)
    assert error.__traceback__ is None


def test_an_answers_end_says_which_error_it_was() -> None:
    class LateError(errors.NoRoomError):
        """As above."""

    delta = pickle.loads(wire.pack(SequenceDelta("a", 0, []).failed(LateError("late")))[wire.LENGTH.size :])
    assert (delta.error, delta.error_kind, delta.finish_reason) == ("late", "NoRoomError", "error")
