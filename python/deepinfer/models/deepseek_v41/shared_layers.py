"""Which layer reads whose compressed cache, selection and index keys.

A layer with a compression ratio reads one compressed cache besides its own window. Only *Full* layers fill one, together with
index keys; *Reindex* layers select entries of an earlier layer's cache with queries of their own; *Reuse* layers take cache and
selection as they are. The configuration gives two lists of sources; every map follows from "the closest source at or before".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ...errors import UnsupportedConfigError

RATIOS = (0, 1, 2)
"""Tokens per compressed entry; 0 = the layer reads its window only."""


class LayerKind(Enum):
    """What a layer computes of what it reads."""

    WINDOW = "window"
    FULL = "full"
    REUSE = "reuse"
    REINDEX = "reindex"


def _refuse(first: str, second: str, why: str) -> UnsupportedConfigError:
    return UnsupportedConfigError(f"config fields {first!r} and {second!r} disagree: {why}; correct one of them")


def _check_sources(field: str, sources: Sequence[int], layers: int) -> None:
    for before, after in zip((-1, *sources), sources, strict=False):
        if after <= before:
            raise UnsupportedConfigError(f"config field {field!r} = {list(sources)} must rise from layer to layer and start at 0 or above")
    if sources and sources[-1] >= layers:
        raise _refuse(field, "num_hidden_layers", f"layer {sources[-1]} is a source, there are {layers} layers")


def _closest(sources: Sequence[int], layer: int) -> int | None:
    return max((source for source in sources if source <= layer), default=None)


@dataclass(frozen=True)
class SharedLayerTopology:
    """Maps from layer to source, checked; ``None`` for layers that read their window only.

    Build it with ``derive``. Tuples have one place per backbone layer; draft stages read their window only.
    """

    ratios: tuple[int, ...]
    kv_sources: tuple[int, ...]
    index_sources: tuple[int, ...]
    candidate_source: int | None
    kinds: tuple[LayerKind, ...]
    share_kv: tuple[int | None, ...]
    """Whose compressed entries a layer attends to."""
    share_index: tuple[int | None, ...]
    """Whose selection of entries a layer uses."""
    share_index_key: tuple[int | None, ...]
    """Whose index keys that selection is made from."""

    @classmethod
    def derive(
        cls,
        layers: int,
        drafts: int,
        compress_ratios: Sequence[int],
        kv_sources: Sequence[int],
        index_sources: Sequence[int],
        candidate_source: int | None,
    ) -> SharedLayerTopology:
        """Maps for ``layers`` backbone layers and ``drafts`` draft stages behind them in ``compress_ratios``.

        ``candidate_source``: the layer that narrows what later Reindex layers choose from, None = nobody does. Raises
        ``UnsupportedConfigError`` that names the two fields which contradict each other.
        """
        ratios = tuple(compress_ratios[:layers])
        cls._check_ratios(layers, drafts, compress_ratios)
        _check_sources("kv_source_layer_ids", kv_sources, layers)
        _check_sources("index_source_layer_ids", index_sources, layers)
        for field, sources in (("kv_source_layer_ids", kv_sources), ("index_source_layer_ids", index_sources)):
            for layer in sources:
                if ratios[layer] == 0:
                    raise _refuse(field, "compress_ratios", f"layer {layer} is a source and has ratio 0")
        for layer in kv_sources:
            if layer not in index_sources:
                raise _refuse(
                    "kv_source_layer_ids",
                    "index_source_layer_ids",
                    f"layer {layer} starts a new cache, so it must also select from it, and is no index source",
                )
        share_kv: list[int | None] = []
        share_index: list[int | None] = []
        kinds: list[LayerKind] = []
        for layer, ratio in enumerate(ratios):
            if ratio == 0:
                share_kv.append(None)
                share_index.append(None)
                kinds.append(LayerKind.WINDOW)
                continue
            source = _closest(kv_sources, layer)
            if source is None:
                raise _refuse("compress_ratios", "kv_source_layer_ids", f"layer {layer} has ratio {ratio} and no source at or before it")
            if ratios[source] != ratio:
                raise _refuse(
                    "compress_ratios",
                    "kv_source_layer_ids",
                    f"layer {layer} has ratio {ratio}, its source, layer {source}, has ratio {ratios[source]}",
                )
            share_kv.append(source)
            # at or after ``source``, because every cache source is an index source
            share_index.append(_closest(index_sources, layer))
            if layer == source:
                kinds.append(LayerKind.FULL)
            else:
                kinds.append(LayerKind.REINDEX if layer in index_sources else LayerKind.REUSE)
        cls._check_candidates(candidate_source, index_sources, share_kv, layers)
        return cls(
            ratios=ratios,
            kv_sources=tuple(kv_sources),
            index_sources=tuple(index_sources),
            candidate_source=candidate_source,
            kinds=tuple(kinds),
            share_kv=tuple(share_kv),
            share_index=tuple(share_index),
            share_index_key=tuple(share_kv),
        )

    @staticmethod
    def _check_ratios(layers: int, drafts: int, ratios: Sequence[int]) -> None:
        if len(ratios) != layers + drafts:
            raise _refuse(
                "compress_ratios",
                "num_hidden_layers",
                f"{len(ratios)} ratios for {layers} layers and {drafts} draft stages (num_nextn_predict_layers)",
            )
        for index, ratio in enumerate(ratios):
            if ratio not in RATIOS:
                raise UnsupportedConfigError(f"config field 'compress_ratios' gives layer {index} the ratio {ratio!r}; known: 0, 1 and 2")
        for stage, ratio in enumerate(ratios[layers:]):
            if ratio:
                raise _refuse(
                    "compress_ratios",
                    "num_nextn_predict_layers",
                    f"draft stage {stage} has ratio {ratio}, and draft stages read their window only (ratio 0)",
                )

    @staticmethod
    def _check_candidates(candidate: int | None, index_sources: Sequence[int], share_kv: Sequence[int | None], layers: int) -> None:
        if candidate is None:
            return
        if candidate not in index_sources:
            raise _refuse("candidate_source_layer_id", "index_source_layer_ids", f"layer {candidate} makes no selection of its own")
        for layer in range(candidate, layers):
            if share_kv[layer] is not None and share_kv[layer] != share_kv[candidate]:
                raise _refuse(
                    "candidate_source_layer_id",
                    "kv_source_layer_ids",
                    f"layer {candidate} narrows entries of layer {share_kv[candidate]}, layer {layer} reads those of {share_kv[layer]}",
                )

    @property
    def decoder_start(self) -> int:
        """First decoder layer: the last cache source, whose cache is projected from the encoder's output."""
        return self.kv_sources[-1]

    def uses_candidates(self, layer: int) -> bool:
        """Whether the selection made in ``layer`` is restricted to the candidate source's blocks."""
        return self.candidate_source is not None and layer > self.candidate_source and self.kinds[layer] is LayerKind.REINDEX
