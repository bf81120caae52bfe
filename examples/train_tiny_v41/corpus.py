"""Text to train on: sources and documentation of packages that are installed anyway, a tokenizer for them, token ids in a file.

Owns: which files are read, what is held out, the file of ids, batches. Never touches: the model.

``python corpus.py --out DIR [--vocab 4096] [--packages numpy,...] [--megabytes 60]`` writes ``tokenizer.json`` and
``tokens_train.npy`` / ``tokens_held_out.npy`` (uint16 ids, every file opened by the begin and closed by the end token).
"""

from __future__ import annotations

import argparse
import importlib.util
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS, PAD, NOISE = 0, 1, 2, 3
"""Ids of the control tokens; the last one stands in a draft block where a token is not known yet."""
CONTROL = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>", "<｜draft▁noise｜>")
PACKAGES = ("stdlib", "numpy", "networkx", "sympy", "torch", "rich", "pydantic", "setuptools", "jinja2", "pygments", "transformers")
"""Permissively licensed (README.md names the licences); ``stdlib`` is Python's own library."""
_SUFFIXES = (".py", ".rst", ".md")
_SKIPPED = ("site-packages", "test", "tests", "testing", "idlelib", "lib2to3", "encodings", "unicode", "_vendor", "__pycache__")
_LARGEST, _LONGEST_LINE, _HELD_OUT = 150_000, 400, 50


def files_of(package: str) -> list[Path]:
    """Text files of an installed package in a fixed order, without tests, tables and generated files."""
    if package == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
    else:
        found = importlib.util.find_spec(package)
        if found is None or not found.submodule_search_locations:
            raise SystemExit(f"package {package!r} is not installed; leave it out of --packages")
        root = Path(next(iter(found.submodule_search_locations)))
    files = sorted(p for p in root.rglob("*") if p.suffix in _SUFFIXES and p.is_file())
    return [p for p in files if not any(part in _SKIPPED for part in p.relative_to(root).parts) and p.stat().st_size <= _LARGEST]


def texts(packages: tuple[str, ...], megabytes: float) -> Iterator[tuple[str, str]]:
    """(name, text) of files: every package in turn gives a file, until ``megabytes`` are reached."""
    left = megabytes * 1e6

    def shuffled(path: Path) -> int:
        return zlib.crc32(path.name.encode() + path.parent.name.encode())

    queues = {name: iter(sorted(files_of(name), key=shuffled)) for name in packages}
    while queues and left > 0:
        for name in tuple(queues):
            path = next(queues[name], None)
            if path is None:
                del queues[name]
                continue
            text = path.read_text(encoding="utf-8", errors="ignore")
            if len(text) < 200 or max(map(len, text.splitlines()), default=0) > _LONGEST_LINE:
                continue
            left -= len(text)
            yield f"{name}/{path.parent.name}/{path.name}", text


def split(documents: list[tuple[str, str]]) -> dict[str, list[str]]:
    """Texts by part: one file in ``_HELD_OUT``, by its name, is kept from training; the last one if there is none."""
    away = [zlib.crc32(name.encode()) % _HELD_OUT == 0 for name, _ in documents]
    away[-1] = away[-1] or not any(away)
    by_part: dict[str, list[str]] = {"train": [], "held_out": []}
    for (_, text), held in zip(documents, away, strict=True):
        by_part["held_out" if held else "train"].append(text)
    if not by_part["train"]:
        raise SystemExit("one file is too little text; raise --megabytes or name more --packages")
    return by_part


def train_tokenizer(sample: list[str], vocab: int) -> Tokenizer:
    """Byte-level BPE of ``vocab`` ids, the control tokens first; a begin token is put before every text."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in CONTROL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(sample, trainer)
    made.post_processor = processors.TemplateProcessing(
        single=f"{CONTROL[BOS]} $A", pair=f"{CONTROL[BOS]} $A {CONTROL[BOS]} $B", special_tokens=[(CONTROL[BOS], BOS)]
    )
    return made


def encode(tokenizer: Tokenizer, documents: list[str]) -> np.ndarray:
    """uint16 ids of all documents in a line, each with its begin and end token."""
    parts: list[np.ndarray] = []
    for start in range(0, len(documents), 256):
        for encoding in tokenizer.encode_batch_fast(documents[start : start + 256]):
            parts.append(np.asarray([*encoding.ids, EOS], np.uint16))
    return np.concatenate(parts)


class Batches:
    """Random windows of a line of ids; batch ``n`` is a function of ``(seed, n)``, so that a run can be resumed anywhere."""

    def __init__(self, ids: np.ndarray, length: int, batch: int, device: torch.device | str, seed: int = 0) -> None:
        if len(ids) <= length:
            raise ValueError(f"{len(ids)} ids are too few for windows of {length}; gather more text")
        self._ids = torch.from_numpy(ids.astype(np.int16)).to(device)
        self._length, self._batch, self._seed = length, batch, seed

    def __call__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids int64 ``[batch, length]`` and the ids that follow them; the first one is the begin token, as in every prompt."""
        draw = np.random.RandomState([self._seed, number]).randint(0, len(self._ids) - self._length, self._batch)
        places = torch.from_numpy(draw)[:, None] + torch.arange(self._length + 1)
        rows = self._ids[places.to(self._ids.device)].long() & 0xFFFF
        rows[:, 0] = BOS
        return rows[:, :-1], rows[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser(description="text of installed packages → token ids")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--megabytes", type=float, default=60.0)
    parser.add_argument("--packages", default=",".join(PACKAGES), help="names, by commas")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    documents = list(texts(tuple(args.packages.split(",")), args.megabytes))
    parts = split(documents)
    kept = parts["train"]
    tokenizer = train_tokenizer(kept[:: max(1, len(kept) // 1500)], args.vocab)
    tokenizer.save(str(args.out / "tokenizer.json"))
    for name, part in parts.items():
        ids = encode(tokenizer, part)
        np.save(args.out / f"tokens_{name}.npy", ids)
        print(f"{name}: {len(part)} files, {sum(map(len, part)) / 1e6:.1f} MB, {len(ids) / 1e6:.2f} M ids")


if __name__ == "__main__":
    main()
