"""Which back end a server speaks to its model through.

Owns: the choice, made once per front process. Never touches: what back ends do.
"""

from __future__ import annotations

import asyncio
import importlib.util
from typing import TYPE_CHECKING

from deepinfer.errors import ConfigError
from deepinfer.server.chat.recipe import VERSIONS, RecipeBackend, missing_tokens
from deepinfer.server.chat.template import TemplateBackend
from deepinfer.server.conversation import ChatBackend
from deepinfer.server.errors import ApiError

if TYPE_CHECKING:
    from deepinfer.engine.async_engine import AsyncLLM
    from deepinfer.server.state import ServerState

_PART = "chat_backend"


def choose(llm: AsyncLLM, wanted: str) -> ChatBackend:
    """The back end for a model that is loaded; takes a second for some.

    Args:
        wanted: ``auto``: DeepSeek's own format for its models, where the package and the vocabulary allow it; else the chat template.

    Raises:
        ConfigError: the model cannot be spoken to in the wanted way.
    """
    tokenizer = llm.get_tokenizer()
    version = VERSIONS.get(llm.architecture)
    if wanted == "auto":
        able = version is not None and importlib.util.find_spec("deepseek_recipe") is not None and not missing_tokens(tokenizer, version)
        wanted = "deepseek" if able else "template"
    if wanted == "deepseek":
        return RecipeBackend(tokenizer, version or "v4_1", llm.eos_token_ids, takes_images=llm.takes_images)
    if llm.chat_template is None:
        raise ConfigError("this model has no chat template; start the server with --chat-template, or use /v1/completions")
    return TemplateBackend(tokenizer, llm.chat_template, llm.chat_prompt, llm.eos_token_ids)


async def chat_backend(state: ServerState) -> ChatBackend:
    """The server's back end; made at its first use.

    Raises:
        ApiError: the model cannot be spoken to (501).
    """
    known = state.parts.get(_PART)
    if known is None:
        known = state.parts[_PART] = asyncio.ensure_future(asyncio.to_thread(choose, state.llm, state.settings.chat_backend))
    try:
        return await asyncio.shield(known)
    except ConfigError as e:
        raise ApiError(501, str(e), code="no_chat") from None


async def make_ready(state: ServerState) -> None:
    """Makes the back end before the first request comes.

    Raises:
        ConfigError: the model cannot be spoken to in the way that was asked for; without such a wish every request is told.
    """
    try:
        await chat_backend(state)
    except ApiError as e:
        if state.settings.chat_backend != "auto":
            raise ConfigError(f"--chat-backend {state.settings.chat_backend}: {e.message}") from None
