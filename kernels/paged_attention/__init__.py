"""Causal grouped-query attention over paged KV."""

from .plan import KEY_TILE, AttentionPlan, Unit, make_plan
from .reference import paged_attention, tree_sum

__all__ = ["KEY_TILE", "AttentionPlan", "Unit", "make_plan", "paged_attention", "tree_sum"]
