"""Options of ``graphspec serve``. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from .checks import INT32_MOST, check_fields, in_range
from .errors import ConfigError

MOST_SECONDS = 10**7
MOST_BYTES = 2**30
MOST_WAITING = 10**6
LEAST_SECONDS = 0.05


@dataclass(kw_only=True)
class ServerConfig:
    """Where the server listens, and what it bears."""

    host: str = "127.0.0.1"
    """Address it listens at."""
    port: int = 8000
    """0: any that is free; the server prints which."""
    model_name: str | None = None
    """Its name in ``/v1/models`` and in requests; null: the last part of model.path."""
    api_key_file: str | None = None
    """A file of keys, one per line, one of which a request must carry (``Authorization: Bearer KEY``); null: none is asked for."""
    max_waiting: int = 256
    """Requests that may wait, in addition to those that run, where runtime.max_queued is null; one more gets status 503."""
    max_body_bytes: int = 4 * 2**20
    """Longest body of a request."""
    max_tokens: int | None = None
    """Most new tokens that a request may ask for; null: what the context has room for."""
    request_seconds: float = 600.0
    """Longest time of a request from its arrival; it then ends with what it has."""
    read_seconds: float = 30.0
    """Longest time in which headers have to come, and then a body."""
    write_seconds: float = 60.0
    """Longest time in which a client that reads slowly has to take what was sent; then its request is aborted."""
    keep_alive_seconds: float = 5.0
    """How long a connection stays open after an answer."""
    drain_seconds: float = 60.0
    """After SIGTERM: how long requests may take to finish."""

    def __post_init__(self) -> None:
        check_fields(self, "server", paths=("api_key_file",))
        in_range("server.port", self.port, 0, 65535)
        in_range("server.max_waiting", self.max_waiting, 0, MOST_WAITING)
        in_range("server.max_body_bytes", self.max_body_bytes, 1, MOST_BYTES)
        in_range("server.max_tokens", 1 if self.max_tokens is None else self.max_tokens, 1, INT32_MOST)
        for name in ("request", "read", "write", "keep_alive", "drain"):
            in_range(f"server.{name}_seconds", getattr(self, f"{name}_seconds"), LEAST_SECONDS, MOST_SECONDS)
        for name in ("host", "model_name"):
            if getattr(self, name) == "":
                raise ConfigError(f"server.{name}", "text", "''")
