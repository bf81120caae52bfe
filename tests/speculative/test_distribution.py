"""Drafting does not bend the distribution: exact joints of three tokens against the chi-square of many runs.

Three positions, five tokens, a target and a draft distribution for each history. The draft distribution differs from the target's.
Each run drafts a chain, decides how much of it is verified, and makes tokens until it has three. The statistic's z score is
small for right rules for the length and enormous for wrong ones, which shows that the test would see a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch

from deepinfer.sampling import SamplingParams
from deepinfer.worker import sampler
from deepinfer.worker.counter_rng import DRAFT, random_bits, uniform
from deepinfer.worker.sampler import Sampler, SampleRows
from deepinfer.worker.sampling_state import PENALTIES, RowSampling, SamplingState
from deepinfer.worker.verify import Proposals, accepted_counts, draft_rows
from deepinfer.worker.verify_lengths import verify_lengths

V, LENGTH = 5, 3
RUNS = 60_000
Length = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(conf [runs, 3] of positions, probability [runs, 3] of the drafted tokens themselves, run) -> drafts verified [runs]."""


@pytest.fixture(autouse=True)
def one_thread_and_narrow_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The sampler sums a vocabulary in blocks: five tokens need not be filled up to 256. Threads cost more than they give."""
    monkeypatch.setattr(sampler, "_BLOCK", 8)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tables() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of target and draft ``[histories, V]``; a history of up to two tokens is a number in base V + 1."""
    g = torch.Generator().manual_seed(11)
    count = (V + 1) ** 2
    return torch.randn(count, V, generator=g) * 1.2, torch.randn(count, V, generator=g) * 1.2


def state_of(history: torch.Tensor) -> torch.Tensor:
    """Row of the tables for histories ``[runs, t]``, t ≤ 2."""
    number = torch.zeros(len(history), dtype=torch.int64)
    for t in range(history.shape[1]):
        number = number * (V + 1) + history[:, t] + 1
    return number


def transformed(logits: torch.Tensor, params: SamplingParams, made: list[int]) -> torch.Tensor:
    """The distribution that sampling means for one row, written by hand in float64."""
    x = logits.double().clone()
    for i, bias in (params.logit_bias or {}).items():
        x[i] += bias
    for t in range(V):
        n = made.count(t)
        if n and params.repetition_penalty != 1:
            x[t] = x[t] / params.repetition_penalty if x[t] > 0 else x[t] * params.repetition_penalty
        x[t] -= params.frequency_penalty * n + params.presence_penalty * (n > 0)
    p = torch.softmax(x / params.temperature, 0)
    order = p.argsort(descending=True, stable=True)
    keep = torch.ones(V, dtype=torch.bool)
    if params.top_k:
        keep[order[params.top_k :]] = False
    if params.top_p < 1:
        kept = torch.where(keep, p, 0)[order] / p[keep].sum()
        keep[order[kept.cumsum(0) - kept >= params.top_p]] = False
    if params.min_p:
        keep &= p >= params.min_p * p.max()
    return torch.where(keep, p, 0) / p[keep].sum()


