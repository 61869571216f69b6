"""EAGLE-1/2 head: one Llama layer over ``fc([embedding; feature])`` (Li et al. 2024, arXiv 2401.15077 and 2406.16858)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...train.blocks import Attend, DecoderLayer, LayerShape, Rope
from ...train.drafter import NetworkConfig, StepDrafter
from ...train.facts import decoder_facts


@dataclass
class EagleConfig(NetworkConfig):
    """Width, heads and norms are the target's."""

    intermediate_size: int | None = None
    """Width of the MLP; null: the target's."""
    bias: bool = False
    """A bias in ``fc``."""


class EagleDraft(StepDrafter):
    """Its output predicts the target's feature at the next position: it is fed back, and the target's head reads it."""

    Settings: ClassVar[type[NetworkConfig]] = EagleConfig
    about: ClassVar[str] = "EAGLE-1/2: one Llama layer without an input norm over `fc([embedding; feature])`"
    feeds_feature = True

    def __init__(self, target: PreTrainedModel, config: EagleConfig) -> None:
        super().__init__()
        shape = LayerShape.of(target).plain(config.intermediate_size)
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=config.bias)
        # The layer has no norm before its attention: it reads the output of fc.
        self.layers = nn.ModuleList([DecoderLayer(shape, input_norm=False)])
        self.rope = Rope.of(target)
        self.share(target)
        # fc is trained on embeddings scaled to a root mean square of 1 and published for unscaled ones: embeddings are often ten times
        # smaller than features, and a matrix whose halves must differ that much in size learns slowly.
        self.embedding_scale = 1.0 / float(self.embedding_VH.float().square().mean().sqrt().clamp(min=1e-6))

    def step(self, index: int, tokens_BT: Tensor, hidden_BTH: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        x = self.fc(torch.cat((self.embedding_VH[tokens_BT].float() * self.embedding_scale, hidden_BTH), -1)).float()
        out: Tensor = self.layers[0](x, self.rope(positions_T), attend)
        return out

    def published(self, target: PreTrainedModel) -> tuple[dict[str, object], dict[str, Tensor]]:
        facts: dict[str, object] = {"architectures": ["LlamaForCausalLMEagle"], **decoder_facts(target), "model_type": "llama"}
        facts.update(
            intermediate_size=cast("DecoderLayer", self.layers[0]).mlp.gate_proj.out_features,
            num_hidden_layers=1,
            attention_bias=False,
            mlp_bias=False,
            bias=self.fc.bias is not None,
            tie_word_embeddings=False,
        )
        tensors = dict(self.state_dict())
        embedding, hidden = self.fc.weight.detach().chunk(2, -1)
        tensors["fc.weight"] = torch.cat((embedding * self.embedding_scale, hidden), -1)
        return facts, tensors
