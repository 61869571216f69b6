"""Losses of every network in training, before the first step and after five, on weights that depend on names alone.

The figures were computed once, by layers written for training: the networks of inference, which are trained now, have to give the same.
"""

from __future__ import annotations

import zlib

import pytest
import torch

from graphspec.config.train_options import TrainConfig
from graphspec.train.draft import draft_losses
from graphspec.train.drafter import Drafter, Target
from graphspec.train.optim import Optimizers
from tests.support.drafts import HYBRID, build, random_text, tiny_target

ROUNDING = 1e-5
"""Float32 sums in another order, through six passes and five steps: the figures have seven digits."""
CASES = [
    ("eagle", "mistral", {}, [6.844141, 6.596905, 6.539237, 6.641811], [6.259505, 5.798948, 5.651813, 5.721865]),
    ("eagle3", "llama", {}, [4.015635, 3.99305, 4.011716, 4.046714], [3.339077, 3.283037, 3.367067, 3.389185]),
    ("mtp", "llama", {}, [6.811269, 6.842232, 6.628661, 6.449539], [6.12936, 5.837716, 5.596186, 5.534345]),
    ("mtp", "qwen2", {}, [6.248969, 6.119142, 6.116176, 6.114738], [5.449746, 5.115396, 5.049252, 4.99843]),
    ("mtp", "qwen3", {}, [6.670874, 6.944793, 6.790951, 6.566437], [5.844847, 5.778749, 5.559116, 5.282833]),
    ("mtp", HYBRID, {}, [6.396976, 6.683583, 7.025194, 6.924754], [5.672499, 5.567727, 5.672472, 5.646309]),
    ("mtp", "llama", {"num_heads": 4}, [6.811269, 6.476413, 6.458048, 6.732042], [5.97618, 5.495144, 5.382586, 5.511879]),
    ("standalone", "qwen3", {}, [4.648727, 4.65101, 4.631972, 4.628375], [4.25362, 4.235837, 4.228577, 4.205879]),
    ("p_eagle", "llama", {}, [3.985116, 3.881341, 3.909147, 3.939731], [3.321588, 3.218686, 3.27023, 3.322073]),
    ("p_eagle", "llama", {"anchors": 3}, [3.941669, 3.748387, 4.008332, 3.979099], [3.069959, 3.420004, 3.257617, 3.122607]),
    ("dflash", "qwen2", {}, [9.521416, 9.277515, 9.029293, 8.950993], [6.144266, 6.171312, 6.215197, 6.287134]),
    ("dflash", "llama", {"causal": False}, [7.229998, 7.259623, 7.244625, 7.213252], [5.165562, 5.163238, 5.181942, 5.195018]),
]


def value(name: str, shape: torch.Size) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.rand(shape, generator=generator) + 0.5 if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.1


@torch.no_grad()
def set_weights(drafter: Drafter, target) -> None:
    """Fill what is trained, by its published names. Tensors that are published as they are trained share its memory."""
    _, tensors = drafter.published(target)
    offset = 1.0 if target.config.model_type.startswith(HYBRID) else 0.0
    trained = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    network = drafter.network
    rescaled = {"fc.weight": getattr(network, "fc", None), "mask_hidden": network}
    for name, tensor in trained.items():
        if name in rescaled:
            tensor = rescaled[name].get_parameter(name.rpartition(".")[2])
        tensor.copy_(value(name, tensor.shape) - (offset if "norm" in name else 0.0))


@pytest.mark.parametrize(("variant", "family", "network", "before", "after"), CASES)
def test_losses_are_those_of_layers_written_for_training(variant, family, network, before, after):
    target, tokens = tiny_target(family), random_text(2, 16)
    drafter = build(variant, target, **network)
    set_weights(drafter, target)
    features, logits = Target(target).view(tokens, drafter.tap_layers)
    config = TrainConfig(lr=0.01, adamw_lr=0.01, steps=20, warmup=0, schedule="constant")
    optimizers, found = Optimizers(drafter, config, drafter.unmixed), []
    for step in range(6):
        weight = 0.5 if drafter.feeds_feature else 0.0
        losses, _ = draft_losses(drafter, features, logits, tokens, drafter.anchors(12, step), 4, weight)
        found.append(losses.tolist())
        losses.sum().backward()
        optimizers.step()
    assert found[0] == pytest.approx(before, rel=ROUNDING)
    assert found[5] == pytest.approx(after, rel=ROUNDING)
