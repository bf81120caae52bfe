"""``deepinfer plan``: how large a model is and what fits a machine, from its configuration alone."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from deepinfer.cli import console

if TYPE_CHECKING:
    from deepinfer.engine.fit import Fit, Machine
    from deepinfer.models.sizes import ModelSizes

EXAMPLES = (
    "deepinfer plan smollm2",
    "deepinfer plan tests/data/deepseek_v41/full.json --gpus 8 --host-gb 2000",
    "deepinfer plan config.json --gpus 1 --gpu-gb 80 --max-model-len 32768 --json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("model", metavar="MODEL", help="directory, config.json, .gguf file, hub id or smollm2; weights need not be there")
    parser.add_argument("--gpus", type=int, default=None, metavar="N", help="GPUs of the machine that is asked about (default: none)")
    parser.add_argument("--gpu-gb", type=float, default=None, metavar="X", help="memory of each in 10^9 bytes (default: 141, an H200)")
    parser.add_argument("--host-gb", type=float, default=None, metavar="M", help="memory of the host in 10^9 bytes")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16", help="run dtype (default: bfloat16)")
    parser.add_argument("--weights", default=None, metavar="FORM", help="packed or the run dtype (default: packed where the model is)")
    parser.add_argument(
        "--block-size", type=int, default=64, choices=(16, 32, 64, 128), help="tokens of a KV block, unless the model fixes it"
    )
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto", help="fp8: KV in 8-bit floats (Llama family)")
    parser.add_argument("--max-num-seqs", type=int, default=None, metavar="N", help="sequences in a step, a GPU (default: 256)")
    parser.add_argument(
        "--max-model-len", type=int, default=None, metavar="N", help="tokens of a full sequence (default: the model's limit)"
    )
    parser.add_argument(
        "--kv-memory-fraction",
        type=float,
        default=None,
        metavar="X",
        help="share of the memory that weights and KV may take (default: 0.9)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, sizes in bytes")


def run(args: argparse.Namespace) -> int:
    """Prints sizes and, if a machine was given, what fits it."""
    gpus = _gpus(args)
    max_num_seqs = 256 if args.max_num_seqs is None else args.max_num_seqs
    if max_num_seqs < 1:
        raise console.UserError(f"--max-num-seqs {max_num_seqs} must be above 0")
    gpu_bytes = console.gigabytes("--gpu-gb", 141.0 if args.gpu_gb is None else args.gpu_gb)
    host_bytes = None if args.host_gb is None else console.gigabytes("--host-gb", args.host_gb)
    import torch

    from deepinfer.engine.fit import Machine, fit
    from deepinfer.models.sizes import read_sizes

    sizes = read_sizes(config_of(args.model), getattr(torch, args.dtype), args.block_size, args.kv_cache_dtype == "fp8")
    machine = found = None
    if gpus or args.host_gb is not None:
        machine = Machine(gpus, gpu_bytes, host_bytes, 0.9 if args.kv_memory_fraction is None else args.kv_memory_fraction)
        forms = list(sizes.weight_bytes)  # packed first, if at all; a CPU runs what they decode to
        form = args.weights or forms[0 if gpus else -1]
        found = fit(sizes, machine, form, max_num_seqs, args.max_model_len)
    if args.json:
        console.print_json({"model": args.model, **as_json(sizes), "fit": None if found is None else _fit_json(found)})
    else:
        console.write_out(render(args.model, sizes))
        if machine is not None and found is not None:
            console.write_out(render_fit(machine, found, max_num_seqs))
    return console.EXIT_OK


_OF_A_MACHINE = ("gpu_gb", "weights", "max_num_seqs", "max_model_len", "kv_memory_fraction")
"""Arguments that say something of what fits, and nothing of the model's size."""


def _gpus(args: argparse.Namespace) -> int:
    """GPUs of the machine that is asked about; 0 where there are none, or no machine.

    Raises:
        UserError: no number of GPUs, or an option that goes with a machine, or with its GPUs, and there is none.
    """
    if args.gpus is not None and (args.gpus < 0 or (args.gpus == 0 and args.host_gb is None)):
        raise console.UserError(f"--gpus {args.gpus} is no number of GPUs: give 1 or more; a machine without GPUs is --host-gb M alone")
    if not args.gpus and args.gpu_gb is not None:
        raise console.UserError("--gpu-gb is the memory of each of --gpus N: give both")
    if not args.gpus and args.host_gb is None and (alone := [name for name in _OF_A_MACHINE if getattr(args, name) is not None]):
        flag = "--" + alone[0].replace("_", "-")
        raise console.UserError(f"{flag} is for what fits a machine: give --gpus N or --host-gb M with it")
    return args.gpus or 0


def config_of(model: str) -> dict[str, Any]:
    """Fields of the configuration that ``model`` names."""
    from pathlib import Path

    from deepinfer.models import resolve_model
    from deepinfer.models.config import read_json

    path = Path(model).expanduser()
    if path.suffix == ".json" and path.is_file():
        return read_json(path)
    return resolve_model(model, load_format="dummy").config


