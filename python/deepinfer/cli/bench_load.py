"""The load the end-to-end benchmarks share: invented prompts, a timed run over them, and how figures are summed up."""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from deepinfer import errors
from deepinfer.cli import console, machine, options
from deepinfer.sampling import SamplingParams

if TYPE_CHECKING:
    from deepinfer.engine.step_log import EngineMetrics
    from deepinfer.llm import LLM

COUNTING = (
    "output tokens only; the clock runs from the first submission to the last answer; drawing prompts, loading and one warm-up run are "
    "outside it; prompts are random token ids, greedy, every answer runs to its full length"
)

STEP_COUNTING = (
    "a decode step is the time between two returns of LLM.step; of a batch's last steps, as many as answers have tokens, the first tenth "
    "and the last twenty-fifth do not count; mean and median of the batch in the middle by its mean"
)


def add_load_options(parser: argparse.ArgumentParser, *, input_len: int, output_len: int, num_seqs: int, sizes: bool = False) -> None:
    """Adds the options of the load, with a benchmark's own defaults, and the engine options. ``sizes``: ``--num-seqs`` takes several, and
    is a list."""
    group = parser.add_argument_group("load", f"How it is counted: {COUNTING}.")
    group.add_argument("--input-len", type=positive, default=input_len, metavar="N", help=f"tokens of a prompt (default: {input_len})")
    group.add_argument("--output-len", type=positive, default=output_len, metavar="N", help=f"tokens of an answer (default: {output_len})")
    at_once: dict[str, Any] = {"nargs": "+", "default": [num_seqs]} if sizes else {"default": num_seqs}
    several = ", one after the other" if sizes else ""
    at = "of a batch" if sizes else "that an engine runs at once"
    group.add_argument("--num-seqs", type=positive, metavar="N", help=f"sequences {at}{several} (default: {num_seqs})", **at_once)
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    options.add_trace_option(parser)
    options.add_engine_options(parser, omit=("max_num_seqs",))


def positive(text: str) -> int:
    """An argument that must be an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def engine_arguments(args: argparse.Namespace, num_seqs: int) -> dict[str, Any]:
    """Arguments of ``LLM``: as given, with a batch of ``num_seqs`` and room for its sequences, no more."""
    given = options.engine_arguments(args)
    return {"max_model_len": args.input_len + args.output_len, **given, "max_num_seqs": num_seqs}


def start_engine(args: argparse.Namespace, num_seqs: int) -> LLM:
    """An engine with a batch of ``num_seqs`` and, unless its length was given, room for the load's sequences and no more.

    Raises:
        UserError: that length is too much for the model or the memory.
    """
    given = engine_arguments(args, num_seqs)
    from deepinfer import LLM

    try:
        return LLM(**given)
    except errors.CapacityError as e:
        length = f"max_model_len {args.input_len + args.output_len}"
        if args.max_model_len is not None or length not in str(e):
            raise
        load = f"--input-len {args.input_len} and --output-len {args.output_len} are too much"
        tokens = f"{args.input_len + args.output_len} tokens"
        said = str(e).replace(f"{length} is", f"{tokens} are").replace(length, tokens).replace("max_model_len", "their sum")
        raise console.UserError(f"{load}: {said}") from None


def start_trace(args: argparse.Namespace, llm: LLM) -> None:
    """Begins the trace that was asked for; the warm-up is over by then."""
    if args.trace is not None:
        llm.trace(args.trace)


def random_prompts(count: int, length: int, vocab_size: int, seed: int, shared: int = 0, share: float = 1.0) -> list[list[int]]:
    """``count`` prompts of ``length`` ids, the same for a seed; a ``share`` of them, spread evenly, begins with the same ``shared``."""
    draw = random.Random(seed)
    head = [draw.randrange(vocab_size) for _ in range(shared)]
    heads = [head if int((i + 1) * share) > int(i * share) else [] for i in range(count)]
    return [first + [draw.randrange(vocab_size) for _ in range(length - len(first))] for first in heads]


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Seconds after the start at which ``count`` requests arrive, independent of each other, ``rate`` a second in the mean."""
    draw = random.Random(seed)
    return list(accumulate(draw.expovariate(rate) for _ in range(count)))


