"""P-EAGLE head (arXiv 2602.01469): EAGLE-3's layers, and a learned feature for the tokens that masks stand for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...config.checks import in_range
from ...train.blocks import DecoderLayer, LayerShape, attend_blocks, attend_rows
from ...train.drafter import NetworkConfig
from ...train.masks import MaskConfig, spread
from ..eagle3.training import Eagle3Config, Eagle3Draft


@dataclass
class PEagleConfig(Eagle3Config, MaskConfig):
    """The settings of an EAGLE-3 head, and those of masks."""

    num_hidden_layers: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range("train.network.num_hidden_layers", self.num_hidden_layers, 1)


class PEagleDraft(Eagle3Draft):
    """The embedding is the target's and not part of the checkpoint."""

    Settings: ClassVar[type[NetworkConfig]] = PEagleConfig
    about: ClassVar[str] = "P-EAGLE: {num_hidden_layers} layers of EAGLE-3 over masks, taps entering layers {tap_layers}"
    unmixed = ("lm_head", "mask_hidden")
    mask_id: Tensor

    def __init__(self, target: PreTrainedModel, config: PEagleConfig) -> None:
        super().__init__(target, config)
        self.config = config
        shape = LayerShape.of(target).plain(config.intermediate_size)
        self.further = nn.ModuleList([DecoderLayer(shape) for _ in range(config.num_hidden_layers - 1)])
        self.mask_hidden = nn.Parameter(torch.zeros(1, self.fc.in_features))
        self.register_buffer("mask_id", torch.zeros((), dtype=torch.int64))

    def start_from(self, target: PreTrainedModel, counts_V: Tensor | None) -> None:
        super().start_from(target, counts_V)
        nn.init.normal_(self.mask_hidden)
        self.mask_id.fill_(self.config.mask_of(target, counts_V))

    def anchors(self, rows: int, turn: int) -> Tensor:
        return spread(rows, self.config.anchors, turn)

    def drafts(self, features_BTF: Tensor, tokens_BT: Tensor, steps: int, row_A: Tensor) -> Iterator[Tensor]:
        """Row i drafts one token, and ``steps - 1`` masks after it one each; a mask sees the rows up to i and the masks before it."""
        device, rows, masks = tokens_BT.device, features_BTF.shape[1] - steps, steps - 1
        index_T = torch.arange(rows, device=device)
        causal_TT, visible_AT = index_T[:, None] >= index_T, index_T <= row_A[:, None]
        known_angles = self.rope(index_T)
        mask_angles = self.rope((row_A[:, None] + 1 + torch.arange(masks, device=device)).flatten())
        prefix: dict[int, tuple[Tensor, Tensor]] = {}

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            prefix[layer] = k, v
            return attend_rows(q, k, v, causal_TT)

        def attend_masks(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend_blocks(q, *prefix[layer], visible_AT, k, v, causal=True)

        further = cast("list[DecoderLayer]", self.further)
        known_BTH = self.midlayer(
            self.embedding_VH[tokens_BT[:, 1 : 1 + rows]].float(), self.start(features_BTF[:, :rows]), known_angles, attend
        )
        for number, layer in enumerate(further, 1):
            known_BTH = layer(known_BTH, known_angles, attend, number)
        yield known_BTH[:, row_A]
        if not masks:
            return
        shape = len(tokens_BT), len(row_A) * masks, -1
        token_H = self.embedding_VH[self.mask_id].float()
        mask_BUH = self.midlayer(token_H.expand(shape), self.fc(self.mask_hidden).float().expand(shape), mask_angles, attend_masks)
        for number, layer in enumerate(further, 1):
            mask_BUH = layer(mask_BUH, mask_angles, attend_masks, number)
        yield from mask_BUH.unflatten(1, (len(row_A), masks)).unbind(2)

    def published(self, target: PreTrainedModel) -> tuple[dict[str, object], dict[str, Tensor]]:
        facts, tensors = super().published(target)
        facts |= {
            "architectures": ["PEagleLlamaForCausalLM"],
            "num_hidden_layers": 1 + len(self.further),
            "mask_token_id": int(tensors.pop("mask_id")),
            "parallel_drafting": True,
        }
        named = {}
        for name, tensor in tensors.items():
            if name.startswith("further."):
                number, rest = name.removeprefix("further.").split(".", 1)
                name = f"layers.{int(number) + 1}.{rest}"
            named[name.replace("midlayer.", "layers.0.")] = tensor
        # Trained together with scaled features, published for unscaled ones.
        return facts, {**named, "mask_hidden": self.mask_hidden.detach() / self.scale_F}
