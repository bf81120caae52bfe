"""The family equals transformers' on random weights, and no arrangement of the work changes a bit of an answer."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from deepinfer_mixtral.topology import read_topology

from deepinfer import LLM, RequestOutput, SamplingParams
from deepinfer.errors import CheckpointError, UnsupportedConfigError

WINDOWS = (None, 24)
SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
}
MATH: dict[str, Any] = {"architectures": ["MixtralForCausalLM"], **SIZES}


@pytest.fixture(scope="module", params=WINDOWS)
def network(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**SIZES, sliding_window=request.param)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model.eval()


@pytest.fixture(scope="module")
def checkpoint(network: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("mixtral")
    network.save_pretrained(where)
    return where


def prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, SIZES["vocab_size"], length).tolist() for length in lengths]


def engine(checkpoint: Path, **settings: Any) -> LLM:
    defaults: dict[str, Any] = {"dtype": "float32", "block_size": 16, "num_kv_blocks": 200, "num_threads": 1, "quiet": True}
    return LLM(str(checkpoint), **{**defaults, **settings})


def answers(llm: LLM, prompts: list[list[int]], tokens: int) -> list[RequestOutput]:
    """Half of them greedy, half drawn, each with the log-probabilities of the whole vocabulary."""
    plain = SamplingParams(max_tokens=tokens, logprobs=-1, ignore_eos=True, detokenize=False)
    params = [plain.clone(temperature=float(i % 2), seed=i) for i in range(len(prompts))]
    return llm.generate(prompts, params, use_tqdm=False)


def bits(outputs: list[RequestOutput]) -> list[Any]:
    """What must be equal: tokens and every log-probability of each answer, none of which failed."""
    made = [output.outputs[0] for output in outputs]
    assert [answer.error for answer in made] == [None] * len(made)
    return [(answer.token_ids, [{token: p.logprob for token, p in at.items()} for at in answer.logprobs or []]) for answer in made]


def test_logits_equal_transformers(network: Any, checkpoint: Path) -> None:
    (ids,) = prompts([100])
    with torch.inference_mode():
        want = network(torch.tensor([ids])).logits[0].numpy()
    with engine(checkpoint) as llm:
        np.testing.assert_allclose(llm.logits(ids), want, rtol=0, atol=1e-4)


def test_no_arrangement_changes_a_bit(network: Any, checkpoint: Path) -> None:
    """One at a time, all at once, again with what the first pass left in the prefix cache, and cut and preempted for want of room."""
    run = {"dtype": "float32" if network.config.sliding_window else "bfloat16"}
    shared, *others = prompts([35, 5, 9, 20, 47])
    work = [shared + others[0], shared + others[1], *others]
    with engine(checkpoint, **run, enable_prefix_caching=False, max_num_seqs=1, zero_overhead=False) as alone:
        want = bits(answers(alone, work, 30))
    with engine(checkpoint, **run) as roomy:  # a step is planned while one runs, as by default
        assert bits(answers(roomy, work, 30)) == want
        again = answers(roomy, work, 30)
        assert bits(again) == want and again[0].num_cached_tokens == 32
    for overlap in (False, True):
        tight = {"num_kv_blocks": 8, "max_num_batched_tokens": 13, "max_num_seqs": 4, "max_model_len": 128}
        with engine(checkpoint, **run, **tight, zero_overhead=overlap) as pressed:
            assert bits(answers(pressed, work, 30)) == want
            assert sum(pressed.metrics().preemptions.values()) > 0


def test_a_checkpoint_that_does_not_fit_its_configuration_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 56}))
    with pytest.raises(CheckpointError, match=r"experts\.0\.w1\.weight' in .* has shape \[48, 64\], the configuration needs \[56, 64\]"):
        engine(tmp_path)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_experts_per_tok": 5}, "num_experts_per_tok"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_size": 66}, "hidden_size"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_local_experts": 0}, "num_local_experts"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ],
)
def test_a_field_that_is_not_implemented_is_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedConfigError, match=named):
        read_topology({**MATH, **fields})
