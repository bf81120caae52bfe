"""What fits: from memory, weights and the model's KV groups to a number of blocks, before anything is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer.engine.config import EngineConfig, RunConfig
from deepinfer.errors import CapacityError
from deepinfer.models import ResolvedModel
from deepinfer.models.base import PagedGroup, StateGroup
from deepinfer.models.loaders import model_of_size
from deepinfer.models.sizes import resident_bytes
from deepinfer.worker.kv_cache import state_bytes


@dataclass(frozen=True)
class KvPlan:
    """Sizes of the KV pools.

    Attributes:
        num_blocks: usable blocks, the null block not counted.
        block_tokens: tokens of a block.
        block_bytes: bytes of a block over all paged groups.
        state_bytes: bytes of all state slots.
        max_model_len: longest sequence.
        num_pages: pages to allocate per paged group, null pages included.
    """

    num_blocks: int
    block_tokens: int
    block_bytes: int
    state_bytes: int
    max_model_len: int
    num_pages: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens that fit the pools."""
        return self.num_blocks * self.block_tokens

    @property
    def kv_bytes(self) -> int:
        """Bytes of everything allocated for KV."""
        return (self.num_blocks + 1) * self.block_bytes + self.state_bytes

    @property
    def blocks_per_sequence(self) -> int:
        """Blocks of one sequence of full length."""
        return -(-self.max_model_len // self.block_tokens)

    @property
    def full_sequences(self) -> float:
        """Sequences of full length that the pools hold at once."""
        return self.num_blocks / self.blocks_per_sequence


def plan_kv(
    config: EngineConfig, run: RunConfig, paged: Sequence[PagedGroup], state: Sequence[StateGroup], model_limit: int, vocab_size: int
) -> KvPlan:
    """Decides how many blocks to allocate, with the weights already in memory.

    Without ``num_kv_blocks`` the pool gets its share of memory, at most what ``max_num_seqs`` sequences of full length need. If
    ``max_model_len`` was left out and one full sequence does not fit, the length is lowered to what does.

    Raises:
        CapacityError: no block fits, or a ``max_model_len`` that was asked for does not; the message names the settings to change.
    """
    if config.max_model_len is not None and config.max_model_len > model_limit:
        raise CapacityError(
            f"max_model_len {config.max_model_len} is above the {model_limit} positions this model was made for; lower max_model_len"
        )
    length = max(2, config.max_model_len or model_limit)
    block_tokens = paged[0].page_tokens
    per_block = [block_tokens // g.page_tokens for g in paged]
    block_bytes = sum(n * g.page_bytes for n, g in zip(per_block, paged, strict=True))
    states = (run.max_num_seqs + 1) * sum(map(state_bytes, state))
    if config.num_kv_blocks is not None:
        blocks = config.num_kv_blocks
        _check_fits(run, blocks, block_bytes, states)
    else:
        budget = kv_budget(run, vocab_size) - states
        wanted = run.max_num_seqs * -(-length // block_tokens)
        blocks = min(wanted, budget // block_bytes - 1)
        if blocks < 1:
            raise CapacityError(
                f"no KV block fits: {_gib(max(budget, 0))} are left for KV, one block of {block_tokens} tokens takes {_gib(block_bytes)}; "
                "raise kv_memory_fraction, lower max_num_seqs or block_size, or use a smaller model"
            )
        if blocks * block_tokens < length:
            if config.max_model_len is not None:
                raise CapacityError(
                    f"one sequence of max_model_len {length} needs {_gib(-(-length // block_tokens) * block_bytes)} of KV and "
                    f"{_gib(blocks * block_bytes)} are there ({blocks * block_tokens} tokens); lower max_model_len to "
                    f"{blocks * block_tokens} or raise kv_memory_fraction"
                )
            length = blocks * block_tokens
    pages = tuple(1 + blocks * n for n in per_block)
    return KvPlan(blocks, block_tokens, block_bytes, states, length, pages)


def kv_budget(run: RunConfig, vocab_size: int) -> int:
    """Bytes KV may take now: on a GPU what the fraction of the card leaves beside what is in use, on a CPU a share of free memory."""
    p = run.platform
    free = p.memory_available()
    if p.name == "cpu":
        return int(run.kv_memory_fraction * free)
    return int(run.kv_memory_fraction * p.memory_total()) - (p.memory_total() - free) - sampling_scratch(run.max_num_seqs, vocab_size)


def sampling_scratch(max_num_seqs: int, vocab_size: int) -> int:
    """Bytes a GPU is left for sampling, which works on a few copies of the logits."""
    return 6 * max_num_seqs * vocab_size * 4 + (256 << 20)


def report(
    run: RunConfig,
    plan: KvPlan,
    name: str,
    weight_bytes: int,
    snapshots: tuple[int, int] = (0, 0),
    slices: tuple[int, int] = (0, 0),
    engines: int = 1,
) -> str:
    """What fits, in three lines for a person, and a further one if answers depend on the batch.

    Args:
        snapshots, slices: of states, how many host memory holds and their bytes.
        engines: how many share the requests; sizes are those of one.
    """
    size = f"{plan.full_sequences:.1f}" if plan.full_sequences < 10 else f"{plan.full_sequences:.0f}"
    pool = f"{plan.tokens:,} tokens in {plan.num_blocks:,} blocks of {plan.block_tokens}"
    if plan.state_bytes:
        pool += f" and {_gib(plan.state_bytes)} of state"
    if snapshots[0]:
        pool += f" · {snapshots[0]:,} snapshots of states in {_gib(snapshots[1])} of host memory"
    if slices[0]:
        pool += f" · {slices[0]:,} slices of states in {_gib(slices[1])} of host memory"
    return (
        f"{name} on {run.platform.describe()}, {str(run.dtype).removeprefix('torch.')}"
        + (f": {engines} engines (data_parallel_size), each with:\n" if engines > 1 else "\n")
        + f"  weights {_gib(weight_bytes)} · KV {_gib(plan.kv_bytes)} = {pool}\n"
        f"  at most {run.max_num_seqs} sequences in a step; {size} at the full length of {plan.max_model_len:,} tokens · "
        f"to change: max_num_seqs, max_model_len, kv_memory_fraction ({run.kv_memory_fraction:g}) or num_kv_blocks"
        + ("" if run.batch_invariant else "\n  batch invariance is off: last bits of an answer may follow from what runs beside it")
    )


def weight_bytes(resolved: ResolvedModel, config: EngineConfig, run: RunConfig) -> int:
    """Bytes of a model's parameters as they will lie on the device, from its configuration, and from the headers of an FP8 checkpoint
    whose weights stay packed: nothing is allocated.

    Raises:
        UnsupportedModelError, UnsupportedConfigError: as loading it would; of an FP8 checkpoint also CheckpointError.
    """
    return resident_bytes(model_of_size(resolved, run.dtype, run.device, config.load_format, config.weights))


def check_weights(run: RunConfig, weight_bytes: int) -> None:
    """Refuses weights that cannot fit, before they are loaded.

    Raises:
        CapacityError: the weights alone are larger than the free memory.
    """
    free = run.platform.memory_available()
    if weight_bytes > free:
        raise CapacityError(
            f"the weights take {_gib(weight_bytes)} as {str(run.dtype).removeprefix('torch.')} and {_gib(free)} are free on {run.device}; "
            "use a smaller model, dtype='bfloat16', or another device"
        )


def _check_fits(run: RunConfig, blocks: int, block_bytes: int, states: int) -> None:
    need, free = (blocks + 1) * block_bytes + states, run.platform.memory_available()
    if need > free:
        most = max(0, (free - states) // block_bytes - 1)
        raise CapacityError(f"num_kv_blocks {blocks} needs {_gib(need)} and {_gib(free)} are free on {run.device}; use at most {most}")


def _gib(n: int) -> str:
    return f"{n / 2**30:.2f} GiB" if n >= 1 << 28 else f"{n / 2**20:.1f} MiB"
