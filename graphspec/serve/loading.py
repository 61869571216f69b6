"""What is answered until the model is loaded: that the process lives, and that it serves nobody yet."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from ..config.server_options import ServerConfig
from .errors import loading
from .http import HttpServer


async def _answer(scope: Scope, receive: Receive, send: Send) -> None:
    """200 for ``/live``, 503 for everything else."""
    if Request(scope).url.path == "/live":
        response = Response(status_code=200)
    else:
        error = loading()
        response = JSONResponse(error.body, error.status, error.headers)
    await response(scope, receive, send)


@contextmanager
def answering(sock: socket.socket, options: ServerConfig) -> Iterator[None]:
    """Answer at a bound socket, from a thread of its own, for as long as the context lasts. Connections that come at its end wait.

    SIGTERM ends the process at once: as the first process of a container it would otherwise go on.

    Args:
        sock: goes on listening.
        options: of the server.
    """
    ready = threading.Event()
    server = HttpServer(_answer, options, ready.set)
    # A daemon: a signal or an error ends the process without it.
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock.dup()])), name="graphspec loading", daemon=True)
    thread.start()
    ready.wait()
    before = signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        server.force_exit = server.should_exit = True
        thread.join()
