"""Checkpoint directories that were tampered with: named in one line, and refused before the weights have memory."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer.cli.app import main
from deepinfer.errors import CheckpointError
from deepinfer.models import resolve_model
from deepinfer.models.deepseek_v41.loading import load_parameters
from deepinfer.models.deepseek_v41.parameters import checkpoint_parameters
from deepinfer.models.deepseek_v41.topology import read_topology
from deepinfer.models.loaders.safetensors_source import find_safetensors

INDEX = "model.safetensors.index.json"
Header = dict[str, Any]


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    """A checkpoint in several shards, to be damaged."""
    directory = tmp_path / "copied"
    shutil.copytree(made, directory)
    return directory


def refused(directory: Path, match: str) -> None:
    with pytest.raises(CheckpointError, match=match) as caught:
        load_parameters(resolve_model(str(directory)), torch.bfloat16)
    assert "\n" not in str(caught.value)


def edit_json(file: Path, change: Callable[[Any], Any]) -> None:
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


def edit_header(file: Path, change: Callable[[Header], Any]) -> None:
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    change(header)
    written = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(written)) + written + data[8 + length :])


def shards(directory: Path) -> list[Path]:
    return sorted(directory.glob("model-*.safetensors"))


@pytest.mark.parametrize(
    ("shard", "match"),
    [
        ("/etc/hostname", "lies outside of the checkpoint's directory"),
        ("../made/model-00001-of-00004.safetensors", "lies outside of the checkpoint's directory"),
        ("a/../../b.safetensors", "lies outside of the checkpoint's directory"),
        ("absent.safetensors", "absent.safetensors is missing"),
        ("", "is missing"),
        (7, "no 'weight_map' object of tensors and their files"),
        (["model.safetensors"], "no 'weight_map' object"),
    ],
)
def test_an_index_that_leads_elsewhere(copied: Path, shard: Any, match: str) -> None:
    edit_json(copied / INDEX, lambda index: index["weight_map"].update({"norm.weight": shard}))
    refused(copied, match)


def test_an_index_that_names_another_of_its_files(copied: Path) -> None:
    first, last = shards(copied)[0].name, shards(copied)[-1].name
    edit_json(copied / INDEX, lambda index: index["weight_map"].update({"embed.weight": last}))
    refused(copied, rf"tensor 'embed.weight' is missing from .*{last}, {INDEX} lists it")
    edit_json(copied / INDEX, lambda index: index["weight_map"].update({"embed.weight": first, "one.more": first}))
    refused(copied, rf"tensor 'one.more' is missing from .*{first}")


def test_a_name_in_two_shards(copied: Path) -> None:
    def again(header: Header) -> None:
        name = next(name for name in header if name != "__metadata__")
        header["norm.weight"] = header.pop(name)

    edit_header(shards(copied)[0], again)
    refused(copied, r"tensor 'norm\.weight' is both in .* and in ")


@pytest.mark.parametrize("name", ["a\nb", "layers.0\x00", "\u202etxt", "x" * 5000])
def test_names_that_are_none(copied: Path, name: str) -> None:
    edit_header(shards(copied)[0], lambda header: header.update({name: {"dtype": "I8", "shape": [0], "data_offsets": [0, 0]}}))
    refused(copied, "header names a tensor .* which is no name")


@pytest.mark.parametrize("length", [0, 1 << 20, 100_000_001, 1 << 62, (1 << 64) - 1])
def test_headers_of_other_lengths_than_they_say(copied: Path, length: int) -> None:
    file = shards(copied)[0]
    file.write_bytes(struct.pack("<Q", length) + file.read_bytes()[8:4096])
    refused(copied, r"not a safetensors file|is truncated: its header needs|header is not valid")


def test_links_are_followed_to_files_and_to_nothing_else(copied: Path, made: Path) -> None:
    """Hub caches consist of links to files elsewhere."""
    first = shards(copied)[0]
    first.unlink()
    first.symlink_to(made / first.name)
    assert load_parameters(resolve_model(str(copied)), torch.bfloat16).token_map is not None
    for target in (first.name, "nowhere", "."):  # to itself, to nothing, to a directory
        first.unlink()
        first.symlink_to(target)
        refused(copied, f"{first.name} is missing")
    (copied / INDEX).unlink()
    os.mkfifo(copied / "pipe.safetensors")
    assert [file.name for file in find_safetensors(copied)] == [file.name for file in shards(copied)[1:]]


def test_a_shard_that_may_not_be_read(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, gone = Path.open, shards(copied)[-1]

    def opened(path: Path, *how: Any, **more: Any) -> Any:
        if path == gone:
            raise PermissionError(13, "Permission denied")
        return real(path, *how, **more)

    monkeypatch.setattr(Path, "open", opened)
    refused(copied, f"{gone.name} cannot be read: Permission denied")


@pytest.mark.parametrize("file", ["../map.json", "/etc/hostname", "a/../../map.json"])
def test_a_token_map_outside_of_the_checkpoint(copied: Path, file: str) -> None:
    (copied.parent / "map.json").write_text(json.dumps({"ids": list(range(2048))}))
    edit_json(copied / "config.json", lambda config: config["text_config"].update(x_engram_token_map=file))
    refused(copied, "'x_engram_token_map' = .* leads out of")


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("generation_config.json", '{"eos_token_id": "x"}', "'eos_token_id' in generation_config.json must be a token id"),
        ("generation_config.json", '{"eos_token_id": [1, true]}', "found [1, True]"),
        ("generation_config.json", '{"eos_token_id": 5000}', "token id 5000 is outside the vocabulary of 2048"),
        ("tokenizer_config.json", '{"chat_template": 5}', "is no text (int)"),
        ("tokenizer_config.json", "[1]", "expected a JSON object"),
        ("tokenizer.json", "[]", "cannot be read"),
    ],
)
def test_files_about_text_that_say_something_else(copied: Path, file: str, text: str, told: str, capfd: pytest.CaptureFixture[str]) -> None:
    (copied / file).write_text(text)
    assert main(["generate", "--model", str(copied), "--raw", "--quiet", "--max-tokens", "1", "hello"]) == 2
    captured = capfd.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1 and told in captured.err


CHILD = """
import json, resource, sys
import deepinfer
from deepinfer import LLM
from deepinfer.errors import DeepInferError
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
told, before = {}, 0
for where in sys.argv[1:]:
    try:
        LLM(where, dtype="bfloat16", quiet=True, num_kv_blocks=8, max_model_len=256)
    except DeepInferError as error:
        told[where] = [type(error).__name__, str(error)]
    before = before or peak()  # what imports take
