"""A small Llama of the target's vocabulary that drafts on its own (Leviathan et al. 2023, arXiv 2211.17192)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor
from transformers import PreTrainedModel

from ...config.checks import in_range
from ...errors import ConfigError
from ...facts.families import LLAMA
from ...facts.keys import Keys
from ...facts.model import ModelFacts, read_decoder
from ...train.drafter import Drafter, NetworkConfig, named_tensors
from ...train.facts import decoder_facts
from .facts import StandaloneFacts
from .network import StandaloneDraft

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


class StandaloneDrafter(Drafter):
    """It reads tokens only: the hidden state passed from step to step is its output, which no step reads."""

    Settings: ClassVar[type[NetworkConfig]] = StandaloneConfig
    about: ClassVar[str] = "Llama, {num_hidden_layers} layers, hidden {hidden_size}, tied embedding"
    unmixed = ("embed_tokens",)
    stands_alone = True
    network: StandaloneDraft

    def __init__(self, network: StandaloneDraft, config: StandaloneConfig) -> None:
        super().__init__(network)
        self.config = config

    @classmethod
    def of(cls, target: PreTrainedModel, config: Any) -> StandaloneDrafter:
        decoder = read_decoder(Keys(_config(target, config), "train.network"), Path(), "LlamaForCausalLM", LLAMA)
        vocab, width = target.config.vocab_size, target.config.hidden_size
        facts = StandaloneFacts(path=Path(), decoder=decoder, draft_vocab_size=vocab, target_hidden_size=width)
        return cls(StandaloneDraft(facts, target.config.max_position_embeddings), config)

    @classmethod
    def settings_of(cls, facts: Any, target: ModelFacts) -> dict[str, Any]:
        decoder: ModelFacts = facts.decoder
        sizes = (decoder.hidden_size, decoder.intermediate_size, decoder.num_layers, decoder.num_heads, decoder.num_kv_heads)
        return {**dict(zip(_SIZES, sizes, strict=True)), "rope_theta": decoder.rope.theta}

    def start_from(self, target: PreTrainedModel, counts_V: Tensor | None) -> None:
        # What writes to the residual stream starts smaller, the more so the deeper the model.
        depth = (2 * self.network.facts.decoder.num_layers) ** 0.5
        for name, parameter in self.network.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.div_(depth)

    def published(self, target: PreTrainedModel) -> tuple[dict[str, object], dict[str, Tensor]]:
        return _config(target, self.config), named_tensors(self.network.model, LLAMA.layout)


def _config(target: PreTrainedModel, config: StandaloneConfig) -> dict[str, object]:
    """``config.json``, which the network is made of too."""
    return decoder_facts(target) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{key: getattr(config, key) for key in _SIZES},
        "head_dim": config.hidden_size // config.num_attention_heads,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "sliding_window": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
    }
