"""Trains a draft network of any variant for a frozen target.

The loss of a draft step is the soft cross-entropy against the target's full next-token distribution (Hinton et al. 2015; EAGLE's
classification loss); for heads whose hidden state predicts the target's feature, EAGLE's SmoothL1 distance to it is added (Li et al. 2024).
Steps after the first read the network's own hidden states (HASS, Zhang et al. 2024; training-time test of EAGLE-3, Li et al. 2025). A
network that drafts all depths in one pass has no such states: its blocks begin at some rows of each sequence (DFlash, arXiv 2602.06036).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from ..config.checks import brief
from ..config.train_options import TrainConfig
from ..errors import ConfigError
from . import loop
from .drafter import Drafter, NetworkConfig, Target, network_of, trained_variants
from .loop import Watch, unwatched

BITS = (
    "lr", "adamw_lr", "schedule", "warmup", "cooldown", "restarts", "clip", "dtype", "compile", "seed",
    "unroll", "decay", "feature_weight", "raw_share",
)  # fmt: skip
"""Keys of ``train`` that determine, with phases and network, the weights of a trained draft."""
COMPILE_PAYS = 100
"""Fewest steps of one shape for which ``train.compile`` compiles it, which takes a minute per shape."""


@dataclass(frozen=True)
class Recipe:
    """One draft: its variant, and how it is trained."""

    variant: str
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        config = self.train
        if self.variant not in trained_variants():
            raise ConfigError(
                "variant", "one that is trained: " + ", ".join(trained_variants()) + ", or none for a target", repr(self.variant)
            )
        shortest = min(length for _, _, length in config.schedule_phases)
        if shortest <= config.unroll + 1:
            raise ConfigError("train.sequence_length", f"sequences longer than train.unroll + 1 = {config.unroll + 1}", shortest)
        written = {length for _, _, length in config.text.sets or []}
        missing = [length for _, _, length in config.schedule_phases if length not in written]
        if written and missing and config.raw_share < 1:
            raise ConfigError("train.text.sets", f"a set of sequences of {missing[0]} tokens, as the schedule has", sorted(written))
        fixed = self.network().steps
        if fixed is not None and config.unroll != fixed[1]:
            raise ConfigError("train.unroll", f"{fixed[1]}, as train.network.{fixed[0]} says", config.unroll)
        if config.feature_weight and not network_of(self.variant).feeds_feature:
            raise ConfigError("train.feature_weight", f"0, for {self.variant} feeds back no feature", config.feature_weight)

    def network(self) -> NetworkConfig:
        """``train.network`` as the variant's dataclass.

        Raises:
            ConfigError: a key the variant does not have, or a value of the wrong type.
        """
        kind, given = network_of(self.variant).Settings, self.train.network
        for key in given:
            if key not in kind.__dataclass_fields__:
                raise ConfigError(
                    f"train.network.{key}", f"settings of {self.variant}: " + ", ".join(kind.__dataclass_fields__), brief(key)
                )
        return kind(**given)

    def settings(self) -> dict[str, Any]:
        """Everything that determines the trained weights, except the text."""
        config = asdict(self.train)
        settings = {"variant": self.variant, "phases": self.train.schedule_phases, **{key: config[key] for key in BITS}}
        return {**settings, "network": asdict(self.network())}


@dataclass(frozen=True)
class Texts:
    """The texts that drafts are trained on."""

    stream: np.ndarray
    """``[tokens]``: the training text."""
    written: dict[int, np.ndarray]
    """By length ``[sequences, length]``: text written by the target."""

    def counts(self, vocab_size: int) -> Tensor:
        """``[V]`` int64: occurrences of each id, both kinds of text with equal weight, whatever their lengths.

        A draft has to predict text that the target writes; the training text provides counts of rare tokens.
        """
        total = np.bincount(self.stream, minlength=vocab_size) / max(1, len(self.stream))
        if self.written:
            ids = np.concatenate([tokens.ravel() for tokens in self.written.values()])
            total = total + np.bincount(ids, minlength=vocab_size) / len(ids)
        return torch.from_numpy(np.rint(total * 1e9).astype(np.int64))

    def batch(self, count: int, length: int, raw_share: float, seed: int) -> Tensor:
        """``[count, length]`` int64: raw windows first, then generated sequences; determined by ``seed``."""
        generator = np.random.default_rng(seed)
        raw = round(count * raw_share)
        starts = generator.integers(0, max(1, len(self.stream) - length), raw)
        parts = [self.stream[start : start + length] for start in starts]
        if raw < count:
            parts += list(self.written[length][generator.integers(0, len(self.written[length]), count - raw)])
        return torch.from_numpy(np.stack(parts).astype(np.int64))

    def check(self, config: TrainConfig) -> None:
        """Raises ConfigError unless there is text for every phase."""
        for _, _, length in config.schedule_phases:
            if config.raw_share < 1.0 and length not in self.written:
                raise ConfigError("train.text.sets", f"a set of sequences of {length} tokens, as the schedule has", sorted(self.written))
            if config.raw_share > 0.0 and len(self.stream) <= length:
                raise ConfigError("train.data", f"more than {length} training tokens", len(self.stream))


def draft_losses(
    drafter: Drafter, features_BTF: Tensor, logits_BTV: Tensor, tokens_BT: Tensor, row_A: Tensor, unroll: int, feature_weight: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Loss and top-1 agreement with the target at every drafted depth, each ``[unroll]``, over the drafting rows ``row_A``.

    Rows whose argmax is not in the draft vocabulary have no cross-entropy and count as misses.
    """
    ids = drafter.target_ids()
    hard_BT = logits_BTV.argmax(-1)
    if ids is None:
        soft_BTv = logits_BTV.float().softmax(-1)
    else:
        soft_BTv = logits_BTV[..., ids].float().softmax(-1)
        to_draft_V = torch.full((logits_BTV.shape[-1],), -1, device=ids.device).scatter(0, ids, torch.arange(len(ids), device=ids.device))
        hard_BT = to_draft_V[hard_BT]
    losses, hits = [], []
    for k, hidden in enumerate(drafter.drafts(features_BTF, tokens_BT, unroll, row_A)):
        seen = 1 + k + row_A
        logits = drafter.logits(hidden).float()
        soft, hard = soft_BTv[:, seen], hard_BT[:, seen]
        inside = hard >= 0
        cross_entropy = logits.logsumexp(-1) - (soft * logits).sum(-1)
        loss = (cross_entropy * inside).sum() / inside.sum().clamp(min=1)
        if feature_weight:
            loss = loss + feature_weight * F.smooth_l1_loss(hidden.float(), features_BTF[:, seen].float())
        losses.append(loss)
        # On a CPU an argmax per row is slower than the row's maximum and one look-up.
        top = logits.gather(-1, hard.clamp(min=0)[..., None])[..., 0] >= logits.amax(-1)
        hits.append((top & inside).float().mean())
    return torch.stack(losses), torch.stack(hits)


