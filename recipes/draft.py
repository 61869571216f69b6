"""Train a draft network of any variant for a frozen target: loop, resume, figures.

The loss of a draft step is the soft cross-entropy against the target's full next-token distribution (Hinton et al. 2015; EAGLE's
classification loss), for heads whose hidden state stands for the target's feature plus EAGLE's SmoothL1 distance to it (Li et al. 2024).
Steps after the first run on the network's own hidden states (HASS, Zhang et al. 2024; training-time test of EAGLE-3, Li et al. 2025).
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor
from transformers import PreTrainedModel

from graphspec.errors import ConfigError

from .drafter import Drafter, NetworkConfig, Target, unrolled
from .export import write_json
from .networks import NETWORKS
from .optim import Optimizers, phase_at


@dataclass
class DraftConfig:
    """One draft: what it is and how it is trained."""

    variant: str = "eagle3"
    network: dict[str, Any] = field(default_factory=dict)
    """Settings of the variant's own dataclass in ``recipes/networks``."""
    unroll: int = 4
    """Draft steps unrolled on the network's own hidden states."""
    decay: float = 0.8
    """Weight of unrolled step ``k`` is ``decay ** k``."""
    feature_weight: float = 0.0
    """Weight of the SmoothL1 distance to the target's next feature; only for networks whose hidden state stands for it."""
    raw_share: float = 0.0
    """Share of each batch that is cut from the training text; the rest was written by the target."""
    phases: list[list[int]] = field(default_factory=lambda: [[400, 16, 256]])
    """``[steps, batch, sequence length]``; the length names the set of generated text."""
    lr: float = 2e-2
    """Peak rate of Muon, for the matrices."""
    adamw_lr: float = 3e-3
    """Peak rate of AdamW, for everything else."""
    warmup: int = 40
    cooldown: int = 200
    restarts: list[int] = field(default_factory=list)
    """Steps at which the schedule of the learning rates begins anew: more training after a cool-down, without starting over."""
    clip: float = 1.0
    seed: int = 2
    save_every: int = 50

    def __post_init__(self) -> None:
        if self.variant not in NETWORKS:
            raise ConfigError("variant", "one of " + ", ".join(NETWORKS), self.variant)
        if self.unroll < 1:
            raise ConfigError("unroll", "at least 1", self.unroll)
        if not 0.0 <= self.raw_share <= 1.0:
            raise ConfigError("raw_share", "a share in 0..1", self.raw_share)
        if not self.phases or any(len(phase) != 3 or min(phase) < 1 for phase in self.phases):
            raise ConfigError("phases", "[steps, batch, sequence length] lists of positive numbers", self.phases)
        if any(not 0 < step < sum(phase[0] for phase in self.phases) for step in self.restarts):
            raise ConfigError("restarts", f"steps between 0 and {sum(phase[0] for phase in self.phases)}", self.restarts)
        shortest = min(length for _, _, length in self.phases)
        if shortest <= self.unroll + 1:
            raise ConfigError("phases", f"sequences longer than unroll + 1 = {self.unroll + 1}", shortest)
        settings = self.settings()
        heads = getattr(settings, "num_heads", 1)
        if heads > 1 and self.unroll != heads:
            raise ConfigError("unroll", f"network.num_heads = {heads}, for every head is one step", self.unroll)
        if self.feature_weight and not NETWORKS[self.variant].feeds_feature:
            raise ConfigError("feature_weight", f"0, for {self.variant} feeds back no feature", self.feature_weight)

    def settings(self) -> NetworkConfig:
        """``network`` as the variant's own dataclass.

        Raises:
            ConfigError: a key the variant does not have, or a value of the wrong type.
        """
        try:
            merged = OmegaConf.merge(OmegaConf.structured(NETWORKS[self.variant].Settings), self.network)
            return cast("NetworkConfig", OmegaConf.to_object(merged))
        except OmegaConfBaseException as error:
            names = ", ".join(NETWORKS[self.variant].Settings.__dataclass_fields__)
            found = str(error).splitlines()[0]
            raise ConfigError(f"network.{error.full_key or '?'}", f"settings of {self.variant}: {names}", found) from error

    def resolved(self) -> dict[str, Any]:
        """Every setting, those of the network that were left at their defaults included."""
        return {**asdict(self), "network": asdict(self.settings())}


