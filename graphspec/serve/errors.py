"""Errors as clients get them: OpenAI's shape, without paths, traces or words of a prompt."""

from __future__ import annotations

import re
from typing import Any

from ..errors import CheckpointError, GraphspecError, RequestError, ResourceError

HARMLESS = re.compile(r"\d+( tokens| of them)?|an empty prompt")
"""What an error about a prompt may say that it found."""
OUR_PREFIX = "sampling."


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: for whoever wrote the request.
        param: the field it is about.
        code: a word that a program can compare.
        retry_after: seconds after which the same request may be served.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after = status, message, param, code, retry_after

    @property
    def body(self) -> dict[str, Any]:
        """The answer's document."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """The answer's headers, in addition to those of every answer."""
        named = {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        return named if self.retry_after is None else named | {"Retry-After": str(self.retry_after)}


def bad_field(key: str, expected: str, found: object) -> ApiError:
    """A field with a value that can't be served."""
    return ApiError(400, f"{key}: expected {expected}, found {found}", key)


def busy(seconds: int) -> ApiError:
    """No room for the request now."""
    return ApiError(503, "the queue is full", code="queue_full", retry_after=seconds)


def stopping() -> ApiError:
    """The server takes no more requests."""
    return ApiError(503, "the server is shutting down", code="shutting_down", retry_after=1)


def unusable() -> ApiError:
    """The engine was closed, or could not recover from an error: another process has to take its place."""
    return ApiError(503, "the engine does not answer", code="engine_down")


def internal() -> ApiError:
    """Something that should not happen; the log knows more."""
    return ApiError(500, "internal error", code="internal_error")


def from_engine(error: GraphspecError) -> ApiError:
    """An error of the engine in words that may leave the machine."""
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
