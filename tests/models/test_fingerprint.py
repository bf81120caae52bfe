"""What tells models apart in names of their KV: what is in the files, not where they lie, nor when they were written."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint_kit import save
from deepinfer.errors import CheckpointError
from deepinfer.models import resolve_model
from gguf_kit import write_gguf


def revision(path: Path) -> str:
    return resolve_model(str(path)).revision


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """One with a tensor that is too large to be read whole, and small ones."""
    directory = shutil.copytree(save("llama"), tmp_path / "model")
    (directory / "tokenizer.json").write_text("{}")
    tensors = load_file(directory / "model.safetensors")
    tensors["large"] = torch.arange(300_000, dtype=torch.float32)
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_a_copy_elsewhere_and_of_another_time_is_the_same(model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(model, tmp_path / "elsewhere" / "name")
    for file in other.iterdir():
        os.utime(file, (1, 1))
    (other / "generation_config.json").write_text('{"temperature": 0.1}')  # no value depends on it
    (one, two) = (resolve_model(str(model)), resolve_model(str(other)))
    assert (one.model_id, one.revision) == (two.model_id, two.revision) == ("LlamaForCausalLM", one.revision)
    assert len(one.revision) == 32


def change(directory: Path, name: str, at: int) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors[name].view(-1)[at] += 1
    save_file(tensors, directory / "model.safetensors")


def write(directory: Path, file: str, **fields: Any) -> None:
    found = json.loads((directory / file).read_text())
    (directory / file).write_text(json.dumps({**found, **fields}))


@pytest.mark.parametrize(
    "edit",
    [
        lambda d: change(d, "large", 0),
        lambda d: change(d, "large", 150_000),
        lambda d: change(d, "large", -1),
        lambda d: change(d, "model.norm.weight", 7),
        lambda d: write(d, "config.json", rope_theta=12345.0),
        lambda d: write(d, "tokenizer.json", version="2"),
        lambda d: (d / "tokenizer.json").unlink(),
    ],
    ids=["begins-otherwise", "in-the-middle", "ends-otherwise", "small-tensor", "configuration", "tokenizer", "no-tokenizer"],
)
def test_other_content_of_the_same_size_and_time_is_another_model(model: Path, edit: Any) -> None:
    before = revision(model)
    files = sorted(model.iterdir())
    times = {file: file.stat().st_mtime_ns for file in files}
    size = (model / "model.safetensors").stat().st_size
    edit(model)
    for file in model.iterdir():
        os.utime(file, ns=(times[file], times[file]))
    assert (model / "model.safetensors").stat().st_size == size
    assert revision(model) != before


def test_gguf_files_are_told_apart_too(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        metadata = {"llama.rope.freq_base": 7000.0} if name == "c" else None
        write_gguf(tmp_path / name / f"{name}.gguf", "llama", "llama", metadata=metadata)
    same, other = revision(tmp_path / "a"), tmp_path / "b" / "b.gguf"
    assert revision(other) == same == revision(tmp_path / "a" / "a.gguf") and revision(tmp_path / "c") != same
    data, stat = bytearray(other.read_bytes()), other.stat()
    data[-100] ^= 1
    other.write_bytes(data)
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert revision(other) != same


def test_a_file_that_is_gone_is_named(model: Path) -> None:
    found = resolve_model(str(model))
    (model / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: No such file"):
        _ = found.revision
