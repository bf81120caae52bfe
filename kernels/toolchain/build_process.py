"""A process that builds kernels: programs come as lines of JSON on standard input, what became of each goes back the same way.

Started by ``building.build_all``, as ``python -m deepinfer.kernels.toolchain.build_process ARCH``. It is a program of its own rather
than a child of ``multiprocessing``, which would run the user's script once more.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import time

from deepinfer.errors import KernelBuildError

from .program import Program
from .store import compile_program


def packed(program: Program) -> str:
    """``program`` as a line."""
    return json.dumps([program.op, program.factory, program.constants, program.uses, program.passes, program.form])


def unpacked(line: str) -> Program:
    """The program of a line."""
    op, factory, constants, uses, passes, form = json.loads(line)
    return Program(op, factory, tuple(map(tuple, constants)), tuple(uses), tuple(map(tuple, passes)), form)


def main(arch: str) -> None:
    """Builds until the input ends. An answer is ``[error or null, seconds, kernel or null]``."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what TileLang prints is no answer
    for line in sys.stdin:
        start = time.perf_counter()
        kernel = error = None
        try:
            kernel = base64.b64encode(compile_program(unpacked(line), arch).packed()).decode()
        except KernelBuildError as e:
            error = str(e)
        answers.write(json.dumps([error, time.perf_counter() - start, kernel]) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