@dataclass
class Timeline:
    """When one request was submitted and when its tokens came, in seconds of ``time.monotonic()``, which the engine counts in too.

    ``gaps``: seconds between neighbouring tokens, of a request that was streamed.
    """

    submitted: float
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0
    gaps: list[float] = field(default_factory=list)

    @property
    def first_token(self) -> float:
        """Seconds from submission to the first token."""
        return self.first - self.submitted

    @property
    def total(self) -> float:
        """Seconds from submission to the last token."""
        return self.last - self.submitted

    @property
    def mean_gap(self) -> float | None:
        """Mean seconds between neighbouring tokens; ``None`` of an answer of one token."""
        return (self.last - self.first) / (self.tokens - 1) if self.tokens > 1 else None

    def came(self, tokens: int, now: float) -> None:
        """So many tokens are there now, those of before included."""
        if new := tokens - self.tokens:
            self.gaps += [now - self.last] if self.tokens else []
            self.gaps += [0.0] * (new - 1)  # drafts that were accepted come with the token before them
            self.first = self.first or now
            self.last, self.tokens = now, tokens


@dataclass
class Run:
    """What became of prompts.

    Attributes:
        times: of each, in their order.
        steps: seconds between neighbouring returns of ``LLM.step``, or from the last submission before it if that was later.
        submit_seconds: from the first submission to when the last one had been taken.
    """

    times: list[Timeline]
    steps: list[float]
    submit_seconds: float


def timed_run(
    llm: LLM,
    prompts: Sequence[list[int]],
    output_len: int,
    name: str,
    bar: console.Progress | None = None,
    *,
    stream: bool,
    arriving: Sequence[float] = (),
) -> Run:
    """Submits prompts, all at once or as they arrive, and steps the engine until every answer is complete.

    Without ``stream`` answers are read whole, and the time of a first token is the engine's own. ``arriving``: seconds after the start,
    ascending, one for each prompt; a request counts from its arrival, whenever the engine, which takes requests between steps, got to it.

    Raises:
        RunError: an answer failed or is not ``output_len`` tokens long.
    """
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    times: dict[str, Timeline] = {}
    steps: list[float] = []
    start = submitted = before = time.monotonic()
    running = 0
    while running or len(times) < len(prompts):
        while (i := len(times)) < len(prompts) and (not arriving or start + arriving[i] <= time.monotonic()):
            request_id = f"{name}.{i}"
            times[request_id] = Timeline(start + arriving[i] if arriving else time.monotonic())
            llm.add_request(prompts[i], params, request_id=request_id, stream=stream)
            running += 1
            submitted = before = time.monotonic()
        if not running:
            time.sleep(max(0.0, start + arriving[len(times)] - time.monotonic()))
            continue
        outputs = llm.step()
        now = time.monotonic()
        steps.append(now - before)
        before = now
        for output in outputs:
            seen = times[output.request_id]
            (answer,) = output.outputs
            if answer.finish_reason not in (None, "length"):
                raise console.RunError(f"a request of the benchmark ended early ({answer.finish_reason}): {answer.error}")
            if stream:
                seen.came(len(answer.token_ids), now)
            else:
                seen.first, seen.last, seen.tokens = output.metrics.first_token_time, now, len(answer.token_ids)
            if output.finished:
                running -= 1
                if bar is not None:
                    bar.update(1)
    short = [t for t in times.values() if t.tokens != output_len]
    if short:
        raise console.RunError(f"an answer has {short[0].tokens} tokens instead of {output_len}")
    return Run(list(times.values()), steps, submitted - start)


