"""How DeepSeek-V4 is computed: the layers over a step's rows, and a head that mixes the streams for itself.

The rows of a step pass all layers together, padded once. Every layer that reads entries makes its own, so that no row of a prompt can be
left out: prefill is never truncated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

import torch
import torch.nn.functional as F

from ...errors import ConfigError, UnsupportedFormatError
from ...kernels.compressor import PoolPlan
from ...kernels.rms_norm import rms_norm
from ...kernels.stream_mix import collapse, head_coefficients
from ..base import ForwardBatch, ModelOptions, PagedGroup, StateGroup
from ..deepseek_v41.block_model import BlockModel
from ..deepseek_v41.caches import backtracking_of
from ..deepseek_v41.ops import begin_streams
from ..deepseek_v41.packed import PackedMix
from ..deepseek_v41.step import make_step
from ..loaders.dummy import DummySource
from ..loaders.load import check_load_format
from ..loaders.resolved import ResolvedModel
from ..loaders.safetensors_source import SafetensorsSource
from ..loaders.source import Progress, check_names, fill
from .caches import Storage, pending_places, plan_caches
from .containers import DeepseekV4Parameters
from .layer import Layer
from .loading import ReleasedNames, WithTables
from .topology import DeepseekV4Topology, LayerKind, read_topology


class DeepseekV4Model(BlockModel[DeepseekV4Parameters]):
    """DeepSeek-V4 for causal language modelling; ``models.base`` says what its methods are for."""

    def __init__(self, topology: DeepseekV4Topology, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(DeepseekV4Parameters(topology, dtype, device), topology.rope_main, topology.rope_compress, dtype, device)
        self.topology = topology
        self.vocab_size, self.max_position = topology.vocab, topology.max_position
        self.block_tokens = topology.page_tokens
        self.remarks: tuple[str, ...] = ()
        """See ``base.RemarkingModel``."""
        self.layers: list[Layer] = []
        """In runtime layout, in order; filled by ``finish_loading``."""
        self._mix: PackedMix | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> Self:
        """See ``base.LoadableModel``."""
        return cls(read_topology(config), dtype, device)

    @classmethod
    def from_checkpoint(
        cls, source: ResolvedModel, dtype: torch.dtype, device: torch.device, load_format: str, seed: int, progress: Progress | None
    ) -> Self:
        """See ``loaders.load.LoadsItself``; raises what ``from_config`` and ``fill`` do, and ``CheckpointError`` for tables of experts."""
        found = check_load_format(source, load_format)
        if found not in ("dummy", "safetensors"):
            raise UnsupportedFormatError(f"{source.name}: this family is read from safetensors in plain floats only, not from {found}")
        if found == "dummy":
            model = cls.from_config(source.config, dtype, device)
            fill(model, WithTables(DummySource(model.parameter_shapes(), seed), model.topology, seed), progress)
            return model
        stored = ReleasedNames(SafetensorsSource(source.weight_files))
        check_names(cls.from_config(source.config, dtype, torch.device("meta")), stored)  # before there is memory
        model = cls.from_config(source.config, dtype, device)
        fill(model, WithTables(stored, model.topology), progress)
        stages = sum(name.startswith("mtp.") for name in stored.names())
        if stages:
            left = f"draft stages of the checkpoint are left out (mtp.*, {stages} of its tensors)"
            model.remarks = (f"{left}; speculative='ngram' drafts without them",)
        return model

    @classmethod
    def position_limit(cls, config: Mapping[str, Any]) -> int:
        """See ``base.LoadableModel``."""
        return read_topology(config).max_position

    def finish_loading(self) -> None:
        """Packs the weights layer by layer and frees the unpacked ones."""
        p, _ = self._take_parameters()
        self._mix = PackedMix.pack(p.hc_head)
        for plan in self.topology.layers:
            self.layers.append(Layer(p.layers.pop(0), self.topology, plan, self._ropes.compress, self.dtype))

    def configure(self, options: ModelOptions) -> ModelOptions:
        """See ``base.ConfigurableModel``. Rows are kept as floats, and every row of a prompt passes every layer."""
        if options.truncation != "off":
            raise ConfigError(
                f"yoco_prefill_truncation={options.truncation!r} leaves rows out of layers that make no entries, and in DeepSeek-V4 "
                "every layer that reads entries makes its own; leave it 'off'"
            )
        if options.cache_form == "packed":
            raise ConfigError("kv_cache_dtype='packed' is not implemented for DeepSeek-V4; use 'auto', 'bfloat16' or 'float32'")
        for setting, asked in (
            ("engram_cache_gib", options.table_cache_bytes is not None),
            ("engram_tables", options.table_place != "auto"),
        ):
            if asked:
                raise ConfigError(f"{setting} is a setting of models with Engram tables, and DeepSeek-V4 has none; leave it out")
        form = options.cache_form
        if form == "auto":
            form = "bfloat16" if self.dtype == torch.bfloat16 else "float32"
        self._options = replace(options, cache_form=form, keep_tokens=None, max_backtracking=backtracking_of(options, 1))
        return self._options

    def kv_groups(self, block_tokens: int) -> tuple[list[PagedGroup], list[StateGroup]]:
        """See ``caches``."""
        options = self._options if self._options.max_backtracking is not None else self.configure(self._options)
        storage: Storage = "bfloat16" if options.cache_form == "bfloat16" else "float32"
        self._caches = plan_caches(self.topology, storage, block_tokens, options.max_backtracking or 1)
        return self._caches.kv_groups()

    def expert_loads(self) -> list[torch.Tensor]:
        """See ``models.base.ExpertModel``."""
        return [layer.expert_loads for layer in self.layers]

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: dict[str, torch.Tensor]) -> torch.Tensor:
        """Hidden states ``[T, d]`` in the run dtype after the final norm; writes caches."""
        t, caches, mix = self.topology, self.caches, self._mix
        if mix is None:
            raise RuntimeError("finish_loading has not been called")
        step = make_step(batch, kv, caches, t.attention.window, self._ropes, self._quantum)
        pools: dict[LayerKind, PoolPlan] = {}
        for plan in t.sources:
            if plan.kind not in pools:
                pools[plan.kind] = PoolPlan(step.encoder.step, plan.ratio, plan.overlaps, pending_places(plan, caches.backtracking))
        x, _ = begin_streams(F.embedding(step.ids, self._embed), t.streams)
        for layer in self.layers:
            x = layer(x, step, pools, caches)
        last = collapse(x, head_coefficients(x, mix.fn, mix.base, mix.scale, t.eps, t.mix_eps), self.dtype)
        return rms_norm(last, self._norm, t.eps)[: batch.ids.shape[0]]
