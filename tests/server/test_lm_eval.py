"""lm-evaluation-harness against a real server: what it scores is what transformers computes, its own tokenizer or the server's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import api_kit
import programs_kit as kit
from server_kit import Served, serving

pytestmark = kit.needs_clients
TOLERANCE = 1e-3
"""Of the log-probability of a whole answer: sums of up to 255 float32 values that two implementations round differently."""
LONGEST = 256
"""Tokens that the program may send; the longest text has to be cut for it."""
DATA = kit.ROOT / "tests/data/lm_eval"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(None, "--served-model-name", "tiny", "--api-key", kit.KEY) as made:
        yield made


def evaluate(home: Path, model: str, url: str, *options: str, tasks: str, **more: object) -> dict[str, Any]:
    """Runs it: results by task, and what it asked and got, `samples` by task."""
    values = {"model": "tiny", "base_url": url, "num_concurrent": 2, "max_retries": 1, "max_length": LONGEST, **more}
    kit.run(
        *("-m", "lm_eval", "--model", model, "--model_args", ",".join(f"{k}={v}" for k, v in values.items()), *options),
        *("--tasks", tasks, "--include_path", "tests/data/lm_eval", "--output_path", str(home / "out"), "--log_samples"),
        home=home,
        OPENAI_API_KEY=kit.KEY,
    )
    (results,) = (home / "out").rglob("results_*.json")
    made: dict[str, Any] = json.loads(results.read_text())["results"]
    made["samples"] = {}
    for task in tasks.split(","):
        (path,) = (home / "out").rglob(f"samples_{task}_*.jsonl")
        made["samples"][task] = [json.loads(line) for line in path.read_text().splitlines()]
    return made


@pytest.fixture(scope="module")
def local(server: Served, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All tasks, with the tokenizer's files at hand."""
    return evaluate(
        tmp_path_factory.mktemp("local"),
        "local-completions",
        f"{server.url}/v1/completions",
        *("--batch_size", "4"),
        tasks="deepinfer_choice,deepinfer_text,deepinfer_answer",
        tokenizer=api_kit.tiny_model(),
        tokenizer_backend="huggingface",
    )


@pytest.fixture(scope="module")
def score() -> Callable[[list[int], int], tuple[float, bool]]:
    """Log-probability of the last tokens of some after the first ones, and whether each is the likeliest, by transformers."""
    import transformers as hf

    model = hf.AutoModelForCausalLM.from_pretrained(api_kit.tiny_model(), dtype=torch.float32).eval()

    @torch.no_grad()
    def scored(ids: list[int], count: int) -> tuple[float, bool]:
        rows = torch.log_softmax(model(torch.tensor([ids])).logits[0, -count - 1 : -1].double(), -1)
        last = torch.tensor(ids[-count:])
        return float(rows.gather(1, last[:, None]).sum()), bool((rows.argmax(-1) == last).all())

    return scored


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    import transformers as hf

    return hf.AutoTokenizer.from_pretrained(api_kit.tiny_model())


def check_choices(samples: list[dict[str, Any]], score: Callable[[list[int], int], tuple[float, bool]], tokenizer: Any) -> None:
    """Every answer to choose from has its log-probability."""
    assert len(samples) == len((DATA / "choice.jsonl").read_text().splitlines())
    for sample in samples:
        assert len(sample["resps"]) == len(sample["doc"]["choices"])
        for asked, ((value, greedy),) in zip(sample["arguments"].values(), sample["resps"], strict=True):
            context, ids = tokenizer.encode(asked["arg_0"]), tokenizer.encode(asked["arg_0"] + asked["arg_1"])
            want = score(ids, len(ids) - len(context))
            assert float(value) == pytest.approx(want[0], abs=TOLERANCE) and greedy == str(want[1])


def test_scores_of_choices_are_those_of_transformers(local: dict[str, Any], score: Any, tokenizer: Any) -> None:
    samples = local["samples"]["deepinfer_choice"]
    check_choices(samples, score, tokenizer)
    best = [max(range(3), key=lambda i: float(s["resps"][i][0][0])) for s in samples]
    right = sum(b == s["doc"]["answer"] for b, s in zip(best, samples, strict=True))
    assert local["deepinfer_choice"]["acc,none"] == pytest.approx(right / len(samples))


def test_scores_of_texts_are_those_of_transformers(local: dict[str, Any], score: Any, tokenizer: Any) -> None:
    window = LONGEST - 2  # tokens of a text at a time: one that comes before, one that is made, must fit as well
    samples = local["samples"]["deepinfer_text"]
    total, cut = 0.0, 0
    for sample in samples:
        ids = [tokenizer.bos_token_id, *tokenizer.encode(sample["doc"]["text"])]
        want = 0.0
        for start in range(1, len(ids), window):
            part = ids[start : start + window]
            want += score([ids[start - 1], *part] if len(part) == window else ids[-window - 1 :], len(part))[0]
        assert float(sample["resps"][0][0]) == pytest.approx(want, abs=TOLERANCE * -(-len(ids) // window))
        total, cut = total + want, cut + (len(ids) > window)
    assert 0 < cut < len(samples)
    size = sum(len(s["doc"]["text"].encode()) for s in samples)
    assert local["deepinfer_text"]["bits_per_byte,none"] == pytest.approx(-total / size / 0.6931471805599453, abs=1e-5)


def greedy(server: Served, path: str, **fields: Any) -> Any:
    """The server's own answer."""
    body = {"model": "tiny", "temperature": 0, "max_tokens": 16, "stop": ["\n"], **fields}
    answer = server.post(path, body, headers={"authorization": f"Bearer {kit.KEY}"})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def test_answers_are_the_servers(server: Served, local: dict[str, Any]) -> None:
    samples = local["samples"]["deepinfer_answer"]
    assert len(samples) == 3
    for sample in samples:
        assert sample["resps"] == [[greedy(server, "/v1/completions", prompt=sample["doc"]["question"])["text"]]]


def test_the_servers_tokenizer_gives_the_same_scores(
    server: Served, local: dict[str, Any], score: Any, tokenizer: Any, tmp_path: Path
) -> None:
    made = evaluate(
        tmp_path,
        "local-completions",
        f"{server.url}/v1/completions",
        tasks="deepinfer_choice,deepinfer_text,deepinfer_answer",
        tokenizer_backend="remote",
        auth_token=kit.KEY,
    )
    check_choices(made["samples"]["deepinfer_choice"], score, tokenizer)
    for task, samples in local["samples"].items():
        assert [s["resps"] for s in made["samples"][task]] == [s["resps"] for s in samples]


def test_conversations_are_answered(server: Served, tmp_path: Path) -> None:
    made = evaluate(
        tmp_path, "local-chat-completions", f"{server.url}/v1/chat/completions", "--apply_chat_template", tasks="deepinfer_answer"
    )
    samples = made["samples"]["deepinfer_answer"]
    assert len(samples) == 3
    for sample in samples:
        messages = [{"role": "user", "content": sample["doc"]["question"]}]
        assert sample["resps"] == [[greedy(server, "/v1/chat/completions", messages=messages)["message"]["content"]]]
