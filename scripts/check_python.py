"""Says in one line, before anything is installed, that the interpreter or the Rust toolchain is not the one needed."""

import re
import subprocess
import sys

if sys.version_info < (3, 11):  # noqa: UP036 - the point of this file
    found = ".".join(str(part) for part in sys.version_info[:2])
    sys.exit("DeepInfer needs Python 3.11 or newer, this is " + found + ": try `make PYTHON=python3.11 ...`")
try:
    told = subprocess.run(["cargo", "--version"], capture_output=True, text=True)
except OSError:
    sys.exit("DeepInfer is built with Rust and cargo is not on PATH: install a toolchain (rustup, 1.89 or newer) first")
release = re.search(r"(\d+)\.(\d+)", told.stdout)
if told.returncode != 0 or release is None:
    # A rustup without a toolchain is on PATH and fails at its first use.
    sys.exit("DeepInfer is built with Rust and cargo does not run: `rustup default stable` installs a toolchain (1.89 or newer)")
if (int(release[1]), int(release[2])) < (1, 89):
    sys.exit("DeepInfer needs Rust 1.89 or newer, cargo is " + release[0] + ": `rustup update stable`")
