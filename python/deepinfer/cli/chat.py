"""``deepinfer chat``: a conversation in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer import errors
from deepinfer.cli import console, options
from deepinfer.cli.generate import check_answer, sampling_params
from deepinfer.sampling import SamplingParams

if TYPE_CHECKING:
    from deepinfer.llm import LLM

USAGE = "--model MODEL [options]"
EXAMPLES = (
    "deepinfer chat --model smollm2",
    'deepinfer chat --model smollm2 --system "Answer in one sentence." --temperature 0.2',
    'printf "Hello\\n/exit\\n" | deepinfer chat --model smollm2',
)
COMMANDS = """\
/reset          forget the conversation (the system message stays)
/system TEXT    set the system message and start over; without TEXT, drop it
/image PATH     show the model an image with the next message; without PATH, drop those that wait
/help           this list
/exit           end (Ctrl-D does the same); Ctrl-C stops an answer"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    options.add_engine_options(parser)
    options.add_sampling_options(parser, omit=("n", "logprobs", "prompt_logprobs"))


def run(args: argparse.Namespace) -> int:
    """Reads messages until the input ends."""
    values = options.sampling_arguments(args)
    engine = options.engine_arguments(args)
    SamplingParams(**values)  # a mistake in these shows before the model is loaded
    from deepinfer import LLM

    with LLM(**engine) as llm:
        if not llm.has_chat_template:
            raise console.UserError(f"{args.model} has no chat template; pass one with --chat-template, or use deepinfer generate --raw")
        params = sampling_params(llm, values)
        if sys.stdin.isatty():
            _line_editing()
            console.note(f"{args.model}: type a message; /help lists the commands")
        Conversation(llm, params, args.system).loop()
    return console.EXIT_OK


def _line_editing() -> None:
    """Arrow keys and history at the prompt, where the platform has readline."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401


class Conversation:
    """The messages so far, and what a line of input does to them."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._system = system
        self._images: list[str] = []  # paths, for the next message
        self.messages: list[dict[str, Any]] = []

    def loop(self) -> None:
        """Runs until the end of the input or ``/exit``."""
        while True:
            try:
                line = self._read()
            except KeyboardInterrupt:
                if not sys.stdin.isatty():
                    raise
                console.write_out("\n")  # Ctrl-C at the prompt drops the line, as in a shell
                continue
            if line is None:
                return
            text = line.strip()
            if text.startswith("/"):
                if not self._command(text):
                    return
            elif text:
                self._say(text)

    def _read(self) -> str | None:
        """The next line; ``None`` at the end of the input."""
        try:
            if sys.stdin.isatty():
                return input("> ")
            raw = sys.stdin.buffer.readline()
            return console.decode_utf8(raw, "standard input") if raw else None
        except EOFError:
            console.write_out("\n")
            return None

    def _command(self, text: str) -> bool:
        """Carries out a ``/`` command; ``False`` ends the conversation."""
        name, _, rest = text.partition(" ")
        match name:
            case "/exit" | "/quit":
                return False
            case "/reset":
                self.messages.clear()
                self._images.clear()
                console.note("conversation forgotten")
            case "/system":
                self._system = rest.strip() or None
                self.messages.clear()
                console.note("system message set" if self._system else "system message dropped")
            case "/image":
                self._image(rest.strip())
            case "/help":
                console.note(COMMANDS)
            case _:
                console.note(f"no such command: {name}; /help lists them")
        return True

    def _image(self, path: str) -> None:
        """Notes an image for the next message, its bytes are read when that is sent."""
        if not path:
            self._images.clear()
            console.note("no image waits")
        elif not os.path.isfile(path):
            console.note(f"no such file: {path}")
        else:
            self._images.append(path)
            console.note(f"image {len(self._images)} of the next message: {path}")

    def _content(self, text: str) -> str | list[dict[str, Any]]:
        """A message's content: text, behind the images that wait. Their bytes are kept, so that later turns show the same."""
        if not self._images:
            return text
        images = [{"type": "image", "image": Path(path).read_bytes()} for path in self._images]
        self._images = []
        return [*images, {"type": "text", "text": text}]

    def _say(self, text: str) -> None:
        """Sends one message and streams the answer. An answer that was stopped stays in the conversation as far as it came."""
        try:
            self.messages.append({"role": "user", "content": self._content(text)})
        except OSError as error:
            self._images = []
            console.note(f"an image cannot be read: {error}")
            return
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        from deepinfer.engine.step_log import keep_off

        said: list[str] = []
        try:
            stream = self._llm.stream(self._llm.chat_prompt([*system, *self.messages]), self._params)
            with contextlib.closing(stream), keep_off(console.line_open):
                for output in stream:
                    for answer in output.outputs:
                        if answer.text:
                            said.append(answer.text)
                            console.write_out(answer.text)
                        check_answer(answer)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            console.write_out(" [stopped]")
        except errors.PromptTooLongError as error:
            self.messages.pop()
            console.note(f"{console.one_line(error)}; /reset starts over")
            return
        except errors.InvalidRequestError as error:
            self.messages.pop()
            console.note(console.one_line(error))
            return
        console.write_out("\n")
        self.messages.append({"role": "assistant", "content": "".join(said)})
