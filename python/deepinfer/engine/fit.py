"""What a model leaves room for on a machine that need not be this one.

Owns: the arithmetic from sizes and memory to sequences. Never touches: devices, files.

Weights are spread evenly over the GPUs, each sequence's KV lies on one of them. The pool is sized as ``engine.planner`` sizes it:
what the fraction of a GPU leaves beside weights, state slots and the sampler's copies of the logits.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.engine.planner import sampling_scratch
from deepinfer.errors import ConfigError
from deepinfer.models.sizes import ModelSizes
from deepinfer.worker.kv_cache import state_bytes


@dataclass(frozen=True)
class Machine:
    """``host_bytes`` None = not stated. ``fraction``: share of a GPU (or, without GPUs, of the host) that may be used."""

    gpus: int
    gpu_bytes: int
    host_bytes: int | None
    fraction: float = 0.9

    def __post_init__(self) -> None:
        if self.gpus < 0 or (self.gpus and self.gpu_bytes <= 0) or not 0 < self.fraction <= 1:
            raise ConfigError("a machine needs a number of GPUs ≥ 0, their memory above 0 and a fraction in (0, 1]")
        if self.host_bytes is not None and self.host_bytes <= 0:
            raise ConfigError("the memory of the host must be above 0")
        if not self.gpus and self.host_bytes is None:
            raise ConfigError("say how many GPUs there are, or how much memory the host has")


@dataclass(frozen=True)
class Fit:
    """What is left for sequences; per place, of which there are ``places`` (GPUs, or the host alone)."""

    places: int
    weight_bytes: int
    state_bytes: int
    kv_bytes: int
    """Room for KV blocks; negative where not even the weights fit."""
    blocks: int
    tokens: int
    """In all places together."""
    full_sequences: int
    """Of ``length`` tokens, in all places together; more than ``max_num_seqs`` a place wait their turn."""
    length: int
    least_places: int
    """Fewest of these places that hold the weights and one block."""
    tables_in_host: bool
    """Tables are kept in host memory; otherwise they stay in their files, rows read lately in a cache."""

    @property
    def fits(self) -> bool:
        """Whether one sequence of ``length`` tokens has room."""
        return self.full_sequences > 0


def fit(sizes: ModelSizes, machine: Machine, form: str, max_num_seqs: int, length: int | None = None) -> Fit:
    """How much of ``sizes`` with weights in ``form`` the machine holds.

    ``max_num_seqs``: sequences in a step and state slots of one place. ``length``: tokens of a full sequence, None = the model's
    own limit. Raises ``ConfigError`` for a form the model does not have or a length above its limit.
    """
    if form not in sizes.weight_bytes:
        raise ConfigError(f"weights of this model are {' or '.join(sizes.weight_bytes)}, not {form!r}")
    length = sizes.max_position if length is None else length
    if not 0 < length <= sizes.max_position:
        raise ConfigError(f"a length of {length} tokens is not within the {sizes.max_position} this model was made for")
    places, weights = max(machine.gpus, 1), sizes.weight_bytes[form]
    usable = int(machine.fraction * (machine.gpu_bytes if machine.gpus else machine.host_bytes or 0))
    states = (max_num_seqs + 1) * sum(map(state_bytes, sizes.state))
    fixed = states + (sampling_scratch(max_num_seqs, sizes.vocab) if machine.gpus else 0)
    in_host = machine.host_bytes is not None and sizes.table_bytes > 0
    if in_host:
        beside = 0 if machine.gpus else weights + fixed
        in_host = beside + sizes.table_bytes <= int((machine.host_bytes or 0) * machine.fraction)
    share = -(-weights // places)
    room = usable - fixed - share
    if in_host and not machine.gpus:
        room -= sizes.table_bytes
    # one block is the null block
    blocks = max(0, room // sizes.block_bytes - 1)
    per_sequence = -(-length // sizes.block_tokens)
    spare = usable - fixed - 2 * sizes.block_bytes
    return Fit(
        places=places,
        weight_bytes=share,
        state_bytes=states,
        kv_bytes=room,
        blocks=blocks,
        tokens=blocks * sizes.block_tokens * places,
        full_sequences=blocks // per_sequence * places,
        length=length,
        least_places=-(-weights // spare) if spare > 0 else 0,
        tables_in_host=in_host,
    )
