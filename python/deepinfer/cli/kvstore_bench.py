"""``deepinfer kvstore bench``: the store beside what this machine's disk, memory and sockets do."""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from deepinfer.cli import console, machine
from deepinfer.cli.kvstore_options import size

EXAMPLES = (
    "deepinfer kvstore bench",
    "deepinfer kvstore bench --dir /nvme --json",
    "deepinfer kvstore bench --part put --part get",
    "deepinfer kvstore bench --compare mooncake",
)
RULE = (
    "objects of 1.4 MB (a state slice) and 114 kB (128 tokens at 890 B); median of 5 rounds; where two things stand beside each "
    "other they take turns, and the ratio is the median of the rounds' ratios; a PUT is durable when it returns (fdatasync a batch)"
)
# What each figure is held to: (beginning of its name, whether a ratio is meant, the bar, whether more is better).
BARS = (
    ("PUT", True, 0.8, True),
    ("GET", True, 0.8, True),
    ("shared memory", False, 5.0, True),
    ("CHECK of 1000 blocks, in process", False, 3.0, False),
    ("CHECK of 1000 blocks, over", False, 100.0, False),
    ("p99 of CHECK", True, 10.0, False),
    ("index and policy", False, 90.0, False),
    ("10+2", False, 10.0, True),
    ("p99 of a striped read", True, 1.3, False),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "--dir", default=None, metavar="DIR", help="directory on the disk to be measured (default: the temporary directory)"
    )
    parser.add_argument("--part", action="append", default=None, metavar="PART", help="only this part; may be repeated (default: all)")
    parser.add_argument("--entries", type=int, default=1_000_000, metavar="N", help="entries of the index (default: 1000000)")
    parser.add_argument("--round-mib", type=int, default=128, metavar="N", help="MiB a round on the disk (default: 128)")
    parser.add_argument(
        "--compare", choices=("mooncake",), default=None, help="measure another store beside it, in an environment of its own"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Measures and prints; figures that miss their bar are marked, and are no failure."""
    from deepinfer import _core

    if args.compare is not None:
        return _compare(args.json)
    parts = args.part or list(_core.KV_BENCH_PARTS)
    for part in parts:
        if part not in _core.KV_BENCH_PARTS:
            raise console.UserError(f"--part {part} is none: give {', '.join(_core.KV_BENCH_PARTS)}")
    folder = Path(args.dir or tempfile.gettempdir()).expanduser()
    if not folder.is_dir():
        raise console.UserError(f"--dir {folder} is no directory")
    if args.round_mib < 0 or args.entries < 0:
        raise console.UserError("--round-mib and --entries must be above 0")
    about = {**_machine(folder), "rule": RULE, "debug_build": _core.DEBUG}
    if _core.DEBUG:
        console.note("kvstore bench: this core is a debug build: times mean little")
    figures: list[dict[str, Any]] = []
    with console.progress(len(parts), "bench", "part") as bar:
        for part in parts:
            bar.set_postfix_str(part)
            for figure in _core.kv_bench(part, folder, args.entries, args.round_mib << 20):
                figures.append({"part": part, **figure, **_held(dict(figure))})
            bar.update(1)
    if args.json:
        console.print_json({**about, "figures": figures})
    else:
        console.write_out(render(about, figures))
    return console.EXIT_OK


def _machine(folder: Path) -> dict[str, Any]:
    return {"machine": machine.in_words("cpu", None), "load": machine.load(), "memory": machine.memory()["total"], "dir": str(folder)}


def _held(figure: dict[str, Any]) -> dict[str, Any]:
    """The bar of a figure and whether it is met."""
    for begins, by_ratio, bar, more in BARS:
        if figure["name"].startswith(begins):
            value = figure["ratio"][0] if by_ratio else figure["value"]
            return {"bar": bar, "met": value >= bar if more else value <= bar}
    return {"bar": None, "met": None}


def render(about: dict[str, Any], figures: list[dict[str, Any]]) -> str:
    """A table for a person."""
    text = (
        f"{about['machine']}, {size(about['memory'] or math.nan)} of memory, load {about['load']}, in {about['dir']}\n{about['rule']}\n\n"
    )
    width = max((len(figure["name"]) for figure in figures), default=0)
    for figure in figures:
        text += f"  {figure['name']:<{width}}  {figure['value']:>8.2f} {figure['unit']:<4}"
        if figure["beside"] is not None:
            middle, least, most = figure["ratio"]
            text += f"  {figure['beside']:>8.2f} {figure['unit']:<4}  ratio {middle:.2f} ({least:.2f} to {most:.2f})"
        if figure["bar"] is not None:
            text += f"  {'meets' if figure['met'] else 'MISSES'} {figure['bar']:g}"
        text += "\n"
    return text


def _compare(as_json: bool) -> int:
    """Runs the comparison's script, which lies in a checkout."""
    script = Path(__file__).resolve().parents[3] / "benches" / "compare_mooncake.py"
    if not script.is_file():
        raise console.UserError("--compare needs a checkout of DeepInfer: benches/compare_mooncake.py is not in the wheel")
    argv = [sys.executable, str(script), *(["--json"] if as_json else [])]
    return subprocess.run(argv, check=False).returncode
