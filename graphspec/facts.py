"""What a checkpoint folder says about its model: ``config.json`` read into frozen facts. Standard library only.

Both spellings in circulation are read: ``rope_theta`` plus ``rope_scaling`` (with ``type`` or ``rope_type``), and the ``rope_parameters``
of transformers 5. A key that would change the computation and isn't supported is an error, never ignored.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import CheckpointError

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3")
DTYPES = ("float32", "bfloat16", "float16")

_REQUIRED: Any = object()


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


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A decoder of the Llama, Mistral, Qwen2 or Qwen3 family."""

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


@dataclass(frozen=True, slots=True)
class Eagle3Facts:
    """An EAGLE-3 head (arXiv 2503.01840) that was checked against its target."""

    path: Path
    decoder: ModelFacts
    """Its single layer; RoPE and context from the head's own config, ``vocab_size`` the target's."""
    draft_vocab_size: int
    tap_layers: tuple[int, ...]
    """Ascending i: the target's residual stream entering layer i (``hidden_states[i]`` of transformers)."""
    target_hidden_size: int

    @property
    def feature_size(self) -> int:
        """F: width of the concatenated taps."""
        return len(self.tap_layers) * self.target_hidden_size


class _Keys:
    """Typed look-ups in one json object; every failure names file and key."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def error(self, key: str, expected: object, hint: str = "") -> CheckpointError:
        found = repr(self.values[key]) if key in self.values else "no such key"
        return CheckpointError(f"{self.where}: {key}", expected, found, hint)

    def present(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, key: str, default: Any = _REQUIRED, least: int = 1) -> int:
        value = self.values.get(key) if default is _REQUIRED else self.values.get(key, default)
        if value is None and default is not _REQUIRED:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.error(key, f"an integer >= {least}")
        return value

    def number(self, key: str, default: Any = _REQUIRED) -> float:
        value = self.values.get(key)
        if value is None and default is not _REQUIRED:
            value = default
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
            raise self.error(key, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value


def _read_json(path: Path) -> _Keys:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(str(path), "a readable json file", f"{type(error).__name__}: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(str(path), "a json object", type(values).__name__)
    return _Keys(values, str(path))


def _read_config(path: Path) -> _Keys:
    if not path.is_dir():
        raise CheckpointError(str(path), "a folder with a Hugging Face checkpoint", "a file" if path.exists() else "nothing there")
    config = path / "config.json"
    if not config.is_file():
        raise CheckpointError(str(config), "the checkpoint's config.json", "no such file")
    return _read_json(config)


def _architecture(keys: _Keys, expected: str) -> str:
    names = keys.values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise keys.error("architectures", expected)
    return names[0]


def _read_rope(keys: _Keys, max_position_embeddings: int) -> RopeFacts:
    name = "rope_scaling" if keys.values.get("rope_scaling") else "rope_parameters"
    raw = keys.values.get(name)
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        raise keys.error(name, "an object or null")
    nested = [key for key, value in raw.items() if isinstance(value, dict)]
    if nested:
        raise keys.error(name, "one set of parameters for all layers", "parameters per layer type are not supported")
    rope = _Keys(raw, f"{keys.where}: {name}")
    kind = raw.get("rope_type", raw.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise rope.error("rope_type" if "rope_type" in raw else "type", "one of " + ", ".join(ROPE_KINDS))
    partial = raw.get("partial_rotary_factor", keys.values.get("partial_rotary_factor"))
    if partial not in (None, 1.0):
        raise CheckpointError(f"{keys.where}: partial_rotary_factor", "1.0 (all of the head is rotated)", partial)
    theta = rope.number("rope_theta") if rope.present("rope_theta") else keys.number("rope_theta", 10000.0)
    if kind == "default":
        return RopeFacts(theta)
    from_lengths = kind == "yarn" and "factor" in raw and raw["factor"] is None  # null: the ratio of the two context lengths, below
    factor = 0.0 if from_lengths else rope.number("factor")
    if kind == "linear":
        return RopeFacts(theta, kind, factor)
    if kind == "dynamic":
        return RopeFacts(theta, kind, factor, max_position_embeddings)
    outer = "original_max_position_embeddings"
    original = keys.integer(outer) if keys.present(outer) else rope.integer(outer, max_position_embeddings)
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if high <= low:
            raise rope.error("high_freq_factor", f"more than low_freq_factor = {low}")
        return RopeFacts(theta, kind, factor, original, low_freq_factor=low, high_freq_factor=high)
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
    )


def _read_sliding_window(keys: _Keys, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    if architecture == "MistralForCausalLM":
        # transformers' MistralConfig means 4096 when the key is absent; only an explicit null switches the window off
        window = None if keys.values.get("sliding_window", 4096) is None else keys.integer("sliding_window", 4096)
        return (window,) * num_layers
    if architecture == "LlamaForCausalLM" or not keys.flag("use_sliding_window", False) or keys.values.get("sliding_window", 4096) is None:
        return (None,) * num_layers
    window = keys.integer("sliding_window", 4096)
    kinds = keys.values.get("layer_types")
    if kinds is None:
        first = keys.integer("max_window_layers", 28, least=0)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise keys.error("layer_types", f"{num_layers} entries of full_attention or sliding_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _read_eos(keys: _Keys, vocab_size: int) -> tuple[int, ...] | None:
    value = keys.values.get("eos_token_id")
    if value is None:
        return None
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token < vocab_size for token in ids):
        raise keys.error("eos_token_id", f"token ids in [0, {vocab_size}), one or a list, or null")
    return tuple(dict.fromkeys(ids))


def _read_dtype(keys: _Keys) -> str:
    key = "dtype" if keys.present("dtype") else "torch_dtype"
    value = keys.values.get(key)
    if value is None:
        return "float32"
    if value not in DTYPES:
        raise keys.error(key, "one of " + ", ".join(DTYPES))
    return str(value)


def _read_decoder(keys: _Keys, path: Path, architecture: str, family: str) -> ModelFacts:
    if keys.values.get("quantization_config"):
        raise keys.error("quantization_config", "no quantization", "only float32, bfloat16 and float16 weights are supported")
    if keys.values.get("hidden_act", "silu") != "silu":
        raise keys.error("hidden_act", "'silu'")
    hidden_size, num_layers, num_heads = (keys.integer(key) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    kv = "num_key_value_heads"
    num_kv_heads = num_heads if keys.values.get(kv) is None and (family == "LlamaForCausalLM" or kv in keys.values) else keys.integer(kv)
    if num_heads % num_kv_heads:
        raise keys.error(kv, f"a divisor of num_attention_heads = {num_heads}")
    if family == "Qwen3ForCausalLM" and not keys.present("head_dim"):
        head_dim = 128  # the default of transformers' Qwen3Config, whatever the hidden size
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
    bias = keys.flag("attention_bias", False) if family in ("LlamaForCausalLM", "Qwen3ForCausalLM") else False
    generation = path / "generation_config.json"
    eos = _read_eos(_read_json(generation), vocab_size) if generation.is_file() else None
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
        qk_norm=family == "Qwen3ForCausalLM",
        sliding_window=_read_sliding_window(keys, family, num_layers),
        rope=_read_rope(keys, max_position_embeddings),
        bos_token_id=keys.integer("bos_token_id", least=0) if isinstance(keys.values.get("bos_token_id"), int) else None,
        eos_token_ids=eos,
        dtype=_read_dtype(keys),
    )


def read_model_facts(path: str | Path) -> ModelFacts:
    """Facts of a target checkpoint in Hugging Face layout.

    Raises:
        CheckpointError: no folder, no or invalid ``config.json``, a missing or wrong key, an architecture, activation, quantization or RoPE
            type that isn't supported. The message names file and key, what was expected and what was found.
    """
    path = Path(path)
    keys = _read_config(path)
    expected = "one of " + ", ".join(ARCHITECTURES)
    architecture = _architecture(keys, expected)
    if architecture not in ARCHITECTURES:
        raise keys.error("architectures", expected)
    return _read_decoder(keys, path, architecture, architecture)


_EAGLE3_OPTIONS = ("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc")


def _read_tap_layers(keys: _Keys, eagle: _Keys, num_layers: int) -> tuple[int, ...]:
    key = "eagle_aux_hidden_state_layer_ids"
    owner = eagle if eagle.present(key) else keys
    if owner.present(key):
        ids = owner.values[key]
        if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise owner.error(key, "a list of layer ids")
        taps = tuple(i + 1 for i in ids)  # the config counts by the layer whose output is meant
        if list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] >= num_layers:
            raise owner.error(key, f"ascending, distinct ids from -1 to {num_layers - 2} (the target has {num_layers} layers)")
    else:
        taps = (2, num_layers // 2, num_layers - 3)
        if list(taps) != sorted(set(taps)):
            raise CheckpointError(
                f"{keys.where}: eagle_config.{key}",
                "explicit layer ids",
                f"none, and the default layers {taps} collide in a target of {num_layers} layers",
            )
    if keys.present("num_aux_hidden_states") and keys.integer("num_aux_hidden_states") != len(taps):
        raise keys.error("num_aux_hidden_states", f"{len(taps)}, the number of tapped layers {taps}")
    return taps


def read_eagle3_facts(path: str | Path, target: ModelFacts) -> Eagle3Facts:
    """Facts of an EAGLE-3 head, checked against the target it drafts for.

    A head calls itself by an architecture with "Eagle3" in its name, or ``LlamaForCausalLM`` with a ``draft_vocab_size`` (the first
    published heads). RoPE parameters come from the head's config only: without a ``rope_theta`` it was trained with 10000, whatever the
    target uses.

    Raises:
        CheckpointError: as :func:`read_model_facts`; also another kind of draft, one that doesn't fit the target (hidden size, vocabulary,
            tapped layers), or an option that isn't supported.
    """
    path = Path(path)
    keys = _read_config(path)
    expected = "an EAGLE-3 head (LlamaForCausalLMEagle3, or LlamaForCausalLM with a draft_vocab_size)"
    architecture = _architecture(keys, expected)
    if "eagle3" not in architecture.lower() and not (architecture == "LlamaForCausalLM" and keys.present("draft_vocab_size")):
        raise keys.error("architectures", expected, "a whole language model or an EAGLE-1/2 head belongs to another variant")
    nested = keys.values.get("eagle_config")
    if nested is not None and not isinstance(nested, dict):
        raise keys.error("eagle_config", "an object")
    eagle = _Keys(nested or {}, f"{keys.where}: eagle_config")
    for owner in (keys, eagle):
        for option in _EAGLE3_OPTIONS:
            if owner.values.get(option):
                raise owner.error(option, "absent or false", "this option is not supported")
    if not eagle.flag("use_aux_hidden_state", True):
        raise eagle.error("use_aux_hidden_state", "true (EAGLE-3 reads intermediate layers of its target)")
    if keys.integer("num_hidden_layers", 1) != 1:
        raise keys.error("num_hidden_layers", "1")
    keys.values.setdefault("num_hidden_layers", 1)
    decoder = _read_decoder(keys, path, architecture, "LlamaForCausalLM")
    if decoder.vocab_size != target.vocab_size:
        raise keys.error("vocab_size", f"{target.vocab_size}, as in {target.path}", "head and target must share one vocabulary")
    width = "target_hidden_size" if keys.present("target_hidden_size") else "hidden_size"
    if keys.integer(width) != target.hidden_size:
        raise keys.error(width, f"{target.hidden_size}, as in {target.path}")
    draft_vocab_size = keys.integer("draft_vocab_size", decoder.vocab_size)
    if draft_vocab_size > decoder.vocab_size:
        raise keys.error("draft_vocab_size", f"at most vocab_size = {decoder.vocab_size}")
    return Eagle3Facts(path, decoder, draft_vocab_size, _read_tap_layers(keys, eagle, target.num_layers), target.hidden_size)
