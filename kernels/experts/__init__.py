"""Mixture of experts: which experts a row goes to, and what they give."""

from .packed import PackedExperts, expert_mlp, gated_mlp, pack_experts
from .reference import route, softmax_top_k

__all__ = ["PackedExperts", "expert_mlp", "gated_mlp", "pack_experts", "route", "softmax_top_k"]
