"""What a checkpoint folder says about its model: ``config.json`` read into frozen facts. Standard library only.

Both spellings in circulation are read: ``rope_theta`` plus ``rope_scaling`` (with ``type`` or ``rope_type``), and the ``rope_parameters``
of transformers 5. A key that would change the computation and isn't supported is an error, never ignored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError
from .keys import Keys, read_architecture, read_config, read_json

FAMILIES = {
    **{name: name for name in ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")},
    "MiMoForCausalLM": "Qwen2ForCausalLM",
}
"""Architectures that can be targets, and the family whose layers each has."""
ARCHITECTURES = tuple(FAMILIES)
GATED_FAMILY = "Qwen3_5ForCausalLM"
"""Full-attention layers of Qwen3-Next and Qwen3.5: gated, query / key norms, norm weights stored minus 1, part of the head rotated."""
HYBRIDS = ("Qwen3Next", "Qwen3_5")
"""Beginnings of architectures whose other layers carry recurrent state."""
ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class RopeFacts:
    """Rotary embedding, every derived default resolved; fields a kind doesn't use keep theirs.

    Sources: RoFormer (arXiv 2104.09864); linear and dynamic NTK scaling; YaRN (arXiv 2309.00071); Llama 3 (arXiv 2407.21783).
    """

    theta: float
    kind: str = "default"
    """One of :data:`ROPE_KINDS`."""
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    """Context before scaling: yarn, llama3; for dynamic the length from which on the base grows."""
    attention_factor: float = 1.0
    """Multiplies cos and sin (yarn)."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    partial_rotary_factor: float = 1.0
    """Part of the head that is rotated, from its first element on; the rest passes."""

    def rotary_dim(self, head_dim: int) -> int:
        """Elements of a head of ``head_dim`` that are rotated."""
        return int(head_dim * self.partial_rotary_factor)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A decoder of the Llama, Mistral, Qwen2 or Qwen3 family, or the full-attention layers of Qwen3.5."""

    path: Path
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    """q, k and v projections have a bias."""
    output_bias: bool
    """The attention's output projection has a bias."""
    mlp_bias: bool
    qk_norm: bool
    """RMSNorm over the head dimension of queries and keys, before RoPE."""
    sliding_window: tuple[int | None, ...]
    """Per layer: a query at p sees positions > p - window; None: all."""
    rope: RopeFacts
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str
    """What the checkpoint says it is stored in; float32 where it doesn't say."""
    attention_gate: bool = False
    """The query projection gives each head a gate beside its query; the sigmoid of it scales the attention's output."""
    norm_offset: bool = False
    """Norm weights are stored minus 1 (Gemma's norm)."""


def _read_partial(keys: Keys, rope: Keys, family: str, head_dim: int) -> float:
    key = "partial_rotary_factor"
    owner = rope if rope.present(key) else keys
    if family != GATED_FAMILY:
        if owner.values.get(key) not in (None, 1.0):
            raise CheckpointError(f"{keys.where}: {key}", "1.0 (all of the head is rotated)", owner.values[key])
        return 1.0
    partial = owner.number(key, 0.25)  # the default of transformers' Qwen3_5TextConfig
    if partial > 1 or int(head_dim * partial) < 2 or int(head_dim * partial) % 2:
        raise owner.error(key, f"at most 1, and an even number of rotated elements in a head of {head_dim}")
    return partial


