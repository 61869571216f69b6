"""Ops of the cycle: one file each with its contract and its reference, and the choice of implementations.

Importing this package compiles and builds nothing; implementations are resolved when they are chosen.
"""

from __future__ import annotations

from dataclasses import fields

from ..errors import ConfigError
from . import chunk_attention, draft_topk, kv_move, noise, paged_kv_write, tree_attention, tree_build, tree_walk
from .op import KernelOp
from .registry import KernelSet

OPS: tuple[KernelOp, ...] = (
    paged_kv_write.OP,
    tree_attention.OP,
    chunk_attention.OP,
    draft_topk.OP,
    tree_build.OP,
    tree_walk.OP,
    kv_move.OP,
    noise.OP,
)
"""Every op, in the order of :class:`~graphspec.kernels.registry.KernelSet`."""

MODES = ("reference", "compiled")
ATTENTIONS = ("auto", "reference", "native")


def select_kernels(mode: str, attention: str, device: str) -> KernelSet:
    """The implementation of every op, chosen by name; an explicit choice never falls back.

    Args:
        mode: ``reference`` or ``compiled``. Both run the references, apart from attention: compiling is done by whoever compiles the cycle.
        attention: ``reference``, ``native`` (C++, CPU, float32; built on first choice), or ``auto``: native for a compiled CPU cycle,
            else the reference.
        device: ``cpu`` or ``cuda``, with or without an index.

    Raises:
        ConfigError: an unknown name, or an implementation that doesn't exist for this mode or device.
        ResourceError: native attention can't be built here.
    """
    if mode not in MODES:
        hint = "fused kernels do not exist yet" if mode == "fused" else ""
        raise ConfigError("kernels.mode", "one of " + ", ".join(MODES), repr(mode), hint)
    if attention not in ATTENTIONS:
        raise ConfigError("kernels.attention", "one of " + ", ".join(ATTENTIONS), repr(attention))
    on_cpu = device.partition(":")[0] == "cpu"
    if attention == "native" and not on_cpu:
        raise ConfigError("kernels.attention", f"reference or auto on {device}", "'native', which runs on the CPU only")
    native = attention == "native" or (attention == "auto" and mode == "compiled" and on_cpu)
    chosen = {op.name: op.implementation("native" if native and "native" in op.implementations else "reference") for op in OPS}
    return KernelSet(**{f.name: chosen[f.name] for f in fields(KernelSet)})


__all__ = ["OPS", "KernelOp", "KernelSet", "select_kernels"]
