"""One model on several ranks: a process each, requests spread over them, and experts if that is asked for.

Owns: starting and watching the ranks (`group_engine`), which of them gets a request (`balancer`), and how a rank joins the others
where they step together (`membership`). Never touches: tensors, the step itself; what ranks tell each other in a step is
`deepinfer.distributed`'s.
"""
