"""Limits of the server: requests at once, size of a body, time to read it, and API keys."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request

from ..checks import brief
from ..errors import ConfigError
from ..paths import reason, refuse_constant
from .errors import ApiError, busy

Result = TypeVar("Result")
RETRY_SECONDS = 1


class ClientGone(Exception):  # noqa: N818 - not an error
    """The client disconnected before its response."""


class Slots:
    """Slots for requests that run or wait.

    Args:
        most: number of slots.
    """

    def __init__(self, most: int) -> None:
        self.most, self.taken = most, 0

    @contextmanager
    def take(self, count: int) -> Iterator[None]:
        """A context that holds ``count`` slots.

        Raises:
            ApiError: 503, fewer are free now; 400, there are fewer in all.
        """
        if count > self.most:
            raise ApiError(400, f"expected at most {self.most} outputs in one request, found {count}", "n")
        if self.taken + count > self.most:
            raise busy(RETRY_SECONDS)
        self.taken += count
        try:
            yield
        finally:
            self.taken -= count


class Keys:
    """The API keys that are accepted.

    Args:
        keys: a request needs one of them; empty: it needs none.
    """

    def __init__(self, keys: Sequence[str] = ()) -> None:
        self._keys = [key.encode() for key in keys]

    @classmethod
    def read(cls, file: Path) -> Keys:
        """Keys from a file, one per line.

        Raises:
            ConfigError: it can't be read, or has none.
        """
        try:
            keys = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("server.api_key_file", "a file of keys, one per line", f"{file}: {reason(error)}") from error
        if not keys:
            raise ConfigError("server.api_key_file", "at least one key", f"none in {file}")
        return cls(keys)

    def check(self, header: str | None) -> None:
        """Check the ``Authorization`` header, in a time that does not depend on how many characters are right.

        Raises:
            ApiError: 401.
        """
        if not self._keys:
            return
        scheme, _, token = (header or "").partition(" ")
        # Header values are bytes, which Starlette shows as Latin-1; keys are UTF-8.
        given = token.strip().encode("latin-1", "replace")
        # All keys are compared, so that the time does not reveal which one nearly matched.
        if not sum(hmac.compare_digest(given, key) for key in self._keys) or scheme.lower() != "bearer":
            raise ApiError(401, "expected a valid API key as Authorization: Bearer KEY", code="invalid_api_key")


async def read_json(request: Request, most: int, seconds: float) -> dict[str, Any]:
    """The body of a request, which is a JSON object.

    Raises:
        ApiError: 400, it is not one; 408, it took longer than ``seconds``; 413, it has more than ``most`` bytes; 415, the headers announce
            something else.
        ClientGone: the client disconnected while sending.
    """
    _check_type(request.headers)
    too_long = ApiError(413, f"expected a body of at most {most} bytes", code="body_too_large")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > most:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    raise too_long
    except TimeoutError as error:
        raise ApiError(408, "the body did not come in time", code="timeout") from error
    except ClientDisconnect as error:
        raise ClientGone from error
    try:
        data = json.loads(body.decode("utf-8"), parse_constant=refuse_constant)
        json.dumps(data, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise ApiError(400, "expected a body of JSON in UTF-8", code="invalid_json") from error
    if not isinstance(data, dict):
        raise ApiError(400, f"expected a JSON object, found {brief(type(data).__name__)}", code="invalid_json")
    return data


def _check_type(headers: Headers) -> None:
    """Check that a body is JSON as it stands.

    A web page can send other types, and none, to any server without its consent.

    Raises:
        ApiError: 415.
    """
    media = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json" and not (media.startswith("application/") and media.endswith("+json")):
        raise ApiError(415, f"expected Content-Type: application/json, found {brief(media) if media else 'none'}", code="unsupported_type")
    if (coding := headers.get("content-encoding", "identity").strip().lower()) != "identity":
        raise ApiError(415, f"expected a body without Content-Encoding, found {brief(coding)}", code="unsupported_type")


async def unless_gone(receive: Callable[[], Awaitable[Any]], work: Awaitable[Result]) -> Result:
    """The result of ``work``, which is cancelled if the client disconnects.

    Args:
        receive: of a request whose body has been read.
        work: that makes the response.

    Raises:
        ClientGone: the client disconnected first.
    """

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(watch())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
