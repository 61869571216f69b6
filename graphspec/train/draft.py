"""Trains a draft network of any variant for a frozen target.

The loss of a draft step is the soft cross-entropy against the target's full next-token distribution (Hinton et al. 2015; EAGLE's
classification loss), or one that aims at the acceptance rate (:mod:`graphspec.train.losses`); for heads whose hidden state predicts the
target's feature, EAGLE's SmoothL1 distance to it is added (Li et al. 2024). Steps after the first read the network's own hidden states
(HASS, Zhang et al. 2024; training-time test of EAGLE-3, Li et al. 2025). A network that drafts all depths in one pass has no such states:
its blocks begin at some rows of each sequence (DFlash, arXiv 2602.06036).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from ..config.checks import brief
from ..config.train_options import CROSS_ENTROPY, TrainConfig
from ..errors import ConfigError
from . import loop
from .cached import CachedTarget
from .drafter import Drafter, NetworkConfig, Target, network_of, trained_variants
from .loop import Watch, unwatched
from .losses import mean_loss
from .qat import RoundedWeights
from .start import Start

BITS = (
    "lr", "adamw_lr", "schedule", "warmup", "cooldown", "restarts", "clip", "dtype", "compile", "seed",
    "unroll", "decay", "loss", "feature_weight", "raw_share", "cache_features", "qat",
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
            raise ConfigError("variant", "one that is trained: " + ", ".join(trained_variants()), repr(self.variant))
        shortest = min(length for _, _, length in config.schedule_phases)
        if shortest <= config.unroll + 1:
            raise ConfigError("train.sequence_length", f"sequences longer than train.unroll + 1 = {config.unroll + 1}", shortest)
        written = {length for _, _, length in config.text.sets or []}
        missing = [length for _, _, length in config.schedule_phases if length not in written]
        without_text = config.sources and not any(source.is_text for source in config.sources)
        if written and missing and config.raw_share < 1 and not without_text:
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

    def check(self, target: PreTrainedModel) -> None:
        """Raises ConfigError for settings that don't fit the target: a run learns so before the target writes text for hours."""
        network = network_of(self.variant).of(target, self.network()).network
        if self.train.qat.format is not None:
            RoundedWeights(network, self.train.qat)

    def settings(self) -> dict[str, Any]:
        """Everything that determines the trained weights, except the text."""
        config = asdict(self.train)
        settings = {"variant": self.variant, "phases": self.train.schedule_phases, **{key: config[key] for key in BITS}}
        return {**settings, "network": asdict(self.network())}


@dataclass(frozen=True)
class Chats:
    """An entry of ``train.data`` that is conversations: its share of each batch, and its sequences by length, see
    :func:`graphspec.train.conversations.pack`.
    """

    share: float
    rows: dict[int, tuple[np.ndarray, np.ndarray]]

    def answered(self) -> np.ndarray:
        """``[tokens]``: the tokens of the answers, once for each length of sequences."""
        return np.concatenate([tokens[marks] for tokens, marks in self.rows.values()])


