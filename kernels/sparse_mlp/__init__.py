"""Former name of ``kernels.experts``."""

from ..experts import PackedExperts, pack_experts, softmax_top_k

__all__ = ["PackedExperts", "pack_experts", "softmax_top_k"]
