"""Image parts in chats: placeholders stand where the parts stood, come from the template alone, and every other case is a typed error."""

from __future__ import annotations

import asyncio
import base64
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepinfer import LLM, AsyncLLM, SamplingParams
from deepinfer.engine.chat_template import ChatTemplate
from deepinfer.engine.config import EngineConfig
from deepinfer.engine.image_input import ImageRules
from deepinfer.engine.input_processor import InputProcessor, ModelLimits
from deepinfer.engine.text_side import load_text_side
from deepinfer.errors import ImageError, InvalidRequestError
from deepinfer.models import resolve_model
from deepinfer.models.deepseek_v41.image_input import ImageSizes
from deepinfer.models.images import Pixels

IMAGE, MARK = 2046, "<｜image｜>"
PARTS = (
    "{% for m in messages %}{{ '<｜begin▁of▁sentence｜>' }}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}{{ '<｜image｜>' }}{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
ALONE = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
PRINTS = "{% for m in messages %}{{ m.content }}{% endfor %}"
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SETTINGS: dict[str, Any] = {"dtype": "float32", "quiet": True, "max_model_len": 256, "max_num_seqs": 2, "num_threads": 1}


def picture(height: int, width: int, seed: int = 0) -> Pixels:
    return np.random.RandomState([seed, height, width]).randint(0, 256, (height, width, 3)).astype(np.uint8)


ONE, TWO = picture(56, 70), picture(42, 42)


@pytest.fixture(scope="module")
def text(made: Path) -> InputProcessor:
    """The text side of the checkpoint with a template that knows parts; no weights."""
    config = EngineConfig(model=str(made), chat_template=PARTS)
    side = load_text_side(config, resolve_model(str(made)))
    rules = ImageRules(ImageSizes(IMAGE, 64, 14, 3, 1764), most=3, most_pixels=10_000)
    return side.input_processor(ModelLimits(256, 2048, rules))


def image(source: Any) -> dict[str, Any]:
    return {"type": "image", "image": source}


def url(address: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": address}}


def said(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def test_placeholders_stand_where_the_parts_stood(text: InputProcessor) -> None:
    prompt = text.chat_prompt([*user(said("look: "), image(ONE), said(" and "), image(TWO)), {"role": "user", "content": "so?"}])
    assert prompt["prompt"].startswith(f"<｜begin▁of▁sentence｜>user: look: {MARK} and {MARK}<")
    ids = list(prompt["prompt_token_ids"])
    at = [place for place, i in enumerate(ids) if i == IMAGE]
    between = text.tokenizer.decode(ids[at[0] + 1 : at[1]])
    assert len(at) == 2 and between == " and "
    assert [a is b for a, b in zip(prompt["images"], (ONE, TWO), strict=True)] == [True, True]
    request, _ = text.prepare(prompt, GREEDY, "r", stream=False)
    assert [(span.start, span.image.tokens) for span in request.images] == [(at[0], 8), (at[1] + 7, 4)]


@pytest.mark.parametrize("role", ["user", "assistant", "system", "tool"])
@pytest.mark.parametrize("where", ["beside", "alone", "half"])
def test_nobodys_words_become_a_placeholder(text: InputProcessor, role: str, where: str) -> None:
    words = {"beside": f"a {MARK} b", "alone": MARK, "half": "<｜image"}[where]
    spoof: list[dict[str, Any]] = [{"role": role, "content": words}, *user(image(ONE), said(f"image｜> {MARK}"))]
    ids = list(text.chat_prompt(spoof)["prompt_token_ids"])
    assert ids.count(IMAGE) == 1
    whole = text.tokenizer.decode(ids, skip_special_tokens=False)
    assert words in whole and whole.index(words) < whole.rindex(f"image｜> {MARK}")
    plain = text.chat_prompt([{"role": role, "content": words}])
    assert IMAGE not in plain["prompt_token_ids"] and "images" not in plain


def test_data_urls_are_read_and_nothing_is_fetched(text: InputProcessor) -> None:
    data = b"\x89PNG some bytes"
    code = base64.b64encode(data).decode()
    for address in (f"data:image/png;base64,{code}", f"DATA:image/x;BASE64,{code}"):
        for part in (url(address), {"type": "image_url", "image_url": address}):
            assert text.chat_prompt(user(part))["images"] == [data]
    for address, why in (
        ("https://example.org/x.png", "nothing is fetched"),
        ("file:///etc/hosts", "nothing is fetched"),
        ("/etc/hosts", "nothing is fetched"),
        ("data:text/plain;base64,aaaa", "does not begin with"),
        (f"data:image/png,{code}", "does not begin with"),
        ("data:image/png;base64", "does not begin with"),
        ("data:image/png;base64,a*b=", "no base64"),
        ("data:image/png;base64," + "A" * 160_000, "over 105536 bytes"),
        ("", "without 'url'"),
        (None, "without 'url'"),
    ):
        with pytest.raises(ImageError, match=why) as told:
            text.chat_prompt(user(url(address)))
        assert "\n" not in str(told.value) and len(str(told.value)) < 500


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ((image(None),), "without 'image'"),
        ((image(ONE),) * 4, "4 images, max_images_per_prompt is 3"),
        (({"type": "input_audio"}, image(ONE)), "input_audio"),
        ((said("x"), 7), "'int'"),
        (({"type": "text"}, image(ONE)), "'text'"),
    ],
)
def test_parts_that_cannot_be_read(text: InputProcessor, parts: tuple[Any, ...], why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why):
        text.chat_prompt(user(*parts))


@pytest.mark.parametrize(("template", "why"), [(ALONE, "may be for text alone"), (PRINTS, "0 placeholders")])
def test_a_template_without_a_place_for_images_says_so(text: InputProcessor, template: str, why: str) -> None:
    other = InputProcessor(text.tokenizer, ChatTemplate(template, text.tokenizer), limits=text.limits)
    with pytest.raises(ImageError, match=f"{why}.*chat_template="):
        other.chat_prompt(user(said("x"), image(ONE)))
    assert other.chat_prompt(user(said("x"), said("y")))["prompt_token_ids"]


def test_models_without_images_or_templates_say_so(text: InputProcessor) -> None:
    plain = InputProcessor(text.tokenizer, text.chat_template, limits=ModelLimits(256, 2048))
    with pytest.raises(ImageError, match="takes no images"):
        plain.chat_prompt(user(image(ONE)))
    with pytest.raises(InvalidRequestError, match="no chat template"):
        InputProcessor(text.tokenizer, None, limits=text.limits).chat_prompt(user(image(ONE)))


@pytest.fixture(scope="module")
def llm(made: Path) -> Iterator[LLM]:
    with LLM(model=str(made), chat_template=PARTS, **SETTINGS) as made_llm:
        yield made_llm


def test_a_chat_with_an_image_is_answered(made: Path, llm: LLM) -> None:
    """As the same prompt of ids is, in this process and in another, whether or not that is up."""
    messages = user(said("see"), image(ONE))
    ids = llm.chat_prompt(messages)["prompt_token_ids"]
    (want,) = llm.generate([{"prompt_token_ids": ids, "images": [ONE]}], GREEDY)
    (found,) = llm.chat(messages, GREEDY)
    (other,) = llm.chat(user(said("see"), image(picture(56, 70, 9))), GREEDY.clone(logprobs=1))
    assert found.outputs[0].token_ids == want.outputs[0].token_ids
    assert other.prompt_token_ids == found.prompt_token_ids
    with pytest.raises(ImageError, match="of type int"):
        llm.chat(user(image(7)), GREEDY)

    async def ask() -> list[int]:
        async with AsyncLLM(model=str(made), chat_template=PARTS, **SETTINGS) as there:
            if there._inputs is None:
                with pytest.raises(InvalidRequestError, match="ready"):
                    there.chat_prompt(messages)
            async for output in there.chat(messages, GREEDY, mode="final"):
                answer = output.outputs[0].token_ids
            assert there.chat_prompt(messages)["prompt_token_ids"] == ids
            return answer

    assert asyncio.run(ask()) == want.outputs[0].token_ids


def test_the_command_shows_images(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    image_module = pytest.importorskip("PIL.Image")
    from deepinfer.cli.chat import Conversation

    path = tmp_path / "a picture.png"
    image_module.fromarray(ONE).save(path)
    (want,) = llm.chat(user(image(ONE), said("see")), GREEDY)
    chat = Conversation(llm, GREEDY, None)
    for line in ("/image", f"/image {tmp_path / 'none.png'}", f"/image {path}"):
        assert chat._command(line)
    chat._say("see")
    assert chat.messages[1]["content"] == want.outputs[0].text
    assert "no such file" in capsys.readouterr().err
    assert "PIL" in sys.modules
