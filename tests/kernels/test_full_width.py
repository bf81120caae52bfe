"""The release's sizes and its thresholds: 512 entries selected, 16,384 candidates, positions beyond 65,536, and values at the edges.

Small shapes do not show a wrong stride, a scale of its own per block or an index that overflows; these do. Written-out formulas in
float64 decide; entries lie packed on shuffled pages of 128 tokens.
"""

from __future__ import annotations

import math

import pytest
import torch

from deepinfer.kernels.block_formats import FP4_ROWS, FP8_ROWS, MXFP4_ROWS
from deepinfer.kernels.cache_rows import PagedRows, RowKind, StepRows
from deepinfer.kernels.compressor import compress
from deepinfer.kernels.engram_gate import engram_gate
from deepinfer.kernels.experts import expert_mlp, pack_experts, route
from deepinfer.kernels.indexer import candidate_blocks, index_scores, select_entries, select_top
from deepinfer.kernels.linear import pack_linear
from deepinfer.kernels.rms_norm import rms_norm
from deepinfer.kernels.rope import RopeParameters, RopeTable, rotate_pairs
from deepinfer.kernels.sparse_attention import two_source_attention
from deepinfer.kernels.stream_mix import collapse, expand, mix_coefficients
from deepinfer.kernels.window_rows import WindowPlan, WindowRows
from ragged_kit import Pages

HIDDEN, HEADS, WIDTH, WINDOW, RING, PICKS = 5120, 64, 512, 128, 134, 512
INDEX_HEADS, INDEX_WIDTH, BLOCK, KEEP, EPS = 32, 128, 8, 2048, 1e-20
COMPRESS = RopeParameters(64, 160000.0, "yarn", 16.0, 65536, beta_fast=32.0, beta_slow=1.0, attention_factor=1.0)
ROW = RowKind(WIDTH, FP8_ROWS, True, torch.uint8)
ENTRY = RowKind(WIDTH, FP4_ROWS, True, torch.uint8)
KEY = RowKind(INDEX_WIDTH, MXFP4_ROWS, True, torch.uint8)


def random_rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def step_at(*spans: tuple[int, int], device: str) -> StepRows:
    """One sequence for each (first position, end)."""
    pos = torch.cat([torch.arange(first, end) for first, end in spans])
    row_seq = torch.cat([torch.full((end - first,), number) for number, (first, end) in enumerate(spans)])
    cu_q = torch.tensor([0, *(end - first for first, end in spans)]).cumsum(0).int()
    return StepRows(pos.to(device), row_seq.to(device), cu_q.to(device), torch.arange(1, len(spans) + 1, device=device))


def best(scores: torch.Tensor, k: int) -> list[int]:
    """Of one row: by score, equal ones by place; ascending. −inf never."""
    values = scores.tolist()
    order = sorted((place for place, value in enumerate(values) if value > -math.inf), key=lambda place: (-values[place], place))
    return sorted(order[:k])


