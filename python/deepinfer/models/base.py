"""The contract of a model family: what the loaders and the worker call, and what they hand over.

Owns: the KV-group declaration, the forward batch, a model's settings and the protocols. Never touches: the scheduler, sampling, text.

A family is four modules. ``topology`` reads a configuration into a validated frozen plan; ``containers`` holds parameters under
their checkpoint names and computes nothing; ``forward`` is the class that is registered (``LoadableModel``), owns runtime layouts and
packs weights into them; ``ops`` has functions of tensors only. docs/adding-a-model.md walks through one in a package of its own.

Two rules hold for every ``forward``. The bits of a row depend on the tokens of its own sequence only: not on the other rows, not on
where a prompt was cut; the operators of ``deepinfer.kernels`` keep it. And nothing is read back from the device: sizes come from the
batch's host integers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self, runtime_checkable

import torch
import torch.nn.functional as F

from .images import ImagePiece


@dataclass(frozen=True)
class Source:
    """Tensors of one KV stream that share a page id.

    ``shape`` is the shape of one entry (for example ``(kv_heads, head_dim)``); the worker allocates one tensor
    ``[num_pages, entries_per_page, *shape]`` per name in ``tensors``.
    """

    tensors: tuple[str, ...]
    entries_per_page: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry over all tensors of this source."""
        n = 1
        for d in self.shape:
            n *= d
        return n * self.dtype.itemsize * len(self.tensors)


