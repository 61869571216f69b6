"""graphspec: EAGLE-family speculative decoding as one replayable, static-shape program per batch size.

Importing the package imports no torch; the public names load what they need when first touched.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api.async_llm import AsyncLLM
    from .api.llm import LLM
    from .api.outputs import Output, RequestOutput, StreamEvent
    from .config.compose import load_config
    from .config.schema import Config
    from .engine.request import SamplingParams
    from .errors import GraphspecError
    from .text.structured import Structured

__version__ = "0.1.0.dev0"

__all__ = [
    "LLM", "AsyncLLM", "Config", "GraphspecError", "Output", "RequestOutput", "SamplingParams", "StreamEvent",
    "Structured", "__version__", "load_config",
]  # fmt: skip

_HOMES = {
    "AsyncLLM": ".api.async_llm",
    "LLM": ".api.llm",
    "Output": ".api.outputs",
    "RequestOutput": ".api.outputs",
    "StreamEvent": ".api.outputs",
    "SamplingParams": ".engine.request",
    "Structured": ".text.structured",
    "load_config": ".config.compose",
    "Config": ".config.schema",
    "GraphspecError": ".errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        from .config.checks import closest

        near = closest(name, __all__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{f' ({near})' if near else ''}; it has {', '.join(__all__)}")
    value = getattr(import_module(_HOMES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