def best_blocks(scores: torch.Tensor, visible: int) -> list[int]:
    """Blocks of one row's candidates, from its scores of all entries."""
    padded = torch.nn.functional.pad(scores, (0, -len(scores) % BLOCK), value=-math.inf).view(-1, BLOCK).amax(1)
    padded[(visible - 1) // BLOCK] = math.inf
    return best(padded, KEEP)


def edge_rows(count: int, width: int, seed: int) -> torch.Tensor:
    """Rows with outliers, of zeros, below every format's least scale, with one number that is not 0, and at the largest value."""
    rows = random_rows(count, width, seed=seed)
    rows[0] = 0
    rows[1] = -0.0
    rows[2] *= 1e-30
    rows[3, width // 2] = 3e4
    rows[4] = 0
    rows[4, 0] = -2.5e-3
    rows[5] *= 2.0**-9
    rows[6, ::16] = 448.0 * 6
    return rows


def test_attention_over_packed_rows_with_edge_values(device: str) -> None:
    """64 heads over 128 window rows and 512 entries; the same rows alone, together, and from bfloat16 caches."""
    lengths = (900, 700)
    raw = [edge_rows(n, WIDTH, seed=n) for n in lengths]
    entries = [edge_rows(n, WIDTH, seed=n + 1) for n in lengths]
    spans = ((896, 900), (699, 700))
    q = random_rows(5, HEADS, WIDTH, seed=5).to(device)
    sink = random_rows(HEADS, seed=6).to(device)
    g = torch.Generator().manual_seed(7)
    picks = torch.full((5, PICKS), -1, dtype=torch.int32)
    for row, visible in enumerate((897, 898, 899, 900, 700)):
        picks[row] = torch.randperm(visible, generator=g)[:PICKS].sort().values.int()
    picks[3, 300:] = -1
    picks = picks.to(device)

    def run(numbers: list[int], rows: slice, row_kind: RowKind, entry_kind: RowKind) -> torch.Tensor:
        step = step_at(*(spans[number] for number in numbers), device=device)
        ring = torch.full((4, RING, *row_kind.shape), 255, dtype=torch.uint8, device=device)
        if not row_kind.packed:
            ring = torch.full(ring.shape, torch.nan, dtype=row_kind.dtype, device=device)
        for slot, number in enumerate(numbers, 1):
            first = spans[number][0]
            for position in range(first - WINDOW, first):
                ring[slot, position % RING] = row_kind.store(raw[number][position].to(device))
        own = torch.cat([row_kind.store(raw[number][slice(*spans[number])].to(device)) for number in numbers])
        window = WindowRows(WindowPlan(step, WINDOW, RING), ring, own, row_kind)
        paged = Pages(entry_kind, [entries[number] for number in numbers], 128, device).of(list(range(len(numbers))))
        return two_source_attention(q[rows], window, paged, picks[rows], sink, WIDTH**-0.5)

    both = run([0, 1], slice(0, 5), ROW, ENTRY)
    assert torch.equal(both[:4], run([0], slice(0, 4), ROW, ENTRY)) and torch.equal(both[4:], run([1], slice(4, 5), ROW, ENTRY))
    plain = RowKind(WIDTH, FP8_ROWS, False, torch.bfloat16), RowKind(WIDTH, FP4_ROWS, False, torch.bfloat16)
    assert torch.equal(both, run([0, 1], slice(0, 5), *plain))
    for row, (number, position) in enumerate(((0, 896), (0, 897), (0, 898), (0, 899), (1, 699))):
        chosen = picks[row][picks[row] >= 0].long().cpu()
        own = ROW.load(ROW.store(raw[number][position - 127 : position + 1]))
        seen = torch.cat((own, ENTRY.load(ENTRY.store(entries[number][chosen]))))
        scores = q[row].cpu().double() @ seen.double().T * WIDTH**-0.5
        weights = torch.softmax(torch.cat((scores, sink.cpu().double()[:, None]), 1), 1)[:, :-1]
        torch.testing.assert_close(both[row].cpu().double(), weights @ seen.double(), rtol=1e-4, atol=1e-4)


def test_edge_rows_through_pooling_norm_and_rounding(device: str) -> None:
    """Zeros stay zeros with an eps of 1e-20, which only float32 holds; what is below a format's least scale becomes 0, never NaN."""
    raw = edge_rows(16, WIDTH, seed=3)
    raw[0:2] = 0
    raw[4] *= 1e-12  # mean square far below eps
    c, z = raw.to(device), edge_rows(16, WIDTH, seed=4).to(device)
    pooled = compress(c, z, WindowPlan(step_at((0, 16), device=device), 2, 8), torch.zeros(2, 8, 2, WIDTH, device=device))
    latent = rms_norm(pooled, torch.ones(WIDTH, device=device), EPS)
    angles = RopeTable(COMPRESS, torch.device(device)).pair_cos_sin(torch.arange(16, device=device))
    kept = ENTRY.load(ENTRY.store(rotate_pairs(latent, *angles)))
    assert latent.isfinite().all() and kept.isfinite().all()
    assert not latent[1].any() and not kept[1].any() and not kept[0::2].any()
    assert kept[3::2].any(-1).all()
    weight = torch.softmax(z[6:8].double(), 0)
    exact = (weight * c[6:8].double()).sum(0)
    exact = exact * torch.rsqrt(exact.square().mean() + EPS)
    torch.testing.assert_close(latent[7].double(), exact, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("position", [65535, 65536, 1048575])
def test_angles_beyond_the_trained_length(position: int, device: str) -> None:
    cos, sin = RopeTable(COMPRESS, torch.device(device)).pair_cos_sin(torch.tensor([position], device=device))
    for pair in range(32):
        ramp = min(max((pair - 15) / 10, 0.0), 1.0)
        plain = 160000.0 ** (-2 * pair / 64)
        angle = position * (plain / 16 * ramp + plain * (1 - ramp))
        # position and frequency are float32: the angle is good to some units in its last place
        assert abs(cos[0, pair].item() - math.cos(angle)) < 1e-6 + 3e-7 * angle
        assert abs(sin[0, pair].item() - math.sin(angle)) < 1e-6 + 3e-7 * angle


def paged_keys(count: int, device: str, seed: int = 0) -> tuple[torch.Tensor, PagedRows]:
    """Index keys as a cache holds them, and the cache, in the release's pages of 128 entries."""
    pages = -(-count // 128)
    stored = KEY.store(random_rows(pages * 128, INDEX_WIDTH, seed=seed).to(device))
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed)).to(device)
    tensor = torch.full((pages + 1, 128, *KEY.shape), 255, dtype=torch.uint8, device=device)
    tensor[order + 1] = stored.view(pages, 128, -1)
    return stored, PagedRows(tensor, (order + 1)[None].int(), KEY)


def queries(count: int, device: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    q = KEY.load(KEY.store(random_rows(count, INDEX_HEADS, INDEX_WIDTH, seed=seed).to(device)))
    return q, random_rows(count, INDEX_HEADS, seed=seed + 1).to(device) * (INDEX_WIDTH * INDEX_HEADS) ** -0.5


def exact_scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """``[T, n]`` in float64."""
    total, across = torch.zeros(q.shape[0], keys.shape[0], dtype=torch.float64, device=q.device), keys.double().T.contiguous()
    for head in range(q.shape[1]):
        total += weights[:, head, None].double() * (q[:, head].double() @ across).relu_()
    return total


def same_selection(found: list[int], scores: torch.Tensor, k: int) -> bool:
    """Whether ``found`` is a best choice by float64 ``scores``, except among scores that float32 cannot tell apart."""
    wanted = best(scores, k)
    missed, extra = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    return len(found) == len(wanted) and all(abs(scores[a] - scores[b]) < 1e-5 for a, b in zip(missed, extra, strict=True))


def test_selection_around_512_entries(device: str) -> None:
    stored, keys = paged_keys(640, device)
    step = step_at((508, 516), device=device)
    q, weights = queries(8, device, 1)
    selected, _ = select_entries(q, weights, keys, step, 1, 640, PICKS)
    scores = exact_scores(q, weights, KEY.load(stored[:516]))
    for row, visible in enumerate(range(509, 517)):
        found = [place for place in selected[row].tolist() if place >= 0]
        assert found == sorted(found) and len(found) == min(visible, PICKS)
        assert found == list(range(visible)) if visible <= PICKS else same_selection(found, scores[row, :visible], PICKS)
    # the same rows in a step whose entries cannot exceed 512 need no scores and get the same
    few, _ = select_entries(q[:4], weights[:4], keys, step.part(0, 4), 1, 512, PICKS)
    assert torch.equal(few, selected[:4])


@pytest.mark.parametrize(("first", "ratio"), [(16382, 1), (70000, 1), pytest.param(139990, 2, marks=pytest.mark.nightly)])
def test_candidates_around_and_beyond_16384_entries(first: int, ratio: int, device: str) -> None:
    """Up to 2,048 blocks of 8 the pool is everything; beyond, blocks by their best entry with the newest always in."""
    rows, end = 4, first + 4
    stored, keys = paged_keys(end // ratio, device)
    q, weights = queries(rows, device, 2)
    step = step_at((first, end), device=device)
    bound = end // ratio
    selected, pool = select_entries(q, weights, keys, step, ratio, bound, PICKS, BLOCK, KEEP)
    other_q, other_weights = queries(rows, device, 9)
    within, _ = select_entries(other_q, other_weights, keys, step, ratio, bound, PICKS, BLOCK, blocks=pool)
    assert pool is not None
    loaded = KEY.load(stored)
    scores, others = exact_scores(q, weights, loaded), exact_scores(other_q, other_weights, loaded)
    for row in range(rows):
        visible = (first + row + 1) // ratio
        assert same_selection(selected[row].tolist(), scores[row, :visible], PICKS)
        blocks = pool[row].nonzero().flatten().tolist()
        wanted = best_blocks(scores[row, :visible], visible)
        assert len(blocks) == min(-(-visible // BLOCK), KEEP) and len(set(wanted) ^ set(blocks)) <= 2  # near ties
        assert (visible - 1) // BLOCK in blocks
        inside = others[row, :visible].clone()
        inside[~pool[row].repeat_interleave(BLOCK)[:visible]] = -math.inf
        assert same_selection(within[row].tolist(), inside, PICKS)
        if visible <= KEEP * BLOCK:
            assert same_selection(within[row].tolist(), others[row, :visible], PICKS)
    # rows one by one and in two parts, on other pages
    other_keys = PagedRows(keys.tensor.flip(0), keys.tensor.shape[0] - 1 - keys.block_table, KEY)
    for a, b in ((0, 1), (1, 4)):
        again, again_pool = select_entries(q[a:b], weights[a:b], other_keys, step.part(a, b), ratio, bound + 100, PICKS, BLOCK, KEEP)
        assert torch.equal(again, selected[a:b]) and again_pool is not None
        assert torch.equal(again_pool[:, : pool.shape[1]], pool[a:b]) and not again_pool[:, pool.shape[1] :].any()


def test_needles_at_the_start_and_in_the_middle_of_100_000_tokens(device: str) -> None:
    """Two keys that answer every head are found among 100,000 by a Full layer, kept as candidates, found again by a Reindex layer
    with queries of its own, and what their entries hold comes out of attention."""
    tokens, needles = 100_000, [0, 50_001]
    wanted = random_rows(INDEX_WIDTH, seed=1).sign()
    _, keys = paged_keys(tokens, device)
    flat = keys.tensor.view(-1, *KEY.shape)
    for needle in needles:
        place = int(keys.block_table[0, needle // 128]) * 128 + needle % 128
        flat[place] = KEY.store(wanted.to(device) * 4)
    step = step_at((tokens - 2, tokens), device=device)
    pool = None
    for seed in (2, 3):
        q = KEY.load(KEY.store((wanted + 0.3 * random_rows(2, INDEX_HEADS, INDEX_WIDTH, seed=seed)).to(device)))
        weights = torch.full((2, INDEX_HEADS), (INDEX_WIDTH * INDEX_HEADS) ** -0.5, device=device)
        scores = index_scores(q, weights, keys, step, 1, tokens)
        assert select_top(scores, 2, pool, BLOCK).tolist() == [needles, needles]
        selected = select_top(scores, PICKS, pool, BLOCK)
        assert all(set(needles) <= set(row) for row in selected.tolist())
        if pool is None:
            pool = candidate_blocks(scores, step, 1, BLOCK, KEEP)
        assert all(bool(pool[row, needle // BLOCK]) for row in range(2) for needle in needles)
    count = keys.tensor.shape[0]
    entries = ENTRY.store(torch.zeros(1, WIDTH, device=device)).expand(count * 128, -1).clone()
    told = torch.zeros(2, WIDTH)
    for number, needle in enumerate(needles):
        told[number, number] = 6.0
        entries[int(keys.block_table[0, needle // 128]) * 128 + needle % 128] = ENTRY.store(told[number].to(device))
    paged = PagedRows(entries.view(count, 128, -1), keys.block_table, ENTRY)
    ring = torch.zeros(2, RING, *ROW.shape, dtype=torch.uint8, device=device)
    window = WindowRows(WindowPlan(step, WINDOW, RING), ring, ROW.store(torch.zeros(2, WIDTH, device=device)), ROW)
    ask = torch.zeros(2, HEADS, WIDTH, device=device)
    ask[:, :32, 0] = ask[:, 32:, 1] = 1000.0
    out = two_source_attention(ask, window, paged, selected, torch.zeros(HEADS, device=device), WIDTH**-0.5)
    torch.testing.assert_close(out[:, :32], told[0].to(device).expand(2, 32, -1))
    torch.testing.assert_close(out[:, 32:], told[1].to(device).expand(2, 32, -1))


def test_thousands_of_equal_scores_go_to_the_lower_entries(device: str) -> None:
    """70,000 entries of which every seventh scores 1 and the rest 0."""
    count = 70_000
    rows = torch.zeros(count, INDEX_WIDTH, device=device)
    rows[::7, 0] = 1.0
    keys = PagedRows(KEY.store(rows).view(1, count, -1), torch.zeros(1, 1, dtype=torch.int32, device=device), KEY)
    q = torch.zeros(2, INDEX_HEADS, INDEX_WIDTH, device=device)
    q[:, 0, 0] = 1.0
    step = step_at((count - 2, count), device=device)
    selected, pool = select_entries(q, torch.ones(2, INDEX_HEADS, device=device), keys, step, 1, count, PICKS, BLOCK, KEEP)
    assert selected.tolist() == [list(range(0, 7 * PICKS, 7))] * 2
    # every block of 8 holds a 1 except each eighth-of-seven without a multiple of 7: none, so the lowest blocks and the newest
    assert pool is not None
    with_one = [b for b in range(count // BLOCK) if any(place % 7 == 0 for place in range(b * BLOCK, (b + 1) * BLOCK))]
    assert pool[1].nonzero().flatten().tolist() == [*with_one[: KEEP - 1], (count - 1) // BLOCK]


def test_streams_and_engram_of_the_release(device: str) -> None:
    """Four streams of 5,120 with an outlier, a row of zeros and one near zero, against float64."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(4, 4, HIDDEN, generator=g)
    x[1] = 0
    x[2] *= 1e-12
    x[3, 2, 77] = 3e4
    x = x.to(device=device, dtype=torch.bfloat16)
    fn, base = (torch.randn(24, 4 * HIDDEN, generator=g) * 0.02).to(device), torch.randn(24, generator=g).to(device)
    scale = torch.tensor([0.5, 1.0, 2.0], device=device)
    pre, post, comb = mix_coefficients(x, pack_linear(fn), base, scale, EPS, 20, 1e-6)
    flat = x.flatten(1).double()
    m = flat @ fn.double().T * torch.rsqrt(flat.square().mean(-1, keepdim=True) + EPS)
    wide = base.double()
    exact = torch.softmax((m[:, 8:] * 2.0 + wide[8:]).view(-1, 4, 4), -1) + 1e-6
    exact = exact / (exact.sum(1, keepdim=True) + 1e-6)
    for _ in range(19):
        exact = exact / (exact.sum(2, keepdim=True) + 1e-6)
        exact = exact / (exact.sum(1, keepdim=True) + 1e-6)
    torch.testing.assert_close(pre.double(), torch.sigmoid(m[:, :4] * 0.5 + wide[:4]) + 1e-6, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(post.double(), 2 * torch.sigmoid(m[:, 4:8] + wide[4:8]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(comb.double(), exact, rtol=1e-4, atol=1e-5)
    y = collapse(x, pre, torch.bfloat16)
    grown = expand(y, x, post, comb)
    for target in range(4):
        want = post[:, target, None].double() * y.double() + (comb[:, :, target, None].double() * x.double()).sum(1)
        torch.testing.assert_close(grown[:, target].double(), want, rtol=1e-2, atol=1e-2)
    kv = torch.randn(4, 5 * HIDDEN, generator=g).to(device=device, dtype=torch.bfloat16)
    qw, kw = (torch.randn(4, HIDDEN, generator=g).to(device) for _ in range(2))
    gated = engram_gate(x, kv, qw, kw, EPS)
    key, value = kv.double().view(4, 5, HIDDEN)[:, :4], kv.double().view(4, 5, HIDDEN)[:, 4:]
    dot = (x.double() * qw.double() * kw.double() * key).sum(-1, keepdim=True) * HIDDEN**-0.5
    dot = dot * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS) * torch.rsqrt(key.square().mean(-1, keepdim=True) + EPS)
    gate = torch.sigmoid(torch.where(dot < 0, -1.0, 1.0) * dot.abs().clamp_min(1e-6).sqrt())
    torch.testing.assert_close(gated.double(), x.double() + gate * value, rtol=1e-2, atol=1e-2)


def test_routing_among_384_experts(device: str) -> None:
    """Six of 384, with equal gates in pairs: of two equal experts the lower is taken first."""
    gate = random_rows(192, HIDDEN, seed=1).repeat_interleave(2, 0).to(device) * 0.01
    u = random_rows(8, HIDDEN, seed=2).to(device)
    ids, weights = route(u, pack_linear(gate), torch.zeros(384, device=device), 6, True, 1.5)
    scores = torch.log1p(torch.exp(u.double() @ gate.double().T)).sqrt()
    for row in range(8):
        pairs = scores[row, ::2].topk(3).indices.tolist()
        assert ids[row].tolist() == sorted([2 * p for p in pairs] + [2 * p + 1 for p in pairs])
        chosen = scores[row, ids[row]]
        torch.testing.assert_close(weights[row].double(), chosen / chosen.sum() * 1.5, rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
def test_sixteen_experts_of_the_release(device: str) -> None:
    """5,120 → 2,304 in bfloat16, six of sixteen, with the clamp and the rounding of the inner row."""
    g = torch.Generator().manual_seed(1)
    w13 = [(torch.randn(2 * 2304, HIDDEN, generator=g) * 0.05).to(device=device, dtype=torch.bfloat16) for _ in range(16)]
    w2 = [(torch.randn(HIDDEN, 2304, generator=g) * 0.02).to(device=device, dtype=torch.bfloat16) for _ in range(16)]
    u = torch.randn(9, HIDDEN, generator=g).to(device=device, dtype=torch.bfloat16)
    u[3] = 0
    u[4, 11] = 500.0
    ids = torch.stack([torch.randperm(16, generator=g)[:6].sort().values for _ in range(9)]).to(device)
    weights = torch.rand(9, 6, generator=g).to(device)
    bank = pack_experts(w13, w2)
    found = expert_mlp(u, ids, weights, bank, 10.0, form=FP8_ROWS)
    row_kind = RowKind(2304, FP8_ROWS, False, torch.float32)
    for row in range(9):
        total = torch.zeros(HIDDEN, dtype=torch.float64, device=device)
        for expert, weight in zip(ids[row].tolist(), weights[row].tolist(), strict=True):
            gate, up = (w13[expert].double() @ u[row].double()).bfloat16().double().chunk(2)
            gate, up = gate.clamp_max(10), up.clamp(-10, 10)
            inner = row_kind.store((gate * torch.sigmoid(gate) * up * weight).bfloat16()).double()
            total += w2[expert].double() @ inner
        torch.testing.assert_close(found[row].double(), total, rtol=3e-2, atol=3e-2 * float(total.abs().max()) + 1e-6)
    assert torch.equal(found[2:3], expert_mlp(u[2:3], ids[2:3], weights[2:3], bank, 10.0, form=FP8_ROWS))
