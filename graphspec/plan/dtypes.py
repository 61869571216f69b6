"""The dtypes of an engine: of its arithmetic, its weights and its KV pools."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError


@dataclass(frozen=True, slots=True)
class Dtypes:
    """Names of torch dtypes.

    Attributes:
        compute: of activations and kernels.
        weights: to which a checkpoint's numbers are rounded as they are loaded; codes of low precision keep their values.
        kv: of the KV pools, or latent rows.
    """

    compute: str
    weights: str
    kv: str


def resolve_dtypes(asked: str, kv: str, stored: str, device: str, kernels: str) -> Dtypes:
    """The dtypes of an engine.

    Compiled kernels on a CPU compute in float32. There ``bfloat16`` and ``float16`` mean weights and KV of 16 bits. Elsewhere one dtype
    serves for all, except that kernels on a CPU read KV pools of any.

    Args:
        asked: ``hardware.dtype``.
        kv: ``runtime.kv_dtype``.
        stored: dtype of the checkpoint.
        device: ``cpu`` or ``cuda``.
        kernels: ``reference``, ``compiled`` or ``fused``.

    Raises:
        ConfigError: a KV dtype that these kernels don't read.
    """
    on_cpu = device.partition(":")[0] == "cpu"
    weights = asked if asked != "auto" else "float32" if on_cpu else stored
    compute = "float32" if on_cpu and kernels == "compiled" else weights
    if kv not in ("auto", weights) and (not on_cpu or kernels == "fused"):
        raise ConfigError("runtime.kv_dtype", f"auto or {weights}, the model's dtype, with {kernels} kernels on {device}", kv)
    return Dtypes(compute, weights, weights if kv == "auto" else kv)
