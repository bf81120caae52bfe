"""The paged forward against other implementations: their kept numbers, and mlx-lm and mlx-vlm themselves where they are installed.

Caches are not rounded and weights are float32, so logits agree to float32 noise.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from deepinfer.models.deepseek_v41.forward import DeepseekV41Model
from deepinfer.models.deepseek_v41.topology import DeepseekV41Topology
from deepseek_v41 import golden
from deepseek_v41.forward_kit import Bench, make_model
from deepseek_v41.weights_kit import RandomWeights, config, plan, random_ids

EXACT: dict[str, Any] = {"x_cache_quant": "none", "quantization_config": None}
TOLERANCE = 1e-5
LENGTH = {"tiny": 90, "tiny128": 300}
BLOCK = {"tiny": 16, "tiny128": 128}


def topology(name: str, engram: bool) -> DeepseekV41Topology:
    return plan(name, **EXACT) if engram else plan(name, **EXACT, engram_layer_ids=[])


@cache
def model(name: str, engram: bool, seed: int) -> DeepseekV41Model:
    layout = topology(name, engram)
    return make_model(layout, RandomWeights(layout, seed))


def logits(name: str, engram: bool, seed: int, ids: torch.Tensor, chunks: tuple[int, ...] | None) -> torch.Tensor:
    """All positions, in chunks of so many tokens (all at once by default)."""
    bench = Bench(model(name, engram, seed), block=BLOCK[name], pages=20)
    run = bench.start(ids)
    return torch.cat([bench.step([(run, count)])[0] for count in chunks or (len(ids),)])


@pytest.mark.parametrize("chunks", [None, golden.CHUNKS])
@pytest.mark.parametrize("engram", [False, True])
def test_kept_logits(engram: bool, chunks: tuple[int, ...] | None) -> None:
    found = logits("tiny", engram, golden.SEED, golden.text_ids(), chunks)[list(golden.POSITIONS)][:, golden.COLUMNS]
    wanted = golden.numbers()["mlx_vlm.logits"] if engram else golden.numbers()["mlx_lm.logits"][-1]
    assert float((found - wanted).abs().max()) <= golden.TOLERANCE


@pytest.mark.oracle
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", ["tiny", "tiny128"])
def test_logits_of_mlx_lm(name: str, seed: int) -> None:
    pytest.importorskip("mlx_lm.models.deepseek_v41", reason="needs mlx-lm 0.32, which `make oracle` installs")
    from deepseek_v41.mlx_lm_kit import Oracle

    layout, ids = topology(name, False), random_ids(topology(name, False), LENGTH[name], seed)
    theirs = Oracle(config(name, engram_layer_ids=[]), RandomWeights(layout, seed), quantised=False)
    for chunks in (None, (37, 20, *[1] * 33) if name == "tiny" else (130, 7, 128, *[1] * 35)):
        wanted, _ = theirs.run(ids, chunks)
        assert float((logits(name, False, seed, ids, chunks) - wanted).abs().max()) <= TOLERANCE, chunks


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["tiny", "tiny128"])
def test_logits_of_mlx_vlm_with_engram(name: str) -> None:
    for needed in ("mlx.core", "PIL"):
        pytest.importorskip(needed, reason="needs mlx and Pillow, which `make oracle` installs")
    try:
        from deepseek_v41 import mlx_vlm_kit

        theirs = mlx_vlm_kit.Oracle(config(name), RandomWeights(topology(name, True), 2), range(2048))
    except ModuleNotFoundError as error:
        pytest.skip(f"needs mlx-vlm 0.7, which `make oracle` installs: {error}")
    ids = random_ids(topology(name, True), LENGTH[name], 2)
    with mlx_vlm_kit.roundings(False):
        for chunks in (None, (31, 29, *[1] * 30) if name == "tiny" else (130, 170)):
            wanted = theirs.logits(ids, None, chunks)
            assert float((logits(name, True, 2, ids, chunks) - wanted).abs().max()) <= TOLERANCE, chunks
