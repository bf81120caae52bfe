"""Parses the command line, runs one command and turns what happened into an exit code."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from deepinfer import errors
from deepinfer.cli import console
from deepinfer.cli.parser import EXIT_CODES, CommandParser, add_commands

COMMANDS = {
    "generate": "answer one prompt; the text streams to stdout",
    "serve": "answer clients of OpenAI's and Anthropic's protocols over HTTP",
    "chat": "talk with a model in the terminal",
    "batch": "answer a JSONL file of OpenAI batch requests",
    "top": "watch a server in the terminal: requests, tokens, KV, times",
    "bench": "measure this machine: throughput, latency, or the scheduler alone",
    "kvstore": "run and look after the KV store that outlives engines",
    "kernels": "list, build and check the kernels for GPUs, without one",
    "plan": "show how large a model is and what fits a machine, without its weights",
    "make-checkpoint": "write a random DeepSeek-V4.1 checkpoint in the released format",
    "doctor": "show the hardware, the libraries, the optional parts and the environment switches",
}

_FAILED_WHILE_RUNNING = (errors.EngineDeadError, errors.StepFailedError)
# What the user can change before the next try, among the errors of the KV store; the others are failures while running.
_KV_STORE_MISTAKES = (errors.KvStoreRefusedError, errors.KvStoreFormatError)


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line. Imports no torch."""
    parser = CommandParser(
        prog="deepinfer",
        description="LLM inference: text from a model, a conversation, a file of requests; benchmarks; a check of this machine.",
        epilog='example:\n  deepinfer generate --model smollm2 --temperature 0 "What is the capital of France?"\n\n' + EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"deepinfer {_version()}")
    add_commands(parser, "COMMAND", {name: f"deepinfer.cli.{name.replace('-', '_')}" for name in COMMANDS}, COMMANDS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code; never raises for a failure it can name."""
    console.open_missing_streams()

    def command() -> int:
        args = build_parser().parse_args(argv)
        with _ending_cleanly():
            return int(args.run(args))

    return exit_code(command)


def exit_code(work: Callable[[], int | None]) -> int:
    """Runs ``work``, a command or a script's main function, and returns its exit code, none being 0. A failure that has a name is a line on
    stderr."""
    try:
        code = work() or console.EXIT_OK
        sys.stdout.flush()
        return code
    except SystemExit as stop:  # argparse: help, version, a mistake that it has printed; SIGTERM; a script's last words
        if isinstance(stop.code, str):
            console.note(stop.code)
        return stop.code if isinstance(stop.code, int) else console.EXIT_USAGE
    except KeyboardInterrupt:
        return console.EXIT_INTERRUPTED
    except BrokenPipeError:
        console.silence_broken_pipe()
        return console.EXIT_BROKEN_PIPE
    except console.UserError as error:
        console.error_line(error)
        return console.EXIT_USAGE
    except _KV_STORE_MISTAKES as error:
        console.error_line(error)
        return console.EXIT_USAGE
    except (console.RunError, errors.KvStoreError, *_FAILED_WHILE_RUNNING) as error:
        console.error_line(error)
        return console.EXIT_FAILED
    except errors.DeepInferError as error:
        console.error_line(error)
        return console.EXIT_USAGE
    except OSError as error:
        console.error_line(error)
        return console.EXIT_FAILED
    except Exception as error:
        if isinstance(error, ImportError) and "_core" in str(error):
            console.error_line(f"{console.one_line(error)}; deepinfer doctor says what is missing and how to get it")
        else:  # a fault of ours: the whole traceback is what a report needs
            traceback.print_exc()
        return console.EXIT_FAILED


@contextlib.contextmanager
def _ending_cleanly() -> Iterator[None]:
    """Has SIGTERM end the command as Ctrl-C does, with its own exit code; a second one ends the process at once."""

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise SystemExit(console.EXIT_TERMINATED)

    try:
        before = signal.signal(signal.SIGTERM, end) if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL else None
    except ValueError:  # signals belong to the main thread
        before = None
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("deepinfer")
    except PackageNotFoundError:
        import deepinfer

        return str(getattr(deepinfer, "__version__", "unknown"))
