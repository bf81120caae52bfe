"""Where Engram rows lie: primes, offsets and multipliers of the hashes, and the map from token ids to compressed ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from ...errors import CheckpointError, UnsupportedConfigError
from ..config import required_int
from .fields import int_list, token_id

_RELEASED_MULTIPLIERS: dict[tuple[int, int], tuple[int, ...]] = {
    (99092, 1): (76632096046245, 4839876093313, 35959672319349, 73987337458391),
    (99092, 14): (67716810739261, 51510806800915, 30921347202721, 82619226485591),
}
"""(compressed vocabulary, layer) → multipliers the released weights were trained with: kept as numbers, so that no change of
numpy's generator can move a row."""

_MOST_IDS, _MOST_HEADS, _MOST_ROWS = 64, 1024, 1 << 40
"""Of an n-gram, of an n-gram size, of a head: primes are looked for one by one."""

DEAD = -1
"""Compressed id of a token that takes no part in n-grams, and of the place before a sequence's start."""


@dataclass(frozen=True)
class EngramTopology:
    """One table per layer in ``layers``; every n-gram size has ``heads`` columns of rows of its own."""

    layers: tuple[int, ...]
    rows: tuple[int, ...]
    longest: int
    heads: int
    head_dim: int
    vocab: int
    """Compressed ids."""
    pad_token: int
    """Token id (not compressed) that stands where an n-gram has no token."""
    primes: tuple[tuple[tuple[int, ...], ...], ...]
    """Per table, n-gram size (from 2) and head."""
    multipliers: tuple[tuple[int, ...], ...]
    """Per table and distance from the newest token."""

    @property
    def columns(self) -> int:
        """Rows a token reads from one table."""
        return (self.longest - 1) * self.heads

    @property
    def width(self) -> int:
        """Length of a token's rows in a line."""
        return self.columns * self.head_dim

    def tensors(self, device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Multipliers ``[L, N]``, primes and offsets ``[L, N - 1, H]``, int64: what ``kernels.engram_hash`` takes."""
        primes = torch.tensor(self.primes, dtype=torch.int64)
        flat = primes.flatten(1)
        offsets = (flat.cumsum(1) - flat).view(primes.shape)
        return torch.tensor(self.multipliers, dtype=torch.int64).to(device), primes.to(device), offsets.to(device)


_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
"""Miller and Rabin's test with these bases is right for every number below 3.3e24."""


def _is_prime(number: int) -> bool:
    if number < 2 or any(number % prime == 0 for prime in _WITNESSES):
        return number in _WITNESSES
    odd = number - 1
    while odd % 2 == 0:
        odd //= 2
    return all(_passes(base, odd, number) for base in _WITNESSES)


def _passes(base: int, odd: int, number: int) -> bool:
    power = pow(base, odd, number)
    if power == 1:
        return True
    while odd < number - 1:
        if power == number - 1:
            return True
        power, odd = power * power % number, 2 * odd
    return False


def _primes_from(first: int) -> Iterator[int]:
    number = first
    while True:
        if _is_prime(number):
            yield number
        number += 1


def table_primes(tables: int, longest: int, heads: int, size: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Table sizes per table, n-gram size and head: the least primes ≥ ``size`` that none before them has taken."""
    rising = _primes_from(size)
    # a search that restarts at ``size`` and skips what is taken finds the same primes as one that never goes back
    return tuple(tuple(tuple(next(rising) for _ in range(heads)) for _ in range(longest - 1)) for _ in range(tables))


def layer_multipliers(layer: int, longest: int, vocab: int) -> tuple[int, ...]:
    """Odd factors of the ids by distance; the release's own, or drawn from a generator that the layer seeds.

    Products with ids below ``vocab`` stay below ``2^63``.
    """
    known = _RELEASED_MULTIPLIERS.get((vocab, layer))
    if known is not None and longest <= len(known):
        return known[:longest]
    bound = max(1, (2**63 - 1) // vocab // 2)
    drawn = np.random.default_rng(10007 * layer).integers(0, bound, size=longest, dtype=np.int64)
    return tuple(int(value) * 2 + 1 for value in drawn)


def read_engram(fields: Mapping[str, Any], layers: int, vocab: int, quantised: bool) -> EngramTopology | None:
    """From the ``engram_*`` fields; None without layers. Raises ``UnsupportedConfigError``."""
    if not fields.get("engram_layer_ids"):
        return None
    chosen = int_list(fields, "engram_layer_ids")
    if list(chosen) != sorted(set(chosen)) or chosen[0] < 0:
        raise UnsupportedConfigError(f"config field 'engram_layer_ids' = {list(chosen)} must name layers, each once, in order")
    if chosen[-1] >= layers:
        raise UnsupportedConfigError(
            f"config fields 'engram_layer_ids' and 'num_hidden_layers' disagree: layer {chosen[-1]} is named, there are {layers} layers"
        )
    rows, longest = int_list(fields, "engram_num_embeddings"), required_int(fields, "engram_max_ngram_size", _MOST_IDS)
    if len(rows) != len(chosen):
        raise UnsupportedConfigError(
            f"config fields 'engram_num_embeddings' and 'engram_layer_ids' disagree: {len(rows)} tables for {len(chosen)} layers"
        )
    if longest < 2:
        raise UnsupportedConfigError(f"config field 'engram_max_ngram_size' = {longest} must be at least 2")
    heads, size = required_int(fields, "engram_n_heads", _MOST_HEADS), required_int(fields, "engram_vocab_size", _MOST_ROWS)
    head_dim, compressed = required_int(fields, "engram_head_dim"), required_int(fields, "engram_compressed_vocab_size")
    if quantised and head_dim % 32:
        raise UnsupportedConfigError(
            f"config fields 'engram_head_dim' = {head_dim} and 'quantization_config' disagree: rows share a scale among 32 numbers"
        )
    if compressed > vocab:
        raise UnsupportedConfigError(
            f"config fields 'engram_compressed_vocab_size' = {compressed} and 'vocab_size' = {vocab} disagree: the first must not be larger"
        )
    primes = table_primes(len(chosen), longest, heads, size)
    for layer, stated, table in zip(chosen, rows, primes, strict=True):
        found = sum(sum(by_head) for by_head in table)
        if stated != found:
            raise UnsupportedConfigError(
                f"config fields 'engram_num_embeddings' and 'engram_vocab_size' disagree: layer {layer} is given {stated} rows, "
                f"its primes from {size} make {found}"
            )
    return EngramTopology(
        layers=chosen,
        rows=rows,
        longest=longest,
        heads=heads,
        head_dim=head_dim,
        vocab=compressed,
        pad_token=token_id(fields, "engram_pad_token_id", vocab),
        primes=primes,
        multipliers=tuple(layer_multipliers(layer, longest, compressed) for layer in chosen),
    )


class Vocabulary(Protocol):
    """What is read of a tokenizer; ``tokenizers.Tokenizer`` has it."""

    def get_vocab_size(self, with_added_tokens: bool = True) -> int:
        """Number of ids."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``."""

    def id_to_token(self, id: int) -> str | None:
        """The token as the vocabulary spells it."""


_LONE_SPACE = "\ue000"


def _normaliser() -> Any:
    from tokenizers import Regex, normalizers

    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),  # kept apart from what stripping would make empty
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    )


