"""How cycles are run: the runtime that ``runtime`` names, or chosen from the device (``runtime=auto``). Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from ..config.checks import one_of
from ..config.schema import RUNTIMES
from ..errors import ConfigError

KERNELS_OF = {"eager": "reference", "compiled": "compiled", "captured": "fused"}
"""``kernels.mode`` that a runtime means."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """What was chosen.

    Attributes:
        name: ``eager``, ``compiled`` or ``captured``.
        reason: why, in words; empty: it was asked for.
    """

    name: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})" if self.reason else self.name

    @property
    def captured(self) -> bool:
        """Programs are CUDA graphs."""
        return self.name == "captured"

    @property
    def kernels(self) -> str:
        """What ``kernels.mode=auto`` means."""
        return KERNELS_OF[self.name]


def resolve_runtime(asked: str, device: str, *, eager: bool = False) -> Runtime:
    """The runtime of an engine: what was asked for, and for ``auto`` captured on a GPU, compiled on a CPU.

    Args:
        asked: ``runtime.name``.
        device: resolved, ``cpu`` or ``cuda``.
        eager: the target can neither be compiled nor captured.

    Raises:
        ConfigError: no runtime, or one that this device does not have.
    """
    one_of("runtime.name", asked, RUNTIMES)
    if eager and asked not in ("auto", "eager"):
        raise ConfigError("runtime", "auto or eager with model.family=transformers", asked)
    if eager:
        return Runtime("eager", "model.family=transformers" if asked == "auto" else "")
    if asked == "auto":
        return Runtime("captured" if device == "cuda" else "compiled", f"runtime=auto on {device}")
    if asked == "captured" and device != "cuda":
        expected = "auto, eager or compiled on this machine (a captured cycle is a CUDA graph)"
        raise ConfigError("runtime", expected, f"captured on {device}")
    return Runtime(asked)
