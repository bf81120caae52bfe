"""How DeepSeek-V4.1 is computed: the backbone over a step's rows.

The rows of a step pass all layers together, padded once. Layers before the last cache source are the encoder; from there on rows of a
prompt may be left out (``compact``) except for the entries they add to that source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.nn.functional as F

from ...errors import ConfigError
from ...kernels.rms_norm import rms_norm
from ...kernels.stream_mix import collapse
from ..base import Drafts, DrawDrafts, ForwardBatch, ModelOptions, NewTokens, PagedGroup, StateGroup
from ..loaders.resolved import ResolvedModel
from ..loaders.source import Progress
from .block_model import BlockModel
from .caches import PAGE_TOKENS, CachePlan, Storage, backtracking_of, packs, plan_caches
from .containers import DeepseekV41Parameters
from .draft_stages import DraftStages
from .engram_rows import EngramReader
from .image_input import ImageSizes
from .layer import Layer, Streams
from .loading import load_parameters
from .ops import begin_streams, mean_stream
from .step import Step, make_step
from .topology import read_topology
from .vision_forward import VisionTower


@dataclass(frozen=True)
class Taps:
    """What draft stages read of a step: ``values`` ``[D, taps, d]``, means over the streams that enter the tapped layers.

    ``rows`` int64 ``[D]`` names the step's rows they belong to; None = the rows from the first on.
    """

    values: torch.Tensor
    rows: torch.Tensor | None


class DeepseekV41Model(BlockModel[DeepseekV41Parameters]):
    """DeepSeek-V4.1 for causal language modelling; ``models.base`` and ``registry.LoadableModel`` say what its methods are for."""

    block_tokens = PAGE_TOKENS

    def __init__(self, parameters: DeepseekV41Parameters, dtype: torch.dtype, device: torch.device) -> None:
        self.topology = topology = parameters.topology
        super().__init__(parameters, topology.rope_main, topology.rope_compress, dtype, device)
        self.vocab_size, self.max_position = topology.vocab, topology.max_position
        self.layers: list[Layer] = []
        """In runtime layout, in order; filled by ``finish_loading``."""
        self.draft_tokens = topology.drafts.block if topology.drafts.stages else 0
        self._engram: EngramReader | None = None
        self._vision: VisionTower | None = None
        self._drafts: DraftStages | None = None
        self.taps: Taps | None = None
        """Of the newest step, for the draft stages."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> Self:
        """See ``registry.LoadableModel``."""
        return cls(DeepseekV41Parameters(read_topology(config), dtype, device), dtype, device)

    @classmethod
    def from_checkpoint(
        cls, source: ResolvedModel, dtype: torch.dtype, device: torch.device, load_format: str, seed: int, progress: Progress | None
    ) -> Self:
        """See ``loaders.load.LoadsItself``."""
        parameters = load_parameters(source, dtype, device, load_format=load_format, seed=seed, progress=progress)
        model = cls(parameters, dtype, device)
        model.finish_loading()
        return model

    @classmethod
    def position_limit(cls, config: Mapping[str, Any]) -> int:
        """See ``registry.LoadableModel``."""
        return read_topology(config).max_position

    def finish_loading(self) -> None:
        """Packs the weights layer by layer and frees the unpacked ones; Engram tables have been attached by then."""
        (p, head), t = self._take_parameters(), self.topology
        if t.engram is not None and p.token_map is not None:
            tables = [layer.engram.table for layer in p.layers if layer.engram is not None]
            self._engram = EngramReader(t.engram, tables, p.token_map, self.dtype, self.device)
        if t.vision is not None:
            self._vision = VisionTower(p, t.vision, self.dtype)
        for plan in t.layers:
            self.layers.append(Layer(p.layers.pop(0), t, plan, self.dtype))
        if p.drafts is not None:
            self._drafts, p.drafts = DraftStages(p.drafts, t, self._embed, head, self.dtype), None

    @property
    def image_processor(self) -> ImageSizes | None:
        """See ``models.images.VisionModel``."""
        return None if self.topology.vision is None else ImageSizes.of(self.topology.vision)

    def configure(self, options: ModelOptions) -> ModelOptions:
        """See ``models.base.ConfigurableModel``. Rows are packed unless they cannot be; a truncated prefill keeps what windows need."""
        t = self.topology
        back = backtracking_of(options, t.max_backtracking)
        keep = options.keep_tokens
        if options.truncation != "off":
            least = t.attention.window + back
            keep = least if keep is None else keep
            if keep < least:
                raise ConfigError(
                    f"yoco_prefill_keep_tokens {keep} is below the window ({t.attention.window}) and max_backtracking_tokens ({back}) "
                    f"together; set it to at least {least}"
                )
        form = options.cache_form
        if form == "auto":
            form = "packed" if packs(t) else "bfloat16" if self.dtype == torch.bfloat16 else "float32"
        if self._engram is not None:
            if options.table_cache_bytes is not None:
                self._engram.set_cache(options.table_cache_bytes)
            self._engram.place(options.table_place)
        self._options = replace(options, cache_form=form, keep_tokens=keep, max_backtracking=back)
        return self._options

    def table_counters(self) -> dict[str, int]:
        """See ``models.base.TableModel``."""
        return {} if self._engram is None else self._engram.counters()

    def kv_groups(self, block_tokens: int) -> tuple[list[PagedGroup], list[StateGroup]]:
        """See ``caches``."""
        options = self._options if self._options.cache_form != "auto" else self.configure(self._options)
        storage: Storage = "packed" if options.cache_form == "auto" else options.cache_form
        self._caches = plan_caches(self.topology, storage, block_tokens, options.max_backtracking)
        return self._caches.kv_groups()

    def expert_loads(self) -> list[torch.Tensor]:
        """See ``models.base.ExpertModel``."""
        return [layer.expert_loads for layer in self.layers]

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: dict[str, torch.Tensor]) -> torch.Tensor:
        """Hidden states ``[T, d]`` in the run dtype after the final norm, zeros for rows the decoder leaves out; writes caches."""
        caches = self.caches
        step = make_step(batch, kv, caches, self.topology.attention.window, self._ropes, self._quantum)
        found: list[torch.Tensor] = []
        embedded, dead = F.embedding(step.ids, self._embed), step.ids < 0
        if batch.images and self._vision is not None:
            step.mark_images(self._vision.place(embedded, batch.images))
        if self._engram is not None:
            if batch.state is not None and batch.state.begun is not None:
                self._engram.begin(batch.state.begun, step.state["token_ids"])
            found, dead = self._engram.read(step.ids, step.encoder.step, step.state["token_ids"], step.encoder.image)
        streams = begin_streams(embedded, self.topology.streams)
        (x, pre), taps = self._run_layers(streams, step, caches, found, dead)
        if self._drafts is not None and self._options.drafts:
            self._drafts.keep(taps, step.decoder, step.state, caches)
        hidden = rms_norm(collapse(x, pre, self.dtype), self._norm, self.topology.eps)
        return self._unpad(hidden, taps, batch)

    def _run_layers(
        self, streams: Streams, step: Step, caches: CachePlan, found: list[torch.Tensor], dead: torch.Tensor
    ) -> tuple[Streams, list[torch.Tensor]]:
        taps: list[torch.Tensor] = []
        start, rows, rope = self.topology.shared.decoder_start, step.encoder, self._ropes.compress
        for layer in self.layers:
            plan, filled = layer.plan, False
            if plan.index == start:
                rows = step.decoder
                if step.chosen is not None:
                    layer.fill(streams, step, caches, rope)
                    streams, filled = (streams[0].index_select(0, step.chosen), streams[1].index_select(0, step.chosen)), True
            if plan.engram is not None:
                streams = layer.add_engram(streams[0], found[plan.engram], dead), streams[1]
            if plan.tapped:
                taps.append(mean_stream(streams[0]))
            streams = layer(streams, step, rows, caches, rope, filled)
        return streams, taps

    def _unpad(self, hidden: torch.Tensor, taps: list[torch.Tensor], batch: ForwardBatch) -> torch.Tensor:
        count, state = batch.ids.shape[0], batch.state
        rows = None if state is None else state.decoder_rows
        kept = count if rows is None else rows.shape[0]
        self.taps = Taps(torch.stack([tap[:kept] for tap in taps], 1), rows) if taps else None
        if rows is None:
            return hidden[:count]
        return hidden.new_zeros(count, hidden.shape[1]).index_copy_(0, rows, hidden[:kept])

    @torch.inference_mode()
    def draft(
        self, batch: ForwardBatch, hidden: torch.Tensor, new: NewTokens, kv: dict[str, torch.Tensor], draw: DrawDrafts, count: int
    ) -> Drafts:
        """See ``models.base.Drafter``; the stages have read the step through its taps."""
        if self._drafts is None or not self._options.drafts:
            raise RuntimeError("the model was not configured to draft, or its checkpoint has no draft stages")
        caches = self.caches
        return self._drafts(batch, new, caches.views(kv["state0"]), caches, self._ropes.main, self._quantum, draw, count)
