"""argparse as the commands use it: mistakes on one line, one shape of help text."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any, NoReturn

from deepinfer.cli import console

EXIT_CODES = """\
exit codes:
  0 done   1 failed while running   2 wrong input or settings (one line says what to change)
  130 stopped by Ctrl-C   141 the reader of the output went away   143 stopped by SIGTERM
"""


class CommandParser(argparse.ArgumentParser):
    """A parser whose own complaints take one line and exit with 2, and which imports its command's module only when used."""

    module: str | None = None

    def error(self, message: str) -> NoReturn:
        console.error_line(f"{message} (see {self.prog} --help)")
        raise SystemExit(console.EXIT_USAGE)

    def parse_known_args(self, args: Any = None, namespace: Any = None, **more: Any) -> Any:
        """Loads the command first; argparse calls this on a sub-parser only when its command was named."""
        if self.module is not None:
            name, self.module = self.module, None
            self._load(importlib.import_module(name))
        return super().parse_known_args(args, namespace, **more)

    def _load(self, command: ModuleType) -> None:
        """Takes over ``add_arguments(parser)``, ``run(args) -> int`` and, if there, ``EXAMPLES`` and ``USAGE`` of a module."""
        examples = [f"  {line}" for line in getattr(command, "EXAMPLES", ())]
        self.epilog = "\n".join(["examples:", *examples, "", EXIT_CODES]) if examples else EXIT_CODES
        if hasattr(command, "USAGE"):
            self.usage = f"{self.prog} {command.USAGE}"
        self.set_defaults(run=getattr(command, "run", None))
        command.add_arguments(self)


def add_commands(parser: argparse.ArgumentParser, what: str, modules: Mapping[str, str], about: Mapping[str, str]) -> None:
    """Adds sub-commands: name → module, and name → one line of help. Importing is left to the moment one is used."""
    group: Any = parser.add_subparsers(dest=what.lower(), metavar=what, required=True, parser_class=CommandParser)
    for name, module in modules.items():
        line = about[name]
        sub = group.add_parser(
            name,
            help=line,
            description=line[0].upper() + line[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        sub.module = module
