"""The Mixtral family for DeepInfer, found through its entry point.

Owns: grouped-query attention, optionally windowed, and sparse experts in pre-norm layers. Never touches: checkpoint formats, KV
allocation, scheduling, sampling.
"""