def _read_rope(keys: Keys, max_position_embeddings: int, family: str, head_dim: int) -> RopeFacts:
    name = "rope_scaling" if keys.values.get("rope_scaling") else "rope_parameters"
    raw = keys.values.get(name)
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        raise keys.error(name, "an object or null")
    nested = [key for key, value in raw.items() if isinstance(value, dict)]
    if nested:
        raise keys.error(name, "one set of parameters for all layers", "parameters per layer type are not supported")
    rope = Keys(raw, f"{keys.where}: {name}")
    kind = raw.get("rope_type", raw.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise rope.error("rope_type" if "rope_type" in raw else "type", "one of " + ", ".join(ROPE_KINDS))
    partial = _read_partial(keys, rope, family, head_dim)
    theta = rope.number("rope_theta") if rope.present("rope_theta") else keys.number("rope_theta", 10000.0)
    if kind == "default":
        return RopeFacts(theta, partial_rotary_factor=partial)
    from_lengths = kind == "yarn" and "factor" in raw and raw["factor"] is None  # null: the ratio of the two context lengths, below
    factor = 0.0 if from_lengths else rope.number("factor")
    if kind == "linear":
        return RopeFacts(theta, kind, factor, partial_rotary_factor=partial)
    if kind == "dynamic":
        return RopeFacts(theta, kind, factor, max_position_embeddings, partial_rotary_factor=partial)
    outer = "original_max_position_embeddings"
    original = keys.integer(outer) if keys.present(outer) else rope.integer(outer, max_position_embeddings)
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if high <= low:
            raise rope.error("high_freq_factor", f"more than low_freq_factor = {low}")
        return RopeFacts(theta, kind, factor, original, low_freq_factor=low, high_freq_factor=high, partial_rotary_factor=partial)
    factor = max_position_embeddings / original if from_lengths else factor

    def magnitude(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if rope.present("attention_factor"):
        attention_factor = rope.number("attention_factor")
    elif raw.get("mscale") and raw.get("mscale_all_dim"):
        attention_factor = magnitude(rope.number("mscale")) / magnitude(rope.number("mscale_all_dim"))
    else:
        attention_factor = magnitude(1.0)
    return RopeFacts(
        theta,
        kind,
        factor,
        original,
        attention_factor,
        beta_fast=rope.number("beta_fast") if raw.get("beta_fast") else 32.0,
        beta_slow=rope.number("beta_slow") if raw.get("beta_slow") else 1.0,
        truncate=rope.flag("truncate", True),
        partial_rotary_factor=partial,
    )


def _read_sliding_window(keys: Keys, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    if architecture == "MistralForCausalLM":
        # transformers' MistralConfig means 4096 when the key is absent; only an explicit null switches the window off
        window = None if keys.values.get("sliding_window", 4096) is None else keys.integer("sliding_window", 4096)
        return (window,) * num_layers
    if (
        architecture in ("LlamaForCausalLM", GATED_FAMILY)
        or not keys.flag("use_sliding_window", False)
        or keys.values.get("sliding_window", 4096) is None
    ):
        return (None,) * num_layers
    window = keys.integer("sliding_window", 4096)
    kinds = keys.values.get("layer_types")
    if kinds is None:
        first = keys.integer("max_window_layers", 28, least=0)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise keys.error("layer_types", f"{num_layers} entries of full_attention or sliding_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _read_eos(keys: Keys, vocab_size: int) -> tuple[int, ...] | None:
    value = keys.values.get("eos_token_id")
    if value is None:
        return None
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token < vocab_size for token in ids):
        raise keys.error("eos_token_id", f"token ids in [0, {vocab_size}), one or a list, or null")
    return tuple(dict.fromkeys(ids))


def _read_dtype(keys: Keys) -> str:
    key = "dtype" if keys.present("dtype") else "torch_dtype"
    value = keys.values.get(key)
    if value is None:
        return "float32"
    if value not in DTYPES:
        raise keys.error(key, "one of " + ", ".join(DTYPES))
    return str(value)


def read_decoder(keys: Keys, path: Path, architecture: str, family: str) -> ModelFacts:
    """Facts of decoder layers that compute as those of ``family`` do, whatever the checkpoint calls itself.

    Raises:
        CheckpointError: a key that is missing, wrong or not supported.
    """
    if keys.values.get("quantization_config"):
        raise keys.error("quantization_config", "no quantization", "only float32, bfloat16 and float16 weights are supported")
    if keys.values.get("hidden_act", "silu") != "silu":
        raise keys.error("hidden_act", "'silu'")
    hidden_size, num_layers, num_heads = (keys.integer(key) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    kv = "num_key_value_heads"
    num_kv_heads = num_heads if keys.values.get(kv) is None and (family == "LlamaForCausalLM" or kv in keys.values) else keys.integer(kv)
    if num_heads % num_kv_heads:
        raise keys.error(kv, f"a divisor of num_attention_heads = {num_heads}")
    if family in ("Qwen3ForCausalLM", GATED_FAMILY) and not keys.present("head_dim"):
        head_dim = 128 if family == "Qwen3ForCausalLM" else 256  # the defaults of transformers, whatever the hidden size
    elif keys.present("head_dim"):
        head_dim = keys.integer("head_dim", least=2)
    elif hidden_size % num_heads:
        raise keys.error("head_dim", f"a head_dim, since hidden_size = {hidden_size} is no multiple of num_attention_heads = {num_heads}")
    else:
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise CheckpointError(f"{keys.where}: head_dim", "an even number (RoPE rotates pairs)", head_dim)
    max_position_embeddings = keys.integer("max_position_embeddings")
    vocab_size = keys.integer("vocab_size")
    gated = family == GATED_FAMILY
    if gated and not keys.flag("attn_output_gate", True):
        raise keys.error("attn_output_gate", "true")
    bias = keys.flag("attention_bias", False) if gated or family in ("LlamaForCausalLM", "Qwen3ForCausalLM") else False
    generation = path / "generation_config.json"
    eos = _read_eos(read_json(generation), vocab_size) if generation.is_file() else None
    if eos is None:
        eos = _read_eos(keys, vocab_size) or ()
    return ModelFacts(
        path=path,
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=keys.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=keys.number("rms_norm_eps"),
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=keys.flag("tie_word_embeddings", False),
        attention_bias=bias or family == "Qwen2ForCausalLM",
        output_bias=bias,
        mlp_bias=keys.flag("mlp_bias", False) if family == "LlamaForCausalLM" else False,
        qk_norm=gated or family == "Qwen3ForCausalLM",
        sliding_window=_read_sliding_window(keys, family, num_layers),
        rope=_read_rope(keys, max_position_embeddings, family, head_dim),
        bos_token_id=keys.integer("bos_token_id", least=0) if isinstance(keys.values.get("bos_token_id"), int) else None,
        eos_token_ids=eos,
        dtype=_read_dtype(keys),
        attention_gate=gated,
        norm_offset=gated,
    )


def read_model_facts(path: str | Path) -> ModelFacts:
    """Facts of a target checkpoint in Hugging Face layout.

    Raises:
        CheckpointError: no folder, no or invalid ``config.json``, a missing or wrong key, an architecture, activation, quantization or RoPE
            type that isn't supported. The message names file and key, what was expected and what was found.
    """
    path = Path(path)
    keys = read_config(path)
    expected = "one of " + ", ".join(ARCHITECTURES)
    architecture = read_architecture(keys, expected)
    if architecture.startswith(HYBRIDS):
        raise keys.error("architectures", expected, "its linear-attention layers need recurrent state, which is not supported")
    if architecture not in FAMILIES:
        raise keys.error("architectures", expected)
    return read_decoder(keys, path, architecture, FAMILIES[architecture])
