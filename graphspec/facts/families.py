"""Families of decoders, one row each: what sets a family's layers apart from Llama's, and how its checkpoints spell them.

Facts, networks, loading and messages read the row; nothing else asks for an architecture's name. Standard library only.
"""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache, partial

from ..config.catalog import entry_point_rows
from ..errors import ConfigError
from .family import Family
from .heads import read_gemma4_heads, read_shared_layers, read_shared_mlp_factor
from .hybrid_families import BAMBA, FALCON_H1, GRANITE_HYBRID, NEMOTRON_H, QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from .latent import read_latent
from .layer_inputs import read_layer_inputs
from .layer_kinds import (
    dots_keys,
    ernie_keys,
    exaone_keys,
    full_layers_pass,
    gemma2_keys,
    gemma3_keys,
    gemma4_keys,
    gemma_keys,
    glm_keys,
    gpt_oss_keys,
    listed_layers_rotate,
    minimax_keys,
    mistral4_keys,
    olmo3_keys,
    olmoe_keys,
    one_group_keys,
    qwen2_moe_keys,
    smollm3_keys,
    window_by_flag,
    window_by_kind,
    window_by_layer,
    window_everywhere,
)
from .layouts import (
    ERNIE_MOE_LAYOUT,
    FUSED_LAYOUT,
    GEMMA4_LAYOUT,
    GLM4_LAYOUT,
    GLM_LAYOUT,
    GPT_OSS_LAYOUT,
    LANGUAGE_LAYOUT,
    MISTRAL4_LAYOUT,
    MIXTRAL_LAYOUT,
    QWEN_MOE_LAYOUT,
)
from .moe import (
    read_deepseek_experts,
    read_ernie_experts,
    read_gemma4_experts,
    read_gpt_oss_experts,
    read_listed_experts,
    read_mistral_experts,
    read_mixtral_experts,
    read_olmoe_experts,
    read_qwen2_experts,
    read_qwen3_experts,
)
from .multipliers import read_gemma4_multipliers, read_gemma_multipliers, read_granite_multipliers

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
MISTRAL4 = Family(
    name="mistral4",
    architectures=("Mistral4ForCausalLM",),
    layout=MISTRAL4_LAYOUT,
    attention_bias="stated",
    usual=mistral4_keys,
    latent=partial(read_latent, interleaved_only=False),
    experts=read_mistral_experts,
    max_positions=1048576,
)
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
GEMMA4 = replace(
    GEMMA3,
    name="gemma4_text",
    architectures=("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
    layout=GEMMA4_LAYOUT,
    norm="float32",
    value_norm=True,
    layer_scale=True,
    usual=gemma4_keys,
    heads=read_gemma4_heads,
    kv_sources=read_shared_layers,
    shared_mlp_factor=read_shared_mlp_factor,
    layer_inputs=read_layer_inputs,
    experts=read_gemma4_experts,
    multipliers=read_gemma4_multipliers,
)
"""Layers that see everything have wider heads than those with a window; values may be keys, experts stand next to a dense MLP, and layers
may have inputs of their own or read other layers' keys and values."""
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
GLM = Family(
    name="glm",
    architectures=("GlmForCausalLM",),
    layout=GLM_LAYOUT,
    attention_bias="apart",
    head_dim=128,
    interleaved=True,
    partial_rotary=0.5,
    usual=glm_keys,
    max_positions=131072,
)
ERNIE4_5 = Family(
    name="ernie4_5",
    architectures=("Ernie4_5ForCausalLM",),
    attention_bias="stated",
    mlp_bias=True,
    head_dim=128,
    interleaved=True,
    usual=ernie_keys,
    tied=True,
    max_positions=131072,
)
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
OWN_MODULES = Family(name="transformers", architectures=(), own_modules=True)
"""Any other model, by ``model.family=transformers``."""
KIMI_LINEAR = Family(
    name="kimi_linear",
    architectures=("KimiLinearForCausalLM",),
    refused="the gates of its recurrent layers are vectors, which is not supported",
)
_REFUSED = (
    ("deepseek_v32", ("DeepseekV32ForCausalLM",), "an indexer chooses the tokens that each query sees, which is not supported"),
    ("glm_moe_dsa", ("GlmMoeDsaForCausalLM",), "an indexer chooses the tokens that each query sees, which is not supported"),
    ("llama4", ("Llama4ForCausalLM", "Llama4ForConditionalGeneration"), "its layers attend within chunks, which is not supported"),
)
"""Families that are asked for, and what they need that nothing here has."""

FAMILIES: tuple[Family, ...] = (
    LLAMA,
    MISTRAL,
    Family(
        name="mistral3",
        architectures=("Mistral3ForConditionalGeneration",),
        layout=LANGUAGE_LAYOUT,
        window=partial(window_everywhere, default=None),
        nested="text_config",
        language_families=("mistral4",),
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
        name="qwen2_moe",
        architectures=("Qwen2MoeForCausalLM",),
        layout=QWEN_MOE_LAYOUT,
        attention_bias="apart",
        usual=qwen2_moe_keys,
        window=window_by_layer,
        experts=read_qwen2_experts,
        max_positions=32768,
    ),
    Family(
        name="olmoe",
        architectures=("OlmoeForCausalLM",),
        attention_bias="stated",
        qk_norm="projection",
        multi_head=True,
        usual=olmoe_keys,
        experts=read_olmoe_experts,
        max_positions=4096,
    ),
    Family(
        name="deepseek_v2",
        architectures=("DeepseekV2ForCausalLM",),
        attention_bias="stated",
        latent=partial(read_latent, interleaved_only=True),
        experts=partial(read_deepseek_experts, sigmoid=False),
        max_positions=2048,
    ),
    Family(
        name="mixtral",
        architectures=("MixtralForCausalLM",),
        layout=MIXTRAL_LAYOUT,
        window=partial(window_everywhere, default=None),
        experts=partial(read_mixtral_experts, sigmoid=False),
        max_positions=4096 * 32,
    ),
    Family(
        name="minimax_m2",
        architectures=("MiniMaxM2ForCausalLM",),
        layout=MIXTRAL_LAYOUT,
        qk_norm="projection",
        head_dim=128,
        partial_rotary=1.0,
        usual=minimax_keys,
        experts=partial(read_mixtral_experts, sigmoid=True),
        max_positions=196608,
    ),
    DEEPSEEK_V3,
    MISTRAL4,
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
    GLM,
    replace(GLM, name="glm4", architectures=("Glm4ForCausalLM",), layout=GLM4_LAYOUT, norms="around"),
    ERNIE4_5,
    replace(
        ERNIE4_5,
        name="ernie4_5_moe",
        architectures=("Ernie4_5_MoeForCausalLM",),
        layout=ERNIE_MOE_LAYOUT,
        head_dim=None,
        experts=read_ernie_experts,
    ),
    GLM4_MOE,
    replace(
        DEEPSEEK_V3,
        name="glm4_moe_lite",
        architectures=("Glm4MoeLiteForCausalLM",),
        usual=one_group_keys,
        experts=read_listed_experts,
        max_positions=202752,
    ),
    GEMMA,
    GEMMA2,
    GEMMA3,
    GEMMA4,
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
    *(Family(name=name, architectures=names, refused=reason) for name, names, reason in _REFUSED),
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
