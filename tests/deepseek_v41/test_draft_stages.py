"""Draft stages on rings and ragged batches against the plain reference, token by token on the same past.

Tolerance: 1e-5 in float32 without rounding, as for the backbone (logits are about 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from deepinfer.models.base import Drafts, ForwardBatch, ModelOptions, NewTokens
from deepinfer.models.deepseek_v41.forward import DeepseekV41Model
from deepseek_v41.drafts import DraftCall, draft
from deepseek_v41.forward_kit import Bench, Running, make_model
from deepseek_v41.sequential import Run, Sequential
from deepseek_v41.weights_kit import RandomWeights, plan, random_ids

SEED, DRAFTS = 3, 5
OPTIONS = ModelOptions(drafts=True, max_draft=DRAFTS)
FORCED = torch.tensor([[5, 900, 17, 17, 2001], [3, 4, 5, 6, 7], [1000, 1, 8, 2, 9]])


@cache
def exact_plan() -> Any:
    """Plain weights, nothing is rounded."""
    return plan("tiny", x_cache_quant="none", quantization_config=None)


@cache
def model(device: str) -> DeepseekV41Model:
    return make_model(exact_plan(), RandomWeights(exact_plan(), SEED), torch.float32, device, OPTIONS)


@cache
def reference() -> Sequential:
    return Sequential(exact_plan(), RandomWeights(exact_plan(), SEED), Run(caches=False))


def expected(tokens: Sequence[int], anchor: int, forced: torch.Tensor | None = None) -> DraftCall:
    taps = reference().forward(torch.tensor(tokens)).taps
    return draft(reference(), taps, anchor, forced=forced)


class Drawing:
    """Gives forced drafts, or the most likely ones, and keeps the logits."""

    def __init__(self, forced: torch.Tensor | None) -> None:
        self.logits: list[torch.Tensor] = []
        self._forced = forced

    def __call__(self, logits: torch.Tensor, nth: int, before: torch.Tensor) -> torch.Tensor:
        self.logits.append(logits.clone().cpu())
        assert before.shape == (logits.shape[0], nth)
        return logits.argmax(-1) if self._forced is None else self._forced[: logits.shape[0], nth].to(logits.device)


class Watched(Bench):
    """Keeps what the newest step gave to its model."""

    batch: ForwardBatch
    hidden: torch.Tensor

    def step(self, work: Sequence[tuple[Running, int]], rejected: Sequence[int] | None = None) -> list[torch.Tensor]:
        forward = self.model.forward

        def noting(batch: ForwardBatch, kv: dict[str, torch.Tensor]) -> torch.Tensor:
            self.batch, self.hidden = batch, forward(batch, kv)
            return self.hidden

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.model, "forward", noting)
            return super().step(work, rejected)

    def draft(self, places: Sequence[int], anchors: Sequence[int], positions: Sequence[int], draw: Drawing, count: int = DRAFTS) -> Drafts:
        on = {"device": self.device, "dtype": torch.int64}
        rows = torch.zeros(len(places), **on)
        new = NewTokens(torch.tensor(places, **on), torch.tensor(anchors, **on), torch.tensor(positions, **on), rows)
        return self.model.draft(self.batch, self.hidden, new, self.kv.tensors, draw, count)


@pytest.mark.parametrize("forced", [None, FORCED[:1]], ids=["greedy", "forced"])
@pytest.mark.parametrize("length", [1, 7, 90])
def test_a_block_is_that_of_the_reference(length: int, forced: torch.Tensor | None, device: str) -> None:
    ids, bench, draw = random_ids(exact_plan(), length, SEED), Watched(model(device)), Drawing(forced)
    bench.prefill(ids, chunk=40)
    made = bench.draft([0], [17], [length], draw)
    call = expected(ids.tolist(), 17, None if forced is None else forced[0])
    assert (torch.cat(draw.logits) - call.logits).abs().max() < 1e-5
    assert (made.confidence[0].cpu() - call.confidence).abs().max() < 1e-5
    assert made.ids[0].tolist() == call.tokens.tolist()


def test_fewer_drafts_are_the_first_ones(device: str) -> None:
    ids, bench = random_ids(exact_plan(), 30, SEED), Watched(model(device))
    bench.prefill(ids)
    whole, part = (bench.draft([0], [9], [30], Drawing(None), count) for count in (DRAFTS, 2))
    assert torch.equal(whole.ids[:, :2], part.ids) and torch.equal(whole.confidence[:, :2], part.confidence)


def test_sequences_of_a_step_draft_as_each_alone(device: str) -> None:
    """Also behind rows of drafts that were taken back, and with a chunk of a prompt beside them that draws nothing."""
    lengths, anchors = (33, 20, 61), (12, 700, 5)
    all_ids = [random_ids(exact_plan(), n + 6, n).tolist() for n in lengths]
    bench = Watched(model(device))
    runs = [bench.start(ids) for ids in all_ids]
    other = bench.start(random_ids(exact_plan(), 50, 1))
    for run, length in zip(runs, lengths, strict=True):
        bench.step([(run, length - 3)])
    # rows of which 3, 1 and 2 count
    wrong, counted = [1, 2, 3], (3, 1, 2)
    for run, length, count in zip(runs, lengths, counted, strict=True):
        run.tokens[length - 3 + count : length] = wrong[: 3 - count]
    bench.step([*((run, 3) for run in runs), (other, 17)], rejected=[0, 2, 1, 0])
    draw = Drawing(FORCED)
    positions = [run.done for run in runs]
    assert positions == [33, 18, 60]
    made = bench.draft([0, 1, 2], anchors, positions, draw)
    for i, (ids, done) in enumerate(zip(all_ids, positions, strict=True)):
        call = expected(ids[:done], anchors[i], FORCED[i])
        logits = torch.stack([step[i] for step in draw.logits])
        assert (logits - call.logits).abs().max() < 1e-5, i
        assert (made.confidence[i].cpu() - call.confidence).abs().max() < 1e-5, i


def test_forms_of_storage_draft_alike(device: str) -> None:
    """A rounded row is the same row packed or not."""
    topology, ids = plan("tiny"), random_ids(plan("tiny"), 40, SEED)
    weights, found = RandomWeights(topology, SEED, released=True), []
    for form in ("packed", "bfloat16", "float32"):
        options = ModelOptions(cache_form=form, drafts=True, max_draft=DRAFTS)  # type: ignore[arg-type]
        bench, draw = Watched(make_model(topology, weights, torch.float32, device, options)), Drawing(None)
        bench.prefill(ids, chunk=16)
        made = bench.draft([0], [11], [40], draw)
        found.append((torch.cat(draw.logits), made.confidence))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_models_that_were_not_asked_to_keep_nothing_and_say_so(device: str) -> None:
    bench = Watched(make_model(exact_plan(), RandomWeights(exact_plan(), SEED), torch.float32, device))
    run, _ = bench.prefill(random_ids(exact_plan(), 9, SEED))
    rings = [view[run.slot] for name, view in bench.model.caches.views(bench.kv.tensors["state0"]).items() if name.startswith("mtp.")]
    assert len(rings) == 3 and not any(bool(ring.any()) for ring in rings)
    with pytest.raises(RuntimeError, match="not configured to draft"):
        bench.draft([0], [1], [9], Drawing(None))
