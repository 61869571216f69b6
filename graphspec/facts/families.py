"""Families of decoders, one row each: what sets a family's layers apart from Llama's, and how its checkpoints spell them.

Facts, networks, loading and messages read the row; nothing else asks for an architecture's name. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Literal

from ..config.catalog import entry_point_rows
from ..errors import ConfigError
from .keys import Keys
from .latent import LatentFacts, read_latent
from .layouts import BAMBA_LAYOUT, FUSED_LAYOUT, GRANITE_LAYOUT, NEMOTRON_LAYOUT, QWEN3_5_LAYOUT, QWEN3_NEXT_LAYOUT, SPLIT_LAYOUT, Layout
from .mamba import (
    Mixer,
    bamba_keys,
    granite_keys,
    nemotron_keys,
    read_falcon_ssm,
    read_granite_experts,
    read_granite_ssm,
    read_mixers,
    read_nemotron_experts,
    read_nemotron_ssm,
)
from .moe import ExpertFacts, read_deepseek_experts, read_qwen3_5_experts, read_qwen3_experts, read_qwen3_next_experts
from .multipliers import Multipliers, read_falcon_multipliers, read_granite_multipliers
from .recurrent import RecurrentFacts, read_gated_delta
from .rope import ROPE_KINDS, RopeFacts

Windows = Callable[[Keys, int], tuple[int | None, ...]]
"""From a config and a number of layers: each layer's sliding window, None where it sees everything."""


def no_window(keys: Keys, num_layers: int) -> tuple[int | None, ...]:
    """Whatever the config says of sliding windows, the family has none.

    Raises:
        CheckpointError: it says no integer.
    """
    window_everywhere(keys, num_layers, None)
    return (None,) * num_layers


def window_everywhere(keys: Keys, num_layers: int, default: int | None) -> tuple[int | None, ...]:
    """The same window in every layer; null means none, an absent key ``default``.

    Raises:
        CheckpointError: no integer.
    """
    return (None if keys.values.get("sliding_window", default) is None else keys.integer("sliding_window", default),) * num_layers


def window_by_flag(keys: Keys, num_layers: int) -> tuple[int | None, ...]:
    """The same window in every layer, with ``use_sliding_window`` only.

    Raises:
        CheckpointError: a flag that is none, or no integer.
    """
    windows = window_everywhere(keys, num_layers, 4096)
    return windows if keys.flag("use_sliding_window", False) else no_window(keys, num_layers)


