"""DeepSeek-V4.1: what its configuration and checkpoint say. It has no forward yet, so no architecture name leads here.

Owns: the plan of layers and caches, the census of tensors, where Engram rows lie. See docs/architecture.md.
"""
