"""Families of decoders with recurrent layers, one row each, for :mod:`graphspec.facts.families`. Standard library only."""

from __future__ import annotations

from dataclasses import replace

from .family import Family
from .layouts import BAMBA_LAYOUT, GRANITE_LAYOUT, NEMOTRON_LAYOUT, QWEN3_5_LAYOUT, QWEN3_NEXT_LAYOUT
from .mamba import (
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
from .moe import read_qwen3_5_experts, read_qwen3_next_experts
from .multipliers import read_falcon_multipliers, read_granite_multipliers
from .recurrent import read_gated_delta

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
