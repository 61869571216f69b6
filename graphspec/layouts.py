"""How checkpoints name their tensors: tables that :mod:`graphspec.weights` interprets. Data only, standard library only.

``*`` stands for a layer index. A rule with several sources concatenates them along the output rows, in order.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorRule:
    """One parameter of ours, and the checkpoint tensors it is made of."""

    ours: str
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """The whole table of one kind of checkpoint."""

    rules: tuple[TensorRule, ...]
    ignored: tuple[str, ...] = ()
    """Tensors that may be there and aren't loaded, each for the reason beside it."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Prefixes in circulation, and what the rules call them."""


def _decoder(ours: str, theirs: str) -> tuple[TensorRule, ...]:
    def rule(name: str, *sources: str) -> tuple[TensorRule, ...]:
        return tuple(TensorRule(f"{ours}{name}.{kind}", tuple(f"{theirs}{s}.{kind}" for s in sources)) for kind in ("weight", "bias"))

    return (
        *rule("self_attn.qkv_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        *rule("self_attn.o_proj", "self_attn.o_proj"),
        *rule("mlp.gate_up_proj", "mlp.gate_proj", "mlp.up_proj"),
        *rule("mlp.down_proj", "mlp.down_proj"),
        *(
            TensorRule(f"{ours}{name}.weight", (f"{theirs}{name}.weight",))
            for name in ("self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "hidden_norm", "post_attention_layernorm")
        ),
    )


LLAMA_LAYOUT = Layout(
    rules=(
        TensorRule("embed_tokens.weight", ("model.embed_tokens.weight",)),
        *_decoder("layers.*.", "model.layers.*."),
        TensorRule("norm.weight", ("model.norm.weight",)),
        TensorRule("lm_head.weight", ("lm_head.weight",)),
    ),
    ignored=("model.layers.*.self_attn.rotary_emb.inv_freq",),  # derived from config.json
)
"""Llama, Mistral, Qwen2 and Qwen3: biases and query / key norms only where the model has them."""

EAGLE3_LAYOUT = Layout(
    rules=(
        TensorRule("fc.weight", ("fc.weight",)),
        TensorRule("embed_tokens.weight", ("embed_tokens.weight",)),
        *_decoder("midlayer.", "midlayer."),
        TensorRule("norm.weight", ("norm.weight",)),
        TensorRule("lm_head.weight", ("lm_head.weight",)),
    ),
    ignored=(
        "midlayer.self_attn.rotary_emb.inv_freq",  # derived from config.json
        "t2d",  # the inverse of d2t: checked against it, then dropped
        "d2t",  # becomes the buffer target_token_Vd
    ),
    renamed=(("layers.0.", "midlayer."),),
)
"""The first published heads and SpecForge say ``midlayer``; speculators and vLLM say ``layers.0``."""
