"""Engines without batch invariance: the setting reaches products and attention, everything else goes on as with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from deepinfer.engine.engine import Engine
from deepinfer.kernels.linear import pack_linear, packed
from deepinfer.kernels.paged_attention import census
from deepinfer.kernels.paged_attention.plan import QUERY_BLOCK
from deepinfer.models.llama import forward
from deepinfer.sampling import SamplingParams
from engine_kit import VOCAB, generate, make_engine, random_prompts, tiny_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = random_prompts((40, 130, 5, 71), seed=4, vocab=VOCAB)


def engine(**settings: Any) -> Engine:
    return make_engine(tiny_checkpoint("llama"), "cpu", batch_invariant=False, max_num_seqs=4, **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_one_call_for_any_number_of_rows(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "row_classes", lambda *_: pytest.fail("row counts were compared"))
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(24, 40, generator=generator).to(dtype), torch.randn(24, generator=generator).to(dtype)
    made = pack_linear(weight, bias, invariant=False)
    for rows in (1, 3, 8, 65, 300):
        x = torch.randn(rows, 40, generator=generator).to(dtype)
        out = made(x)
        assert out.shape == (rows, 24) and out.dtype == dtype
        torch.testing.assert_close(out.float(), F.linear(x.float(), weight.float(), bias.float()), rtol=2e-2, atol=2e-2)


def test_rows_reach_the_operators_unpadded(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[int] = set()
    plain = forward.rms_norm

    def norm(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.add(x.shape[0])
        return plain(x, *rest)

    monkeypatch.setattr(forward, "rms_norm", norm)
    with monkeypatch.context() as before:
        before.setattr(census, "_same_bits", lambda *_: pytest.fail("row counts were compared"))
        made = engine()
    with made as e:
        generate(e, [PROMPTS[2]], GREEDY)
        assert seen == {5, 1} and e.model._query_block == QUERY_BLOCK  # type: ignore[attr-defined]
    seen.clear()
    with make_engine(tiny_checkpoint("llama"), "cpu") as e:
        generate(e, [PROMPTS[2]], GREEDY)
    assert seen == {8}


@pytest.mark.parametrize("settings", [{}, {"zero_overhead": False}, {"speculative": "ngram"}, {"max_num_batched_tokens": 16}], ids=str)
def test_answers_are_those_of_an_invariant_engine_up_to_rounding(settings: dict[str, Any]) -> None:
    """Logits of these weights lie further apart than float32 rounds, so that greedy tokens are the same."""
    with make_engine(tiny_checkpoint("llama"), "cpu") as exact:
        want = [generate(exact, [prompt], GREEDY)[0] for prompt in PROMPTS]
        logits = exact.logits(PROMPTS[1])
    with engine(**settings) as e:
        assert [a.tokens for a in generate(e, PROMPTS, GREEDY)] == [a.tokens for a in want]
        np.testing.assert_allclose(e.logits(PROMPTS[1]), logits, rtol=2e-4, atol=2e-4)
        e._core.check()


def test_beginnings_are_found_again_and_named_apart_from_exact_ones() -> None:
    with engine() as e:
        first = generate(e, [PROMPTS[1]], GREEDY)[0]
        again = generate(e, [PROMPTS[1]], GREEDY)[0]
        assert first.cached_tokens == 0 and again.cached_tokens == 128 and again.tokens == first.tokens
        names = e.kv_identity()
    with make_engine(tiny_checkpoint("llama"), "cpu") as exact:
        other = exact.kv_identity()
    assert [key for key in names if names[key] != other[key]] == ["numerics"]
    assert names["numerics"] == f"{other['numerics']}/any rows"


@pytest.mark.parametrize("invariant", [True, False])
def test_a_start_says_when_answers_depend_on_the_batch(invariant: bool, capsys: pytest.CaptureFixture[str]) -> None:
    make_engine(tiny_checkpoint("llama"), "cpu", quiet=False, batch_invariant=invariant).close()
    assert ("batch invariance is off" in capsys.readouterr().err) == (not invariant)


def test_a_family_without_another_way_runs_as_ever() -> None:
    from deepinfer.models.base import BatchDependentModel
    from deepinfer.models.deepseek_v41.forward import DeepseekV41Model
    from deepinfer.models.llama.forward import LlamaModel

    assert issubclass(LlamaModel, BatchDependentModel) and not issubclass(DeepseekV41Model, BatchDependentModel)
