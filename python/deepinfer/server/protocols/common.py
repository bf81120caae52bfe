"""What the protocols share beyond sampling values: tools, the form of an answer, images, ids of requests.

Owns: reading these with the path of whatever is wrong. Never touches: where in a body they stand.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from deepinfer.engine.tokenizer import Tokenizer
from deepinfer.errors import InvalidRequestError
from deepinfer.sampling import SamplingParams
from deepinfer.server import shapes
from deepinfer.server.conversation import Conversation, Effort, TokenLogprob, Tool, ToolChoice
from deepinfer.server.errors import BadRequestError
from deepinfer.server.fields import Streaming, typed
from deepinfer.server.http.call import Call, good_request_id
from deepinfer.structured.response_format import from_response_format
from deepinfer.structured_outputs import StructuredOutputs

_TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
MOST_ALTERNATIVES = 20

Form = Mapping[str, Any] | StructuredOutputs
"""What the text of an answer has to be: fields of ``structured_outputs``."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What every protocol's body comes to."""

    model: str
    conversation: Conversation
    params: SamplingParams
    streaming: Streaming


def objects(value: Any, at: str, what: str) -> list[Mapping[str, Any]]:
    """A list of JSON objects.

    Raises:
        BadRequestError: it is something else.
    """
    if not isinstance(value, list):
        raise BadRequestError(f"{at} must be a list of {what}", param=at)
    for place, item in enumerate(value):
        if not isinstance(item, dict):
            raise BadRequestError(f"{at}[{place}] must be an object", param=f"{at}[{place}]")
    return value


def tool(name: Any, body: Mapping[str, Any], schema: str, at: str) -> Tool:
    """A function as a tool; ``schema``: how the protocol calls its parameters.

    Raises:
        BadRequestError: it has no usable name, or a part is of the wrong type.
    """
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        raise BadRequestError(f"{at}.name must be 1 to 64 letters, digits, _ and -", param=f"{at}.name")
    at += "."
    parameters = typed(body, schema, dict, {}, at)
    return Tool(name, typed(body, "description", str, "", at), parameters, typed(body, "strict", bool, False, at))


def check_choice(tools: Sequence[Tool], choice: ToolChoice) -> None:
    """Raises BadRequestError where two tools have one name, or the choice is none of them."""
    names = [t.name for t in tools]
    if len(set(names)) != len(names):
        raise BadRequestError("two tools have the same name; rename one of them", param="tools")
    if choice.name is not None and choice.name not in names:
        raise BadRequestError(f"tool_choice names {choice.name!r}, which is none of the tools", param="tool_choice")
    if choice.mode == "required" and not tools:
        raise BadRequestError("tool_choice asks for a call, and there are no tools", param="tool_choice")


def allowed(tools: Sequence[Tool], names: Iterable[Any]) -> tuple[Tool, ...]:
    """Those of the tools that a choice allows.

    Raises:
        BadRequestError: it allows what is none of them.
    """
    wanted = list(names)
    known = {t.name for t in tools}
    for name in wanted:
        if not isinstance(name, str) or name not in known:
            raise BadRequestError(f"tool_choice allows {name!r}, which is none of the tools", param="tool_choice")
    return tuple(t for t in tools if t.name in wanted)


def image_part(url: Any, at: str) -> dict[str, Any]:
    """An image as a part of a message. Only its bytes are taken: nothing is fetched, and no file of this machine is read.

    Raises:
        BadRequestError: it is no data URL.
    """
    if not isinstance(url, str) or not url:
        raise BadRequestError(f"{at} must be a data: URL", param=at)
    if not url[:5].lower() == "data:":
        raise BadRequestError(f"{at} is no data: URL, and nothing is fetched; send the image itself", param=at, code="unsupported_image")
    return {"type": "image_url", "image_url": {"url": url}}


def effort(value: Any, at: str) -> tuple[Effort | None, bool | None]:
    """How much to reason, and whether at all, if that is said.

    Raises:
        BadRequestError: no known word.
    """
    if value is None:
        return None, None
    if value not in get_args(Effort):
        raise BadRequestError(f"{at} must be one of {', '.join(get_args(Effort))}", param=at)
    return value, value != "none"


def form(value: Any, at: str, nested: str | None) -> Form | None:
    """The form of an answer, of ``response_format`` and its relatives; ``nested``: where in it the schema stands.

    Raises:
        BadRequestError: the type is not known, or there is no schema.
    """
    if value is None:
        return None
    if not isinstance(value, dict):
        raise BadRequestError(f"{at} must be an object", param=at)
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            return {"json_object": True}
        case "json_schema":
            inner = value if nested is None else typed(value, nested, dict, {}, f"{at}.")
            where = at if nested is None else f"{at}.{nested}"
            schema = inner.get("schema")
            if not isinstance(schema, dict | bool):
                raise BadRequestError(f"{where}.schema must be a JSON schema", param=f"{where}.schema")
            strict = typed(inner, "strict", bool, False, f"{where}.")
            return {"json": schema, "strict": strict}
        case _:
            try:
                return from_response_format(value)
            except InvalidRequestError as e:
                raise BadRequestError(f"{at}: {e}", param=f"{at}.type") from None


def asked_form(named: Form | None, at: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The form of an answer as a sampling value: of a protocol's own field, or of ``structured_outputs``.

    Raises:
        BadRequestError: both are given.
    """
    own = body.get("structured_outputs")
    if own is None:
        wanted = named
    elif named is not None:
        raise BadRequestError(f"{at} and structured_outputs say two things; leave one out", param="structured_outputs")
    elif not isinstance(own, dict):
        raise BadRequestError("structured_outputs must be an object", param="structured_outputs")
    else:
        wanted = own
    return {} if wanted is None else {"structured_outputs": wanted}


def own_request_id(call: Call, body: Mapping[str, Any]) -> None:
    """Takes over the client's own id of its request.

    Raises:
        BadRequestError: it cannot be used.
    """
    own = body.get("request_id")
    if own is not None:
        if not good_request_id(own):
            raise BadRequestError("request_id must be up to 128 letters, digits and ._:/+=@-", param="request_id")
        call.request_id = call.record.request_id = own


def logprob_entries(found: Iterable[TokenLogprob], tokenizer: Tokenizer, alternatives: int) -> list[dict[str, Any]]:
    """Log-probabilities as chat completions and responses show them, each with its most likely ``alternatives``."""
    made = []
    for entry in found:
        others = sorted(entry.position.items(), key=lambda item: (-item[1].logprob, item[0]))[:alternatives]
        chosen = _logprob(entry.token_id, entry.position[entry.token_id].logprob, tokenizer)
        made.append({**chosen, "top_logprobs": [_logprob(i, e.logprob, tokenizer) for i, e in others]})
    return made


def _logprob(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id)
    return {"token": data.decode(errors="replace"), "logprob": shapes.number(logprob), "bytes": list(data)}
