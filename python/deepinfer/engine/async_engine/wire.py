"""What goes over the socket between front and engine process.

Owns: messages, and their framing (8 bytes of length, then a pickle). Never touches: what is done with them. Errors travel as
`deepinfer.errors.ErrorData`.
Both ends are this program, started by one user; nothing else can reach the socket, which has no name.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from deepinfer.engine.request import EngineRequest, SequenceDelta
from deepinfer.errors import ErrorData, InvalidRequestError
from deepinfer.models.images import ImageProcessor

if TYPE_CHECKING:
    from deepinfer.structured.matcher import ReadyGrammar
    from deepinfer.structured.vocabulary import Vocabulary
    from deepinfer.worker.grammar import Grammar

LENGTH = struct.Struct("<Q")


@dataclass(slots=True)
class Start:
    """First message to the process: what to build, and where to import from."""

    config: Any
    factory: str
    models: dict[str, str] = field(default_factory=dict)  # architectures registered in the front's process
    beat: float = 1.0  # most seconds between two signs of life of a loop that has work


def pack_grammar(grammar: Callable[[], Grammar] | None) -> bytes | None:
    """What makes a matcher, as bytes; raises ``InvalidRequestError`` if it does not pickle."""
    if grammar is None:
        return None
    try:
        return pickle.dumps(grammar, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as e:
        raise InvalidRequestError(
            f"the request's grammar cannot be sent to the engine process ({type(e).__name__}: {e}); make it picklable"
        ) from e


def open_grammar(packed: bytes | None) -> Callable[[], Grammar] | None:
    """The other way; raises ``InvalidRequestError`` if this process cannot read it."""
    if packed is None:
        return None
    try:
        grammar: Callable[[], Grammar] = pickle.loads(packed)
    except Exception as e:
        raise InvalidRequestError(
            f"the engine process cannot read the request's grammar ({type(e).__name__}: {e}); make its class importable there"
        ) from e
    return grammar


@dataclass(slots=True)
class Add:
    """Queue a request; build it with :meth:`of`."""

    request: EngineRequest
    grammar: bytes | None = None

    @classmethod
    def of(cls, request: EngineRequest) -> Add:
        """The grammar is packed by itself, so that one that cannot be read there is this request's fault alone."""
        return cls(replace(request, grammar=None), pack_grammar(request.grammar))

    def opened(self) -> EngineRequest:
        """The request again; raises ``InvalidRequestError`` if its grammar cannot be read."""
        return replace(self.request, grammar=open_grammar(self.grammar))


@dataclass(slots=True)
class Learn:
    """Take in the vocabulary that grammars to come belong to; beside the steps, in the order of these messages."""

    vocabulary: Vocabulary


@dataclass(slots=True)
class Warm:
    """Read a grammar beside the steps, before requests come that follow it; answered by :class:`Answer`."""

    call: int
    grammar: ReadyGrammar


@dataclass(slots=True)
class TakeOver:
    """Go on with a request that a prompt engine handed over; refused by :class:`Rejected`."""

    request_id: str
    record: bytes
    grammar: bytes | None = None


@dataclass(slots=True)
class Abort:
    """End a request."""

    request_id: str


@dataclass(slots=True)
class StopAt:
    """End one answer after ``num_tokens`` tokens."""

    request_id: str
    index: int
    num_tokens: int


@dataclass(slots=True)
class Logits:
    """Compute logits of all positions: float32 ``[len(token_ids), vocab_size]``."""

    call: int
    token_ids: list[int]
    rank: int = 0


@dataclass(slots=True)
class Count:
    """Count blocks and state slots by state, of a group those of one rank."""

    call: int
    rank: int = 0


@dataclass(slots=True)
class Measure:
    """Copy everything that is counted into an `EngineMetrics`, of a group that of one rank."""

    call: int
    rank: int = 0


Question = Logits | Count | Measure
"""What is asked of an engine; answered by :class:`Answer`."""


@dataclass(slots=True)
class Wake:
    """To a rank that steps together with others: one of them has got work, do not rest."""


@dataclass(slots=True)
class Close:
    """End the process."""


@dataclass(slots=True)
class Ready:
    """The engine is built."""

    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    images: ImageProcessor | None = None  # of a model that takes them
    kv_tokens: int = 0  # that its KV holds


@dataclass(slots=True)
class Deltas:
    """News of one step."""

    deltas: list[SequenceDelta]


@dataclass(slots=True)
class Beat:
    """A sign of life: the step loop has work and came round again."""


@dataclass(slots=True)
class Rejected:
    """A request that could not be queued."""

    request_id: str
    error: ErrorData


@dataclass(slots=True)
class Answer:
    """To the question of that number, and to :class:`Warm`: what was asked for, or why it cannot be had, which ends nothing else."""

    call: int
    value: Any = None
    error: ErrorData | None = None


@dataclass(slots=True)
class Died:
    """Last message of a process that cannot go on; before :class:`Ready`, why it could not be built."""

    error: ErrorData


def pack(message: Any) -> bytes:
    """A message as bytes to send."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(body)) + body


class Unpacker:
    """Messages out of a stream of bytes."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Takes in bytes; gives the messages that are complete."""
        self._buffer += data
        while len(self._buffer) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                return
            message = pickle.loads(memoryview(self._buffer)[LENGTH.size : end])
            del self._buffer[:end]
            yield message
