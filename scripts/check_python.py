"""Says in one line, before anything is installed, that the interpreter or the Rust toolchain is not the one needed."""

import shutil
import sys

if sys.version_info < (3, 11):  # noqa: UP036 - the point of this file
    found = ".".join(str(part) for part in sys.version_info[:2])
    sys.exit("DeepInfer needs Python 3.11 or newer, this is " + found + ": try `make PYTHON=python3.11 ...`")
if shutil.which("cargo") is None:
    sys.exit("DeepInfer is built with Rust and cargo is not on PATH: install a toolchain (rustup, 1.88 or newer) first")
