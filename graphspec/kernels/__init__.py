"""Ops of the cycle: one file each with its contract and its reference, and the choice of implementations.

Importing this package compiles and builds nothing; implementations are resolved when they are chosen.
"""

from __future__ import annotations

from dataclasses import fields

from ..errors import ConfigError
from . import (
    chunk_attention,
    draft_topk,
    filter_logits,
    kv_move,
    linear,
    ngram_match,
    noise,
    paged_kv_write,
    tree_attention,
    tree_build,
    tree_walk,
)
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
    linear.OP,
    ngram_match.OP,
    filter_logits.OP,
)
"""Every op, in the order of :class:`~graphspec.kernels.registry.KernelSet`."""

MODES = ("reference", "compiled")
CHOICES = ("auto", "reference", "native")


def resolve(key: str, choice: str, mode: str, device: str, dtype: str) -> str:
    """``reference`` or ``native`` for one choice; ``auto`` is native for a compiled float32 cycle on the CPU.

    Args:
        key: the configuration key, for the message.
        choice: ``reference``, ``native`` or ``auto``.
        mode: ``reference`` or ``compiled``.
        device: ``cpu`` or ``cuda``, with or without an index.
        dtype: of weights and KV.

    Raises:
        ConfigError: an unknown choice, or one that doesn't exist for this device and dtype.
    """
    if choice not in CHOICES:
        raise ConfigError(key, "one of " + ", ".join(CHOICES), repr(choice))
    on_cpu = device.partition(":")[0] == "cpu"
    if choice == "native" and not on_cpu:
        raise ConfigError(key, f"reference or auto on {device}", "'native', which runs on the CPU only")
    if choice == "native" and dtype != "float32":
        raise ConfigError(key, f"reference or auto in {dtype}", "'native', which is float32 only")
    if choice == "auto":
        return "native" if mode == "compiled" and on_cpu and dtype == "float32" else "reference"
    return choice


def select_kernels(mode: str, attention: str, device: str, *, linear: str = "auto", dtype: str = "float32") -> KernelSet:
    """The implementation of every op, chosen by name; an explicit choice never falls back.

    Args:
        mode: ``reference`` or ``compiled``. Both run the references, apart from the native ones: compiling is done by whoever compiles the
            cycle.
        attention: choice for the attention ops, see :func:`resolve`; native ones are built on first choice.
        device: ``cpu`` or ``cuda``, with or without an index.
        linear: choice for linear layers.
        dtype: of weights and KV.

    Raises:
        ConfigError: an unknown name, or an implementation that doesn't exist for this mode, device or dtype.
        ResourceError: native kernels can't be built here.
    """
    if mode not in MODES:
        hint = "fused kernels do not exist yet" if mode == "fused" else ""
        raise ConfigError("kernels.mode", "one of " + ", ".join(MODES), repr(mode), hint)
    chosen = {
        "linear": resolve("kernels.linear", linear, mode, device, dtype),
        "attention": resolve("kernels.attention", attention, mode, device, dtype),
    }

    def implementation(op: KernelOp) -> str:
        name = chosen["linear" if op.name == "linear" else "attention"]
        return name if name in op.names else "reference"

    callables = {op.name: op.implementation(implementation(op)) for op in OPS}
    return KernelSet(**{f.name: callables[f.name] for f in fields(KernelSet)})


__all__ = ["OPS", "KernelOp", "KernelSet", "resolve", "select_kernels"]
