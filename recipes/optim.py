"""Optimizer and schedule shared by the recipes."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def orthogonalised(update: torch.Tensor, iterations: int = 5) -> torch.Tensor:
    """Each ``[.., rows, columns]`` update made nearly orthogonal by the quintic Newton-Schulz iteration of Jordan et al. (2024)."""
    x: torch.Tensor = update.mT if update.shape[-2] > update.shape[-1] else update
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if update.shape[-2] > update.shape[-1] else x


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised, in float32 and batched over matrices of one shape.

    ``torch.optim.Muon`` iterates in bfloat16, which a CPU without bfloat16 arithmetic emulates: many times slower than the training step.
    The learning rate is scaled by ``0.2 * sqrt(max(rows, columns))`` so that one rate serves AdamW and Muon (Liu et al. 2025).
    """

    def __init__(self, params: list[torch.nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

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
                for parameter, update in zip(parameters, orthogonalised(torch.stack(updates)), strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * scale)


def phase_at(phases: list[list[int]], step: int) -> tuple[int, int]:
    """``(batch, sequence length)`` of ``step`` under ``[steps, batch, sequence length]`` phases; past the end: the last phase's."""
    for steps, batch, length in phases:
        if step < steps:
            return batch, length
        step -= steps
    return phases[-1][1], phases[-1][2]


class Optimizers:
    """Muon for the hidden matrices, AdamW for everything else, under one warmup-stable-cooldown schedule.

    Muon orthogonalises the update of each weight matrix (Jordan et al. 2024); on models this small it needs about half the
    tokens of AdamW for the same loss. Embeddings, heads and norms are not hidden matrices and stay with AdamW, at a peak of their own:
    ``adamw_lr``, None: ``lr``. Parameters whose name holds one of ``adamw_names`` count among them. ``restarts`` are steps at which the
    schedule begins anew (SGDR, Loshchilov & Hutter 2017).
    """

    def __init__(
        self,
        module: torch.nn.Module,
        lr: float,
        steps: int,
        warmup: int,
        cooldown: int,
        adamw_names: tuple[str, ...],
        adamw_lr: float | None = None,
        restarts: Sequence[int] = (),
    ) -> None:
        self.warmup, self.cooldown = warmup, cooldown
        self.ends = (*sorted(restarts), steps)
        self.peaks = (lr, lr if adamw_lr is None else adamw_lr)
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        matrices = [p for name, p in named if p.ndim == 2 and not any(key in name for key in adamw_names)]
        rest = [p for name, p in named if p.ndim != 2 or any(key in name for key in adamw_names)]
        self.optimizers: list[torch.optim.Optimizer] = [
            Muon(matrices, lr=lr),
            torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.parameters = [p for _, p in named]

    def factor(self, step: int) -> float:
        """Share of the peak learning rate at ``step``: linear warm-up, flat, linear cool-down to 2 %, and again from each restart on."""
        begin = max((end for end in self.ends if end <= step), default=0)
        left = next((end for end in self.ends if end > step), step + 1) - step
        rise = (step - begin + 1) / self.warmup if step - begin < self.warmup else 1.0
        fall = max(0.02, left / self.cooldown) if left < self.cooldown else 1.0
        return min(rise, fall)

    def step(self, step: int, clip: float) -> float:
        """Clip the gradients to ``clip`` (global L2 norm), update, clear; returns the norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, clip)
        for optimizer, peak in zip(self.optimizers, self.peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * self.factor(step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def state_dict(self) -> list[dict[str, object]]:
        return [optimizer.state_dict() for optimizer in self.optimizers]

    def load_state_dict(self, states: list[dict[str, object]]) -> None:
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