@dataclass
class Texts:
    """What drafts are trained on."""

    stream: np.ndarray
    """``[tokens]``: the training text."""
    written: dict[int, np.ndarray]
    """By length ``[sequences, length]``: text written by the target."""

    def counts(self, vocab_size: int) -> Tensor:
        """``[V]`` int64: occurrences of each id; both kinds of text weigh the same, however long each is.

        What the target writes is what will be drafted; the training text keeps rare tokens in order.
        """
        total = np.bincount(self.stream, minlength=vocab_size) / max(1, len(self.stream))
        if self.written:
            ids = np.concatenate([tokens.ravel() for tokens in self.written.values()])
            total = total + np.bincount(ids, minlength=vocab_size) / len(ids)
        return torch.from_numpy(np.rint(total * 1e9).astype(np.int64))

    def batch(self, count: int, length: int, raw_share: float, seed: int) -> Tensor:
        """``[count, length]`` int64: raw windows first, then generated sequences; the same for the same ``seed``."""
        generator = np.random.default_rng(seed)
        raw = round(count * raw_share)
        starts = generator.integers(0, max(1, len(self.stream) - length), raw)
        parts = [self.stream[start : start + length] for start in starts]
        if raw < count:
            parts += list(self.written[length][generator.integers(0, len(self.written[length]), count - raw)])
        return torch.from_numpy(np.stack(parts).astype(np.int64))

    def check(self, config: DraftConfig) -> None:
        """Raises ConfigError unless there is text for every phase."""
        for _, _, length in config.phases:
            if config.raw_share < 1.0 and length not in self.written:
                raise ConfigError("phases", f"a sequence length among the generated ones {sorted(self.written)}", length)
            if config.raw_share > 0.0 and len(self.stream) <= length:
                raise ConfigError("data", f"more than {length} training tokens", len(self.stream))


