"""Whole answers held to a form, by a small random model that would rather say anything else."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import api_kit
import grammar_kit
from deepinfer import LLM, AsyncLLM, PrefillDecodePair, SamplingParams
from deepinfer.cli import main
from deepinfer.errors import GrammarError, GrammarTimeoutError, InvalidRequestError, SamplingParamsError
from deepinfer.structured import tool_tag
from deepinfer.worker import grammar as masks
from process_kit import gone

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 6},
        "size": {"type": "integer", "minimum": -5, "maximum": 40},
        "tags": {"type": "array", "items": {"enum": ["red", "green", None]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "size", "tags"],
}


def is_thing(text: str) -> bool:
    thing = json.loads(text)
    return (
        list(thing) == ["name", "size", "tags"]
        and 1 <= len(thing["name"]) <= 6
        and type(thing["size"]) is int
        and -5 <= thing["size"] <= 40
        and 1 <= len(thing["tags"]) <= 3
        and set(thing["tags"]) <= {"red", "green", None}
    )


def matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


CALL = tool_tag(
    [{"name": "turn", "parameters": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}}], "required"
)
FORMS: dict[str, tuple[dict[str, Any], Callable[[str], bool]]] = {
    "schema": ({"json": SCHEMA, "any_whitespace": False}, is_thing),
    "object": ({"json_object": True, "max_whitespace": 1}, lambda text: isinstance(json.loads(text), dict)),
    "regex": ({"regex": r"(ab|[0-9]{2}){4,8}\."}, matches(r"(ab|[0-9]{2}){4,8}\.")),
    "grammar": ({"grammar": 'root ::= item ("," item){1,5} "."\nitem ::= "x" | "y" [0-9]'}, matches(r"(x|y[0-9])(,(x|y[0-9])){1,5}\.")),
    "choice": (
        {"choice": ["the quick fox", "the lazy dog", "안녕하세요"]},
        lambda text: text in ("the quick fox", "the lazy dog", "안녕하세요"),
    ),
    "tool": (
        {"structural_tag": CALL},
        matches(r'(<tool_call>\n\{"name": "turn", "arguments": \{\s*"on"\s*:\s*(true|false)\s*\}\}\n</tool_call>\n?)+'),
    ),
}
# What a random model may write for ever is cut by its limit.
ENDLESS = {"object", "tool"}


def params(form: str, seed: int, **values: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": seed, "max_tokens": 120, "structured_outputs": FORMS[form][0], **values})


@pytest.fixture(scope="module")
def llm(device: str) -> Iterator[LLM]:
    with LLM(api_kit.tiny_model(), device=device, **api_kit.SETTINGS) as made:
        yield made


@pytest.mark.parametrize("form", FORMS)
def test_answers_have_their_form(llm: LLM, form: str) -> None:
    checked = 0
    several = [params(form, seed) for seed in range(5)] + [params(form, 0, temperature=0.0), params(form, 9, temperature=3.0, n=2)]
    for output in llm.generate(["the quick"] * len(several), several):
        for answer in output.outputs:
            assert answer.error is None and answer.finish_reason in (("stop", "length") if form in ENDLESS else ("stop",)), answer
            if answer.finish_reason == "stop":
                assert FORMS[form][1](answer.text), answer.text
                checked += 1
    assert checked > (0 if form in ENDLESS else 7)


def test_free_answers_beside_them_are_what_they_are_alone(llm: LLM) -> None:
    free = SamplingParams(temperature=1.0, seed=3, max_tokens=20)
    (alone,) = llm.generate(["the lazy"], free)
    mixed = llm.generate(["the lazy", "the quick", "the lazy"], [free, params("schema", 1), free])
    assert [mixed[i].outputs[0].token_ids for i in (0, 2)] == [alone.outputs[0].token_ids] * 2
    assert is_thing(mixed[1].outputs[0].text)


def test_ends_are_those_of_the_form(llm: LLM) -> None:
    """Whatever else says when an answer may end."""
    want = llm.generate("the quick", params("regex", 4))[0].outputs[0]
    assert want.token_ids[-1] in llm.eos_token_ids and want.finish_reason == "stop"
    for values in ({"ignore_eos": True}, {"min_tokens": 100}, {"min_tokens": len(want.token_ids) + 1}):
        found = llm.generate("the quick", params("regex", 4, **values))[0].outputs[0]
        assert (found.text, found.finish_reason, found.error) == (want.text, "stop", None)
        streamed = list(llm.stream("the quick", params("regex", 4, **values)))
        assert "".join(o.outputs[0].text for o in streamed if o.outputs) == want.text
        assert streamed[-1].outputs[0].finish_reason == "stop"
    cut = llm.generate("the quick", params("regex", 4, max_tokens=3))[0].outputs[0]
    assert cut.finish_reason == "length" and want.token_ids[:3] == cut.token_ids
    stopped = llm.generate("the quick", params("regex", 4, stop=[want.text[3:5]]))[0].outputs[0]
    assert stopped.finish_reason == "stop" and want.text.startswith(stopped.text) and len(stopped.text) < 5


def test_settings_that_leave_no_token_end_their_answer_alone(llm: LLM) -> None:
    free = SamplingParams(temperature=1.0, seed=3, max_tokens=20)
    banned = SamplingParams(temperature=1.0, seed=1, max_tokens=20, bad_words=["q"], structured_outputs={"regex": "q"})
    failed, other = (o.outputs[0] for o in llm.generate(["the", "the"], [banned, free]))
    assert failed.finish_reason == "so_failed" and "bad_words" in (failed.error or "") and not failed.token_ids
    assert other.finish_reason == "length" and other.error is None


def test_a_slow_mask_ends_its_answer_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    before = llm.metrics().grammars
    monkeypatch.setattr(masks, "MOST_MASK", -1.0)
    monkeypatch.setattr(masks, "SLOW_MASK", -1.0)
    failed, other = (
        o.outputs[0] for o in llm.generate(["the", "the"], [params("schema", 0), params("schema", 0).clone(structured_outputs=None)])
    )
    assert failed.finish_reason == "so_failed" and "for one mask" in (failed.error or "") and other.error is None
    after = llm.metrics().grammars
    assert (after["so_failed"] - before["so_failed"], after["slow_fills"] - before["slow_fills"]) == (1, 1)


@pytest.mark.parametrize(
    "settings",
    [{"speculative": "ngram", "num_draft_tokens": 4}, {"num_kv_blocks": 14, "max_num_batched_tokens": 40}],
    ids=["drafts", "pressure"],
)
def test_tokens_do_not_depend_on_drafts_or_pressure(llm: LLM, device: str, settings: dict[str, Any]) -> None:
    several = [params(form, seed, temperature=(0.0, 1.0)[seed % 2], logprobs=1) for form in FORMS for seed in (1, 2)]
    prompts = [f"the quick brown fox {i}" * 3 for i in range(len(several))]
    want = llm.generate(prompts, several)
    with LLM(api_kit.tiny_model(), device=device, **{**api_kit.SETTINGS, **settings}) as other:
        found = other.generate(prompts, several)
        stats = other.metrics()
    assert [o.outputs for o in found] == [o.outputs for o in want]
    if "speculative" in settings:
        assert sum(stats.drafts_taken) > 10
    else:
        assert sum(stats.preemptions.values()) > 0


def test_errors_name_what_is_wrong_and_submit_nothing(llm: LLM) -> None:
    bad = SamplingParams(structured_outputs={"regex": "(a"})
    with pytest.raises(GrammarError, match=r"^prompt 1: Regex parsing error .* not closed"):
        llm.generate(["a", "b"], [SamplingParams(), bad])
    with pytest.raises(GrammarError, match=r"^Regex"):
        llm.stream("a", bad)
    with pytest.raises(GrammarError, match=r"^Regex"):
        llm.add_request("a", bad)
    with pytest.raises(SamplingParamsError, match="exactly one"):
        SamplingParams(structured_outputs={})
    assert not llm.has_unfinished_requests()
    made = llm.compile_grammar({"json": {"type": "integer", "not": {"const": 3}}})
    assert made.reports == ("not is not held to",)
    llm.add_request("a", SamplingParams(), grammar=made, request_id="r")
    (output,) = [o for _ in range(40) for o in llm.step()]
    assert output.request_id == "r" and re.fullmatch("-?[0-9]*", output.outputs[0].text)


def test_a_model_without_a_tokenizer_says_so(device: str) -> None:
    import engine_kit

    with (
        LLM(engine_kit.tiny_checkpoint("llama"), device=device, **api_kit.SETTINGS) as made,
        pytest.raises(GrammarError, match="pass tokenizer="),
    ):
        made.generate([[1, 2]], SamplingParams(detokenize=False, structured_outputs={"regex": "a"}))


@pytest.mark.parametrize("kind", [AsyncLLM, PrefillDecodePair])
def test_engine_processes_answer_the_same(llm: LLM, device: str, kind: type[AsyncLLM | PrefillDecodePair]) -> None:
    """Valid, malformed, hostile, cancelled, valid; then nothing is left."""
    several = [params(form, 7, n=2 if form == "schema" else 1) for form in FORMS]
    want = [o.outputs for o in llm.generate(["the quick"] * len(several), several)]

    async def main_() -> None:
        made = kind(api_kit.tiny_model(), device=device, grammar_timeout=8.0, **api_kit.SETTINGS)
        try:
            await made.ready()

            async def answer(p: SamplingParams) -> Any:
                (last,) = [o async for o in made.generate("the quick", p, mode="final")]
                return last.outputs

            assert await asyncio.gather(*map(answer, several)) == want
            with pytest.raises(GrammarError, match="not closed"):
                await answer(SamplingParams(structured_outputs={"regex": "(a"}))
            hostile = grammar_kit.ENDLESS
            waiting = asyncio.create_task(answer(SamplingParams(structured_outputs=hostile)))
            await asyncio.sleep(0.3)
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waiting
            stats = made.structured_stats()
            assert (stats["cancelled"], stats["failures"]) == (1, 1)
            if kind is AsyncLLM:
                with pytest.raises(GrammarTimeoutError, match=r"more than 8 s|in 8 s"):
                    await answer(SamplingParams(structured_outputs=hostile))
            prepared = await made.compile_grammar({"regex": "[0-9]{3}"})
            (only,) = [o async for o in made.generate("the", SamplingParams(), mode="final", grammar=prepared)]
            assert re.fullmatch("[0-9]{3}", only.outputs[0].text)
            assert await answer(several[0]) == want[0]
            assert not made._boxes and len(made._outputs) == 0
            pids = made._grammars.worker_pids()  # type: ignore[union-attr]
            assert pids
        finally:
            await made.aclose()
        assert all(gone(pid, 5) for pid in pids)

    asyncio.run(asyncio.wait_for(main_(), 240))


def test_an_abort_ends_a_request_whose_grammar_is_compiled(device: str) -> None:
    """And the compilation, once nobody else waits for it."""
    form = SamplingParams(structured_outputs=grammar_kit.ENDLESS)

    async def main_() -> None:
        async with AsyncLLM(api_kit.tiny_model(), device=device, grammar_timeout=60, **api_kit.SETTINGS) as made:

            async def ask(name: str) -> list[Any]:
                return [o async for o in made.generate("the quick", form, request_id=name)]

            asking = {name: asyncio.create_task(ask(name)) for name in ("first", "second")}
            while made.structured_stats()["joined"] < 1:
                await asyncio.sleep(0.01)
            with pytest.raises(InvalidRequestError, match="in use"):
                await made.prepare("the", SamplingParams(), request_id="first")
            for name, cancelled in (("first", 0), ("second", 1)):
                await made.abort(name)
                await made.abort(name)
                (last,) = await asyncio.wait_for(asking[name], 10)
                assert last.finished and last.request_id == name
                assert [(o.finish_reason, o.text, o.token_ids) for o in last.outputs] == [("abort", "", [])]
                assert made.structured_stats()["cancelled"] == cancelled
            asking["second"] = asyncio.create_task(ask("second"))
            while made.structured_stats()["cache_misses"] < 2:
                await asyncio.sleep(0.01)
            await made.abort("second")
            asking["second"].cancel()  # whoever asked for it goes away in the same moment
            assert isinstance((await asyncio.gather(asking["second"], return_exceptions=True))[0], asyncio.CancelledError)
            assert made.structured_stats()["cancelled"] == 2
            assert not made._boxes and not made._preparing and len(made._outputs) == 0
            (whole,) = [o async for o in made.generate("the", SamplingParams(max_tokens=2), request_id="first", mode="final")]
            assert whole.outputs[0].finish_reason == "length"

    asyncio.run(asyncio.wait_for(main_(), 120))


def test_a_pair_makes_answers_again_in_a_new_process(llm: LLM, device: str) -> None:
    """The new life of a killed process has to learn vocabulary and grammar first."""
    p = params("schema", 5)
    want = llm.generate("the quick", p)[0].outputs[0]

    async def main_() -> None:
        async with PrefillDecodePair(api_kit.tiny_model(), device=device, **api_kit.SETTINGS) as pair:
            outputs = []
            async for output in pair.generate("the quick", p):
                if not outputs:
                    pair._completion.line.child.kill()
                outputs.append(output)
            assert outputs[-1].outputs[0] == want and outputs[-1].num_reruns <= 1

    asyncio.run(asyncio.wait_for(main_(), 240))


@grammar_kit.despite_load
def test_batches_hold_lines_to_their_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setenv("XGRAMMAR_TIMEOUT", "3")
    lines: dict[str, dict[str, Any]] = {
        "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}},
        "regex": {"response_format": {"type": "regex", "pattern": "[0-9]{3}"}},
        "fields": {"structured_outputs": {"choice": ["the fox"]}},
        "strict": {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}, "strict": True}}},
        "malformed": {"structured_outputs": {"grammar": "root ::= x"}},
        "hostile": {"structured_outputs": grammar_kit.ENDLESS},
        "free": {},
    }
    body = {"prompt": "the quick", "max_tokens": 120, "temperature": 1.0, "seed": 1}
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [{"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {**body, **more}} for name, more in lines.items()]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    target.unlink(missing_ok=True)
    options = ["--num-kv-blocks", "64", "--dtype", "float32", "--device", device, "--quiet"]
    start = time.monotonic()
    assert main(["batch", "--model", api_kit.tiny_model(), *options, str(source), str(target)]) == 0
    assert time.monotonic() - start < 120
    found = {row["custom_id"]: row for row in map(json.loads, target.read_text(encoding="utf-8").splitlines())}
    text = {name: row["response"]["body"]["choices"][0]["text"] for name, row in found.items() if row["response"]}
    assert set(text) == {"schema", "regex", "fields", "free"}
    assert is_thing(text["schema"]) and re.fullmatch("[0-9]{3}", text["regex"]) and text["fields"] == "the fox"
    codes = {name: (row["error"]["code"], row["error"]["line"]) for name, row in found.items() if row["error"]}
    hostile = codes.pop("hostile")
    assert codes == {"strict": ("grammar", 4), "malformed": ("grammar", 5)}
    assert hostile in [("grammar_timeout", 6), ("grammar_busy", 6)]  # the latter beside others that want the processors


def test_the_command_line_takes_forms(tmp_path: Path, capsys: pytest.CaptureFixture[str], device: str) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(SCHEMA), encoding="utf-8")
    base = [
        "generate",
        "--model",
        api_kit.tiny_model(),
        "--num-kv-blocks",
        "64",
        "--dtype",
        "float32",
        "--device",
        device,
        "--quiet",
        "--seed",
        "3",
    ]
    assert main([*base, "--json-schema", str(schema), "a thing"]) == 0
    assert is_thing(capsys.readouterr().out)
    for more, said in (
        (["--json-schema", str(tmp_path / "none.json")], "none.json cannot be read"),
        (["--json-schema", str(schema), "--regex", "a"], "exclude each other"),
        (["--regex", "(a"], "not closed"),
    ):
        assert main([*base, *more, "a"]) == 2
        assert said in capsys.readouterr().err
