"""The HTTP front: protocols of other people's clients on one side, an asynchronous engine front on the other.

Owns: HTTP, what a client may ask for and how it is told what is wrong, tenants and their limits, the metrics page.
Never touches: tensors, the step loop, how text becomes tokens (see `deepinfer.engine`). Needs the extra ``deepinfer[server]``.
"""