print(json.dumps([peak() - before, told]))
"""


def write_sparse(directory: Path, config: dict[str, Any], change: Callable[[Header], Any] = lambda _: None, cut: int = 0) -> int:
    """A checkpoint whose numbers are holes of a file, in the plan's order; bytes of it."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    header: Header = {}
    end = 0
    for spec in checkpoint_parameters(read_topology(config)):
        header[spec.name] = {"dtype": spec.form.value[0], "shape": list(spec.shape), "data_offsets": [end, end + spec.nbytes]}
        end += spec.nbytes
    change(header)
    written = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(written)) + written)
        file.truncate(8 + len(written) + end - cut)
    return end


def test_nothing_is_allocated_for_a_checkpoint_that_is_refused(load: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """0.8 GB of packed weights, which a child process refuses seven times without growing by a fraction of it."""
    config = load("tiny", moe_intermediate_size=16384, x_engram_token_map="identity")
    expert = "layers.3.ffn.experts.5.w1"

    def renamed(header: Header) -> None:
        for name in [name for name in header if name.startswith("layers.3.attn.")]:
            header[f"other.{name}"] = header.pop(name)

    def put_nan(directory: Path) -> None:
        with (directory / "model.safetensors").open("r+b") as file:
            length = struct.unpack("<Q", file.read(8))[0]
            begin, _ = json.loads(file.read(length))[f"{expert}.scale"]["data_offsets"]
            file.seek(8 + length + begin + 5)
            file.write(b"\xff")

    cases: dict[str, tuple[str, str]] = {}

    def case(name: str, error: str, told: str, **how: Any) -> Path:
        where = tmp_path / name
        nbytes = write_sparse(where, how.pop("config", config), **how)
        cases[str(where)] = (error, told)
        assert nbytes > 0.7e9 or name == "imports"
        return where

    case("imports", "CheckpointError", "missing", config=load("tiny", x_engram_token_map="identity"), change=renamed)
    case("renamed", "CheckpointError", "has no place in it|have no place in it", change=renamed)
    case("fp8", "CheckpointError", f"{expert}.weight is F8_E4M3", change=lambda h: h[f"{expert}.weight"].update(dtype="F8_E4M3"))
    case("cut", "CheckpointError", "is truncated at tensor", cut=1)
    put_nan(case("nan", "CheckpointError", f"scales '{expert}.scale' .* hold NaN"))
    for name, error, told, fields in (
        ("maps", "UnsupportedConfigError", "'kv_source_layer_ids' and 'index_source_layer_ids'", {"kv_source_layer_ids": [2, 3, 5]}),
        ("map", "CheckpointError", "map.json: not readable", {"x_engram_token_map": "map.json"}),
        ("count", "UnsupportedConfigError", "'engram_compressed_vocab_size' = 2000", {"engram_compressed_vocab_size": 2000}),
    ):
        where = case(name, error, told)
        edit_json(where / "config.json", lambda config, fields=fields: config["text_config"].update(fields))
    done = subprocess.run([sys.executable, "-c", CHILD, *cases], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    grown, told = json.loads(done.stdout.splitlines()[-1])
    for where, (error, words) in cases.items():
        assert told[where][0] == error, told[where]
        assert "\n" not in told[where][1]

        assert re.search(words, told[where][1]), told[where]
    assert grown < 200e6, f"{grown / 1e6:.0f} MB"
