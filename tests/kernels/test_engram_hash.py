"""Row numbers of n-grams: the published vectors, a plain loop, and ragged chunks that cut anywhere."""

from __future__ import annotations

import pytest
import torch

from deepinfer.kernels.engram_hash import engram_hash, latest_ids
from deepinfer.models.deepseek_v41.engram import DEAD, layer_multipliers, table_primes

RELEASED = [
    [1326936, 22120929, 40011923, 55142539, 77849479, 85421395, 105208034, 120570043],
    [142088989, 151706440, 164511320, 186980067, 199834903, 222266846, 231919637, 244765195],
    [270969918, 287524568, 292261800, 310632033, 322879311, 341250912, 361620893, 378628807],
]
"""Layer 1 of the release for compressed ids 10, 20, 30, 40 (newest last), by n-gram size."""


def tables(layers: tuple[int, ...], heads: int, size: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    primes = torch.tensor(table_primes(len(layers), 4, heads, size))
    flat = primes.flatten(1)
    return torch.tensor([layer_multipliers(layer, 4, vocab) for layer in layers]), primes, (flat.cumsum(1) - flat).view(primes.shape)


TINY = tables((1, 4), 2, 97, 512)


def whole(ids: list[int], parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = TINY, pad: int = 2) -> torch.Tensor:
    """One sequence from its start."""
    cu_q = torch.tensor([0, len(ids)], dtype=torch.int32)
    return engram_hash(torch.tensor(ids), torch.full((1, 3), DEAD), cu_q, *parts, pad)


def plainly(ids: list[int], table: int, pad: int) -> list[list[int]]:
    multipliers, primes, offsets = (part[table].tolist() for part in TINY)
    result = []
    for newest, own in enumerate(ids):
        mixed, row, broken = 0, [], False
        for shift in range(4):
            broken = broken or newest < shift or ids[newest - shift] == DEAD
            mixed ^= (pad if broken else ids[newest - shift]) * multipliers[shift]
            if shift:
                row += [mixed % prime + offset for prime, offset in zip(primes[shift - 1], offsets[shift - 1], strict=True)]
        result.append([DEAD] * 6 if own == DEAD else row)
    return result


def test_published_rows_of_the_release() -> None:
    found = whole([10, 20, 30, 40], tables((1, 14), 8, 16000000, 99092))
    assert found.shape == (2, 4, 24)
    assert found[0, 3].tolist() == [row for rows in RELEASED for row in rows]


def test_published_rows_of_the_small_table() -> None:
    assert whole([5, 6, 7, 8])[0, 3].tolist() == [8, 184, 279, 337, 509, 601]
    assert whole([8])[0, 0].tolist() == [86, 135, 221, 335, 447, 529]


def some_ids(length: int) -> list[int]:
    ids = torch.randint(0, 512, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for dead in (3, 4, 11, 20, 22, 24, 39):
        if dead < length:
            ids[dead] = DEAD
    return ids


def test_rows_equal_a_plain_loop_with_dead_tokens() -> None:
    ids = some_ids(60)
    found = whole(ids)
    for table in range(2):
        assert found[table].tolist() == plainly(ids, table, 2)
    assert int(found.max()) < 834 and int(found[0].max()) < 630


@pytest.mark.parametrize("sizes", [[1], [2], [3], [7, 1, 12], [1, 1, 1, 5], [4, 30]])
def test_chunks_and_batch_mates_change_nothing(sizes: list[int]) -> None:
    """Three sequences of different length, cut differently, in one batch; the past travels in ``latest_ids``."""
    sequences = [some_ids(40), some_ids(25), some_ids(33)]
    done = [0, 0, 0]
    previous = torch.full((3, 3), DEAD)
    found: list[list[torch.Tensor]] = [[], [], []]
    step = 0
    while any(at < len(ids) for at, ids in zip(done, sequences, strict=True)):
        takes = [min(sizes[(step + number) % len(sizes)], len(ids) - done[number]) for number, ids in enumerate(sequences)]
        flat = [token for number, ids in enumerate(sequences) for token in ids[done[number] : done[number] + takes[number]]]
        cu_q = torch.tensor([0, *torch.tensor(takes).cumsum(0).tolist()], dtype=torch.int32)
        rows = engram_hash(torch.tensor(flat), previous, cu_q, *TINY, 2)
        for number, part in enumerate(rows.split(takes, 1)):
            found[number].append(part)
        previous = latest_ids(torch.tensor(flat), previous, cu_q)
        done = [at + take for at, take in zip(done, takes, strict=True)]
        step += 1
    for number, ids in enumerate(sequences):
        assert torch.equal(torch.cat(found[number], 1), whole(ids))
        assert previous[number].tolist() == ids[-3:]


def test_rows_of_padding_leave_the_rest_alone() -> None:
    ids = some_ids(10)
    padded = engram_hash(torch.tensor([*ids, 0, 0, 0]), torch.full((1, 3), DEAD), torch.tensor([0, 10], dtype=torch.int32), *TINY, 2)
    assert torch.equal(padded[:, :10], whole(ids))


def test_no_value_is_read_by_the_host() -> None:
    """A meta tensor has no values: whatever asks for one fails."""
    multipliers, primes, offsets = (part.to("meta") for part in TINY)
    ids, previous = torch.empty(9, dtype=torch.int64, device="meta"), torch.empty(4, 3, dtype=torch.int64, device="meta")
    cu_q = torch.empty(5, dtype=torch.int32, device="meta")
    assert engram_hash(ids, previous, cu_q, multipliers, primes, offsets, 2).shape == (2, 9, 6)
    assert latest_ids(ids, previous, cu_q).shape == (4, 3)


def test_products_stay_in_range() -> None:
    multipliers, _, _ = tables((1, 14), 8, 16000000, 99092)
    assert int(multipliers.max()) * 99091 < 2**63
