"""How long it takes from the start of a process to the first token of an answer, and which part takes what.

    python benches/first_token.py --model DIR --load-format dummy --device cuda [--starts 5] [--set swap_space_gib=0] [--profile] [--json]

Every start is a fresh process. The clock starts in its parent, before the process is made, and ends when the first token of a prompt of
16 ids (`--input-len`; greedy, nothing turned into text) has been given out. Three parts: the interpreter with `from deepinfer import LLM`;
`LLM(...)`; the first token. One start before those that count fills the store of kernels and the caches of files. Seconds are medians over
`--starts`, the spread is the fastest and the slowest. `heavy` names what no warm start should import and this one did.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from typing import Any

_PARTS = ("imports", "engine", "token", "total")
_HEAVY = ("tilelang", "tvm", "transformers", "xgrammar", "gguf", "torch._dynamo", "torch._inductor", "sympy")
_SHOWN = 40


def child(args: argparse.Namespace) -> None:
    """Starts, makes one token, and prints when it did what, in seconds since ``args.child``."""
    from deepinfer import LLM, SamplingParams

    imported = time.monotonic()
    settings: dict[str, Any] = {"load_format": args.load_format, "device": args.device, "max_num_seqs": args.max_num_seqs}
    settings |= dict(args.set)
    if args.profile:
        import cProfile
        import pstats

        profiler = cProfile.Profile()
        with profiler:
            llm = LLM(args.model, quiet=True, **settings)
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("cumulative").print_stats(_SHOWN)
    else:
        llm = LLM(args.model, quiet=True, **settings)
    with llm:
        ready = time.monotonic()
        prompt = [7 % llm.vocab_size] * args.input_len
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False)
        next(llm.stream(prompt, params))
        token = time.monotonic()
        where = str(llm.engine.run.device)
    marks = (args.child, imported, ready, token)
    parts = [b - a for a, b in pairwise(marks)]
    heavy = [name for name in _HEAVY if name in sys.modules]
    print(json.dumps({**dict(zip(_PARTS, [*parts, token - args.child], strict=True)), "device": where, "heavy": heavy}))


def setting(text: str) -> tuple[str, Any]:
    """A setting of the engine, ``name=value``, the value as JSON where it is some."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(text)
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def start(argv: list[str], profile: bool = False) -> dict[str, Any]:
    """One fresh process, measured."""
    more = ["--profile"] if profile else []
    command = [sys.executable, __file__, *argv, *more, "--child"]
    made = subprocess.run([*command, repr(time.monotonic())], stdout=subprocess.PIPE, text=True)  # the clock is the system's
    if made.returncode:  # it has said why
        sys.exit(made.returncode)
    found: dict[str, Any] = json.loads(made.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Prints what was measured, as one JSON object with ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-num-seqs", type=int, default=None)
    parser.add_argument("--input-len", type=int, default=16)
    parser.add_argument(
        "--set", type=setting, action="append", default=[], metavar="NAME=VALUE", help="a setting of the engine; repeatable"
    )
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="one start more, whose LLM(...) Python's profiler shows on stderr")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", type=float, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        child(args)
        return
    argv = ["--model", args.model, "--load-format", args.load_format, "--device", args.device, "--input-len", str(args.input_len)]
    argv += [] if args.max_num_seqs is None else ["--max-num-seqs", str(args.max_num_seqs)]
    argv += [word for name, value in args.set for word in ("--set", f"{name}={json.dumps(value)}")]
    first = start(argv)
    seen = [start(argv) for _ in range(args.starts)]
    from deepinfer.cli import machine

    seconds = {part: round(statistics.median(s[part] for s in seen), 4) for part in _PARTS}
    spread = {part: [round(f(s[part] for s in seen), 4) for f in (min, max)] for part in _PARTS}
    result = {
        "machine": machine.in_words(seen[0]["device"], None),
        "starts": args.starts,
        "settings": dict(args.set),
        "seconds": seconds,
        "spread": spread,
        "uncounted_first_start": round(first["total"], 2),
        "heavy": seen[-1]["heavy"],
    }
    if args.profile:
        start(argv, profile=True)
    if args.json:
        print(json.dumps(result))
        return
    print(f"first token after {seconds['total']:.2f} s ({spread['total'][0]:.2f} to {spread['total'][1]:.2f}, {args.starts} starts)")
    print(f"interpreter and imports {seconds['imports']:.2f} s, engine {seconds['engine']:.2f} s, first token {seconds['token']:.2f} s")
    print(f"{result['machine']}; imported: {', '.join(result['heavy']) or 'nothing heavy'}")


if __name__ == "__main__":
    from deepinfer.cli.app import exit_code  # none of torch comes with it

    sys.exit(exit_code(main))
