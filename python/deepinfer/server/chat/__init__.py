"""Back ends between a conversation and the engine, and what takes answers apart.

Owns: how a family of models is spoken to and understood. Never touches: HTTP, JSON of a protocol, the engine itself.
"""
