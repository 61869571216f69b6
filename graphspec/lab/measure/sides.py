"""Which sides a comparison has, and the configuration of each. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...config.catalog import PLAIN_DECODING, resolve_variant
from ...config.command_options import CLOSED, LaunchConfig
from ...config.schema import AcceptConfig, AdaptiveConfig, VariantConfig
from ...errors import ConfigError

SUBJECT, PLAIN, SELF = "subject", "none", "self"
OURS = (SUBJECT, PLAIN, SELF)
ONE_ROW = ("hf_assisted", "hf_lookup")
"""Sides that decode one request at a time."""
API = "openai"
"""A server of another engine."""
ROLES = (*OURS, "hf", *ONE_ROW, API)


@dataclass(frozen=True, slots=True)
class SideConfig:
    """One way to serve the workload.

    Attributes:
        role: one of :data:`ROLES`, which determines the program.
        config: the whole configuration of this side.
    """

    role: str
    config: LaunchConfig

    @property
    def ours(self) -> bool:
        """Whether it is an engine of this package, whose cycles can be profiled."""
        return self.role in OURS


def speculates(config: LaunchConfig) -> bool:
    """Whether the configured variant drafts."""
    return resolve_variant(config.variant.name).speculates


def plain_config(config: LaunchConfig) -> LaunchConfig:
    """The same engine without drafts: the reference for its tokens and its speed."""
    runtime = replace(config.runtime, depth_per_bucket={})
    return replace(
        config, variant=VariantConfig(name=PLAIN_DECODING.name), accept=AcceptConfig(), adaptive=AdaptiveConfig(), runtime=runtime
    )


def for_workload(config: LaunchConfig) -> LaunchConfig:
    """The configuration with as many rows as the workload has requests at once, without larger buckets.

    Prompts repeat from round to round, so the prefix cache is off unless it is set.
    """
    rows, runtime = config.workload.batch, config.runtime
    buckets = runtime.buckets if runtime.buckets[-1] >= rows else [*runtime.buckets, rows]
    used = [bucket for bucket in buckets if bucket < rows] + [next(bucket for bucket in buckets if bucket >= rows)]
    depths = {bucket: depth for bucket, depth in runtime.depth_per_bucket.items() if bucket in used}
    times = {bucket: times for bucket, times in config.adaptive.times.items() if bucket in used}
    return replace(
        config,
        runtime=replace(runtime, max_rows=rows, buckets=used, depth_per_bucket=depths, prefix_cache=runtime.prefix_cache is True),
        adaptive=replace(config.adaptive, times=times),
    )


def sides_of(config: LaunchConfig) -> list[SideConfig]:
    """The configured engine, then those of ``baseline``; an engine that decodes plainly is its own plain baseline.

    Raises:
        ConfigError: a baseline that can't serve this workload.
    """
    sides = [SideConfig(SUBJECT, config)]
    for role in config.baseline:
        if role in ONE_ROW and config.workload.batch > 1:
            raise ConfigError("workload.batch", f"1 with baseline={role}: transformers assists one row at a time", config.workload.batch)
        if role not in OURS and config.workload.arrivals != CLOSED:
            expected = f"closed with baseline={role}: only engines of this package are asked in an open loop"
            raise ConfigError("workload.arrivals", expected, config.workload.arrivals)
        if role == PLAIN:
            if speculates(config):
                sides.append(SideConfig(role, plain_config(config)))
        else:
            sides.append(SideConfig(role, config))
    return sides


def reference_of(sides: Sequence[SideConfig]) -> SideConfig | None:
    """Plain decoding, where it must run just as the reference for tokens; None: it is among ``sides``, or not needed."""
    subject = sides[0].config
    if not speculates(subject) or any(side.role == PLAIN for side in sides):
        return None
    return SideConfig(PLAIN, plain_config(subject))
