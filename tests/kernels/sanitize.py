"""Launches every registered kernel once on random inputs: under ``compute-sanitizer``, which watches its reads and writes.

    compute-sanitizer --tool memcheck python tests/kernels/sanitize.py [--shape NAME]

Exit code 1 if a registered kernel was not launched, so that a new operator cannot be forgotten here. Answers are not compared: that is
what each operator's own tests do.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from deepinfer.kernels import registry
from deepinfer.kernels.toolchain import ModelShape, Program, loading
from deepinfer.kernels.toolchain.driver import Launchable
from deepinfer.kernels.toolchain.shapes import NAMED

FEW, MANY = 5, 300
"""Rows that an operator takes as few, and as many; neither a multiple of what blocks hold."""


class Inputs:
    """Random inputs for a model of ``shape`` on ``device``."""

    def __init__(self, shape: ModelShape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.dtype = getattr(torch, shape.dtype)

    def normal(self, *size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Numbers around 0."""
        return torch.randn(*size, device=self.device).to(dtype or self.dtype)

    def below(self, most: int, *size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Integers of 0 … ``most`` − 1."""
        return torch.randint(0, most, size, device=self.device, dtype=dtype)

    def empty(self, *size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Room for answers."""
        return torch.empty(*size, device=self.device, dtype=dtype or self.dtype)


def argmax(i: Inputs) -> None:
    from deepinfer.kernels.argmax.cuda import Argmax

    for dtype in (i.dtype, torch.float32):
        operator = Argmax(i.shape.vocab, dtype, MANY, i.device)
        for rows in (FEW, MANY):
            operator(i.normal(rows, i.shape.vocab, dtype=dtype), i.empty(rows, dtype=torch.int32), i.empty(rows, dtype=torch.float32))


def begin_step(i: Inputs) -> None:
    from deepinfer.kernels.begin_step import DecodeFields, StepWords
    from deepinfer.kernels.begin_step.cuda import BeginStep
    from deepinfer.kernels.begin_step.words import DELTAS, HEAD, ROWS, SEQ_LEN, SLOTS, SOURCE

    layout = StepWords(max_rows=MANY, maps=2, max_deltas=MANY)
    words = i.below(MANY, layout.total, dtype=torch.int32)
    words[:HEAD] = 0
    words[ROWS], words[DELTAS] = FEW, FEW
    fields, deltas = layout.fields(words), layout.deltas(words)
    fields[SOURCE, 1], fields[SLOTS, 2], fields[SEQ_LEN] = -1, -1, 1
    deltas[:, 0], deltas[:, 1] = torch.arange(MANY, device=i.device), 3
    kernels = loading.require(BeginStep.programs(), i.device, after=True)
    newest, table = i.below(99, MANY, dtype=torch.int32), torch.zeros((MANY, 7), dtype=torch.int32, device=i.device)
    BeginStep(*kernels)(words, layout, newest, table, DecodeFields.make(layout, i.device), MANY, MANY)


def embedding(i: Inputs) -> None:
    from deepinfer.kernels.embedding.cuda import Embedding

    vocab, hidden, half, positions = i.shape.vocab, i.shape.hidden, i.shape.head_dim // 2, 99
    ids = i.below(vocab, FEW)
    ids[0], ids[1] = -1, vocab + 7
    position = i.below(positions, FEW)
    position[0], position[1] = -1, positions + 7
    cosines, sines = (i.normal(positions, half, dtype=torch.float32) for _ in range(2))
    x, cos, sin = (i.empty(FEW, width, dtype=torch.float32) for width in (hidden, half, half))
    operator = Embedding(vocab, hidden, i.shape.head_dim, i.dtype, i.device)
    operator(ids, i.normal(vocab, hidden), x, position, (cosines, sines), (cos, sin))


def linear(i: Inputs) -> None:
    from deepinfer.kernels.linear.choice import LIMITS
    from deepinfer.kernels.linear.cuda import ProductKernels, linears_of

    sizes = [(width, out_width, False) for width, out_width in linears_of(i.shape)]
    if i.shape.weights == "plain":
        sizes.append((i.shape.hidden, i.shape.intermediate, True))
    for width, out_width, gated in sizes:
        kernels = ProductKernels(width, out_width, i.dtype, i.device, gated)
        weight = i.normal(out_width * (2 if gated else 1), width)
        for rows in filter(kernels.covers, (limit - 1 for limit in LIMITS)):
            kernels(i.normal(rows, width), weight, i.empty(rows, out_width))


def linear_fp8(i: Inputs) -> None:
    from deepinfer.kernels.linear.cuda import linears_of
    from deepinfer.kernels.linear_fp8 import PackedWeight, scale_shape
    from deepinfer.kernels.linear_fp8.cuda import _LIMITS, Expansion, FewRowsFp8

    if i.shape.weights != "fp8":
        return
    expansion = Expansion(i.dtype, i.device)
    for width, out_width in linears_of(i.shape)[:-1]:
        scale = i.normal(*scale_shape(out_width, width), dtype=torch.float32)
        weight = PackedWeight(i.normal(out_width, width, dtype=torch.float8_e4m3fn), scale)
        operator = FewRowsFp8(width, out_width, i.dtype, i.device)
        for rows in [limit - 1 for limit in _LIMITS if limit <= operator.limit]:
            operator(i.normal(rows, width), weight, i.empty(rows, out_width))
        expansion.reserve(weight.shape)
        expansion(weight)


def paged_attention(i: Inputs) -> None:
    from deepinfer.kernels.fp8_cache import FP8, CacheScales
    from deepinfer.kernels.paged_attention.cuda import PagedAttention, Scratch, cache_factors
    from deepinfer.kernels.paged_attention.units import one_row_units, step_units

    s = i.shape
    pages, width = 64, 9
    scratch = Scratch(s.heads, s.head_dim, i.device)
    fp8 = s.kv == "fp8"
    operator = PagedAttention(s.heads, s.kv_heads, s.head_dim, s.page_tokens, None, i.dtype, i.device, scratch, fp8)
    k, v = (i.normal(pages, s.page_tokens, s.kv_heads, s.head_dim, dtype=FP8 if fp8 else None) for _ in range(2))
    factors = cache_factors(s.head_dim, CacheScales(0.5, 2.0), i.device) if fp8 else None
    for rows in (FEW, MANY):
        table = i.below(pages, rows, width, dtype=torch.int32)
        position = i.below(width * s.page_tokens, rows)
        q, out = i.normal(rows, s.heads, s.head_dim), i.empty(rows, s.heads, s.head_dim)
        operator(q, k, v, one_row_units(table, position, torch.arange(rows, device=i.device)), out, factors)
    cu_q = [0, 200, 201, MANY]
    table = i.below(pages, 3, width, dtype=torch.int32)
    position = torch.cat([torch.arange(n, device=i.device) + 7 for n in (200, 1, 99)])
    q, out = i.normal(MANY, s.heads, s.head_dim), i.empty(MANY, s.heads, s.head_dim)
    operator(q, k, v, step_units(table, position, cu_q, operator.tokens), out, factors)
    if operator.wide_tokens:
        operator(q, k, v, step_units(table, position, cu_q, operator.wide_tokens, wide=True), out, factors)


def rms_norm(i: Inputs) -> None:
    from deepinfer.kernels.rms_norm.cuda import AddRmsNorm, RmsNorm

    hidden = i.shape.hidden
    x, weight = i.normal(FEW, hidden, dtype=torch.float32), i.normal(hidden, dtype=torch.float32)
    RmsNorm(hidden, 1e-6, i.dtype, i.device)(x, weight, i.empty(FEW, hidden))
    AddRmsNorm(hidden, 1e-6, i.dtype, i.device)(x, i.normal(FEW, hidden), weight, i.empty(FEW, hidden))


def rope_kv(i: Inputs) -> None:
    from deepinfer.kernels.fp8_cache import FP8
    from deepinfer.kernels.rope_kv.cuda import RopeKv

    s = i.shape
    fp8 = s.kv == "fp8"
    operator = RopeKv(s.heads, s.kv_heads, s.head_dim, i.dtype, i.device, s.qk_norm, 1e-6, fp8=fp8)
    cos, sin = (i.normal(FEW, s.head_dim // 2, dtype=torch.float32) for _ in range(2))
    k, v = (i.normal(8, s.page_tokens, s.kv_heads, s.head_dim, dtype=FP8 if fp8 else None) for _ in range(2))
    slots = i.below(8 * s.page_tokens, FEW)
    slots[0], slots[1] = -1, 8 * s.page_tokens + 3
    norm = i.normal(2, s.head_dim, dtype=torch.float32) if s.qk_norm else None
    scales = i.normal(2, dtype=torch.float32) if fp8 else None
    operator(i.normal(FEW, s.heads + 2 * s.kv_heads, s.head_dim), cos, sin, slots, i.empty(FEW, s.heads, s.head_dim), k, v, norm, scales)


def sample(i: Inputs) -> None:
    from deepinfer.kernels.sample.columns import MIN_P, NUM_COLUMNS, PRESENCE, REPETITION, TEMPERATURE, TOP_K, TOP_P
    from deepinfer.kernels.sample.cuda import Draws, EditLists, Edits, Logprobs

    vocab, wide = i.shape.vocab, torch.float32
    table = i.below(1 << 30, FEW, NUM_COLUMNS, dtype=torch.int32)
    for column, value in ((TEMPERATURE, 0.8), (TOP_P, 0.9), (MIN_P, 0.01), (PRESENCE, 0.5), (REPETITION, 1.1)):
        table[:, column] = torch.tensor(value).view(torch.int32).item()
    table[:, TOP_K] = 50
    which = slots = torch.arange(FEW, device=i.device)
    positions = i.below(99, FEW)
    lists = EditLists(
        before=i.below(vocab, FEW, 2),
        bias_ids=i.below(vocab, FEW, 3),
        bias=i.normal(FEW, 3, dtype=wide),
        counts=i.below(3, FEW, vocab, dtype=torch.int32),
        in_prompt=i.below(2, FEW, vocab).bool(),
        bad_last=i.below(vocab, FEW, 2),
        bad_prefix=i.below(vocab, FEW, 2, 4),
        recent=i.below(vocab, FEW, 4),
        stop_ids=i.below(vocab, FEW, 2),
    )
    x = i.normal(FEW, vocab, dtype=wide)
    edits = Edits(vocab, i.device)
    edits.mask(x, which, i.below(1 << 31, FEW, -(-vocab // 32)).to(torch.int32))
    edits(x, which, slots, table, positions, lists)
    answers = (i.empty(FEW, dtype=wide), i.empty(FEW, dtype=torch.int64), i.empty(FEW, dtype=torch.int32))
    for few_rows in (0, FEW):
        for dtype in (i.dtype, wide):
            logits = i.normal(FEW, vocab, dtype=dtype)
            largest, tokens = (part.to(kind) for part, kind in zip(logits.max(-1), (wide, torch.int32), strict=True))
            draws = Draws(vocab, dtype, FEW, i.device, few_rows=few_rows)
            draws.plain(logits, which, slots, table, positions, largest, tokens)
            draws.ranked(logits, which, slots, table, positions, largest, tokens)
        logprobs = Logprobs(vocab, i.device, few_rows=few_rows)
        logprobs(x, i.below(vocab, FEW), *answers, i.empty(FEW, 20, dtype=torch.int32))


def swiglu(i: Inputs) -> None:
    from deepinfer.kernels.swiglu.cuda import SwiGlu

    SwiGlu(i.shape.intermediate, i.dtype, i.device)(i.normal(FEW, 2, i.shape.intermediate), i.empty(FEW, i.shape.intermediate))


EXERCISES: dict[str, Callable[[Inputs], None]] = {
    f.__name__: f for f in (argmax, begin_step, embedding, linear, linear_fp8, paged_attention, rms_norm, rope_kv, sample, swiglu)
}
"""Operator → what calls all of its kernels."""


class _Noted:
    """A kernel whose launches are noted."""

    def __init__(self, kernel: Launchable, program: Program, launched: set[Program]) -> None:
        self._kernel, self._program, self._launched = kernel, program, launched

    def launch(self, grid: tuple[int, ...], *args: torch.Tensor | int | float) -> None:
        self._launched.add(self._program)
        self._kernel.launch(grid, *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)


@contextmanager
def noting(launched: set[Program]) -> Iterator[None]:
    """Has operators that are made within launch kernels that note it in ``launched``."""
    load: Callable[..., Sequence[Launchable] | None] = loading.load

    def noted(programs: Sequence[Program], *args: object, **more: object) -> list[_Noted] | None:
        kernels = load(programs, *args, **more)
        return None if kernels is None else [_Noted(k, p, launched) for k, p in zip(kernels, programs, strict=True)]

    with patch.object(loading, "load", noted):
        yield


def exercise(name: str, device: torch.device) -> list[Program]:
    """Runs every operator for the named shape; the registered kernels that were not launched."""
    launched: set[Program] = set()
    inputs = Inputs(NAMED[name], device)
    with noting(launched):
        for run in EXERCISES.values():
            run(inputs)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    return [program for program in registry.wanted(NAMED[name]) if program not in launched]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=list(NAMED), default="smollm2-135m")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("sanitize: no GPU here; tests/kernels/test_sanitize.py checks on a CPU that every kernel is called", file=sys.stderr)
        return 2
    missed = exercise(args.shape, torch.device("cuda"))
    for program in missed:
        print(f"sanitize: {program.name} was not launched: add it to EXERCISES", file=sys.stderr)
    print(f"{len(registry.wanted(NAMED[args.shape])) - len(missed)} kernels launched")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