def window_by_layer(keys: Keys, num_layers: int) -> tuple[int | None, ...]:
    """As :func:`window_by_flag`, in the layers that ``layer_types`` or ``max_window_layers`` say.

    Raises:
        CheckpointError: as there, or a list of another length or of other kinds of layers.
    """
    windows = window_by_flag(keys, num_layers)
    kinds = keys.values.get("layer_types")
    if not any(windows):
        return windows
    if kinds is None:
        first = keys.integer("max_window_layers", 28, least=0)
        return tuple(window if layer >= first else None for layer, window in enumerate(windows))
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in known for kind in kinds):
        raise keys.error("layer_types", f"{num_layers} entries of full_attention or sliding_attention")
    return tuple(window if kind == "sliding_attention" else None for kind, window in zip(kinds, windows, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One row. The defaults are a pre-norm decoder with SwiGLU and grouped queries, without biases and sliding windows."""

    name: str
    """``model_type`` in ``config.json``; of an entry point, its name."""
    architectures: tuple[str, ...]
    """Names in ``architectures`` of ``config.json``; ``*`` stands for any end of a name."""
    refused: str = ""
    """Why such a checkpoint can't be a target, where only a draft may have layers of this family."""
    layout: Layout = SPLIT_LAYOUT
    attention_bias: Literal["none", "stated", "qkv"] = "none"
    """``stated``: ``attention_bias`` says whether all four projections have one; ``qkv``: always, all but the output's."""
    mlp_bias: bool = False
    """``mlp_bias`` says whether the MLP has biases."""
    qk_norm: Literal["none", "head", "projection"] = "none"
    """RMSNorm of queries and keys before RoPE: over each head, or over all heads together."""
    norm_after: bool = False
    """Norms follow attention and MLP, before their results are added; nothing is normed before them (OLMo 2, arXiv 2501.00656)."""
    norm: Literal["plain", "offset", "float32"] = "plain"
    """``offset``: norm weights are stored minus 1 (Gemma). ``float32``, and with an offset: scaled before the cast back, not after it."""
    attention_gate: bool = False
    """The query projection gives each head a gate next to its query; the sigmoid of it scales the attention's output."""
    multi_head: bool = False
    """Without ``num_key_value_heads`` every query head has keys and values of its own; elsewhere the key is required."""
    head_dim: int | None = None
    """Width of a head where the config doesn't say; None: ``hidden_size`` over the number of heads."""
    rope_kinds: tuple[str, ...] = ROPE_KINDS
    """Of :data:`~graphspec.facts.rope.ROPE_KINDS`, those whose names mean the same here."""
    partial_rotary: float | None = None
    """Rotated part of a head where the config doesn't say; None: all of it, and a config that says otherwise is refused."""
    window: Windows = no_window
    latent: Callable[[Keys, int, RopeFacts], LatentFacts] | None = None
    """Reads multi-head latent attention from config, number of heads and RoPE; None: keys and values."""
    experts: Callable[[Keys, int], ExpertFacts | None] | None = None
    """Reads mixtures of experts from config and number of layers; None: every MLP is dense."""
    drafts_trees: bool = False
    """Drafters that choose a shape by themselves choose a tree, not a chain."""
    recurrent: Callable[[Keys, int], RecurrentFacts | None] | None = None
    """Reads recurrent layers from config and number of layers; None: every layer attends."""
    nested: str = ""
    """Key under which a config may have those of the language model, where the model also sees images."""
    grouped_projection: bool = False
    """Projections of recurrent layers are stored key head by key head (Qwen3-Next), not part by part."""
    usual: Callable[[Keys], Keys] | None = None
    """The config under the names that all other readers use; None: it has them."""
    mixers: Callable[[Keys, int], tuple[Mixer, ...]] | None = None
    """Reads what each layer holds, where it holds one net after one norm; None: attention or a recurrent net, and an MLP."""
    side_by_side: bool = False
    """Every recurrent layer attends too: both read one input, and both results are added."""
    squared_relu: bool = False
    """MLPs and experts are ``down(relu(up x)^2)``, without a gate (arXiv 2109.08668)."""
    rotates: bool | None = True
    """Queries and keys are rotated; None: ``position_embedding_type`` says whether."""
    ties: bool = True
    """``tie_word_embeddings`` may say that the language-model head is the embedding; otherwise the key means nothing."""
    max_positions: int | None = None
    """``max_position_embeddings`` of a config that doesn't say, as in transformers; None: the key is required."""
    multipliers: Callable[[Keys], Multipliers] | None = None
    """Reads constants that streams are multiplied by; None: there are none."""

    @property
    def shaped_like_llama(self) -> bool:
        """Layers of keys and values and dense MLPs, each after its norm, in separate tensors: ``graphspec train`` can read them."""
        unusual = (self.refused, self.norm_after, self.attention_gate, self.latent, self.experts, self.recurrent, self.multipliers)
        return self.layout is SPLIT_LAYOUT and not any(unusual)

    @property
    def shaped_like_qwen3_5(self) -> bool:
        """Gated delta nets, gated attention and dense MLPs under Qwen3.5's names: ``graphspec train`` can make and read them."""
        return self.layout is QWEN3_5_LAYOUT and not self.experts


LLAMA = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    attention_bias="stated",
    mlp_bias=True,
    multi_head=True,
    max_positions=2048,
    drafts_trees=True,
)
QWEN2 = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM", "MiMoForCausalLM"),
    attention_bias="qkv",
    window=window_by_layer,
    max_positions=32768,
)
QWEN3 = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    attention_bias="stated",
    qk_norm="head",
    head_dim=128,
    window=window_by_layer,
    max_positions=32768,
)
DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    architectures=("DeepseekV3ForCausalLM",),
    attention_bias="stated",
    latent=partial(read_latent, interleaved_only=False),
    experts=partial(read_deepseek_experts, sigmoid=True),
    max_positions=4096,
)
QWEN3_5 = Family(
    name="qwen3_5",
    architectures=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    layout=QWEN3_5_LAYOUT,
    attention_bias="stated",
    qk_norm="head",
    norm="offset",
    attention_gate=True,
    head_dim=256,
    partial_rotary=0.25,
    recurrent=read_gated_delta,
    nested="text_config",
    max_positions=32768,
)
"""Three gated delta nets to one gated attention; of models that also see images, the language model."""
QWEN3_NEXT = replace(
    QWEN3_5,
    name="qwen3_next",
    architectures=("Qwen3NextForCausalLM",),
    layout=QWEN3_NEXT_LAYOUT,
    nested="",
    grouped_projection=True,
    experts=read_qwen3_next_experts,
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    name="qwen3_5_moe",
    architectures=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    experts=read_qwen3_5_experts,
)
NEMOTRON_H = Family(
    name="nemotron_h",
    architectures=("NemotronHForCausalLM",),
    layout=NEMOTRON_LAYOUT,
    mlp_bias=True,
    norm="float32",
    multi_head=True,
    usual=nemotron_keys,
    mixers=read_mixers,
    recurrent=read_nemotron_ssm,
    experts=read_nemotron_experts,
    squared_relu=True,
    rotates=False,
    ties=False,
    max_positions=4096,
)
"""Mamba-2, attention, MLP or experts, one of them in each layer (arXiv 2504.03624)."""
GRANITE_HYBRID = Family(
    name="granitemoehybrid",
    architectures=("GraniteMoeHybridForCausalLM",),
    layout=GRANITE_LAYOUT,
    attention_bias="stated",
    multi_head=True,
    usual=granite_keys,
    recurrent=read_granite_ssm,
    experts=read_granite_experts,
    rotates=None,
    max_positions=2048,
    multipliers=read_granite_multipliers,
)
"""Granite 4: Mamba-2 or attention, then an MLP for every token, with or without experts next to it."""
BAMBA = Family(
    name="bamba",
    architectures=("BambaForCausalLM",),
    layout=BAMBA_LAYOUT,
    attention_bias="stated",
    mlp_bias=True,
    multi_head=True,
    partial_rotary=0.5,
    usual=bamba_keys,
    recurrent=read_granite_ssm,
    max_positions=262144,
)
"""Mamba-2 or attention with partial rotary, then an MLP."""
FALCON_H1 = Family(
    name="falcon_h1",
    architectures=("FalconH1ForCausalLM",),
    layout=BAMBA_LAYOUT,
    multi_head=True,
    recurrent=read_falcon_ssm,
    side_by_side=True,
    max_positions=8192,
    multipliers=read_falcon_multipliers,
)
"""Mamba-2 and attention in every layer, over one input, then an MLP (arXiv 2507.22448)."""
KIMI_LINEAR = Family(
    name="kimi_linear",
    architectures=("KimiLinearForCausalLM",),
    refused="the gates of its recurrent layers are vectors, which is not supported",
)

