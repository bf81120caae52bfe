"""``deepinfer batch``: answers a file of OpenAI batch lines, all of them sharing one running batch."""

from __future__ import annotations

import argparse
import itertools
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deepinfer import errors
from deepinfer.cli import console, options
from deepinfer.cli.batch_file import AnswerFile, Line, LineError, RequestFile, parse_line, same_file
from deepinfer.cli.batch_request import Work, read_body, response_body

if TYPE_CHECKING:
    from deepinfer.llm import LLM
    from deepinfer.outputs import RequestOutput
    from deepinfer.structured.service import PreparedGrammar

_WAITERS = 8
USAGE = "--model MODEL [options] IN.jsonl OUT.jsonl"
EXAMPLES = (
    "deepinfer batch --model smollm2 requests.jsonl answers.jsonl",
    "cat requests.jsonl | deepinfer batch --model smollm2 - - > answers.jsonl",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("input", metavar="IN.jsonl", help='lines {"custom_id", "method", "url", "body"}; - reads stdin')
    parser.add_argument(
        "output",
        metavar="OUT.jsonl",
        help="answers are appended as they finish; requests it already answers are skipped; - writes stdout",
    )
    parser.add_argument("--json", action="store_true", help="print a summary of the run as one JSON object on stdout")
    parser.add_argument("--served-model-name", metavar="NAME", help='the "model" of the answers (default: the value of --model)')
    options.add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the batch; 0 when every line was processed, whether answered or refused with an error object."""
    if same_file(args.input, args.output):
        raise console.UserError(f"{args.input} is both input and output; name another output file")
    if args.json and args.output == "-":
        raise console.UserError("--json prints its summary on stdout, where the answers go; name an output file")
    engine = options.engine_arguments(args)
    source = RequestFile(args.input)
    tally = Tally()
    try:
        with AnswerFile(args.output) as target:
            _answer(engine, args.served_model_name or args.model, source, target, tally)
    except (KeyboardInterrupt, SystemExit, errors.EngineDeadError):
        if args.output != "-":
            console.note(f"deepinfer: stopped with {tally.answered} answered; the same command goes on from there")
        raise
    finally:
        source.close()
    if args.json:
        console.print_json(vars(tally))
    console.note(
        f"deepinfer: {tally.answered} answered, {tally.skipped} done before, {tally.bad} bad line{'' if tally.bad == 1 else 's'}, "
        f"{tally.failed} failed, {tally.seconds:.1f} s"
    )
    return console.EXIT_FAILED if tally.failed else console.EXIT_OK


@dataclass
class Tally:
    """What became of the lines, and what they cost."""

    answered: int = 0
    skipped: int = 0
    bad: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0

    @property
    def lines(self) -> int:
        """Lines dealt with."""
        return self.answered + self.skipped + self.bad + self.failed


@dataclass
class _Open:
    """A line some of whose prompts are still running."""

    line: Line
    work: Work
    ids: list[str]
    outputs: dict[str, RequestOutput] = field(default_factory=dict)


def _answer(engine: dict[str, Any], model: str, source: RequestFile, target: AnswerFile, tally: Tally) -> None:
    total = source.count()
    pending = _Lines(source, target, tally)
    first = next(pending, None)  # bad lines before it are refused; nothing is loaded when nothing is left to do
    if first is None:
        return
    from deepinfer import LLM

    with LLM(**engine) as llm, console.progress(total, "batch", "line") as bar, ExitStack() as cleanup:
        start = time.monotonic()  # of answering; loading is outside
        runner = _Runner(llm, model, target, tally)
        cleanup.callback(runner.close)
        lines = itertools.chain([first], pending)
        shown = 0
        ended = False
        while not ended or runner.busy:
            # The engine's queue stays longer than its batch, so that no slot waits for this loop; memory stays bounded.
            while not ended and runner.room:
                line = next(lines, None)
                if line is None:
                    ended = True
                else:
                    runner.submit(line)
            runner.step()
            tally.seconds = time.monotonic() - start
            bar.update(tally.lines - shown)
            shown = tally.lines
            bar.set_postfix_str(f"{tally.completion_tokens / max(tally.seconds, 1e-9):.0f} tok/s")


class _Lines(Iterator[Line]):
    """Lines still to be answered; refuses bad ones and passes over finished ones as it meets them."""

    def __init__(self, source: RequestFile, target: AnswerFile, tally: Tally) -> None:
        self._raw = source.lines()
        self._target = target
        self._tally = tally
        self._seen: set[str] = set()

    def __next__(self) -> Line:
        done = self._target.done
        for number, raw in self._raw:
            try:
                line = parse_line(number, raw)
                if line.custom_id in self._seen:
                    raise LineError("duplicate_custom_id", f"custom_id {line.custom_id!r} was used on an earlier line", line.custom_id)
            except LineError as error:
                if number in done.error_lines:
                    self._tally.skipped += 1
                else:
                    refuse(self._target, number, error.custom_id, error.code, str(error))
                    self._tally.bad += 1
                continue
            self._seen.add(line.custom_id)
            if line.custom_id in done.custom_ids or number in done.error_lines:
                self._tally.skipped += 1
                continue
            return line
        raise StopIteration


def refuse(target: AnswerFile, number: int | None, custom_id: str | None, code: str, message: str) -> None:
    """Writes the error object of one line. With its ``number``, a later run passes over the line; without, it tries again."""
    error: dict[str, Any] = {"code": code, "message": console.one_line(message)}
    if number is not None:
        error["line"] = number
    target.append({"id": _id(), "custom_id": custom_id, "response": None, "error": error})


def _id() -> str:
    return "batch_req_" + uuid.uuid4().hex


class _Runner:
    """Keeps the engine fed and turns finished requests into answer lines."""

    def __init__(self, llm: LLM, model: str, target: AnswerFile, tally: Tally) -> None:
        self._llm = llm
        self._model = model
        self._target = target
        self._tally = tally
        self._open: dict[str, _Open] = {}
        self._compiling: list[tuple[Line, Work, Future[PreparedGrammar]]] = []
        self._compilers = ThreadPoolExecutor(_WAITERS, "batch-grammars")  # they wait for processes; threads start when needed
        self._limit = 2 * llm.max_num_seqs + 16

    @property
    def busy(self) -> bool:
        return bool(self._open or self._compiling)

    @property
    def room(self) -> bool:
        return len(self._open) + len(self._compiling) < self._limit

    def submit(self, line: Line) -> None:
        """Queues a line's prompts, or refuses the line. One that needs a grammar comes when that is compiled; the others do not wait."""
        try:
            work = read_body(line.url, line.body)
        except LineError as error:
            self._refuse(line, error)
            return
        form = work.sampling.get("structured_outputs")
        if form is None:
            self._enter(line, work, None)
        else:
            self._compiling.append((line, work, self._compilers.submit(self._llm.compile_grammar, form)))

    def _enter(self, line: Line, work: Work, grammar: PreparedGrammar | None) -> None:
        ids: list[str] = []
        try:
            params = self._llm.default_sampling_params(**work.sampling)
            prompts: list[Any] = list(work.prompts)
            if work.messages is not None:
                prompts = [self._llm.chat_prompt(work.messages, **work.template_values)]
            for i, prompt in enumerate(prompts):
                request_id = f"{line.number}.{i}"
                self._llm.add_request(prompt, params, request_id=request_id, grammar=grammar)
                ids.append(request_id)
        except errors.InvalidRequestError as error:
            for request_id in ids:
                self._llm.abort(request_id)
            self._refuse(line, error)
            return
        state = _Open(line, work, ids)
        self._open.update((request_id, state) for request_id in ids)

    def _refuse(self, line: Line, error: LineError | errors.InvalidRequestError) -> None:
        self._tally.bad += 1
        code = error.code if isinstance(error, LineError) else _snake(type(error).__name__)
        refuse(self._target, line.number, line.custom_id, code, str(error))

    def _enter_compiled(self) -> None:
        """Queues the lines whose grammars have been compiled; waits for one if there is nothing else to do."""
        if self._compiling and not self._open:
            wait((future for _, _, future in self._compiling), return_when=FIRST_COMPLETED)
        waiting, self._compiling = self._compiling, []
        for line, work, future in waiting:
            if not future.done():
                self._compiling.append((line, work, future))
                continue
            try:
                grammar = future.result()
            except errors.InvalidRequestError as error:
                self._refuse(line, error)
            else:
                self._enter(line, work, grammar)

    def close(self) -> None:
        """Waits for nothing any more; the engine's end ends what is being compiled."""
        self._compilers.shutdown(wait=False, cancel_futures=True)

    def step(self) -> None:
        """Runs one engine step and writes the lines that end in it."""
        if self._compiling:
            self._enter_compiled()
        for output in self._llm.step():
            state = self._open.get(output.request_id)
            if state is None or not output.finished:
                continue
            del self._open[output.request_id]
            state.outputs[output.request_id] = output
            if len(state.outputs) == len(state.ids):
                self._finish(state)

    def _finish(self, state: _Open) -> None:
        outputs = [state.outputs[request_id] for request_id in state.ids]
        failed = [a for o in outputs for a in o.outputs if a.finish_reason in ("error", "abort", "so_failed")]
        if failed:
            self._tally.failed += 1
            code = "so_failed" if failed[0].finish_reason == "so_failed" else "engine_error"
            # Not the line's fault: no line number, so that the next run takes it up again.
            refuse(self._target, None, state.line.custom_id, code, failed[0].error or "the request was aborted")
            return
        body = response_body(state.work, self._model, int(time.time()), outputs)
        usage = body["usage"]
        self._tally.prompt_tokens += usage["prompt_tokens"]
        self._tally.completion_tokens += usage["completion_tokens"]
        self._tally.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
        self._tally.answered += 1
        response = {"status_code": 200, "request_id": "req_" + uuid.uuid4().hex, "body": body}
        self._target.append({"id": _id(), "custom_id": state.line.custom_id, "response": response, "error": None})


def _snake(name: str) -> str:
    """``PromptTooLongError`` → ``prompt_too_long``."""
    words = "".join("_" + c.lower() if c.isupper() else c for c in name.removesuffix("Error"))
    return words.lstrip("_")
