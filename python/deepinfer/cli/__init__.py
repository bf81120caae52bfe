"""The ``deepinfer`` command.

Owns: argument parsing, terminals and pipes, the batch-file format, benchmarks of whole runs, the report on a machine.
Never touches: scheduling, tensors, tokenising; a command asks ``deepinfer.LLM`` for everything it prints.
One file per sub-command, each with ``add_arguments(parser)``, ``run(args) -> int`` and its ``EXAMPLES``.
Importing any of them imports neither torch nor transformers, so that ``--help`` and user mistakes answer at once.

Exit codes: 0 done · 1 failed while running · 2 the user's mistake, one line on stderr says what to change ·
130 stopped by Ctrl-C · 141 the reader of our output went away · 143 stopped by SIGTERM.
"""

from deepinfer.cli.app import main

__all__ = ["main"]
