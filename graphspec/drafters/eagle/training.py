"""EAGLE-1/2 head in training: one Llama layer over ``fc([embedding; feature])`` (Li et al. 2024, arXiv 2401.15077 and 2406.16858)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...facts.model import ModelFacts
from ...train.drafter import Drafter, NetworkConfig, begin_stream, named_tensors, shared_with
from ...train.facts import plain_facts, sized, target_facts, width_of
from .facts import assumed_facts
from .loading import EAGLE_LAYOUT
from .network import EagleDraft


@dataclass
class EagleConfig(NetworkConfig):
    """Width, heads and norms are the target's."""

    intermediate_size: int | None = None
    """Width of the MLP; null: the target's."""
    bias: bool = False
    """A bias in ``fc``."""


class EagleDrafter(Drafter):
    """Its output predicts the target's feature at the next position: it is fed back, and the target's head reads it."""

    Settings: ClassVar[type[NetworkConfig]] = EagleConfig
    about: ClassVar[str] = "EAGLE-1/2: one Llama layer without an input norm over `fc([embedding; feature])`"
    feeds_feature = True
    network: EagleDraft

    @classmethod
    def of(cls, target: PreTrainedModel, config: Any) -> EagleDrafter:
        facts, _ = assumed_facts(Path(), target_facts(target))
        decoder = sized(facts.decoder, config.intermediate_size)
        network = EagleDraft(replace(facts, decoder=decoder, fc_bias=config.bias), **shared_with(target))
        embedding = network.embed_tokens.weight
        assert isinstance(embedding, Tensor), "a target in full precision, as checked before"
        # Embeddings are often ten times smaller than features.
        scale = 1.0 / float(embedding.float().square().mean().sqrt().clamp(min=1e-6))
        begin_stream(network.fc, torch.tensor([scale, 1.0]).repeat_interleave(decoder.hidden_size))
        return cls(network)

    @classmethod
    def settings_of(cls, facts: Any, target: ModelFacts) -> dict[str, Any]:
        return {"intermediate_size": width_of(facts.decoder, target), "bias": bool(facts.fc_bias)}

    def published(self, target: PreTrainedModel) -> tuple[dict[str, object], dict[str, Tensor]]:
        bias = self.network.fc.bias is not None
        config = plain_facts(target, "LlamaForCausalLMEagle", self.network.facts.decoder, bias=bias)
        return config, named_tensors(self.network, EAGLE_LAYOUT)
