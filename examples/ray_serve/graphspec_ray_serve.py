"""Replicas of ``graphspec serve`` on Ray Serve: one engine each, the same routes, one address.

Ray starts and stops the processes, sends each request to one of them, replaces those that are unhealthy, and follows the load with their
number. What a request means is graphspec's: the deployment is the application of ``graphspec serve``, unchanged.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graphspec import load_config
from graphspec.config.checks import check_fields, in_range
from graphspec.config.command_options import LaunchConfig
from graphspec.config.server_options import ServerConfig
from graphspec.errors import ConfigError, GraphspecError
from graphspec.serve.access import hosts_of
from graphspec.serve.run import check_packages, load_api, read_keys, served_name

NAME = "graphspec"
"""Of the application on a cluster."""
PREFIX = "replicas."
REPLICA_HEADER = b"x-graphspec-replica"
MAX_REPLICAS = 10**4


@dataclass(kw_only=True)
class Replicas:
    """How many there are, and what one of them takes."""

    min: int = 1
    """Replicas that are there without any load."""
    max: int | None = None
    """Replicas at the highest load; null: as many as ``min``."""
    num_cpus: float = 1.0
    """Cores that one reserves; a fraction shares a core. Ray sets the number of threads to it, 1 at least."""
    num_gpus: float = 0.0
    """GPUs of one, which sees no others."""

    def __post_init__(self) -> None:
        check_fields(self, PREFIX.rstrip("."))
        in_range(f"{PREFIX}min", self.min, 1, MAX_REPLICAS)
        in_range(f"{PREFIX}max", self.maximum, self.min, MAX_REPLICAS)
        in_range(f"{PREFIX}num_cpus", self.num_cpus, 0)
        in_range(f"{PREFIX}num_gpus", self.num_gpus, 0)

    @property
    def maximum(self) -> int:
        """``max``, or what stands for it."""
        return self.min if self.max is None else self.max


class Named:
    """An application whose answers name the replica that gave them.

    Args:
        app: the application.
        replica: its name.
    """

    def __init__(self, app: ASGIApp, replica: str) -> None:
        self.app, self.header = app, (REPLICA_HEADER, replica.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), self.header]}
            await send(message)

        await self.app(scope, receive, send_named)


@serve.deployment
@serve.ingress()
class Replica:
    """One engine, and the routes over it.

    Args:
        config: of ``graphspec serve``.
    """

    def __init__(self, config: LaunchConfig) -> None:
        self.api = load_api(config, read_keys(config))
        # Ray's proxy listens, wherever that is: its names are checked where they are given.
        hosts = hosts_of(config.server) if config.server.allowed_hosts else None
        self.asgi = Named(self.api.app(hosts), serve.get_replica_context().replica_id.unique_id)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self.asgi

    async def check_health(self) -> None:
        """Ask the application's own ``/health``. Ray replaces a replica for which this raises, or hangs, several times in a row."""
        status = await status_of(self.asgi, "/health")
        if status != 200:
            raise RuntimeError(f"/health: expected status 200, found {status}")

    def __del__(self) -> None:
        # Ray calls this when the last request has ended; also where loading failed.
        if hasattr(self, "api"):
            self.api.llm.llm.close()


async def status_of(app: ASGIApp, path: str) -> int:
    """The status with which an application answers ``GET path``, asked in this process."""
    found: list[int] = []
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http", "path": path,
        "raw_path": path.encode(), "root_path": "", "query_string": b"", "headers": [], "client": None, "server": None,
    }  # fmt: skip

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            found.append(message["status"])

    await app(scope, receive, send)
    return found[0]


