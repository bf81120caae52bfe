"""DeepSeek-V4.1: from its configuration and checkpoint to logits.

Owns: the plan of layers and caches, the census of tensors, parameters and their loading, Engram rows, the forward. Never touches:
the scheduler, sampling, KV allocation. See docs/architecture.md.
"""
