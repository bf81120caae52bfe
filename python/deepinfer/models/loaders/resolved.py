"""What a model name stands for, before any weight is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ...errors import CheckpointError
from .fingerprint import fingerprint


@dataclass(frozen=True)
class TokenizerSource:
    """Where text rules come from: a directory with tokenizer files, or the metadata of a GGUF file."""

    kind: Literal["hf", "gguf"]
    path: Path


@dataclass(frozen=True)
class ResolvedModel:
    """A model that was found; ``load_model`` turns it into one that runs."""

    name: str
    """As the user wrote it."""
    model_id: str
    """Identity for cache keys: hub id; for local files, wherever they lie, the architecture."""
    commit: str | None
    """Of a hub snapshot; ``None`` for local files."""
    weight_format: str
    """``safetensors``, ``fp8``, ``gguf`` or ``none`` (no weights are there: only ``load_format="dummy"`` can run it)."""
    config: dict[str, Any]
    """Fields of config.json, or the same fields made from GGUF metadata."""
    architecture: str
    weight_files: tuple[Path, ...]
    tokenizer: TokenizerSource
    generation_config: dict[str, Any] = field(default_factory=dict)
    chat_template: str | None = None

    beside: tuple[Path, ...] = ()
    """Files besides the weights that what a model computes depends on."""

    @cached_property
    def revision(self) -> str:
        """Identity for cache keys: commit of a hub snapshot; for local files a digest of what is in them (`fingerprint`), made when it is
        asked for. Raises ``CheckpointError`` for a file that cannot be read."""
        return self.commit or fingerprint(self.weight_files, self.beside)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a sequence: generation_config's list, else config's; empty if neither has any.

        Raises ``CheckpointError`` for anything else than ids.
        """
        for source, file in ((self.generation_config, "generation_config.json"), (self.config, "config.json")):
            value = source.get("eos_token_id")
            if value is not None:
                ids = value if isinstance(value, list) else [value]
                if any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in ids):
                    raise CheckpointError(f"{self.name}: 'eos_token_id' in {file} must be a token id or a list of them, found {value!r}")
                return tuple(ids)
        return ()