def read_words(words: Sequence[str]) -> tuple[LaunchConfig, Replicas]:
    """The configuration of ``graphspec serve`` and ``replicas.*``, from words as its command line has them.

    Raises:
        ConfigError: an option that does not exist or is out of range, or one that Ray's proxy takes no notice of.
    """
    ours = [word.removeprefix(PREFIX).partition("=") for word in words if word.startswith(PREFIX)]
    names = [field.name for field in fields(Replicas)]
    for name, _, _ in ours:
        if name not in names:
            raise ConfigError(f"{PREFIX}{name}", "one of " + ", ".join(PREFIX + known for known in names), "no such key")
    replicas = Replicas(**{name: number(value) for name, _, value in ours})
    config = load_config(*(word for word in words if not word.startswith(PREFIX)))
    default = ServerConfig().write_seconds
    if config.server.write_seconds != default:
        raise ConfigError("server.write_seconds", f"its default, {default}: Ray's proxy writes to clients", config.server.write_seconds)
    return config, replicas


def number(value: str) -> Any:
    """A number or null, as YAML has them; another text as it is, for the check to name."""
    with suppress(ValueError):
        return json.loads(value)
    return value


def application(config: LaunchConfig, replicas: Replicas) -> Application:
    """The deployment, for ``serve.run``."""
    rows = config.runtime.max_rows
    waiting = config.server.max_waiting if config.runtime.max_queued is None else config.runtime.max_queued
    return Replica.options(
        name=NAME,
        ray_actor_options={"num_cpus": replicas.num_cpus, "num_gpus": replicas.num_gpus},
        # With all rows busy a replica is at its best; what waits longer than a moment is for another one.
        autoscaling_config={"min_replicas": replicas.min, "max_replicas": replicas.maximum, "target_ongoing_requests": rows},
        # A replica has a queue of its own, and answers 503 itself when that is full: it has to see one request more than it takes.
        max_ongoing_requests=rows + waiting + 1,
        graceful_shutdown_timeout_s=config.server.drain_seconds,
    ).bind(config)


def build(arguments: Mapping[str, Any]) -> Application:
    """The application for ``serve run graphspec_ray_serve:build variant=eagle3``, and as ``import_path``, ``args`` of a Serve config.

    Args:
        arguments: keys and values of overrides, such as ``{"variant": "eagle3", "replicas.max": 4}``.

    Raises:
        ConfigError: as :func:`read_words`.
    """
    return application(*read_words([f"{key}={spell(value)}" for key, value in arguments.items()]))


def spell(value: Any) -> str:
    """A value of a YAML file as an override has it."""
    return value if isinstance(value, str) else json.dumps(value)


def drain() -> None:
    """End the application: nothing new is accepted, what was accepted is finished, at the latest when ``server.drain_seconds`` are over.

    ``serve.shutdown()`` would kill the proxy first, and with it every stream.
    """
    deleted = False
    while not deleted:
        # It waits for a minute at most; replicas may have longer.
        with suppress(TimeoutError):
            serve.delete(NAME)
            deleted = True


def run(words: Sequence[str]) -> None:
    """Serve until SIGTERM or Ctrl-C, then drain; a second signal ends it at once.

    Raises:
        ConfigError: as :func:`read_words`.
        RuntimeError: the replicas did not start.
    """
    check_packages()
    config, replicas = read_words(words)
    # Read here too: what is wrong with the file is said before anything starts.
    read_keys(config)
    options, asked = config.server, threading.Event()
    # Without RAY_ADDRESS a cluster is started for this command, which needs no web page.
    ray.init(include_dashboard=False)
    serve.start(
        http_options={"host": options.host, "port": options.port, "keep_alive_timeout_s": max(1, round(options.keep_alive_seconds))}
    )

    def ask(*_: object) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    # After Ray has set its own.
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, ask)
    serve.run(application(config, replicas), name=NAME)
    print(f"graphspec-ray-serve: {served_name(config)} at http://{options.host}:{options.port}/v1", flush=True)
    asked.wait()
    drain()


def main() -> None:
    """The command ``graphspec-ray-serve``: overrides as for ``graphspec serve``, and ``replicas.*``."""
    try:
        run(sys.argv[1:])
    except GraphspecError as error:
        sys.exit(f"graphspec-ray-serve: {error}")
    except KeyboardInterrupt:
        sys.exit("graphspec-ray-serve: ended before every request was finished")


if __name__ == "__main__":
    main()
