"""Verification of drafts: tokens and sampling state are those of a run without drafts, whatever was proposed."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from deepinfer.sampling import SamplingParams
from deepinfer.worker.sampler import Sampler, SampleRows
from deepinfer.worker.sampling_state import DRAWS, EDITS, RANKED, TOP_K, RowSampling, SamplingState
from deepinfer.worker.verify import DraftRows, accepted_counts, coupled_draw, draft_rows

VOCAB = 50
PROMPT = [7, 7, 3]
EOS = (4,)
K = 3

KINDS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1),
    SamplingParams(temperature=0.7, top_k=8),
    SamplingParams(temperature=1.3, top_p=0.9, min_p=0.02),
    SamplingParams(temperature=0, repetition_penalty=1.7, presence_penalty=1, frequency_penalty=0.8),
    SamplingParams(temperature=0.9, frequency_penalty=1.5, logit_bias={5: 3.0}),
    SamplingParams(temperature=1, min_tokens=6, stop_token_ids=[5, 6]),
    SamplingParams(temperature=0, min_tokens=4),
]
BAD_WORDS = ((), ((9,), (5, 6)), (), ((3, 8, 1),), ((5,),), ((1, 2, 3, 4), (7,)), (), ())


def logits_of(history: list[int]) -> torch.Tensor:
    """A toy model: a row of logits for each history, narrow enough that tokens repeat."""
    seed = sum((i + 1) * t for i, t in enumerate(history[-3:])) % 97
    row = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))
    row[:10] += 2.5
    return row


class Batch:
    """Sequences of every kind in slots of one state, stepped together."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.state = SamplingState(len(KINDS) + 1, VOCAB, self.device)
        self.histories = [[*PROMPT] for _ in KINDS]
        for i, params in enumerate(KINDS):
            self.state.admit(i + 1, RowSampling(params, 1000 + i, PROMPT, EOS, BAD_WORDS[i]), [])
        self.state.table = torch.from_numpy(self.state.host).to(device)
        self.sampler = Sampler(self.state, VOCAB)

    def step(self, drafts: list[list[int]]) -> list[list[int]]:
        """Tokens that each sequence makes in one step with these drafts."""
        state, slots, positions, ids, rows = self.state, [], [], [], []
        borders = [0]
        for i, history in enumerate(self.histories):
            for nth in range(len(drafts[i]) + 1):
                slots.append(i + 1)
                positions.append(len(history) + nth)
                ids.append(history[-1] if nth == 0 else drafts[i][nth - 1])
                rows.append(logits_of([*history, *drafts[i][:nth]]))
            borders.append(len(slots))
        flags = state.flags[np.array(slots)]
        by_rank = (flags & RANKED) != 0

        def where(mask: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.flatnonzero(mask)).to(self.device)

        tensors = [torch.tensor(v, device=self.device) for v in (ids, list(range(len(ids))), borders)]
        drafted = draft_rows(*tensors, rows=len(ids), longest=K + 1) if len(ids) > len(self.histories) else None
        chosen = SampleRows(
            torch.tensor(slots, device=self.device),
            torch.tensor(positions, device=self.device),
            int(np.bitwise_or.reduce(flags)),
            edit=where((flags & EDITS) != 0),
            plain=where(((flags & DRAWS) != 0) & ~by_rank),
            ranked=where(by_rank),
            max_top_k=int(state.host[np.array(slots)][by_rank][:, TOP_K].max()),
            drafts=drafted,
        )
        tokens = self.sampler(torch.stack(rows).to(self.device), chosen)
        counts = [1] * len(KINDS) if drafted is None else accepted_counts(tokens, drafted).tolist()
        made = [tokens[borders[i] : borders[i] + n].tolist() for i, n in enumerate(counts)]
        for history, new in zip(self.histories, made, strict=True):
            history += new
        return made


def undrafted(device: str, tokens: int) -> tuple[list[list[int]], Batch]:
    batch = Batch(device)
    for _ in range(tokens):
        batch.step([[] for _ in KINDS])
    return [h[len(PROMPT) :] for h in batch.histories], batch