@dataclass(frozen=True)
class PagedGroup:
    """Pages of ``page_tokens`` tokens; group 0 sets the hash block."""

    page_tokens: int
    sources: tuple[Source, ...]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all sources."""
        return sum(s.entries_per_page * s.entry_bytes for s in self.sources)


@dataclass(frozen=True)
class WindowHits:
    """What the state of a model with windows of tokens allows behind a prefix hit (docs/architecture.md, "Hits of models with windows").

    Attributes:
        encoder: layers before the last one that writes paged KV; ``decoder``: layers from there on.
        window: tokens of a window, the own one included.
        grain: boundaries at which sequences may begin and states are copied, in tokens.
        backtrack: rows that a ring holds beyond its window: by so many a step may pass a boundary, and so many drafts it may have.
    """

    encoder: int
    decoder: int
    window: int
    grain: int
    backtrack: int


@dataclass(frozen=True)
class StateGroup:
    """Fixed bytes per sequence that do not page (see docs/architecture.md).

    Attributes:
        stored, dropped: bytes worth keeping beyond the sequence, and bytes that die with it.
        replicas: copies of the stored bytes in the same row.
        ring, cut: rows of a ring, and boundaries in tokens at which the state is copied; 0 = none.
        replica_at: where in a row the replica of all bytes before it begins, as long as they are; 0 = none. A model with ``hits``
            copies its state there whenever a sequence passes a multiple of ``cut``.
        hits: how the state is made up behind a prefix hit; ``None`` = not at all: prompts are computed from the start.
        history: token ids before a sequence's start that the state wants told where it begins without them (``StateRows.begun``).
    """

    stored: int
    dropped: int
    replicas: int = 0
    ring: int = 0
    cut: int = 0
    replica_at: int = 0
    hits: WindowHits | None = None
    history: int = 0


WeightForm = Literal["auto", "packed", "expanded"]
Truncation = Literal["off", "mask", "compact"]
CacheForm = Literal["auto", "packed", "bfloat16", "float32"]
TablePlace = Literal["auto", "files", "device", "host"]


@dataclass(frozen=True)
class ModelOptions:
    """What may be set on a model with caches of its own kind, see ``ConfigurableModel``; ``None`` = the model's choice.

    Attributes:
        cache_form: how cached rows are kept.
        truncation: whether a prompt's earlier rows are left out of the decoder (``compact``) or kept from its later ones (``mask``).
        keep_tokens: last tokens of a prompt that truncation leaves whole.
        max_backtracking: most rows one step may write past the last one that counts.
        max_draft: most drafts of a sequence and step.
        table_cache_bytes: host memory for rows of tables that stay in their files, all tables together.
        table_place: where those tables are for a step: in their files, on the device, or in host memory that a GPU reads by itself.
        drafts: whether the model makes them itself (``Drafter``), so that what it needs for that must be kept from the first row on.
    """

    cache_form: CacheForm = "auto"
    truncation: Truncation = "off"
    keep_tokens: int | None = None
    max_backtracking: int | None = None
    max_draft: int = 0
    table_cache_bytes: int | None = None
    table_place: TablePlace = "auto"
    drafts: bool = False


@dataclass
class StateRows:
    """What a step of a model with state groups says besides, on the device. ``T`` rows of ``n`` sequences.

    Everything depends on positions the host may know only as upper bounds, so counts given by host integers are bounds too.
    """

    row_seq: torch.Tensor  # int64 [T], index of each row's sequence in the step
    state_row: torch.Tensor  # int64 [n], state slot of each sequence
    floor: torch.Tensor  # int32 [n, 2], first position whose encoder / decoder window rows the state holds or the step makes
    decoder_from: torch.Tensor  # int32 [n], first row that is whole in the decoder: none above it sees one below it
    crossing: torch.Tensor  # int64 [c], sequences that may pass a boundary of the state group's ``cut`` in this step
    decoder_rows: torch.Tensor | None = None  # int64 [D], rows the decoder runs, ascending; None = all
    decoder_cu_q: torch.Tensor | None = None  # int32 [n + 1], of these rows as cu_q of all
    begun: torch.Tensor | None = None  # int64 [b, 2 + history] of slots that begin at a position above 0 without state: slot, position
    # and the token ids before it, oldest first, −1 before the sequence and where an image is; None = no slot does in this step


@dataclass
class ForwardBatch:
    """One step's rows on the device.

    ``T`` rows of ``n`` sequences; decoding sequences come first. Host integers are bounds for grids, never a sync:
    ``cu_q_host`` is exact, ``seq_len_host`` is exact for prefilling sequences and an upper bound for decoding ones.
    """

    ids: torch.Tensor  # int64 [T]
    pos: torch.Tensor  # int64 [T]
    slots: list[torch.Tensor]  # one int64 [T] per slot map, -1 = writes nothing
    cu_q: torch.Tensor  # int32 [n + 1]
    seq_len: torch.Tensor  # int32 [n], KV length including this step's rows
    block_table: torch.Tensor  # int32 [n, W], rows already gathered by state slot
    num_decodes: int  # leading sequences that have exactly one row, or draft rows
    max_q: int
    max_len: int
    cu_q_host: Sequence[int] = field(default_factory=list)  # the same values as cu_q, known on the host
    seq_len_host: Sequence[int] = field(default_factory=list)
    state: StateRows | None = None  # of models with state groups
    images: Sequence[ImagePiece] = ()  # which rows are those of images, of models that take them (models.images.VisionModel)

    def padded(self, rows: int) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """``ids``, ``pos`` and every slot map, padded to ``rows`` ≥ ``T`` (``kernels.linear.row_bucket``), ready for ``kv_write``.

        Padding rows are token 0 at position 0; they and rows that write nothing (−1) get slot 0, on the null page.
        """
        missing = rows - self.ids.shape[0]
        ids, pos, slots = self.ids, self.pos, self.slots
        if missing:
            ids, pos, slots = F.pad(ids, (0, missing)), F.pad(pos, (0, missing)), [F.pad(s, (0, missing)) for s in slots]
        return ids, pos, [s.clamp_min(0) for s in slots]


@runtime_checkable
class Model(Protocol):
    """What a family's forward object offers to the worker.

    ``vocab_size`` is the number of logits of a row, ``max_position`` the longest sequence in tokens.
    """

    vocab_size: int
    max_position: int

    def kv_groups(self, block_tokens: int) -> tuple[list[PagedGroup], list[StateGroup]]:
        """Declares KV for pages of ``block_tokens`` tokens. Every tensor's name is the family's own choice, and occurs once."""

    def forward(self, batch: ForwardBatch, kv: dict[str, torch.Tensor]) -> torch.Tensor:
        """Writes KV of the rows and gives hidden states ``[T, hidden]`` after the final norm.

        ``kv``: the tensors ``[num_pages, entries_per_page, *shape]`` that ``kv_groups`` declared, by name, and ``state<i>`` (uint8
        ``[slots, bytes]``) for each state group.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits float32 ``[R, vocab]`` of the given rows; a row's bits do not depend on ``R``."""