def exact_joint(target: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    joint = torch.zeros(V**LENGTH, dtype=torch.float64)
    for tokens in product(range(V), repeat=LENGTH):
        p = 1.0
        for t in range(LENGTH):
            row = int(state_of(torch.tensor([tokens[:t]], dtype=torch.int64).view(1, -1)[:, -2:])[0])
            p *= float(transformed(target[row], params, list(tokens[:t]))[tokens[t]])
        joint[tokens[0] * V * V + tokens[1] * V + tokens[2]] = p
    return joint


def z_score(tokens: torch.Tensor, joint: torch.Tensor) -> float:
    """(chi-square − degrees of freedom) / sqrt(2 degrees of freedom) of outcomes ``[runs, 3]``."""
    outcome = tokens[:, 0] * V * V + tokens[:, 1] * V + tokens[:, 2]
    seen = torch.bincount(outcome, minlength=V**LENGTH).double()
    expected = joint * len(tokens)
    assert int(seen[expected == 0].sum()) == 0, "an outcome of probability zero was drawn"
    # Rare outcomes are lumped together, as the approximation wants it.
    rare = expected < 5
    seen = torch.cat([seen[~rare], seen[rare].sum().view(1)]) if rare.any() else seen
    expected = torch.cat([expected[~rare], expected[rare].sum().view(1)]) if rare.any() else expected
    some = expected > 0
    chi = float(((seen - expected)[some] ** 2 / expected[some]).sum())
    degrees = int(some.sum()) - 1
    return (chi - degrees) / (2 * degrees) ** 0.5


class World:
    """Many independent sequences of three tokens under one set of sampling values."""

    def __init__(self, params: SamplingParams, runs: int = RUNS) -> None:
        self.target, draft = tables()
        self.q_table = torch.softmax(draft, -1)
        self.params, self.runs = params, runs
        self.joint = exact_joint(self.target, params)
        self.state = SamplingState(runs + 1, V, torch.device("cpu"))
        self.state.admit(1, RowSampling(params, 0, ()), [])
        for values in (self.state.host, self.state.flags):
            values[2:] = values[1]
        if self.state.counts is not None:
            self.state.counts.zero_()
        for widened in (self.state.bias_ids, self.state.bias, self.state.stop_ids):
            widened.data[2:] = widened.data[1]
        self.state.host[1:, 7] = torch.arange(runs).numpy()  # SEED_LOW: a seed for each run
        self.state.table[1:] = torch.from_numpy(self.state.host[1:])  # what a step writes on the device for the slots it admits
        self.sampler = Sampler(self.state, V)
        self.made = torch.zeros(runs, LENGTH + LENGTH + 1, dtype=torch.int64)
        self.count = torch.zeros(runs, dtype=torch.int64)

    def draft(self, round_: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A chain of three drafts behind what each run has made, and each one's distribution ``[runs, 3, V]``."""
        drafts, qs = [], []
        history = self.made.clone()
        for k in range(LENGTH):
            q = self.q_table[self._row(history, self.count + k)]
            u = uniform(random_bits(torch.arange(self.runs), self.count + k, DRAFT + round_)).unsqueeze(1)
            token = (q.double().cumsum(-1) <= u).sum(-1).clamp(max=V - 1)
            history.scatter_(1, (self.count + k).clamp(max=history.shape[1] - 1)[:, None], token[:, None])
            drafts.append(token)
            qs.append(q)
        return torch.stack(drafts, 1), torch.stack(qs, 1)

    @staticmethod
    def _row(history: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """Table row for the last two of ``count`` tokens."""
        a = history.gather(1, (count - 2).clamp(min=0)[:, None]).squeeze(1)
        b = history.gather(1, (count - 1).clamp(min=0)[:, None]).squeeze(1)
        first = torch.where(count >= 2, a + 1, 0)
        return torch.where(count >= 1, first * (V + 1) + b + 1, 0)

    def step(self, drafts: torch.Tensor, q: torch.Tensor | None, lengths: torch.Tensor) -> None:
        """Verifies the first ``lengths`` drafts of each run and appends what it makes."""
        runs = self.runs
        off = torch.cat([torch.zeros(1, dtype=torch.int64), (lengths + 1).cumsum(0)])
        r = int(off[-1])
        ids = torch.zeros(r, dtype=torch.int64)
        k = torch.arange(LENGTH + 1)
        at, valid = off[:-1, None] + k, k <= lengths[:, None]
        ids[at[:, 1:][valid[:, 1:]]] = drafts[valid[:, 1:]]
        rows = draft_rows(ids, torch.arange(r), off, rows=r, longest=LENGTH + 1)
        slots = rows.sequence + 1
        history = torch.cat([self.made, torch.zeros(runs, 1, dtype=torch.int64)], 1)
        history = history.scatter(1, self.count[:, None] + torch.arange(LENGTH), drafts)[rows.sequence]
        positions = self.count[rows.sequence] + rows.nth
        logits = self.target[self._row(history, positions)]
        verifying = torch.nonzero(rows.drafts >= 0).squeeze(1)
        proposals = None if q is None else Proposals(verifying, q[rows.sequence[verifying], rows.nth[verifying]])
        every = torch.arange(r)
        by_rank = bool(self.params.top_k or self.params.top_p < 1)
        flags = int(self.state.flags[1])
        tokens = self.sampler(
            logits,
            SampleRows(
                slots,
                positions,
                flags,
                edit=every if flags & PENALTIES or self.params.logit_bias else None,
                plain=None if by_rank else every,
                ranked=every if by_rank else None,
                max_top_k=self.params.top_k or V,
                drafts=rows,
                proposals=proposals,
            ),
        )
        accepted = accepted_counts(tokens, rows).long()
        counts = rows.nth < accepted[rows.sequence]
        self.made[rows.sequence[counts], positions[counts]] = tokens[counts]
        self.count += accepted

    def run(self, length: Length, *, coupled: bool = True) -> float:
        """Makes three tokens everywhere; the z score of their joint distribution."""
        round_ = 0
        while int(self.count.min()) < LENGTH:
            drafts, q = self.draft(round_)
            conf, own = self.confidence(drafts, q)
            lengths = length(conf, own, torch.arange(self.runs))
            lengths = lengths.minimum((LENGTH - 1 - self.count).clamp(min=0))  # as near a sequence's limit
            self.step(drafts, q if coupled else None, lengths)
            # Runs that have three tokens go on harmlessly; their first three stand.
            self.count.clamp_(max=LENGTH)
            round_ += 1
        return z_score(self.made[:, :LENGTH], self.joint)

    def confidence(self, drafts: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A head's guess that a draft is accepted, from the history before it (never the draft); and q of the draft itself."""
        history = torch.cat([self.made, torch.zeros(self.runs, 1, dtype=torch.int64)], 1)
        history = history.scatter(1, self.count[:, None] + torch.arange(LENGTH), drafts)
        conf = []
        for k in range(LENGTH):
            p = torch.softmax(self.target[self._row(history, self.count + k)], -1)
            conf.append(torch.minimum(p, q[:, k]).sum(-1))
        return torch.stack(conf, 1), q.gather(2, drafts.unsqueeze(2)).squeeze(2)


def whole(conf: torch.Tensor, own: torch.Tensor, run: torch.Tensor) -> torch.Tensor:
    return torch.full((len(conf),), LENGTH)


def by_turns(conf: torch.Tensor, own: torch.Tensor, run: torch.Tensor) -> torch.Tensor:
    return run % (LENGTH + 1)


def pairs_share(conf: torch.Tensor, own: torch.Tensor, run: torch.Tensor) -> torch.Tensor:
    """Two runs share three rows, given to the likeliest drafts."""
    return lengths_of_pairs(conf, torch.full((len(conf) // 2,), 3))


def lengths_of_pairs(conf: torch.Tensor, budget: torch.Tensor) -> torch.Tensor:
    """`verify_lengths` of each pair alone: a loop over them would take minutes, the order is the same."""
    s = conf.float().clamp(0, 1).cumprod(1).view(-1, 2, LENGTH)
    rank = (torch.arange(LENGTH) * 2 + torch.arange(2)[:, None]).view(-1)
    flat = s.reshape(len(s), -1)
    ahead = (flat[:, None, :] > flat[:, :, None]) | ((flat[:, None, :] == flat[:, :, None]) & (rank[None, None, :] < rank[None, :, None]))
    return (ahead.sum(-1) < budget[:, None]).view(-1, LENGTH).sum(1)


def test_the_pairwise_rule_is_the_one_of_verify_lengths() -> None:
    g = torch.Generator().manual_seed(1)
    conf = (torch.rand(200, LENGTH, generator=g) * 5).round() / 5
    budget = torch.randint(0, 7, (100,), generator=g)
    drafted = torch.full((2,), LENGTH)
    each = [verify_lengths(conf[2 * i : 2 * i + 2], drafted, int(budget[i])).lengths for i in range(100)]
    assert torch.equal(torch.cat(each), lengths_of_pairs(conf, budget))


PARAMS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=3),
    SamplingParams(temperature=1.3, top_p=0.8),
    SamplingParams(temperature=1.0, min_p=0.15),
    SamplingParams(temperature=1.0, repetition_penalty=1.5, frequency_penalty=0.7, presence_penalty=0.3),
    SamplingParams(temperature=0.9, top_k=4, top_p=0.9, frequency_penalty=1.0, logit_bias={2: 1.5, 0: -100.0}),
]


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("coupled", [True, False], ids=["coupled", "equal"])
def test_three_tokens_have_their_exact_joint_distribution(params: SamplingParams, coupled: bool) -> None:
    assert abs(World(params).run(whole, coupled=coupled)) < 4


@pytest.mark.parametrize("rule", [by_turns, pairs_share])
def test_lengths_that_do_not_know_the_draft_are_harmless(rule: Length) -> None:
    assert abs(World(PARAMS[0]).run(rule)) < 4


def test_coupling_accepts_more_than_comparing() -> None:
    """min(1, p / q) accepts with 1 − the distance of p and q; comparing with an independent draw accepts less."""
    share = {}
    for coupled in (True, False):
        world = World(PARAMS[0], 20_000)
        drafts, q = world.draft(0)
        world.step(drafts, q if coupled else None, torch.ones(world.runs, dtype=torch.int64))
        share[coupled] = float((world.count == 2).double().mean())
    p, q0 = torch.softmax(world.target[0], -1), world.q_table[0]
    assert share[True] == pytest.approx(float(torch.minimum(p, q0).sum()), abs=0.015)
    assert share[False] == pytest.approx(float((p * q0).sum()), abs=0.015)


# Rules that bend the distribution: the test has to see them.


def test_a_length_from_the_drafts_own_probability_is_detected() -> None:
    def own_confidence(conf: torch.Tensor, own: torch.Tensor, run: torch.Tensor) -> torch.Tensor:
        return (own > 0.3).long().cumprod(1).sum(1)

    assert World(PARAMS[0]).run(own_confidence) > 50


def test_the_same_idea_in_a_shared_budget_is_detected() -> None:
    def own_in_pairs(conf: torch.Tensor, own: torch.Tensor, run: torch.Tensor) -> torch.Tensor:
        return lengths_of_pairs(own, torch.full((len(own) // 2,), 3))

    assert World(PARAMS[0]).run(own_in_pairs) > 20


def staircase_budget(conf: torch.Tensor) -> torch.Tensor:
    """Budget of each run by argmax of tokens per cost over these confidences, where rows cost in stairs.

    What a head may say: ½ for the first draft; all or nothing for the second, by the draft before it. One more row costs 0.6,
    the second none, so that only two rows together can pay.
    """
    second = (conf[:, 1] > 0.6).double() * 0.5
    gain = torch.stack([torch.ones_like(second), torch.full_like(second, 1.5), 1.5 + second], 1)
    return (gain / torch.tensor([1.0, 1.6, 1.6])).argmax(1)


def test_a_budget_by_argmax_over_this_steps_confidences_is_detected() -> None:
    def this_step(conf: torch.Tensor, own: torch.Tensor, run: torch.Tensor) -> torch.Tensor:
        return staircase_budget(conf)

    assert World(PARAMS[0]).run(this_step) > 20


def test_the_same_budget_from_the_step_before_is_harmless() -> None:
    old: list[torch.Tensor] = []

    def step_before(conf: torch.Tensor, own: torch.Tensor, run: torch.Tensor) -> torch.Tensor:
        old.append(conf)
        return staircase_budget(old[-2]) if len(old) > 1 else torch.full((len(conf),), 2)

    assert abs(World(PARAMS[0]).run(step_before)) < 4
