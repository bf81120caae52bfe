"""Ranks that act as one.

Owns: what ranks say to each other so that each of them makes the same steps. Never touches: requests, schedulers, models (a leaf,
usable from every layer).
"""

from deepinfer.distributed.vote import StepVote, TorchVote

__all__ = ["StepVote", "TorchVote"]
