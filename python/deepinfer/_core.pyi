"""The Rust core: scheduler, KV index and step buffers (see docs/architecture.md for the step and its ring).

A sequence handle is one int, ``generation << 32 | index``; a stale one names nothing. Times are the caller's nanoseconds.
Calls may come from any thread; they keep the interpreter lock, but for a wait until another thread's call ends. After a panic inside the
core every call raises ``EngineDeadError``. A default of ``...`` is empty.
"""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Final, Literal, NotRequired, TypedDict, final, type_check_only

__all__ = [
    "DEBUG",
    "HEADER_WORDS",
    "KV_BENCH_PARTS",
    "KV_SETTINGS_EXAMPLE",
    "OUTPUT_WORDS",
    "VOTE_WORDS",
    "Core",
    "CoreConfig",
    "KvAgent",
    "KvOperator",
    "KvServer",
    "KvTicket",
    "KvTier",
    "KvTransfer",
    "MtpRuntime",
    "PagedGroup",
    "StateGroup",
    "WindowRule",
    "bench_chain_hash",
    "bench_prefix_match",
    "bench_steps",
    "kv_bench",
    "kv_keys",
]

HEADER_WORDS: Final[int]
OUTPUT_WORDS: Final[int]
VOTE_WORDS: Final[int]
KV_BENCH_PARTS: Final[list[str]]
KV_SETTINGS_EXAMPLE: Final[str]  # a settings file of the KV store's server, with every key and its default
DEBUG: Final[bool]  # built with debug assertions: step buffers are poisoned when they are returned, and times mean nothing

@final
class PagedGroup:
    """Pages of ``page_tokens`` tokens in a pool of ``num_pages`` (the null page 0 included).

    ``sources`` holds ``(entries_per_page, entry_bytes)`` of each tensor family that shares the page ids.
    """

    def __new__(cls, *, page_tokens: int, num_pages: int, sources: Sequence[tuple[int, int]]) -> PagedGroup: ...
    @property
    def page_tokens(self) -> int: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def sources(self) -> list[tuple[int, int]]: ...

@final
class StateGroup:
    """Bytes of one sequence that do not page: ``stored`` outlive it on request, ``dropped`` die with it."""

    def __new__(cls, *, stored: int, dropped: int, replicas: int = 0, ring: int = 0, cut: int = 0) -> StateGroup: ...
    @property
    def stored(self) -> int: ...
    @property
    def dropped(self) -> int: ...
    @property
    def replicas(self) -> int: ...
    @property
    def ring(self) -> int: ...
    @property
    def cut(self) -> int: ...

@final
class WindowRule:
    """Where sequences of a model with windows begin after a hit (see docs/architecture.md); everything but ``exact`` and
    ``truncated`` is in layers or tokens.

    ``encoder`` layers lie before the last one that writes block KV, ``decoder`` layers are the rest. Hits, starts and snapshots are
    multiples of ``grain``; a chunk of prefill passes the last one in its prompt by at most ``backtrack`` tokens. Not ``exact``: rows
    are computed again as the model was trained to bear. ``keep``: last tokens of a prompt that pass the decoder where it is
    ``truncated``, or at least where results are not exact; there it must be ``window + backtrack`` or more.
    """

    def __new__(
        cls,
        *,
        encoder: int,
        decoder: int,
        window: int,
        grain: int,
        backtrack: int,
        exact: bool = True,
        keep: int = 0,
        truncated: bool = False,
    ) -> WindowRule: ...
    @property
    def encoder(self) -> int: ...
    @property
    def decoder(self) -> int: ...
    @property
    def window(self) -> int: ...
    @property
    def grain(self) -> int: ...
    @property
    def backtrack(self) -> int: ...
    @property
    def exact(self) -> bool: ...
    @property
    def keep(self) -> int: ...
    @property
    def truncated(self) -> bool: ...
    def longest_hit(self, length: int) -> int:
        """Longest hit that a sequence of so many tokens may use."""

    def last_slice(self, length: int) -> int:
        """Last start of such a sequence that needs the windows of the encoder only."""

    def rerun_start(self, length: int, hit: int) -> int:
        """Its start behind a hit of ``hit`` tokens where there are no windows."""

