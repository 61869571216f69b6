"""Numerics of an engine: what ``kernels.numerics`` names, or the choice of ``auto``, and ``kernels.activations``. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..config.schema import KernelsConfig
    from ..facts import ModelFacts


def resolve_numerics(config: KernelsConfig, mode: str, target: ModelFacts, *, device: str, dtype: str) -> str:
    """``fast`` or ``batch_invariant``: what was asked for, and for ``auto`` the latter where a pass of the target is one native op.

    On a GPU ``auto`` is ``fast``: no GPU has confirmed the other, and the launch model puts it above 3 % of most cycles.

    Args:
        config: the group ``kernels``.
        mode: what ``kernels.mode`` resolved to.
        target: facts of the target.
        device: resolved, ``cpu`` or ``cuda``.
        dtype: of arithmetic, resolved. Weights and KV may have 16 bits.
    """
    if config.numerics != "auto":
        return config.numerics
    native = mode == "compiled" and device == "cpu" and dtype == "float32" and config.attention == config.linear == "auto"
    whole = target.recurrent is None and target.latent is None and target.experts is None and not target.sharding.sharded
    return "batch_invariant" if native and whole else "fast"


def resolve_activations(config: KernelsConfig, mode: str, *, device: str, dtype: str) -> str:
    """``kernels.activations``, where an engine can have it.

    Args:
        config, mode, device, dtype: as of :func:`resolve_numerics`.

    Raises:
        ConfigError: others than ``full`` without native linear layers.
    """
    native = device == "cpu" and dtype == "float32" and (config.linear == "native" or (config.linear == "auto" and mode == "compiled"))
    if config.activations != "full" and not native:
        expected = "full, unless linear layers are native (runtime=compiled on a CPU, or kernels.linear=native)"
        found = f"{config.activations} on {device} with kernels.mode={mode}, kernels.linear={config.linear}"
        raise ConfigError("kernels.activations", expected, found)
    return config.activations
