"""Block drafter of DFlash (arXiv 2602.06036), with the causal block of JetSpec (arXiv 2606.18394) by default."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...config.checks import INT32_MOST, ascending, in_range
from ...errors import ConfigError
from ...train.blocks import DecoderLayer, LayerShape, Rope, attend_blocks
from ...train.drafter import Drafter, NetworkConfig, feature_scale
from ...train.facts import decoder_facts
from ...train.masks import MaskConfig, spread
from .facts import LONGEST_BLOCK, default_layers


@dataclass
class DFlashConfig(MaskConfig):
    """Width and heads are the target's; queries and keys have norms."""

    num_hidden_layers: int = 5
    intermediate_size: int | None = None
    """Width of the MLPs; null: the target's."""
    tap_layers: list[int] | None = None
    """The context is made of the target's residual streams *entering* these layers; null: one per layer of the draft, evenly spaced."""
    block_size: int = 8
    """Rows of a block, the anchor included: it drafts one token fewer."""
    causal: bool = True
    """A row of the block sees only those before it (JetSpec), which suits trees of its marginals; false: all of them (DFlash)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range("train.network.num_hidden_layers", self.num_hidden_layers, 1)
        in_range("train.network.block_size", self.block_size, 2, LONGEST_BLOCK)
        if self.tap_layers is not None:
            ascending("train.network.tap_layers", self.tap_layers, 1, INT32_MOST)

    @property
    def steps(self) -> tuple[str, int] | None:
        """Every row drafts but the anchor's."""
        return "block_size - 1", self.block_size - 1


class DFlashDraft(Drafter):
    """Embedding and output head are the target's and not part of the checkpoint."""

    Settings: ClassVar[type[NetworkConfig]] = DFlashConfig
    about: ClassVar[str] = "Block drafter: {num_hidden_layers} layers over blocks of {block_size}, taps entering layers {tap_layers}"
    scale_F: Tensor
    mask_id: Tensor

    def __init__(self, target: PreTrainedModel, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        self.most_steps = config.block_size - 1
        depth = target.config.num_hidden_layers
        taps = config.tap_layers or [i + 1 for i in default_layers(depth, config.num_hidden_layers)]
        if not (all(1 <= layer < depth for layer in taps) and taps == sorted(set(taps))):
            raise ConfigError("train.network.tap_layers", f"named, ascending layers in 1..{depth - 1}", taps)
        self.tap_layers = tuple(taps)
        shape = LayerShape.of(target).plain(config.intermediate_size, qk_norm=True)
        # As for EAGLE-3: fc is trained on features scaled to a size near 1 and published for unscaled ones.
        self.register_buffer("scale_F", feature_scale(target, self.tap_layers), persistent=False)
        self.fc = nn.Linear(len(taps) * shape.hidden, shape.hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.layers = nn.ModuleList([DecoderLayer(shape) for _ in range(config.num_hidden_layers)])
        self.norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.rope = Rope.of(target)
        self.register_buffer("mask_id", torch.zeros((), dtype=torch.int64))
        self.share(target)

    def start_from(self, target: PreTrainedModel, counts_V: Tensor | None) -> None:
        self.norm.weight.copy_(target.model.norm.weight)
        self.mask_id.fill_(self.config.mask_of(target, counts_V))

    def anchors(self, rows: int, turn: int) -> Tensor:
        return spread(rows, self.config.anchors, turn)

    def drafts(self, features_BTF: Tensor, tokens_BT: Tensor, steps: int, row_A: Tensor) -> Iterator[Tensor]:
        """Row i begins a block at token i + 1, over the features up to position i; mask s of the block drafts the token s places on."""
        device, rows = tokens_BT.device, features_BTF.shape[1] - steps
        context_BTH = self.hidden_norm(self.fc(features_BTF[:, :rows] * self.scale_F).float())
        index_T = torch.arange(rows, device=device)
        own_W = torch.arange(steps + 1, device=device)
        token_BAW = torch.where(own_W == 0, tokens_BT[:, row_A + 1][..., None], self.mask_id)
        prefix_angles, angles = self.rope(index_T), self.rope((row_A[:, None] + 1 + own_W).flatten())
        visible_AT = index_T <= row_A[:, None]

        x_BUH = self.embedding_VH[token_BAW.flatten(1)].float()
        for layer in cast("list[DecoderLayer]", self.layers):
            attention = layer.self_attn
            key, value = attention.keys_and_values(context_BTH, *prefix_angles)

            def attend(_: int, q: Tensor, k: Tensor, v: Tensor, key: Tensor = key, value: Tensor = value) -> Tensor:
                return attend_blocks(q, key, value, visible_AT, k, v, causal=self.config.causal)

            x_BUH = layer(x_BUH, angles, attend)
        yield from x_BUH.unflatten(1, (len(row_A), steps + 1))[:, :, 1:].unbind(2)

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(self.norm(hidden))

    def published(self, target: PreTrainedModel) -> tuple[dict[str, object], dict[str, Tensor]]:
        """``target_layer_ids`` counts layers by their *output*, one less than the layer whose input is tapped."""
        facts: dict[str, object] = {"architectures": ["DFlashDraftModel"], **decoder_facts(target), "model_type": "qwen3"}
        own = {"mask_token_id": int(self.mask_id), "target_layer_ids": [layer - 1 for layer in self.tap_layers]}
        facts.update(
            intermediate_size=cast("DecoderLayer", self.layers[0]).mlp.gate_proj.out_features,
            num_hidden_layers=len(self.layers),
            num_target_layers=target.config.num_hidden_layers,
            attention_bias=False,
            mlp_bias=False,
            tie_word_embeddings=False,
            dflash_config={**own, "block_size": self.config.block_size, "causal_head": self.config.causal},
        )
        tensors = {name: tensor for name, tensor in self.state_dict().items() if name != "mask_id"}
        return facts, {**tensors, "fc.weight": self.fc.weight.detach() * self.scale_F}
