"""What every request passes before its route: the check of the ``Host`` header."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Awaitable, Callable, Collection

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ..server_options import ServerConfig
from .errors import misdirected

Refuse = Callable[[Request, Exception], Awaitable[Response]]
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
PROBES = ("/health", "/live")
"""Paths without a check: probes ask by the address of a container, and the answers say nothing about the model."""
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