def as_json(sizes: ModelSizes) -> dict[str, Any]:
    """Sizes as JSON values."""
    from deepinfer.worker.kv_cache import state_bytes

    return {
        "architecture": sizes.architecture,
        "parameters": {**{part.name: part.parameters for part in sizes.parts}, "total": sizes.parameters},
        "checkpoint_bytes": {**{part.name: part.nbytes for part in sizes.parts}, "total": sum(part.nbytes for part in sizes.parts)},
        "weight_bytes": dict(sizes.weight_bytes),
        "table_bytes": sizes.table_bytes,
        "kv": {
            "bytes_per_token": _whole(sizes.block_bytes / sizes.block_tokens),
            "block_tokens": sizes.block_tokens,
            "block_bytes": sizes.block_bytes,
        },
        "state": {
            "stored_bytes": sum(group.stored for group in sizes.state),
            "bytes_per_sequence": sum(map(state_bytes, sizes.state)),
        },
        "max_position": sizes.max_position,
        "full_sequence_bytes": _sequence_bytes(sizes, sizes.max_position),
    }


def _fit_json(found: Fit) -> dict[str, Any]:
    return {
        "fits": found.fits,
        "places": found.places,
        "weight_bytes_per_place": found.weight_bytes,
        "state_bytes_per_place": found.state_bytes,
        "kv_bytes_per_place": max(found.kv_bytes, 0),
        "kv_tokens": found.tokens,
        "sequence_tokens": found.length,
        "full_sequences": found.full_sequences,
        "least_places": found.least_places or None,
        "tables_in_host": found.tables_in_host,
    }


def _whole(value: float) -> float | int:
    return int(value) if value == int(value) else value


def _sequence_bytes(sizes: ModelSizes, length: int) -> int:
    from deepinfer.worker.kv_cache import state_bytes

    return -(-length // sizes.block_tokens) * sizes.block_bytes + sum(map(state_bytes, sizes.state))


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.1f} MB"


def _count(number: int) -> str:
    return f"{number / 1e9:,.1f} B" if number >= 1e9 else f"{number / 1e6:,.1f} M"


def render(model: str, sizes: ModelSizes) -> str:
    """Sizes for a person."""
    from deepinfer.worker.kv_cache import state_bytes

    several = len(sizes.parts) > 1
    counts = " · ".join(f"{_count(part.parameters)} {part.name}" for part in sizes.parts) if several else ""
    lines = [f"{model}: {sizes.architecture}", f"  parameters  {_count(sizes.parameters)}{' = ' if several else ''}{counts}"]
    if several:
        stored = " · ".join(f"{_gb(part.nbytes)} {part.name}" for part in sizes.parts)
        lines.append(f"  checkpoint  {_gb(sum(part.nbytes for part in sizes.parts))} = {stored}")
    weights = " or ".join(f"{_gb(nbytes)} {form}" for form, nbytes in sizes.weight_bytes.items())
    tables = f"; {_gb(sizes.table_bytes)} of tables stay in files or host memory" if sizes.table_bytes else ""
    lines.append(f"  weights     {weights}{tables}")
    per_token = sizes.block_bytes / sizes.block_tokens
    lines.append(f"  KV          {_whole(per_token):,} B a token, {sizes.block_bytes:,} B a block of {sizes.block_tokens}")
    if sizes.state:
        stored_state, whole = sum(group.stored for group in sizes.state), sum(map(state_bytes, sizes.state))
        lines.append(f"  state       {whole:,} B a sequence; {stored_state:,} B of it are worth storing")
    lines.append(f"  a sequence of {sizes.max_position:,} tokens takes {_gb(_sequence_bytes(sizes, sizes.max_position))}")
    return "\n".join(lines) + "\n"


def render_fit(machine: Machine, found: Fit, max_num_seqs: int) -> str:
    """What fits, for a person."""
    share = f"{machine.fraction:.0%}"
    host = "" if machine.host_bytes is None else f"a host with {_gb(machine.host_bytes)}"
    each = " a GPU" if machine.gpus > 1 else ""
    if machine.gpus:
        number = "a GPU" if machine.gpus == 1 else f"{machine.gpus} GPUs"
        where = f"{number} of {_gb(machine.gpu_bytes)}, {share} of {'it' if machine.gpus == 1 else 'each'}{'; ' if host else ''}{host}"
    else:
        where = f"{host}, {share} of it"
    state = f", state of {max_num_seqs} sequences {_gb(found.state_bytes)}{each}" if found.state_bytes else ""
    tables = ", tables in host memory" if found.tables_in_host else ""
    lines = [f"on {where}:", f"  weights {_gb(found.weight_bytes)}{each}{state}{tables}"]
    if found.blocks < 1:
        need = f"{found.least_places} such GPUs hold them" if machine.gpus and found.least_places else "they need more memory"
        lines.append(f"  no room for KV beside the weights: {need}")
    else:
        room = f"{found.tokens:,} tokens in all, {found.full_sequences:,} sequences of {found.length:,} tokens"
        lines.append(f"  KV {_gb(found.kv_bytes)}{each}: {room}")
    return "\n".join(lines) + "\n"
