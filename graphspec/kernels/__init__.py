"""Ops of the cycle, each with its contract and its reference, and the choice of implementations.

Importing this package compiles and builds nothing; implementations are resolved when they are chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from ..errors import ConfigError
from .op import KernelOp
from .registry import OPS, KernelSet, op_of

ATTENTION_OPS = ("tree_attention", "chunk_attention", "latent_attention", "latent_chunk_attention")
"""Ops that ``kernels.attention`` chooses; the others follow ``kernels.mode``."""
LINEAR_OPS = ("linear", "packed_linear")
"""Ops that ``kernels.linear`` chooses."""
MODES = ("reference", "compiled", "fused")
CHOICES = ("auto", "reference", "native", "fused")
ATTENTION_CHOICES = (*CHOICES, "flashinfer")
"""``flashinfer`` serves some attention calls of a fused cycle, see :mod:`graphspec.kernels.flashinfer`."""
NUMERICS = ("fast", "cycle_invariant", "batch_invariant")


def resolve(key: str, choice: str, mode: str, device: str, dtype: str) -> str:
    """The implementation that one choice means: ``reference``, ``native``, ``fused`` or ``flashinfer``.

    ``auto`` is fused for a fused cycle, native for a compiled float32 cycle on the CPU, else reference.

    Args:
        key: the configuration key, for the message.
        choice: one of :data:`CHOICES`, for attention of :data:`ATTENTION_CHOICES`.
        mode: one of :data:`MODES`.
        device: ``cpu`` or ``cuda``, with or without an index.
        dtype: of weights and KV.

    Raises:
        ConfigError: an unknown choice, or one that doesn't exist for this mode, device and dtype.
    """
    allowed = ATTENTION_CHOICES if key == "kernels.attention" else CHOICES
    if choice not in allowed:
        raise ConfigError(key, "one of " + ", ".join(allowed), repr(choice))
    on_cpu = device.partition(":")[0] == "cpu"
    if choice == "native" and not on_cpu:
        raise ConfigError(key, f"reference or auto on {device}", "'native', which runs on the CPU only")
    if choice == "native" and dtype != "float32":
        raise ConfigError(key, f"reference or auto in {dtype}", "'native', which is float32 only")
    if choice == "flashinfer" and on_cpu:
        raise ConfigError(key, f"reference, native or auto on {device}", "'flashinfer', which needs a CUDA device")
    if choice in ("fused", "flashinfer") and mode != "fused":
        raise ConfigError(key, f"reference or auto with kernels.mode={mode}", repr(choice), "kernels.mode=fused")
    if choice == "auto":
        if mode == "fused":
            return "fused"
        return "native" if mode == "compiled" and on_cpu and dtype == "float32" else "reference"
    return choice


def check_fused(device: str) -> None:
    """Check that fused kernels can run on ``device``.

    Raises:
        ConfigError: Triton is missing, or the device is no GPU and Triton doesn't interpret.
    """
    if find_spec("triton") is None:
        raise ConfigError("kernels.mode", "reference or compiled where Triton is not installed", "'fused'", "pip install triton")
    from .fused.launch import INTERPRETED

    if device.partition(":")[0] == "cpu" and not INTERPRETED:
        hint = "TRITON_INTERPRET=1 in the environment runs fused kernels on the CPU, slowly, for tests"
        raise ConfigError("kernels.mode", f"reference or compiled on {device}", "'fused', which needs a CUDA device", hint)


def check_flashinfer(device: str) -> None:
    """Check that FlashInfer can run on ``device``: a supported version is installed, and the GPU, if any, is of a kind that it serves.

    Raises:
        ConfigError: it can't.
    """
    from .flashinfer import version

    version.check_version()
    if torch.cuda.is_available():
        version.check_capability(torch.cuda.get_device_capability(device))


def select_kernels(
    mode: str,
    attention: str,
    device: str,
    *,
    linear: str = "auto",
    dtype: str = "float32",
    numerics: str = "fast",
    programmatic_launch: bool = False,
    linear_table: Any = None,
) -> KernelSet:
    """The implementation of every op, chosen by name; an explicit choice never falls back.

    Args:
        mode: ``reference``, ``compiled`` or ``fused``. The first two use the references where no native op is chosen; the caller compiles
            them.
        attention: choice for the attention ops, see :func:`resolve`; native ones are built on first choice.
        device: ``cpu`` or ``cuda``, with or without an index.
        linear: choice for linear layers.
        dtype: of weights and KV.
        numerics: ``fast``: the order of a sum may depend on the number of rows, and on the slots of a tree's nodes; ``batch_invariant``:
            it depends on the weight's shape and the keys' positions, but for draft networks, which have the former; ``cycle_invariant``:
            this in cycles of up to :data:`~graphspec.shapes.PRODUCT_ROWS` nodes, and the former in prompts. Native kernels always have
            the second.
        programmatic_launch: fused kernels may start while the one before them drains.
        linear_table: measured choices of fused linear layers (``LinearTable``); None: there
            are none.

    Raises:
        ConfigError: an unknown name, or an implementation that doesn't exist for this mode, device or dtype.
        ResourceError: native kernels can't be built here.
    """
    if mode not in MODES:
        raise ConfigError("kernels.mode", "one of " + ", ".join(MODES), repr(mode))
    if numerics not in NUMERICS:
        raise ConfigError("kernels.numerics", "one of " + ", ".join(NUMERICS), repr(numerics))
    chosen = {
        "linear": resolve("kernels.linear", linear, mode, device, dtype),
        "attention": resolve("kernels.attention", attention, mode, device, dtype),
    }
    # With a native decoder, the ops around it are native too. Native ops that are chosen one by one leave the others to torch.compile.
    whole = linear == attention == "auto" and set(chosen.values()) == {"native"}
    if numerics != "fast" and not whole and (mode != "fused" or set(chosen.values()) != {"fused"}):
        expected = "fast or auto, unless every kernel is fused, or native"
        raise ConfigError("kernels.numerics", expected, repr(numerics), "kernels.mode=fused")
    if mode == "fused":
        check_fused(device)

    def implementation(op: KernelOp) -> Callable[..., Any]:
        if op.name in LINEAR_OPS and chosen["linear"] == "fused":
            from .linear.fused.linear import fused_linear
            from .linear.fused.packed_linear import fused_packed_linear

            return (fused_linear if op.name == "linear" else fused_packed_linear)(numerics, linear_table)
        if op.name in ATTENTION_OPS or op.name in LINEAR_OPS:
            name = chosen["linear" if op.name in LINEAR_OPS else "attention"]
            # What FlashInfer doesn't serve runs fused.
            name = mode if name == "flashinfer" else name
        else:
            name = "native" if whole else mode
        if name == "fused":
            name = op.fused_name(numerics)
        return op.implementation(name if name in op.names else "reference")

    ops: dict[str, Any] = {op.name: implementation(op) for op in OPS}
    if "fused" in (mode, *chosen.values()):
        from .fused.launch import INTERPRETED, STORED, LaunchState, launching

        ops["scope"] = partial(launching, LaunchState(programmatic_launch))
        ops["stored"] = STORED
        if not INTERPRETED:
            from .fused.ahead import compiling_ahead

            ops["compiling_ahead"] = compiling_ahead
    if mode == chosen["linear"] == "fused":
        from .linear.fused.linear_kv_write import fused_linear_kv_write

        ops["linear_kv_write"] = fused_linear_kv_write(numerics, linear_table)
    if chosen["attention"] == "flashinfer":
        check_flashinfer(device)
        from .flashinfer.kernels import FlashInferKernels
        from .flashinfer.planner import Planner

        return FlashInferKernels(**ops, planner=Planner(device))
    if whole:
        from .native.cycle import NativeKernels

        return NativeKernels(**ops)
    if numerics != "fast":
        ops["drafting"] = select_kernels(mode, attention, device, linear=linear, dtype=dtype, programmatic_launch=programmatic_launch)
    return KernelSet(**ops)


__all__ = ["OPS", "KernelOp", "KernelSet", "op_of", "resolve", "select_kernels"]
