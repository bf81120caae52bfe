"""What all calls of one front process share.

Owns: :class:`ServerState`. Never touches: routes, sockets.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from deepinfer.server.admission import Admission
from deepinfer.server.errors import ApiError
from deepinfer.server.http.hosts import Hosts
from deepinfer.server.keys import Keys
from deepinfer.server.ledger import Ledger
from deepinfer.server.records import CallRecord
from deepinfer.server.settings import ServerSettings

if TYPE_CHECKING:
    from deepinfer.engine.async_engine import AsyncLLM
    from deepinfer.server.http.call import Call


class ServerState:
    """The engine's front, the settings, and what is going on.

    Attributes:
        calls: that are being answered.
        draining: no new work is taken in.
        observers: called with the record of every call at its end; must neither raise nor block.
        first_token: called with the seconds to the first token of each stream, when it comes.
        gap: called with the seconds and the number of tokens for each further output of a stream. Both must neither raise nor block.
        closers: called once when the server ends; they may block for a moment.
        parts: what other modules keep for the life of the server, by their own names.
    """

    def __init__(self, llm: AsyncLLM, settings: ServerSettings, ledger: Ledger | None = None) -> None:
        self.llm = llm
        self.settings = settings
        self.model_names = settings.served_model_name or (llm.config.model,)
        self.keys = Keys(settings, ledger)
        self.hosts = Hosts(settings)
        share = settings.front_processes  # each process admits its part
        answers = max(llm.max_num_seqs, 1) + settings.max_queued_requests
        self.admission = Admission(math.ceil(answers / share), math.ceil(settings.max_tokens_in_flight / share))
        self.calls: set[Call] = set()
        self.draining = False
        self.observers: list[Callable[[CallRecord], None]] = []
        self.first_token: Callable[[float], None] = lambda seconds: None
        self.gap: Callable[[float, int], None] = lambda seconds, tokens: None
        self.closers: list[Callable[[], None]] = []
        self.parts: dict[str, Any] = {}
        self.created = int(time.time())

    @property
    def model_name(self) -> str:
        """The name that answers bear."""
        return self.model_names[0]

    @property
    def alive(self) -> bool:
        """Whether the engine runs."""
        return self.llm.is_running

    def check_open(self) -> None:
        """Raises ApiError (503) where new work is not taken in."""
        if not self.alive:
            raise ApiError(503, "the engine has stopped; it is not restarted by itself", code="engine_dead", retry_after=30)
        if self.draining:
            raise self.shutting_down()

    def shutting_down(self) -> ApiError:
        """What a client is told while the server ends."""
        after = max(1.0, self.settings.drain_timeout)
        return ApiError(503, "the server is shutting down; send the request again", code="shutting_down", retry_after=after)

    def observe(self, record: CallRecord) -> None:
        """Tells everyone who listens of a call that is over."""
        for observer in self.observers:
            observer(record)
