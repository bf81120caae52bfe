"""Every environment switch, once.

Owns: name, type, default and reason of each variable, and how it is read. A setting given in code wins over
its variable. Never touches: anything else; whoever obeys a switch reads it here by name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deepinfer.errors import ConfigError

MOST_KEPT = (1 << 30) - 1
"""Tokens of a prompt that truncation leaves whole: positions are 32-bit words."""
MOST_BACKTRACKING = 1024
MOST_COMPILE_SECONDS = 3600.0


def _bool(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off", ""):
        return False
    raise ValueError("use 1 or 0")


def _wish(text: str) -> bool | None:
    if text.lower() == "auto":
        return None
    try:
        return _bool(text)
    except ValueError:
        raise ValueError("use auto, 1 or 0") from None


def _truncation(text: str) -> str:
    known = ("off", "mask", "compact")
    if text not in known:
        raise ValueError(f"use one of {', '.join(known)}")
    return text


def _positive(text: str) -> int:
    n = int(text)
    if n < 1:
        raise ValueError("use a number of at least 1")
    return n


def _up_to(most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        n = _positive(text)
        if n > most:
            raise ValueError(f"use a number of at most {most}")
        return n

    return read


def _number_up_to(most: float, least: float = 0.0) -> Callable[[str], float]:
    def read(text: str) -> float:
        n = float(text)
        if not least <= n <= most:
            raise ValueError(f"use a number between {least:g} and {most:g}")
        return n

    return read


def _temperatures(text: str) -> tuple[float, ...]:
    values = tuple(float(part) for part in text.split(",")) if text.strip() else ()
    if not all(0 < value < float("inf") for value in values):
        raise ValueError("use positive numbers with commas between them, one for each draft")
    return values


@dataclass(frozen=True)
class Switch:
    """One variable: how it is read, what holds without it, and why it exists."""

    name: str
    kind: str
    parse: Callable[[str], Any]
    default: Any
    why: str
    secret: bool = False  # its value is nobody's to see


SWITCHES: tuple[Switch, ...] = (
    Switch("DEEPINFER_ACCELERATOR", "auto | cpu | cuda | cuda:N", str, "auto", "device when `device` is left at 'auto'"),
    Switch("DEEPINFER_DISABLE_SYNC_GUARD", "0 | 1", _bool, False, "let the launch path wait for the device instead of failing the step"),
    Switch("DEEPINFER_NUM_THREADS", "integer", _positive, None, "torch threads of the step loop; unset = torch's own choice"),
    Switch("DEEPINFER_ZERO_OVERHEAD_SCHEDULING", "0 | 1", _bool, True, "plan and launch a step while the device runs the one before it"),
    Switch("DEEPINFER_CUDA_GRAPHS", "auto | 0 | 1", _wish, None, "replay decode steps as CUDA graphs, if `cuda_graphs` is left at 'auto'"),
    Switch(
        "YOCO_PREFILL_TRUNCATION_MODE",
        "off | mask | compact",
        _truncation,
        "off",
        "decoder rows of a long prompt's beginning, of models with an encoder: kept, hidden from later ones, or left out",
    ),
    Switch(
        "YOCO_PREFILL_KEEP_TOKENS",
        "integer",
        _up_to(MOST_KEPT),
        None,
        "last tokens of a prompt that truncation leaves whole; unset = the fewest allowed",
    ),
    Switch(
        "MAX_BACKTRACKING_TOKENS",
        "integer",
        _up_to(MOST_BACKTRACKING),
        None,
        "rows a step may write past the last one that counts; unset = what drafts need",
    ),
    Switch("USE_NEXTN_DECODE", "0 | 1", _bool, False, "draft with the stages of a checkpoint that has some, if `speculative` is left out"),
    Switch(
        "DFLASH_CONFIDENCE_HEAD_TEMPERATURE",
        "numbers with commas",
        _temperatures,
        (),
        "what the confidence in each draft of such stages is divided by before drafts are chosen by it; unset = 1",
    ),
    Switch(
        "SO_BUILDER_CPUS", "integer", _positive, 4, "processes that compile grammars, if `grammar_workers` is left out; never all cores"
    ),
    Switch(
        "XGRAMMAR_TIMEOUT",
        "seconds",
        _number_up_to(MOST_COMPILE_SECONDS, 0.01),
        20.0,
        "what one grammar may take to compile, if `grammar_timeout` is left out",
    ),
    Switch("XGRAMMAR_DISABLE_CACHE", "0 | 1", _bool, False, "keep no compiled grammars, whatever `grammar_cache_gib` says"),
    Switch(
        "XGRAMMAR_CACHE_GIB",
        "number",
        _number_up_to(1 << 20),
        10.0,
        "host memory for compiled grammars, if `grammar_cache_gib` is left out",
    ),
    Switch("DEEPINFER_KV_STORE_TOKEN", "text", str, None, "what the KV store asks for, if `kv_store_token` is left out", secret=True),
    *(
        Switch(
            f"DEEPINFER_KVSTORE_TOKEN_{role}",
            "text",
            str,
            None,
            f"what it asks for the role {role.lower()}, if that is not set",
            secret=True,
        )
        for role in ("CHECK", "GET", "PUT")
    ),
    Switch(
        "DEEPINFER_API_KEY",
        "text",
        str,
        None,
        "a key that clients of `deepinfer serve` must send, and that `deepinfer top` sends",
        secret=True,
    ),
    # Read where kernels are stored, which knows no engine.
    Switch("DEEPINFER_KERNEL_CACHE", "folder", str, None, "where compiled kernels are kept; unset = deepinfer/kernels in the cache folder"),
    Switch(
        "DEEPINFER_TOKENIZER_CACHE",
        "folder",
        str,
        None,
        "where tokenizers of directories are kept as they were made; empty = nowhere, unset = deepinfer/tokenizers in the cache folder",
    ),
    Switch("DEEPINFER_QUIET", "0 | 1", _bool, False, "leave out the capacity report that a start prints on stderr"),
)
_BY_NAME = {s.name: s for s in SWITCHES}


def get(name: str, environ: Mapping[str, str] = os.environ) -> Any:
    """Value of a switch, its default when the variable is not set.

    Raises:
        ConfigError: the variable's text cannot be read.
        KeyError: no such switch (a mistake in the program).
    """
    switch = _BY_NAME[name]
    text = environ.get(name)
    if text is None:
        return switch.default
    try:
        return switch.parse(text)
    except ValueError as e:
        raise ConfigError(f"environment variable {name}={text!r} cannot be read ({switch.kind}): {e}") from None


def describe(environ: Mapping[str, str] = os.environ) -> list[dict[str, Any]]:
    """Every switch with its value, for `deepinfer doctor --env`: name, kind, default, value, set, why."""
    return [
        {
            "name": s.name,
            "kind": s.kind,
            "default": s.default,
            "value": "(set)" if s.secret and s.name in environ else get(s.name, environ),
            "set": s.name in environ,
            "why": s.why,
        }
        for s in SWITCHES
    ]
