"""Ranks that act as one.

Owns: what ranks say to each other so that each of them makes the same steps. Never touches: requests, schedulers, models (a leaf,
usable from every layer).
"""

from deepinfer.distributed.experts import ExpertGroup, TorchExpertGroup, current_group, share, spread_experts
from deepinfer.distributed.vote import StepVote, TorchVote

__all__ = ["ExpertGroup", "StepVote", "TorchExpertGroup", "TorchVote", "current_group", "share", "spread_experts"]