def draft_losses(
    drafter: Drafter, features_BTF: Tensor, logits_BTV: Tensor, tokens_BT: Tensor, unroll: int, feature_weight: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Loss and top-1 agreement with the target of every unrolled step, each ``[unroll]``.

    Rows whose argmax the draft vocabulary does not hold carry no cross-entropy and count as misses.
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
    rows = tokens_BT.shape[1] - unroll
    for k, hidden in enumerate(unrolled(drafter, features_BTF, tokens_BT, unroll)):
        seen = slice(1 + k, 1 + k + rows)
        logits = drafter.logits(hidden).float()
        soft, hard = soft_BTv[:, seen], hard_BT[:, seen]
        inside = (hard >= 0).float()
        cross_entropy = logits.logsumexp(-1) - torch.einsum("btv,btv->bt", soft, logits)
        loss = (cross_entropy * inside).sum() / inside.sum().clamp(min=1)
        if feature_weight:
            loss = loss + feature_weight * F.smooth_l1_loss(hidden.float(), features_BTF[:, seen].float())
        losses.append(loss)
        hits.append((logits.argmax(-1) == hard).float().mean())
    return torch.stack(losses), torch.stack(hits)


def train_draft(config: DraftConfig, model: PreTrainedModel, texts: Texts, work: Path, name: str) -> Drafter:
    """Train on the model's device, resuming from ``work/<name>.pt``; figures go to ``work/<name>.json``. Returns the trained network.

    Raises:
        ConfigError: no text for a phase, a phase beyond the target's context, or a checkpoint of other settings in the work folder.
    """
    texts.check(config)
    context, longest = model.config.max_position_embeddings, max(length for _, _, length in config.phases)
    if longest > context:
        raise ConfigError("phases", f"sequences within the target's context of {context} tokens", longest)
    torch.set_flush_denormal(True)
    target, device = Target(model), next(model.parameters()).device
    torch.manual_seed(config.seed)
    drafter = NETWORKS[config.variant].build(model, config.settings(), texts.counts(model.config.vocab_size)).to(device)
    steps = sum(phase[0] for phase in config.phases)
    optimizers = Optimizers(drafter, config.lr, steps, config.warmup, config.cooldown, drafter.unmixed, config.adamw_lr, config.restarts)
    checkpoint, step, rows, seconds = work / f"{name}.pt", 0, 0, 0.0
    smooth: Tensor | None = None
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device)
        check_settings(state["config"], config, checkpoint)
        drafter.load_state_dict(state["model"])
        optimizers.load_state_dict(state["optimizers"])
        step, rows, seconds, smooth = state["step"], state["rows"], state["seconds"], state["smooth"]
        print(f"{name}: resumed at step {step}/{steps}", flush=True)
    weights = config.decay ** torch.arange(config.unroll, device=device)
    started = time.monotonic()

    def save() -> None:
        progress = {"step": step, "rows": rows, "seconds": seconds, "smooth": smooth, "config": config.resolved()}
        torch.save({"model": drafter.state_dict(), "optimizers": optimizers.state_dict(), **progress}, checkpoint.with_suffix(".tmp"))
        checkpoint.with_suffix(".tmp").replace(checkpoint)

    drafter.train()
    while step < steps:
        batch, length = phase_at(config.phases, step)
        tokens_BT = texts.batch(batch, length, config.raw_share, config.seed * 1_000_003 + step).to(device)
        features, logits = target.view(tokens_BT, drafter.tap_layers)
        losses, hits = draft_losses(drafter, features, logits, tokens_BT, config.unroll, config.feature_weight)
        (losses * weights).sum().backward()
        optimizers.step(step, config.clip)
        now = torch.stack((losses.detach(), hits))
        smooth = now if smooth is None else 0.95 * smooth + 0.05 * now
        step += 1
        rows += batch * (length - config.unroll)
        clock = time.monotonic()
        seconds, started = seconds + clock - started, clock
        if step % 20 == 0 or step == steps:
            agreement = " ".join(f"{h:.3f}" for h in smooth[1].tolist())
            rate = f"{rows / seconds:.0f} rows/s, {seconds / step * (steps - step):.0f} s left"
            print(f"{name} step {step}/{steps} loss {smooth[0].mean():.3f} agreement by depth {agreement} {rate}", flush=True)
        if step % config.save_every == 0 or step == steps:
            save()
    assert smooth is not None, "there is at least one step"
    figures: dict[str, object] = {
        "variant": config.variant,
        "steps": steps,
        "rows": rows,
        "seconds": round(seconds),
        "parameters": sum(p.numel() for p in drafter.parameters()),
        "sequences": {str(length): len(tokens) for length, tokens in texts.written.items()},
        "loss_by_depth": [round(x, 4) for x in smooth[0].tolist()],
        "agreement_by_depth": [round(x, 4) for x in smooth[1].tolist()],
    }
    ids = drafter.target_ids()
    if ids is not None:
        drafted = np.concatenate([tokens.ravel() for tokens in texts.written.values()]) if texts.written else texts.stream
        figures["draft_vocab_size"] = len(ids)
        figures["draft_vocab_coverage"] = round(float(np.isin(drafted, ids.cpu().numpy()).mean()), 4)
    write_json(work / f"{name}.json", figures)
    return drafter.eval()


def check_settings(stored: dict[str, Any], config: DraftConfig, where: Path) -> None:
    """Raises ConfigError naming the first setting in which a checkpoint differs from ``config``."""
    found = DraftConfig(**stored).resolved()
    for key, value in config.resolved().items():
        if found[key] != value and key != "save_every":
            raise ConfigError(f"{where}: {key}", value, found[key], "trained with other settings; use a new work folder")


def load_draft(config: DraftConfig, model: PreTrainedModel, checkpoint: Path) -> Drafter:
    """The network of a checkpoint of :func:`train_draft`, in evaluation mode on the model's device."""
    device = next(model.parameters()).device
    state = torch.load(checkpoint, map_location=device)
    check_settings(state["config"], config, checkpoint)
    drafter = NETWORKS[config.variant].build(model, config.settings(), None).to(device)
    drafter.load_state_dict(state["model"])
    return drafter.eval()
