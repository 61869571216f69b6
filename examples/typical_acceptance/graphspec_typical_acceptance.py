"""Typical acceptance (Medusa, arXiv 2401.10774, section 2.3.1): a drafted token is accepted if the target finds it likely enough.

A child of a node is accepted if ``p(child) >= min(EPSILON, DELTA * exp(-H(p)))``: the more the target hesitates, the less a token has to be
its choice. Of all nodes that are reached so, the walk takes the deepest; its last node samples a token of the target. The output does not
have the target's distribution. Rows at temperature 0 stay greedy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphspec.config.catalog import AcceptanceRule

if TYPE_CHECKING:
    from graphspec.graphs.stages.acceptance_rules import Match
    from graphspec.graphs.stages.stage import Build

RULE = AcceptanceRule(
    name="typical",
    summary="typical acceptance (Medusa): any token that the target finds likely enough; not lossless",
    make="graphspec_typical_acceptance:make",
    exact=False,
    samples_positions=True,
    reads_probabilities=True,
)
EPSILON, DELTA = 0.09, 0.3
"""A probability that always suffices, and the share of a typical token's, ``exp(-H)``, that does."""


def make(build: Build) -> Match:
    """The rule in one program."""
    import torch
    from torch import Tensor

    from graphspec.graphs.stages.acceptance_rules import NODES, Match
    from graphspec.graphs.stages.sampling import LogitShaper, probabilities
    from graphspec.plan.buffers import Views

    class TypicalAcceptance(Match):
        def __init__(self, build: Build) -> None:
            super().__init__(build)
            self.shaper = LogitShaper(build)
            self.reads = tuple(dict.fromkeys((*self.reads, *NODES))) if self.sampling.noise else self.reads

        def __call__(self, v: Views, logits_BNV: Tensor) -> tuple[Tensor, Tensor]:
            sample_BN, sound_BN = super().__call__(v, logits_BNV)
            if not self.sampling.noise:
                return sample_BN, sound_BN
            share_BNV = probabilities(self.shaper.truncate(v, logits_BNV), v.lane_temperature_B)
            bar_BN = (DELTA * torch.special.xlogy(share_BNV, share_BNV).sum(-1).exp()).clamp(max=EPSILON)
            token_BN, parent_BN = v.node_token_BN.clamp(min=0), v.node_parent_BN.clamp(min=0)
            of_parent_BNV = share_BNV.gather(1, parent_BN[..., None].expand_as(share_BNV))
            likely_BN = of_parent_BNV.gather(2, token_BN[..., None])[..., 0] >= bar_BN.gather(1, parent_BN)
            node_N = torch.arange(token_BN.shape[1], device=token_BN.device)
            likely_BN = (likely_BN | (node_N == 0)) & (v.node_token_BN >= 0)
            # Level by level: a node is reached if it is likely and its parent is reached.
            reached_BN = likely_BN
            for _ in range(self.shape.num_steps):
                reached_BN = likely_BN & (reached_BN.gather(1, parent_BN) | (node_N == 0))
            depth_BN = torch.where(reached_BN, v.node_depth_BN, -1)
            # Of several nodes of one depth, the one with the lower index.
            deepest_B = (depth_BN * len(node_N) + (len(node_N) - 1 - node_N)).argmax(-1)
            hot_B1 = (v.lane_temperature_B > 0)[:, None]
            return torch.where(hot_B1, self.lead(v, sample_BN, deepest_B), sample_BN), sound_BN

    return TypicalAcceptance(build)
