"""What the commands on kernels share: whose kernels, for which architecture, and running many compilations."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from deepinfer.cli import console

if TYPE_CHECKING:
    from deepinfer.kernels.registry import Entry
    from deepinfer.kernels.toolchain.building import Built
    from deepinfer.kernels.toolchain.store import StoredKernel


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Options that say whose kernels."""
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--shape", default=None, metavar="NAME", help="kernels of this named shape only (default: of all of them)")
    chosen.add_argument("--model", default=None, metavar="MODEL", help="kernels of this model: directory, config.json, hub id or smollm2")
    # Without a default, so that one that is given beside no --model is noticed.
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default=None, help="run dtype of --model (default: bfloat16)")
    parser.add_argument(
        "--block-size", type=int, default=None, choices=(16, 32, 64, 128), help="tokens of a KV block of --model (default: 64)"
    )
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default=None, help="fp8: with KV of --model in 8-bit floats")
    parser.add_argument("--arch", default="sm_90a", metavar="NAME", help="architecture to compile for (default: sm_90a, an H200)")


def add_jobs(parser: argparse.ArgumentParser) -> None:
    """The option for processes."""
    parser.add_argument("--jobs", type=int, default=None, metavar="N", help="processes that compile (default: one for each usable core)")


def chosen(args: argparse.Namespace, form: str = "cuda") -> list[Entry]:
    """The kernels that were asked for, in the registry's order; ``form``: for which kind of device.

    Raises:
        UserError: an unknown shape or architecture, or an option of ``--model`` without it.
    """
    from deepinfer.kernels import registry
    from deepinfer.kernels.toolchain.shapes import NAMED

    if not (args.arch.startswith("sm_9") and args.arch[3:].rstrip("af").isdecimal()):
        raise console.UserError(f"--arch {args.arch!r} is not one that kernels are written for; use sm_90a")
    if args.model is not None:
        from deepinfer.cli.plan import config_of
        from deepinfer.models.kernel_shape import read_kernel_shape

        shape = read_kernel_shape(config_of(args.model), args.dtype or "bfloat16", args.block_size or 64, args.kv_cache_dtype == "fp8")
        for op, reason in registry.refusals(shape).items():
            console.note(f"operator {op} stays with its reference: {reason}")
        return list(registry.entries({args.model: shape}, form))
    if alone := [f"--{name.replace('_', '-')}" for name in ("dtype", "block_size", "kv_cache_dtype") if getattr(args, name) is not None]:
        goes = "goes" if len(alone) == 1 else "go"
        raise console.UserError(f"{' and '.join(alone)} {goes} with --model; a named shape is whole: --shape {', '.join(NAMED)}")
    if args.shape is not None and args.shape not in NAMED:
        raise console.UserError(f"--shape {args.shape!r} is unknown; use one of {', '.join(NAMED)}")
    return list(registry.entries(None if args.shape is None else {args.shape: NAMED[args.shape]}, form))


def build(entries: Sequence[Entry], args: argparse.Namespace, keep: Callable[[StoredKernel], None] | None = None) -> list[Built]:
    """Compiles all of ``entries`` with a progress bar on terminals; in the order of ``entries``. ``keep`` gets each kernel that is done.

    Raises:
        UserError: ``--jobs`` is no number of processes.
        KernelBuildError: TileLang, the compiler or its headers are missing.
    """
    from deepinfer.kernels.toolchain.building import build_all
    from deepinfer.kernels.toolchain.lowering import check_tilelang
    from deepinfer.kernels.toolchain.nvrtc import compiler

    if args.jobs is not None and args.jobs < 1:
        raise console.UserError(f"--jobs {args.jobs} must be at least 1")
    check_tilelang()
    compiler()
    programs = [entry.program for entry in entries]
    built = {}
    with console.progress(len(programs), "building kernels", "kernel") as bar:
        for one in build_all(programs, args.arch, args.jobs):
            built[one.program] = one
            if keep is not None and one.kernel is not None:
                keep(one.kernel)
            bar.update()
    return [built[program] for program in programs]


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows below each other, the first being titles; columns of numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    right = [all(row[i][:1].isdigit() or row[i] == "-" for row in rows[1:]) for i in range(len(rows[0]))]
    lines = ["  ".join(f"{cell:>{w}}" if r else f"{cell:<{w}}" for cell, w, r in zip(row, widths, right, strict=True)) for row in rows]
    return "".join(line.rstrip() + "\n" for line in lines)