@dataclass(frozen=True)
class Texts:
    """The texts that drafts are trained on."""

    stream: np.ndarray
    """``[tokens]``: the training text."""
    written: dict[int, np.ndarray]
    """By length ``[sequences, length]``: text written by the target."""
    chats: Sequence[Chats] = ()
    """Conversations; what their shares leave of a batch is text."""

    @property
    def text_share(self) -> float:
        """The share of a batch that is text, at least 0."""
        rest = 1.0 - sum(chats.share for chats in self.chats)
        return rest if rest > 1e-9 else 0.0

    def sequences(self) -> dict[int, list[np.ndarray]]:
        """By length, sets of sequences ``[N, length]`` that a run reads again and again."""
        found = {length: [tokens] for length, tokens in self.written.items()}
        for chats in self.chats:
            for length, (tokens, _) in chats.rows.items():
                found.setdefault(length, []).append(tokens)
        return found

    def counts(self, vocab_size: int) -> Tensor:
        """``[V]`` int64: occurrences of each id, all kinds of text with equal weight, whatever their lengths; among conversations, each
        entry with its share.

        A draft has to predict text that the target writes; the training text provides counts of rare tokens.
        """
        total = _frequencies(self.stream, vocab_size) + self._of_target(vocab_size)
        return torch.from_numpy(np.rint(total * 1e9).astype(np.int64))

    def coverage(self, ids: Tensor, vocab_size: int) -> float:
        """The share of the tokens to be drafted that are among ``ids``: of what the target writes, weighed as in :meth:`counts`, or of the
        training text if it wrote nothing.
        """
        found = self._of_target(vocab_size)
        if not found.any():
            found = _frequencies(self.stream, vocab_size)
        return float(found[ids.cpu().numpy()].sum() / found.sum())

    def _of_target(self, vocab_size: int) -> np.ndarray:
        """``[V]`` float64: how frequent each id is in what the target writes, all kinds of text added."""
        total = np.zeros(vocab_size)
        if self.written:
            total += _frequencies(np.concatenate([tokens.ravel() for tokens in self.written.values()]), vocab_size)
        for chats in self.chats:
            total += chats.share / (1.0 - self.text_share) * _frequencies(chats.answered(), vocab_size)
        return total

    def batch(self, count: int, length: int, raw_share: float, seed: int) -> tuple[Tensor, Tensor | None]:
        """Sequences ``[count, length]`` int64, and whether the token after each counts, bool ``[count, length]``, None: all do.

        Raw windows come first, then sequences written by the target, then conversations; determined by ``seed``.
        """
        generator = np.random.default_rng(seed)
        shares = [self.text_share, *(chats.share for chats in self.chats)]
        texts, *chosen = generator.multinomial(count, shares) if self.chats else [count]
        raw = round(texts * raw_share)
        starts = generator.integers(0, max(1, len(self.stream) - length), raw)
        parts = [self.stream[start : start + length] for start in starts]
        if raw < texts:
            parts += list(self.written[length][generator.integers(0, len(self.written[length]), texts - raw)])
        counted = [np.ones(length, dtype=bool)] * texts
        for chats, number in zip(self.chats, chosen, strict=True):
            tokens_NL, marks_NL = chats.rows[length]
            for row in generator.integers(0, len(tokens_NL), number):
                parts.append(tokens_NL[row])
                # The mark of a token stands at the one that predicts it.
                counted.append(np.append(marks_NL[row, 1:], False))
        tokens = torch.from_numpy(np.stack(parts).astype(np.int64))
        return tokens, torch.from_numpy(np.stack(counted)) if self.chats else None

    def check(self, config: TrainConfig) -> None:
        """Raises ConfigError unless there is text for every phase."""
        if self.text_share == 0.0:
            return
        for _, _, length in config.schedule_phases:
            if config.raw_share < 1.0 and length not in self.written:
                raise ConfigError("train.text.sets", f"a set of sequences of {length} tokens, as the schedule has", sorted(self.written))
            if config.raw_share > 0.0 and len(self.stream) <= length:
                raise ConfigError("train.data", f"more than {length} training tokens", len(self.stream))


