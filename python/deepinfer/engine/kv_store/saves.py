"""What an engine stores: blocks that prompts and requests have completed, and slices of states.

Owns: from the core's word that a chain is complete to the store having it, or not. Never touches: what is fetched, which chains.

Pages are copied to host memory behind the step that wrote them, and put from there by one thread, so that objects come after their parents
and slices after their blocks. The core holds a chain's blocks meanwhile. Where requests lack them because the store takes chains more
slowly than they come, the oldest are given up.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from deepinfer.engine.hooks import EngineHooks, KvSave
from deepinfer.engine.kv_store.counters import StoreCounters
from deepinfer.engine.kv_store.staging import Buffers, Pages
from deepinfer.engine.mover import Bell, Mover
from deepinfer.kvcache.block_tier import CONFLICT, EXISTS, KEY_BYTES, NO_PARENT, STORED, BlockTier
from deepinfer.kvcache.objects import GRAIN, ObjectForm, Staging
from deepinfer.sampling import TrafficClass

if TYPE_CHECKING:
    from deepinfer import _core

_MOST_SLICES = 64
"""Slices that may wait to be put, and for their blocks."""


@dataclass(slots=True, eq=False)
class _Chain:
    """Objects of a chain that are to be put, one behind the other."""

    transfer: int
    before: bytes  # names of the chain up to here
    keys: bytes
    pages: Pages
    traffic_class: TrafficClass
    sent: int = 0  # objects that have been handed to the thread
    pieces: int = 0  # on their way
    failed: bool = False

    @property
    def count(self) -> int:
        """Objects."""
        return len(self.keys) // KEY_BYTES

    def has(self, key: bytes) -> bool:
        """Whether it is the name of one of them."""
        return any(self.keys[at : at + KEY_BYTES] == key for at in range(0, len(self.keys), KEY_BYTES))


@dataclass(slots=True, eq=False)
class _Slice:
    """A slice that is to be put behind what stands before it."""

    key: bytes
    data: bytes
    last: bool = False  # its block has been on its way: it is there, or nothing is to be done


class Saves:
    """See the head of this file; one of an engine, on its step thread.

    Args:
        core, hooks: the engine's.
        tier: put to by a thread.
        form: of objects.
        buffers: host memory for objects on their way.
        blocks: the pool's; ``max_num_seqs``: most that run.
        counters: kept up to date.
        bell: rung when something has been put.
        fault: told of errors.
        whose: request id and class of traffic of a handle; the sequence may have ended.
    """

    def __init__(
        self,
        core: _core.Core,
        hooks: EngineHooks,
        tier: BlockTier,
        form: ObjectForm,
        buffers: Buffers,
        blocks: int,
        max_num_seqs: int,
        counters: StoreCounters,
        bell: Bell,
        fault: Callable[[BaseException], None],
        whose: Callable[[int], tuple[str, TrafficClass]],
    ) -> None:
        self._core, self._hooks, self._tier, self._form, self._buffers = core, hooks, tier, form, buffers
        self._most_held, self._max_num_seqs = blocks // 8, max_num_seqs
        self._counters, self._fault, self._whose = counters, fault, whose
        self._mover: Mover[Callable[[object], None]] = Mover(1, bell)
        self._queue: deque[_Chain | _Slice] = deque()
        self._open: set[_Chain] = set()
        self._slices = 0  # waiting or on their way
        self._early: OrderedDict[bytes, _Slice] = OrderedDict()  # their blocks have not been given yet

    @property
    def busy(self) -> bool:
        """Whether something waits to be put, or is being put."""
        return bool(self._open or self._slices)

    def take(self) -> None:
        """Takes charge of chains that the core has completed. After each of its `complete` and `schedule`."""
        for save in self._core.take_saves():
            request_id, traffic_class = self._whose(save["seq"])
            tokens = save["first"] + len(save["keys"]) // KEY_BYTES * GRAIN
            told = KvSave(request_id, save["seq"], tokens, np.array(save["blocks"], np.int32), 0, "store", save["keys"][-KEY_BYTES:])
            try:
                before = self._names_before(save)
                self._hooks.pe_prepare_save_kvcache(told)
                pages = [np.array(ids, np.int64).reshape(-1, per) for ids, per in zip(save["pages"], self._form.pages, strict=True)]
            except BaseException as e:
                self._core.end_save(save["transfer"], False)
                if not isinstance(e, Exception):
                    raise
                self._fault(e)
                continue
            chain = _Chain(save["transfer"], before, save["keys"], pages, traffic_class)
            self._open.add(chain)
            self._queue.append(chain)
            for key in [key for key in self._early if chain.has(key)]:
                self._again(self._early.pop(key))
            self._send_on()
            try:
                self._hooks.do_save_kvcache(told)
            except Exception as e:
                self._fault(e)

    def _names_before(self, save: _core.ChainSave) -> bytes:
        """Names of the chain that a save goes on with.

        Raises:
            LookupError: its sequence is not known any more.
        """
        first = save["first"] // GRAIN
        before = self._form.names(self._core.chain(save["seq"]), first) if first else b""
        if first and (len(before) != first * KEY_BYTES or before[-KEY_BYTES:] != save["parents"][:KEY_BYTES]):
            raise LookupError("the chain of what is to be saved is not known any more")
        return before

    def offer(self, key: bytes, data: bytes) -> None:
        """Has a slice put, behind the chains that were taken so far."""
        if self._slices >= _MOST_SLICES:
            self._counters.dropped += 1
            return
        self._slices += 1
        self._queue.append(_Slice(key, data))
        self._send_on()

    def poll(self) -> None:
        """Moves everything on."""
        for take, result in self._mover.finished():
            take(result)
        self._send_on()
        self._give_up_some()

    def _send_on(self) -> None:
        """Hands over what there are buffers for, in order."""
        while self._queue:
            head = self._queue[0]
            if isinstance(head, _Slice):
                self._queue.popleft()
                job = partial(self._tier.put, "slice", head.key, b"", [len(head.data)], head.data, "chat")
                self._mover.submit(partial(self._slice_put, head), job)
                continue
            while head.sent < head.count and not head.failed:
                staging = self._buffers.take()
                if staging is None:
                    return
                self._send_piece(head, staging)
            self._queue.popleft()
            self._look_whether_done(head)

    def _send_piece(self, chain: _Chain, staging: Staging) -> None:
        first, last = chain.sent, min(chain.sent + self._buffers.objects, chain.count)
        chain.sent, chain.pieces = last, chain.pieces + 1
        copied = self._buffers.read([ids[first:last] for ids in chain.pages], staging)
        before, keys = chain.before + chain.keys[: first * KEY_BYTES], chain.keys[first * KEY_BYTES : last * KEY_BYTES]
        lengths = [self._form.num_bytes] * (last - first)
        data, tier = self._buffers.view(staging, last - first), self._tier

        def put() -> bytes:
            copied()
            return tier.put("block", keys, before, lengths, data, chain.traffic_class)

        self._mover.submit(partial(self._put, chain, last - first, staging), put)

    def _put(self, chain: _Chain, count: int, staging: Staging, result: object) -> None:
        """A piece has been put, or not."""
        self._buffers.give(staging)
        chain.pieces -= 1
        said = self._said(result, count)
        self._counters.saved += said.count(STORED)
        self._counters.existed += said.count(EXISTS)
        self._counters.conflicts += said.count(CONFLICT)
        taken = sum(said.count(letter) for letter in (STORED, EXISTS, CONFLICT))
        self._counters.failed += count - taken
        chain.failed = chain.failed or taken < count
        self._look_whether_done(chain)

    def _again(self, early: _Slice) -> None:
        """Puts a slice once more, behind its block."""
        early.last = True
        self._slices += 1
        self._queue.append(early)

    def _slice_put(self, piece: _Slice, result: object) -> None:
        self._slices -= 1
        said = self._said(result, 1)
        if said == bytes([NO_PARENT]) and not piece.last:
            # Cut at the end of a prompt whose blocks the core gives with its next plan.
            if any(chain.has(piece.key) for chain in self._open):
                self._again(piece)
            else:
                self._early[piece.key] = piece
                if len(self._early) > _MOST_SLICES:
                    self._early.popitem(last=False)
                    self._counters.failed += 1
            return
        self._counters.slices_saved += said in (bytes([STORED]), bytes([EXISTS]))
        self._counters.conflicts += said.count(CONFLICT)
        self._counters.failed += said.strip(bytes([STORED, EXISTS, CONFLICT])) != b"" or not said

    def _said(self, result: object, count: int) -> bytes:
        """One letter an object, none if the tier did not say what it should."""
        if isinstance(result, BaseException):
            self._fault(result)
        elif isinstance(result, bytes) and len(result) == count:
            return result
        else:
            self._fault(TypeError(f"a tier's put gave {result!r} for {count} objects"))
        return b""

    def _look_whether_done(self, chain: _Chain) -> None:
        if chain in self._open and not chain.pieces and (chain.failed or chain.sent == chain.count):
            self._open.discard(chain)
            self._core.end_save(chain.transfer, not chain.failed)

    def _give_up_some(self) -> None:
        """Lets chains go that wait for buffers, the oldest first, where others lack the blocks that they hold."""
        if not self._queue or not self._is_short():
            return
        waiting = [c for c in self._queue if isinstance(c, _Chain)]
        held = sum((c.count - c.sent) * self._form.blocks for c in waiting)
        for chain in waiting:
            if held <= self._most_held:
                break
            held -= (chain.count - chain.sent) * self._form.blocks
            self._counters.dropped += chain.count - chain.sent
            self._queue.remove(chain)
            chain.failed = True
            self._open.discard(chain)
            self._core.end_save(chain.transfer, False)  # copies on their way read its pages ahead of whoever gets them

    def _is_short(self) -> bool:
        """Whether there are hardly any blocks left, or sequences wait though there are lanes for them."""
        pool, stats = self._core.counts()["groups"][0], self._core.stats()
        few = pool["free"] + pool["cached"] <= self._most_held
        return few or (stats["waiting"] > 0 and stats["running"] < self._max_num_seqs)

    def close(self, seconds: float) -> None:
        """Lets the thread end what it was given, for so long at most."""
        self._mover.close(seconds)
