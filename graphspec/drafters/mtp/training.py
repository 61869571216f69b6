"""Multi-token prediction heads in DeepSeek's NextN layout (DeepSeek-V3 technical report, arXiv 2412.19437, section 2.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...errors import ConfigError
from ...train.blocks import Attend, DecoderLayer, LayerShape, Rope
from ...train.drafter import NetworkConfig, StepDrafter
from ...train.facts import decoder_facts


@dataclass
class MtpConfig(NetworkConfig):
    """Width, heads, norms and biases are those of the target's own layers."""

    num_heads: int = 1
    """Heads, one per draft step; 1: the one head is applied to its own output over and over."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_heads < 1:
            raise ConfigError("train.network.num_heads", "at least 1", self.num_heads)

    @property
    def steps(self) -> tuple[str, int] | None:
        """Every head is one step."""
        return ("num_heads", self.num_heads) if self.num_heads > 1 else None


class MtpHead(DecoderLayer):
    """A decoder layer over ``eh_proj([enorm(embedding); hnorm(hidden)])``, and the norm after it."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__(shape)
        self.enorm = nn.RMSNorm(shape.hidden, shape.eps)
        self.hnorm = nn.RMSNorm(shape.hidden, shape.eps)
        self.eh_proj = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.shared_head = nn.ModuleDict({"norm": nn.RMSNorm(shape.hidden, shape.eps)})

    @property
    def norm(self) -> nn.RMSNorm:
        return cast("nn.RMSNorm", self.shared_head["norm"])


class MtpDraft(StepDrafter):
    """Head ``s`` consumes token ``i + s`` (from 1) at row ``i`` with the output of the step before, which is past the head's norm."""

    Settings: ClassVar[type[NetworkConfig]] = MtpConfig
    about: ClassVar[str] = "NextN: one decoder layer over `eh_proj([enorm(embedding); hnorm(feature)])`, {num_heads} head"
    feeds_feature = True
    embedding_VH: Tensor
    head_VH: Tensor

    def __init__(self, target: PreTrainedModel, config: MtpConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.most_steps = config.num_heads if config.num_heads > 1 else None
        self.heads = nn.ModuleList([MtpHead(LayerShape.of(target)) for _ in range(config.num_heads)])
        self.rope = Rope.of(target)
        self.register_buffer("embedding_VH", target.model.embed_tokens.weight.detach(), persistent=False)
        self.register_buffer("head_VH", target.lm_head.weight.detach(), persistent=False)

    def start_from(self, target: PreTrainedModel, counts_V: Tensor | None) -> None:
        for head in cast("list[MtpHead]", self.heads):
            head.norm.weight.copy_(target.model.norm.weight)

    def start(self, features_BTF: Tensor) -> Tensor:
        return features_BTF

    def step(self, index: int, tokens_BT: Tensor, hidden_BTH: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        head = cast("MtpHead", self.heads[index if self.num_heads > 1 else 0])
        x = head.eh_proj(torch.cat((head.enorm(self.embedding_VH[tokens_BT].float()), head.hnorm(hidden_BTH)), -1)).float()
        out: Tensor = head.norm(head(x, self.rope(positions_T), attend))
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden.to(self.head_VH.dtype), self.head_VH)

    def published(self, target: PreTrainedModel) -> tuple[dict[str, object], dict[str, Tensor]]:
        # MistralForCausalLM -> MistralForCausalLMNextN: the decoder keys are the target's and keep its meaning.
        facts: dict[str, object] = {"architectures": [f"{type(target).__name__}NextN"], **decoder_facts(target)}
        facts["num_nextn_predict_layers"] = self.num_heads
        layers = target.config.num_hidden_layers
        tensors: dict[str, Tensor] = {}
        for name, tensor in self.state_dict().items():
            _, index, rest = name.split(".", 2)
            tensors[f"model.layers.{layers + int(index)}.{rest}"] = tensor
        return facts, tensors
