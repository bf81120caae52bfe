"""Whether an engine's steps are graphs, and recording them at its start.

Owns: what the setting means for a model, what a failure to record becomes, what is said of it. Never touches: what is recorded.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from deepinfer.distributed import ExpertGroup
from deepinfer.engine.config import RunConfig
from deepinfer.engine.memory import is_out_of_memory
from deepinfer.errors import CapacityError, ConfigError
from deepinfer.models.base import Model, StateGroup
from deepinfer.worker import graphs
from deepinfer.worker.decode_step import graph_buckets, unfit
from deepinfer.worker.prompt_step import prompt_buckets
from deepinfer.worker.runner import ModelRunner


def wanted_buckets(
    run: RunConfig, model: Model, state: Sequence[StateGroup], device_drafts: int, experts: ExpertGroup | None
) -> Sequence[int]:
    """Row counts that decode steps are to be recorded for; none of them where the setting, the device or the model has no graphs.

    Raises:
        ConfigError: graphs are asked for and the model has none.
    """
    if run.cuda_graphs is False or not graphs.can_record(run.device):
        return []
    buckets, why = graph_buckets(model, state, device_drafts, experts, run.max_num_seqs)
    if run.cuda_graphs and not buckets:
        raise ConfigError(f"cuda_graphs is on, but {why}; leave cuda_graphs out")
    return buckets


def wanted_prompt_rows(
    run: RunConfig, model: Model, state: Sequence[StateGroup], device_drafts: int, experts: ExpertGroup | None
) -> Sequence[int]:
    """Row counts that steps with prompts are to be recorded for; none of them where the setting, the device or the model has none."""
    if run.cuda_graphs is False or not graphs.can_record(run.device) or unfit(state, device_drafts, experts):
        return []
    return prompt_buckets(model, run.max_num_batched_tokens)


def record_graphs(runner: ModelRunner, run: RunConfig) -> None:
    """Records them, with a progress bar on a terminal and a line on stderr behind it.

    Raises:
        CapacityError: there is not enough memory beside weights and KV for those of decode steps, or for any that are asked for.
        ConfigError: graphs are asked for and the model could not be recorded. Otherwise that is a warning.
    """
    _record("decode", runner.to_record, runner.record_graphs, run)
    _record("prompt", runner.prompts_to_record, runner.record_prompt_graphs, run)


def _record(kind: str, buckets: Sequence[int], record: Callable[[_Bar], None], run: RunConfig) -> None:
    if not buckets:
        return
    begin, before = time.perf_counter(), _taken(run.device)
    bar = _Bar(kind, run.quiet)
    try:
        record(bar)
    except Exception as e:
        if is_out_of_memory(e) and (kind == "decode" or run.cuda_graphs):
            setting = "max_num_seqs" if kind == "decode" else "max_num_batched_tokens"
            raise CapacityError(
                f"no memory is left to record {kind} steps of up to {buckets[-1]} rows: lower kv_memory_fraction (now "
                f"{run.kv_memory_fraction:g}), num_kv_blocks or {setting}, or set cuda_graphs='off'"
            ) from e
        said = f"{kind} steps could not be recorded as CUDA graphs ({type(e).__name__}: {e})"
        if run.cuda_graphs:
            raise ConfigError(f"{said}; set cuda_graphs='off' to run without") from e
        warnings.warn(f"{said}; they run one operation at a time", RuntimeWarning, stacklevel=2)
        return
    finally:
        bar.close()
    if not run.quiet:
        took, mib = time.perf_counter() - begin, max(0, _taken(run.device) - before) / 2**20
        print(f"  {kind} graphs  {len(buckets)} sizes up to {buckets[-1]} rows in {took:.1f} s, {mib:.0f} MiB", file=sys.stderr)


def _taken(device: torch.device) -> int:
    """Bytes of a GPU in use by anybody, without what torch keeps for later; what graphs keep is no tensor's."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 0
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free


class _Bar:
    """A progress bar, on terminals only."""

    def __init__(self, kind: str, quiet: bool) -> None:
        self._kind = kind
        self._shown = not quiet and sys.stderr.isatty()
        self._bar: Any = None

    def __call__(self, done: int, total: int) -> None:
        if not self._shown:
            return
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc=f"recording {self._kind} graphs", unit="graph", leave=False)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Takes it away."""
        if self._bar is not None:
            self._bar.close()