@dataclass(frozen=True)
class DecodeRows:
    """``R`` rows of a decode step, one a sequence, at addresses that never change (docs/architecture.md, "Decode graphs").

    Rows behind the step's own are padding: id 0 at position 0, ``seq_len`` 1, slot 0 of each map, table row 0. Behind ``seq_len``
    anything may be, in columns of the table as in entries of pages.
    """

    ids: torch.Tensor  # int64 [R]
    pos: torch.Tensor  # int64 [R]
    slots: list[torch.Tensor]  # one int64 [R] per slot map, at least 0: entry 0 is the null page's, which nobody reads
    seq_len: torch.Tensor  # int32 [R], KV length including the row: pos + 1
    block_table: torch.Tensor  # int32 [state slots, W], the whole table; its row 0 is the null page in every column
    table_row: torch.Tensor  # int64 [R], row of the table of each row: its sequence's state slot


@runtime_checkable
class GraphModel(Model, Protocol):
    """A model whose decode steps can be recorded as CUDA graphs."""

    def graph_rows(self, max_rows: int) -> Sequence[int] | None:
        """Row counts to record, ascending, for steps of up to ``max_rows`` rows (see ``row_buckets``); ``None`` = no graphs here.

        The last one may be above ``max_rows``; steps with more rows than it run ``forward``.
        """

    def decode(self, rows: DecodeRows, kv: dict[str, torch.Tensor]) -> torch.Tensor:
        """Writes KV of the rows and gives hidden states ``[R, hidden]`` after the final norm, the bits ``forward`` gives.

        It may be recorded: no value is read on the host, nothing but ``R`` is a host integer of the step, nothing it allocates is kept.
        """


@dataclass(frozen=True)
class PromptRows:
    """``R`` rows of a step with prompts, at addresses that never change (docs/architecture.md, "Prompt graphs").

    Rows lie in units: consecutive rows of one sequence, at most ``unit_rows`` of them, sequences in any order. Rows behind the step's own
    are padding, as in ``DecodeRows``, and in no unit; a unit of 0 rows is nothing.
    """

    ids: torch.Tensor  # int64 [R]
    pos: torch.Tensor  # int64 [R]
    slots: list[torch.Tensor]  # one int64 [R] per slot map, at least 0: entry 0 is the null page's, which nobody reads
    block_table: torch.Tensor  # int32 [state slots, W], the whole table
    unit_first: torch.Tensor  # int32 [U], first row of each unit
    unit_count: torch.Tensor  # int32 [U], its rows
    unit_row: torch.Tensor  # int64 [U], row of the table: its sequence's state slot


@runtime_checkable
class PromptGraphModel(Model, Protocol):
    """A model whose steps with prompts can be recorded as CUDA graphs."""

    def prompt_rows(self, max_rows: int) -> Sequence[int]:
        """Row counts to record, ascending, for steps of up to ``max_rows`` rows; none where the host is not what such steps wait for.

        The last one may be above ``max_rows``; steps with more rows than it run ``forward``.
        """

    @property
    def unit_rows(self) -> int:
        """Most rows of a unit, 1 or more."""

    def prompt_step(self, rows: PromptRows, kv: dict[str, torch.Tensor]) -> torch.Tensor:
        """Writes KV of the rows and gives hidden states ``[R, hidden]`` after the final norm, the bits ``forward`` gives. As ``decode``
        of a ``GraphModel`` it may be recorded."""


@runtime_checkable
class GreedyModel(Model, Protocol):
    """A model that finds the most likely token without keeping logits."""

    def greedy(self, hidden: torch.Tensor, tokens: torch.Tensor) -> None:
        """Writes ``tokens`` int32 ``[R]`` from ``hidden`` ``[R, hidden]``: the largest of ``logits(hidden)``, the lowest id of equal
        ones."""


