"""mlx-lm's DeepSeek-V4.1 (text, no Engram, no drafts) with the reference's weights, and a record of what its layers do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.models import deepseek_v41 as theirs

from deepinfer.models.deepseek_v41.topology import DeepseekV41Topology
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
