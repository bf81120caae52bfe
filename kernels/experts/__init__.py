"""Mixture of experts: which experts a row goes to, and what they give."""

from .reference import ExpertBank, expert_mlp, gated_mlp, pack_experts, route

__all__ = ["ExpertBank", "expert_mlp", "gated_mlp", "pack_experts", "route"]
