"""A prompt engine and a completion engine in one process, and a transport between them that a test can hold, break and count."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import engine_kit
from deepinfer.engine.config import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.request import EngineRequest, SequenceDelta
from deepinfer.errors import HandoverError

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 16,
    "num_kv_blocks": 64,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 64,
    "quiet": True,
    "num_threads": 1,
}


@dataclass
class Shelf:
    """What lies between the two ends: offers by ticket."""

    offers: dict[bytes, tuple[bytes, torch.Tensor, float]] = field(default_factory=dict)
    over: list[bytes] = field(default_factory=list)
    released: Counter[bytes] = field(default_factory=Counter)  # calls from the pulling side
    pulls: Counter[bytes] = field(default_factory=Counter)
    numbers: Any = field(default_factory=itertools.count)
    lock: Any = field(default_factory=threading.Lock)


class LocalTransport:
    """An end whose calls can be held (``gate``) or replaced (``break_offer``, ``break_pull``)."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf
        self.gate = threading.Event()
        self.gate.set()
        self.break_offer: BaseException | None = None
        self.break_pull: BaseException | bytes | None = None

    def offer(self, meta: bytes, segments: Sequence[torch.Tensor], lease_s: float) -> bytes:
        self.gate.wait(30)
        if self.break_offer is not None:
            raise self.break_offer
        ticket = b"ticket %d" % next(self.shelf.numbers)
        with self.shelf.lock:
            self.shelf.offers[ticket] = (meta, torch.cat([s.clone() for s in segments]), time.monotonic() + lease_s)
        return ticket

    def pull(self, ticket: bytes, into: Sequence[torch.Tensor]) -> bytes:
        self.gate.wait(30)
        self.shelf.pulls[ticket] += 1
        if isinstance(self.break_pull, BaseException):
            raise self.break_pull
        with self.shelf.lock:
            found = self.shelf.offers.get(ticket)
        if found is None:
            raise HandoverError("the offer is gone")
        into[0].copy_(found[1])
        return self.break_pull if isinstance(self.break_pull, bytes) else found[0]

    def release(self, ticket: bytes) -> bool:
        with self.shelf.lock:
            self.shelf.released[ticket] += 1
            known = self.shelf.offers.pop(ticket, None)
            if known is not None:
                self.shelf.over.append(ticket)
        return known is not None

    def ended(self) -> list[bytes]:
        with self.shelf.lock:
            late = [t for t, (_, _, ends) in self.shelf.offers.items() if time.monotonic() > ends]
            for ticket in late:
                del self.shelf.offers[ticket]
            found, self.shelf.over = self.shelf.over + late, []
        return found

    def close(self) -> None:
        self.gate.set()


class Pair:
    """Two engines joined by a shelf; a test steps them."""

    def __init__(
        self, monkeypatch: Any, device: str, kind: type[Engine] = Engine, completion: dict[str, Any] | None = None, **settings: Any
    ):
        self.shelf = Shelf()
        self.ends: list[LocalTransport] = []

        def open_local(*_: object) -> LocalTransport:
            self.ends.append(LocalTransport(self.shelf))
            return self.ends[-1]

        monkeypatch.setattr("deepinfer.engine.roles.open_transport", open_local)
        model = settings.pop("model", None) or engine_kit.tiny_checkpoint("llama")
        values = {**SETTINGS, "model": model, "device": device, **settings}
        self.prompt = kind(EngineConfig(**values, engine_type="prompt"))
        self.completion = kind(EngineConfig(**{**values, **(completion or {})}, engine_type="completion"))
        self.first, self.second = self.ends
        self.answers: dict[str, engine_kit.Answer] = {}
        self.refused: dict[str, Exception] = {}
        self.records: dict[str, bytes] = {}
        self.grammars: dict[str, Any] = {}

    def step(self) -> None:
        """One step of each engine that has something to do; records are passed on."""
        if self.prompt.has_unfinished():
            for delta in self.prompt.step():
                self._note(delta)
                if delta.handover is not None:
                    self.records[delta.request_id] = delta.handover
                    self.pass_on(delta.request_id)
        if self.completion.has_unfinished():
            for delta in self.completion.step():
                self._note(delta)

    def pass_on(self, request_id: str) -> None:
        """Gives a record to the completion engine."""
        try:
            self.completion.take_over(self.records[request_id], self.grammars.get(request_id))
        except Exception as e:
            self.refused[request_id] = e

    def _note(self, delta: SequenceDelta) -> None:
        a = self.answers.setdefault(delta.request_id, engine_kit.Answer())
        assert a.finish is None, "a delta after the last one"
        a.tokens += delta.new_token_ids
        a.logprobs += delta.logprobs or []
        a.prompt_logprobs = delta.prompt_logprobs or a.prompt_logprobs
        a.finish, a.error, a.deltas = delta.finish_reason, delta.error, a.deltas + 1
        a.cached_tokens = max(a.cached_tokens, delta.cached_tokens)

    def run(self, until: Callable[[], bool] | None = None, seconds: float = 30.0) -> None:
        """Steps until nothing is left, or until something holds."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if until is not None and until():
                return
            if not self.prompt.has_unfinished() and not self.completion.has_unfinished() and until is None:
                return
            self.step()
            if self.prompt.rest() is not None and self.completion.rest() is not None:
                time.sleep(0.001)  # both wait for a mover
        raise AssertionError("still not done")

    def generate(self, requests: Sequence[EngineRequest]) -> list[engine_kit.Answer]:
        """All answers, every request in flight at once."""
        for r in requests:
            self.prompt.add_request(r)
        self.run()
        return [self.answers[r.request_id] for r in requests]

    def check_rest(self) -> None:
        """Nothing is held, parked or waited for on either side, nothing is on offer, and each offer was released at most once."""
        for engine in (self.prompt, self.completion):
            engine.step()
            counts = engine.core_counts()
            for c in [*counts["groups"], counts["slots"]]:
                assert not c["held"] and not c["parked"], counts
                assert c["free"] + c["cached"] + c["reserved"] == c["total"]
            stats = engine.core_stats()
            assert not stats["running"] and not stats["waiting"] and not stats["transfers"] and not stats["misuse"]
            assert engine._core.check() is None
        end = time.monotonic() + 5
        while self.shelf.offers and time.monotonic() < end:
            time.sleep(0.001)
        assert not self.shelf.offers

    def close(self) -> None:
        for end in self.ends:
            end.gate.set()
        self.prompt.close()
        self.completion.close()
