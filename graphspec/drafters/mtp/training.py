"""Multi-token-prediction heads in DeepSeek's NextN layout (DeepSeek-V3, arXiv 2412.19437, section 2.2); for a hybrid target, the one head
of Qwen3.5 in Qwen's layout.
"""

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
from ...train.hybrid import is_hybrid


@dataclass
class MtpConfig(NetworkConfig):
    """Width, heads, norms and biases are those of the target's own layers."""

    num_heads: int = 1
    """Heads, one per draft step; 1: a single head, applied to its own output again in every step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_heads < 1:
            raise ConfigError("train.network.num_heads", "at least 1", self.num_heads)

    @property
    def steps(self) -> tuple[str, int] | None:
        """One step per head."""
        return ("num_heads", self.num_heads) if self.num_heads > 1 else None


_QWEN_NAMES = {
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "eh_proj": "mtp.fc",
    "shared_head.norm": "mtp.norm",
}
"""Parts of a head outside its layer, as Qwen3-Next and Qwen3.5 name them."""


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
    """Head ``s`` (from 1) reads, at row ``i``, token ``i + s`` and the output of the step before, after that head's norm."""

    Settings: ClassVar[type[NetworkConfig]] = MtpConfig
    about: ClassVar[str] = "NextN: one decoder layer over `eh_proj([enorm(embedding); hnorm(feature)])`, {num_heads} head"
    feeds_feature = True
    reads_hybrids = True

    def __init__(self, target: PreTrainedModel, config: MtpConfig) -> None:
        super().__init__()
        if config.num_heads > 1 and is_hybrid(target.config):
            raise ConfigError("train.network.num_heads", "1, as a hybrid target's checkpoint has", config.num_heads)
        self.num_heads = config.num_heads
        self.most_steps = config.num_heads if config.num_heads > 1 else None
        self.heads = nn.ModuleList([MtpHead(LayerShape.of(target)) for _ in range(config.num_heads)])
        self.rope = Rope.of(target)
        self.share(target)

    def start_from(self, target: PreTrainedModel, counts_V: Tensor | None) -> None:
        offset = 1.0 if is_hybrid(target.config) else 0.0
        for head in cast("list[MtpHead]", self.heads):
            head.norm.weight.copy_(target.model.norm.weight + offset)

    def step(self, index: int, tokens_BT: Tensor, hidden_BTH: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        head = cast("MtpHead", self.heads[index if self.num_heads > 1 else 0])
        x = head.eh_proj(torch.cat((head.enorm(self.embedding_VH[tokens_BT].float()), head.hnorm(hidden_BTH)), -1)).float()
        out: Tensor = head.norm(head(x, self.rope(positions_T), attend))
        return out

    def published(self, target: PreTrainedModel) -> tuple[dict[str, object], dict[str, Tensor]]:
        if is_hybrid(target.config):
            return self._published_as_qwen(target)
        # MistralForCausalLM -> MistralForCausalLMNextN: the decoder keys mean the same as in the target's config.
        facts: dict[str, object] = {"architectures": [f"{type(target).__name__}NextN"], **decoder_facts(target)}
        facts["num_nextn_predict_layers"] = self.num_heads
        layers = target.config.num_hidden_layers
        tensors: dict[str, Tensor] = {}
        for name, tensor in self.state_dict().items():
            _, index, rest = name.split(".", 2)
            tensors[f"model.layers.{layers + int(index)}.{rest}"] = tensor
        return facts, tensors

    def _published_as_qwen(self, target: PreTrainedModel) -> tuple[dict[str, object], dict[str, Tensor]]:
        facts: dict[str, object] = {"architectures": [type(target).__name__], **decoder_facts(target), "mtp_num_hidden_layers": 1}
        tensors: dict[str, Tensor] = {}
        for name, tensor in self.state_dict().items():
            part, kind = name.removeprefix("heads.0.").rsplit(".", 1)
            # These models store the weight of a norm minus 1.
            stored = tensor - 1 if "norm" in part else tensor
            tensors[f"{_QWEN_NAMES.get(part, f'mtp.layers.0.{part}')}.{kind}"] = stored
        return facts, tensors