@final
class CoreConfig:
    """Everything a core is built from.

    The first group is paged and its page is the hash block. ``max_in_flight``
    2 lets the next step be planned while one runs. ``step_policy`` None = "mixed", with a rank group "decode_first": a
    step is then either prompt or decode rows, and prefill is tried after ``all_interval`` decode steps if every rank wants it,
    after ``any_interval`` if any does. ``max_chunk_tokens`` 0 = the token budget; instead of it ``chunk_budget_ns`` limits the time of
    a step's prompt rows, a chunk of q rows behind c computed ones taking ``a q² + b q c + d q + e`` ns with ``chunk_cost = (a, b, d,
    e)``. ``model`` to ``salt`` root the hash chain: two engines share blocks only if all of them agree.
    Values are checked together by ``Core``.

    A ``"prompt"`` engine ends a sequence with its first token (finish ``"handover"``) and keeps its KV until ``Core.release``, at most
    ``handover_lease_ns``; a ``"completion"`` engine takes requests with ``wait_kv`` only. ``fetch_lease_ns`` bounds the wait of requests
    with ``fetch``.

    ``host_blocks`` and ``host_slots`` bound the host memory that victims of preemption are swapped to (see ``Core.set_rates``): page
    ``j`` of host block ``b`` in a group is its host page ``b * pages_per_block + j``. Host ids in the ring count from 0.
    ``snapshot_slots``: places for copies of sequences' states, of a model with a ``WindowRule`` and replicas.

    ``device_drafts`` (at most ``max_draft``): draft rows that each decoding sequence asks for in every step without the host knowing
    their ids; draft ``j`` (from 1) of a sequence carries the id ``-(1 + j)``, and the worker has the drafts.
    """

    def __new__(
        cls,
        *,
        groups: Sequence[PagedGroup | StateGroup],
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        vocab_size: int,
        max_draft: int = 0,
        device_drafts: int = 0,
        ring_slots: int = 3,
        max_in_flight: int = 1,
        device_ordered: bool = False,
        prefix_caching: bool = True,
        event_capacity: int = 0,
        step_policy: Literal["mixed", "decode_first"] | None = None,
        all_interval: int = 70,
        any_interval: int = 100,
        max_chunk_tokens: int = 0,
        chunk_budget_ns: int | None = None,
        chunk_cost: tuple[float, float, float, float] = ...,
        chunk_align: int = 1,
        bypass: int = 16,
        headroom_tokens: int = 16,
        kv_lease_ns: int = 60_000_000_000,
        fetch_lease_ns: int = 10_000_000_000,
        handover_lease_ns: int = 60_000_000_000,
        engine_type: Literal["normal", "prompt", "completion"] = "normal",
        host_blocks: int = 0,
        host_slots: int = 0,
        snapshot_slots: int = 0,
        hit_rule: Literal["all", "state_slice"] | WindowRule | None = None,
        model: str = "",
        revision: str = "",
        weight_format: str = "",
        kv_format: str = "",
        numerics: str = "",
        hit_policy: str = "exact",
        salt: bytes = ...,
    ) -> CoreConfig: ...
    @property
    def block_tokens(self) -> int: ...
    @property
    def max_num_seqs(self) -> int: ...
    @property
    def max_num_batched_tokens(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_draft(self) -> int: ...
    @property
    def device_drafts(self) -> int: ...
    @property
    def ring_slots(self) -> int: ...
    @property
    def host_blocks(self) -> int: ...
    @property
    def host_slots(self) -> int: ...
    @property
    def snapshot_slots(self) -> int: ...
    @property
    def engine_type(self) -> Literal["normal", "prompt", "completion"]: ...
    @property
    def max_in_flight(self) -> int: ...
    @property
    def prefix_caching(self) -> bool: ...
    @property
    def device_ordered(self) -> bool: ...

@type_check_only
class PoolCounts(TypedDict):
    """Pages of one paged group (or state slots) by state: ``free + cached + held + parked + reserved == total``."""

    total: int
    free: int
    cached: int
    held: int
    parked: int
    reserved: int
    held_by_transfers: int
    cached_fenced: int
    sequence_refs: int
    transfer_refs: int

@type_check_only
class Counts(TypedDict):
    """Counts of every pool; ``groups`` has one entry for each paged group. Those of host memory are zero where there is none, and
    else count one reserved id that is never used. Of ``snapshots`` the ``cached`` ones are ready, the ``held`` ones in use."""

    groups: list[PoolCounts]
    slots: PoolCounts
    host_blocks: PoolCounts
    host_slots: PoolCounts
    snapshots: PoolCounts

@type_check_only
class Times(TypedDict):
    """Times in buckets whose bounds double: bucket ``i`` counts those below ``1024 << i`` ns, the last one all above."""

    counts: list[int]
    sum_ns: int

@type_check_only
class Shares(TypedDict):
    """Parts of a whole: bucket ``i`` counts those from ``i`` tenths up, bucket 10 the wholes; ``part`` and ``whole`` are sums."""

    counts: list[int]
    part: int
    whole: int

@type_check_only
class Votes(TypedDict):
    """Rounds of a rank group and what they led to."""

    rounds: int
    second_rounds: int
    idle: int
    decode: int
    prefill: int
    fallback: int
    error: int

@type_check_only
class Metrics(TypedDict):
    """Everything the core counts, at one moment."""

    totals: dict[str, int]  # as `Core.stats`
    pools: Counts
    chunk_fill: Shares  # prefill rows of a step against the rows it had for them
    votes: Votes
    drafts_asked: list[int]  # how often a draft stood at each position of a sequence's drafts, in completed steps
    drafts_taken: list[int]  # and how often it was accepted there
    device_time: Times
    host_time: Times
    idle_ns: int
    hidden_ns: int
    bubble: float  # part of the device's time in which it stood still although there was work
    overlap: float  # part of the host's work that was hidden under the device's

@type_check_only
class SequenceInfo(TypedDict):
    """What is known of a sequence. Times are the caller's nanoseconds, 0 = not yet."""

    status: Literal[
        "wait_grammar",
        "wait_kv",
        "wait_fork",
        "ready",
        "running",
        "swapping_out",
        "swapped",
        "handover",
        "finished",
    ]
    finish: Literal["stop", "length", "abort", "error", "handover"] | None
    prompt_tokens: int
    output_tokens: int
    computed_tokens: int  # positions whose KV is written
    cached_tokens: int  # prompt tokens that came from the prefix index at the last admission
    state_slot: int  # 0 when it has none
    preemptions: int
    priority: int
    arrival: int  # order of arrival
    user: int
    arrived_ns: int
    admitted_ns: int
    first_token_ns: int
    finished_ns: int

@type_check_only
class Transfer(TypedDict):
    """Memory that a mover may read (save) or must write (load) until ``Core.transfer_ended``."""

    transfer: int
    blocks: memoryview  # int32 block ids, first block first
    pages: list[memoryview]  # int32 page ids of these blocks in each paged group
    state_slot: int
    tokens: int  # positions in all
    present: NotRequired[int]  # loads: leading positions that are in place already
    # Loads: newest launched step, 0 when none is in flight. The mover writes after it has completed, or behind it on the device.
    after_step: NotRequired[int]

@type_check_only
class Fetch(TypedDict):
    """Memory that a mover must write until ``Core.end_fetch``: in the device's order behind step ``after_step``, and ahead of the next
    step that is planned after ``end_fetch``."""

    transfer: int  # 0 if nothing was opened, see `pending`
    present: int  # leading positions that are in place already: whole blocks, not whole grains
    tokens: int  # positions in all, whole blocks; `present` if there is nothing to bring
    blocks: memoryview  # int32 block ids of positions `present` to `tokens`, to be written
    pages: list[memoryview]  # int32 page ids of these blocks in each paged group
    after_step: int  # newest planned step, 0 when none is in flight
    pending: int  # 0, or the transfer that is bringing the block behind `present` already: ask again when it has ended

@type_check_only
class ChainSave(TypedDict):
    """Grains that a mover may read until ``Core.end_save``."""

    transfer: int
    seq: int  # whose they are; it may have ended
    keys: bytes  # chain hash of the last block of each grain, 16 bytes each
    parents: bytes  # that of the grain before it, 16 zero bytes for the first of a chain
    first: int  # position that the first grain begins at
    blocks: memoryview  # int32 block ids, first block first
    pages: list[memoryview]  # int32 page ids of these blocks in each paged group

@final
class Core:
    """Scheduler, KV index and step buffers of one engine.

    Raises:
        ConfigError: the configuration cannot work; the message names the value.
    """

    def __new__(cls, config: CoreConfig) -> Core: ...
    def layout(self) -> list[tuple[str, int]]:
        """Fields of a ring slot and their length in int32 words, in the core's order."""

    def slot_maps(self) -> list[tuple[int, int]]:
        """``(paged group, entries per page)`` of each field ``slots{j}``."""

    def table_columns(self) -> list[int]:
        """First column of each paged group's section of the block table, then the total."""

    def register_ring(self, slots: Sequence[Mapping[str, Any]]) -> None:
        """Takes the memory of the ring: for each slot a mapping from field name to an int32 tensor in host memory, or to a
        writable int32 buffer (numpy, array, memoryview). The core keeps references. While a call of the step loop runs, nobody
        else may touch the memory, and a tensor must not be resized.

        Raises:
            RingLayoutError: a field is missing, has another size, type or place, or two overlap; nothing is kept.
        """

    def add(
        self,
        tokens: Any,
        *,
        max_new_tokens: int,
        min_new_tokens: int = 0,
        eos_ids: Sequence[int] = ...,
        stop_ids: Sequence[int] = ...,
        ignore_eos: bool = False,
        priority: int = 0,
        salt: bytes = ...,
        extras: Sequence[tuple[str | int, int, bytes]] = ...,
        spans: Sequence[tuple[int, int]] = ...,
        stream: bool = False,
        prompt_logprobs: bool = False,
        grammar: bool = False,
        wait_kv: bool = False,
        fetch: bool = False,
        hold: bool = False,
        produced: int = 0,
        n: int = 1,
        user: int = 0,
        arrival: int = 0,
    ) -> list[int]:
        """Checks, hashes and queues a request; gives one handle for each of ``n`` sequences.

        ``tokens`` is a sequence of ints or a one-dimensional buffer of 32- or 64-bit integers. ``extras`` are
        ``("image" | "adapter" | number, position, identity)`` that the KV depends on beside the tokens, by position. ``spans``
        are ``(start, end)`` of positions of the prompt that are computed in one step, in order. Smaller
        ``priority`` is served first, and among equals the smaller ``arrival``, which is 0 for one that stands behind all that came so
        far, and that of the first run for one that is run again. ``stream`` has every step's tokens notified, not the last only. A
        sequence with ``grammar`` waits for ``grammar_ready``. The last ``produced`` of ``tokens`` are output already, made elsewhere:
        ``max_new_tokens``, ``min_new_tokens``, ``output_tokens`` and every count of outputs include them, and the prompt is what comes
        before them.

        With ``fetch`` the (first) sequence waits until ``end_wait``, at most ``fetch_lease_ns``, and is then admitted like any other.

        A request with ``wait_kv`` that is turned away is named by ``drain_remote_releases`` like one that ended.

        Raises:
            EmptyPromptError: no token.
            TokenOutOfRangeError: an id is negative or not below the vocabulary.
            PromptTooLongError: no room for an answer within ``max_model_len``, or the request could not even have the whole pool.
            InvalidRequestError: two settings exclude each other, or a span is longer than a step can be sure to hold.
            EngineDeadError: the core is closed or stopped after a fault.
        """

    def abort(self, seq: int) -> None:
        """Ends a sequence in whatever status it is, at the next ``schedule``."""

    def stop_at(self, seq: int, num_tokens: int, reason: Literal["stop", "length", "abort", "error"] = "stop") -> None:
        """Ends a sequence after ``num_tokens`` output tokens; what was made beyond is dropped."""

    def grammar_ready(self, seq: int, ok: bool) -> None:
        """The grammar of a sequence is compiled, or cannot be: then the sequence ends with an error."""

    def propose(self, seq: int, tokens: Any) -> bool:
        """Drafts for the next step of a decoding sequence: guesses for the positions after its next planned row. False if there is
        no such sequence.

        Raises:
            ConfigError: drafts are made on the device (``device_drafts``).
        """

    def set_draft_budget(self, rows: int) -> None:
        """Most draft rows of one step over all sequences, from the next ``schedule`` on. Drafts of the device have rows beyond it
        (header word 26 against 21): the worker chooses which are verified."""

    def set_ngram(self, tokens: int, *, shortest: int = 2, longest: int = 4, candidates: int = 16, catch_up: int = 16_384) -> None:
        """Turns prompt lookup on: up to ``tokens`` drafts a sequence, copied from where its newest ``shortest`` to ``longest`` tokens
        occurred before. A pass looks at ``candidates`` occurrences a sequence at most and enters ``catch_up`` positions in all.

        Raises:
            ConfigError: a value is out of range, ``tokens`` is above ``max_draft``, or drafts are made on the device.
        """

    def propose_ngram(self) -> int:
        """Proposes drafts for all decoding sequences, between ``complete`` and ``schedule``; gives their number."""

    def schedule(self, now_ns: int) -> int:
        """Plans the next step into a ring slot and gives the slot; −1 when there is nothing to run (then see ``flush``).

        Raises:
            StepOrderError: ``max_in_flight`` steps are in flight, the slot is still used, or no ring is registered.
            RankGroupError: the rank group did not agree on a step; each of its ranks is told so.
        """

    def set_vote(self, vote: Any) -> None:
        """Joins a rank group: from now on every step is agreed with the other ranks, and ``schedule`` must be called as often as on
        each of them, also when there is nothing to run here. ``vote`` has ``start(words)``, ``wait()`` and ``close()`` (see
        ``deepinfer.distributed.vote``); it belongs to the core from here on, which closes it when it is closed, when another is set,
        and when this call fails.

        Raises:
            ConfigError: ``step_policy`` is "mixed".
            StepOrderError: steps are in flight.
            RankGroupError: the others cannot be reached.
        """

    def fail_group(self) -> None:
        """Tells the other ranks in the next round that this one failed outside of a step: then no rank has a step."""

    def is_group_asleep(self) -> bool:
        """Whether the group agreed that nobody has anything to run: its ranks go on making rounds, but may take their time."""

    def plan_dummy(self, now_ns: int) -> int:
        """Plans a step of one row on the null page, for a rank that must take part in a step without having work."""

    def complete(self, slot: int, now_ns: int) -> int:
        """Reads ``accepted`` and ``tokens`` of the step in ``slot``, appends, stops, publishes, releases; gives the number of
        output rows.

        Raises:
            StepOrderError: no step is in flight in that slot, or an older one is.
        """

    def fail_step(self, slot: int, now_ns: int | None = None) -> int:
        """Ends the sequences of the step in ``slot`` with ``error`` and keeps the rest; gives the number of output rows. Without
        ``now_ns`` the time of the newest ``schedule`` counts."""

    def flush(self) -> int:
        """After an idle ``schedule``: output rows of sequences that ended without a step (aborted while waiting, failed grammar)."""

    def outputs(self) -> memoryview:
        """Newest output rows, int32 words, 8 a row: seq index, seq generation, state slot, first token, tokens in this step,
        finish (0 none, 1 stop, 2 length, 3 abort, 4 error, 5 handover), flags (1 streams, 2 first output), index in the step (−1 none). A
        copy, valid for as long as it is kept."""

    def notify(self) -> memoryview:
        """Rows of ``outputs`` that a reader must look at, int32: finished or streaming ones. A copy."""

    def output_tokens(self, seq: int) -> memoryview | None:
        """Output tokens so far, int32; None once the end has been reported by an earlier step."""

    def history(self, seq: int) -> memoryview | None:
        """Prompt and output tokens, int32; None as for ``output_tokens``."""

    def info(self, seq: int) -> SequenceInfo | None:
        """What is known of a sequence; None as for ``output_tokens``."""

    def begin_save(self, seq: int) -> Transfer:
        """Holds a sequence's blocks and slot for a reader, past its end, until ``transfer_ended``.

        Raises:
            TransferError: the sequence has ended, or has such a transfer already.
        """

    def begin_load(self, seq: int, tokens: int) -> Transfer:
        """Reserves blocks and a slot for the first ``tokens`` positions of a sequence added with ``wait_kv``.

        Raises:
            TransferError: no room now, or the sequence is not waiting for KV.
        """

    def transfer_ended(self, transfer: int, ok: bool) -> None:
        """The mover is done with the memory of a transfer. Late and repeated calls are counted and otherwise ignored."""

    def release(self, seq: int) -> bool:
        """Lets go of what a sequence in status ``"handover"`` kept after its end (one added with ``hold``, or handed over by a
        prompt engine); False if the handle names no such sequence."""

    def set_rates(self, swap_bytes_per_s: float, prefill_tokens_per_s: float) -> None:
        """Measured rates by which a victim of preemption is swapped to host memory (``bytes / swap_bytes_per_s`` is less than
        ``tokens / prefill_tokens_per_s``) or computed again. 0 = not known: nothing is swapped."""

    def drain_remote_releases(self) -> list[tuple[int, int]]:
        """``(seq, user)`` of each request added with ``wait_kv`` whose KV elsewhere is not needed any more since the last call: it
        arrived, failed, expired, was aborted or turned away (``seq`` is 0 then). Each request is named once."""

    def next_lease_ns(self) -> int | None:
        """When the next lease ends: ``schedule`` should be called then even if there is nothing else to do. None without one."""

    def set_state_slices(self, on: bool) -> None:
        """Whether ``take_state_slices`` has anything to give from now on.

        Raises:
            ConfigError: the model has no windows, no replica of them, or nothing is looked up.
        """

    def take_state_slices(self) -> list[tuple[int, int, int, bytes]]:
        """``(seq, state slot, boundary in tokens, key)`` of each replica that a slice is to be cut from: at the last boundary of a
        prompt and where a request ended. Ask after each ``complete`` and each ``schedule`` and copy before more is launched; what has
        waited for longer is not given. ``key``: the chain hash of the block that ends there, 16 bytes."""

    def note_state_slice(self, key: bytes, tier: Literal["host", "store"], present: bool) -> bool:
        """Says that there is a slice of the boundary with this chain hash, or no longer. It counts as long as it is noted, whenever a
        block of that hash is in the index. False if it was not noted: a key of nothing, or more than 2^20 slices."""

    def chain_hash(self, seq: int, tokens: int) -> bytes | None:
        """Chain hash of the first ``tokens`` tokens of a sequence, 16 bytes; ``None`` if that is no end of a block or not hashed yet."""

    def give_up_start(self, seq: int) -> bool:
        """The slice that a sequence was to begin with in the newest step is gone: its rows of that step count for nothing, and it is
        admitted again. False if it did not begin at a slice in that step."""

    def chain(self, seq: int) -> bytes:
        """Chain hashes of the full blocks of a sequence, 16 bytes each, as far as they are hashed: those of its prompt from ``add`` on.
        Empty for a handle that names nothing."""

    def begin_fetch(self, seq: int, tokens: int) -> Fetch:
        """Holds what the index has of the first ``tokens`` positions (whole blocks) of a sequence that waits, whatever for, and reserves
        blocks for the rest. What the oldest waiting sequence and the growth of the running ones need is left alone. Nothing is opened
        where another fetch is bringing the next block (``pending``).

        Raises:
            TransferError: no room now, not one whole block or more than ``chain`` has, or the sequence does not wait.
        """

    def end_fetch(self, transfer: int, tokens: int) -> bool:
        """Positions up to ``tokens`` have arrived, and the mover touches the blocks no more: full ones enter the index and are
        anybody's, from the next planned step on; the others go back. The sequence may have been admitted, or have ended. False, and
        counted as stale, if no such fetch is open."""

    def end_wait(self, seq: int) -> bool:
        """A sequence added with ``fetch`` waits no longer. False if it was not waiting for that (any more)."""

    def set_saves(self, mode: Literal["off", "on_finish", "write_through"], grain_blocks: int = 1) -> None:
        """Which chains ``take_saves`` gives from now on, in grains of ``grain_blocks`` blocks: ``"on_finish"`` those of computed prompts
        and of requests that end by themselves or are handed over, ``"write_through"`` also those of every step.

        Raises:
            ConfigError: ``prefix_caching`` is off, or a grain of 0 blocks.
        """

    def take_saves(self) -> list[ChainSave]:
        """Whole grains that were completed since the last call and are neither saved, being saved nor fetched. Ask after each
        ``complete`` and each ``schedule``: until then they are not held and may be evicted."""

    def end_save(self, transfer: int, ok: bool) -> bool:
        """The mover is done with the blocks of a save; not ``ok``: they count as not saved. False, and counted as stale, if no such save
        is open."""

    def has_work(self) -> bool:
        """Whether a sequence has not ended, an end has not been reported, or a step is in flight."""

    def counts(self) -> Counts:
        """Blocks and state slots by state."""

    def stats(self) -> dict[str, int]:
        """Totals since the start (steps, tokens, hits, preemptions, ends by reason, …) and gauges."""

    def metrics(self) -> Metrics:
        """All counters, histograms and gauges of one moment."""

    def note_step_times(self, step: int, device_ns: int, idle_ns: int, host_ns: int) -> bool:
        """Takes the measured times of a completed step (its number, from the header): how long the device worked on it, how long it
        stood still before it although there was work, how long the host worked. False, and nothing counted, if the step has not
        completed or comes twice or out of order; steps may be left out."""

    def check(self) -> str | None:
        """Recounts pools and holders from scratch, for tests; says what disagrees."""

    def drain_events(self) -> list[tuple[str, bytes, bytes, bytes] | tuple[str, int]]:
        """Changes of the prefix index since the last call: ``("stored" | "removed", hash, parent, namespace)``, or
        ``("reset", lost)`` when the log overflowed and what is indexed follows."""

    def inject_fault(self, message: str) -> None:
        """Panics inside the core, for tests of what a fault leads to. Raises ``EngineDeadError``, as every later call does."""

    def close(self) -> None:
        """Lets go of pools and ring memory; later calls raise ``EngineDeadError``. Idempotent."""

@final
class KvTicket:
    """Permission to pull one offer, to be kept as secret as the KV itself. Equal, hashable, pickled; ``str`` gives text that the
    constructor reads back.

    Raises:
        KvRefusedError: not a ticket, or one of another version.
    """

    def __new__(cls, data: bytes | str, /) -> KvTicket: ...
    @property
    def id(self) -> bytes:
        """Sixteen random bytes, as in the owner's events."""

    @property
    def length(self) -> int:
        """Payload bytes."""

    @property
    def checksum(self) -> int:
        """XXH3-64 of description and payload."""

    @property
    def address(self) -> str:
        """Where the owner listens: ``shm:name`` or ``tcp:ip:port``."""

    def to_bytes(self) -> bytes: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __reduce__(self) -> tuple[type[KvTicket], tuple[bytes]]: ...

@type_check_only
class KvTransferCounts(TypedDict):
    """Gauges of an end's own offers; ``events_lost`` counts those that nobody fetched in time."""

    offers: int
    bytes: int
    pulls: int
    events_lost: int

@final
class KvTransfer:
    """One end of a hand-over of KV bytes between processes: it offers, and pulls what others of its kind offer.

    ``shm`` is for one machine, user and network namespace, ``tcp`` for any machine. Two ends understand each other if ``layout``
    (what the bytes mean) and ``token`` (a shared secret of at least 16 bytes) are equal. ``listen`` and ``advertise`` are
    ``"ip:port"``; TCP listens on 127.0.0.1 and any free port unless told otherwise, and elsewhere only with a token. Times are
    seconds; None is the default of the core. Threads of its own serve peers and end leases; calls may come from any thread, and
    those that move bytes let go of the interpreter lock.

    Raises:
        ConfigError: a setting makes no sense; the message names it.
        KvTransferError: the address is taken, or the system has no thread or socket left.
    """

    def __new__(
        cls,
        back_end: Literal["shm", "tcp"],
        *,
        layout: bytes = ...,
        token: bytes | None = None,
        listen: str | None = None,
        advertise: str | None = None,
        max_offers: int | None = None,
        max_bytes: int | None = None,
        max_pull_bytes: int | None = None,
        max_meta_bytes: int | None = None,
        max_connections: int | None = None,
        max_lease: float | None = None,
        connect_timeout: float | None = None,
        handshake_timeout: float | None = None,
        stall_timeout: float | None = None,
        pull_timeout: float | None = None,
    ) -> KvTransfer: ...
    @property
    def address(self) -> str:
        """What own tickets carry."""

    def offer(self, meta: bytes, segments: Sequence[Any], lease: float) -> KvTicket:
        """Copies the segments, one after the other, and lets whoever has the ticket pull them for ``lease`` seconds.

        Segments are contiguous buffers or tensors in host memory, of any type; nobody may write to them during the call, and they
        may be reused after it. ``meta`` is a small description that comes back from the pull.

        Raises:
            KvFullError: the limit on offers or bytes is reached.
            KvTooLargeError: ``meta`` is over its limit.
            ConfigError: the lease is out of range.
            InvalidRequestError: a segment is not contiguous or not in host memory.
        """

    def pull(self, ticket: KvTicket) -> tuple[bytes, bytearray]:
        """Brings the bytes of an offer, checked for length and checksum: ``(meta, payload)``. The offer stays.

        Raises:
            KvGoneError, KvCorruptError, KvUnreachableError, KvRefusedError, KvTooLargeError: see there.
        """

    def pull_into(self, ticket: KvTicket, buffers: Sequence[Any]) -> bytes:
        """The same into writable buffers or host tensors, in order, whose bytes together are ``ticket.length``; gives ``meta``.
        After an error their contents mean nothing.

        Raises:
            InvalidRequestError: a buffer is read-only, not contiguous, not in host memory, or overlaps another.
        """

    def release(self, ticket: KvTicket) -> bool:
        """Ends an offer, own or another's; False if it had ended. Pulls in progress go on.

        Raises:
            KvUnreachableError: the owner does not answer; the lease will end the offer.
            KvRefusedError: see there.
        """

    def poll(self) -> list[tuple[bytes, Literal["pulled", "released", "expired"]]]:
        """What happened to own offers since the last call: at most one ``pulled`` each (somebody has verified all of it), and
        exactly one of the other two. Never waits."""

    def counts(self) -> KvTransferCounts:
        """Gauges of own offers."""

    def close(self) -> None:
        """Ends every offer and connection; later calls raise ``KvTransferError``. Idempotent."""

@final
class KvTier:
    """The KV store behind an address (docs/kvstore.md): objects of 128 tokens by chain hash, for engines.

    ``dir:PATH`` opens a store in this process, durable when a put returns; ``capacity`` (default 64 GiB), ``slack``,
    ``segment_bytes`` and ``max_object`` are its bounds in bytes. ``tcp://HOST:PORT[,HOST:PORT…]`` and ``unix:PATH``
    are entry points: what one that does not answer has is misses. ``agent:PATH`` is the agent of this host.

    Objects of ``tenant`` are found by that tenant only; those of the public one (``""``) by everybody. ``first_stays``: bytes of one
    name may differ between writers (``replay``); the first write stays, without an alarm. ``fingerprint`` (16 bytes: what keys mean
    apart from the size of their blocks), ``block_tokens`` and
    ``tokens`` (role → secret) are told to servers; an embedded store has no use for them. ``tls_ca`` (a PEM file) makes connections
    protected: the server's certificate is from that authority and for ``tls_name``, by default the host of the address.

    ``keys`` and ``parents`` are 16 bytes an object. Buffers are checked for their length before anything is read or written.
    Calls may come from any thread and let go of the interpreter lock; what they raise is a ``KvStoreError`` or, for buffers and
    words that make no sense, an ``InvalidRequestError``.
    """

    def __new__(
        cls,
        address: str,
        *,
        tenant: str = "",
        fingerprint: bytes = ...,
        block_tokens: int = 0,
        first_stays: bool = False,
        tokens: Mapping[str, bytes] | None = None,
        tls_ca: str | PathLike[str] | None = None,
        tls_name: str | None = None,
        capacity: int | None = None,
        slack: int | None = None,
        segment_bytes: int | None = None,
        max_object: int | None = None,
    ) -> KvTier: ...
    @property
    def address(self) -> str: ...
    def check(self, keys: bytes, slices: int = 1) -> tuple[int, list[int], int]:
        """Of a chain: blocks present from the first on; positions of up to ``slices`` blocks among them that have a slice, deepest first;
        how many of the blocks are in memory shared with this process."""

    def get(self, kind: Literal["block", "slice"], keys: bytes, into: Any, each: int) -> bytes:
        """Reads whole objects of ``each`` bytes, object ``i`` to ``into[i * each:]``; one byte a key, 1 where it came with its checksum.

        What lies in ``into`` where a 0 is may be anything. An object of another length is not there.
        """

    def put(
        self,
        kind: Literal["block", "slice"],
        keys: bytes,
        parents: bytes,
        lengths: Sequence[int],
        data: Any,
        traffic_class: Literal["chat", "agent", "other"] = "chat",
    ) -> bytes:
        """Writes objects that lie one behind the other in ``data``; one letter an object.

        ``s`` stored, ``e`` exists, ``c`` is there with other bytes, ``p`` its parent is not there, ``f`` failed. Blocks are neighbours in
        one chain; ``parents`` are all keys of the chain before them, from its first block on. Slices need none.
        """

    def flush(self, seconds: float, /) -> bool:
        """Waits until everything that was put has reached the store: whether it has, within that time."""

    def stats(self) -> dict[str, int]:
        """Counters and sizes, by name."""

    def trouble(self) -> str | None:
        """What the latest read or write that failed failed with: a wrong token, nobody at the address, a full disk."""

    def close(self) -> None:
        """Ends this side: later calls raise. May be called more than once."""

@type_check_only
class KvServerInfo(TypedDict):
    addresses: list[str]
    metrics: str | None
    media: Literal["local", "objects", "striped"]
    root: str
    capacity: int
    policy: Literal["lru", "ttl", "marginal"]
    directory: bool | None  # whether the directory server answers; None: the settings name none
    blocks: int
    slices: int

@final
class KvServer:
    """A KV store behind sockets, with upkeep and metrics, serving from the moment it is made.

    ``settings`` is a TOML file; the environment (``DEEPINFER_KVSTORE_*``) lies over it, ``given`` (keys and their text) over both. What is
    wrong in them is a ``KvStoreRefusedError`` of one line that names the key.
    """

    def __new__(cls, settings: str | PathLike[str] | None = None, given: Sequence[tuple[str, str]] = ...) -> KvServer: ...
    def describe(self) -> KvServerInfo:
        """Where it listens, with the ports that were chosen, and what it holds."""

    def trouble(self) -> tuple[int, str | None]:
        """How often its disk or service has failed, or a writer has made other bytes of a name, and what was said of it at last."""

    def drain(self) -> None:
        """Takes no new work, ends what is under way, seals the store and ends. May be called more than once."""

@type_check_only
class KvAgentInfo(TypedDict):
    address: str
    metrics: str | None
    arena: int
    directory: bool | None

@final
class KvAgent:
    """The agent of a host: memory that its engines share, in front of a KV store. Settings as for ``KvServer``."""

    def __new__(cls, settings: str | PathLike[str] | None = None, given: Sequence[tuple[str, str]] = ...) -> KvAgent: ...
    def describe(self) -> KvAgentInfo:
        """What engines give as an address, and the size of the memory."""

    def trouble(self) -> tuple[int, str | None]:
        """How often the store behind it has failed, and what was said of it at last."""

    def drain(self) -> None:
        """Takes no more puts, waits until the store has those it took, and ends; raises if the store does not have all of them."""

@final
class KvOperator:
    """One end that asks a KV store's server (``tcp://HOST:PORT``, ``unix:PATH``) or opens a store in a directory (``dir:PATH``)."""

    def __new__(
        cls,
        address: str,
        *,
        role: Literal["check", "get", "put", "admin"] = "admin",
        token: bytes | None = None,
        tenant: str = "",
        tls_ca: str | PathLike[str] | None = None,
        tls_name: str | None = None,
        timeout: float = 30.0,
    ) -> KvOperator: ...
    def admin(self, command: str) -> str:
        """Runs a command of an operator: a JSON object with ``do``; the answer is JSON."""

    def check(self, keys: bytes, slices: int = 1) -> tuple[int, list[int], int]:
        """Of a chain: blocks present from the first on, positions of slices among them, another size of blocks that is in use (or 0)."""

@final
class MtpRuntime:
    """From times of completed steps to the budget of draft rows of the next step.

    ``sizes`` are the row counts that steps are padded to, rising; without them, sizes up to ``rows`` a quarter apart. Up to
    ``full_below`` sequences every draft is verified. Every ``explore_every`` updates (0 = never) the budget is that of the size which
    was measured longest ago.

    Raises:
        ConfigError: no draft, or sizes that do not rise.
    """

    def __new__(
        cls, max_draft: int, *, sizes: Sequence[int] = ..., rows: int = 0, full_below: int = 4, explore_every: int = 200
    ) -> MtpRuntime: ...
    def update(self, num_seqs: int, graph_size: int, forward_ms: float, sampler_ms: float) -> int:
        """Takes in a completed step of ``num_seqs`` decoding sequences (nothing else) and ``graph_size`` rows; gives the budget for a
        step of as many sequences."""

    def note_accepted(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Takes in, by place, how many sequences of a completed step had such a draft and how many accepted it and all before."""

    def survival(self, place: int) -> float:
        """Estimated probability that draft ``place`` makes a token."""

    def expected_ms(self, rows: int) -> float:
        """Expected time of a step of ``rows`` rows; 0 while nothing was measured."""

def bench_steps(core: Core, steps: int, now_ns: int, token: int, shared: Any, prompt_tokens: int, refill: int) -> list[int]:
    """Nanoseconds of ``schedule`` plus ``complete`` in each of ``steps`` steps, timed inside Rust; every sequence samples ``token``.

    With ``refill`` each sequence that ended is replaced by a request for that many tokens, its prompt being ``shared`` filled up to
    ``prompt_tokens``. Fewer samples if nothing is left to run.
    """

def bench_chain_hash(tokens: int, block: int, repeats: int) -> list[int]:
    """Nanoseconds of hashing a chain of ``tokens`` tokens."""

def bench_prefix_match(tokens: int, block: int, pool_blocks: int, repeats: int) -> list[int]:
    """Nanoseconds of one prefix match, references taken and blocks listed; each time another chain of a full pool."""

def kv_keys(
    tokens: Sequence[int],
    *,
    block_tokens: int,
    grain: int = 128,
    model: str = "",
    revision: str = "",
    weight_format: str = "",
    kv_format: str = "",
    numerics: str = "",
    hit_policy: str = "exact",
    salt: bytes = ...,
) -> bytes:
    """Keys (16 bytes each) of the KV store's objects of a sequence: of every ``grain`` tokens the chain hash of the last block."""

@type_check_only
class KvFigure(TypedDict):
    name: str
    unit: Literal["GB/s", "us", "ms", "B"]
    value: float  # median of five rounds
    beside: float | None
    ratio: list[float] | None  # median of the rounds' ratios, least, greatest

def kv_bench(part: str, dir: str | PathLike[str], entries: int, round_bytes: int) -> list[KvFigure]:
    """Measures one of ``KV_BENCH_PARTS`` in a directory of its own below ``dir``, which is deleted afterwards."""
