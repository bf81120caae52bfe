"""The sizes of a model that its kernels are made for, with models that are built and measured again and again."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from deepinfer.errors import KernelBuildError

_RUN_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


def run_dtype(dtype: torch.dtype) -> str:
    """Its name as ``ModelShape.dtype``. Raises ``KernelBuildError`` for one that no kernel is written for."""
    if dtype not in _RUN_DTYPES:
        raise KernelBuildError(f"kernels are written for bfloat16 and float16, not for {str(dtype).removeprefix('torch.')}")
    return _RUN_DTYPES[dtype]


def whole_reads(numbers: int, wide: int) -> int:
    """Reads of ``wide`` numbers, 16 bytes, that a row of ``numbers`` is. Raises ``KernelBuildError`` if it is no whole number of them."""
    if numbers % wide:
        raise KernelBuildError(f"rows of {numbers} numbers cannot be read 16 bytes at a time")
    return numbers // wide


def even_blocks(reads: int, most: int = 128) -> tuple[int, int]:
    """(blocks, threads of a block) that share out ``reads`` of a row, one a thread, in equal pieces: as few blocks as ``most`` threads
    allow, in whole warps, of which the last may be idle in part."""
    blocks = next(n for n in range(-(-reads // most), reads + 1) if reads % n == 0)
    return blocks, -(-reads // (32 * blocks)) * 32


@dataclass(frozen=True)
class ModelShape:
    """What the kernels of a dense decoder follow from; the number of layers changes none of them.

    Attributes:
        hidden: width of the residual stream.
        heads: query heads.
        kv_heads: key (and value) heads; divides ``heads``.
        head_dim: channels of a head.
        intermediate: width of the gated part.
        vocab: rows of the embedding and of the head.
        page_tokens: tokens of a page of the KV cache.
        dtype: the run dtype, ``bfloat16`` or ``float16``.
        qk_norm: whether queries and keys are normalised head by head before they are rotated.
        weights: how projections keep their weights: ``plain`` (the run dtype) or ``fp8`` (packed, ``kernels/linear_fp8``).
        kv: how keys and values are kept: ``plain`` (the run dtype) or ``fp8`` (8-bit floats, ``kernels/fp8_cache``).
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    page_tokens: int = 64
    dtype: str = "bfloat16"
    qk_norm: bool = False
    weights: str = "plain"
    kv: str = "plain"

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads."""
        return self.kv_heads * self.head_dim


SMOLLM2_135M = ModelShape(hidden=576, heads=9, kv_heads=3, head_dim=64, intermediate=1536, vocab=49152)
SMOLLM2_135M_FP16 = replace(SMOLLM2_135M, dtype="float16")
SMOLLM2_1_7B = ModelShape(hidden=2048, heads=32, kv_heads=32, head_dim=64, intermediate=8192, vocab=49152)
LLAMA_8B = ModelShape(hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab=128256)
QWEN3_8B = ModelShape(hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=12288, vocab=151936, qk_norm=True)
QWEN3_8B_FP8 = replace(QWEN3_8B, weights="fp8")
SMOLLM2_135M_KV8 = replace(SMOLLM2_135M, kv="fp8")
SMOLLM2_135M_FP16_KV8 = replace(SMOLLM2_135M_FP16, kv="fp8")
QWEN3_8B_KV8 = replace(QWEN3_8B, kv="fp8")

NAMED = {
    "smollm2-135m": SMOLLM2_135M,
    "smollm2-135m-fp16": SMOLLM2_135M_FP16,
    "smollm2-1.7b": SMOLLM2_1_7B,
    "llama-8b": LLAMA_8B,
    "qwen3-8b": QWEN3_8B,
    "qwen3-8b-fp8": QWEN3_8B_FP8,
    "smollm2-135m-kv8": SMOLLM2_135M_KV8,
    "smollm2-135m-fp16-kv8": SMOLLM2_135M_FP16_KV8,
    "qwen3-8b-kv8": QWEN3_8B_KV8,
}
"""Shapes that every operator's kernels are compiled for before a change is taken."""
