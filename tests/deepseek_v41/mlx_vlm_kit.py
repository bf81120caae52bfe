"""mlx-vlm's DeepSeek-V4.1 (Engram, image spans, vision tower; no drafts) with the reference's weights.

The package's own ``__init__`` loads servers, audio and data sets; only the model's modules are wanted here, so the packages above
them are put in place without running their code.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import torch

from deepinfer.models.deepseek_v41.topology import read_topology
from deepseek_v41.sequential import Shared, in_order

_PACKAGES = ("", "models", "models.deepseek_v41", "speculative", "speculative.drafters")


def outside(name: str) -> Any:
    """``mlx_vlm.<name>``; ``ModuleNotFoundError`` if it or something it needs is missing."""
    if "mlx_vlm" not in sys.modules:
        found = importlib.util.find_spec("mlx_vlm")
        if found is None or found.origin is None:
            raise ModuleNotFoundError("No module named 'mlx_vlm'", name="mlx_vlm")
        for package in _PACKAGES:
            bare = ModuleType(f"mlx_vlm.{package}".rstrip("."))
            bare.__path__ = [str(Path(found.origin).parent.joinpath(*package.split(".")))]
            sys.modules[bare.__name__] = bare
    return importlib.import_module(f"mlx_vlm.{name}")


def module(name: str) -> Any:
    """A module of the model's own, as of ``outside``."""
    return outside(f"models.deepseek_v41.{name}")


def to_torch(array: Any) -> torch.Tensor:
    """The first (only) sequence of a batch."""
    return torch.from_numpy(np.array(array))[0]


@contextmanager
def roundings(on: bool) -> Iterator[None]:
    """Roundings of caches and of activations, both or neither."""
    quantisers = module("fakequant")
    before = quantisers.DISABLE
    quantisers.DISABLE = not on
    try:
        yield
    finally:
        quantisers.DISABLE = before


