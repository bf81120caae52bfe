"""Says which external operator libraries this machine could use, and for each other one why not.

Reads `libraries.toml`, package metadata and the GPU's compute capability; imports no library.
Usage: python vendor/probe.py [--json]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("libraries.toml")


@dataclass(frozen=True)
class Finding:
    """One library on this machine."""

    name: str
    purpose: str
    usable: bool
    version: str | None
    reason: str  # why it is not usable; empty if it is


def capability() -> tuple[int, int] | None:
    """Compute capability of the first CUDA device; None without torch or a device."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    return torch.cuda.get_device_capability(0) if torch.cuda.is_available() else None


def installed_version(package: str) -> str | None:
    """Version of a distribution, None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def probe(name: str, entry: Mapping[str, Any], device: tuple[int, int] | None) -> Finding:
    """Judges one entry of the table for a device of the given capability."""
    needed = tuple(entry["capability"])
    version = installed_version(entry["package"])
    pin = entry.get("pin")
    if device is None:
        reason = "no CUDA device"
    elif device < needed:
        reason = f"needs compute capability {needed[0]}.{needed[1]}, this device has {device[0]}.{device[1]}"
    elif importlib.util.find_spec(entry["module"]) is None:
        reason = f"not installed (package {entry['package']})"
    elif pin is not None and version != pin:
        reason = f"version {version} is installed, {pin} is pinned"
    else:
        reason = ""
    return Finding(name, entry["purpose"], not reason, version, reason)


def probe_all(table: Path = TABLE) -> list[Finding]:
    """Every library of the table, in its order."""
    device = capability()
    entries = tomllib.loads(table.read_text(encoding="utf-8"))
    return [probe(name, entry, device) for name, entry in entries.items()]


def main(argv: list[str] | None = None) -> int:
    """Prints the findings; always 0, for a missing library is no fault."""
    parser = argparse.ArgumentParser(description="which external operator libraries this machine could use")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    findings = probe_all()
    if parser.parse_args(argv).json:
        print(json.dumps({"libraries": [asdict(f) for f in findings]}))
        return 0
    for f in findings:
        print(f"{f.name:12} {'usable' if f.usable else 'no':7} {f.version or '-':10} {f.reason or f.purpose}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
