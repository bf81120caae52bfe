"""The sampler's kernels draw the tokens that torch operators draw, bit for bit, whatever rows hold, want and are among."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch

from deepinfer.kernels.sample import weight_power, weights
from deepinfer.kernels.sample.cuda import FEW_ROWS, ROW_BLOCKS, Draws, Edits, Logprobs
from deepinfer.sampling import SamplingParams
from deepinfer.worker.device_sampler import DeviceSampler
from deepinfer.worker.grammar import apply_masks, mask_words
from deepinfer.worker.logprobs import gather_logprobs
from deepinfer.worker.sampler import Sampler
from kernel_kit import KERNEL_PLACES, device_of, kept_as, lowered, replayed
from sampling_kit import INF, Batch, batch, device_sampler, hard_logits, random_params

ROWS = 65
VOCABS = [1, 2, 33, 1000, 5003]
WHOLE = 50_257  # a vocabulary that is a multiple of nothing
FORMS = pytest.mark.parametrize("few_rows", [0, 1000], ids=["a_block_a_row", "blocks_share_rows"])


@cache
def kernels(place: str, vocab: int, few_rows: int = FEW_ROWS) -> DeviceSampler:
    if place == "cuda":  # as a runner has them
        made = DeviceSampler.on(device_of(place), vocab, torch.float32, 256, few_rows)
        assert made is not None
        return made
    return device_sampler(place, vocab, {torch.float32: torch.float32}, 256, few_rows)


def hard_batch(place: str, vocab: int, seed: int, rows: int = ROWS, *, edits: bool = False, drafts: int = 0) -> Batch:
    rng = random.Random(seed)
    params = [random_params(rng, vocab, edits) for _ in range(rows)]
    return batch(device_of(place), hard_logits(rows, vocab, seed), params, seed, bad_words=edits, drafts=drafts)


def check(b: Batch, by: DeviceSampler) -> list[int]:
    """The kernels' tokens, once they are those of torch operators."""
    wanted, got = b.drawn(None), b.drawn(by)
    wrong = [i for i, (w, g) in enumerate(zip(wanted, got, strict=True)) if w != g]
    assert not wrong, f"rows {wrong[:5]} of slots {b.rows.slots[wrong[:5]].tolist()}: {[(wanted[i], got[i]) for i in wrong[:5]]}"
    return got


@FORMS
@pytest.mark.parametrize("place", KERNEL_PLACES)
@pytest.mark.parametrize("vocab", VOCABS)
def test_hard_rows(place: str, vocab: int, few_rows: int) -> None:
    for seed in range(12):
        b = hard_batch(place, vocab, seed)
        got = check(b, kernels(place, vocab, few_rows))
        if vocab >= 1000:
            best = torch.argmax(b.logits, -1).tolist()
            assert sum(g != m for g, m in zip(got, best, strict=True)) > ROWS // 4, "most rows draw something else than a maximum"


@pytest.mark.parametrize("place", KERNEL_PLACES)
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("drafts", [0, 3])
def test_edited_rows(place: str, vocab: int, drafts: int) -> None:
    for seed in range(100, 106):
        b = hard_batch(place, vocab, seed, edits=True, drafts=drafts)
        mine = b.edited(kernels(place, vocab))
        torch.testing.assert_close(mine, b.edited(None), rtol=0, atol=0, equal_nan=True)
        if vocab >= 1000:
            assert not torch.equal(mine.nan_to_num(), b.logits.nan_to_num())
        check(b, kernels(place, vocab))


@FORMS
@pytest.mark.parametrize("place", KERNEL_PLACES)
def test_a_whole_vocabulary(place: str, few_rows: int) -> None:
    b = hard_batch(place, WHOLE, 7, rows=26, edits=True)
    check(b, kernels(place, WHOLE, few_rows))


@pytest.mark.gpu
@FORMS
@pytest.mark.parametrize("vocab", [49152, 128256, 151936])
@pytest.mark.parametrize("seed", range(3))
def test_many_rows_of_real_vocabularies(vocab: int, seed: int, few_rows: int) -> None:
    check(hard_batch("cuda", vocab, seed, rows=256, edits=seed == 2, drafts=4 * (seed == 2)), kernels("cuda", vocab, few_rows))


