"""Logits of which every rank has a part: gathered where a sampling class needs all of them, else compared by what is best of each part."""

from __future__ import annotations

from torch import Tensor

from ...kernels.registry import KernelSet
from ...kernels.tree.shard_topk import merge_shards, pack_shard
from ...models.vocabulary import VocabParallelLinear, sharded_head
from ...plan.acceptance import AcceptPlan
from ...plan.buffers import Views
from ...shapes import SamplingClass
from .stage import Build, DraftModel, TargetModel


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
