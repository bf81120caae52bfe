"""Options shared by the commands: one table for the engine, one for sampling, each row named like the API argument it sets.

An option that was not given is absent from the result, so that the API's own default (and the model's
``generation_config.json``) decides. ``tests/cli/test_options.py`` holds the tables against the API's signatures.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer.cli.console import UserError


@dataclass(frozen=True)
class Option:
    """One option: ``name`` is the API's argument; the flag is its spelling with dashes."""

    name: str
    help: str
    type: Callable[[str], Any] | None = None  # None: a switch, with a --no- form if negatable
    choices: tuple[str, ...] | None = None
    repeat: bool = False
    flags: tuple[str, ...] = ()
    metavar: str | None = None
    negatable: bool = True

    def add_to(self, group: Any) -> None:
        """Adds the option to a parser or an argument group."""
        flags = self.flags or ("--" + self.name.replace("_", "-"),)
        if self.type is None:
            action = argparse.BooleanOptionalAction if self.negatable else "store_const"
            constant = {} if self.negatable else {"const": True}
            group.add_argument(*flags, dest=self.name, action=action, default=None, help=self.help, **constant)
        else:
            metavar = self.metavar or (None if self.choices else "TEXT" if self.type is str else "X" if self.type is float else "N")
            group.add_argument(
                *flags,
                dest=self.name,
                type=self.type,
                choices=self.choices,
                action="append" if self.repeat else "store",
                default=None,
                metavar=metavar,
                help=self.help,
            )


