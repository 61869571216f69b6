"""Optimizers and the schedule of their learning rates: torch's, except Muon."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from ..config.train_options import TrainConfig

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

    ``torch.optim.Muon`` always iterates in bfloat16, which a CPU without bfloat16 arithmetic emulates, many times slower than a step.
    The learning rate is scaled by ``0.2 * sqrt(max(rows, columns))`` so that one rate serves AdamW and Muon (Liu et al. 2025).
    """

    def __init__(
        self, params: list[torch.nn.Parameter], lr: float, dtype: torch.dtype, momentum: float = 0.95, weight_decay: float = 0.01
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.dtype = dtype

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in by_shape.items():
                updates = []
                for parameter in parameters:
                    assert parameter.grad is not None
                    velocity = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                    velocity.lerp_(parameter.grad, 1 - group["momentum"])
                    updates.append(parameter.grad.lerp(velocity, group["momentum"]))
                scale = 0.2 * max(shape) ** 0.5
                for parameter, update in zip(parameters, orthogonalised(torch.stack(updates), self.dtype), strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * scale)


def phase_at(phases: list[list[int]], step: int) -> tuple[int, int]:
    """``(batch, sequence length)`` of ``step`` under ``[steps, batch, sequence length]`` phases."""
    for steps, batch, length in phases:
        if step < steps:
            return batch, length
        step -= steps
    raise IndexError(step)


def make_schedule(optimizer: torch.optim.Optimizer, config: TrainConfig) -> LRScheduler:
    """The learning rate of every step: ``train.schedule`` after a linear warm-up, restarted at each of ``train.restarts``
    (SGDR, Loshchilov & Hutter 2017).
    """
    parts: list[LRScheduler] = []
    ends: list[int] = []

    def add(part: LRScheduler, steps: int) -> None:
        parts.append(part)
        ends.append((ends[-1] if ends else 0) + steps)

    peak = optimizer.param_groups[0]["lr"]
    for length in config.periods():
        warmup, whole = config.warm_up_of(length), config.cool_down_of(length)
        cooldown = min(whole, length - warmup)
        rest = length - warmup - cooldown
        # A decay that is not whole begins lower, and the warm-up ends there.
        top = cooldown / whole if cooldown and not rest else 1.0
        if warmup:
            # Its first step has 1 / warmup of the top, its last one the top.
            add(LinearLR(optimizer, top / warmup, top, max(1, warmup - 1)), warmup)
        if rest and config.schedule == "cosine":
            add(CosineAnnealingLR(optimizer, max(1, rest - 1), LOWEST * peak), rest)
        elif rest:
            add(ConstantLR(optimizer, 1.0, 0), rest)
        if cooldown:
            add(LinearLR(optimizer, cooldown / whole, max(LOWEST, 1 / whole), max(1, cooldown - 1)), cooldown)
    return SequentialLR(optimizer, parts, ends[:-1])


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
        self.optimizers: list[torch.optim.Optimizer] = [
            Muon(matrices, lr=config.lr, dtype=getattr(torch, config.dtype)),
            torch.optim.AdamW(rest, lr=adamw_lr, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.schedules = [make_schedule(optimizer, config) for optimizer in self.optimizers]
        self.parameters = [p for _, p in named]
        self.clip = config.clip

    @property
    def rates(self) -> list[float]:
        """Learning rates of the next step: Muon's, AdamW's."""
        return [float(optimizer.param_groups[0]["lr"]) for optimizer in self.optimizers]

    def step(self) -> None:
        """Clip the gradients to ``train.clip`` (global L2 norm), update, clear them, and advance the schedule."""
        torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "schedules": [schedule.state_dict() for schedule in self.schedules],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for optimizer, stored in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(stored)
        for schedule, stored in zip(self.schedules, state["schedules"], strict=True):
            schedule.load_state_dict(stored)
