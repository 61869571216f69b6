"""Bodies of requests: read in time, and parsed without holding up others."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request

from ..config.checks import brief
from ..config.paths import refuse_constant
from .errors import ApiError
from .limits import ClientGone

MAX_VALUES = 2**19
"""Values of a body, where the context does not need more."""
NESTED_SHARE = 16
"""One of this many values may be a list or an object."""
LARGE_BODY = 2**18
"""Bytes from which a body is parsed by a thread of its own."""
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""An escape that may be half of a character."""


async def read_body(request: Request, maximum: int, seconds: float) -> bytes:
    """The bytes of a request's body, which its headers say is JSON.

    Raises:
        ApiError: 408, it took longer than ``seconds``; 413, it has more than ``maximum`` bytes; 415, the headers announce
            something else.
        ClientGone: the client disconnected while sending.
    """
    _check_type(request.headers)
    too_long = ApiError(413, f"expected a body of at most {maximum} bytes", code="body_too_large")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > maximum:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > maximum:
                    raise too_long
    except TimeoutError as error:
        raise ApiError(408, "the body did not come in time", code="timeout") from error
    except ClientDisconnect as error:
        raise ClientGone from error
    return bytes(body)


def parse_json(body: bytes, max_values: int) -> dict[str, Any]:
    """The JSON object in a body.

    Values are counted first, which takes little time for each byte: the time that reading takes grows with their number, and meanwhile the
    interpreter does nothing else, in no thread.

    Args:
        body: the bytes.
        max_values: most numbers, texts, lists and objects in it, keys included.

    Raises:
        ApiError: 400, it is not one, or has too many values.
    """
    if len(body) > max_values // NESTED_SHARE:
        _count_values(body, max_values)
    try:
        data = json.loads(body.decode("utf-8"), parse_constant=refuse_constant)
        if SURROGATE.search(body):
            # UTF-8 has no lone ones.
            json.dumps(data, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise ApiError(400, "expected a body of JSON in UTF-8", code="invalid_json") from error
    if not isinstance(data, dict):
        raise ApiError(400, f"expected a JSON object, found {brief(type(data).__name__)}", code="invalid_json")
    return data


def _count_values(body: bytes, maximum: int) -> None:
    """Check how many values a body has, and how many of them are lists and objects, which cost several times as much as others.

    Raises:
        ApiError: 400.
    """
    # Without escapes, quotation marks begin and end texts.
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    texts = plain.count(b'"') // 2
    if texts <= maximum:
        outside = b"".join(plain.split(b'"')[::2])
        nested = outside.count(b"[") + outside.count(b"{")
        if nested + outside.count(b",") + outside.count(b":") <= maximum and nested <= maximum // NESTED_SHARE:
            return
    expected = f"expected at most {maximum} values in a body, and at most {maximum // NESTED_SHARE} lists and objects"
    raise ApiError(400, expected, code="too_many_values")


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
