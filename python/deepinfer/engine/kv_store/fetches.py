"""KV that a store has of prompts, on its way into the index.

Owns: from a request's prompt to its blocks being in the index, or the request being computed without them; who waits, and how long.
Never touches: what is saved, where the sequence begins.

A prompt's chain is looked up on a thread. For what is found the core reserves blocks, threads read it piece by piece into host memory, and
each piece is copied to its pages as soon as it is there, in the device's order. When the last one is, or the first one is missing, the core
is told how far it has come, and the sequence waits no longer. Threads write to host memory only, so that a fetch may be given up at any
moment, with what has come so far.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from deepinfer.engine.kv_store.counters import StoreCounters
from deepinfer.engine.kv_store.plan import PATIENCE, StorePlan
from deepinfer.engine.kv_store.staging import Buffers
from deepinfer.engine.mover import Bell, Mover
from deepinfer.errors import TransferError
from deepinfer.kvcache.block_tier import KEY_BYTES, BlockTier
from deepinfer.kvcache.objects import GRAIN, Staging
from deepinfer.kvcache.state_slices import SliceTier

if TYPE_CHECKING:
    from deepinfer import _core

_THREADS = 4
_WAITING = ("wait_kv", "ready", "wait_grammar", "wait_fork")
"""Statuses of a sequence that has not begun."""


@dataclass(slots=True, eq=False)
class _Wanted:
    """A prompt that is looked up or fetched."""

    handle: int
    length: int  # tokens
    keys: bytes  # of the objects that it could use
    waits: bool
    until: float
    settled: bool = False  # nobody waits for it any more
    found: int = 0  # objects that the store has
    near: int = 0  # of these, in this host's memory
    tokens: int = 0  # positions to ask the core for
    slice_key: bytes = b""  # of a slice that is to come along
    slice_due: bool = False
    fetch: _core.Fetch | None = None
    first: int = 0  # object that the fetch begins in
    asked: int = 0  # objects up to here are on their way
    end: int = 0  # one past the last that counts: falls when one is missing
    pieces: int = 0  # on their way
    here: dict[int, int] = field(default_factory=dict)  # first object of a piece that has come → one past its last
    pages: list[Any] = field(default_factory=list)  # int64 of each group, from object `first` on, 0 where a page is in place

    def key(self, at: int) -> bytes:
        """Name of an object."""
        return self.keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]

    @property
    def arrived(self) -> int:
        """One past the last object up to which all have come."""
        at = self.first
        while at in self.here:
            at = self.here[at]
        return at


class Fetches:
    """See the head of this file; one of an engine, on its step thread.

    Args:
        core: the engine's.
        tier: asked and read on threads.
        plan: what holds.
        buffers: host memory for objects on their way.
        slices: where fetched slices are put, of models that have such; ``slice_bytes``: of each.
        counters: kept up to date.
        bell: rung when something has come.
        fault: told of errors.
    """

    def __init__(
        self,
        core: _core.Core,
        tier: BlockTier,
        plan: StorePlan,
        buffers: Buffers,
        slices: SliceTier | None,
        slice_bytes: int,
        counters: StoreCounters,
        bell: Bell,
        fault: Callable[[BaseException], None],
    ) -> None:
        self._core, self._tier, self._plan, self._buffers = core, tier, plan, buffers
        self._slices, self._slice_bytes, self._counters, self._fault = slices, slice_bytes, counters, fault
        self._mover: Mover[Callable[[object], None]] = Mover(_THREADS, bell)
        self._wanted: dict[int, _Wanted] = {}
        self._reading: dict[int, _Wanted] = {}  # by transfer: not all of it has been asked for
        self._roomless: deque[_Wanted] = deque()
        self._behind: dict[int, list[_Wanted]] = {}  # by the transfer that brings their next block
        self._jobs: dict[int, float] = {}  # moments at which what is on its way was sent off
        self._number = self._settled = 0

    # Requests

    def objects_of(self, length: int, prompt_logprobs: bool, now: float) -> int:
        """How many objects of a prompt are worth a look; 0 = none."""
        if prompt_logprobs:
            return 0  # every row is computed
        if self._hangs(now):
            self._counters.skipped += 1
            return 0
        rule = self._plan.rule
        block = GRAIN // self._plan.form.blocks
        usable = (length - 1) // block * block if rule is None else rule.longest_hit(length)
        objects = min(-(-usable // GRAIN), length // GRAIN)
        return objects if self._saves(length, objects, objects) >= max(self._plan.least, 1) else 0

    def add(self, handle: int, length: int, objects: int, waits: bool, now: float) -> None:
        """Looks a prompt up, whose sequence the core has been given; ``waits``: it waits for the answer."""
        keys = self._plan.form.names(self._core.chain(handle), objects)
        wanted = _Wanted(handle, length, keys, waits, now + self._plan.patience)
        self._wanted[handle] = wanted
        self._counters.lookups += 1
        self._counters.waits += waits
        rule = self._plan.rule
        # Slices behind the last start that one is good for may be deeper in the chain than any that is of use.
        slices = 0 if rule is None or self._slices is None else len(keys) // KEY_BYTES - rule.last_slice(length) // GRAIN + 1
        self._send(partial(self._looked_up, wanted), partial(self._tier.check, wanted.keys, max(slices, 0)), now)

    def forget(self, handle: int) -> None:
        """A sequence has ended."""
        wanted = self._wanted.pop(handle, None)
        if wanted is not None:
            wanted.settled = True
            if wanted.fetch is not None:
                self._end(wanted)

    @property
    def busy(self) -> bool:
        """Whether blocks are held for something on its way."""
        return any(w.fetch is not None for w in self._wanted.values())

    @property
    def waiting(self) -> bool:
        """Whether something is on its way at all."""
        return bool(self._wanted)

    def rest(self, now: float) -> float:
        """Seconds after which to look although nothing has rung."""
        return max(0.0, min((w.until - now for w in self._wanted.values()), default=1.0))

    # Between two steps

    def poll(self, now: float) -> None:
        """Moves everything on, ahead of the next plan."""
        for take, result in self._mover.finished():
            take(result)
        for wanted in [w for w in self._wanted.values() if now >= w.until]:
            self._counters.leases += wanted.waits
            self._end(wanted)
            self._settle(wanted)
        while self._roomless and self._begin(self._roomless[0], now):
            self._roomless.popleft()
        self._read_on(now)

    def nothing_runs(self, now: float) -> bool:
        """The engine has nothing to run: room that is not there now does not come. Whether somebody waits no longer."""
        before = self._settled
        while self._roomless:
            wanted = self._roomless[0]
            if not self._begin(wanted, now):  # it may have been too early before
                if self.busy:
                    break
                self._counters.no_room += 1
                self._settle(wanted)
            self._roomless.popleft()
        self._read_on(now)
        return self._settled > before

    def _looked_up(self, wanted: _Wanted, result: object) -> None:
        """The tier has said what it has of a prompt."""
        if wanted.settled:
            return
        if isinstance(result, BaseException):
            self._fault(result)
            self._settle(wanted)
            return
        try:
            found, positions, near = _checked(result, len(wanted.keys) // KEY_BYTES)
        except (TypeError, ValueError) as e:
            self._fault(e)
            self._settle(wanted)
            return
        self._counters.found_tokens += found * GRAIN
        wanted.found, wanted.near = found, near
        rule, start = self._plan.rule, found
        if rule is not None:
            last = min(found, rule.last_slice(wanted.length) // GRAIN)
            start = max((at + 1 for at in positions if at < last), default=0)
            nearer = next((at for at in range(last, start, -1) if self._slices is not None and self._slices.has(wanted.key(at - 1))), 0)
            if start and not nearer:
                wanted.slice_key = wanted.key(start - 1)
            start = nearer or start
        if self._saves(wanted.length, found, start) < max(self._plan.least, 1):
            self._counters.too_few += found > 0
            self._settle(wanted)
            return
        wanted.tokens = found * GRAIN
        self._roomless.append(wanted)  # behind those that wait for room

    def _saves(self, length: int, found: int, start: int) -> int:
        """Tokens that need not be computed where so many objects are found; ``start``: with a slice at the end of that object."""
        rule = self._plan.rule
        if rule is None:
            return min(found * GRAIN, length - 1)
        hit = min(found * GRAIN, rule.longest_hit(length))
        return max(rule.rerun_start(length, hit), min(start * GRAIN, hit, rule.last_slice(length)))

    # Reading

    def _begin(self, wanted: _Wanted, now: float) -> bool:
        """Takes room for what was found and has it read; False while there is none."""
        if wanted.settled:
            return True
        if self._has_begun(wanted):
            self._counters.late += 1
            self._settle(wanted)
            return True
        try:
            fetch = self._core.begin_fetch(wanted.handle, wanted.tokens)
        except TransferError:
            return False  # or the core has not seen the sequence yet
        if fetch["pending"]:
            self._behind.setdefault(fetch["pending"], []).append(wanted)
            return True
        self._counters.device_tokens += fetch["present"]
        if wanted.slice_key and self._slices is not None and not self._slices.has(wanted.slice_key):
            wanted.slice_due = True
            self._send(partial(self._slice_came, wanted), partial(self._read_slice, wanted.slice_key), now)
        if fetch["transfer"]:
            self._open(wanted, fetch)
        self._look_whether_done(wanted)
        return True

    def _open(self, wanted: _Wanted, fetch: _core.Fetch) -> None:
        """Blocks have been reserved."""
        present, tokens = fetch["present"], fetch["tokens"]
        wanted.fetch = fetch
        wanted.first = wanted.asked = present // GRAIN
        wanted.end = max(tokens // GRAIN, wanted.first)
        if tokens - present < self._plan.least:
            self._counters.too_few += 1
            wanted.end = wanted.first
        skipped = [(present - wanted.first * GRAIN) * per // GRAIN for per in self._plan.form.pages]
        wanted.pages = [
            np.concatenate([np.zeros(skip, np.int64), np.asarray(ids, np.int64)])[: (wanted.end - wanted.first) * per].reshape(-1, per)
            for ids, skip, per in zip(fetch["pages"], skipped, self._plan.form.pages, strict=True)
        ]
        self._reading[fetch["transfer"]] = wanted

    def _has_begun(self, wanted: _Wanted) -> bool:
        info = self._core.info(wanted.handle)
        return info is not None and info["status"] not in _WAITING

    def _read_on(self, now: float) -> None:
        """Asks for further pieces, as far as there are buffers."""
        for transfer, wanted in list(self._reading.items()):
            if not wanted.waits and wanted.asked < wanted.end and self._has_begun(wanted):
                self._counters.late += 1
                wanted.end = wanted.asked  # what is on its way is still somebody's
                self._look_whether_done(wanted)
                continue
            while wanted.asked < wanted.end and (staging := self._buffers.take()) is not None:
                first, last = wanted.asked, min(wanted.asked + self._buffers.objects, wanted.end)
                wanted.asked, wanted.pieces = last, wanted.pieces + 1
                keys = wanted.keys[first * KEY_BYTES : last * KEY_BYTES]
                into = self._buffers.view(staging, last - first)
                job = partial(self._tier.get, "block", keys, into, self._plan.form.num_bytes)
                self._send(partial(self._came, wanted, first, last, staging), job, now)
            if wanted.asked < wanted.end:
                return
            del self._reading[transfer]

    def _came(self, wanted: _Wanted, first: int, last: int, staging: Staging, result: object) -> None:
        """A piece has been read, or some of it, or none."""
        wanted.pieces -= 1
        if isinstance(result, BaseException):
            self._fault(result)
        hits = bytes(result) if isinstance(result, bytes | bytearray) and len(result) == last - first else b""
        whole = next((i for i, hit in enumerate(hits) if not hit), len(hits))
        fetch = wanted.fetch
        if fetch is None:  # given up meanwhile
            self._buffers.give(staging)
            return
        if whole < last - first:
            self._counters.lost += last - first - whole
            wanted.end = min(wanted.end, first + whole)
            self._reading.pop(fetch["transfer"], None)
        if whole and first < wanted.end:
            at = first - wanted.first
            self._buffers.write([ids[at : at + whole] for ids in wanted.pages], staging)
            wanted.here[first] = first + whole
        else:
            self._buffers.give(staging)
        self._look_whether_done(wanted)

    def _read_slice(self, key: bytes) -> bytes | None:
        into = bytearray(self._slice_bytes)
        hits = self._tier.get("slice", key, into, self._slice_bytes)
        return bytes(into) if len(hits) == 1 and hits[0] else None

    def _slice_came(self, wanted: _Wanted, result: object) -> None:
        wanted.slice_due = False
        if isinstance(result, BaseException):
            self._fault(result)
        elif isinstance(result, bytes) and self._slices is not None:
            try:
                self._slices.put(wanted.slice_key, result)
                self._counters.slices_fetched += 1
            except Exception as e:
                self._fault(e)
        self._look_whether_done(wanted)

    def _look_whether_done(self, wanted: _Wanted) -> None:
        if wanted.settled or wanted.slice_due or (wanted.pieces and wanted.arrived < wanted.end) or wanted.asked < wanted.end:
            return
        self._end(wanted)
        self._settle(wanted)

    def _end(self, wanted: _Wanted) -> None:
        """Tells the core how far a fetch has come; whatever still comes is dropped."""
        fetch, wanted.fetch = wanted.fetch, None
        if fetch is None:
            return
        self._reading.pop(fetch["transfer"], None)
        arrived = min(wanted.arrived, wanted.end)
        tokens = max(min(arrived * GRAIN, fetch["tokens"]), fetch["present"])
        objects = arrived - wanted.first
        near = max(0, min(tokens, wanted.near * GRAIN) - fetch["present"])  # an object may be in place in part
        self._counters.fetched += objects
        self._counters.host_tokens += near
        self._counters.store_tokens += tokens - fetch["present"] - near
        self._core.end_fetch(fetch["transfer"], tokens)
        for other in self._behind.pop(fetch["transfer"], ()):
            if not other.settled:
                self._roomless.appendleft(other)

    def _settle(self, wanted: _Wanted) -> None:
        """Nobody waits for it any more."""
        if not wanted.settled:
            wanted.settled = True
            self._settled += 1
            self._wanted.pop(wanted.handle, None)
            if wanted.waits:
                self._core.end_wait(wanted.handle)

    # Threads

    def _send(self, take: Callable[[object], None], job: Callable[[], object], now: float) -> None:
        number = self._number = self._number + 1
        self._jobs[number] = now

        def taken(result: object) -> None:
            del self._jobs[number]
            take(result)

        self._mover.submit(taken, job)

    def _hangs(self, now: float) -> bool:
        """Whether the tier has not answered for longer than anybody waits: then nobody is made to wait for it."""
        return bool(self._jobs) and now - min(self._jobs.values()) > min(self._plan.patience, PATIENCE)

    def close(self) -> None:
        """Gives up what is on its way. The core is not asked any more."""
        self._wanted.clear()
        self._mover.close(0.2)


def _checked(result: object, most: int) -> tuple[int, list[int], int]:
    """What a lookup gave, if it can be.

    Raises:
        TypeError, ValueError: it cannot.
    """
    if not isinstance(result, tuple) or len(result) != 3:
        raise TypeError(f"a tier's check gave {result!r}")
    found, positions, near = int(result[0]), [int(at) for at in result[1]], int(result[2])
    if not 0 <= found <= most or any(at < 0 for at in positions):
        raise ValueError(f"a tier's check gave {result!r} for {most} objects")
    return found, positions, max(0, min(near, found))
