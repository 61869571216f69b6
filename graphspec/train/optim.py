"""Optimizers, torch's except Muon, and the schedule of their learning rates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ..config.train_options import TrainConfig
from ..models.layers import Linear

SCHEDULE = ("phases", "schedule", "warmup", "cooldown", "restarts")
"""Keys of ``train`` that a run may change for the steps to come, as long as those that were made stay."""
LOWEST = 0.02
"""Share of the peak learning rate at the end of a decay."""


def orthogonalised(update: torch.Tensor, dtype: torch.dtype = torch.float32, iterations: int = 5) -> torch.Tensor:
    """Updates ``[.., rows, columns]``, made nearly orthogonal in ``dtype`` by quintic Newton-Schulz iteration (Jordan et al. 2024)."""
    x: torch.Tensor = update.mT if update.shape[-2] > update.shape[-1] else update
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)).to(dtype)
    for _ in range(iterations):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if update.shape[-2] > update.shape[-1] else x).to(update.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised in ``dtype``, batched over matrices of one shape.

    ``parts``: rows of the matrices that are fused into a parameter, in order; one without is a single matrix.

    ``torch.optim.Muon`` always iterates in bfloat16, which a CPU without bfloat16 arithmetic emulates, many times slower than a step.
    The learning rate is scaled by ``0.2 * sqrt(max(rows, columns))`` so that one rate serves AdamW and Muon (Liu et al. 2025).
    """

    def __init__(
        self,
        params: list[torch.nn.Parameter],
        lr: float,
        dtype: torch.dtype,
        parts: Mapping[torch.nn.Parameter, tuple[int, ...]],
        momentum: float = 0.95,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.dtype, self.parts = dtype, parts

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[tuple[torch.Tensor, torch.Tensor]]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    velocity = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                    velocity.lerp_(parameter.grad, 1 - group["momentum"])
                    update = parameter.grad.lerp(velocity, group["momentum"])
                    rows = self.parts.get(parameter, (len(parameter),))
                    for matrix, part in zip(parameter.split(rows), update.split(rows), strict=True):
                        by_shape.setdefault(matrix.shape, []).append((matrix, part))
            for shape, matrices in by_shape.items():
                scale = 0.2 * max(shape) ** 0.5
                updates = orthogonalised(torch.stack([part for _, part in matrices]), self.dtype)
                for (matrix, _), update in zip(matrices, updates, strict=True):
                    matrix.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * scale)


def phase_at(phases: list[list[int]], step: int) -> tuple[int, int]:
    """``(batch, sequence length)`` of ``step`` under ``[steps, batch, sequence length]`` phases."""
    for steps, batch, length in phases:
        if step < steps:
            return batch, length
        step -= steps
    raise IndexError(step)


def rate_at(config: TrainConfig, step: int) -> float:
    """The learning rate of ``step``, in units of the peak: ``train.schedule`` after a linear warm-up, restarted at each of
    ``train.restarts`` (SGDR, Loshchilov & Hutter 2017).
    """
    for length in config.periods():
        if step < length:
            break
        step -= length
    warmup, whole = config.warm_up_of(length), config.cool_down_of(length)
    cooldown = min(whole, length - warmup)
    rest = length - warmup - cooldown
    if step < warmup:
        # A decay that is not whole begins lower, and the warm-up ends there.
        return (cooldown / whole if cooldown and not rest else 1.0) * (step + 1) / warmup
    if step < warmup + rest:
        if config.schedule != "cosine":
            return 1.0
        return LOWEST + (1 - LOWEST) * (1 + math.cos(math.pi * (step - warmup) / max(1, rest - 1))) / 2
    first, last = cooldown / whole, max(LOWEST, 1 / whole)
    return first + (last - first) * (step - warmup - rest) / max(1, cooldown - 1)


def same_until(step: int, config: TrainConfig, stored: Mapping[str, Any]) -> bool:
    """Whether the steps before ``step`` have the rates and batches of a schedule with these values of :data:`SCHEDULE`."""
    other = replace(config, steps=None, tokens=None, **{key: stored[key] for key in SCHEDULE})
    ours, theirs = config.schedule_phases, other.schedule_phases
    if step > min(config.total_steps, other.total_steps):
        return False
    return all(rate_at(config, at) == rate_at(other, at) and phase_at(ours, at) == phase_at(theirs, at) for at in range(step))


class Optimizers:
    """Muon for the hidden matrices, AdamW for everything else, both with ``train.schedule`` and each with its own peak.

    Muon orthogonalises the update of each weight matrix (Jordan et al. 2024); on models this small it needs about half the
    tokens of AdamW for the same loss. AdamW updates embeddings, heads and norms, which are not hidden matrices, and parameters whose name
    contains one of ``adamw_names``.
    """

    def __init__(self, module: torch.nn.Module, config: TrainConfig, adamw_names: tuple[str, ...]) -> None:
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        matrices = [p for name, p in named if p.ndim == 2 and not any(key in name for key in adamw_names)]
        rest = [p for name, p in named if p.ndim != 2 or any(key in name for key in adamw_names)]
        adamw_lr = config.lr if config.adamw_lr is None else config.adamw_lr
        # Projections that are fused into one parameter are matrices of their own.
        layers = [part for part in module.modules() if isinstance(part, Linear)]
        parts = {layer.weight: layer.parts for layer in layers if isinstance(layer.weight, torch.nn.Parameter)}
        self.optimizers: list[torch.optim.Optimizer] = [
            Muon(matrices, lr=config.lr, dtype=getattr(torch, config.dtype), parts=parts),
            torch.optim.AdamW(rest, lr=adamw_lr, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.peaks = [config.lr, adamw_lr]
        self.parameters = [p for _, p in named]
        self.config, self.steps = config, 0
        self._set_rates()

    def _set_rates(self) -> None:
        # After the last step there is no rate.
        share = rate_at(self.config, min(self.steps, self.config.total_steps - 1))
        for optimizer, peak in zip(self.optimizers, self.peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * share

    @property
    def rates(self) -> list[float]:
        """Learning rates of the next step: Muon's, AdamW's."""
        return [float(optimizer.param_groups[0]["lr"]) for optimizer in self.optimizers]

    def step(self) -> None:
        """Clip the gradients to ``train.clip`` (global L2 norm), update, clear them, and advance the schedule."""
        torch.nn.utils.clip_grad_norm_(self.parameters, self.config.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        self._set_rates()

    def state_dict(self) -> dict[str, Any]:
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers], "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for optimizer, stored in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(stored)
        self.steps = state["steps"]
        self._set_rates()