FAMILIES: tuple[Family, ...] = (
    LLAMA,
    Family(name="mistral", architectures=("MistralForCausalLM",), window=partial(window_everywhere, default=4096), max_positions=4096 * 32),
    QWEN2,
    QWEN3,
    Family(
        name="qwen3_moe",
        architectures=("Qwen3MoeForCausalLM",),
        attention_bias="stated",
        qk_norm="head",
        window=window_by_flag,  # transformers knows no layers without the window here
        experts=read_qwen3_experts,
        max_positions=32768,
    ),
    Family(
        name="deepseek_v2",
        architectures=("DeepseekV2ForCausalLM",),
        attention_bias="stated",
        latent=partial(read_latent, interleaved_only=True),
        experts=partial(read_deepseek_experts, sigmoid=False),
        max_positions=2048,
    ),
    DEEPSEEK_V3,
    Family(
        name="olmo2",
        architectures=("Olmo2ForCausalLM",),
        attention_bias="stated",
        qk_norm="projection",
        norm_after=True,
        norm="float32",
        multi_head=True,
        max_positions=2048,
    ),
    Family(
        name="phi3",
        architectures=("Phi3ForCausalLM",),
        layout=FUSED_LAYOUT,
        multi_head=True,
        rope_kinds=("default",),  # transformers reads "yarn" as LongRoPE (arXiv 2402.13753) here, which is not supported
        partial_rotary=1.0,
        window=partial(window_everywhere, default=None),
        max_positions=4096,
    ),
    QWEN3_5,
    QWEN3_NEXT,
    QWEN3_5_MOE,
    NEMOTRON_H,
    GRANITE_HYBRID,
    BAMBA,
    FALCON_H1,
    KIMI_LINEAR,
)
ENTRY_POINTS = "graphspec.families"
"""Group of entry points through which another package adds a :class:`Family`: ``name = module:attribute``."""


@cache
def all_families() -> tuple[Family, ...]:
    """Ours, and those of installed packages (read once per process).

    Raises:
        ConfigError: an entry point that is no :class:`Family`, or whose name or architecture is taken.
    """
    found = list(FAMILIES)
    for key, value, family in entry_point_rows(ENTRY_POINTS, Family):
        taken = {name for other in found for name in (other.name, *other.architectures)}
        if names := taken.intersection((family.name, *family.architectures)):
            raise ConfigError(key, "a name and architectures that are not taken", f"{value}: {', '.join(sorted(names))}")
        found.append(family)
    return tuple(found)


def find_family(architecture: str) -> Family | None:
    """The row of an entry of ``architectures``; None: there is none."""
    rows = (row for row in all_families() if any(fnmatchcase(architecture, name) for name in row.architectures))
    return next(rows, None)


def target_architectures() -> tuple[str, ...]:
    """Every architecture that loads as a target."""
    return tuple(name for family in all_families() if not family.refused for name in family.architectures)
