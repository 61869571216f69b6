"""Sampling one token per position from logits: penalties, bias and filters first, then greedy or by noise.

Every random number is a hash of (seed, position, token), so it does not depend on batch, tree or launch. Numbers that must be independent
of each other come from different *streams*: the same hash over the seed with a constant of the stream xor-ed in.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.groups import Biases, Penalties
from ...kernels.registry import KernelSet
from ...kernels.sampling.noise import BELOW_ONE, counter_hash
from ...kernels.tree.shard_topk import merge_shards, pack_shard
from ...models.vocabulary import VocabParallelLinear, sharded_head
from ...plan.acceptance import AcceptPlan
from ...plan.buffers import Views
from ...shapes import SamplingClass
from .bans import WORDS
from .stage import Build, DraftModel, TargetModel

# The first 64 fractional bits of the square roots of 2, 3 and 5, as signed words.
COIN_STREAM = 0x6A09E667F3BCC908
"""Coins: whether a drafted token is accepted; how long a synthetic run is."""
RESIDUAL_STREAM = 0xBB67AE8584CAA73B - 2**64
"""Noise of the token that is drawn where no drafted one was accepted."""
DRAFT_STREAM = 0x3C6EF372FE94F82B
"""Noise of drafts that are drawn from the drafter's own distribution."""


