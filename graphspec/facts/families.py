"""Families of decoders, one row each: what sets a family's layers apart from Llama's, and how its checkpoints spell them.

Facts, networks, loading and messages read the row; nothing else asks for an architecture's name. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Literal

from ..config.catalog import entry_point_rows
from ..errors import ConfigError
from .keys import Keys
from .latent import LatentFacts, read_latent
from .layer_kinds import (
    Windows,
    dots_keys,
    exaone_keys,
    full_layers_pass,
    gemma2_keys,
    gemma3_keys,
    gemma_keys,
    gpt_oss_keys,
    listed_layers_rotate,
    no_window,
    olmo3_keys,
    one_group_keys,
    smollm3_keys,
    window_by_flag,
    window_by_kind,
    window_by_layer,
    window_everywhere,
)
from .layouts import (
    BAMBA_LAYOUT,
    FUSED_LAYOUT,
    GPT_OSS_LAYOUT,
    GRANITE_LAYOUT,
    LANGUAGE_LAYOUT,
    NEMOTRON_LAYOUT,
    QWEN3_5_LAYOUT,
    QWEN3_NEXT_LAYOUT,
    SPLIT_LAYOUT,
    Layout,
)
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
from .moe import ExpertFacts, read_deepseek_experts, read_gpt_oss_experts, read_qwen3_5_experts, read_qwen3_experts, read_qwen3_next_experts
from .multipliers import Multipliers, read_falcon_multipliers, read_gemma_multipliers, read_granite_multipliers
from .recurrent import RecurrentFacts, read_gated_delta
from .rope import ROPE_KINDS, RopeFacts


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
    attention_bias: Literal["none", "stated", "apart", "qkv"] = "none"
    """``stated``: ``attention_bias`` says whether all four projections have one; ``apart``: whether all but the output's, and
    ``attention_out_bias`` whether that; ``qkv``: always, all but the output's."""
    mlp_bias: bool = False
    """``mlp_bias`` says whether the MLP has biases."""
    qk_norm: Literal["none", "head", "stated", "projection"] = "none"
    """RMSNorm of queries and keys before RoPE: over each head; where ``use_qk_norm`` says so; or over all heads together."""
    norms: Literal["before", "after", "around"] = "before"
    """Where attention and MLP have their norms: before them; after them, before their results are added (OLMo 2, arXiv 2501.00656); both
    (Gemma 2, arXiv 2408.00118)."""
    activation: Literal["silu", "gelu_tanh", "relu2"] = "silu"
    """Of MLPs and experts: SwiGLU; GeGLU with the tanh approximation; ``down(relu(up x)^2)``, without a gate (arXiv 2109.08668)."""
    norm: Literal["plain", "offset", "float32"] = "plain"
    """``offset``: norm weights are stored minus 1 (Gemma). ``float32``, and with an offset: scaled before the cast back, not after it."""
    attention_sinks: bool = False
    """Each head has a score more, of no key (gpt-oss)."""
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
    rotates: bool | None = True
    """Queries and keys are rotated; None: ``position_embedding_type`` says whether."""
    rotating: Callable[[Keys, Sequence[int | None]], tuple[bool, ...]] | None = None
    """Reads which layers rotate, from config and windows, where some don't (NoPE, arXiv 2305.19466); None: all alike."""
    tied: bool = False
    """What ``tie_word_embeddings`` is where the config doesn't say."""
    ties: bool = True
    """``tie_word_embeddings`` may say that the language-model head is the embedding; otherwise the key means nothing."""
    max_positions: int | None = None
    """``max_position_embeddings`` of a config that doesn't say, as in transformers; None: the key is required."""
    multipliers: Callable[[Keys], Multipliers] | None = None
    """Reads constants that streams are multiplied by; None: there are none."""

    @property
    def shaped_like_llama(self) -> bool:
        """Layers of keys and values and dense MLPs, each after its norm, in separate tensors: ``graphspec train`` can read them."""
        unusual = (
            self.refused,
            self.attention_gate,
            self.attention_sinks,
            self.latent,
            self.experts,
            self.recurrent,
            self.multipliers,
            self.rotating,
        )
        usual = self.layout is SPLIT_LAYOUT and self.norms == "before" and self.activation == "silu"
        return usual and not any(unusual)

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
MISTRAL = Family(
    name="mistral",
    architectures=("MistralForCausalLM",),
    window=partial(window_everywhere, default=4096),
    max_positions=4096 * 32,
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
    activation="relu2",
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
GEMMA = Family(
    name="gemma",
    architectures=("GemmaForCausalLM",),
    attention_bias="stated",
    norm="offset",
    activation="gelu_tanh",
    head_dim=256,
    usual=gemma_keys,
    tied=True,
    max_positions=8192,
    multipliers=read_gemma_multipliers,
)
GEMMA2 = replace(
    GEMMA,
    name="gemma2",
    architectures=("Gemma2ForCausalLM",),
    norms="around",
    usual=gemma2_keys,
    window=window_by_kind,
)
"""Every second layer has a window; scores and logits are capped (arXiv 2408.00118)."""
GEMMA3 = replace(
    GEMMA,
    name="gemma3_text",
    architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    layout=LANGUAGE_LAYOUT,
    norms="around",
    qk_norm="head",
    usual=gemma3_keys,
    window=window_by_kind,
    nested="text_config",
    max_positions=131072,
)
"""Five layers with a window to one without, which is rotated by another base (arXiv 2503.19786)."""
GLM4_MOE = Family(
    name="glm4_moe",
    architectures=("Glm4MoeForCausalLM",),
    attention_bias="apart",
    qk_norm="stated",
    partial_rotary=0.5,
    usual=one_group_keys,
    experts=partial(read_deepseek_experts, sigmoid=True),
    max_positions=131072,
)
"""GLM-4.5 and after (arXiv 2508.06471)."""
OLMO2 = Family(
    name="olmo2",
    architectures=("Olmo2ForCausalLM",),
    attention_bias="stated",
    qk_norm="projection",
    norms="after",
    norm="float32",
    multi_head=True,
    max_positions=2048,
)
GPT_OSS = Family(
    name="gpt_oss",
    architectures=("GptOssForCausalLM",),
    layout=GPT_OSS_LAYOUT,
    attention_bias="stated",
    norm="float32",
    attention_sinks=True,
    usual=gpt_oss_keys,
    window=window_by_kind,
    experts=read_gpt_oss_experts,
    max_positions=131072,
)
"""Sinks, every second layer with a window, and clamped experts with biases (arXiv 2508.10925)."""
KIMI_LINEAR = Family(
    name="kimi_linear",
    architectures=("KimiLinearForCausalLM",),
    refused="the gates of its recurrent layers are vectors, which is not supported",
)

FAMILIES: tuple[Family, ...] = (
    LLAMA,
    MISTRAL,
    Family(
        name="mistral3",
        architectures=("Mistral3ForConditionalGeneration",),
        layout=LANGUAGE_LAYOUT,
        window=partial(window_everywhere, default=None),
        nested="text_config",
        tied=True,
        max_positions=131072,
    ),
    replace(
        MISTRAL,
        name="ministral3",
        architectures=("Ministral3ForCausalLM",),
        window=partial(window_everywhere, default=None),
        max_positions=262144,
    ),
    QWEN2,
    replace(
        QWEN2,
        name="qwen2_5_vl",
        architectures=("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
        layout=LANGUAGE_LAYOUT,
        nested="text_config",
    ),
    QWEN3,
    replace(
        QWEN3,
        name="qwen3_vl",
        architectures=("Qwen3VLForConditionalGeneration",),
        layout=LANGUAGE_LAYOUT,
        nested="text_config",
        max_positions=128000,
    ),
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
    OLMO2,
    replace(OLMO2, name="olmo3", architectures=("Olmo3ForCausalLM",), usual=olmo3_keys, window=window_by_kind),
    replace(
        LLAMA,
        name="smollm3",
        architectures=("SmolLM3ForCausalLM",),
        usual=smollm3_keys,
        window=window_by_kind,
        rotating=listed_layers_rotate,
        tied=True,
        max_positions=32768,
    ),
    Family(
        name="exaone4",
        architectures=("Exaone4ForCausalLM",),
        qk_norm="head",
        norms="after",
        multi_head=True,
        usual=exaone_keys,
        window=window_by_kind,
        rotating=full_layers_pass,
        max_positions=2048,
    ),
    replace(
        LLAMA,
        name="granite",
        architectures=("GraniteForCausalLM",),
        multipliers=read_granite_multipliers,
        drafts_trees=False,
    ),
    Family(
        name="seed_oss",
        architectures=("SeedOssForCausalLM",),
        attention_bias="apart",
        mlp_bias=True,
        multi_head=True,
        head_dim=128,
        max_positions=524288,
    ),
    Family(
        name="dots1",
        architectures=("Dots1ForCausalLM",),
        attention_bias="stated",
        qk_norm="head",
        multi_head=True,
        usual=dots_keys,
        window=window_by_kind,
        experts=partial(read_deepseek_experts, sigmoid=True),
        max_positions=2048,
    ),
    GLM4_MOE,
    GEMMA,
    GEMMA2,
    GEMMA3,
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
    GPT_OSS,
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
