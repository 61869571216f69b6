"""A small Llama of the target's vocabulary that drafts on its own (Leviathan et al. 2023, arXiv 2211.17192)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from ...config.checks import in_range
from ...errors import ConfigError
from ...train.blocks import Attend, DecoderLayer, LayerShape, Rope
from ...train.drafter import NetworkConfig, StepDrafter
from ...train.facts import decoder_facts

_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


@dataclass
class StandaloneConfig(NetworkConfig):
    """Shape of the model; its embedding is also its output head."""

    hidden_size: int = 128
    intermediate_size: int = 320
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in _SIZES:
            in_range(f"train.network.{key}", getattr(self, key), 1)
        if self.hidden_size % (2 * self.num_attention_heads):
            half = self.hidden_size / 2
            raise ConfigError("train.network.num_attention_heads", f"a divisor of hidden_size / 2 = {half:g}", self.num_attention_heads)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError("train.network.num_key_value_heads", f"a divisor of {self.num_attention_heads}", self.num_key_value_heads)


class LlamaBody(nn.Module):
    """Embedding, layers and final norm, named as transformers names them."""

    def __init__(self, vocab_size: int, layers: int, shape: LayerShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, shape.hidden)
        self.layers = nn.ModuleList([DecoderLayer(shape) for _ in range(layers)])
        self.norm = nn.RMSNorm(shape.hidden, shape.eps)


class StandaloneDraft(StepDrafter):
    """It reads tokens only: the hidden state passed from step to step is its output, which no step reads."""

    Settings: ClassVar[type[NetworkConfig]] = StandaloneConfig
    about: ClassVar[str] = "Llama, {num_hidden_layers} layers, hidden {hidden_size}, tied embedding"
    unmixed = ("embed_tokens",)
    stands_alone = True

    def __init__(self, target: PreTrainedModel, config: StandaloneConfig) -> None:
        super().__init__()
        self.config = config
        shape = LayerShape(
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            dim=config.hidden_size // config.num_attention_heads,
            eps=target.config.rms_norm_eps,
        )
        self.model = LlamaBody(target.config.vocab_size, config.num_hidden_layers, shape)
        self.rope = Rope.plain(shape.dim, config.rope_theta)

    def start_from(self, target: PreTrainedModel, counts_V: Tensor | None) -> None:
        nn.init.normal_(self.model.embed_tokens.weight, std=0.02)
        for layer in cast("list[DecoderLayer]", self.model.layers):
            # What writes to the residual stream starts smaller, the more so the deeper the model.
            layer.self_attn.o_proj.weight.div_((2 * self.config.num_hidden_layers) ** 0.5)
            layer.mlp.down_proj.weight.div_((2 * self.config.num_hidden_layers) ** 0.5)

    def step(self, index: int, tokens_BT: Tensor, hidden_BTH: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        angles = self.rope(positions_T)
        x: Tensor = self.model.embed_tokens(tokens_BT)
        for number, layer in enumerate(self.model.layers):
            x = layer(x, angles, attend, number)
        return self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self.model.embed_tokens.weight)

    def published(self, target: PreTrainedModel) -> tuple[dict[str, object], dict[str, Tensor]]:
        config = self.config
        facts: dict[str, object] = {"architectures": ["LlamaForCausalLM"], **decoder_facts(target), "model_type": "llama"}
        facts.update(
            {key: getattr(config, key) for key in _SIZES},
            head_dim=config.hidden_size // config.num_attention_heads,
            rope_theta=config.rope_theta,
            rope_scaling=None,
            sliding_window=None,
            attention_bias=False,
            mlp_bias=False,
            tie_word_embeddings=True,
        )
        return facts, dict(self.state_dict())
