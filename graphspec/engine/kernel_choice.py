"""The kernels that an engine's plan asks for, checked against its models."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..config.paths import user_path
from ..config.schema import Config
from ..errors import ConfigError
from ..host.progress import Display
from ..kernels import KernelSet, resolve, select_kernels
from ..plan.plan import Plan
from .programmatic import resolve as resolve_programmatic
from .tuning import read_table

if TYPE_CHECKING:
    from ..kernels.linear.fused.linear_choice import LinearTable

KEY = "kernels.linear_table"
NATIVE = "graphspec.kernels.native"
"""Loads its library, and compiles it where the cache lacks it, when it is imported."""
PHASE = "load C++ kernels"


def load_native(plan: Plan, display: Display) -> None:
    """Load the C++ kernels, where this plan has some and no other engine has loaded them; the first time on a machine they are compiled.

    Raises:
        ResourceError: there is no compiler, or it failed.
    """
    choices = (("kernels.linear", plan.linear), ("kernels.attention", plan.attention))
    if NATIVE not in sys.modules and any(
        resolve(key, choice, plan.kernels, plan.device, plan.dtype) == "native" for key, choice in choices
    ):
        display(PHASE, 0, 1, "the first time on a machine they are compiled")
        import_module(NATIVE)
        display(PHASE, 1, 1)


def choose_kernels(config: Config, plan: Plan) -> tuple[KernelSet, bool, tuple[LinearTable, Path] | None]:
    """The implementation of every op; whether kernels start while the one before them drains; and the table of ``kernels.linear_table``
    with its place.

    Raises:
        ConfigError: kernels that these models can't have, or a table that nothing would read.
    """
    device, table, place = torch.device(plan.device), None, None
    if config.kernels.linear_table is not None:
        if resolve("kernels.linear", plan.linear, plan.kernels, plan.device, plan.dtype) != "fused":
            expected = f"null with kernels.mode={plan.kernels}, unless linear layers are fused"
            raise ConfigError(KEY, expected, config.kernels.linear_table)
        place = user_path(KEY, config.kernels.linear_table)
        table = read_table(place, device)
    programmatic_launch = resolve_programmatic(plan.programmatic_launch, plan.kernels, device)
    kernels = select_kernels(
        plan.kernels,
        plan.attention,
        plan.device,
        linear=plan.linear,
        dtype=plan.dtype,
        numerics=plan.numerics,
        programmatic_launch=programmatic_launch,
        linear_table=table,
    )
    for name, facts in (("target", plan.target), ("draft", plan.draft.decoder if plan.draft is not None else None)):
        # Where the drafter skips tokens, its attention stays with the general kernels, except over latent rows with a host step.
        if facts is not None and (name == "target" or plan.variant.shift == 0 or (plan.cycles_need_host_step and facts.latent is not None)):
            if plan.attention == "flashinfer" and len(facts.pool_heads) > 1:
                expected = f"another implementation, since layers of the {name} have heads of several shapes"
                raise ConfigError("kernels.attention", expected, plan.attention)
            heads = facts.num_heads, facts.num_kv_heads, facts.head_dim
            latent = (facts.latent.rank, facts.latent.rope_dim) if facts.latent is not None else None
            kernels.check_model(name, plan.page_size, plan.dtype, *heads, facts.sliding_window, latent=latent)
    return kernels, programmatic_launch, (table, place) if table is not None and place is not None else None
