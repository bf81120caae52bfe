"""``deepinfer plan`` on configurations alone: the published sizes of DeepSeek-V4.1, and any other model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer.cli.app import main
from deepinfer.models import resolve_architecture, sizes

FULL = Path(__file__).resolve().parents[1] / "data" / "deepseek_v41" / "full.json"


@pytest.fixture(scope="module", autouse=True)
def counted_once() -> Iterator[None]:
    """The full model has 96,085 tensors: each configuration is counted once."""
    real, known = sizes.read_sizes, {}

    def read(config: dict[str, Any], *how: Any) -> sizes.ModelSizes:
        key = (json.dumps(config), *how)
        if key not in known:
            known[key] = real(config, *how)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sizes, "read_sizes", read)
        yield


def plan(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["plan", *argv, "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_the_release_has_its_published_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    report = plan(capsys, str(FULL), "--gpus", "8", "--gpu-gb", "141", "--host-gb", "2000")
    parameters = report["parameters"]
    assert round(parameters["backbone"] / 1e9) == 552
    assert round(parameters["engram table"] / 1e9, 1) == 196.6
    assert round(parameters["draft"] / 1e9, 1) == 14.2
    assert report["kv"] == {"bytes_per_token": 890, "block_tokens": 128, "block_bytes": 113_920}
    assert report["state"]["stored_bytes"] == 1_415_040
    # the stored region and its replica; decoder and draft rings, 3 × 8 raw rows and 9 ids, twice as well
    dropped = (20 + 3) * 134 * 528 + 3 * 8 * 2 * 512 * 4 + 9 * 8
    assert report["state"]["bytes_per_sequence"] == 2 * 1_415_040 + 2 * dropped
    assert report["table_bytes"] == 768_022_850 * 264
    assert 300e9 < report["weight_bytes"]["packed"] < 310e9 and 1.1e12 < report["weight_bytes"]["bfloat16"] < 1.15e12
    assert report["full_sequence_bytes"] == 890 * 1_048_576 + report["state"]["bytes_per_sequence"]
    found = report["fit"]
    assert found["tables_in_host"] and found["least_places"] == 3 and found["kv_bytes_per_place"] > 80e9
    assert found["full_sequences"] == 8 * (found["kv_tokens"] // 8 // 1_048_576)


def test_kv_in_8_bits_takes_half(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "intermediate_size": 96}
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "vocab_size": 100, "max_position_embeddings": 512, **sizes}))
    whole, short = (plan(capsys, str(config), "--kv-cache-dtype", form)["kv"] for form in ("auto", "fp8"))
    assert whole["bytes_per_token"] == 2 * short["bytes_per_token"] == 2 * 2 * 2 * 2 * 16
    assert main(["plan", str(FULL), "--kv-cache-dtype", "fp8"]) == 2
    assert "kv_cache_dtype='fp8' is for models of the Llama family" in capsys.readouterr().err


def test_a_person_reads_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(FULL), "--gpus", "1"]) == 0
    text = capsys.readouterr().out
    for words in (
        "763.2 B = 551.9 B backbone · 196.6 B engram table · 14.2 B draft · 0.5 B vision".replace("0.5 B", "485.3 M"),
        "890 B a token, 113,920 B a block of 128",
        "1,415,040 B of it are worth storing",
        "on a GPU of 141.0 GB, 90% of it:",
        "no room for KV beside the weights: 3 such GPUs hold them",
    ):
        assert words in text, text


def test_any_family_is_counted_as_it_loads(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {
        "architectures": ["Qwen3ForCausalLM"], "vocab_size": 120, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = plan(capsys, str(tmp_path), "--dtype", "float32", "--block-size", "16", "--host-gb", "1")
    model = resolve_architecture("Qwen3ForCausalLM").from_config(config, torch.float32, torch.device("cpu"))
    paged, _ = model.kv_groups(16)
    layer = 64 * (128 + 2 * 64) + 128 * 64 + 3 * 64 * 96 + 2 * 64 + 2 * 32
    assert report["parameters"]["total"] == 2 * 120 * 64 + 3 * layer + 64
    assert report["weight_bytes"] == {"float32": 4 * report["parameters"]["total"]}
    assert report["kv"] == {"bytes_per_token": 3 * 2 * 64 * 4, "block_tokens": 16, "block_bytes": paged[0].page_bytes}
    assert report["state"] == {"stored_bytes": 0, "bytes_per_sequence": 0} and report["table_bytes"] == 0
    assert report["fit"]["fits"] and report["max_position"] == model.max_position == 512
    assert plan(capsys, str(tmp_path / "config.json"), "--dtype", "float32")["weight_bytes"] == report["weight_bytes"]


def test_fp8_weights_that_stay_packed_are_counted_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """On a GPU, but for the head, what is not converted, and what no kernel is made for; a host and float32 expand them."""
    config = {
        "architectures": ["Qwen3ForCausalLM"], "vocab_size": 120, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "quantization_config": {
            "quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.down_proj"],
        },
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = plan(capsys, str(tmp_path), "--gpus", "1")
    kept, scales = (256 + 192) * 64 + 64 * 128, 4 * (256 // 16 + 192 // 16 + 64 // 16)
    expanded = report["weight_bytes"]["bfloat16"]
    assert report["weight_bytes"] == {"packed": expanded - kept + scales, "bfloat16": expanded}
    assert report["fit"]["weight_bytes_per_place"] == expanded - kept + scales == report["checkpoint_bytes"]["total"]
    assert plan(capsys, str(tmp_path), "--host-gb", "1")["fit"]["weight_bytes_per_place"] == expanded
    assert list(plan(capsys, str(tmp_path), "--dtype", "float32")["weight_bytes"]) == ["float32"]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ((str(FULL), "--gpus", "8", "--weights", "int4"), "packed or bfloat16"),
        ((str(FULL), "--gpus", "-1"), "--gpus -1 is no number of GPUs: give 1 or more"),
        ((str(FULL), "--gpus", "0"), "--gpus 0 is no number of GPUs: give 1 or more"),
        ((str(FULL), "--gpu-gb", "80"), "give both"),
        ((str(FULL), "--host-gb", "80", "--gpu-gb", "80"), "give both"),
        ((str(FULL), "--gpus", "1", "--max-model-len", "2000000"), "1048576"),
        ((str(FULL), "--gpus", "1", "--max-num-seqs", "0"), "--max-num-seqs"),
        ((str(FULL), "--max-num-seqs", "8"), "give --gpus N or --host-gb M"),
        ((str(FULL), "--kv-memory-fraction", "0.5", "--json"), "--kv-memory-fraction is for what fits a machine"),
        ((str(FULL), "--gpus", "1", "--gpu-gb", "nan"), "--gpu-gb nan"),
        ((str(FULL), "--gpus", "1", "--gpu-gb", "inf"), "--gpu-gb inf"),
        ((str(FULL), "--host-gb", "inf"), "--host-gb inf"),
        ((str(FULL), "--host-gb", "-1"), "--host-gb -1"),
        ((str(FULL), "--gpus", "1", "--kv-memory-fraction", "nan"), "fraction"),
        (("/nonexistent",), "no such file"),
    ],
)
def test_a_mistake_takes_one_line(argv: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1 and says in captured.err
