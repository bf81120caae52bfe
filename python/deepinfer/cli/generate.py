"""``deepinfer generate``: one prompt in, the answer streamed to stdout."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from deepinfer.cli import console, options
from deepinfer.sampling import SamplingParams

if TYPE_CHECKING:
    from deepinfer.llm import LLM
    from deepinfer.outputs import CompletionOutput, PositionLogprobs, RequestOutput

USAGE = "--model MODEL [options] [PROMPT|-]"
EXAMPLES = (
    'deepinfer generate --model smollm2 --temperature 0 "What is the capital of France?"',
    'deepinfer generate --model smollm2 --raw --max-tokens 40 --stop . "Once upon a time"',
    'deepinfer generate --model smollm2 --regex "[0-9]+" "What is two and two?"',
    "deepinfer generate --model smollm2 --json - < question.txt",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the prompt; - (or a pipe and no PROMPT) reads stdin")
    parser.add_argument(
        "--raw",
        action="store_true",
        help="give the prompt to the model as it is; otherwise a model with a chat template gets it as a user's message",
    )
    parser.add_argument("--system", metavar="TEXT", help="system message put before the prompt")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end: text, token ids, finish reason, timing")
    options.add_trace_option(parser)
    options.add_engine_options(parser)
    options.add_sampling_options(parser)
    options.add_structured_options(parser)


def run(args: argparse.Namespace) -> int:
    """Answers the prompt; streams unless ``--json`` or several answers (``-n``) were asked for."""
    prompt = _read_prompt(args)
    values = options.sampling_arguments(args)
    if args.raw and args.system is not None:
        raise console.UserError("--raw uses no chat template, so --system has no place to go; drop one of them")
    if not args.json and ("logprobs" in values or "prompt_logprobs" in values):
        raise console.UserError("log-probabilities are printed with --json only; add it, or drop --logprobs and --prompt-logprobs")
    engine = options.engine_arguments(args)
    SamplingParams(**values)  # a mistake in these shows before the model is loaded
    start = time.monotonic()
    from deepinfer import LLM

    with LLM(**engine) as llm:
        loaded = time.monotonic()
        if args.trace is not None:
            llm.trace(args.trace)
        params = sampling_params(llm, values)
        request = prompt if args.raw or (not llm.has_chat_template and args.system is None) else conversation(llm, args.system, prompt)
        if args.json:
            output = llm.generate(request, params, use_tqdm=False)[0]
            console.print_json({"model": args.model, **as_json(output), "load_seconds": round(loaded - start, 4)})
        elif params.n > 1:
            _print_answers(llm.generate(request, params, use_tqdm=False)[0])
        else:
            _stream(llm, request, params)
    return console.EXIT_OK


def sampling_params(llm: LLM, values: dict[str, Any]) -> SamplingParams:
    """The values given on the command line over the model's own defaults; without ``--max-tokens``, up to the model's length."""
    return llm.default_sampling_params(**{"max_tokens": None, **values})


def conversation(llm: LLM, system: str | None, prompt: str) -> Any:
    """A prompt as the user's message of a conversation, rendered by the model's chat template."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    return llm.chat_prompt([*messages, {"role": "user", "content": prompt}])


def _read_prompt(args: argparse.Namespace) -> str:
    prompt: str | None = args.prompt
    if prompt is None and sys.stdin.isatty():
        raise console.UserError("no prompt given; pass it as an argument, or - to read stdin")
    if prompt is None or prompt == "-":
        # A file's last line break is not part of what is asked.
        prompt = console.read_stdin().removesuffix("\n").removesuffix("\r")
    if not prompt:
        raise console.UserError("the prompt is empty; write at least one character")
    return prompt


def _stream(llm: LLM, request: Any, params: SamplingParams) -> None:
    from deepinfer.engine.step_log import keep_off

    last = ""
    with keep_off(console.line_open):
        for output in llm.stream(request, params):
            for answer in output.outputs:
                if answer.text:
                    console.write_out(answer.text)
                    last = answer.text
                check_answer(answer)
    if not last.endswith("\n"):
        console.write_out("\n")


def _print_answers(output: RequestOutput) -> None:
    for answer in output.outputs:
        check_answer(answer)
        console.write_out(f"[{answer.index + 1}/{len(output.outputs)}]\n{answer.text}\n")


def check_answer(answer: CompletionOutput) -> None:
    """Raises RunError for an answer that the engine could not finish."""
    if answer.finish_reason in ("error", "so_failed"):
        raise console.RunError(answer.error or "the engine failed while generating")


def as_json(output: RequestOutput) -> dict[str, Any]:
    """A finished output as JSON values; times in seconds, from the request's submission."""
    for answer in output.outputs:
        check_answer(answer)
    metrics = output.metrics
    generated = sum(len(a.token_ids) for a in output.outputs)
    total, first = metrics.end_to_end, metrics.time_to_first_token
    decode = None if total is None or first is None else total - first
    value: dict[str, Any] = {
        "text": output.outputs[0].text,
        "token_ids": output.outputs[0].token_ids,
        "finish_reason": output.outputs[0].finish_reason,
        "stop_reason": output.outputs[0].stop_reason,
        "prompt_token_ids": output.prompt_token_ids,
        "cached_tokens": output.num_cached_tokens,
        "timing": {
            "queue_seconds": _rounded(metrics.time_in_queue),
            "first_token_seconds": _rounded(first),
            "total_seconds": _rounded(total),
            "tokens_per_second": round((generated - len(output.outputs)) / decode, 2) if decode else None,
        },
    }
    if output.outputs[0].logprobs is not None:
        value["logprobs"] = [_position(p) for p in output.outputs[0].logprobs]
    if output.prompt_logprobs is not None:
        value["prompt_logprobs"] = [None if p is None else _position(p) for p in output.prompt_logprobs]
    if len(output.outputs) > 1:
        value["answers"] = [
            {
                "text": a.text,
                "token_ids": a.token_ids,
                "finish_reason": a.finish_reason,
                "stop_reason": a.stop_reason,
                **({} if a.logprobs is None else {"logprobs": [_position(p) for p in a.logprobs]}),
            }
            for a in output.outputs
        ]
    return value


def _position(entries: PositionLogprobs) -> list[dict[str, Any]]:
    return [{"id": i, "token": e.decoded_token, "logprob": e.logprob, "rank": e.rank} for i, e in entries.items()]


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
