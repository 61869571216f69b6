"""A run of ``graphspec profile`` over the tiny pair of :mod:`tests.support.engines`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphspec.config.command_options import LaunchConfig, ProfileConfig, WorkloadConfig
from graphspec.config.schema import ModelConfig, RuntimeConfig, VariantConfig
from tests.support.engines import TREE

if TYPE_CHECKING:
    from tests.support.engines import Pair

WORKLOAD = {"source": "random", "requests": 3, "batch": 1, "input_tokens": 9, "output_tokens": 12, "ignore_eos": True, "seed": 5}


def launch(pair: Pair, **changes: Any) -> LaunchConfig:
    """A run over the tiny pair; ``changes`` are fields of :class:`LaunchConfig`, or of the workload by its own names."""
    workload = {key: changes.pop(key, value) for key, value in WORKLOAD.items()}
    values: dict[str, Any] = {
        "model": ModelConfig(path=str(pair.target)),
        "variant": VariantConfig(name="eagle3", draft=str(pair.draft), **TREE),
        "runtime": RuntimeConfig(name="eager", prefill_chunks=[8, 16]),
        "profile": ProfileConfig(rounds=2, warm_up_seconds=0.0, timeout_seconds=120.0),
        "workload": WorkloadConfig(**workload),
    }
    return LaunchConfig(**(values | changes))
