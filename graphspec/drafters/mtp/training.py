"""Multi-token-prediction heads in training, in DeepSeek's NextN layout (DeepSeek-V3, arXiv 2412.19437, section 2.2); for a hybrid target,
the one head of Qwen3.5 in Qwen's layout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from torch import Tensor
from transformers import PreTrainedModel

from ...errors import CheckpointError, ConfigError
from ...facts.model import ModelFacts
from ...train.drafter import Drafter, NetworkConfig, begin_stream, named_tensors, shared_with
from ...train.facts import decoder_facts, is_hybrid, sized, target_facts
from .facts import COUNT_KEYS, MTPFacts
from .layout import MTP_LAYOUTS
from .loading import numbered
from .network import MTPDraft

if TYPE_CHECKING:
    from .network import MTPHead


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


class MtpDrafter(Drafter):
    """Head ``s`` (from 1) reads, at row ``i``, token ``i + s`` and the output of the step before, after that head's norm."""

    Settings: ClassVar[type[NetworkConfig]] = MtpConfig
    about: ClassVar[str] = "NextN: one decoder layer over `eh_proj([enorm(embedding); hnorm(feature)])`, {num_heads} head"
    feeds_feature = True
    reads_hybrids = True
    network: MTPDraft

    @classmethod
    def of(cls, target: PreTrainedModel, config: Any) -> MtpDrafter:
        hybrid, facts = is_hybrid(target.config), target_facts(target)
        if config.num_heads > 1 and hybrid:
            raise ConfigError("train.network.num_heads", "1, as a hybrid target's checkpoint has", config.num_heads)
        attending = replace(facts, family=replace(facts.family, recurrent=None), recurrent=None)
        made = MTPFacts(
            path=Path(),
            decoder=sized(attending, None, config.num_heads),
            draft_vocab_size=facts.vocab_size,
            target_hidden_size=facts.hidden_size,
            feature_size=facts.hidden_size,
            num_heads=config.num_heads,
            layout="qwen" if hybrid else "deepseek",
            first_index=facts.num_layers,
        )
        network = MTPDraft(made, **shared_with(target))
        for head in cast("list[MTPHead]", network.heads):
            begin_stream(head.projection)
        return cls(network)

    @classmethod
    def settings_of(cls, facts: Any, target: ModelFacts) -> dict[str, Any]:
        if facts.hidden_first:
            found = f"that of {facts.layout}, whose projection reads the hidden state first"
            raise CheckpointError(f"{facts.path}: layout", "that of deepseek or qwen", found)
        return {"num_heads": facts.num_heads}

    def start_from(self, target: PreTrainedModel, counts_V: Tensor | None) -> None:
        for head in cast("list[MTPHead]", self.network.heads):
            head.norm.weight.copy_(target.model.norm.weight)

    def published(self, target: PreTrainedModel) -> tuple[dict[str, object], dict[str, Tensor]]:
        facts, name = self.network.facts, type(target).__name__
        # MistralForCausalLM -> MistralForCausalLMNextN: the decoder keys mean the same as in the target's config.
        own: dict[str, object] = (
            {"architectures": [name], COUNT_KEYS[1]: 1}
            if is_hybrid(target.config)
            else {"architectures": [f"{name}NextN"], COUNT_KEYS[0]: facts.num_heads}
        )
        tensors: dict[str, Tensor] = {}
        for number, head in enumerate(self.network.heads, facts.first_index):
            tensors |= named_tensors(head, numbered(MTP_LAYOUTS[facts.layout], number if facts.layout == "deepseek" else 0))
        return decoder_facts(target) | own, tensors
