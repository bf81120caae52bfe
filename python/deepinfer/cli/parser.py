"""argparse as the commands use it: mistakes on one line, one shape of help text."""

from __future__ import annotations

import argparse
from types import ModuleType
from typing import Any, NoReturn

from deepinfer.cli import console

EXIT_CODES = """\
exit codes:
  0 done   1 failed while running   2 wrong input or settings (one line says what to change)
  130 stopped by Ctrl-C   141 the reader of the output went away
"""


class CommandParser(argparse.ArgumentParser):
    """A parser whose own complaints take one line and exit with 2."""

    def error(self, message: str) -> NoReturn:
        console.error_line(f"{message} (see {self.prog} --help)")
        raise SystemExit(console.EXIT_USAGE)


def add_command(commands: Any, name: str, module: ModuleType) -> None:
    """Adds the command of ``module`` to a group of sub-parsers.

    The module offers ``add_arguments(parser)`` and ``run(args) -> int``, and may offer ``HELP`` (one line), ``EXAMPLES``
    (command lines) and ``USAGE`` (what follows the command in the usage line).
    """
    about = getattr(module, "HELP", name)
    examples = [f"  {line}" for line in getattr(module, "EXAMPLES", ())]
    parser = commands.add_parser(
        name,
        help=about,
        description=about[0].upper() + about[1:] + ".",
        epilog="\n".join(["examples:", *examples, "", EXIT_CODES]) if examples else EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    if hasattr(module, "USAGE"):
        parser.usage = f"{parser.prog} {module.USAGE}"
    if parser.get_default("run") is None:
        parser.set_defaults(run=module.run)
