"""P-EAGLE head in training (arXiv 2602.01469): EAGLE-3's layers, and a learned feature for the tokens that masks stand for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...config.checks import in_range
from ...facts.model import ModelFacts
from ...train.attention import SequenceAttention
from ...train.drafter import NetworkConfig
from ...train.facts import target_facts
from ...train.masks import MaskConfig, MaskDrafter
from ..heads.eagle3_training import Eagle3Config, Eagle3Drafter, network_over_taps
from .facts import PEagleFacts, assumed_facts
from .network import P_EAGLE_LAYOUT, PEagleDraft

if TYPE_CHECKING:
    from ...models.layers import Linear


@dataclass
class PEagleConfig(Eagle3Config, MaskConfig):
    """The settings of an EAGLE-3 head, and those of masks."""

    num_hidden_layers: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range("train.network.num_hidden_layers", self.num_hidden_layers, 1)


class PEagleDrafter(MaskDrafter, Eagle3Drafter):
    """The embedding is the target's and not part of the checkpoint."""

    Settings: ClassVar[type[NetworkConfig]] = PEagleConfig
    about: ClassVar[str] = "P-EAGLE: {num_hidden_layers} layers of EAGLE-3 over masks, taps entering layers {tap_layers}"
    unmixed = ("lm_head", "mask_hidden")
    starts_from = ("eagle3",)
    layout = P_EAGLE_LAYOUT
    written = "speculators"
    network: PEagleDraft
    config: PEagleConfig

    @classmethod
    def of(cls, target: PreTrainedModel, config: Any) -> PEagleDrafter:
        facts, _ = assumed_facts(Path(), target_facts(target))
        return cls(network_over_taps(PEagleDraft, facts, target, config, config.num_hidden_layers))

    @classmethod
    def settings_of(cls, facts: Any, target: ModelFacts) -> dict[str, Any]:
        """An EAGLE-3 head has no masks, and as its first layers it may be a part of a deeper network."""
        settings = super().settings_of(facts, target)
        if not isinstance(facts, PEagleFacts):
            return settings
        return settings | {"num_hidden_layers": facts.decoder.num_layers, "mask_token_id": facts.mask_token_id}

    @property
    def scale_F(self) -> Tensor:
        """Factor of each feature before ``fc``."""
        return cast("Linear", self.network.fc).get_buffer("input_scale")

    def start_from(self, target: PreTrainedModel, counts_V: Tensor | None) -> None:
        super().start_from(target, counts_V)
        nn.init.normal_(self.network.mask_hidden)
        self.start_mask(target, counts_V)

    def adopt(self, published: nn.Module) -> set[str]:
        taken = super().adopt(published)
        if "mask_hidden" in taken:
            self.network.mask_hidden.mul_(self.scale_F)
        return taken

    def drafts(self, features_BTF: Tensor, tokens_BT: Tensor, steps: int, row_A: Tensor) -> Iterator[Tensor]:
        """Row i drafts one token, and ``steps - 1`` masks after it one each; a mask sees the rows up to i and the masks before it."""
        network, rows, masks = self.network, features_BTF.shape[1] - steps, steps - 1
        index_T = torch.arange(rows, device=tokens_BT.device)
        known = SequenceAttention(index_T, index_T[:, None] >= index_T)
        yield network(tokens_BT[:, 1 : 1 + rows], network.fuse(features_BTF[:, :rows]), known)[:, row_A]
        if not masks:
            return
        position_U = (row_A[:, None] + 1 + torch.arange(masks, device=tokens_BT.device)).flatten()
        attention = SequenceAttention(position_U, index_T <= row_A[:, None], known.prefix)
        shape = len(tokens_BT), len(position_U)
        # Trained together with scaled features.
        feature_1F = network.mask_hidden / self.scale_F
        hidden_BUH = network(self.mask_id.expand(shape), network.fuse(feature_1F).expand(*shape, -1), attention)
        yield from hidden_BUH.unflatten(1, (len(row_A), masks)).unbind(2)

    def published(self, target: PreTrainedModel) -> tuple[dict[str, object], dict[str, Tensor]]:
        config, tensors = super().published(target)
        config |= {"architectures": ["PEagleLlamaForCausalLM"], "mask_token_id": int(self.mask_id), "parallel_drafting": True}
        return config, tensors | {"mask_hidden": self.network.mask_hidden.detach() / self.scale_F}