ENGINE_OPTIONS = (
    Option("tokenizer", "tokenizer directory or hub id (default: the model's own)", str, metavar="PATH|ID"),
    Option("revision", "branch, tag or commit of a hub model", str, metavar="REV"),
    Option("chat_template", "Jinja file, or the template itself, instead of the model's", str, metavar="FILE|TEXT"),
    Option("trust_remote_code", "refused: code of a checkpoint is never run", negatable=False),
    Option("load_format", "how weights are read; dummy needs only a configuration", str, ("auto", "safetensors", "gguf", "dummy")),
    Option("dtype", "type of weights and KV (default: auto)", str, ("auto", "float32", "bfloat16", "float16")),
    Option("device", "auto, cpu, cuda or cuda:N (default: auto)", str, metavar="DEVICE"),
    Option("weights", "FP8 weights: packed as stored, or expanded (default: by room)", str, ("auto", "packed", "expanded")),
    Option("quantization", "expected format of the weights; checked against the checkpoint", str, metavar="FORMAT"),
    Option("max_model_len", "most tokens of one sequence, prompt and answer together", int),
    Option("max_num_seqs", "most sequences running at once", int),
    Option("max_num_batched_tokens", "most tokens computed in one step", int),
    Option("block_size", "tokens in a KV block: 16, 32, 64 or 128 (default: the model's own choice)", int),
    Option("num_kv_blocks", "size of the KV pool in blocks; excludes --kv-memory-fraction", int),
    Option(
        "kv_memory_fraction",
        "share of the memory that may be used, weights and KV together",
        float,
        flags=("--kv-memory-fraction", "--gpu-memory-utilization"),
    ),
    Option("swap_space_gib", "host memory for preempted sequences, in GiB; 0 is none (default: by what is free)", float),
    Option(
        "state_snapshot_gib",
        "host memory for states of prompts, of models with windows, in GiB; 0 is none (default: by what is free)",
        float,
    ),
    Option("state_slice_gib", "host memory for the encoder's part of such states, in GiB (default: none without --kv-store)", float),
    Option("hit_policy", "what such models compute again behind a cached beginning (default: exact)", str, ("exact", "replay")),
    Option("enable_prefix_caching", "reuse KV of prompts that begin alike (default: on)"),
    Option("kv_store", "keep such KV beyond the process: dir:PATH, tcp://HOST:PORT[,...], unix:PATH or agent:PATH", str, metavar="ADDRESS"),
    Option("kv_store_tenant", "who shares it: engines that give the same name", str, metavar="NAME"),
    Option("kv_store_tls_ca", "authority of a tcp:// store's certificate; without it there is no TLS", str, metavar="FILE"),
    Option("kv_store_tls_name", "whom that certificate is for (default: the address's host)", str, metavar="NAME"),
    Option("kv_store_gib", "most that a store of dir:PATH holds, in GiB", float),
    Option("kv_store_write", "store what is complete, or after each step (default: on_finish)", str, ("on_finish", "write_through")),
    Option("kv_prefetch", "whether a request waits for KV from the store (default: timeout)", str, ("best_effort", "wait", "timeout")),
    Option("kv_prefetch_timeout", "seconds after which it is computed instead (default: 5)", float),
    Option("kv_prefetch_min_tokens", "fewest tokens worth a fetch (default: 128)", int),
    Option(
        "data_parallel_size",
        "engines that share the requests, on GPUs one each (default: 1)",
        int,
        flags=("--data-parallel", "--data-parallel-size"),
    ),
    Option("expert_parallel", "spread a model's experts over these engines; the answer stays the same", negatable=False),
    Option(
        "step_policy",
        "whether prompts and answers share steps; decode_first: no, and several engines vote on every step, which only --expert-parallel "
        "needs (default: mixed, with --expert-parallel decode_first)",
        str,
        ("mixed", "decode_first"),
    ),
    Option("seed", "makes sampling repeatable", int),
    Option("speculative", "propose drafts and keep what is right; the answer stays the same", str, ("ngram", "dspark", "off")),
    Option("num_draft_tokens", "most drafts of a sequence and step (default: 4 by prompt lookup, all of the model's stages)", int),
    Option("ngram_min", "fewest of the newest tokens that must have occurred before (default: 2)", int),
    Option("ngram_max", "most of them that are compared (default: 4)", int),
    Option("draft_budget", "most draft rows of one step (default: from measured times)", int),
    Option("zero_overhead", "plan a step while the device runs the one before it; the answer stays the same (default: on)"),
    Option("batch_invariant", "answers have the same bits whatever runs beside them; without, some steps are faster (default: on)"),
    Option("cuda_graphs", "on a GPU, replay recorded steps; the answer stays the same (default: auto)", str, ("auto", "on", "off")),
    Option(
        "kv_cache_dtype",
        "fp8: KV in half the bytes, approximate (Llama family); the others: form of compressed caches, the answer stays the same",
        str,
        ("auto", "fp8", "packed", "bfloat16", "float32"),
    ),
    Option(
        "yoco_prefill_truncation", "hide or leave out decoder rows of a prompt's beginning (default: off)", str, ("off", "mask", "compact")
    ),
    Option("yoco_prefill_keep_tokens", "last tokens of a prompt that truncation leaves whole", int),
    Option("max_backtracking_tokens", "most rows a step may write past the last one that counts", int),
    Option("engram_cache_gib", "host memory for rows of Engram tables, in GiB; 0 is none (default: 0.25 a table)", float),
    Option("engram_tables", "where Engram tables are for a step (default: auto)", str, ("auto", "files", "device", "host")),
    Option("max_images_per_prompt", "most images of one prompt (default: 64)", int),
    Option("max_image_pixels", "most pixels of an image as it comes (default: 67108864)", int),
    Option("grammar_workers", "processes that compile grammars (default: 4, and one core fewer than there are at most)", int),
    Option("grammar_timeout", "seconds that one grammar may take to compile (default: 20)", float),
    Option("grammar_cache_gib", "host memory for compiled grammars, in GiB; 0 is none (default: 10)", float),
    Option("num_threads", "torch threads of the step loop", int),
    Option("quiet", "leave out the report of what fits and the line on steps every 10 s, both on stderr", negatable=False),
)

SAMPLING_OPTIONS = (
    Option("n", "answers to the prompt", int),
    Option("temperature", "0 takes the most likely token each time", float),
    Option("top_p", "keep the most likely tokens whose probabilities reach this", float),
    Option("top_k", "keep the N most likely tokens; 0 keeps all", int),
    Option("min_p", "drop tokens below this share of the likeliest one", float),
    Option("presence_penalty", "lower tokens that were generated already", float),
    Option("frequency_penalty", "the same, for every time they were", float),
    Option("repetition_penalty", "divide the logits of tokens in prompt or answer; 1 is off", float),
    Option("max_tokens", "most tokens to generate", int),
    Option("min_tokens", "nothing ends the answer before this many tokens", int),
    Option("stop", "end before this text; may be repeated", str, repeat=True),
    Option("include_stop_str_in_output", "keep the stop text in the answer"),
    Option("stop_token_ids", "end after this token id; may be repeated", int, repeat=True, flags=("--stop-token-id",), metavar="ID"),
    Option("ignore_eos", "go on after the model's end-of-sequence tokens"),
    Option("logprobs", "with --json: log-probabilities of the N likeliest tokens; -1 is all", int),
    Option("prompt_logprobs", "with --json: the same for the prompt", int),
    Option("logit_bias", "add VALUE to the logit of token ID; may be repeated", str, repeat=True, metavar="ID=VALUE"),
    Option("bad_words", "never generate this text; may be repeated", str, repeat=True, flags=("--bad-word",)),
    Option("skip_special_tokens", "leave special tokens out of the text (default: on)"),
    Option("spaces_between_special_tokens", "separate special tokens that are shown (default: on)"),
    Option("truncate_prompt_tokens", "keep the last N tokens of the prompt; -1 keeps what fits", int),
    Option("priority", "smaller is served first", int),
    Option("cache_salt", "share cached prefixes only under the same salt", str),
    Option("traffic_class", "hint for the prefix cache", str, ("agent", "chat")),
)


