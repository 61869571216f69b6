"""Options of ``graphspec serve``. Standard library only."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ..errors import ConfigError
from .checks import INT32_MAX, brief, check_fields, in_range, one_of

MAX_SECONDS = 10**7
MAX_BYTES = 2**30
MAX_WAITING = 10**6
MIN_SECONDS = 0.05
HOST = re.compile(r"\*|[\w.-]+|\[[0-9a-fA-F:.]+\]")
ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://([\w.-]+|\[[0-9a-fA-F:.]+\])(:\d+)?")


@dataclass(kw_only=True)
class ServerConfig:
    """Address and limits of the server."""

    host: str = "127.0.0.1"
    """Address to listen at."""
    port: int = 8000
    """Port to listen at; 0: any that is free, which the server prints."""
    model_name: str | None = None
    """The model's name in ``/v1/models`` and in requests; null: the last part of model.path."""
    api_key_file: str | None = None
    """A file of API keys, one per line, one of which every request must have (``Authorization: Bearer KEY``); null: no key is needed."""
    allowed_hosts: list[str] = field(default_factory=list)
    """Names that the ``Host`` header of a request may have, without a port; ``*``: any. Empty: localhost, 127.0.0.1 and [::1] where the
    server listens at a loopback address, so that no page in a browser reaches it under a name of its own; any elsewhere."""
    cors_origins: list[str] = field(default_factory=list)
    """Origins of web pages that may read answers (``https://app.example``), or ``*``: any. Empty: none."""
    access_log: str = "text"
    """A line on stderr for every request: ``text``, ``json`` or ``off``. It has figures, never a prompt or an output."""
    special_tokens_in_text: str = "encode"
    """What the text of a special token is in a prompt or a message: ``encode``: that token, as in vLLM; ``text``: ordinary text, so that
    nobody who writes a part of a conversation can end it or begin another turn."""
    allow_priority: bool = False
    """Requests may have a ``priority`` other than 0, which lets them overtake those of other clients."""
    max_waiting: int = 256
    """Requests that may wait, in addition to those that run, where runtime.max_queued is null; one more gets status 503."""
    max_body_bytes: int = 4 * 2**20
    """Longest body of a request."""
    max_tokens: int | None = None
    """Most new tokens that a request may set; null: as many as fit the context."""
    request_seconds: float = 600.0
    """Time limit of a request from its arrival; it then ends with the tokens it has."""
    read_seconds: float = 30.0
    """Time limit for receiving the headers of a request, and again for its body."""
    write_seconds: float = 60.0
    """Time limit for a client to read what was sent; then its request is aborted."""
    grammar_seconds: float = 10.0
    """Time limit for compiling the grammar of a request; one that takes longer is refused."""
    keep_alive_seconds: float = 30.0
    """How long a connection stays open after an answer: longer than clients keep one (httpx: 5 s), so that none of their requests meets a
    connection that is being closed."""
    drain_seconds: float = 60.0
    """Time that requests have to finish after SIGTERM."""

    def __post_init__(self) -> None:
        check_fields(self, "server", paths=("api_key_file",))
        one_of("server.access_log", self.access_log, ("text", "json", "off"))
        one_of("server.special_tokens_in_text", self.special_tokens_in_text, ("encode", "text"))
        in_range("server.port", self.port, 0, 65535)
        in_range("server.max_waiting", self.max_waiting, 0, MAX_WAITING)
        in_range("server.max_body_bytes", self.max_body_bytes, 1, MAX_BYTES)
        in_range("server.max_tokens", self.max_tokens, 1, INT32_MAX)
        for name in ("request", "read", "write", "grammar", "keep_alive", "drain"):
            in_range(f"server.{name}_seconds", getattr(self, f"{name}_seconds"), MIN_SECONDS, MAX_SECONDS)
        for name in ("host", "model_name"):
            if getattr(self, name) == "":
                raise ConfigError(f"server.{name}", "text", "''")
        for place, host in enumerate(self.allowed_hosts):
            if not HOST.fullmatch(host):
                raise ConfigError(f"server.allowed_hosts[{place}]", "a host without a port (api.example, [::1]), or *", brief(host))
        for place, origin in enumerate(self.cors_origins):
            if not ORIGIN.fullmatch(origin):
                raise ConfigError(f"server.cors_origins[{place}]", "an origin such as https://app.example:8443, or *", brief(origin))
