"""Stage 5, accept, and its rules. A rule decides what is sampled at each node; which nodes that accepts is the same walk for all of them.

A rule is exact when the token of every node has the target's distribution there, whatever was drafted; then it does not matter for the
output's distribution how far the walk gets. Exact are ``match``, ``target_only`` with both thresholds at 1, and ``rejection``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...config.catalog import load_object
from ...kernels.groups import Limits, Nodes, Run
from ...plan.buffers import Views
from ...shapes import WORD_BITS
from .sampling import RESIDUAL_STREAM, LogitShaper, Scores, coins, cycle_positions, probabilities, sample_tokens, trusted
from .stage import Build, Stage

NODES = ("node_token_BN", "node_parent_BN", "node_depth_BN", "node_ancestors_BNX")


class Match:
    """Sample at every node by noise that belongs to the position. The output is that of plain decoding, token for token.

    Attributes:
        reads: slots, for the stage that holds the rule to declare.
    """

    reads: tuple[str, ...]

    def __init__(self, build: Build) -> None:
        self.plan, self.shape, self.kernels, self.sampling = build.plan, build.shape, build.kernels, build.sampling
        self.scores = Scores.of_target(build)
        self.reads = ("lane_seed_B", "seq_len_R", "lane_temperature_B", "node_depth_BN") if self.sampling.noise else ()

    def __call__(self, v: Views, logits_BNV: Tensor) -> tuple[Tensor, Tensor]:
        """The token of every node, int64 ``[B, N]``, and whether the node's logits can be trusted, bool ``[B, N]``.

        Args:
            v: the bucket's slots.
            logits_BNV: float32, shaped (:class:`~graphspec.graphs.stages.sampling.LogitShaper`); filters are applied by the rule. Where
                scores are compared by parts, this rank's.
        """
        return self._draw(v, logits_BNV, 0, truncate=True)

    def depth_cap(self, v: Views) -> Tensor | None:
        """Deepest node that the rule allows, int64 ``[B]``; draft length and context may allow less. None: no limit of its own."""
        return None

    def lead(self, v: Views, sample_BN: Tensor, node_B: Tensor) -> Tensor:
        """The samples, int64 ``[B, N]``, with those before node ``node_B`` replaced so that the walk gets there. Reads :data:`NODES`."""
        node_N = torch.arange(sample_BN.shape[1], device=sample_BN.device)
        words_BX = v.node_ancestors_BNX.gather(1, node_B[:, None, None].expand(-1, 1, v.node_ancestors_BNX.shape[-1])).squeeze(1)
        on_path_BN = ((words_BX[:, node_N // WORD_BITS] >> (node_N % WORD_BITS)) & 1).bool() & (node_N > 0)
        child_BNN = on_path_BN[:, None] & (v.node_parent_BN[:, None] == node_N[:, None])
        next_BN = torch.where(child_BNN, v.node_token_BN[:, None], -1).amax(-1)
        return torch.where(next_BN >= 0, next_BN, sample_BN)

    def _draw(self, v: Views, logits_BNV: Tensor, stream: int, *, truncate: bool = False) -> tuple[Tensor, Tensor]:
        position_BN = self.positions(v) if self.sampling.noise else None
        return sample_tokens(self.kernels, self.sampling, v, logits_BNV, position_BN, stream=stream, truncate=truncate, scores=self.scores)

    def positions(self, v: Views) -> Tensor:
        """The position whose token is sampled at each node, int64 ``[B, N]``."""
        return self.kernels.sampled_positions(v.lane_row_B, v.seq_len_R, v.node_depth_BN)

    def _positions(self, v: Views) -> Tensor:
        """Positions sampled at depth 0, 1, ... S."""
        level_A = torch.arange(self.shape.num_steps + 1, device=v.lane_row_B.device)
        return v.seq_len_R[v.lane_row_B][:, None] + 1 + level_A

    def _coin(self, v: Views) -> Tensor:
        """The coin of every node's position, float32 ``[B, N]``."""
        return coins(v.lane_seed_B, self._positions(v)).gather(1, v.node_depth_BN)


