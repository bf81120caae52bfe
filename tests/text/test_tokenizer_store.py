"""Tokenizers kept as they were made: the same ones without the library, and none that is stale, damaged or somebody else's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

import text_kit
from deepinfer.engine import tokenizer_store
from deepinfer.engine.tokenizer import load_tokenizer

TEXTS = ("Hello 세계 <|im_start|> <think>", "  two  spaces\n", "the fox", "é<|im_end|>")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DEEPINFER_TOKENIZER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def save(folder: Path, kind: str = "byte_level") -> Path:
    made = PreTrainedTokenizerFast(tokenizer_object=getattr(text_kit, kind)().backend, bos_token="<|im_start|>", eos_token="<|im_end|>")
    made.chat_template = text_kit.CHATML
    made.save_pretrained(folder)
    return folder


def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_what_is_kept_is_the_same_tokenizer(kind: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path / "model", kind)
    made = load_tokenizer(str(folder))
    assert len(list(cache.iterdir())) == 1
    without_library(monkeypatch)
    kept = load_tokenizer(str(folder))
    for text in TEXTS:
        assert kept.encode(text) == made.encode(text) and kept.encode_plain(text) == made.encode_plain(text)
        ids = made.encode(text)
        assert kept.decode(ids, skip_special_tokens=False) == made.decode(ids, skip_special_tokens=False)
    assert kept.backend.to_str() == made.backend.to_str() and kept.chat_template == made.chat_template == text_kit.CHATML
    assert (kept.special_tokens, dict(kept.control_tokens), kept.name) == (made.special_tokens, dict(made.control_tokens), made.name)


def test_a_start_with_a_kept_tokenizer_does_not_import_the_library(cache: Path, tmp_path: Path) -> None:
    folder = save(tmp_path / "model")
    load_tokenizer(str(folder))
    code = (
        f"import sys; from deepinfer.engine.tokenizer import load_tokenizer as l; l({str(folder)!r}); print('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "added.txt"])
def test_any_change_of_the_directory_is_another_file(name: str, cache: Path, tmp_path: Path) -> None:
    folder = save(tmp_path / "model")
    before = tokenizer_store.file_of(folder)
    path = folder / name
    path.write_bytes((path.read_bytes() if path.exists() else b"") + b"\n")
    assert before is not None and tokenizer_store.file_of(folder) not in (None, before)
    path.rename(folder / f"x{name}")
    assert tokenizer_store.file_of(folder) != before


def test_other_versions_of_the_libraries_make_another_file(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path / "model")
    before = tokenizer_store.file_of(folder)
    monkeypatch.setattr(tokenizer_store.importlib.metadata, "version", lambda name: "999")
    assert before is not None and tokenizer_store.file_of(folder) != before


@pytest.mark.parametrize("harm", ["writable", "cut", "no json", "no tokenizer"])
def test_a_file_that_does_not_count_is_made_anew(harm: str, cache: Path, tmp_path: Path) -> None:
    folder = save(tmp_path / "model")
    want = load_tokenizer(str(folder)).backend.to_str()
    (file,) = cache.iterdir()
    good = json.loads(file.read_text())
    if harm == "writable":
        file.write_text(json.dumps({**good, "special_tokens": {"eos_token": "a stranger's"}}))
        file.chmod(0o666)
    elif harm == "cut":
        file.write_text(file.read_text()[:-9])
    else:
        file.write_text("[1]" if harm == "no json" else json.dumps({**good, "backend": "{}"}))
    again = load_tokenizer(str(folder))
    assert again.backend.to_str() == want and again.special_tokens["eos_token"] == "<|im_end|>"
    assert json.loads(file.read_text()) == good and file.stat().st_mode & 0o022 == 0


def test_nothing_is_kept_where_it_is_not_wanted_or_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path / "model")
    monkeypatch.setenv("DEEPINFER_TOKENIZER_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert tokenizer_store.file_of(folder) is None and load_tokenizer(str(folder)).vocab_size
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the folder should be")
    monkeypatch.setenv("DEEPINFER_TOKENIZER_CACHE", str(blocked))
    assert load_tokenizer(str(folder)).vocab_size and not (tmp_path / "home").exists()
    monkeypatch.delenv("DEEPINFER_TOKENIZER_CACHE")
    load_tokenizer(str(folder))
    assert len(list((tmp_path / "home" / "deepinfer" / "tokenizers").iterdir())) == 1


def test_the_oldest_go(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_store, "_KEPT", 3)
    backend = text_kit.byte_level().backend
    for i in range(5):
        tokenizer_store.keep(cache / f"{i}.json", backend, {}, None)
        os.utime(cache / f"{i}.json", (i, i))
    assert sorted(p.name for p in cache.iterdir()) == ["2.json", "3.json", "4.json"]
