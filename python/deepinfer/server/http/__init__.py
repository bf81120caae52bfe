"""One HTTP request at a time: reading it, answering it, and who may send it.

Owns: bodies, answers, event streams, keys, limits of connections. Never touches: what is in a body (see `deepinfer.server.endpoints`).
"""
