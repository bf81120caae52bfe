"""What a checkpoint of DeepSeek-V4 may hold, and what is wrong with one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from deepinfer.errors import CheckpointError
from deepinfer.models.deepseek_v4.forward import DeepseekV4Model
from deepinfer.models.loaders.load import load_model
from deepinfer.models.loaders.resolve import resolve_model
from deepseek_v41 import v4_kit

Weights = dict[str, torch.Tensor]
TABLE = "layers.1.ffn.gate.tid2eid"


def load(where: Path, change: Callable[[Weights], None] | None = None, load_format: str = "auto") -> DeepseekV4Model:
    """Writes a checkpoint, changed, and loads it."""
    plan = v4_kit.read_plan(v4_kit.config())
    given = dict(v4_kit.weights(plan, 1))
    if change is not None:
        change(given)
    v4_kit.write_checkpoint(where, v4_kit.config(), given)
    made = load_model(resolve_model(str(where)), load_format=load_format, seed=9)
    assert isinstance(made, DeepseekV4Model)
    return made


def as_int32_with_stages(given: Weights) -> None:
    """Tables in the type that the release has, draft stages, and a bias that nothing reads."""
    given[TABLE] = given[TABLE].int()
    given["mtp.0.norm.weight"] = torch.ones(128)
    given["layers.0.ffn.gate.bias"] = torch.zeros(8)
    given["embed.weight"] = given["embed.weight"].bfloat16()


def test_what_a_checkpoint_may_hold(tmp_path: Path) -> None:
    made = load(tmp_path, as_int32_with_stages)
    given = v4_kit.weights(v4_kit.read_plan(v4_kit.config()), 1)
    table = made.layers[1]._table
    assert table is not None and table.dtype == torch.int64 and torch.equal(table, given[TABLE])
    assert made.layers[2]._table is None


def test_drawn_tables_name_experts(tmp_path: Path) -> None:
    made = load(tmp_path, load_format="dummy")
    first, second = (layer._table for layer in made.layers[:2])
    assert first is not None and second is not None and not torch.equal(first, second)
    assert first.shape == (512, 2) and int(first.min()) == 0 and int(first.max()) == 7 and bool((first[:, 0] != first[:, 1]).all())


def put(name: str, value: torch.Tensor) -> Callable[[Weights], None]:
    return lambda given: given.__setitem__(name, value)


def table_with(token: int, experts: list[int]) -> Callable[[Weights], None]:
    def change(given: Weights) -> None:
        given[TABLE] = given[TABLE].clone()
        given[TABLE][token] = torch.tensor(experts)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda given: given.pop("layers.4.attn.indexer.compressor.ape"), "layers.4.attn.indexer.compressor.ape' is missing"),
        (put("layers.0.attn.compressor.ape", torch.zeros(4, 64)), r"'layers.0.attn.compressor.ape' .* not part of this architecture"),
        (put("layers.3.attn.compressor.ape", torch.zeros(4, 64)), r"shape \[4, 64\], the configuration needs \[32, 64\]"),
        (put("layers.2.attn.attn_sink", torch.full((8,), torch.nan)), "'layers.2.attn.attn_sink' .* holds NaN or infinity"),
        (put(TABLE, torch.zeros(512, 2)), f"table '{TABLE}' .* dtype torch.float32; numbers of experts are whole"),
        (table_with(5, [0, 8]), f"table '{TABLE}' .* names experts 0 … 8, there are 8"),
        (table_with(5, [-1, 2]), f"table '{TABLE}' .* names experts -1 … 7"),
        (table_with(77, [3, 3]), f"table '{TABLE}' .* gives token 77 an expert twice"),
    ],
)
def test_damage_is_named(change: Callable[[Weights], None], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, change)
