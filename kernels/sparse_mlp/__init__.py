"""Sparse gated feed-forward block: which experts a row takes, and what they make of it."""

from .packed import PackedExperts, pack_experts
from .reference import softmax_top_k

__all__ = ["PackedExperts", "pack_experts", "softmax_top_k"]
