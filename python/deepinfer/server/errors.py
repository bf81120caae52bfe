"""What a client is told when something is wrong, in its own protocol's shape.

Owns: :class:`ApiError`, the JSON bodies of errors, and which of our errors is which status. Never touches: sockets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from deepinfer import errors

Protocol = Literal["openai", "anthropic"]

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "api_error",
    501: "not_supported_error",
    503: "overloaded_error",
}


_GRAMMARS_BUSY = 5.0
"""Seconds after which to try again with a grammar for which there was no time."""

_LONGEST = 1000
"""Characters of a message."""


class ApiError(Exception):
    """The end of one request with a status other than 200.

    Args:
        status: HTTP status.
        message: one sentence that says what to change.
        code: short name for programs, such as ``"model_not_found"``.
        param: the field of the request that is at fault, as a path (``"messages[0].content"``).
        retry_after: seconds after which to try again, sent as ``Retry-After``.
        headers: further headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if len(message) > _LONGEST:  # it repeats what a client sent
            message = f"{message[: _LONGEST // 2]} … {message[-_LONGEST // 2 :]}"
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.retry_after = status, message, code, param, retry_after
        self.headers = dict(headers or {})

    def body(self, protocol: Protocol = "openai") -> dict[str, Any]:
        """The JSON object to answer with."""
        kind = _TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        if protocol == "anthropic":
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class BadRequestError(ApiError):
    """Status 400: a field is missing, of the wrong type, out of range or not served."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(400, message, param=param, code=code)


def as_api_error(error: BaseException) -> ApiError:
    """What a client is told of an error of ours; anything unforeseen is a 500 that says nothing of its inside."""
    match error:
        case ApiError():
            return error
        case errors.PromptTooLongError():
            return BadRequestError(str(error), code="context_length_exceeded")
        case errors.GrammarBusyError():
            return ApiError(503, str(error), code="grammars_busy", retry_after=_GRAMMARS_BUSY)
        case errors.InvalidRequestError():
            return BadRequestError(str(error))
        case errors.EngineDeadError():
            return ApiError(503, "the engine has stopped; it is not restarted by itself", code="engine_dead", retry_after=30)
        case errors.StepFailedError() | errors.TransferError() | errors.HandoverError():
            return ApiError(500, "the step that computed this request failed; sending it again computes it anew", code="step_failed")
        case _:
            return ApiError(500, "internal error", code="internal_error")
