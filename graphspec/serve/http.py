"""The HTTP server: uvicorn with time limits on connections, and a shutdown that finishes every accepted request."""

from __future__ import annotations

import asyncio
import errno
import faulthandler
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..config.server_options import ServerConfig
from ..errors import ConfigError

SIGNALS = (signal.SIGTERM, signal.SIGINT)
LEAVE_SECONDS, LEAVE_SHARE = 5.0, 0.2
"""What is left of ``server.drain_seconds`` when unfinished requests are aborted: at most so long, and such a share of it."""


def abort_seconds(drain_seconds: float) -> float:
    """After so much of ``server.drain_seconds`` unfinished requests are aborted; the process has the rest to end."""
    return drain_seconds - min(LEAVE_SECONDS, LEAVE_SHARE * drain_seconds)


def bind(options: ServerConfig) -> socket.socket:
    """A socket bound to the address that does not listen yet: until the model is loaded, connections are refused at once.

    Raises:
        ConfigError: the port is in use, or the address is not one of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
        except OSError:
            found.close()
            raise
    except OSError as error:
        why = error.strerror or str(error)
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError("server.host", "an address of this machine", f"{options.host}: {why}") from error
        raise ConfigError("server.port", f"a free port at {options.host}", f"{options.port}: {why}") from error
    return found


def connection_type(options: ServerConfig) -> type[H11Protocol]:
    """A class of connections that are closed if headers do not arrive, or sent data is not read, in time."""

    class Connection(H11Protocol):
        _reading: asyncio.TimerHandle | None = None
        _writing: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._await_headers()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is None or self.cycle.response_complete:
                self._await_headers()
            else:
                self._stop_reading()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._writing = self.loop.call_later(options.write_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._stop_writing()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_reading()
            self._stop_writing()
            super().connection_lost(exc)

        def _await_headers(self) -> None:
            """Start the time limit for headers; a header that arrives byte by byte does not extend it."""
            if self._reading is None:
                self._reading = self.loop.call_later(options.read_seconds, self.transport.abort)

        def _stop_reading(self) -> None:
            if self._reading is not None:
                self._reading.cancel()
                self._reading = None

        def _stop_writing(self) -> None:
            if self._writing is not None:
                self._writing.cancel()
                self._writing = None

    return Connection


class HttpServer(uvicorn.Server):
    """A server that drains: at a signal it accepts nothing more, finishes its requests, and returns. A second signal ends it at once.

    Args:
        app: the application.
        options: of the server.
        ready: called when the port is open.
    """

    def __init__(self, app: ASGIApp, options: ServerConfig, ready: Callable[[], None] | None = None) -> None:
        config = uvicorn.Config(
            app,
            http=connection_type(options),
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=max(1, round(options.keep_alive_seconds)),
        )
        super().__init__(config)
        # uvicorn waits by it as by any other number of seconds, but declares whole ones.
        config.timeout_graceful_shutdown = abort_seconds(options.drain_seconds)
        self._ready, self._options = ready, options
        self.draining = False
        """Whether it accepts nothing more and ends with its last request."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening; then call ``ready``."""
        await super().startup(sockets)
        if self._ready is not None:
            self._ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """While it serves, signals drain it. uvicorn's own handler would then end the process by the signal."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._end)
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    def _end(self) -> None:
        # Its timer needs no cooperation of what runs then, and says where that is.
        faulthandler.dump_traceback_later(self._options.drain_seconds, exit=True)
        self.drain()

    def drain(self) -> None:
        """Start draining; if it has started, end at once."""
        self.force_exit, self.should_exit = self.draining, True
        self.draining = True
