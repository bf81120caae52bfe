"""Causal grouped-query attention over paged KV."""

from .census import safe_query_block
from .plan import KEY_TILE, AttentionPlan, Unit, make_plan
from .reference import paged_attention, row_quantum, tree_sum

__all__ = ["KEY_TILE", "AttentionPlan", "Unit", "make_plan", "paged_attention", "row_quantum", "safe_query_block", "tree_sum"]