@runtime_checkable
class RunLogitsModel(Model, Protocol):
    """A model whose head gives the run dtype, which ``logits`` widens: what only compares logits reads them as they are."""

    dtype: torch.dtype

    def run_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[R, vocab]`` in ``dtype``, contiguous: ``logits(hidden)`` is the same numbers in float32."""


_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96)
_BUCKET_STEP = 32  # above the table


def row_buckets(max_rows: int) -> list[int]:
    """Row counts for ``GraphModel.graph_rows``, the same for every model and setting: few rows of padding at any count. Ascending, up to
    the first of at least ``max_rows``."""
    largest = -(-max(max_rows, 1) // _BUCKET_STEP) * _BUCKET_STEP
    every = [*_BUCKETS, *range(_BUCKETS[-1] + _BUCKET_STEP, largest + 1, _BUCKET_STEP)]
    return every[: bisect_left(every, max_rows) + 1]


@runtime_checkable
class StatefulModel(Model, Protocol):
    """A model with state groups."""

    def end_step(self, batch: ForwardBatch, rejected: torch.Tensor | None, kv: dict[str, torch.Tensor]) -> None:
        """Called when a step's tokens are drawn, in the device's order.

        ``rejected`` int32 ``[n]``: last rows of each sequence that are drafts not taken; ``None`` = no draft rows. From here on
        the rows before them are what the sequence consists of: the place to copy state at a boundary.
        """


@dataclass(frozen=True)
class NewTokens:
    """Sequences of a step that have drawn a token, on the device: the ``m`` places to draft behind."""

    sequence: torch.Tensor  # int64 [m], index in the step
    token: torch.Tensor  # int64 [m], the newest token of each
    position: torch.Tensor  # int64 [m], its position; the rows before it are what the sequence consists of
    row: torch.Tensor  # int64 [m], row of the step that it was drawn from


DrawDrafts = Callable[[torch.Tensor, int, torch.Tensor], torch.Tensor]
"""``draw(logits, nth, before)``: tokens int64 ``[m]`` for draft ``nth`` (from 0) of each place, from logits float32 ``[m, vocab]`` (may be
changed) under the request's own sampling; ``before`` int64 ``[m, nth]`` are the drafts already made."""


@dataclass(frozen=True)
class Drafts:
    """``ids`` int64 ``[m, k]``: tokens for the positions behind the newest one; ``confidence`` float32 ``[m, k]``: logits of the
    probability that each is right if those before it are, made without looking at the draft itself."""

    ids: torch.Tensor
    confidence: torch.Tensor


@runtime_checkable
class Drafter(Model, Protocol):
    """A model that makes drafts itself, once a step's tokens are drawn. A wrong draft costs time, never a token.

    Of steps with drafts the batch's ``cu_q_host`` and ``seq_len_host`` are bounds: how many rows each sequence has is decided on the
    device.
    """

    draft_tokens: int
    """Drafts of one call, ``k``; 0 = this checkpoint has nothing to draft with."""

    def draft(
        self, batch: ForwardBatch, hidden: torch.Tensor, new: NewTokens, kv: dict[str, torch.Tensor], draw: DrawDrafts, count: int
    ) -> Drafts:
        """Called in the device's order behind ``forward`` and ``end_step`` of ``batch``, whose ``hidden`` ``[T, d]`` it is.

        ``count``: drafts wanted of each place, at most ``draft_tokens``. State may hold nothing for positions of a sequence that came
        with KV from elsewhere: its drafts may be poor, not undefined.
        """


@runtime_checkable
class RemarkingModel(Model, Protocol):
    """A model with something to say of its checkpoint to whoever starts an engine with it."""

    remarks: tuple[str, ...]
    """One line each; empty = nothing to say."""


@runtime_checkable
class BatchDependentModel(Protocol):
    """A model with a faster way for whom it is no matter that a row's bits follow from the number of rows."""

    def allow_batch_dependence(self) -> None:
        """Called once, before weights are loaded, where an engine does without batch invariance."""