def train_draft(
    recipe: Recipe, model: PreTrainedModel, texts: Texts, work: Path, watch: Watch = unwatched
) -> tuple[Drafter, dict[str, Any]]:
    """Train on the model's device, resuming from the checkpoint in ``work``; returns the trained network and its figures.

    Raises:
        ConfigError: no text for a phase, a phase beyond the target's context, or what :func:`graphspec.train.loop.run` raises.
    """
    config = recipe.train
    texts.check(config)
    context, longest = model.config.max_position_embeddings, max(length for _, _, length in config.schedule_phases)
    if longest > context:
        raise ConfigError("train.sequence_length", f"sequences within the target's context of {context} tokens", longest)
    target, device = Target(model), next(model.parameters()).device
    torch.manual_seed(config.seed)
    drafter = network_of(recipe.variant).build(model, recipe.network(), texts.counts(model.config.vocab_size)).to(device)
    eager = target.view, draft_losses
    compiled = torch.compile(target.view, dynamic=False), torch.compile(draft_losses, dynamic=False)
    worth = {(batch, length) for steps, batch, length in config.schedule_phases if config.compile and steps >= COMPILE_PAYS}
    weights = config.decay ** torch.arange(config.unroll, device=device)

    def loss(step: int, batch: int, length: int) -> tuple[Tensor, Tensor]:
        tokens_BT = texts.batch(batch, length, config.raw_share, config.seed * 1_000_003 + step).to(device)
        view, losses_of = compiled if (batch, length) in worth else eager
        with torch.autocast(device.type, torch.bfloat16, enabled=config.dtype == "bfloat16"):
            features, logits = view(tokens_BT, drafter.tap_layers)
            row_A = drafter.anchors(length - config.unroll, step).to(device)
            losses, hits = losses_of(drafter, features, logits, tokens_BT, row_A, config.unroll, config.feature_weight)
            return (losses * weights).sum(), torch.stack((losses.detach(), hits))

    def describe(means: Tensor) -> dict[str, Any]:
        losses, hits = means.tolist()
        return {"loss": [round(x, 4) for x in losses], "agreement": [round(x, 4) for x in hits]}

    job = loop.Job(recipe.variant, drafter, drafter.unmixed, loss, recipe.settings(), describe)
    trained = loop.run(job, config, work, watch)
    figures: dict[str, Any] = {
        "variant": recipe.variant,
        "steps": config.total_steps,
        "tokens": loop.tokens_until(config, config.total_steps),
        "rows": sum(steps * batch * len(drafter.anchors(length - config.unroll, 0)) for steps, batch, length in config.schedule_phases),
        "seconds": round(trained.seconds),
        "parameters": sum(p.numel() for p in drafter.parameters()),
        "sequences": {str(length): len(tokens) for length, tokens in texts.written.items()},
        "loss_by_depth": trained.figures["loss"],
        "agreement_by_depth": trained.figures["agreement"],
    }
    ids = drafter.target_ids()
    if ids is not None:
        drafted = np.concatenate([tokens.ravel() for tokens in texts.written.values()]) if texts.written else texts.stream
        figures["draft_vocab_size"] = len(ids)
        figures["draft_vocab_coverage"] = round(float(np.isin(drafted, ids.cpu().numpy()).mean()), 4)
    return drafter.eval(), figures
