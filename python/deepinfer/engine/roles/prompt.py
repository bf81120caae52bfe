"""What a prompt engine does with a sequence that is done there.

Owns: from the core's word that a sequence is handed over to its blocks being free again. Never touches: the front, the other engine.

The pages are copied to host memory behind the step that wrote them, and offered from there by a thread. Blocks and slot stay held until
the other side has let go, or the lease has run out: so a completion engine that falls behind slows the prompt engine down instead of
filling host memory. Every way out of here ends in the release of the sequence, once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from deepinfer.engine.hooks import EngineHooks, KvSave
from deepinfer.engine.mover import Bell, Mover
from deepinfer.engine.request import EngineRequest, SequenceDelta
from deepinfer.engine.roles.device import PageCopies
from deepinfer.engine.roles.transport import Transport
from deepinfer.errors import DeepInferError, HandoverError
from deepinfer.kvcache.handover import Handover
from deepinfer.kvcache.layout import KvLayout

if TYPE_CHECKING:
    from deepinfer import _core
    from deepinfer.worker.runner import ModelRunner

_THREADS = 2
_POLL = 0.01
"""Seconds between two looks at offers while there is nothing else to do."""

_GRACE = 1.0
"""Seconds after the lease at which an offer counts as ended, whatever the transport says."""


@dataclass(slots=True)
class _Outgoing:
    """A sequence that is being handed over."""

    handle: int
    delta: SequenceDelta
    record: Handover
    transfer: int
    ends: float  # time.monotonic()
    wanted: bool = True
    ticket: bytes = b""


class PromptRole:
    """See the head of this file; one of an engine, on its step thread.

    Args:
        core, runner, hooks: the engine's.
        layout: of the runner's KV.
        transport: where payloads are offered; closed with the role.
        lease: seconds that a hand-over may take, the core's own included.
        bell: rung when something has moved on.
    """

    def __init__(
        self, core: _core.Core, runner: ModelRunner, hooks: EngineHooks, layout: KvLayout, transport: Transport, lease: float, bell: Bell
    ) -> None:
        self._core, self._hooks, self._layout = core, hooks, layout
        self._transport, self._lease = transport, lease
        self._copies = PageCopies(runner, layout)
        self._mover: Mover[_Outgoing] = Mover(_THREADS, bell)
        self._outgoing: dict[int, _Outgoing] = {}
        self._offered: dict[bytes, _Outgoing] = {}
        self._settling = False

    @property
    def busy(self) -> bool:
        """Whether steps are needed though no request is unfinished: until every block is back."""
        return bool(self._outgoing) or self._settling

    def rest(self) -> float:
        """Seconds after which to look although nothing has rung."""
        return _POLL if self._offered else 1.0

    def hand_over(self, handle: int, request: EngineRequest, delta: SequenceDelta) -> None:
        """Takes charge of a sequence that the core has ended with ``"handover"``.

        ``delta``: what there is to tell of it; given out by :meth:`poll` once the payload is on offer.

        Raises:
            DeepInferError: it cannot be handed over; its blocks are free.
        """
        try:
            out = self._begin(handle, request, delta)
        except BaseException as e:
            self.drop(handle)
            if isinstance(e, DeepInferError) or not isinstance(e, Exception):
                raise
            raise HandoverError(f"the hand-over failed with {type(e).__name__}: {e}") from e
        self._outgoing[handle] = out

    def drop(self, handle: int) -> None:
        """Gives up what a sequence that will not be handed over still holds."""
        self._core.release(handle)
        self._settling = True

    def _begin(self, handle: int, request: EngineRequest, delta: SequenceDelta) -> _Outgoing:
        saved = self._core.begin_save(handle)
        ends = time.monotonic() + self._lease
        try:
            tokens, slot = saved["tokens"], saved["state_slot"]
            save = KvSave(request.request_id, handle, tokens, np.array(saved["blocks"], np.int32), slot)
            self._hooks.pe_prepare_save_kvcache(save)
            cut = self._hooks.select_state_slice_to_store(save) if self._layout.state else None
            history = self._core.history(handle)
            assert history is not None  # its end was reported in the newest outputs
            prompt = len(request.prompt_ids)
            record = _record(request, delta, history.tolist()[prompt:], tokens, self._layout)
            read = self._copies.read(tokens, saved["pages"], slot, cut)
            self._hooks.do_save_kvcache(save)
        except BaseException:
            self._core.transfer_ended(saved["transfer"], False)
            raise
        out = _Outgoing(handle, delta, record, saved["transfer"], ends)
        self._mover.submit(out, self._offer(read, record, ends))
        return out

    def _offer(self, read: Callable[[], object], record: Handover, ends: float) -> Callable[[], bytes]:
        transport, digest = self._transport, record.digest()

        def job() -> bytes:
            payload = read()
            left = ends - time.monotonic()
            if left <= 0:
                raise HandoverError("the hand-over took longer than its lease before it could be offered")
            return transport.offer(digest, [payload], left)

        return job

    def poll(self) -> list[SequenceDelta]:
        """Moves hand-overs on. Gives the deltas of sequences now on offer, and of those that could not be offered."""
        news: list[SequenceDelta] = []
        self._settling = False
        for out, result in self._mover.finished():
            self._core.transfer_ended(out.transfer, not isinstance(result, BaseException))
            self._settling = True
            if isinstance(result, bytes):
                out.ticket = result
            if isinstance(result, bytes) and out.wanted:
                self._offered[result] = out
                news.append(replace(out.delta, handover=out.record.with_ticket(result).to_bytes()))
                continue
            self._drop(out)
            if out.wanted:
                news.append(out.delta.failed(result if isinstance(result, HandoverError) else HandoverError(f"the offer failed: {result}")))
        now = time.monotonic()
        overdue = [ticket for ticket, out in self._offered.items() if now > out.ends + _GRACE]
        for ticket in (*self._transport.ended(), *overdue):
            gone = self._offered.pop(ticket, None)
            if gone is not None:
                gone.ticket = b""  # nothing is left to release
                self._drop(gone)
        return news

    def abort(self, request_id: str) -> None:
        """Nobody will take the sequences of this request over."""
        for out in [o for o in self._outgoing.values() if o.record.request_id == request_id]:
            out.wanted = False
            if out.ticket:
                self._offered.pop(out.ticket, None)
                self._drop(out)

    def forget(self, handle: int) -> None:
        """A sequence has ended in the engine; nothing here depends on that."""

    def _drop(self, out: _Outgoing) -> None:
        del self._outgoing[out.handle]
        if out.ticket:
            ticket = out.ticket
            self._mover.send_off(lambda: self._transport.release(ticket))
        self._core.release(out.handle)
        self._settling = True

    def close(self) -> None:
        """Ends every hand-over; what is on offer is gone."""
        self._transport.close()
        self._mover.close()


def _record(request: EngineRequest, delta: SequenceDelta, produced: list[int], computed: int, layout: KvLayout) -> Handover:
    return Handover(
        request_id=request.request_id,
        prompt_ids=request.prompt_ids,
        produced=produced,
        computed=computed,
        params=request.params.clone(prompt_logprobs=None),
        seed=request.seeds[delta.index],
        max_new=request.max_new,
        layout=layout.fields,
        eos_ids=request.eos_ids,
        bad_word_ids=request.bad_word_ids,
        salt=request.salt,
        priority=request.priority,
        order=request.order,
        stream=request.stream,
        cached_tokens=delta.cached_tokens,
        images=request.images,
        grammar=None if request.grammar is None else getattr(request.grammar, "__qualname__", type(request.grammar).__name__),
    )
