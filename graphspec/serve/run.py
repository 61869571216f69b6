"""``graphspec serve``: loads a model and serves it until a signal."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ..api.async_llm import AsyncLLM
from ..api.llm import LLM
from ..config.command_options import LaunchConfig
from ..config.hints import install_hint
from ..config.paths import user_path
from ..errors import ConfigError
from ..facts.folders import model_folder
from ..host.progress import progress_bars
from ..shapes import SERVED, SERVED_GRAMMARS
from ..text.tokenizer_files import has_tokenizer

if TYPE_CHECKING:
    from ..host.progress import Progress
    from .app import Api
    from .limits import Keys

PACKAGES = ("starlette", "uvicorn", "prometheus_client", "pydantic")


def run(config: LaunchConfig) -> int:
    """Serve until SIGTERM or Ctrl-C, which end this process when the last request has ended.

    Raises:
        ConfigError: an option, a package of the extra that is missing, or a port that is taken.
    """
    check_packages()
    from .access import hosts_of
    from .http import HttpServer, bind
    from .loading import answering

    options, keys = config.server, read_keys(config)
    with bind(options) as sock:
        with answering(sock, options), progress_bars(lines=True) as progress:
            api = load_api(config, keys, progress)
        with api.llm.llm, closing(api):
            host, port = sock.getsockname()[:2]
            address = f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"

            def ready() -> None:
                print(f"graphspec serve: {api.model} at {address}", flush=True)  # noqa: T201

            server = HttpServer(api.app(hosts_of(options)), options, ready)
            with _logs(config.log):
                asyncio.run(server.serve(sockets=[sock]))
    if server.draining:
        # All that counts is closed. The interpreter would wait for threads inside a library's code, and free compiled programs for seconds.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    return 0


@contextmanager
def _logs(level: str) -> Iterator[None]:
    """The access log on stderr, line by line as it is, and uvicorn's messages as those of this package."""
    access, uvicorn, ours = (logging.getLogger(name) for name in ("graphspec.access", "uvicorn", "graphspec"))
    before = [(logger, logger.handlers, logger.level, logger.propagate) for logger in (access, uvicorn)]
    access.handlers, access.propagate, uvicorn.handlers, uvicorn.propagate = (
        [logging.StreamHandler(sys.stderr)],
        False,
        ours.handlers,
        False,
    )
    access.setLevel(logging.INFO)
    uvicorn.setLevel(level.upper())
    try:
        yield
    finally:
        for logger, handlers, old, propagate in before:
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(old)


def check_packages() -> None:
    """Check that the packages of the extra ``serve`` are installed.

    Raises:
        ConfigError: one is missing.
    """
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigError("graphspec serve", "the packages of its extra", f"no {', '.join(missing)}", install_hint("serve"))


def read_keys(config: LaunchConfig) -> Keys:
    """The keys of ``server.api_key_file``.

    Raises:
        ConfigError: the file can't be read, or has none.
    """
    from .limits import Keys

    file = config.server.api_key_file
    return Keys() if file is None else Keys.read(user_path("server.api_key_file", file))


def load_api(config: LaunchConfig, keys: Keys, progress: Progress | None = None) -> Api:
    """Load the engine of a configuration, with all programs that it will ever run, and make its routes. The caller closes the engine.

    Args:
        config: of engine and server.
        keys: API keys that are accepted.
        progress: as for :class:`~graphspec.api.llm.LLM`.

    Raises:
        GraphspecError: as :class:`~graphspec.api.llm.LLM`.
    """
    from .app import Api

    names = config.runtime.sampling_classes
    if names is None:
        grammars = find_spec("xgrammar") is not None and has_tokenizer(model_folder(config.model.path, config.model.revision))
        names = [*SERVED, *(SERVED_GRAMMARS if grammars else ())]
    llm = LLM.from_config(replace(config, runtime=replace(config.runtime, sampling_classes=names)), progress)
    llm.seal()
    api = Api(AsyncLLM(llm), config.server, served_name(config), keys)
    if any(each.grammar for each in llm.plan.sampling_classes):
        # What the first grammar of all loads would hold up the interpreter.
        llm.grammars.load(lambda: llm.tokenizer)
        api.trials.start()
    return api


def served_name(config: LaunchConfig) -> str:
    """The name under which a model is served. For a folder it is the last part of the path, which clients should not see."""
    return config.server.model_name or Path(config.model.path).name or "model"
