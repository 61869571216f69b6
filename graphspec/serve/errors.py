"""Errors as clients get them: in OpenAI's format, without paths, tracebacks or text of prompts."""

from __future__ import annotations

import re
from typing import Any

from ..errors import CheckpointError, GraphspecError, RequestError, ResourceError

HARMLESS = re.compile(r"(at least )?\d+( tokens| of them)?|an empty prompt")
"""Matches values that an error about a prompt may quote."""
OUR_PREFIX = "sampling."


class ApiError(Exception):
    """An error response.

    Args:
        status: HTTP status.
        message: for the author of the request.
        param: the field that it is about.
        code: an identifier for programs.
        retry_after: seconds after which the same request may succeed.
        allow: methods that the path has.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        allow: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after, self.allow = retry_after, allow

    @property
    def body(self) -> dict[str, Any]:
        """The JSON document of the response."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response, in addition to those of every response."""
        named = {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        named |= {"Allow": self.allow} if self.allow is not None else {}
        return named if self.retry_after is None else named | {"Retry-After": str(self.retry_after)}


def bad_field(key: str, expected: str, found: object) -> ApiError:
    """A field with a value that can't be served."""
    return ApiError(400, f"{key}: expected {expected}, found {found}", key)


def busy(seconds: int) -> ApiError:
    """The queue is full; ``seconds`` until a retry may succeed."""
    return ApiError(503, "the queue is full", code="queue_full", retry_after=seconds)


def stopping() -> ApiError:
    """The server is shutting down and accepts no more requests."""
    return ApiError(503, "the server is shutting down", code="shutting_down", retry_after=1)


def loading() -> ApiError:
    """The model is being loaded, or its programs are being built."""
    return ApiError(503, "the model is being loaded", code="loading", retry_after=5)


def unusable() -> ApiError:
    """The engine was closed or could not recover from an error, so the process has to be replaced."""
    return ApiError(503, "the engine does not answer", code="engine_down")


def internal() -> ApiError:
    """An unexpected error; the log has the details."""
    return ApiError(500, "internal error", code="internal_error")


def misdirected() -> ApiError:
    """The request names a host that this server is not."""
    return ApiError(421, "expected a Host header that names this server (server.allowed_hosts)", code="misdirected_request")


def from_engine(error: GraphspecError) -> ApiError:
    """An error of the engine, without details that clients may not see."""
    if isinstance(error, RequestError):
        key = error.key.removeprefix(OUR_PREFIX)
        about_text = re.match(r"(prompts?|messages)\b", key) is not None
        shown = "something else" if about_text and not HARMLESS.fullmatch(str(error.found)) else error.found
        return bad_field(key, str(error.expected).replace(OUR_PREFIX, ""), shown)
    if isinstance(error, ResourceError):
        return busy(1) if error.key == "runtime.max_queued" else stopping()
    if isinstance(error, CheckpointError):
        return ApiError(500, "the checkpoint's tokenizer or chat template can't be used", code="checkpoint")
    return internal()