@runtime_checkable
class PackingModel(Model, Protocol):
    """A model that can keep weights as FP8 checkpoints store them: 8-bit floats with scales (``kernels.linear_fp8.PackedWeight``)."""

    @classmethod
    def from_packed(cls, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device, packed: Collection[str]) -> Self:
        """Like ``LoadableModel.from_config``, in whose place it is called. ``packed``: weights that may stay packed. Of those that do,
        ``parameter`` gives a place in float8_e4m3fn, and ``parameter_shapes`` lists ``<name>_scale_inv`` besides, float32 of the shape
        ``kernels.linear_fp8.scale_shape``."""

    @property
    def packed_bytes(self) -> int:
        """Of all weights that are packed; 0 also where they had to be expanded once they were loaded."""


@runtime_checkable
class Fp8CacheModel(Model, Protocol):
    """A model that can keep keys and values as 8-bit floats (``kernels.fp8_cache``)."""

    def use_fp8_cache(self, scales: Mapping[str, float], unused: Sequence[str] = ()) -> None:
        """Called once, before weights are loaded, where an engine wants it: ``kv_groups`` then declares keys and values in float8_e4m3fn.

        ``scales``: what the checkpoint has of tensors that end in ``.k_scale``, ``.v_scale`` or, for both, ``.kv_scale``, each one number
        above 0. ``unused``: names that end in ``.q_scale``, of queries, which are not quantised; for ``RemarkingModel``. Raises
        ``CheckpointError`` for a scale that belongs to nothing of the model.
        """


class Fillable(Protocol):
    """The part of a loadable model that takes its weights."""

    def parameter_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Checkpoint name → shape of every tensor that must be loaded."""

    def optional_tensors(self) -> tuple[str, ...]:
        """Patterns (``fnmatch``) of checkpoint tensors that may be present and carry nothing this model needs."""

    def parameter(self, name: str) -> torch.Tensor:
        """Where the tensor of that checkpoint name is written (a view of its final place)."""

    def finish_loading(self) -> None:
        """Called once when all parameters are written: packs weights, frees what is no longer needed."""


@runtime_checkable
class ConfigurableModel(Model, Protocol):
    """A model with a choice of caches."""

    block_tokens: int
    """Tokens of a page unless another number is asked for."""

    def configure(self, options: ModelOptions) -> ModelOptions:
        """Called once, before ``kv_groups``; gives what holds. Raises ``ConfigError`` naming the setting."""


@runtime_checkable
class TableModel(Model, Protocol):
    """A model that reads rows of tables outside of its parameters."""

    def table_counters(self) -> dict[str, int]:
        """Totals since loading: ``rows`` asked for, ``lookups`` of distinct ones, ``hits``, ``misses``, ``evictions`` of the cache,
        ``bytes_read`` behind it; and its ``capacity`` in rows. Empty without tables. May be called from any thread.
        """


@runtime_checkable
class ExpertModel(Model, Protocol):
    """A model with mixtures of experts."""

    def expert_loads(self) -> Sequence[torch.Tensor]:
        """Of each layer with experts, int64 ``[experts]`` on the device: how often a row has chosen each, since loading."""


@runtime_checkable
class LoadableModel(Model, Fillable, Protocol):
    """A model class the loaders can fill: what ``register_model`` and entry points name.

    Order of calls: ``from_config`` · ``parameter_shapes`` · ``parameter`` of each name · ``finish_loading`` · the calls of ``Model``.
    ``from_config`` is also called with the device ``meta``, to count bytes: it must not read values. A family whose weights are not
    all numbers to be copied may have ``from_checkpoint`` besides (``loaders.load.LoadsItself``).
    """

    @classmethod
    def from_config(cls, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> Self:
        """Validates ``config`` (the fields of config.json) and allocates parameters; raises ``UnsupportedConfigError``."""

    @classmethod
    def position_limit(cls, config: Mapping[str, Any]) -> int:
        """Longest sequence the model was made for, in tokens, without allocating anything."""
