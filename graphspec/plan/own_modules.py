"""What an engine can't do with ``model.family=transformers``. Imports no torch."""

from __future__ import annotations

from ..config.catalog import all_variants, resolve_variant
from ..config.schema import Config
from ..errors import ConfigError

_WITH = "with model.family=transformers"


def check_own_modules(config: Config) -> None:
    """Refuse what a target made of transformers' modules can't do. The runtime is checked where it is resolved.

    Raises:
        ConfigError: it is asked for.
    """
    variant, kernels = resolve_variant(config.variant.name), config.kernels
    if variant.reads_target:
        able = [row.name for row in all_variants() if not row.reads_target]
        raise ConfigError("variant", f"{' or '.join(able)} {_WITH}: no drafter reads such a target", variant.name)
    if config.runtime.tensor_parallel > 1:
        raise ConfigError("runtime.tensor_parallel", f"1 {_WITH}", config.runtime.tensor_parallel)
    if kernels.mode == "compiled":
        raise ConfigError("kernels.mode", f"auto, reference or fused {_WITH}", kernels.mode)
    if kernels.numerics in ("cycle_invariant", "batch_invariant"):
        raise ConfigError("kernels.numerics", f"auto or fast {_WITH}, whose products may depend on the batch", kernels.numerics)
    if kernels.attention == "flashinfer":
        raise ConfigError("kernels.attention", f"another implementation {_WITH}", kernels.attention)