@pytest.mark.gpu
def test_tokens_of_a_gpu_are_those_of_the_cpu_target() -> None:
    for vocab in (1000, 5003):
        for seed in range(8):
            tokens = [hard_batch(place, vocab, seed, edits=seed % 2 == 1).drawn(kernels(place, vocab)) for place in ("c", "cuda")]
            assert tokens[0] == tokens[1]


@pytest.mark.parametrize("place", KERNEL_PLACES)
def test_rows_do_not_depend_on_their_batch(place: str) -> None:
    vocab, rows = 5003, 130
    by = kernels(place, vocab)
    b = hard_batch(place, vocab, 11, rows, edits=True, drafts=2)
    together = b.drawn(by)
    rng = random.Random(5)
    for count in (1, 1, 2, 3, 7, 32, 33, 64, 129, 130):
        which = rng.sample(range(rows), count)
        assert b.of(which).drawn(by) == [together[i] for i in which]


@pytest.mark.parametrize("place", KERNEL_PLACES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits_are_those_logits_widened(place: str, dtype: torch.dtype) -> None:
    vocab = 5003
    by = kernels(place, vocab)
    wide = hard_batch(place, vocab, 3)
    wide.logits = wide.logits.to(dtype).float()
    wanted = check(wide, by)
    narrow = Batch(wide.logits.to(kept_as(place, dtype)), wide.rows, None, wide.state)
    assert narrow.drawn(device_sampler(place, vocab, {kept_as(place, dtype): dtype}, ROWS)) == wanted


@pytest.mark.parametrize("place", KERNEL_PLACES)
def test_masks(place: str) -> None:
    vocab = 1000
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(9, vocab, generator=g)
    masks = torch.randint(-(2**31), 2**31, (4, mask_words(vocab)), generator=g).to(torch.int32)
    masks[1] = 0
    masks[1, 999 // 32] = 1 << 999 % 32
    masks[2] = -1
    device = device_of(place)
    which = torch.tensor([8, 0, 3, 5], dtype=torch.int32, device=device)
    wanted, got = logits.clone(), logits.to(device)
    apply_masks(wanted, which.cpu(), masks)
    by = kernels(place, vocab)
    by.mask(got, which, masks.to(device))
    assert torch.equal(got.cpu(), wanted)
    params = [SamplingParams(temperature=1.5, top_p=0.9)] * 9
    b = batch(device, got.cpu(), params)
    assert check(b, by)[0] == 999, "one token is left"
    untouched = logits.to(device)
    by.mask(untouched, torch.tensor([-1, -1, -1, -1], device=device), masks.to(device))
    assert torch.equal(untouched.cpu(), logits)


@pytest.mark.parametrize("place", KERNEL_PLACES)
def test_places_of_no_row_are_passed_over(place: str) -> None:
    """A launch of a fixed size has −1 where a step has fewer rows."""
    vocab = 1000
    by = kernels(place, vocab)
    b = hard_batch(place, vocab, 21, edits=True)
    wanted = b.drawn(by)
    padded = {}
    for name in ("edit", "plain", "ranked"):
        some = getattr(b.rows, name)
        hole = some.new_tensor([-1])
        padded[name] = torch.cat([hole, some[: len(some) // 2], hole, some[len(some) // 2 :], hole])
    b.rows = type(b.rows)(**{**vars(b.rows), **padded})
    assert b.drawn(by) == wanted


@FORMS
@pytest.mark.parametrize("place", KERNEL_PLACES)
def test_extremes(place: str, few_rows: int) -> None:
    """All logits equal, one finite, none finite; NaN; top_k of 1 and of all, top_p next to 0 and to 1."""
    vocab = 1000
    rows = [torch.zeros(vocab), torch.full((vocab,), -INF), torch.full((vocab,), -INF), torch.randn(vocab), torch.zeros(vocab)]
    rows[2][77] = -1e30
    rows[3][500] = float("nan")
    rows[4][[3, 900]] = INF
    kinds: list[dict[str, Any]] = [
        {"top_k": 1},
        {"top_k": vocab - 1},
        {"top_k": vocab},
        {"top_p": 1e-38},
        {"top_p": 1e-45},
        {"top_p": 1 - 2.0**-24},
        {"top_p": 0.5, "top_k": 10},
        {"min_p": 1.0},
        {"min_p": 1.0, "top_p": 0.3},
        {},
    ]
    params = [SamplingParams(temperature=t, **kind) for kind in kinds for t in (1e-5, 1.0, 1e38)]
    for row in rows:
        got = check(batch(device_of(place), row.repeat(len(params), 1), params, seed=4), kernels(place, vocab, few_rows))
        if not torch.isfinite(row.max()):
            assert set(got) == {int(torch.argmax(row))}
        assert got[:3] == [int(torch.argmax(row))] * 3


@FORMS
@pytest.mark.parametrize("place", KERNEL_PLACES)
@pytest.mark.parametrize("count", [0, 1, 20, 1000, 1024, 1025, 5003])
def test_logprobs(place: str, count: int, few_rows: int) -> None:
    vocab, rows = 5003, ROWS
    logits = hard_logits(rows, vocab, 17).to(device_of(place))
    tokens = torch.randint(vocab, (rows,), generator=torch.Generator().manual_seed(2)).to(logits.device)
    kernel = kernels(place, vocab, few_rows).logprobs
    found, wanted = gather_logprobs(logits, tokens, count, kernel), gather_logprobs(logits, tokens, count)
    numbers = torch.isfinite(logits.max(-1).values)
    assert torch.equal(found.ids, wanted.ids) and torch.equal(found.rank, wanted.rank)
    exact = torch.log_softmax(logits.double(), -1).gather(1, found.ids)[numbers]
    torch.testing.assert_close(found.values[numbers].double(), exact, rtol=2.0**-23, atol=1e-6)
    assert found.values[~numbers].isnan().all() and wanted.values[~numbers].isnan().all()
    one = gather_logprobs(logits[5:6], tokens[5:6], 3, kernel)
    same = min(count, 3) + 1
    assert torch.equal(one.values[0, :same], found.values[5, :same]), "the same bits alone and with another count"


@FORMS
@pytest.mark.parametrize("place", KERNEL_PLACES)
def test_sums_of_weights_are_those_of_the_reference(place: str, few_rows: int) -> None:
    vocab, rows, power = 5003, ROWS, weight_power(5003)
    logits = hard_logits(rows, vocab, 23).to(device_of(place))
    largest, total = logits.new_zeros(rows), torch.zeros(rows, dtype=torch.int64, device=logits.device)
    rank, ids = total.int(), total.new_zeros((rows, 0), dtype=torch.int32)
    kernels(place, vocab, few_rows).logprobs(logits, total.clone(), largest, total, rank, ids)
    most = logits.max(-1, keepdim=True).values
    wanted = weights(logits, most, torch.ones_like(most), power).sum(-1, dtype=torch.float64)
    numbers = torch.isfinite(most[:, 0])
    assert torch.equal(total[numbers], wanted[numbers].long()) and bool((total[~numbers] == -1).all())
    assert torch.equal(largest[numbers], most[numbers, 0])


class _Noting:
    """Stands in for a kernel on a GPU: notes what it is launched with."""

    def __init__(self) -> None:
        self.grid: tuple[int, ...] = ()
        self.args: tuple[torch.Tensor | int | float, ...] = ()

    def launch(self, grid: tuple[int, ...], *args: torch.Tensor | int | float) -> None:
        self.grid, self.args = grid, args


def test_launches_are_what_the_kernels_take() -> None:
    """The CPU target takes numbers of dynamic shapes from tensors; on a GPU they are passed, in the order of the compiled kernel."""
    vocab = 5003
    b = hard_batch("c", vocab, 1, edits=True, drafts=2)
    noting = [_Noting() for _ in range(7)]
    edits = Edits(vocab, torch.device("cpu"), kernels=noting[:2])
    draws = Draws(vocab, torch.float32, ROWS, torch.device("cpu"), kernels=noting[2:5])
    logprobs = Logprobs(vocab, torch.device("cpu"), kernels=noting[5:])
    plain, ranked, edit = b.rows.plain, b.rows.ranked, b.rows.edit
    assert plain is not None and ranked is not None and edit is not None
    found = torch.zeros(ROWS), torch.zeros(ROWS, dtype=torch.int32)
    edits.mask(b.logits, plain, torch.zeros(len(plain), mask_words(vocab), dtype=torch.int32))
    edits(b.logits, edit, b.rows.slots, b.state.table, b.rows.positions, DeviceSampler.lists(b.rows, b.before, b.state))
    draws.plain(b.logits, plain, b.rows.slots, b.state.table, b.rows.positions, *found)
    assert len(ranked) > FEW_ROWS
    for some in (ranked, ranked[:FEW_ROWS]):
        draws.ranked(b.logits, some, b.rows.slots, b.state.table, b.rows.positions, *found)
    words = torch.zeros(3, ROWS, dtype=torch.int32)
    for rows in (ROWS, FEW_ROWS):
        logprobs(b.logits[:rows], b.rows.slots, found[0], words[0].long(), words[1], words[2:].T.contiguous())
    shared = (FEW_ROWS * ROW_BLOCKS,)
    grids = [(2, len(plain)), (2, len(edit)), (2, len(plain)), shared, (len(ranked),), shared, (ROWS,)]
    sizes = {torch.int64: "int64", torch.int32: "int32", torch.float32: "float32", torch.uint8: "uint8"}
    programs = Edits.programs(vocab) + Draws.programs(vocab, "float32") + Logprobs.programs(vocab)
    assert [lowered(p).cluster for p in programs] == [1, 1, 1, ROW_BLOCKS, 1, ROW_BLOCKS, 1]
    for program, noted, grid in zip(programs, noting, grids, strict=True):
        assert noted.grid == grid
        taken = lowered(program).args
        assert [kind for _, kind in taken] == ["ptr" if isinstance(a, torch.Tensor) else "i32" for a in noted.args], program.name
        assert taken[-1][0] in ("count", "rows") and noted.args[-1] == grid[-1] // lowered(program).cluster
        assert all(a.is_contiguous() and a.dtype in sizes for a in noted.args if isinstance(a, torch.Tensor))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [FEW_ROWS, 64])
@pytest.mark.parametrize("edits", [False, True])
def test_replays_in_a_graph_with_other_positions(edits: bool, rows: int) -> None:
    vocab = 49152
    by = kernels("cuda", vocab)
    b = hard_batch("cuda", vocab, 31, rows, edits=edits)
    logits, tokens = b.logits.clone(), torch.zeros(rows, dtype=torch.int64, device="cuda")

    def step() -> None:
        logits.copy_(b.logits)
        tokens.copy_(by.draw(logits, b.rows, None, b.state))

    replay = replayed(step)
    seen = set()
    for _ in range(8):
        b.rows.positions.add_(1)
        replay()
        assert tokens.tolist() == b.drawn(None)
        seen.add(tuple(tokens.tolist()))
    assert len(seen) == 8


@pytest.mark.parametrize("place", KERNEL_PLACES)
def test_what_is_noted_of_tokens_is_the_same(place: str) -> None:
    vocab = 5003
    states = []
    for by in (None, kernels(place, vocab)):
        b = hard_batch(place, vocab, 41, edits=True)
        sampler = Sampler(b.state, vocab, by, portable=True)
        for _ in range(4):
            sampler(b.logits.clone(), b.rows)
            b.rows.positions.add_(1)
        assert b.state.counts is not None and b.state.recent.shape[1]
        states.append((b.state.counts, b.state.recent))
    assert torch.equal(states[0][0], states[1][0]) and torch.equal(states[0][1], states[1][1])
