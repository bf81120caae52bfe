"""What is served, and what is not.

Owns: `/v1/models`, `/v1/models/{name}`, `/v1/embeddings`. Never touches: the engine.
"""

from __future__ import annotations

from typing import Any

from deepinfer.server.errors import ApiError
from deepinfer.server.fields import no_such_model
from deepinfer.server.http.call import Call


def _card(call: Call, name: str) -> dict[str, Any]:
    state = call.state
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "deepinfer",
        "root": state.llm.config.model,
        "parent": None,
        "max_model_len": state.llm.max_model_len,
    }


async def list_models(call: Call) -> None:
    """All names under which the model is served."""
    await call.reply(200, {"object": "list", "data": [_card(call, name) for name in call.state.model_names]})


async def get_model(call: Call) -> None:
    """One of them."""
    name = call.path_params["name"]
    if name not in call.state.model_names:
        raise no_such_model(call, name)
    await call.reply(200, _card(call, name))


async def embeddings(call: Call) -> None:
    """Not served."""
    raise ApiError(501, "this server generates text; embeddings are not served", code="not_supported")