def test_every_pattern_of_right_and_wrong_drafts_gives_the_undrafted_tokens(device: str) -> None:
    expected, _ = undrafted(device, 60)
    batch = Batch(device)
    patterns = [p for k in range(K + 1) for p in product([True, False], repeat=k)]
    generator = np.random.default_rng(5)
    accepted = set()
    for at in range(len(patterns)):
        drafts = []
        for i, history in enumerate(batch.histories):
            done = len(history) - len(PROMPT)
            pattern = patterns[(at + 3 * i) % len(patterns)]
            truth = expected[i][done : done + len(pattern)]
            wrong = [(t + 1 + int(generator.integers(VOCAB - 1))) % VOCAB for t in truth]
            drafts.append([t if right else w for t, w, right in zip(truth, wrong, pattern, strict=True)])
        made = batch.step(drafts)
        for i, new in enumerate(made):
            pattern = patterns[(at + 3 * i) % len(patterns)]
            good = next((j for j, right in enumerate(pattern) if not right), len(pattern))
            assert len(new) == good + 1, "exactly the leading right drafts are accepted"
            accepted.add((i, len(new)))
        for i, history in enumerate(batch.histories):
            assert history[len(PROMPT) :] == expected[i][: len(history) - len(PROMPT)], KINDS[i]
    assert len(accepted) == len(KINDS) * (K + 1)


def test_sampling_state_after_drafts_is_that_of_never_having_drafted(device: str) -> None:
    expected, _ = undrafted(device, 60)
    drafted, plain = Batch(device), Batch(device)
    for step in range(6):
        drafts = []
        for i, history in enumerate(drafted.histories):
            done = len(history) - len(PROMPT)
            truth = expected[i][done : done + K]
            truth[step % K] = (truth[step % K] + 1) % VOCAB if (step + i) % 2 else truth[step % K]
            drafts.append(truth[: 1 + (step + i) % K])
        drafted.step(drafts)
    # The undrafted run takes each sequence to its own length: past it, its row of the state is set aside first.
    want = [len(h) for h in drafted.histories]
    rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    assert drafted.state.counts is not None
    assert plain.state.counts is not None
    for _ in range(max(want)):
        for i, history in enumerate(plain.histories):
            if len(history) == want[i]:
                rows.setdefault(i, (plain.state.counts[i + 1].clone(), plain.state.recent[i + 1].clone()))
        plain.step([[] for _ in KINDS])
    for i, params in enumerate(KINDS):
        counts, recent = rows[i]
        if params.repetition_penalty != 1 or params.frequency_penalty or params.presence_penalty:
            assert torch.equal(drafted.state.counts[i + 1], counts)
            assert int(counts.sum()) == want[i] - len(PROMPT)
        if BAD_WORDS[i]:
            assert torch.equal(drafted.state.recent[i + 1], recent)


def test_counts_of_ragged_rows_and_of_sequences_that_do_not_sample(device: str) -> None:
    # Sequences with 3, 0, 1 and 2 sampling rows, in a step whose other rows do not sample.
    ids = torch.tensor([5, 6, 7, 40, 41, 9, 1, 2], device=device)
    sample_row = torch.tensor([0, 1, 2, 5, 6, 7, 0, 0], device=device)
    off = torch.tensor([0, 3, 3, 4, 6], dtype=torch.int32, device=device)
    rows = draft_rows(ids, sample_row, off, rows=6, longest=3)
    assert rows.drafts.tolist() == [6, 7, -1, -1, 2, -1]
    assert rows.before.tolist() == [[-1, -1], [6, -1], [6, 7], [-1, -1], [-1, -1], [2, -1]]
    assert rows.sequence.tolist() == [0, 0, 0, 2, 3, 3]

    def counts(*tokens: int) -> list[int]:
        return accepted_counts(torch.tensor(tokens, device=device), rows).tolist()

    assert counts(6, 7, 9, 3, 2, 8) == [3, 0, 1, 2]
    assert counts(6, 8, 9, 3, 3, 8) == [2, 0, 1, 1]
    assert counts(5, 7, 9, 3, 2, 2) == [1, 0, 1, 2], "a draft behind a rejected one never counts"


