"""What a checkpoint of DeepSeek-V4 may hold, and what is wrong with one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer.engine.config import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.errors import CheckpointError
from deepinfer.models.deepseek_v4.forward import DeepseekV4Model
from deepinfer.models.deepseek_v4.loading import ReleasedNames, released_name
from deepinfer.models.deepseek_v4.topology import read_topology
from deepinfer.models.loaders.load import load_model
from deepinfer.models.loaders.resolve import resolve_model
from deepinfer.models.loaders.safetensors_source import SafetensorsSource
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


def test_what_transformers_saves_is_read(tmp_path: Path) -> None:
    """``save_pretrained`` has names between the release's and transformers' own; every number comes to where the release's would."""
    given = v4_kit.weights(v4_kit.read_plan(v4_kit.config()), 1)
    v4_kit.transformers_model(v4_kit.config(), given).save_pretrained(tmp_path)
    resolved = resolve_model(str(tmp_path))
    assert read_topology(resolved.config) == read_topology(v4_kit.config())
    source = ReleasedNames(SafetensorsSource(resolved.weight_files))
    assert set(source.names()) == given.keys() and "model.embed_tokens.weight" not in given
    for name, wanted in given.items():
        assert source.shape(name) == wanted.shape and torch.equal(source.read(name), wanted), name
    assert isinstance(load_model(resolved), DeepseekV4Model)


def test_the_release_has_its_own_names() -> None:
    for name in v4_kit.weights(v4_kit.read_plan(v4_kit.config()), 1):
        assert released_name(name) == name


def test_stages_that_are_left_out_are_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = load(tmp_path, as_int32_with_stages)
    left = "draft stages of the checkpoint are left out (mtp.*, 1 of its tensors); speculative='ngram' drafts without them"
    assert made.remarks == (left,)
    for quiet in (False, True):
        with Engine(EngineConfig(model=str(tmp_path), device="cpu", num_kv_blocks=4, num_threads=1, max_model_len=128, quiet=quiet)):
            pass
        assert capsys.readouterr().err.count("draft stages") == (not quiet)


def test_nothing_has_memory_before_the_names_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = DeepseekV4Model.from_config

    def watched(config: Any, dtype: torch.dtype, device: torch.device) -> Any:
        assert device.type == "meta"
        return real(config, dtype, device)

    def spoil(given: Weights) -> None:
        for name in [name for name in given if name.startswith("layers.3.attn.")]:
            given[f"model.other.{name}"] = given.pop(name)

    monkeypatch.setattr(DeepseekV4Model, "from_config", staticmethod(watched))
    with pytest.raises(CheckpointError, match=r"12 tensors are missing, the first of them from .*: 'layers\.3\.attn\.wo_a.* and 2 more"):
        load(tmp_path, spoil)


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
        (put("model.embed_tokens.weight", torch.zeros(512, 128)), "'embed.weight' in .* and 'model.embed_tokens.weight' in .* the same"),
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