STRUCTURED_OPTIONS = (
    Option("json_schema", "the answer is a JSON document of this schema", str, metavar="FILE"),
    Option("regex", "the answer matches this regular expression", str),
    Option("choice", "the answer is one of these texts; may be repeated", str, repeat=True),
)


def add_trace_option(parser: argparse.ArgumentParser) -> None:
    """Adds ``--trace``, for commands that run an engine in their own process."""
    help_text = "write a torch profiler trace of the first N steps to a file that stderr names"
    parser.add_argument("--trace", type=_steps, default=None, metavar="N", help=help_text)


def _steps(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def add_engine_options(parser: argparse.ArgumentParser, *, omit: tuple[str, ...] = (), model_required: bool = True) -> None:
    """Adds ``--model`` and the engine options, without those a command decides itself."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--model",
        "-m",
        required=model_required,
        metavar="PATH|ID|NAME",
        help="directory, .gguf file, hub id, or smollm2 (the demo model)",
    )
    for option in ENGINE_OPTIONS:
        if option.name not in omit:
            option.add_to(group)


def add_sampling_options(parser: argparse.ArgumentParser, *, omit: tuple[str, ...] = ()) -> None:
    """Adds the sampling options."""
    group = parser.add_argument_group("sampling")
    for option in SAMPLING_OPTIONS:
        if option.name not in omit:
            option.add_to(group)


def add_structured_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of what an answer has to look like; :func:`sampling_arguments` reads them."""
    group = parser.add_argument_group("structured output")
    for option in STRUCTURED_OPTIONS:
        option.add_to(group)


def engine_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of ``LLM`` that were given on the command line.

    Raises:
        UserError: two options exclude each other.
    """
    given = _given(args, ENGINE_OPTIONS)
    if "num_kv_blocks" in given and "kv_memory_fraction" in given:
        raise UserError("--num-kv-blocks and --kv-memory-fraction both set the size of the KV pool; give one of them")
    return {"model": args.model, **given}


def sampling_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of ``SamplingParams`` that were given on the command line, ``--seed`` among them.

    Raises:
        UserError: a ``--logit-bias`` is not ``ID=VALUE``, or a schema's file cannot be read.
    """
    given = _given(args, SAMPLING_OPTIONS)
    if getattr(args, "seed", None) is not None:
        given["seed"] = args.seed
    if "logit_bias" in given:
        given["logit_bias"] = dict(_parse_bias(item) for item in given["logit_bias"])
    form = _given(args, STRUCTURED_OPTIONS)
    if len(form) > 1:
        flags = " and ".join("--" + name.replace("_", "-") for name in form)
        raise UserError(f"{flags} exclude each other; give one of them")
    if "json_schema" in form:
        form = {"json": _read_text(form["json_schema"])}
    if form:
        given["structured_outputs"] = form
    return given


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"--json-schema {path} cannot be read: {getattr(e, 'strerror', None) or 'it is not UTF-8'}") from None


def _given(args: argparse.Namespace, options: tuple[Option, ...]) -> dict[str, Any]:
    values: Mapping[str, Any] = vars(args)
    return {o.name: values[o.name] for o in options if values.get(o.name) is not None}


def _parse_bias(item: str) -> tuple[int, float]:
    left, equals, right = item.partition("=")
    try:
        if not equals:
            raise ValueError
        return int(left), float(right)
    except ValueError:
        raise UserError(f"--logit-bias {item!r} is not ID=VALUE, for example --logit-bias 42=-100") from None
