"""Quantisation-aware training: the network computes with rounded weights, and its updates go to exact ones.

Gradients pass through the rounding as if it were not there (the straight-through estimator: Bengio et al. 2013, arXiv 1308.3432; of
weights, Courbariaux et al. 2015, arXiv 1511.00363), so the exact weights move until other codes are nearer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..config.train_options import QatConfig
from ..kernels.linear.packed import dequantise
from ..models.layers import Linear
from ..weights.rounded_layers import chosen_layers, group_size
from ..weights.rounding import MINMAX, MSE, ROUNDED, Rounded, round_to

KEY = "train.qat"
STEPS = (6, 7, 8, 9, 10, 12)
"""Steps of 4-bit codes that the largest magnitude of a group may be, where scales are chosen by the squared error in each step of a
training: six in place of the 37 of :data:`graphspec.weights.rounding.SHARES`."""
SHARES = tuple(7.5 / steps for steps in STEPS)
ROWS = 128
"""Rows rounded at once, so that what is computed of them stays in the cache."""


@dataclass(frozen=True, slots=True)
class _Weight:
    """A parameter that is rounded, as it is published: times the scale of its inputs, which is no part of the checkpoint."""

    parameter: nn.Parameter
    input_scale: Tensor | None
    group: int


class RoundedWeights:
    """The weights of a network that are rounded.

    Args:
        network: in training.
        config: ``train.qat`` with a format.

    Raises:
        ConfigError: names of no linear layers, a group that doesn't divide a layer, or a group of a format that fixes it.
    """

    def __init__(self, network: nn.Module, config: QatConfig) -> None:
        assert config.format is not None, "a format"
        self.row: Rounded = ROUNDED[config.format]
        owners = Counter(parameter for _, parameter in network.named_parameters(remove_duplicate=False))
        # A head that is the embedding is no layer with a weight of its own.
        named = {
            name: module
            for name, module in network.named_modules()
            if isinstance(module, Linear) and owners[module.get_parameter("weight")] == 1
        }
        chosen = chosen_layers(f"{KEY}.modules", config.modules, {name: name.rpartition(".")[2] for name in named})
        weights = {name: module.get_parameter("weight") for name, module in named.items() if name in chosen}
        channels = {name: weight.shape[1] for name, weight in weights.items()}
        group = group_size(f"{KEY}.group", self.row, config.group, channels)
        self.weights = [
            _Weight(weight, getattr(named[name], "input_scale", None), group or channels[name]) for name, weight in weights.items()
        ]

    @torch.no_grad()
    def apply(self) -> None:
        """Replace the weights by the rounded ones."""
        for weight in self.weights:
            weight.parameter.copy_(self._rounded(weight))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which the weights are the rounded ones; gradients that are made in it are those of the exact ones."""
        exact = [weight.parameter.detach().clone() for weight in self.weights]
        self.apply()
        try:
            yield
        finally:
            with torch.no_grad():
                for weight, values in zip(self.weights, exact, strict=True):
                    weight.parameter.copy_(values)

    def _rounded(self, weight: _Weight) -> Tensor:
        """The weight rounded as it will be published: in bfloat16, times the scale of its inputs."""
        exact, scale = weight.parameter, 1.0 if weight.input_scale is None else weight.input_scale
        stored = (exact * scale).bfloat16()
        shares = SHARES if self.row.code == "int4" else ()
        parts = [
            dequantise(round_to(rows, self.row, weight.group, MSE if shares else MINMAX, shares), torch.float32)
            for rows in stored.split(ROWS)
        ]
        return torch.cat(parts) / scale