def test_a_step_without_sampling_rows_makes_nothing(device: str) -> None:
    empty = torch.zeros(1, dtype=torch.int64, device=device)
    rows = draft_rows(empty, empty, torch.zeros(3, dtype=torch.int32, device=device), rows=0, longest=4)
    assert accepted_counts(empty[:0], rows).tolist() == [0, 0]


def coupled(weights: list[float], q: list[float], draft: int, runs: int = 4000, otherwise: int = 0) -> torch.Tensor:
    """Tokens of many positions for one draft."""
    m = runs
    return coupled_draw(
        torch.tensor([weights]).repeat(m, 1),
        torch.full((m,), otherwise),
        torch.full((m,), draft),
        torch.tensor([q]).repeat(m, 1),
        torch.full((m,), 77),
        torch.arange(m),
        float(2**40),
    )


@pytest.mark.parametrize("bad", [[float("nan"), 1, 0, 0], [-0.5, 1.5, 0, 0], [float("inf"), 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]])
def test_a_row_of_q_that_cannot_be_leaves_the_ordinary_draw(bad: list[float]) -> None:
    """Not a number, negative, infinite, or the draft (1) cannot have come from it."""
    assert set(coupled([1000.0, 1000, 1000, 1000], bad, draft=1, otherwise=3).tolist()) == {3}


def test_masked_vocabulary_rejects_the_draft_and_draws_from_the_rest() -> None:
    got = coupled([0.0, 2.0**30, 0.0, 2.0**30], [0.5, 0.5, 0, 0], draft=0)
    # p − q: (0, 0, 0, ½): all that is left is 3.
    assert set(got.tolist()) == {3}


def test_a_draft_that_p_likes_at_least_as_much_as_q_is_always_kept() -> None:
    assert set(coupled([3.0 * 2**20, 2.0**20, 0, 0], [0.75, 0.25, 0, 0], draft=1).tolist()) == {1}
    assert set(coupled([2.0**20, 0, 0, 0], [1.0, 0, 0, 0], draft=0).tolist()) == {0}
    assert set(coupled([2.0**20] * 4, [0.25] * 4, draft=2).tolist()) == {2}


def test_a_draft_that_p_likes_less_is_kept_in_proportion() -> None:
    got = coupled([2.0**20, 3.0 * 2**20, 0, 0], [0.5, 0.5, 0, 0], draft=0, runs=40_000)
    share = float((got == 0).double().mean())
    assert abs(share - 0.5) < 0.015  # p / q = ¼ / ½
    assert set(got.tolist()) == {0, 1}


def test_a_point_mass_is_kept_or_left_whole() -> None:
    assert set(coupled([0.0, 2.0**40, 0, 0], [0, 1.0, 0, 0], draft=1).tolist()) == {1}
    assert set(coupled([0.0, 2.0**40, 0, 0], [1.0, 0, 0, 0], draft=0).tolist()) == {1}


def test_rows_may_be_cut_out_and_reordered(device: str) -> None:
    """A row's coupled token depends on nothing but the row."""
    g = torch.Generator().manual_seed(2)
    w = (torch.rand(64, 300, generator=g) * 2**30).floor()
    q = torch.softmax(torch.randn(64, 300, generator=g), -1)
    draft = torch.multinomial(q, 1, generator=g).squeeze(1)
    args = [t.to(device) for t in (w, torch.zeros(64, dtype=torch.int64), draft, q, torch.arange(64), torch.arange(64) * 3)]
    together = coupled_draw(*args, scale=2.0**40)
    alone = torch.cat([coupled_draw(*(a[i : i + 1] for a in args), scale=2.0**40) for i in range(64)])
    assert torch.equal(together, alone)
    order = torch.randperm(64, generator=g).to(device)
    assert torch.equal(coupled_draw(*(a[order] for a in args), scale=2.0**40), together[order])


def test_draft_rows_hold_one_row_per_sequence_too(device: str) -> None:
    off = torch.arange(4, dtype=torch.int32, device=device)
    ids = torch.tensor([3, 4, 5], device=device)
    rows: DraftRows = draft_rows(ids, torch.arange(3, device=device), off, rows=3, longest=1)
    assert rows.before.shape == (3, 0)
    assert accepted_counts(torch.tensor([4, 5, 3], device=device), rows).tolist() == [1, 1, 1]
