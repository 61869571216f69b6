"""Block drafter in training: that of DFlash (arXiv 2602.06036), with the causal block of JetSpec (arXiv 2606.18394) by default."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...config.checks import INT32_MAX, ascending, in_range
from ...facts.model import ModelFacts
from ...train.attention import SequenceAttention
from ...train.drafter import NetworkConfig, begin_stream, feature_scale, named_tensors, shared_with, stored_names
from ...train.facts import plain_facts, sized, tapped_layers, target_facts, width_of
from ...train.masks import MaskConfig, MaskDrafter
from .facts import LONGEST_BLOCK, assumed_facts, default_layers
from .network import DFlashDraft, dflash_layout

if TYPE_CHECKING:
    from ...models.layers import RMSNorm, SelfAttention


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
            ascending("train.network.tap_layers", self.tap_layers, 1, INT32_MAX)

    @property
    def steps(self) -> tuple[str, int] | None:
        """Every row drafts but the anchor's."""
        return "block_size - 1", self.block_size - 1


class ContextProjection(nn.Module):
    """Keys and values of the context, by the projections of the block's layers themselves; at inference, by a copy of them."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.projections = [cast("SelfAttention", layer.self_attn).qkv_proj for layer in layers]  # a list, so as not to own them

    def forward(self, hidden_BTH: Tensor, norm: RMSNorm) -> Tensor:
        """Keys, then values, of one layer after the other."""
        weight = torch.cat([part for own in self.projections for part in own.get_parameter("weight").split(own.parts)[1:]])
        return nn.functional.linear(norm(hidden_BTH), weight)


class DFlashDrafter(MaskDrafter):
    """Embedding and output head are the target's and not part of the checkpoint."""

    Settings: ClassVar[type[NetworkConfig]] = DFlashConfig
    about: ClassVar[str] = "Block drafter: {num_hidden_layers} layers over blocks of {block_size}, taps entering layers {tap_layers}"
    network: DFlashDraft

    @classmethod
    def of(cls, target: PreTrainedModel, config: Any) -> DFlashDrafter:
        layers, depth = config.num_hidden_layers, target.config.num_hidden_layers
        taps = tapped_layers(config.tap_layers, [i + 1 for i in default_layers(depth, layers)], depth)
        facts, _ = assumed_facts(Path(), target_facts(target))
        block = {"block_size": config.block_size, "max_steps": config.block_size - 1, "causal": (config.causal,) * layers}
        decoder = sized(facts.decoder, config.intermediate_size, layers)
        width = len(taps) * target.config.hidden_size
        network = DFlashDraft(replace(facts, decoder=decoder, tap_layers=taps, feature_size=width, **block), **shared_with(target))
        network.add_module("context_proj", ContextProjection(network.layers))
        begin_stream(network.fc, torch.ones(width))
        return cls(network)

    @classmethod
    def settings_of(cls, facts: Any, target: ModelFacts) -> dict[str, Any]:
        settings = {name: getattr(facts, name) for name in ("block_size", "mask_token_id")}
        settings |= {"tap_layers": list(facts.tap_layers), "causal": all(facts.causal)}
        return settings | {"num_hidden_layers": facts.decoder.num_layers, "intermediate_size": width_of(facts.decoder, target)}

    def start_from(self, target: PreTrainedModel, counts_V: Tensor | None) -> None:
        self.network.fc.get_buffer("input_scale").copy_(feature_scale(target, self.tap_layers))
        self.network.norm.weight.copy_(target.model.norm.weight)
        self.start_mask(target, counts_V)

    def adopt(self, published: nn.Module) -> set[str]:
        """At inference the projection of the context is a copy of weights that the layers have."""
        return super().adopt(published) | {f"context_proj.{name}" for name in stored_names(published.get_submodule("context_proj"))}

    def drafts(self, features_BTF: Tensor, tokens_BT: Tensor, steps: int, row_A: Tensor) -> Iterator[Tensor]:
        """Row i begins a block at token i + 1, over the features up to position i; mask s of the block drafts the token s places on."""
        network, rows = self.network, features_BTF.shape[1] - steps
        index_T = torch.arange(rows, device=tokens_BT.device)
        context = SequenceAttention(index_T, index_T[:, None] >= index_T)
        network.write_kv(tokens_BT, network.fuse(features_BTF[:, :rows]), context)
        own_W = torch.arange(steps + 1, device=tokens_BT.device)
        token_BAW = torch.where(own_W == 0, tokens_BT[:, row_A + 1][..., None], self.mask_id)
        position_U = (row_A[:, None] + 1 + own_W).flatten()
        attention = SequenceAttention(position_U, index_T <= row_A[:, None], context.prefix, causal=all(network.facts.causal))
        block_BUH = network(token_BAW.flatten(1), None, attention)
        yield from block_BUH.unflatten(1, (len(row_A), steps + 1))[:, :, 1:].unbind(2)

    def published(self, target: PreTrainedModel) -> tuple[dict[str, object], dict[str, Tensor]]:
        """``target_layer_ids`` counts layers by their *output*, one less than the layer whose input is tapped."""
        facts = self.network.facts
        own = {"mask_token_id": int(self.mask_id), "target_layer_ids": [layer - 1 for layer in facts.tap_layers]}
        own |= {"block_size": facts.block_size, "causal_head": all(facts.causal)}
        depth = target.config.num_hidden_layers
        config = plain_facts(target, "DFlashDraftModel", facts.decoder, num_target_layers=depth, dflash_config=own)
        return config, named_tensors(self.network, dflash_layout(facts.decoder.num_layers))