def decode_steps(steps: Sequence[float], output_len: int) -> list[float]:
    """Those of one batch's steps that only decode, all of its sequences; see ``STEP_COUNTING``. None of them for few tokens."""
    return list(steps[-(output_len - math.ceil(output_len / 10)) : len(steps) - output_len // 25]) if output_len > 1 else []


NO_STEPS = (
    "none is counted with several engines: between two returns of LLM.step there is news of one or the other, not a step; "
    "device_ms_a_step and host_ms_a_step are of an engine's own steps"
)


def step_times(batches: Sequence[Sequence[float]], output_len: int) -> dict[str, float | None]:
    """Mean and median milliseconds of a decode step, from the steps of each batch; see ``STEP_COUNTING``."""
    counted = sorted((c for steps in batches if (c := decode_steps(steps, output_len))), key=statistics.fmean)
    if not counted:
        return {"mean": None, "median": None}
    middle = counted[len(counted) // 2]
    return {"mean": round(1e3 * statistics.fmean(middle), 4), "median": round(1e3 * statistics.median(middle), 4)}


def device_figures(before: EngineMetrics, after: EngineMetrics) -> dict[str, float | None]:
    """Between two snapshots: ``bubble``, the share of time in which the device stood still although there was work, and the milliseconds
    that device and host worked on a step in the mean; ``None`` where no step was timed."""
    device = after.device_time.sum_ns - before.device_time.sum_ns
    host, idle = after.host_time.sum_ns - before.host_time.sum_ns, after.idle_ns - before.idle_ns
    steps = sum(after.device_time.counts) - sum(before.device_time.counts)
    if not steps:
        return {"bubble": None, "device_ms_a_step": None, "host_ms_a_step": None}
    return {
        "bubble": round(idle / max(1, idle + device), 5),
        "device_ms_a_step": round(device / steps / 1e6, 4),
        "host_ms_a_step": round(host / steps / 1e6, 4),
    }


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` (0..1) of ``values`` do not exceed (nearest rank); NaN for none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)), 1) - 1]


def spread(seconds: Sequence[float]) -> dict[str, float | None]:
    """Median, p99 and mean in milliseconds; ``None`` where there is nothing to measure."""
    if not seconds:
        return {"p50": None, "p99": None, "mean": None}
    values = {"p50": percentile(seconds, 0.5), "p99": percentile(seconds, 0.99), "mean": sum(seconds) / len(seconds)}
    return {name: round(value * 1e3, 3) for name, value in values.items()}


def circumstances(args: argparse.Namespace, llm: LLM, num_seqs: int) -> dict[str, Any]:
    """What has to stand beside a figure: model, load, engines, machine, counting rule. ``max_num_seqs`` is of each engine."""
    import torch

    setting, config = llm.engine.run, llm.engine.config
    return {
        "model": args.model,
        "dtype": str(setting.dtype).removeprefix("torch."),
        "device": str(setting.device),
        "input_len": args.input_len,
        "output_len": args.output_len,
        "num_seqs": num_seqs,
        "max_num_seqs": setting.max_num_seqs,
        "data_parallel": config.data_parallel_size,
        "expert_parallel": config.expert_parallel,
        "step_policy": config.step_policy or ("decode_first" if config.expert_parallel else "mixed"),
        "batch_invariant": setting.batch_invariant,
        "kv_cache_dtype": config.kv_cache_dtype,
        "machine": machine.in_words(str(setting.device), torch.get_num_threads()),
        "counting": COUNTING,
    }


def setting(result: dict[str, Any]) -> str:
    """Machine, dtype and what is unusual of the settings, in a line for a person."""
    unusual = "" if result["batch_invariant"] else "; batch invariance off"
    if result["kv_cache_dtype"] != "auto":
        unusual += f"; KV in {result['kv_cache_dtype']}"
    if result["data_parallel"] > 1:
        unusual += f"; {result['data_parallel']} engines, {'experts spread over them, ' if result['expert_parallel'] else ''}each up to "
        unusual += f"{result['max_num_seqs']} at once"
    if result["step_policy"] != "mixed":
        unusual += f"; steps {result['step_policy']}"
    return f"{result['machine']}; {result['dtype']}{unusual}"


def device_line(result: dict[str, Any]) -> str:
    """What device and host worked on a step, a line for a person; nothing where no step was timed."""
    if result["bubble"] is None:
        return ""
    return (
        f"a step of an engine: device {result['device_ms_a_step']:.2f} ms, host {result['host_ms_a_step']:.2f} ms; the device stood still "
        f"for {100 * result['bubble']:.1f} % of the time\n"
    )


def milliseconds(name: str, values: dict[str, float | None]) -> str:
    """One line of a report for a person."""
    if values["p50"] is None:
        return f"{name}: one token an answer, nothing to measure"
    return f"{name}: p50 {values['p50']:.2f} ms, p99 {values['p99']:.2f} ms, mean {values['mean']:.2f} ms"