def sample_tokens(
    kernels: KernelSet, sampling: SamplingClass, v: Views, logits_BTV: Tensor, position_BT: Tensor | None, *, stream: int = 0,
    truncate: bool = True, scores: Scores | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The target's token at every position, and whether its logits can be trusted: one call of the op, with what the class needs.

    Args:
        kernels: holds the op.
        sampling: the class. Where it bans tokens, by -inf, only NaN and +inf are distrusted.
        v: the bucket's slots.
        logits_BTV: float32, shaped (:class:`LogitShaper`) and not filtered.
        position_BT: position of the token being sampled; needed where the class has noise.
        stream: of the noise.
        truncate: apply the filters of the class; False where that was done before.
        scores: of the target. Where they are compared by parts, the logits are this rank's.

    Returns:
        int64 ``[B, T]``; bool ``[B, T]``.
    """
    strict = not sampling.bans
    temperature_B, seed_B = (v.lane_temperature_B, v.lane_seed_B) if sampling.noise else (None, None)
    position_BT = position_BT if sampling.noise else None
    if seed_B is not None and stream:
        seed_B = seed_B ^ stream
    if scores is not None and scores.by_parts:
        _, token_BT1, sound_BT = scores.best(logits_BTV, temperature_B, seed_B, position_BT)
        return token_BT1[..., 0], sound_BT
    if not (sampling.noise and truncate and sampling.truncate):
        return kernels.sample_tokens(logits_BTV, temperature_B, seed_B, position_BT, None, None, None, strict)
    top_k_B, top_p_B, min_p_B = (kernels.take_rows(x_R, v.lane_row_B) for x_R in (v.top_k_R, v.top_p_R, v.min_p_R))
    return kernels.sample_tokens(logits_BTV, temperature_B, seed_B, position_BT, top_k_B, top_p_B, min_p_B, strict)


def trusted(sampling: SamplingClass, logits_BTV: Tensor) -> Tensor:
    """Whether the logits of a position can be trusted, bool ``[B, T]``; as :func:`sample_tokens` judges them."""
    known_BTV = logits_BTV.isfinite()
    return (logits_BTV < torch.inf).all(-1) & known_BTV.any(-1) if sampling.bans else known_BTV.all(-1)


def coins(seed_B: Tensor, position_BT: Tensor) -> Tensor:
    """One uniform number in (0, 1) per position, of the coins' stream: float32 ``[B, T]``."""
    bits_BT = counter_hash(seed_B ^ COIN_STREAM, position_BT, torch.zeros(1, dtype=torch.int64, device=seed_B.device)).squeeze(-1)
    return ((bits_BT.to(torch.float32) + 0.5) * 2.0**-32).clamp(max=BELOW_ONE)


def cycle_positions(first_B: Tensor, levels: int, accept_width: int) -> Tensor:
    """Positions for the hash under which no two cycles of a row share a number: int64 ``[B, levels]``.

    What is drawn for a level is then fresh even where an earlier cycle looked at the draft of that position and threw it away.

    Args:
        first_B: int64, position of the first token that the cycle drafts.
        levels: of the cycle.
        accept_width: of the engine's deepest cycle, at least ``levels``.
    """
    return first_B[:, None] * accept_width + torch.arange(levels, device=first_B.device)


def probabilities(logits_BTV: Tensor, temperature_B: Tensor) -> Tensor:
    """``softmax(logits / T)``; rows at ``T == 0`` as if it were 1. No quotient overflows: the largest logit is subtracted first."""
    temperature_B11 = torch.where(temperature_B > 0, temperature_B, 1.0)[:, None, None]
    return torch.softmax((logits_BTV - logits_BTV.amax(-1, keepdim=True)) / temperature_B11, -1)


class LogitShaper:
    """What a request wants changed in its logits, in this order: penalties, bias, banned tokens, and apart from these the filters.

    The order is that of transformers and vLLM: repetition penalty, frequency penalty, presence penalty, logit bias; banned are stop ids
    before the minimum length, tokens that are not allowed, ends of bad words and what a grammar refuses; then, at temperatures above 0,
    top-k, top-p, min-p. The filters are a separate step (:meth:`truncate`), because the target's sampler applies them itself. Only what the
    sampling class names is computed. The logits of a row that uses nothing of this stay the same to the bit.

    A ban puts -inf where the logit was finite. Where bans are possible, an -inf from the network becomes NaN, so that it is still detected.

    A drafter ranks by what the sampler will see, as far as its own vocabulary goes; bad words and grammar are left to the target.

    Args:
        build: of the stage, which declares ``reads``.
        drafts: the logits are a drafter's.
    """

    def __init__(self, build: Build, *, drafts: bool = False) -> None:
        self.kernels, self.sampling, self.vocab_size = build.kernels, build.sampling, build.plan.target.vocab_size
        self.masked = self.sampling.grammar and not drafts
        penalties = ("repetition_R", "presence_R", "frequency_R", "output_count_RV", "prompt_seen_RV")
        self.reads: tuple[str, ...] = (
            *(penalties if self.sampling.penalties else ()),
            *(Biases._fields if self.sampling.bias else ()),
            *(("allowed_RU",) if self.sampling.allowed else ()),
            *(WORDS if self.sampling.bad_words and not drafts else ()),
            *(("token_mask_BNVw",) if self.masked else ()),
            *(("top_k_R", "top_p_R", "min_p_R", "lane_temperature_B") if self.sampling.truncate else ()),
        )

    def __call__(
        self,
        v: Views,
        logits_BTV: Tensor,
        position_BT: Tensor | None,
        path_BTs: Tensor | None = None,
        target_token_Vd: Tensor | None = None,
        before_BTt: Tensor | None = None,
    ) -> Tensor:
        """The logits a token is sampled from, before the filters.

        Args:
            v: the bucket's slots.
            logits_BTV: float32.
            position_BT: position of the token being sampled; needed where the class has bias.
            path_BTs: target ids of the tokens between the row's last emitted token (not among them) and the one being sampled, in any
                order, -1 for none; None: there are none.
            target_token_Vd: int64, column to target id; None: columns are target ids.
            before_BTt: the tokens before the one being sampled, as long as the longest bad word without its last token, newest last; None:
                bad words are not looked for.
        """
        row_B = v.lane_row_B
        if self.sampling.penalties:
            path_BTs = None if path_BTs is None or path_BTs.shape[-1] == 0 else path_BTs
            logits_BTV = self.kernels.penalise(logits_BTV, row_B, v.take(Penalties), path_BTs, target_token_Vd)
        if self.sampling.bans:
            allowed_RU = v.allowed_RU if self.sampling.allowed else None
            mask_BTVw = v.token_mask_BNVw[:, : logits_BTV.shape[1]] if self.masked else None
            logits_BTV = self.kernels.mask_tokens(logits_BTV, row_B, allowed_RU, mask_BTVw, target_token_Vd)
        if self.sampling.bias:
            assert position_BT is not None, "bans of stop ids end at a position"
            logits_BTV = self.kernels.bias_logits(logits_BTV, row_B, v.take(Biases), position_BT, target_token_Vd, self.vocab_size)
        if self.sampling.bad_words and before_BTt is not None:
            logits_BTV = self.kernels.ban_words(logits_BTV, row_B, v.bad_word_RBwBt, before_BTt)
        return logits_BTV

    def truncate(self, v: Views, logits_BTV: Tensor) -> Tensor:
        """Shaped logits with -inf for the tokens that top-k, top-p and min-p leave out, where the class filters at all."""
        if not self.sampling.truncate:
            return logits_BTV
        top_k_B, top_p_B, min_p_B = (self.kernels.take_rows(x_R, v.lane_row_B) for x_R in (v.top_k_R, v.top_p_R, v.min_p_R))
        return self.kernels.filter_logits(logits_BTV, v.lane_temperature_B, top_k_B, top_p_B, min_p_B)


class DraftSampler:
    """Ranks a drafter's continuations by the keys the sampler will use itself, or draws them where the acceptance rule asks for that.

    Attributes:
        reads, writes: slots, for the stage that holds the sampler to declare.
    """

    def __init__(self, build: Build) -> None:
        self.plan, self.kernels, self.shape, self.sampling = build.plan, build.kernels, build.shape, build.sampling
        self.shaper, self.scores = LogitShaper(build, drafts=True), Scores.of_draft(build)
        self.drawn = self.sampling.noise and self.plan.accept.sampled_drafts
        self.by_cycle = self.drawn and self.plan.accept.block_verification
        self.noisy = self.drawn or (self.sampling.noise and self.plan.accept.coupled)
        forced = ("forced_token_BS",) if self.sampling.grammar else ()
        self.reads = (*self.shaper.reads, *(("lane_seed_B", "lane_temperature_B") if self.noisy else ()), *forced)
        self.writes = ("draft_prob_BSV",) if self.drawn else ()

    def propose(
        self, v: Views, logits_BTV: Tensor, target_token_Vd: Tensor | None, position_B: Tensor, path_BTs: Tensor, level: int
    ) -> tuple[Tensor, Tensor]:
        """Top-K continuations of each draft row.

        Args:
            v: the bucket's slots.
            logits_BTV: float32 over the draft vocabulary; of several ranks with a part of the head each, this one's.
            target_token_Vd: int64, draft id to target id; None if the vocabularies are one.
            position_B: position of the token being proposed, the same for all T.
            path_BTs: int64 ``[B, T, level - 1]``, tokens drafted on the way to each row, the root not among them.
            level: depth of the token being proposed, from 1; static.

        Returns:
            log-probabilities float32 and target ids int64, both ``[B, T, K]``. On the way that a grammar forces, its token comes first.
        """
        found = self._propose(v, logits_BTV, target_token_Vd, position_B, path_BTs, level)
        return self.kernels.put_first(*found, v.forced_token_BS, path_BTs) if self.sampling.grammar else found

    def _propose(
        self, v: Views, logits_BTV: Tensor, target_token_Vd: Tensor | None, position_B: Tensor, path_BTs: Tensor, level: int
    ) -> tuple[Tensor, Tensor]:
        if self.scores.by_parts:
            return self._best(v, logits_BTV, position_B[:, None].expand(logits_BTV.shape[:2]))
        logits_BTV = self.scores.whole(logits_BTV)
        logits_BTV = self.shaper.truncate(v, self.shaper(v, logits_BTV, position_B[:, None], path_BTs, target_token_Vd))
        if not self.noisy:
            return self.kernels.draft_topk(logits_BTV, self.shape.topk, target_token_Vd, None, None, None)
        temperature_B, seed_B = v.lane_temperature_B, v.lane_seed_B
        if self.drawn:
            seed_B = seed_B ^ DRAFT_STREAM
            self._keep(v, logits_BTV[:, :1], temperature_B, target_token_Vd, level)
        if self.by_cycle:
            position_B = cycle_positions(position_B - (level - 1), level, self.plan.accept_width)[:, -1]
        return self.kernels.draft_topk(logits_BTV, self.shape.topk, target_token_Vd, seed_B, position_B, temperature_B)

    def propose_levels(
        self, v: Views, logits_BSV: Tensor, target_token_Vd: Tensor | None, position_BS: Tensor
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Top-K tokens of every depth, if the distribution of a depth does not depend on what was drafted before it.

        Penalties count what the row has committed, no drafted token. Noise is that of the position, so one vector of keys serves all
        parents of a depth: the target samples with the same noise under each of them.

        Args:
            v: the bucket's slots.
            logits_BSV: float32 over the draft vocabulary, one row per depth; of several ranks with a part of the head each, this one's.
            target_token_Vd: int64, draft id to target id; None if the vocabularies are one.
            position_BS: position of the token being proposed at each depth.

        Returns:
            log-probabilities float32 and target ids int64, both ``[B, S, K]``. Where a grammar forces a token, it comes first.
        """
        found = self._propose_levels(v, logits_BSV, target_token_Vd, position_BS)
        return self.kernels.put_first(*found, v.forced_token_BS, None) if self.sampling.grammar else found

    def _propose_levels(
        self, v: Views, logits_BSV: Tensor, target_token_Vd: Tensor | None, position_BS: Tensor
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if self.scores.by_parts:
            return self._best(v, logits_BSV, position_BS)
        logits_BSV = self.scores.whole(logits_BSV)
        logits_BSV = self.shaper.truncate(v, self.shaper(v, logits_BSV, position_BS, None, target_token_Vd))
        topk, depths = self.shape.topk, position_BS.shape
        if not self.noisy:
            return self.kernels.draft_topk(logits_BSV, topk, target_token_Vd, None, None, None)
        seed_B = v.lane_seed_B
        if self.drawn:
            seed_B = seed_B ^ DRAFT_STREAM
            self._keep(v, logits_BSV, v.lane_temperature_B, target_token_Vd, 1)
        if self.by_cycle:
            position_BS = cycle_positions(position_BS[:, 0], position_BS.shape[1], self.plan.accept_width)
        # The op takes one position per lane, so here every depth is a lane.
        seed_D, temperature_D = (x_B.new_empty(depths).copy_(x_B[:, None]).flatten() for x_B in (seed_B, v.lane_temperature_B))
        logits_D1V = logits_BSV.flatten(0, 1)[:, None]
        score, token = self.kernels.draft_topk(logits_D1V, topk, target_token_Vd, seed_D, position_BS.flatten(), temperature_D)
        return score.view(*depths, topk), token.view(*depths, topk)

    def _best(self, v: Views, logits_BTVr: Tensor, position_BT: Tensor) -> tuple[Tensor, Tensor]:
        """The best continuations over all ranks, from this rank's logits."""
        noise = (v.lane_temperature_B, v.lane_seed_B, position_BT) if self.noisy else (None, None, None)
        return self.scores.best(logits_BTVr, *noise)[:2]

    def _keep(self, v: Views, logits_BLV: Tensor, temperature_B: Tensor, target_token_Vd: Tensor | None, level: int) -> None:
        """The distributions that tokens from ``level`` on are drawn from, over the target's vocabulary; what the drafter doesn't know has
        none.
        """
        logits_BLV = torch.where(logits_BLV.isfinite(), logits_BLV, -torch.inf)
        # A row without a finite logit proposes nothing; its share is never asked for.
        share_BLV = probabilities(logits_BLV, temperature_B).nan_to_num(0.0)
        kept_BLV = v.draft_prob_BSV[:, level - 1 : level - 1 + logits_BLV.shape[1]]
        if target_token_Vd is not None:
            share_BLV = torch.zeros_like(kept_BLV).index_copy(2, target_token_Vd, share_BLV)
        if self.sampling.grammar:
            # What a grammar forces is drafted with certainty.
            forced_BL1 = v.forced_token_BS[:, level - 1 : level - 1 + logits_BLV.shape[1], None]
            certain_BLV = torch.zeros_like(share_BLV).scatter(2, forced_BL1.clamp(min=0), 1.0)
            share_BLV = torch.where(forced_BL1 >= 0, certain_BLV, share_BLV)
        kept_BLV.copy_(share_BLV)


class Scores:
    """What a network's logits are turned into.

    Attributes:
        head: the network's head, where every rank has a part of it; None: its logits are whole.
        by_parts: the best tokens of each part are compared and no logits are gathered. Static: of the sampling class, the rule and the
            sizes alone, so the same on every rank.
    """

    def __init__(self, network: TargetModel | DraftModel | None, kernels: KernelSet, topk: int, *, needs_all: bool) -> None:
        self.kernels, self.topk = kernels, topk
        self.head: VocabParallelLinear | None = sharded_head(network)
        self.by_parts = self.head is not None and not needs_all and topk <= self.head.parts[0]

    @classmethod
    def of_target(cls, build: Build) -> Scores:
        """Scores of the target's logits; one token is sampled per position."""
        needs_all = target_needs_all(build.sampling, build.plan.accept)
        return cls(build.target, build.kernels, 1, needs_all=needs_all)

    @classmethod
    def of_draft(cls, build: Build) -> Scores:
        """Scores of the draft's logits. All of them are kept if the acceptance rule needs draft probabilities."""
        drawn = build.sampling.noise and build.plan.accept.sampled_drafts
        return cls(build.draft, build.kernels, build.shape.topk, needs_all=build.sampling.changes_logits or drawn)

    def whole(self, logits: Tensor) -> Tensor:
        """Logits over the whole vocabulary, from what the network gave."""
        return logits if self.head is None else self.head.gather(logits)

    @property
    def slot(self) -> str:
        """The slot that the target's logits are kept in."""
        return "logits_BNVr" if self.by_parts else "logits_BNV"

    def keep(self, v: Views, logits_BTV: Tensor) -> None:
        """Write the logits of the first nodes, as the target gave them, into their slot."""
        kept = self.kept(v)[:, : logits_BTV.shape[1]]
        kept.copy_(logits_BTV if self.by_parts else self.whole(logits_BTV))

    def kept(self, v: Views) -> Tensor:
        """The slot's tensor."""
        tensor: Tensor = getattr(v, self.slot)
        return tensor

    def best(
        self, logits_BTVr: Tensor, temperature_B: Tensor | None, seed_B: Tensor | None, position_BT: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The best tokens over all ranks, from this rank's logits: results of :func:`~graphspec.kernels.tree.shard_topk.merge_shards`.

        Args:
            logits_BTVr: float32.
            temperature_B, seed_B, position_BT: of the noise; all or none.
        """
        assert self.head is not None, "ranks with a part each"
        found = self.kernels.shard_topk(logits_BTVr, self.topk, self.head.token_Vr, temperature_B, seed_B, position_BT)
        return merge_shards(self.head.comm.all_gather(pack_shard(*found)), self.topk)


def target_needs_all(sampling: SamplingClass, accept: AcceptPlan) -> bool:
    """Whether the target's tokens depend on more than the best key of each position."""
    return sampling.changes_logits or sampling.logprobs >= 0 or (sampling.noise and accept.kind.reads_probabilities)
