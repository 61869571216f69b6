"""EAGLE-3 head in training: one layer over ``[embedding; hidden]``, three taps, a draft vocabulary (Li et al. 2025, arXiv 2503.01840)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...config.checks import INT32_MAX, ascending, in_range
from ...errors import ConfigError
from ...facts.layouts import Layout
from ...facts.model import ModelFacts
from ...models.checkpoint import tensor_sources
from ...train.drafter import Drafter, NetworkConfig, begin_stream, feature_scale, named_tensors, shared_with
from ...train.facts import plain_facts, sized, tapped_layers, target_facts, width_of
from .eagle3_facts import TAP_KEY, Eagle3Facts, assumed_facts, default_taps
from .eagle3_loading import EAGLE3_LAYOUT, EAGLE3_WRITTEN
from .eagle3_network import Eagle3Draft, Eagle3Layer
from .tensors import renamed

if TYPE_CHECKING:
    from ...models.layers import Linear

Network = TypeVar("Network", bound=Eagle3Draft)


@dataclass
class Eagle3Config(NetworkConfig):
    """Width, heads and norms are the target's."""

    draft_vocab_size: int = 32000
    """Number of the most frequent ids, which it can draft; from the target's vocabulary on: all ids, and no maps in the checkpoint."""
    intermediate_size: int | None = None
    """Width of the MLP; null: the target's."""
    layers_from_target: bool = False
    """Start from the target's last layers, with the highest tap as the residual stream that enters them; else from small random numbers."""
    freeze_lm_head: bool = False
    """Keep the output head as it starts, the target's rows of the draft vocabulary; else it is trained too."""
    tap_layers: list[int] | None = None
    """The head reads the target's residual streams *entering* these layers: low, middle, high. Null: ``2, L // 2, L - 3``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range("train.network.draft_vocab_size", self.draft_vocab_size, 1)
        if self.layers_from_target and self.intermediate_size is not None:
            raise ConfigError("train.network.layers_from_target", "false with a train.network.intermediate_size of its own", True)
        if self.tap_layers is not None:
            # Readers of the checkpoint, this engine included, accept no other order.
            ascending("train.network.tap_layers", self.tap_layers, 1, INT32_MAX)


def choose_draft_vocab(counts_V: Tensor, size: int, always: Sequence[int]) -> Tensor:
    """The ``size`` target ids with the highest counts, ``always`` included, ascending: int64 ``[size]``. Ties go to the smaller id."""
    keep = list(dict.fromkeys(always))
    order = [i for i in counts_V.argsort(descending=True, stable=True).tolist() if i not in set(keep)]
    return torch.tensor(sorted([*keep, *order[: size - len(keep)]]), dtype=torch.int64)


def network_over_taps(
    network: Callable[..., Network], facts: Eagle3Facts, target: PreTrainedModel, config: Eagle3Config, layers: int = 1
) -> Network:
    """The network of a head with the taps, sizes and draft vocabulary of the settings.

    Raises:
        ConfigError: taps that the target doesn't have.
    """
    depth, width = target.config.num_hidden_layers, target.config.hidden_size
    taps = tapped_layers(config.tap_layers, default_taps(depth), depth)
    vocab = min(config.draft_vocab_size, target.config.vocab_size)
    decoder = sized(facts.decoder, config.intermediate_size, layers)
    facts = replace(facts, decoder=decoder, draft_vocab_size=vocab, tap_layers=taps, feature_size=len(taps) * width)
    made = network(facts, **shared_with(target, head=False))
    begin_stream(cast("Linear", made.fc), torch.ones(facts.feature_size))
    made.register_buffer("target_token_Vd", made.target_token_Vd)  # part of a training run's checkpoint
    return made


def start_from_layers(network: Eagle3Draft, target: PreTrainedModel) -> None:
    """Copy the target's last layers into the head's. ``fc`` passes the highest tap on, the residual stream that they are used to.

    The target has no numbers for the half of the first layer's attention that reads the embedding, nor for that half's norm: these stay.
    A head has no place for biases, nor for norms of queries and keys.
    """
    fc, width = cast("Linear", network.fc), target.config.hidden_size
    fc.get_parameter("weight")[:, -width:] = torch.diag(1 / fc.get_buffer("input_scale")[-width:])
    own, known = list(network.layers), list(target.model.layers)
    for number, (layer, source) in enumerate(zip(own, known[-len(own) :], strict=True)):
        prefix = f"layers.{number}."
        for name, parameter in layer.named_parameters():
            names = tensor_sources(EAGLE3_LAYOUT, prefix + name, ())
            if isinstance(layer, Eagle3Layer) and "input_layernorm" in name:
                continue
            parts = [source.get_parameter(part.removeprefix(prefix).replace("hidden_norm", "input_layernorm")) for part in names]
            value = torch.cat(parts)
            parameter[..., -value.shape[-1] :].copy_(value)


class Eagle3Drafter(Drafter):
    """The embedding is the target's and not part of the checkpoint."""

    Settings: ClassVar[type[NetworkConfig]] = Eagle3Config
    about: ClassVar[str] = "EAGLE-3: one layer over `[embedding; hidden]`, taps entering layers {tap_layers}"
    unmixed: ClassVar[tuple[str, ...]] = ("lm_head",)
    layout: ClassVar[Layout] = EAGLE3_LAYOUT
    written: ClassVar[str] = "safeailab"
    """The layout it is published in, a key of :data:`EAGLE3_WRITTEN`."""
    network: Eagle3Draft
    config: Eagle3Config

    @classmethod
    def of(cls, target: PreTrainedModel, config: Any) -> Eagle3Drafter:
        facts, _ = assumed_facts(Path(), target_facts(target))
        return cls(network_over_taps(Eagle3Draft, facts, target, config))

    @classmethod
    def settings_of(cls, facts: Any, target: ModelFacts) -> dict[str, Any]:
        width = width_of(facts.decoder, target)
        return {"draft_vocab_size": facts.draft_vocab_size, "tap_layers": list(facts.tap_layers), "intermediate_size": width}

    def start_from(self, target: PreTrainedModel, counts_V: Tensor | None) -> None:
        network = self.network
        # The scales are powers of two, so that the published matrix is rounded exactly as the trained one.
        cast("Linear", network.fc).get_buffer("input_scale").copy_(feature_scale(target, self.tap_layers))
        network.norm.weight.copy_(target.model.norm.weight)
        rows = target.lm_head.weight
        if network.target_token_Vd is not None and counts_V is not None:
            ends = target.config.eos_token_id
            always = ends if isinstance(ends, list) else [] if ends is None else [ends]
            network.target_token_Vd.copy_(choose_draft_vocab(counts_V, len(network.target_token_Vd), always))
            rows = rows[network.target_token_Vd.to(rows.device)]
        if rows.shape == (own := network.lm_head.get_parameter("weight")).shape:
            own.copy_(rows)
        own.requires_grad_(not self.config.freeze_lm_head)
        if self.config.layers_from_target:
            start_from_layers(network, target)

    def published(self, target: PreTrainedModel) -> tuple[dict[str, object], dict[str, Tensor]]:
        """``eagle_aux_hidden_state_layer_ids`` counts layers by their *output*, one less than the layer whose input is tapped."""
        facts, ids = self.network.facts, self.target_ids()
        outputs = [layer - 1 for layer in facts.tap_layers]
        config = plain_facts(
            target,
            "LlamaForCausalLMEagle3",
            facts.decoder,
            draft_vocab_size=facts.draft_vocab_size,
            target_hidden_size=facts.target_hidden_size,
            num_aux_hidden_states=len(outputs),
            norm_before_residual=False,
            eagle_config={TAP_KEY: outputs, "use_aux_hidden_state": True},
        )
        named = named_tensors(self.network, self.layout)
        tensors = {renamed(name, EAGLE3_WRITTEN[self.written]): tensor for name, tensor in named.items()}
        if ids is None:
            return config, tensors
        marks = torch.zeros(facts.decoder.vocab_size, dtype=torch.bool, device=ids.device).index_fill(0, ids, True)
        return config, tensors | {"d2t": ids - torch.arange(len(ids), device=ids.device), "t2d": marks}