class TargetOnly(Match):
    """One coin per node against the children's own probabilities; no child accepted: sample from the rest.

    The first child c in node order is accepted for which ``coin < (p(children up to c)) / threshold_acc`` or ``p(c) >= threshold_single``,
    and never one with probability 0. Both thresholds at 1 leave the distribution exact: a child is accepted with exactly its probability
    and the rest is sampled from ``p`` without the children. Rows at temperature 0 are greedy.

    Source: sequential form of EAGLE's acceptance; thresholds as in SGLang's ``tree_speculative_sampling_target_only``.
    """

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.shaper = LogitShaper(build)
        if self.sampling.noise:
            self.reads = (*self.reads, "node_token_BN", "node_parent_BN")

    def __call__(self, v: Views, logits_BNV: Tensor) -> tuple[Tensor, Tensor]:
        if not self.sampling.noise:
            return super().__call__(v, logits_BNV)
        sound_BN = trusted(self.sampling, logits_BNV)
        logits_BNV = self.shaper.truncate(v, logits_BNV)
        temperature_B = v.lane_temperature_B
        nodes, vocab = logits_BNV.shape[1:]
        node_N = torch.arange(nodes, device=logits_BNV.device)
        token_BN, parent_BN = v.node_token_BN.clamp(min=0), v.node_parent_BN.clamp(min=0)
        is_child_BN = (v.node_token_BN >= 0) & (v.node_parent_BN >= 0) & (node_N > 0)

        of_parent_BN1 = parent_BN[..., None].expand(-1, -1, vocab)
        share_BN = probabilities(logits_BNV, temperature_B).gather(1, of_parent_BN1).gather(2, token_BN[..., None]).squeeze(-1)
        share_BN = torch.where(is_child_BN, share_BN, 0.0)
        upto_BNN = (parent_BN[:, :, None] == parent_BN[:, None]) & is_child_BN[:, None] & (node_N <= node_N[:, None])
        upto_BN = torch.where(upto_BNN, share_BN[:, None], 0.0).sum(-1)
        coin_BN = self._coin(v).gather(1, parent_BN)
        rule = self.plan.accept
        accepted_BN = (coin_BN < upto_BN / rule.threshold_acc) | (share_BN >= rule.threshold_single)
        accepted_BN = accepted_BN & is_child_BN & (share_BN > 0)
        taken_BNN = accepted_BN[:, None] & (parent_BN[:, None] == node_N[:, None])
        first_BN = torch.where(taken_BNN, node_N, nodes).amin(-1)

        child_at_BN = torch.where(is_child_BN, parent_BN * vocab + token_BN, nodes * vocab)
        offered_BW = torch.zeros(child_at_BN.shape[0], nodes * vocab + 1, dtype=torch.bool, device=logits_BNV.device)
        offered_BNV = offered_BW.scatter(1, child_at_BN, True)[:, :-1].view(logits_BNV.shape)
        rest_BNV = logits_BNV.masked_fill(offered_BNV, -torch.inf)
        # The children may hold all of the mass and their sum still round to less than the coin.
        rest_BNV = torch.where((rest_BNV > -torch.inf).any(-1, keepdim=True), rest_BNV, logits_BNV)
        hot_B1 = (temperature_B > 0)[:, None]
        drawn_BN, _ = self._draw(v, torch.where(hot_B1[..., None], rest_BNV, logits_BNV), RESIDUAL_STREAM)
        chosen_BN = token_BN.gather(1, first_BN.clamp(max=nodes - 1))
        return torch.where(hot_B1 & (first_BN < nodes), chosen_BN, drawn_BN), sound_BN


