"""The acceptance rule of an engine, checked against its drafter and its shape."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ..config.schema import AcceptConfig, VariantConfig
from ..errors import ConfigError
from ..shapes import CycleShape

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptPlan:
    """How drafted tokens are accepted.

    Attributes:
        rule: its name in :data:`graphspec.graphs.stages.acceptance_rules.RULES`.
        threshold_single, threshold_acc: of rule ``target_only``.
        block_verification: of rule ``rejection``: the chain is judged as a whole, with coins and drafts of the cycle, not of positions.
        rates: of rule ``synthetic``: share of cycles that accept depth 1, 2, ... S.
        coupled: drafters rank by the sampler's own noise.
        sampled_drafts: drafters draw one token of their own distribution, which is kept for the rule.
        lossy: the output's distribution is not the target's.
        synthetic: the output is no text at all; only the time it took means something.
    """

    rule: str
    threshold_single: float
    threshold_acc: float
    block_verification: bool
    rates: tuple[float, ...]
    coupled: bool
    sampled_drafts: bool
    lossy: bool
    synthetic: bool

    @property
    def reads_probabilities(self) -> bool:
        """Where there is noise, the rule reads the target's probabilities, not just the token that is sampled."""
        return self.rule in ("target_only", "rejection")


def ranks_with_noise(config: AcceptConfig, variant: VariantConfig) -> bool:
    """Whether drafts of a sampled row are ranked with the sampler's own noise."""
    return variant.draft_noise == "coupled" and config.rule in ("match", "synthetic")


def resolve_accept(config: AcceptConfig, variant: VariantConfig, shape: CycleShape, *, has_network: bool) -> AcceptPlan:
    """The acceptance rule, checked against what is drafted.

    Raises:
        ConfigError: a rule that this drafter or this shape can't serve.
    """
    steps, rates = shape.num_steps, config.synthetic_rates or []
    rejection, synthetic = config.rule == "rejection", config.rule == "synthetic"
    if rejection and steps:
        if not has_network:
            raise ConfigError("accept.rule", "match or target_only: rejection needs the distribution its drafts come from", config.rule)
        if shape.topk > 1:
            raise ConfigError("variant.topk", "1: accept.rule=rejection works on chains", shape.topk)
        if variant.draft_noise != "coupled":
            raise ConfigError(
                "variant.draft_noise", "coupled: accept.rule=rejection draws its drafts, by noise of its own", variant.draft_noise
            )
    if config.synthetic_length is not None:
        if config.synthetic_length > steps + 1:
            raise ConfigError("accept.synthetic_length", f"at most num_steps + 1 = {steps + 1}", config.synthetic_length)
        rates = [min(1.0, max(0.0, config.synthetic_length - depth)) for depth in range(1, steps + 1)]
    if len(rates) > steps:
        raise ConfigError("accept.synthetic_rates", f"at most num_steps = {steps} of them", rates)
    lossy = config.threshold_single < 1 or config.threshold_acc < 1
    if lossy:
        logger.warning(
            "accept.threshold_single=%s, accept.threshold_acc=%s: below 1.0 the output does not have the target's distribution",
            config.threshold_single, config.threshold_acc,
        )  # fmt: skip
    if synthetic:
        logger.warning("accept.rule=synthetic forces the accepted length: it times the runtime, its output is no text")
    return AcceptPlan(
        rule=config.rule,
        threshold_single=config.threshold_single,
        threshold_acc=config.threshold_acc,
        block_verification=config.block_verification and steps > 0,
        rates=(*rates, *[0.0] * (steps - len(rates))),
        coupled=ranks_with_noise(config, variant),
        sampled_drafts=rejection and steps > 0,
        lossy=lossy or synthetic,
        synthetic=synthetic,
    )