def compressed_keys(vocabulary: Vocabulary) -> Iterator[str]:
    """What tells the tokens' texts apart, in id order: equal keys share a compressed id."""
    normalise = _normaliser().normalize_str
    for token in range(vocabulary.get_vocab_size(with_added_tokens=True)):
        text = vocabulary.decode([token], skip_special_tokens=False)
        yield (vocabulary.id_to_token(token) or "") if "\ufffd" in text else normalise(text) or text


def token_map(vocabulary: Vocabulary, compressed: int, vocab: int) -> torch.Tensor:
    """Compressed id of every token id, int64 ``[vocab]``; ids the vocabulary does not have are ``DEAD``.

    Tokens whose texts differ in case, accents or kind of blank only share an id; ids count by first appearance. A token that
    is no text of its own (part of a character) keeps an id of its own. Raises ``CheckpointError`` unless there are exactly
    ``compressed`` ids: with any other number every hash would differ from those the tables were trained with.
    """
    numbers: dict[str, int] = {}
    ids = torch.full((vocab,), DEAD, dtype=torch.int64)
    count = vocabulary.get_vocab_size(with_added_tokens=True)
    if count > vocab:
        raise CheckpointError(f"the tokenizer has {count} tokens, 'vocab_size' is {vocab}; use the checkpoint's own tokenizer")
    for token, key in enumerate(compressed_keys(vocabulary)):
        ids[token] = numbers.setdefault(key, len(numbers))
    if len(numbers) != compressed:
        raise CheckpointError(
            f"the tokenizer's {count} tokens give {len(numbers)} compressed ids, 'engram_compressed_vocab_size' is {compressed}; "
            "use the tokenizer the checkpoint was trained with"
        )
    return ids


def identity_map(compressed: int, vocab: int) -> torch.Tensor:
    """Every token id is its own compressed id, int64 ``[vocab]``; ``CheckpointError`` unless the two sizes agree."""
    if compressed != vocab:
        raise CheckpointError(f"an identity token map has {vocab} compressed ids, 'engram_compressed_vocab_size' is {compressed}")
    return torch.arange(vocab)


def compress_ids(ids: torch.Tensor, table: torch.Tensor, dead: torch.Tensor | None = None) -> torch.Tensor:
    """Compressed ids int64 ``[T]`` of token ids ``[T]``, ``DEAD`` where the bool mask ``dead`` is set."""
    compressed = table[ids]
    return compressed if dead is None else torch.where(dead, DEAD, compressed)
