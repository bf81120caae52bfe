"""What TileLang compiles for when a caller names no target: said outright, not found out.

By itself it asks torch whether there is a GPU, which under an emulated or a hidden one has another answer than this engine's device.
Kernels of this package name their target themselves; other packages' need not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

DEFAULT_TARGET = "TILELANG_DEFAULT_TARGET"


def set_default_target(target: Mapping[str, str]) -> None:
    """Makes ``target`` the default of this process and its children, unless the user has chosen one."""
    os.environ.setdefault(DEFAULT_TARGET, json.dumps(dict(target)))
