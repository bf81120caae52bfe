"""mlx-lm's DeepSeek-V4.1 (text, no Engram, no drafts) with the reference's weights, and a record of what its layers do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.models import deepseek_v41 as theirs

from deepinfer.kernels.rope import RopeParameters
from deepinfer.models.deepseek_v41.topology import DeepseekV41Topology
from deepseek_v41.arithmetic import frequencies
from deepseek_v41.sequential import Shared, in_order


def to_torch(array: Any) -> torch.Tensor:
    """The first (only) sequence of a batch."""
    return torch.from_numpy(np.array(array))[0]


@dataclass
class Record:
    """What one sequence's tokens, fed in any number of chunks, made of every layer."""

    inputs: list[list[tuple[Any, Any]]] = field(default_factory=list)
    """Per layer and chunk: streams and mix that entered."""
    outputs: list[list[tuple[Any, Any]]] = field(default_factory=list)
    shared: list[dict[str, Any]] = field(default_factory=list)
    """Per layer: what was shared after it in the last chunk."""
    roundings: list[list[tuple[str, Any, Any]]] = field(default_factory=list)
    """Per layer: (format, before, after) of every rounding, in order."""

    def layer_input(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Streams ``[T, n, d]`` and mix ``[T, n]`` over all chunks."""
        return self._joined(self.inputs[layer])

    def layer_output(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The same behind the layer."""
        return self._joined(self.outputs[layer])

    def _joined(self, chunks: list[tuple[Any, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
        streams, mixes = zip(*chunks, strict=True)
        return torch.cat([to_torch(part) for part in streams]), torch.cat([to_torch(part) for part in mixes])

    def rounded(self, layer: int, form: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Before and after of the layer's roundings to ``form``: ``window``, ``entries``, ``index``."""
        return [(to_torch(before), to_torch(after)) for name, before, after in self.roundings[layer] if name == form]

    def shared_values(self, topology: DeepseekV41Topology) -> Shared:
        """What the layers shared, in the reference's form; of a record in one chunk with roundings."""
        found = Shared()
        for plan in topology.layers:
            windows = self.rounded(plan.index, "window")
            if windows:
                found.windows[plan.index] = windows[0][1]
            values = self.shared[plan.index]
            if plan.index in topology.shared.kv_sources:
                found.entries[plan.index] = to_torch(values["compress_kv"])
                found.index_keys[plan.index] = to_torch(values["index_k"])
            if plan.index in topology.shared.index_sources:
                found.selections[plan.index] = in_order(to_torch(values["topk_idx"]))
            if plan.index == topology.shared.candidate_source:
                # a flag per entry; a block's are all equal
                found.pool = to_torch(values["candidates"])[:, :: topology.attention.candidate_block]
        return found


class _Spy:
    """Stands in a layer's place and keeps what goes in and out."""

    def __init__(self, layer: Any, number: int, oracle: Oracle) -> None:
        self._layer, self._number, self._oracle = layer, number, oracle

    def __call__(self, streams: Any, pre: Any, *, shared: dict[str, Any], **rest: Any) -> tuple[Any, Any]:
        record = self._oracle.record
        self._oracle.current = self._number
        record.inputs[self._number].append((streams, pre))
        out = self._layer(streams, pre, shared=shared, **rest)
        record.outputs[self._number].append(out)
        record.shared[self._number] = dict(shared)
        return out


def _turner(rope: RopeParameters) -> Callable[..., Any]:
    """Rotation with the reference's angles, in the place of mlx-lm's."""
    inverse_periods = frequencies(rope)

    def turn(x: Any, _: Any, *, rope_dim: int, offset: int = 0, scale: float = 1.0, inverse: bool = False) -> Any:
        assert rope_dim == rope.head_dim
        positions = (offset + torch.arange(x.shape[1])) * scale
        angle = positions.float()[:, None] * inverse_periods
        wide = [1] * (x.ndim - 3)
        cos, sin = (mx.array(f(angle).numpy()).reshape(x.shape[1], *wide, -1) for f in (torch.cos, torch.sin))
        if inverse:
            sin = -sin
        tail = x[..., -rope_dim:].reshape(*x.shape[:-1], -1, 2)
        turned = mx.stack([tail[..., 0] * cos - tail[..., 1] * sin, tail[..., 1] * cos + tail[..., 0] * sin], axis=-1)
        return mx.concatenate([x[..., :-rope_dim], turned.reshape(*x.shape[:-1], rope_dim)], axis=-1)

    return turn


class LayerOracle:
    """One layer behind a context that is given, without roundings.

    It turns by the reference's angles: far from the start the last bits of a frequency, which libraries compute differently,
    are a visible phase.
    """

    def __init__(self, config: Mapping[str, Any], topology: DeepseekV41Topology, index: int, weights: Mapping[str, torch.Tensor]) -> None:
        self._args = theirs.ModelArgs.from_dict(dict(config))
        self._plan, self._topology = topology.layers[index], topology
        prefix = f"layers.{index}."
        given = {name: mx.array(weights[name].numpy()) for name in weights if name.startswith(prefix) and ".engram." not in name}
        named = theirs.Model.sanitize(SimpleNamespace(args=self._args), given)
        self._layer = theirs.DecoderLayer(self._args, index)
        self._layer.load_weights([(name.removeprefix(f"model.{prefix}"), value) for name, value in named.items()], strict=True)

    def run(
        self, streams: torch.Tensor, pre: torch.Tensor, first: int, shared: Shared, restored: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Streams and mix behind the layer for rows from position ``first`` on; ``shared`` gives and takes what layers share."""
        plan, t = self._plan, self._topology
        cache = theirs.LayerCache(t.attention.window)
        cache.offset, cache.window = first, mx.array(shared.history[plan.index].numpy())[None]
        if restored is not None:
            cache.compress_kv, cache.index_k = (mx.array(value.numpy())[None] for value in restored)
        handed: dict[str, Any] = {}
        if plan.kv_source not in (None, plan.index):
            assert plan.kv_source is not None and plan.index_source is not None
            handed["compress_kv"] = mx.array(shared.entries[plan.kv_source].numpy())[None]
            handed["index_k"] = mx.array(shared.index_keys[plan.kv_source].numpy())[None]
            if plan.index_source != plan.index:
                handed["topk_idx"] = mx.array(shared.selections[plan.index_source].numpy())[None].astype(mx.int32)
        if plan.candidates:
            assert shared.pool is not None
            entries = handed["index_k"].shape[1]
            handed["candidates"] = mx.array(shared.pool.repeat_interleave(t.attention.candidate_block, 1)[:, :entries].numpy())[None]
        index = theirs._window_indices(previous=cache.window.shape[1], length=len(streams), window=t.attention.window)
        real = {name: getattr(theirs, name) for name in ("_fake_quant_fp8", "_fake_quant_fp4", "_apply_rope")}
        theirs._fake_quant_fp8 = theirs._fake_quant_fp4 = lambda x, *_, **__: x
        theirs._apply_rope = _turner(t.rope_compress if plan.stretched_rope else t.rope_main)
        try:
            out = self._layer(
                mx.array(streams.numpy())[None], mx.array(pre.numpy())[None],
                start_pos=first, window_idx=index[None], cache=cache, shared=handed,
            )  # fmt: skip
            mx.eval(out)
        finally:
            for name, function in real.items():
                setattr(theirs, name, function)
        if plan.kv_source == plan.index:
            shared.entries[plan.index], shared.index_keys[plan.index] = to_torch(cache.compress_kv), to_torch(cache.index_k)
        if plan.index_source == plan.index:
            shared.selections[plan.index] = in_order(to_torch(handed["topk_idx"]))
        if plan.index == t.shared.candidate_source:
            shared.pool = to_torch(handed["candidates"])[:, :: t.attention.candidate_block]
        return to_torch(out[0]), to_torch(out[1])


class Oracle:
    """The model; ``run`` feeds one sequence. ``quantised=False`` leaves values as they are where caches would round them."""

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], quantised: bool) -> None:
        args = theirs.ModelArgs.from_dict(dict(config))
        self.model = theirs.Model(args)
        named = self.model.sanitize({name: mx.array(value.numpy()) for name, value in weights.items()})
        self.model.load_weights(list(named.items()), strict=True)
        self.layers = args.num_hidden_layers
        self.model.model.layers = [_Spy(layer, number, self) for number, layer in enumerate(self.model.model.layers)]
        self.quantised, self.record, self.current = quantised, Record(), 0

    def _watch(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def rounding(x: Any, block_size: int = 32, **rest: Any) -> Any:
            if not self.quantised:
                return x
            out = real(x, block_size=block_size, **rest)
            form = "window" if real.__name__ == "_fake_quant_fp8" else "entries" if rest.get("e4m3_scale") else "index"
            self.record.roundings[self.current].append((form, x, out))
            return out

        return rounding

    @contextmanager
    def _patched(self) -> Iterator[None]:
        real = {name: getattr(theirs, name) for name in ("_fake_quant_fp8", "_fake_quant_fp4")}
        for name, function in real.items():
            setattr(theirs, name, self._watch(function))
        try:
            yield
        finally:
            for name, function in real.items():
                setattr(theirs, name, function)

    def run(self, ids: torch.Tensor, chunks: Sequence[int] | None = None) -> tuple[torch.Tensor, Record]:
        """Logits ``[T, vocab]`` of ids ``[T]``, in ``chunks`` of so many tokens (all at once by default), and the record."""
        empty = [[] for _ in range(self.layers)]  # type: ignore[var-annotated]
        self.record = Record([list(x) for x in empty], [list(x) for x in empty], [{} for _ in empty], [list(x) for x in empty])
        cache, logits, start = self.model.make_cache(), [], 0
        with self._patched():
            for length in chunks or [len(ids)]:
                out = self.model(mx.array(ids[start : start + length].numpy())[None], cache)
                mx.eval(out)
                logits.append(to_torch(out))
                start += length
        assert start == len(ids)
        return torch.cat(logits), self.record

    def logits_at(self, depth: int) -> torch.Tensor:
        """Logits of the model that ends behind ``depth`` layers, for what was run last."""
        parts = []
        for streams, pre in self.record.outputs[depth - 1]:
            row = self.model.model.norm(theirs._collapse(streams, pre))
            parts.append(to_torch(self.model.lm_head(row)))
        return torch.cat(parts)
