"""litellm and the `llm` command against a real server that asks for a key: what they show is what the server says over plain HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import programs_kit as kit
from server_kit import Served, serving

pytestmark = kit.needs_clients
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content or '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Says little of tools: the tiny model has 512 tokens, each hardly more than a character."""
HI = [{"role": "user", "content": "the quick brown fox"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(None, "--served-model-name", "tiny", "--api-key", kit.KEY, "--chat-template", TEMPLATE) as made:
        yield made


def said(server: Served, path: str = "/v1/chat/completions", **fields: Any) -> Any:
    """The server's own words."""
    answer = server.post(path, {"model": "tiny", **fields}, headers={"authorization": f"Bearer {kit.KEY}"})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture(scope="module")
def litellm(server: Served, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All that litellm brought: it is imported once, which takes long."""
    program = str(Path(__file__).parent / "with_litellm.py")
    text = kit.run(program, server.url, kit.KEY, home=tmp_path_factory.mktemp("litellm"), LITELLM_LOCAL_MODEL_COST_MAP="True")
    made: dict[str, Any] = json.loads(text.splitlines()[-1])
    return made


def test_litellm_brings_answers_whole_and_streamed(server: Served, litellm: dict[str, Any]) -> None:
    want = said(server, messages=HI, seed=3, temperature=0.8, max_tokens=8)
    assert want["choices"][0]["message"]["content"]
    for made in (litellm["whole"], litellm["streamed"]["whole"]):
        (choice,) = made["choices"]
        assert choice["message"]["content"] == want["choices"][0]["message"]["content"]
        assert choice["finish_reason"] == want["choices"][0]["finish_reason"]
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert made["usage"][name] == want["usage"][name]
    assert litellm["streamed"]["pieces"] > 3
    first, second = (said(server, messages=HI, seed=s, temperature=0.8, max_tokens=8)["choices"][0]["message"]["content"] for s in (0, 1))
    assert litellm["together"] == [first, second] * 3 and first != second
    text = said(server, "/v1/completions", prompt="the fox", max_tokens=6, temperature=0)
    assert litellm["text"]["choices"][0]["text"] == text["choices"][0]["text"]


def test_litellm_brings_tool_calls_and_forms(litellm: dict[str, Any]) -> None:
    whole, streamed = (
        [c["function"] for c in made["choices"][0]["message"]["tool_calls"]]
        for made in (litellm["called"], litellm["called_streamed"]["whole"])
    )
    assert whole == streamed and {f["name"] for f in whole} == {"weather"}
    assert all(json.loads(f["arguments"])["unit"] in ("C", "F") for f in whole)
    assert (
        litellm["called"]["choices"][0]["finish_reason"]
        == litellm["called_streamed"]["whole"]["choices"][0]["finish_reason"]
        == "tool_calls"
    )
    assert json.loads(litellm["form"]["choices"][0]["message"]["content"])["unit"] in ("C", "F")


@pytest.mark.parametrize(
    ("case", "kind"),
    [("model", "NotFoundError"), ("key", "AuthenticationError"), ("field", "BadRequestError"), ("length", "ContextWindowExceededError")],
)
def test_litellm_tells_errors_apart(litellm: dict[str, Any], case: str, kind: str) -> None:
    assert litellm["errors"][case][0] == kind


@pytest.fixture(scope="module")
def llm_home(server: Served, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `llm` is told of the server."""
    home = tmp_path_factory.mktemp("llm")
    model = {"model_name": "tiny", "api_base": f"{server.url}/v1", "api_key_name": "deepinfer", "supports_schema": True, "reasoning": True}
    models = [{"model_id": "served", **model}, {"model_id": "responding", "responses": True, **model}]
    (home / "extra-openai-models.yaml").write_text(json.dumps(models))  # which YAML contains
    return home


def llm(home: Path, model: str, *options: str, prompt: str = "the quick brown fox", **values: object) -> str:
    """What `llm` prints."""
    chosen = [text for name, value in values.items() for text in ("-o", name, str(value))]
    return kit.run("-m", "llm", "-m", model, "--key", kit.KEY, *options, *chosen, prompt, home=home, LLM_USER_PATH=str(home))


def test_llm_answers_streamed_and_not(server: Served, llm_home: Path) -> None:
    want = said(server, messages=HI, seed=3, temperature=0.8, max_tokens=8)
    for options in ((), ("--no-stream",)):
        assert llm(llm_home, "served", *options, seed=3, temperature=0.8, max_tokens=8) == want["choices"][0]["message"]["content"] + "\n"
    logged = json.loads(kit.run("-m", "llm", "logs", "list", "--json", "-n", "0", home=llm_home, LLM_USER_PATH=str(llm_home)))
    counts = [(entry["input_tokens"], entry["output_tokens"]) for entry in logged]
    assert counts == [(want["usage"]["prompt_tokens"], want["usage"]["completion_tokens"])] * 2


def test_llm_answers_through_the_other_protocol(server: Served, llm_home: Path) -> None:
    want = said(server, messages=HI, temperature=0, max_tokens=20)["choices"][0]["message"]["content"]
    assert llm(llm_home, "responding", temperature=0, max_tokens=20) == want + "\n"


def test_llm_holds_answers_to_a_form(llm_home: Path) -> None:
    made = llm(llm_home, "served", "--schema", "sunny bool, windy bool", reasoning_effort="none", max_tokens=100)
    assert all(type(v) is bool for v in json.loads(made).values()) and json.loads(made).keys() == {"sunny", "windy"}
