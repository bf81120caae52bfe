"""One model on several ranks: a process each, requests spread over them, experts over all of them.

Owns: starting and watching the ranks (`group_engine`), which of them gets a request (`balancer`), and how a rank joins the others
(`membership`). Never touches: tensors, the step itself; what ranks tell each other in a step is `deepinfer.distributed`'s.
"""
