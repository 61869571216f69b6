"""Numerics of an engine: what ``kernels.numerics`` names, or the choice of ``auto``, and ``kernels.activations``. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ConfigError
from ..shapes import PRODUCT_ROWS

if TYPE_CHECKING:
    from ..config.schema import KernelsConfig
    from ..facts import ModelFacts


def resolve_numerics(config: KernelsConfig, mode: str, target: ModelFacts, *, device: str, dtype: str, nodes: int) -> str:
    """``fast``, ``cycle_invariant`` or ``batch_invariant``: what was asked for, or what ``auto`` is here.

    That is ``batch_invariant`` where a pass of the target is one native op, and ``cycle_invariant`` where everything on a GPU is fused, in
    16 bits, and no cycle has more rows than one tile of its products.

    Args:
        config: the group ``kernels``.
        mode: what ``kernels.mode`` resolved to.
        target: facts of the target.
        device: resolved, ``cpu`` or ``cuda``.
        dtype: of arithmetic, resolved. Weights and KV may have 16 bits.
        nodes: of the largest cycle, over all its lanes.

    Raises:
        ConfigError: ``cycle_invariant`` is asked for, and cycles are larger than it serves.
    """
    fused = mode == "fused" and {config.attention, config.linear} <= {"auto", "fused"}
    if config.numerics == "cycle_invariant" and fused and nodes > PRODUCT_ROWS:
        expected = f"batch_invariant or fast with cycles of more than {PRODUCT_ROWS} nodes in all"
        found = f"cycle_invariant with {nodes}"
        raise ConfigError("kernels.numerics", expected, found, "fewer runtime.max_rows or variant.num_draft_tokens")
    if config.numerics != "auto":
        return config.numerics
    native = mode == "compiled" and device == "cpu" and dtype == "float32" and config.attention == config.linear == "auto"
    whole = target.recurrent is None and target.latent is None and target.experts is None and not target.sharding.sharded
    if native and whole:
        return "batch_invariant"
    measured = config.linear_table is not None or target.family.own_modules
    proved = fused and device == "cuda" and dtype in ("bfloat16", "float16") and not measured
    return "cycle_invariant" if proved and nodes <= PRODUCT_ROWS else "fast"


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
