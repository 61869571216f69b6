"""What every request passes before its route: its id, the access log, and checks of headers."""

from __future__ import annotations

import ipaddress
import json
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..config.server_options import ServerConfig
from .errors import ApiError, misdirected
from .generation import Generation

logger = logging.getLogger("graphspec.access")
Refuse = Callable[[Request, Exception], Awaitable[Response]]
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
PROBES = ("/health", "/live")
"""Paths without a check: probes ask by the address of a container, and the answers say nothing about the model."""
HEADER = b"x-request-id"
LONGEST_ID, LONGEST_PATH = 128, 200
"""Characters of a client's request id that are kept, and of a path that is logged."""
RECORD = "graphspec.record"
PORT = re.compile(r":\d*$")


def hosts_of(options: ServerConfig) -> Collection[str] | None:
    """Names that the ``Host`` header may have; None: any.

    A web page can give a name of its own the address 127.0.0.1, and so reach a server that listens there as its own origin. The ``Host``
    header has that name.
    """
    if options.allowed_hosts:
        return None if "*" in options.allowed_hosts else frozenset(host.lower() for host in options.allowed_hosts)
    return frozenset(LOOPBACK) if _is_loopback(options.host) else None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Hosts:
    """Refuses requests with other names in their ``Host`` header with status 421.

    Args:
        app: the application.
        names: as :func:`hosts_of` returns them.
        refuse: makes the response to an error.
    """

    def __init__(self, app: ASGIApp, names: Collection[str] | None, refuse: Refuse) -> None:
        self.app, self.names, self.refuse = app, names, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.names is not None and scope["type"] == "http" and scope["path"] not in PROBES:
            host = PORT.sub("", Headers(scope=scope).get("host", "")).lower()
            if host not in self.names:
                response = await self.refuse(Request(scope), misdirected())
                await response(scope, receive, send)
                return
        await self.app(scope, receive, send)


class Lengths:
    """Refuses requests with two lengths, ``Content-Length`` and chunks, with status 400, and closes their connections.

    What follows would be one request more to those who believe the other length, such as a proxy in front of this server.

    Args:
        app: the application.
        refuse: makes the response to an error.
    """

    def __init__(self, app: ASGIApp, refuse: Refuse) -> None:
        self.app, self.refuse = app, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}:
            response = await self.refuse(Request(scope), ApiError(400, "expected either Content-Length or Transfer-Encoding, found both"))
            response.headers["connection"] = "close"
            await response(scope, receive, send)
            return
        await self.app(scope, receive, send)


@dataclass(eq=False)
class Record:
    """What is logged of a request: nothing that it says.

    Attributes:
        id: of ``X-Request-Id``, or one of ours.
        peer: address of the client.
        method: HTTP method.
        path: without the query.
        began: arrival, in seconds of :func:`time.perf_counter`.
        status: of the response; 499: the client disconnected first; of a stream that broke, that of its error.
        generation: its requests to the engine; None: there are none.
    """

    id: str
    peer: str
    method: str
    path: str
    began: float
    status: int = 500
    generation: Generation | None = None

    @classmethod
    def of(cls, scope: Scope) -> Record:
        """The record of a request that has just arrived."""
        host, port = scope.get("client") or ("-", "-")
        given = re.sub(rb"[^A-Za-z0-9._:-]", b"", dict(scope["headers"]).get(HEADER, b""))[:LONGEST_ID].decode("ascii")
        path = scope.get("raw_path") or scope["path"].encode()
        shown = path[:LONGEST_PATH].decode("ascii", "backslashreplace")
        return cls(given or secrets.token_hex(16), f"{host}:{port}", scope["method"], shown, time.perf_counter())

    def fields(self) -> dict[str, Any]:
        """Fields of the line, once the response has ended."""
        seconds = round(time.perf_counter() - self.began, 6)
        found = {"id": self.id, "peer": self.peer, "method": self.method, "path": self.path, "status": self.status, "seconds": seconds}
        if self.generation is None:
            return found
        usage, first = self.generation.usage(), self.generation.first_token
        return found | {
            "prompt_tokens": usage["prompt_tokens"],
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "completion_tokens": usage["completion_tokens"],
            "first_token_seconds": None if first is None else round(first - self.began, 6),
            "acceptance_length": round(self.generation.acceptance_length, 3),
        }


def record_of(scope: Scope) -> Record:
    """The record of a request that has passed :class:`Access`."""
    record: Record = scope[RECORD]
    return record


class Access:
    """Gives every request its id, which the response repeats, and logs one line when the response has ended.

    Args:
        app: the application.
        style: of the lines: ``text``, ``json`` or ``off``.
    """

    def __init__(self, app: ASGIApp, style: str) -> None:
        self.app, self.style = app, style

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        record = scope[RECORD] = Record.of(scope)

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), (HEADER, record.id.encode())]}
            await send(message)

        try:
            await self.app(scope, receive, send_named)
        finally:
            if self.style != "off" and logger.isEnabledFor(logging.INFO):
                logger.info("%s", line(record.fields(), self.style))


def line(fields: dict[str, Any], style: str) -> str:
    """A line of the access log, with the time at its beginning."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    if style == "json":
        return json.dumps({"time": now} | fields)
    asked = json.dumps(f"{fields['method']} {fields['path']}")
    rest = "".join(f" {name}={value}" for name, value in fields.items() if name not in ("id", "peer", "method", "path", "status"))
    return f"{now} {fields['peer']} {fields['id']} {asked} {fields['status']}{rest}"
