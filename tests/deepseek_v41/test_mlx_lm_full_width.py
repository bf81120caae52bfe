"""Single layers at the released widths, behind a context of 70,000 tokens, against mlx-lm: every selection is a choice of 512 among
more, candidate blocks leave most of the context out, and positions lie in the stretched part of the angles."""

from __future__ import annotations

import pytest

from deepinfer.models.deepseek_v41.topology import read_topology
from deepseek_v41.sequential import Run, Sequential, Shared
from deepseek_v41.weights_kit import RandomWeights, bell, full_width_config

pytestmark = pytest.mark.oracle

FIRST, ROWS = 70_000, 16
TOLERANCE = 1e-5
"""Of the largest number in the streams; measured 3e-6."""


def test_layers_agree_behind_a_long_context() -> None:
    pytest.importorskip("mlx_lm.models.deepseek_v41", reason="needs mlx-lm 0.32, which `make oracle` installs")
    from deepseek_v41.mlx_lm_kit import LayerOracle

    fields = full_width_config(experts=8)
    fields["text_config"]["engram_layer_ids"] = []
    topology = read_topology(fields)
    source, sizes = topology.shared.candidate_source, topology.attention
    theirs = Shared()
    for plan in topology.layers:
        layer = plan.index
        weights = RandomWeights(topology, 1)  # anew for every layer: a layer's take two gigabytes
        theirs.history[layer] = bell(1, f"history {layer}", (sizes.window, sizes.head_dim))
        restored = None
        if layer in topology.shared.kv_sources:
            past = FIRST // plan.ratio
            restored = (bell(1, f"entries {layer}", (past, sizes.head_dim)), bell(1, f"keys {layer}", (past, sizes.index_dim)))
        streams = bell(1, f"streams {layer}", (ROWS, topology.streams, topology.hidden))
        pre = bell(1, f"pre {layer}", (ROWS, topology.streams)).sigmoid()
        wanted, wanted_pre = LayerOracle(fields, topology, layer, weights).run(streams, pre, FIRST, theirs, restored)
        made = theirs.without(layer, source)
        out = Sequential(topology, weights, Run(caches=False)).layer(layer, streams, pre, made, first=FIRST, restored=restored)
        assert float((out.streams - wanted).abs().max()) <= TOLERANCE * float(wanted.abs().max()), layer
        assert float((out.pre - wanted_pre).abs().max()) <= TOLERANCE, layer
        if layer in theirs.entries:
            assert float((made.entries[layer] - theirs.entries[layer]).abs().max()) <= 3 * TOLERANCE, layer
            assert float((made.index_keys[layer] - theirs.index_keys[layer]).abs().max()) <= 3 * TOLERANCE, layer
        if layer in theirs.selections:
            assert made.selections[layer].shape == (ROWS, sizes.index_topk) and int(made.selections[layer].min()) >= 0
            # two of 70,000 scores may be equal but for their last bits
            assert int((made.selections[layer] != theirs.selections[layer]).any(1).sum()) <= 1, layer
        if layer == source:
            assert made.pool is not None and theirs.pool is not None
            assert made.pool.sum(1).tolist() == [sizes.candidate_blocks] * ROWS and made.pool.shape[1] == 8752
            assert int((made.pool != theirs.pool).any(1).sum()) <= 1
    assert [kind.value for kind in topology.shared.kinds] == ["window", "full", "reuse", "full", "reindex"]
