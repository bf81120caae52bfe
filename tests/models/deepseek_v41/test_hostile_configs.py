"""Configurations that nobody meant well: every map that contradicts itself, every field with something else in it, sizes beyond reason."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from itertools import product
from math import inf, nan
from typing import Any

import pytest
import torch

from deepinfer.errors import DeepInferError, UnsupportedConfigError
from deepinfer.models.deepseek_v4.topology import read_topology as read_v4
from deepinfer.models.deepseek_v41.engram import table_primes
from deepinfer.models.deepseek_v41.shared_layers import LayerKind, SharedLayerTopology
from deepinfer.models.deepseek_v41.topology import read_topology
from deepinfer.models.sizes import read_sizes
from deepseek_v41 import v4_kit

Load = Callable[..., dict[str, Any]]
LAYERS = 4
FIELDS = {"compress_ratios", "kv_source_layer_ids", "index_source_layer_ids", "candidate_source_layer_id"}
BOTH = re.compile(r"config fields '(\w+)' and '(\w+)' disagree: .+; correct one of them")


def subsets() -> list[tuple[int, ...]]:
    return [tuple(layer for layer in range(LAYERS) if bits >> layer & 1) for bits in range(1 << LAYERS)]


def sound(ratios: tuple[int, ...], kv: tuple[int, ...], index: tuple[int, ...], candidate: int | None) -> bool:
    """Whether the four fields describe one model, said in another way than the family says it."""
    if not set(kv) <= set(index) or any(not ratios[layer] for layer in index):
        return False
    read = {}
    for layer in range(LAYERS):
        before = [source for source in kv if source <= layer]
        if ratios[layer]:
            if not before or ratios[before[-1]] != ratios[layer]:
                return False
            read[layer] = before[-1]
    if candidate is None:
        return True
    return candidate in index and {read[layer] for layer in read if layer >= candidate} == {read[candidate]}


def test_every_map_of_four_layers_is_sound_or_refused_by_both_fields() -> None:
    taken = refused = 0
    for ratios in product((0, 1, 2), repeat=LAYERS):
        for kv, index, candidate in product(subsets(), subsets(), (None, *range(LAYERS))):
            try:
                shared = SharedLayerTopology.derive(LAYERS, 1, [*ratios, 0], kv, index, candidate)
            except UnsupportedConfigError as error:
                refused += 1
                assert not sound(ratios, kv, index, candidate), (ratios, kv, index, candidate, error)
                named = BOTH.fullmatch(str(error))
                assert named is not None and {named[1], named[2]} <= FIELDS, error
                continue
            taken += 1
            assert sound(ratios, kv, index, candidate), (ratios, kv, index, candidate)
            for layer, ratio in enumerate(ratios):
                kind = LayerKind.FULL if layer in kv else LayerKind.REINDEX if layer in index else LayerKind.REUSE
                assert shared.kinds[layer] is (kind if ratio else LayerKind.WINDOW)
                assert shared.share_kv[layer] == (max(s for s in kv if s <= layer) if ratio else None)
                assert shared.share_index[layer] == (max(s for s in index if s <= layer) if ratio else None)
    assert taken > 300 and taken + refused == 3**LAYERS * 16 * 16 * 5


def paths(fields: dict[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in fields.items():
        yield (*before, name)
        if isinstance(value, dict):
            yield from paths(value, (*before, name))


ODD: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 3, 2**31, 2**63, 10**30, -(2**63), 0.5, 1e308, nan, inf, "", "a\nb", [], [0], [-1], [1, 1], [2**63],
    [None], [[1]], {}, {"a": 1}, [0] * 13, [1.0] * 13,
)  # fmt: skip


@pytest.mark.parametrize("family", ["v41", "v4"])
def test_a_field_with_something_else_in_it_is_taken_or_refused_in_one_line(load: Load, family: str) -> None:
    read: Callable[[dict[str, Any]], object] = read_topology if family == "v41" else read_v4
    whole = load("tiny") if family == "v41" else v4_kit.config()
    refused = 0
    for path in paths(whole):
        for odd in ODD:
            config = copy.deepcopy(whole)
            within = config
            for name in path[:-1]:
                within = within[name]
            within[path[-1]] = odd
            try:
                read(config)
            except DeepInferError as error:
                refused += 1
                assert "\n" not in str(error), (path, odd)
    assert refused > 1000


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("hidden_size", 2**62, "tensor 'embed.weight' the shape [2048, 4611686018427387904]"),
        ("head_dim", 2**62, "more than any memory holds"),
        ("q_lora_rank", 10**30, "tensor 'layers.0.attn.wq_a' the shape"),
        ("moe_intermediate_size", 2**62, "tensor 'layers.0.ffn.experts.0.w1' the shape"),
        ("dspark_markov_rank", 2**62, "tensor 'mtp.2.markov_head.embed.weight' the shape"),
        ("n_routed_experts", 2**31, "'n_routed_experts' = 2147483648 is not implemented; at most 65536 is"),
        ("dspark_n_routed_experts", 10**30, "'dspark_n_routed_experts'"),
        ("hc_sinkhorn_iters", 10**9, "'hc_sinkhorn_iters' = 1000000000"),
        ("engram_n_heads", 10**30, "'engram_n_heads'"),
        ("engram_max_ngram_size", 2**31, "'engram_max_ngram_size'"),
        ("engram_vocab_size", 10**30, "'engram_vocab_size'"),
        ("engram_vocab_size", 2**39, "its primes from 549755813888 make"),
    ],
)
def test_sizes_beyond_any_machine_are_refused_before_they_are_counted_out(load: Load, field: str, value: int, told: str) -> None:
    with pytest.raises(UnsupportedConfigError) as caught:
        read_sizes(load("tiny", **{field: value}), torch.bfloat16)
    assert told in str(caught.value)


def test_a_tower_of_no_tokens_or_endless_layers(load: Load) -> None:
    for field, value in (("max_image_tokens", 3), ("num_hidden_layers", 10**9)):
        config = load("tiny")
        config["vision_config"][field] = value
        with pytest.raises(UnsupportedConfigError, match=field):
            read_topology(config)


def test_primes_are_those_of_a_sieve() -> None:
    sieve = bytearray([1]) * 20000
    sieve[:2] = b"\0\0"
    for number in range(2, 142):
        sieve[number * number :: number] = bytes(len(range(number * number, 20000, number)))
    known = [number for number in range(20000) if sieve[number]]
    assert [prime for row in table_primes(1, 9, 280, 1)[0] for prime in row] == known[: 8 * 280]
    # Carmichael numbers and strong pseudoprimes to the base 2 are none; the greatest prime below 2^40 is one.
    for composite in (561, 2047, 3215031751, 341550071728321):
        assert table_primes(1, 2, 1, composite)[0][0][0] > composite
    assert table_primes(1, 2, 1, 2**40 - 100)[0][0][0] == 2**40 - 87
