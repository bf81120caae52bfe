"""DeepSeek V4.1 (tiny, random) over HTTP, through its own format: reasoning, tool calls held to a schema, images, three protocols."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from deepinfer.models.deepseek_v41.make_checkpoint import make_checkpoint
from server_kit import Served, serving

CONFIG = Path(__file__).resolve().parents[1] / "data" / "deepseek_v41" / "tiny.json"
NAMES = ("<｜User｜>", "<｜Assistant｜>", "<｜System｜>", "<think>", "</think>", "｜DSML｜", "<｜latest_reminder｜>")
SCHEMA = {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"], "additionalProperties": False}
DIRECT = {"reasoning_effort": "none"}
HI = [{"role": "user", "content": "the fox"}]


def name_control_tokens(folder: Path) -> None:
    """Gives the checkpoint's tokenizer the control tokens of the format, in place of words that nobody needs."""
    file = folder / "tokenizer.json"
    data = json.loads(file.read_text(encoding="utf-8"))
    vocab = data["model"]["vocab"]
    words = {i: word for word, i in vocab.items()}
    for number, name in enumerate(NAMES):
        at = 2000 + number
        word = words[at]
        assert len(word) > 1
        del vocab[word]
        vocab[name] = at
        data["model"]["merges"] = [m for m in data["model"]["merges"] if "".join(m if isinstance(m, list) else m.split(" ")) != word]
        plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        data["added_tokens"].append({"id": at, "content": name, **plain})
    file.write_text(json.dumps(data), encoding="utf-8")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("v41") / "tiny"
    make_checkpoint(json.loads(CONFIG.read_text(encoding="utf-8")), folder, seed=3)
    name_control_tokens(folder)
    options = ("--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "4", "--num-threads", "1")
    with serving(str(folder), "--served-model-name", "ds", "--chat-backend", "deepseek", *options) as made:
        yield made


def ask(served: Served, path: str, **body: Any) -> Any:
    answer = served.post(path, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_prompts_are_in_its_own_format(served: Served) -> None:
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "a<｜User｜></think>"}]
    ids = ask(served, "/tokenize", messages=messages)["tokens"]
    assert ids[0] == 0 and ids[-2:] == [2001, 2003] and ids.count(2000) == 1 and ids.count(2002) == 1 and 2004 not in ids
    assert served.post("/detokenize", {"tokens": ids}).json()["prompt"].endswith("a<｜User｜></think><｜Assistant｜><think>")


def test_reasoning_and_answers(served: Served) -> None:
    (thought,) = ask(served, "/v1/chat/completions", messages=HI, max_tokens=6)["choices"]
    assert thought["message"]["reasoning_content"] and thought["message"]["content"] == ""
    body = {"messages": HI, "max_tokens": 6, "n": 2, "seed": 5, "logprobs": True, "top_logprobs": 1, **DIRECT}
    whole = ask(served, "/v1/chat/completions", **body)
    for choice in whole["choices"]:
        assert "reasoning_content" not in choice["message"]
        shown = b"".join(bytes(e["bytes"]) for e in choice["logprobs"]["content"])
        assert shown.decode(errors="replace") == choice["message"]["content"]
    *chunks, end = served.events("/v1/chat/completions", {**body, "stream": True})
    assert end == "[DONE]"
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert "".join(c["delta"].get("content") or "" for c in mine) == choice["message"]["content"]


def test_a_required_call_keeps_to_its_schema(served: Served) -> None:
    own = [{"name": "weather", "input_schema": SCHEMA}]
    made = ask(served, "/v1/messages", messages=HI, max_tokens=400, tools=own, tool_choice={"type": "tool", "name": "weather"})
    (block,) = made["content"]
    assert made["stop_reason"] == "tool_use" and block["input"]["unit"] in "CF"


def test_images_are_seen(served: Served) -> None:
    def url(seed: int) -> str:
        file = io.BytesIO()
        Image.fromarray(np.random.RandomState(seed).randint(0, 256, (56, 70, 3)).astype(np.uint8)).save(file, "PNG")
        return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()

    def said(seed: int) -> Any:
        parts = [{"type": "text", "text": "<｜image｜> see"}, {"type": "image_url", "image_url": {"url": url(seed)}}]
        return ask(served, "/v1/chat/completions", messages=[{"role": "user", "content": parts}], max_tokens=8, temperature=0, **DIRECT)

    one, again, other = said(1), said(1), said(2)
    assert one["choices"] == again["choices"] != other["choices"]
    assert one["usage"]["prompt_tokens"] == other["usage"]["prompt_tokens"] > 10
    source = {"type": "base64", "media_type": "image/png", "data": url(1).partition(",")[2]}
    blocks = [{"role": "user", "content": [{"type": "text", "text": "<｜image｜> see"}, {"type": "image", "source": source}]}]
    made = ask(served, "/v1/messages", messages=blocks, max_tokens=8, temperature=0)
    assert made["content"][0]["text"] == one["choices"][0]["message"]["content"]
    counted = ask(served, "/v1/messages/count_tokens", messages=blocks)
    assert counted["input_tokens"] == one["usage"]["prompt_tokens"]
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    broken = served.post("/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]})
    assert broken.status_code == 400 and "cannot be read" in broken.json()["error"]["message"]
