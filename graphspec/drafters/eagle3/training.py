"""EAGLE-3 head: one layer over ``[embedding; hidden]``, three taps, a draft vocabulary (Li et al. 2025, arXiv 2503.01840)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...config.checks import INT32_MOST, ascending, in_range
from ...errors import ConfigError
from ...train.blocks import Attend, FeedForward, LayerShape, Rope, SelfAttention
from ...train.drafter import NetworkConfig, StepDrafter, default_taps, feature_scale
from ...train.facts import decoder_facts


@dataclass
class Eagle3Config(NetworkConfig):
    """Width, heads and norms are the target's."""

    draft_vocab_size: int = 32000
    """Number of the most frequent ids, which it can draft; from the target's vocabulary on: all ids, and no maps in the checkpoint."""
    intermediate_size: int | None = None
    """Width of the MLP; null: the target's."""
    tap_layers: list[int] | None = None
    """The head reads the target's residual streams *entering* these layers: low, middle, high. Null: ``2, L // 2, L - 3``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range("train.network.draft_vocab_size", self.draft_vocab_size, 1)
        if self.tap_layers is not None:
            # Readers of the checkpoint, this engine included, accept no other order.
            ascending("train.network.tap_layers", self.tap_layers, 1, INT32_MOST)


class MidLayer(nn.Module):
    """The decoder layer: its attention reads ``[norm(embedding); norm(hidden)]``, its residual is the hidden state."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.self_attn = SelfAttention(shape, 2 * shape.hidden)
        self.mlp = FeedForward(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden, shape.eps)
        self.hidden_norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, shape.eps)

    def forward(self, embed: Tensor, hidden: Tensor, angles: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """The un-normed output ``[B, T, H]``, which is also the next step's hidden state."""
        x = torch.cat((self.input_layernorm(embed), self.hidden_norm(hidden)), -1)
        hidden = hidden + self.self_attn(x, angles, attend)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


def choose_draft_vocab(counts_V: Tensor, size: int, always: Sequence[int]) -> Tensor:
    """The ``size`` target ids with the highest counts, ``always`` included, ascending: int64 ``[size]``. Ties go to the smaller id."""
    keep = list(dict.fromkeys(always))
    order = [i for i in counts_V.argsort(descending=True, stable=True).tolist() if i not in set(keep)]
    return torch.tensor(sorted([*keep, *order[: size - len(keep)]]), dtype=torch.int64)


class Eagle3Draft(StepDrafter):
    """The embedding is the target's and not part of the checkpoint."""

    Settings: ClassVar[type[NetworkConfig]] = Eagle3Config
    about: ClassVar[str] = "EAGLE-3: one layer over `[embedding; hidden]`, taps entering layers {tap_layers}"
    unmixed: ClassVar[tuple[str, ...]] = ("lm_head",)
    scale_F: Tensor
    d2t: Tensor
    t2d: Tensor

    def __init__(self, target: PreTrainedModel, config: Eagle3Config) -> None:
        super().__init__()
        shape = LayerShape.of(target).plain(config.intermediate_size)
        vocab, layers = target.config.vocab_size, target.config.num_hidden_layers
        taps = config.tap_layers or default_taps(layers)
        if not all(1 <= layer < layers for layer in taps):
            raise ConfigError("train.network.tap_layers", f"layers in 1..{layers - 1}", taps)
        self.tap_layers = tuple(taps)
        # fc is trained on features scaled to a root mean square near 1 and published for unscaled ones: residual streams are often ten
        # times larger. The scales are powers of two, so that the published matrix is rounded exactly as the trained one.
        self.register_buffer("scale_F", feature_scale(target, self.tap_layers), persistent=False)
        self.fc = nn.Linear(len(taps) * shape.hidden, shape.hidden, bias=False)
        self.midlayer = MidLayer(shape)
        self.norm = nn.RMSNorm(shape.hidden, shape.eps)
        size = min(config.draft_vocab_size, vocab)
        self.lm_head = nn.Linear(shape.hidden, size, bias=False)
        self.has_vocab = size < vocab
        if self.has_vocab:
            self.register_buffer("d2t", torch.zeros(size, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(vocab, dtype=torch.bool))
        self.rope = Rope.of(target)
        self.share(target)

    def start_from(self, target: PreTrainedModel, counts_V: Tensor | None) -> None:
        self.norm.weight.copy_(target.model.norm.weight)
        rows = target.lm_head.weight
        if self.has_vocab and counts_V is not None:
            ends = target.config.eos_token_id
            always = ends if isinstance(ends, list) else [] if ends is None else [ends]
            ids = choose_draft_vocab(counts_V, len(self.d2t), always)
            self.d2t.copy_(ids - torch.arange(len(ids)))
            self.t2d[ids] = True
            rows = rows[ids.to(rows.device)]
        if len(rows) == self.lm_head.out_features:
            self.lm_head.weight.copy_(rows)

    def target_ids(self) -> Tensor | None:
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t if self.has_vocab else None

    def start(self, features_BTF: Tensor) -> Tensor:
        out: Tensor = self.fc(features_BTF * self.scale_F).float()
        return out

    def step(self, index: int, tokens_BT: Tensor, hidden_BTH: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        out: Tensor = self.midlayer(self.embedding_VH[tokens_BT].float(), hidden_BTH, self.rope(positions_T), attend)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.lm_head(self.norm(hidden))
        return out

    def published(self, target: PreTrainedModel) -> tuple[dict[str, object], dict[str, Tensor]]:
        """``eagle_aux_hidden_state_layer_ids`` counts layers by their *output*, one less than the layer whose input is tapped."""
        facts: dict[str, object] = {"architectures": ["LlamaForCausalLMEagle3"], **decoder_facts(target), "model_type": "llama"}
        facts.update(
            intermediate_size=self.midlayer.mlp.gate_proj.out_features,
            num_hidden_layers=1,
            attention_bias=False,
            mlp_bias=False,
            tie_word_embeddings=False,
            draft_vocab_size=self.lm_head.out_features,
            target_hidden_size=target.config.hidden_size,
            num_aux_hidden_states=len(self.tap_layers),
            norm_before_residual=False,
            eagle_config={"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in self.tap_layers], "use_aux_hidden_state": True},
        )
        return facts, {**self.state_dict(), "fc.weight": self.fc.weight.detach() * self.scale_F}
