"""``graphspec serve``: loads a model and answers until a signal ends it."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from pathlib import Path

from ..command_options import LaunchConfig
from ..engine.async_llm import AsyncLLM
from ..engine.llm import LLM
from ..errors import ConfigError
from ..paths import user_path
from ..show.progress import progress_bars

PACKAGES = ("starlette", "uvicorn", "prometheus_client")


def run(config: LaunchConfig) -> int:
    """Serve until SIGTERM or Ctrl-C; returns the exit code.

    Raises:
        ConfigError: an option, a package of the extra that is missing, or a port that is taken.
    """
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigError("graphspec serve", "the packages of its extra", f"no {', '.join(missing)}", "pip install 'graphspec[serve]'")
    from .app import Face
    from .http import HttpServer, bind
    from .limits import Keys

    options = config.server
    keys = Keys.read(user_path("server.api_key_file", options.api_key_file)) if options.api_key_file is not None else Keys()
    with bind(options) as sock:
        with progress_bars() as progress:
            llm = LLM.from_config(config, progress)
            face = AsyncLLM(llm)
            for sampling in llm.plan.sampling_classes:
                llm.warm_up(llm.plan.max_rows, sampling=sampling)
        with llm:
            model = served_name(config)
            host, port = sock.getsockname()[:2]
            address = f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"

            def ready() -> None:
                print(f"graphspec serve: {model} at {address}", flush=True)  # noqa: T201

            server = HttpServer(Face(face, options, model, keys).app(), options, ready)
            asyncio.run(server.serve(sockets=[sock]))
    return 0


def served_name(config: LaunchConfig) -> str:
    """The name under which a model is served; of a folder the last part, since a path is nobody's business."""
    return config.server.model_name or Path(config.model.path).name or "model"
