"""Tokenizers of directories as the library made them, kept on disk: a later start needs neither the library nor the second it takes.

Owns: the files, what they are named after, and which of them count. Never touches: what a tokenizer means.

A file is named after every byte that the library may read of the directory and after the libraries' versions, so that it is never stale. It
counts only if it belongs to this user or to root and nobody else may write it; anything else is made anew. A cache that cannot be written
costs time, never a start.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import tokenizers

from deepinfer.engine import environ
from deepinfer.kernels.toolchain.store import distrust, user_cache, write_whole

ChatTemplates = str | Mapping[str, str]
"""One template, or several by name ("default", "tool_use")."""

_READ = (".json", ".jinja", ".txt", ".model")
_LARGEST = 1 << 28
"""Bytes of a directory's such files beyond which they are not looked at."""
_KEPT = 16
_FORM = "1"
"""Changes with what is in a file."""


@dataclass(frozen=True)
class KeptTokenizer:
    """What a `deepinfer.engine.tokenizer.Tokenizer` is made of; ``backend`` is `tokenizers`' own JSON."""

    backend: str
    special_tokens: Mapping[str, str]
    chat_template: ChatTemplates | None


def cache_folder() -> Path | None:
    """Where they are kept; ``None`` = nowhere."""
    given: str | None = environ.get("DEEPINFER_TOKENIZER_CACHE")
    if given is not None:
        return Path(given) if given else None
    return user_cache("tokenizers")


def file_of(source: Path) -> Path | None:
    """The file of a directory's tokenizer, whether it is there or not; ``None`` if there can be none."""
    try:
        folder = cache_folder()
        if folder is None or not source.is_dir():
            return None
        found = sorted(p for p in (*source.iterdir(), *source.glob("additional_chat_templates/*")) if p.suffix in _READ and p.is_file())
        if sum(p.stat().st_size for p in found) > _LARGEST:
            return None
        versions = [importlib.metadata.version(name) for name in ("transformers", "tokenizers")]
        digest = hashlib.blake2b(json.dumps([_FORM, *versions]).encode(), digest_size=20)
        for path in found:
            data = path.read_bytes()
            digest.update(json.dumps([str(path.relative_to(source)), len(data)]).encode() + data)
    except (OSError, RuntimeError, importlib.metadata.PackageNotFoundError):
        return None
    return folder / f"{digest.hexdigest()}.json"


def find(file: Path) -> KeptTokenizer | None:
    """What a file holds; ``None`` if it is not there, is not to be trusted or cannot be read."""
    try:
        with file.open("rb") as opened:
            if distrust(os.fstat(opened.fileno())) is not None:
                return None
            return KeptTokenizer(**json.load(opened))
    except (OSError, ValueError, TypeError):
        return None


def keep(file: Path, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str], chat_template: ChatTemplates | None) -> None:
    """Writes a file, unless the tokenizer is not the same once it is read back; the oldest beyond sixteen go."""
    with suppress(Exception):  # parts written in Python cannot be saved, and a cache may be full or read-only
        text = backend.to_str()
        if tokenizers.Tokenizer.from_str(text).to_str() != text:
            return
        write_whole(file, json.dumps(asdict(KeptTokenizer(text, dict(special_tokens), chat_template))).encode())
        kept = sorted(file.parent.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for old in kept[:-_KEPT]:
            old.unlink(missing_ok=True)