class Rejection(Match):
    """Chains whose tokens were drawn from the drafter's distribution q. A node whose draft is not accepted samples from what is left of p.

    Token by token, a draft is accepted when ``coin * q(token) < p(token)``, with probability ``min(1, p / q)``; else its node samples from
    ``relu(p - q)``. With ``accept.block_verification`` the chain is judged as a whole, see :meth:`_as_a_block`. In both, an empty rest
    becomes p; the last node, and one without drafted children, samples from p. Rows at temperature 0 are greedy.

    Source: Leviathan et al. 2023 (arXiv 2211.17192), section 2.3 and appendix A.1; Sun et al. 2024 (arXiv 2403.10444), algorithm 2.
    """

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.shaper = LogitShaper(build)
        if self.sampling.noise and self.shape.num_steps:
            self.reads = (*self.reads, "node_token_BN", "draft_prob_BSV")

    def __call__(self, v: Views, logits_BNV: Tensor) -> tuple[Tensor, Tensor]:
        if not self.sampling.noise or not self.shape.num_steps:
            return self._draw(v, logits_BNV, RESIDUAL_STREAM, truncate=True)
        sound_BN = trusted(self.sampling, logits_BNV)
        logits_BNV = self.shaper.truncate(v, logits_BNV)
        temperature_B = v.lane_temperature_B
        steps = self.shape.num_steps
        target_BSV, draft_BSV = probabilities(logits_BNV, temperature_B)[:, :steps], v.draft_prob_BSV
        drafted_BS = v.node_token_BN[:, 1:] >= 0
        token_BS = v.node_token_BN[:, 1:].clamp(min=0)
        target_BS = target_BSV.gather(2, token_BS[..., None]).squeeze(-1)
        draft_BS = draft_BSV.gather(2, token_BS[..., None]).squeeze(-1)
        if self.plan.accept.block_verification:
            accepted_BS, rest_BSV = self._as_a_block(v, drafted_BS, target_BS, draft_BS, target_BSV, draft_BSV)
        else:
            accepted_BS = drafted_BS & (self._coin(v)[:, :steps] * draft_BS < target_BS)
            rest_BSV = (target_BSV - draft_BSV).clamp(min=0)

        rest_BSV = torch.where((rest_BSV > 0).any(-1, keepdim=True) & drafted_BS[..., None], rest_BSV, target_BSV)
        # As logits at the row's temperature, so that the same noise serves.
        rest_BSV = torch.log(rest_BSV) * temperature_B[:, None, None]
        hot_B1 = (temperature_B > 0)[:, None]
        logits_BNV = torch.cat((torch.where(hot_B1[..., None], rest_BSV, logits_BNV[:, :steps]), logits_BNV[:, steps:]), 1)
        drawn_BN, _ = self._draw(v, logits_BNV, RESIDUAL_STREAM)
        return torch.cat((torch.where(hot_B1 & accepted_BS, token_BS, drawn_BN[:, :steps]), drawn_BN[:, steps:]), 1), sound_BN

    def _as_a_block(
        self, v: Views, drafted_BS: Tensor, target_BS: Tensor, draft_BS: Tensor, target_BSV: Tensor, draft_BSV: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Which drafts the longest accepted prefix holds, bool ``[B, S]``, and the unnormalised rest at each node, ``[B, S, V]``.

        A prefix of i drafts carries ``P_i = min(1, P_{i-1} p_i / q_i)``, ``P_0 = 1``. Its rest is ``relu(P_i p - q)`` over the next token,
        of mass R_i. It is accepted with probability ``R_i / (R_i + 1 - P_i)``, the whole chain with P; the longest one accepted is kept.
        No rule that emits the target's distribution accepts more on average, knowing the two models along the chain alone.

        The number of accepted drafts depends on all coins and drafts of the cycle, the rejected ones too. A later cycle must not see these
        again, so they are drawn under :func:`.sampling.cycle_positions`.
        """
        steps, width = self.shape.num_steps, self.plan.accept_width
        tiny = torch.finfo(torch.float32).tiny
        # log P: a sum that is cut off at 0 wherever it would rise above it. A running maximum of the uncut sum says by how much it was cut.
        ratio_BS = torch.where(drafted_BS, target_BS.log() - draft_BS.clamp(min=tiny).log(), -torch.inf)
        sum_BS = ratio_BS.cumsum(1)
        prefix_BS = (sum_BS - sum_BS.cummax(1).values.clamp(min=0)).exp()
        before_BS = torch.cat((torch.ones_like(prefix_BS[:, :1]), prefix_BS[:, :-1]), 1)
        rest_BSV = (before_BS[..., None] * target_BSV - draft_BSV).clamp(min=0)

        # Entry i is the prefix of i + 1 drafts; its rest is that of the node which the last of them is.
        mass_BS, lost_BS = rest_BSV.sum(-1)[:, 1:], 1 - prefix_BS[:, :-1]
        # Nothing lost and nothing left: p equals q after this prefix, and a longer one is accepted in any case. NaN, where a grammar
        # refuses a draft and allows nothing after it, accepts nothing.
        share_BS = torch.where(lost_BS == 0, 1.0, mass_BS / (mass_BS + lost_BS))
        last_BS = torch.cat((~drafted_BS[:, 1:], torch.ones_like(drafted_BS[:, :1])), 1)
        share_BS = torch.where(last_BS, prefix_BS, torch.cat((share_BS, torch.ones_like(prefix_BS[:, :1])), 1))
        coin_BS = coins(v.lane_seed_B, cycle_positions(v.seq_len_R[v.lane_row_B] + 1, steps, width))
        kept_BS = drafted_BS & (coin_BS < share_BS)
        # A draft is accepted with every prefix that holds it.
        return kept_BS.flip(1).to(torch.int64).cummax(1).values.flip(1).bool(), rest_BSV


class Synthetic(Match):
    """A run of a forced length along the path to the deepest node, by one coin per (seed, ``seq_len``). Times the runtime, says nothing.

    Samples as ``match`` does, then overwrites the samples along that path; the walk is cut by the depth cap. A tree whose deepest node is
    not as deep as the coin asks gives what it has.
    """

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.reads = tuple(dict.fromkeys((*self.reads, *NODES, "lane_seed_B", "seq_len_R")))

    def __call__(self, v: Views, logits_BNV: Tensor) -> tuple[Tensor, Tensor]:
        sample_BN, sound_BN = super().__call__(v, logits_BNV)
        nodes = sample_BN.shape[1]
        node_N = torch.arange(nodes, device=sample_BN.device)
        depth_BN = torch.where(v.node_token_BN >= 0, v.node_depth_BN, -1)
        # Depth first, then the lower index; a node is on the path when the deepest one sees it.
        deepest_B = (depth_BN * nodes + (nodes - 1 - node_N)).argmax(-1)
        return self.lead(v, sample_BN, deepest_B), sound_BN

    def depth_cap(self, v: Views) -> Tensor:
        row_B = v.lane_row_B
        coin_B = coins(v.lane_seed_B, v.seq_len_R[row_B][:, None])[:, 0]
        drawn_B = torch.zeros_like(row_B)
        for rate in self.plan.accept.rates:
            drawn_B = drawn_B + (coin_B < rate).to(torch.int64)
        return drawn_B


class Accept(Stage):
    """Sample, then match. The acceptance rule decides what is sampled at a node (:class:`Match`); by default it is the target's
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
        self.reads = tuple(dict.fromkeys((*base, *self.shaper.reads, *self.rule.reads)))

    def forward(self, v: Views) -> None:
        path_BNN = self.kernels.node_paths(v.node_token_BN, v.node_ancestors_BNX) if self.sampling.penalties else None
        # The position of what is sampled matters to bans alone.
        position_BN = self.rule.positions(v) if self.sampling.bias else None
        before_BNt = None
        if self.sampling.bad_words:
            before_BNt = self.kernels.node_contexts(v.recent_token_RBt, v.lane_row_B, v.node_token_BN, v.node_parent_BN)
        given_BNV = self.scores.kept(v)
        logits_BNV = self.shaper(v, given_BNV, position_BN, path_BNN, before_BTt=before_BNt)
        drawn_BN, sound_BN = self.rule(v, logits_BNV)
        self.kernels.tree_walk(
            v.take(Nodes), drawn_BN, sound_BN, self.rule.depth_cap(v), v.lane_row_B, v.take(Limits), self.plan.draft_context, v.take(Run)
        )  # fmt: skip