def _frequencies(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """``[V]`` float64: the share of each id; zeros for no ids."""
    return np.bincount(ids, minlength=vocab_size) / max(1, len(ids))


def soft_targets(logits_MV: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The target's distribution over the drafted ids, float32 ``[M, Vd]``; the most likely of these, ``[M]``; and whether no other id is
    more likely, bool ``[M]``. Logits are ``[M, V]``.
    """
    drafted_MV = logits_MV if ids is None else logits_MV[:, ids]
    hard_M = drafted_MV.argmax(-1)
    best_M = drafted_MV.gather(-1, hard_M[:, None])[:, 0]
    # On a CPU the maximum of a row is found many times faster than its place.
    return drafted_MV.float().softmax(-1), hard_M, best_M >= logits_MV.amax(-1)


def draft_losses(
    drafter: Drafter,
    features_BTF: Tensor,
    logits_BTV: Tensor,
    tokens_BT: Tensor,
    row_A: Tensor,
    unroll: int,
    feature_weight: float = 0.0,
    counted_BT: Tensor | None = None,
    columns: Tensor | None = None,
    kind: str = CROSS_ENTROPY,
) -> tuple[Tensor, Tensor]:
    """Loss and top-1 agreement with the target at every drafted depth, each ``[unroll]``, over the drafting rows ``row_A``.

    Rows whose most likely id is not in the draft vocabulary have no loss and count as misses. ``counted_BT``: the positions whose
    predictions count; None: all. ``columns``: those of the logits that are the draft's, int64 ``[Vd]``; None: its target ids. ``kind``:
    ``train.loss``.
    """
    if counted_BT is None:
        counted_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
    # What does not count is left out before anything as wide as a vocabulary is computed.
    place_BT = (counted_BT.flatten().cumsum(0) - 1).view_as(counted_BT)
    ids = drafter.target_ids() if columns is None else columns
    soft_MV, hard_M, inside_M = soft_targets(logits_BTV[counted_BT], ids)
    losses, hits = [], []
    for k, hidden_BAH in enumerate(drafter.drafts(features_BTF, tokens_BT, unroll, row_A)):
        seen = 1 + k + row_A
        here_BA = counted_BT[:, seen]
        place_N, hidden_NH = place_BT[:, seen][here_BA], hidden_BAH[here_BA]
        logits_NV, inside_N = drafter.logits(hidden_NH).float(), inside_M[place_N]
        loss = mean_loss(kind, logits_NV, soft_MV[place_N], inside_N)
        if feature_weight:
            distance = F.smooth_l1_loss(hidden_NH.float(), features_BTF[:, seen][here_BA].float(), reduction="sum")
            loss = loss + feature_weight * distance / max(1, hidden_NH.numel())
        losses.append(loss)
        top_N = logits_NV.detach().gather(-1, hard_M[place_N][:, None])[:, 0] >= logits_NV.detach().amax(-1)
        hits.append((top_N & inside_N).float().sum() / max(1, len(top_N)))
    return torch.stack(losses), torch.stack(hits)


def train_draft(
    recipe: Recipe, model: PreTrainedModel, texts: Texts, work: Path, watch: Watch = unwatched, start: Start | None = None
) -> tuple[Drafter, dict[str, Any]]:
    """Train on the model's device, resuming from the checkpoint in ``work``; returns the trained network and its figures.

    ``start``: the draft that a new run begins with, whose settings are those of ``recipe``.

    Raises:
        CheckpointError: as :meth:`graphspec.train.start.Start.fill`.
        ConfigError: no text for a phase, a phase beyond the target's context, or what :func:`graphspec.train.loop.run` raises.
    """
    config = recipe.train
    texts.check(config)
    context, longest = model.config.max_position_embeddings, max(length for _, _, length in config.schedule_phases)
    if longest > context:
        raise ConfigError("train.sequence_length", f"sequences within the target's context of {context} tokens", longest)
    target, device = Target(model), next(model.parameters()).device
    torch.manual_seed(config.seed)
    drafter = network_of(recipe.variant).build(model, recipe.network(), texts.counts(model.config.vocab_size))
    begins_with = None if start is None else start.fill(drafter, model)
    drafter.to(device)
    if config.dtype == "bfloat16":
        target.store_products(torch.bfloat16)
    eager = target.view, draft_losses
    compiled = torch.compile(target.view, dynamic=False), torch.compile(draft_losses, dynamic=False)
    worth = {(batch, length) for steps, batch, length in config.schedule_phases if config.compile and steps >= COMPILE_PAYS}
    weights = config.decay ** torch.arange(config.unroll, device=device)
    cache: CachedTarget | None = None
    if config.cache_features:
        cache = CachedTarget(target, drafter, texts.sequences(), getattr(torch, config.dtype), work)

    def loss(step: int, batch: int, length: int) -> tuple[Tensor, Tensor]:
        tokens_BT, counted_BT = texts.batch(batch, length, config.raw_share, config.seed * 1_000_003 + step)
        tokens_BT, counted_BT = tokens_BT.to(device), None if counted_BT is None else counted_BT.to(device)
        view, losses_of = compiled if (batch, length) in worth else eager
        with torch.autocast(device.type, torch.bfloat16, enabled=config.dtype == "bfloat16"):
            columns: Tensor | None = None
            if cache is None:
                features, logits = view(tokens_BT, drafter.tap_layers)
            else:
                features, logits, columns = cache.view(tokens_BT)
            row_A = drafter.anchors(length - config.unroll, step).to(device)
            if counted_BT is not None:
                # How many tokens count differs from step to step: that is no static program.
                losses_of = draft_losses
            weight = config.feature_weight
            losses, hits = losses_of(drafter, features, logits, tokens_BT, row_A, config.unroll, weight, counted_BT, columns, config.loss)
            return (losses * weights).sum(), torch.stack((losses.detach(), hits))

    def describe(means: Tensor) -> dict[str, Any]:
        losses, hits = means.tolist()
        return {"loss": [round(x, 4) for x in losses], "agreement": [round(x, 4) for x in hits]}

    rounded = None if config.qat.format is None else RoundedWeights(drafter.network, config.qat)
    settings = {**recipe.settings(), "start_from": begins_with}
    job = loop.Job(recipe.variant, drafter, drafter.unmixed, loss, settings, describe, nullcontext if rounded is None else rounded.applied)
    try:
        trained = loop.run(job, config, work, watch)
    finally:
        if cache is not None:
            cache.close()
    if rounded is not None:
        rounded.apply()
    figures: dict[str, Any] = {
        "variant": recipe.variant,
        "steps": config.total_steps,
        "tokens": loop.tokens_until(config, config.total_steps),
        "rows": sum(steps * batch * len(drafter.anchors(length - config.unroll, 0)) for steps, batch, length in config.schedule_phases),
        "seconds": round(trained.seconds),
        "parameters": sum(p.numel() for p in drafter.parameters()),
        "sequences": {str(length): len(tokens) for length, tokens in texts.written.items()},
        "conversations": [{str(length): len(rows) for length, (rows, _) in chats.rows.items()} for chats in texts.chats],
        "loss_by_depth": trained.figures["loss"],
        "agreement_by_depth": trained.figures["agreement"],
    }
    ids = drafter.target_ids()
    if ids is not None:
        figures["draft_vocab_size"] = len(ids)
        figures["draft_vocab_coverage"] = round(texts.coverage(ids, drafter.facts.decoder.vocab_size), 4)
    return drafter.eval(), figures