def engram_alone(
    config: Mapping[str, Any], layer: int, weights: Mapping[str, torch.Tensor], streams: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """What an Engram layer of a model that is too large to build makes of ``streams`` ``[T, n, d]``, all tokens alive."""
    fields = module("config").ModelConfig.from_dict(dict(config))
    engram = module("engram").Engram(fields, layer, module("engram").EngramLayout.from_config(fields))
    prefix = f"layers.{layer}.engram."
    engram.load_weights([(name.removeprefix(prefix), mx.array(value.numpy())) for name, value in weights.items()], strict=True)
    return to_torch(engram(mx.array(streams.numpy())[None], mx.array(rows.numpy())[None]))


class Oracle:
    """The language model and the vision tower; ``token_map`` gives compressed ids for Engram."""

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], token_map: Sequence[int]) -> None:
        self.topology = read_topology(config)
        self.config = module("config").ModelConfig.from_dict(dict(config))
        self.model = module("deepseek_v41").Model(self.config)
        named = self.model.sanitize({name: mx.array(value.numpy()) for name, value in weights.items()})
        self.model.load_weights(list(named.items()), strict=True)
        # theirs is the tanh approximation of GELU, up to 5e-4 off in these rows; the model's is the exact one
        self.model.aligner.act = nn.GELU()
        self.text = self.model.language_model
        self.text.engram_hash = module("engram").NgramHashState(self.config, self.text.layout, token_map=list(token_map))

    def hashes(self, ids: torch.Tensor, image: torch.Tensor | None = None, chunks: Sequence[int] | None = None) -> torch.Tensor:
        """Table rows ``[T, tables, columns]`` of ids ``[T]``."""
        state, parts, start = self.text.make_cache()[0], [], 0
        for length in chunks or [len(ids)]:
            part = slice(start, start + length)
            mask = None if image is None else mx.array(~image[part].numpy())[None]
            parts.append(to_torch(self.text.engram_hash(mx.array(ids[part].numpy())[None], start, state, token_mask=mask)))
            start += length
        return torch.cat(parts)

    def engram(self, layer: int, streams: torch.Tensor, rows: torch.Tensor, image: torch.Tensor | None = None) -> torch.Tensor:
        """Streams ``[T, n, d]`` with the gated value of table rows ``[T, columns]`` added."""
        mask = None if image is None else mx.array(~image.numpy())[None]
        return to_torch(self.text.layers[layer].engram(mx.array(streams.numpy())[None], mx.array(rows.numpy())[None], mask))

    def engram_gates(
        self, layer: int, streams: torch.Tensor, rows: torch.Tensor, image: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gates ``[T, n]`` (of dead tokens too, whose value is not added) and what ``engram`` gives."""
        functions, seen = module("engram"), []
        real = functions._engram_apply_gate

        def watch(x: Any, value: Any, gate: Any, mask: Any = None) -> Any:
            seen.append(gate)
            return real(x, value, gate, mask)

        functions._engram_apply_gate = watch
        try:
            added = self.engram(layer, streams, rows, image)
        finally:
            functions._engram_apply_gate = real
        return to_torch(seen[0]), added

    def layer(
        self, index: int, streams: torch.Tensor, pre: torch.Tensor, image: torch.Tensor, state: Any, shared: Shared
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer behind its Engram part on a whole sequence, and in ``shared`` what it shares.

        ``state`` (of ``make_cache``) hands values from layer to layer.
        """
        block, topology = self.text.layers[index], self.topology
        real, seen = block.attn._window_part, []

        def window(*given: Any) -> Any:
            seen.append(real(*given))
            return seen[-1]

        block.attn._window_part = window
        out = block(mx.array(streams.numpy())[None], mx.array(pre.numpy())[None], mx.array(image.numpy())[None], state)
        block.attn._window_part = real
        shared.windows[index] = to_torch(seen[0][0])
        if index in topology.shared.kv_sources:
            shared.entries[index], shared.index_keys[index] = to_torch(state.compress_kv), to_torch(state.index_k)
        if index in topology.shared.index_sources:
            shared.selections[index] = in_order(to_torch(state.topk_idxs))
        if index == topology.shared.candidate_source:
            # a flag per entry; a block's are all equal
            shared.pool = to_torch(state.candidates)[:, :: topology.attention.candidate_block]
        return to_torch(out[0]), to_torch(out[1])

    def logits(self, ids: torch.Tensor, span_rows: torch.Tensor | None = None, chunks: Sequence[int] | None = None) -> torch.Tensor:
        """Logits ``[T, vocab]``; image spans are the tokens with the configuration's id, their embeddings ``span_rows``."""
        given = mx.array(ids.numpy())[None]
        embedded = self.text.embed_tokens(given)
        if span_rows is not None:
            embedded[0, mx.array((ids == self.config.image_token_id).nonzero()[:, 0].numpy())] = mx.array(span_rows.numpy())
        cache, parts, start = self.text.make_cache(), [], 0
        for length in chunks or [len(ids)]:
            part = slice(start, start + length)
            parts.append(to_torch(self.text(given[:, part], inputs_embeds=embedded[:, part], cache=cache).logits))
            start += length
        return torch.cat(parts)

    def image_rows(self, patches: torch.Tensor, high: int, wide: int) -> torch.Tensor:
        """Rows ``[ceil(high / merge) ceil(wide / merge), d]`` of patches ``[high wide, values]``."""
        return torch.from_numpy(np.array(self.model.encode_image(mx.array(patches.numpy()), high, wide)))

    def span_rows(self, patches: torch.Tensor, high: int, wide: int, types: Sequence[int]) -> torch.Tensor:
        """Embeddings ``[len(types), d]`` of an image's span; ``types`` says what each of its tokens is."""
        image = SimpleNamespace(start=0, patches=mx.array(patches.numpy()), n_vit_h=high, n_vit_w=wide, types=list(types))
        empty = mx.zeros((1, len(types), self.config.hidden_size))
        return to_torch(self.model.merge_image_embeddings([[image]], empty))
