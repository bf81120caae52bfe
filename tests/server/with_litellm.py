"""Talks to a server through litellm and prints what came, as one JSON object; `test_programs.py` runs it where litellm is installed.

python tests/server/with_litellm.py URL KEY
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import litellm

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "strict": True,
        "parameters": {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"], "additionalProperties": False},
    },
}
FORM = {
    "type": "json_schema",
    "json_schema": {"name": "sky", "strict": True, "schema": TOOL["function"]["parameters"]},  # type: ignore[index]
}


def error(**asked: Any) -> list[str]:
    """The classes of what is raised."""
    try:
        litellm.completion(**asked)
    except Exception as e:
        return [kind.__name__ for kind in type(e).__mro__]
    return []


def main(url: str, key: str) -> dict[str, Any]:
    """What came, by how it was asked."""
    where = {"model": "hosted_vllm/tiny", "api_base": f"{url}/v1", "api_key": key, "num_retries": 0, "timeout": 120}
    asked = {**where, "messages": [{"role": "user", "content": "the quick brown fox"}], "seed": 3, "temperature": 0.8, "max_tokens": 8}
    called = {
        **asked,
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 300,
        "reasoning_effort": "none",
    }
    usage = {"stream": True, "stream_options": {"include_usage": True}}

    async def together() -> list[str]:
        answers = await asyncio.gather(*(litellm.acompletion(**{**asked, "seed": seed % 2}) for seed in range(6)))
        return [a.choices[0].message.content for a in answers]

    def streamed(**more: Any) -> dict[str, Any]:
        chunks = list(litellm.completion(**{**more, **usage}))
        return {"pieces": len(chunks), "whole": litellm.stream_chunk_builder(chunks).model_dump()}

    return {
        "whole": litellm.completion(**asked).model_dump(),
        "streamed": streamed(**asked),
        "called": litellm.completion(**called).model_dump(),
        "called_streamed": streamed(**called),
        "form": litellm.completion(**{**called, "tools": None, "tool_choice": None, "response_format": FORM}).model_dump(),
        "together": asyncio.run(together()),
        "text": litellm.text_completion(
            **{**where, "model": "text-completion-openai/tiny"}, prompt="the fox", max_tokens=6, temperature=0
        ).model_dump(),
        "errors": {
            "model": error(**{**asked, "model": "hosted_vllm/other"}),
            "key": error(**{**asked, "api_key": "other"}),
            "field": error(**{**asked, "top_p": 3}),
            "length": error(**{**asked, "messages": [{"role": "user", "content": "x y" * 2000}]}),
        },
    }


if __name__ == "__main__":
    litellm.suppress_debug_info = True
    print(json.dumps(main(*sys.argv[1:]), default=str))
