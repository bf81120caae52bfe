"""Constants of the Engram tables, the token map, and reading rows behind a bounded cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from deepinfer.errors import CheckpointError
from deepinfer.kernels.block_formats import FP8_ROWS, encode_rows
from deepinfer.models.deepseek_v41 import engram
from deepinfer.models.deepseek_v41.engram import DEAD, compress_ids, identity_map, layer_multipliers, table_primes, token_map
from deepinfer.models.deepseek_v41.engram_table import EngramTable
from deepinfer.models.deepseek_v41.topology import read_topology
from deepinfer.models.loaders.safetensors_source import SafetensorsSource

Load = Callable[..., dict[str, Any]]


def test_primes_of_the_release(load: Load) -> None:
    t = read_topology(load("full")).engram
    assert t is not None
    assert t.primes[0][0][:4] == (16000057, 16000079, 16000081, 16000097) and t.primes[0][2][-1] == 16000463
    assert t.primes[1][0][0] == 16000477 and t.primes[1][2][-1] == 16000889
    assert (t.columns, t.width) == (24, 6144)
    multipliers, primes, offsets = t.tensors()
    assert multipliers.shape == (2, 4) and primes.shape == offsets.shape == (2, 3, 8)
    assert offsets[:, 0, 0].tolist() == [0, 0]
    assert (offsets[:, 2, 7] + primes[:, 2, 7]).tolist() == [384006168, 384016682]


def test_primes_of_a_small_table() -> None:
    assert table_primes(2, 4, 2, 97) == (((97, 101), (103, 107), (109, 113)), ((127, 131), (137, 139), (149, 151)))


def test_stored_multipliers_are_those_the_rule_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = dict(engram._RELEASED_MULTIPLIERS)
    assert layer_multipliers(1, 4, 99092) == stored[99092, 1]
    monkeypatch.setattr(engram, "_RELEASED_MULTIPLIERS", {})
    for (vocab, layer), values in stored.items():
        assert layer_multipliers(layer, 4, vocab) == values


def test_multipliers_of_other_sizes_are_derived() -> None:
    assert layer_multipliers(1, 4, 512) == (14831304026200453, 936705081716061, 6959601268494069, 14319439928568407)
    assert layer_multipliers(4, 4, 512) == (15920565596405625, 975009545214551, 14254820516660309, 3668506406680991)


class Words:
    """A vocabulary of given texts; a text of None is part of a character."""

    def __init__(self, *texts: str | None) -> None:
        self.texts = texts

    def get_vocab_size(self, with_added_tokens: bool = True) -> int:
        return len(self.texts)

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        assert not skip_special_tokens, "special tokens have ids of their own"
        return "".join("\ufffd" if self.texts[token] is None else str(self.texts[token]) for token in ids)

    def id_to_token(self, id: int) -> str | None:
        return f"<{id}>"


def test_tokens_that_differ_in_dress_only_share_an_id() -> None:
    words = Words("<s>", "Été", "ete", " ete", "ETE\n", " ", "\n\t", "", "ﬁn", "fin", None, None, "a  b", "a\tb", "\u0301")
    ids = token_map(words, 9, 16)
    #                       <s> Été ete  ete ETE  _  \n  "" ﬁn fin  ?  ?  a b      accent alone: empty, so the text itself
    assert ids.tolist() == [0, 1, 1, 1, 1, 2, 2, 3, 4, 4, 5, 6, 7, 7, 8, DEAD]


def test_the_number_of_compressed_ids_is_checked() -> None:
    with pytest.raises(CheckpointError, match=r"give 2 compressed ids, 'engram_compressed_vocab_size' is 3"):
        token_map(Words("a", "A", "b"), 3, 3)
    with pytest.raises(CheckpointError, match="the tokenizer has 3 tokens, 'vocab_size' is 2"):
        token_map(Words("a", "A", "b"), 2, 2)
    with pytest.raises(CheckpointError, match="identity token map has 8 compressed ids"):
        identity_map(7, 8)


def test_a_real_tokenizer_is_a_vocabulary() -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    spelt = ["A", "a", "Ġa", "Ã", "©"]  # the last two are the two bytes of é
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(spelt)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    assert token_map(tokenizer, 4, 6).tolist() == [0, 0, 0, 1, 2, 3]


def test_dead_tokens_have_no_compressed_id() -> None:
    table = identity_map(8, 8)
    dead = torch.tensor([False, True, False])
    assert compress_ids(torch.tensor([3, 4, 5]), table, dead).tolist() == [3, DEAD, 5]
    assert compress_ids(torch.tensor([3, 4, 5]), table).tolist() == [3, 4, 5]


def stored_table(rows: int, width: int = 64) -> tuple[np.ndarray, np.ndarray]:
    records = encode_rows(torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)), FP8_ROWS).numpy()
    return records[:, :width].copy(), records[:, width:].copy()


def expected(values: np.ndarray, scales: np.ndarray, rows: torch.Tensor) -> torch.Tensor:
    plain = torch.from_numpy(values).view(torch.float8_e4m3fn).float()
    spread = torch.from_numpy(scales).view(torch.float8_e8m0fnu).float().repeat_interleave(32, 1)
    return (plain * spread)[rows.clamp_min(0)] * (rows >= 0)[..., None]


@pytest.mark.parametrize("cache_rows", [0, 8, 64, 4096])
def test_rows_are_right_whatever_the_cache(cache_rows: int) -> None:
    values, scales = stored_table(500)
    table = EngramTable(values, scales, cache_rows * 66)
    assert table.capacity == min(cache_rows, 8 * 500)
    generator = torch.Generator().manual_seed(5)
    for _ in range(20):
        rows = (torch.rand(3, 40, generator=generator) ** 4 * 500).long()
        rows[0, :3] = DEAD
        assert torch.equal(table.read(rows, torch.float32), expected(values, scales, rows))
        assert int((table._held >= 0).sum()) <= cache_rows
    c = table.counters
    assert c.rows == 20 * 117 and c.lookups == c.hits + c.misses and c.bytes_read == c.misses * 66
    assert (c.hits > 0) == (cache_rows > 0)
    if cache_rows == 4096:
        assert c.evictions == 0 and c.misses <= 500


def test_the_row_unused_for_longest_goes_first() -> None:
    values, scales = stored_table(100)
    table = EngramTable(values, scales, 8 * 66)  # one set of eight
    table.read(torch.arange(8))
    table.read(torch.tensor([0, 1, 2, 4, 5, 6, 7]))
    table.read(torch.tensor([50]))
    assert table.counters.evictions == 1
    before = table.counters.misses
    table.read(torch.tensor([0, 1, 2, 4, 5, 6, 7, 50]))
    assert table.counters.misses == before
    table.read(torch.tensor([3]))
    assert table.counters.misses == before + 1


def test_repetitions_in_one_call_are_read_once() -> None:
    values, scales = stored_table(10)
    table = EngramTable(values, scales, 0)
    table.read(torch.tensor([[4, 4], [4, 2]]))
    assert (table.counters.rows, table.counters.lookups, table.counters.bytes_read) == (4, 2, 2 * 66)
    assert table.read(torch.empty(0, 6, dtype=torch.int64)).shape == (0, 6, 64)


def test_rows_come_from_a_mapped_checkpoint(tmp_path: Path) -> None:
    values, scales = stored_table(300)
    file = tmp_path / "model.safetensors"
    save_file(
        {
            "other": torch.ones(3),
            "embed.weight": torch.from_numpy(values).view(torch.float8_e4m3fn),
            "embed.scale": torch.from_numpy(scales).view(torch.float8_e8m0fnu),
        },
        file,
    )
    source = SafetensorsSource([file])
    mapped = [source.mapped(f"embed.{part}") for part in ("weight", "scale")]
    assert all(isinstance(part, np.memmap) for part in mapped)
    rows = torch.tensor([0, 299, 17, 17, DEAD])
    assert torch.equal(EngramTable(mapped[0], mapped[1], 66 * 16).read(rows, torch.float32), expected(values, scales, rows))
    file.unlink()
    with pytest.raises(CheckpointError, match=r"'embed\.scale' cannot be mapped from .*model\.safetensors"):
        source._maps.clear()
        source.mapped("embed.scale")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_rows_are_read_as_they_are(dtype: torch.dtype, tmp_path: Path) -> None:
    rows = torch.randn(40, 24, generator=torch.Generator().manual_seed(1)).to(dtype)
    save_file({"embed.weight": rows}, tmp_path / "model.safetensors")
    mapped = SafetensorsSource([tmp_path / "model.safetensors"]).mapped("embed.weight")
    table = EngramTable(mapped, None, 8 * 24 * dtype.itemsize, dtype=dtype)
    wanted = torch.tensor([[3, 39], [DEAD, 3]])
    assert table.width == 24 and table.capacity == 8
    assert torch.equal(table.read(wanted, torch.float32), rows[wanted.clamp_min(0)].float() * (wanted >= 0)[..., None])
    with pytest.raises(CheckpointError, match="are no whole numbers of float32"):
        EngramTable(mapped[:, :6], None, 0)


def test_tables_that_do_not_fit_are_refused() -> None:
    values, scales = stored_table(10)
    with pytest.raises(CheckpointError, match="one scale for 32 numbers"):
        EngramTable(values, scales[:, :1], 0)
    with pytest.raises(CheckpointError, match="one scale for 32 numbers"):
        EngramTable(values[:, :40], scales, 0)
    with pytest.raises(CheckpointError, match=r"'embed' has 10 rows, asked for 3 … 10"):
        EngramTable(values, scales, 0).read(torch.tensor([3, 10]))
