"""Stage 5, accept: sample at every node, keep the matching path."""

from __future__ import annotations

from ...config.catalog import load_object
from ...kernels.groups import Limits, Nodes, Run
from ...plan.buffers import Views
from .acceptance_rules import Match
from .bans import WORDS, node_contexts
from .sampling import LogitShaper, node_paths
from .stage import Build, Stage
from .vocabulary import Scores


class Accept(Stage):
    """Sample, then match. The acceptance rule decides what is sampled at a node (:mod:`.acceptance_rules`); by default it is the target's
    own sample, so that the output does not depend on the draft.

    A run ends before the first token whose logits are not finite, and its row fails there, on the device; other rows, and nodes nobody
    accepted, do not matter.
    """

    name = "accept"
    writes = Run._fields

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.shaper = LogitShaper(build)
        self.rule: Match = load_object(build.plan.accept.kind.make)(build)
        self.scores = Scores.of_target(build)
        base = ("lane_row_B", *Limits._fields, self.scores.slot, *Nodes._fields)
        words = WORDS if self.sampling.bad_words else ()
        mask = ("token_mask_BNVw",) if self.sampling.grammar else ()
        self.reads = tuple(dict.fromkeys((*base, *self.shaper.reads, *self.rule.reads, *words, *mask)))

    def forward(self, v: Views) -> None:
        path_BNN = node_paths(v.node_token_BN, v.node_ancestors_BNX) if self.sampling.penalties else None
        # The position of what is sampled matters to bans alone.
        position_BN = self.rule.positions(v) if self.sampling.bias else None
        before_BNt = node_contexts(v) if self.sampling.bad_words else None
        mask_BNVw = v.token_mask_BNVw if self.sampling.grammar else None
        given_BNV = self.scores.kept(v)
        logits_BNV = self.shaper(v, given_BNV, position_BN, path_BNN, before_BTt=before_BNt, mask_BTVw=mask_BNVw)
        drawn_BN, sound_BN = self.rule(v, logits_BNV)
        self.kernels.tree_walk(
            v.take(Nodes), drawn_BN, sound_BN, self.rule.depth_cap(v), v.lane_row_B, v.take(Limits), self.plan.draft_context, v.take(Run)
        )  # fmt: skip
