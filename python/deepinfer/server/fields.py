"""Fields that the protocols share: what of a body becomes sampling values, with the path of whatever is wrong.

Owns: names and types of these fields, and the forms of a prompt in JSON. Never touches: HTTP, what the ranges are (see
`SamplingParams`), what only one protocol has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from deepinfer.errors import SamplingParamsError
from deepinfer.sampling import SamplingParams
from deepinfer.server.errors import ApiError, BadRequestError
from deepinfer.structured import from_response_format
from deepinfer.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from deepinfer.server.http.call import Call

T = TypeVar("T")

SAMPLING = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "max_tokens",
    "min_tokens",
    "stop",
    "include_stop_str_in_output",
    "stop_token_ids",
    "ignore_eos",
    "logit_bias",
    "bad_words",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
    "priority",
    "cache_salt",
    "traffic_class",
)
"""Passed on under their own names to SamplingParams, which checks ranges."""

_LISTS = ("stop", "stop_token_ids", "bad_words")
_MOST_ENTRIES = 1024
"""Of a list of these, and of ``logit_bias``."""
_MOST_CHARACTERS = 1 << 16
"""Of all strings of such a list: each costs time before the engine hears of the request."""

_NAME = re.compile(r"\w+")

Prompt = str | list[int]


def sampling_values(body: Mapping[str, Any], names: Sequence[str] = SAMPLING) -> dict[str, Any]:
    """Those of the fields that a body has; ``null`` is as good as absent.

    Raises:
        BadRequestError: a list is something else, or too long.
    """
    values = {name: body[name] for name in names if body.get(name) is not None}
    for name in _LISTS:
        if name in values and not isinstance(values[name], list) and not (name != "stop_token_ids" and isinstance(values[name], str)):
            raise BadRequestError(f"{name} must be a list", param=name)
    for name in (*_LISTS, "logit_bias"):
        value = values.get(name)
        if isinstance(value, list | dict) and len(value) > _MOST_ENTRIES:
            raise BadRequestError(f"{name} has {len(value)} entries, at most {_MOST_ENTRIES} are served", param=name)
        texts = [value] if isinstance(value, str) else value if isinstance(value, list) else ()
        if sum(len(text) for text in texts if isinstance(text, str)) > _MOST_CHARACTERS:
            raise BadRequestError(f"{name} has more than {_MOST_CHARACTERS} characters", param=name)
    return values


def sampling_params(call: Call, values: Mapping[str, Any], renamed: Mapping[str, str] | None = None) -> SamplingParams:
    """Sampling values over the model's own defaults and the tenant's.

    Args:
        values: as `SamplingParams` names them.
        renamed: how a client spelled some of them, for errors.

    Raises:
        BadRequestError: one of them is out of range, or two conflict; ``param`` says which.
    """
    most = call.state.settings.max_logprobs
    for name in ("logprobs", "prompt_logprobs"):
        count = values.get(name)
        if isinstance(count, int) and most >= 0 and (count > most or count == -1):
            spelled = (renamed or {}).get(name, name)
            raise BadRequestError(f"{spelled} must be at most {most} here, got {count}", param=spelled, code="invalid_value")
    try:
        return call.state.llm.default_sampling_params(**{"traffic_class": call.tenant.traffic_class, **values})
    except SamplingParamsError as e:
        named = _NAME.match(str(e))
        field = named[0] if named is not None and named[0] in SamplingParams.__dataclass_fields__ else None
        shown = (renamed or {}).get(field, field) if field is not None else None
        message = str(e) if shown == field else str(e).replace(str(field), str(shown), 1)
        raise BadRequestError(message, param=shown, code="invalid_value") from None


def form(body: Mapping[str, Any]) -> StructuredOutputs | None:
    """What the answer has to be: ``response_format``, or ``structured_outputs`` as `StructuredOutputs` takes it; ``None``: anything.

    Raises:
        InvalidRequestError, BadRequestError: it is wrong, or said twice.
    """
    own, other = StructuredOutputs.of(body.get("structured_outputs")), from_response_format(body.get("response_format"))
    if own is not None and other is not None:
        message = "response_format and structured_outputs both say what the answer has to be; give one of them"
        raise BadRequestError(message, param="response_format")
    return own or other


def typed(body: Mapping[str, Any], name: str, kind: type[T], default: T, at: str = "") -> T:
    """A field of one JSON type.

    Raises:
        BadRequestError: it is of another.
    """
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        names = {bool: "true or false", int: "an integer", str: "a string", dict: "an object", list: "a list"}
        raise BadRequestError(f"{at}{name} must be {names.get(kind, kind.__name__)}", param=f"{at}{name}")
    return value


@dataclass(frozen=True, slots=True)
class Streaming:
    """``usage``: a last chunk with the token counts; ``continuous``: they are in every chunk."""

    on: bool = False
    usage: bool = False
    continuous: bool = False


def streaming(body: Mapping[str, Any]) -> Streaming:
    """``stream`` and ``stream_options``."""
    on = typed(body, "stream", bool, False)
    options = typed(body, "stream_options", dict, {})
    if options and not on:
        raise BadRequestError("stream_options needs stream: true", param="stream_options")
    at = "stream_options."
    return Streaming(on, typed(options, "include_usage", bool, False, at), typed(options, "continuous_usage_stats", bool, False, at))


def check_model(call: Call, body: Mapping[str, Any]) -> str:
    """The name of the model that a body asks for, which is one of the served; left out, it is the first.

    Raises:
        ApiError: it is not served (404).
    """
    asked = typed(body, "model", str, "")
    name = asked or call.state.model_name
    if name not in call.state.model_names:
        raise no_such_model(call, name)
    call.record.model = name
    return name


def no_such_model(call: Call, name: str) -> ApiError:
    """404 for a model that is not served here."""
    served = ", ".join(call.state.model_names)
    shown = name if len(name) <= 100 else name[:99] + "…"
    return ApiError(404, f"the model {shown!r} is not served here; served: {served}", code="model_not_found", param="model")


def refuse(body: Mapping[str, Any], calm: Mapping[str, tuple[Any, ...]]) -> None:
    """Turns away fields that are known and not served, unless they hold a value that changes nothing.

    Raises:
        BadRequestError: which field it is.
    """
    for name, values in calm.items():
        value = body.get(name)
        if value is not None and not any(type(value) is type(v) and value == v for v in values):
            raise BadRequestError(f"{name} is not served; leave it out", param=name, code="unsupported_field")


def check_best_of(body: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Choosing among answers is not served. Raises BadRequestError unless ``best_of`` asks for no more than ``n``."""
    if (best_of := body.get("best_of")) is not None and best_of != values.get("n", 1):
        raise BadRequestError("best_of is served only when it equals n; leave it out", param="best_of", code="unsupported_field")


def is_ids(value: Any) -> bool:
    """Whether a value is a non-empty list of integers."""
    return isinstance(value, list) and bool(value) and all(type(i) is int for i in value)


def prompts(value: Any) -> list[Prompt]:
    """A prompt as completions take it: text, token ids, or a list of either.

    Raises:
        BadRequestError: it is nothing of that.
    """
    if isinstance(value, str) or is_ids(value):
        return [value]
    if isinstance(value, list) and value and all(isinstance(p, str) or is_ids(p) for p in value):
        return list(value)
    raise BadRequestError("prompt must be a string, a list of token ids, or a non-empty list of those", param="prompt")
