"""What differs from layer to layer: sliding windows and rotation, under the names that configs give them. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .keys import MAX_LAYERS, Keys, is_integer
from .rope import LAYER_KINDS

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
    """The window of each layer: :func:`window_by_flag`, limited to the layers named by ``layer_types`` or ``max_window_layers``.

    Raises:
        CheckpointError: as there, or a list of another length or of other kinds of layers.
    """
    windows = window_by_flag(keys, num_layers)
    kinds = keys.values.get("layer_types")
    if not any(windows):
        return windows
    if kinds is None:
        first = keys.integer("max_window_layers", 28, minimum=0)
        return tuple(window if layer >= first else None for layer, window in enumerate(windows))
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in known for kind in kinds):
        raise keys.error("layer_types", f"{num_layers} entries of full_attention or sliding_attention")
    return tuple(window if kind == "sliding_attention" else None for kind, window in zip(kinds, windows, strict=True))


def window_by_kind(keys: Keys, num_layers: int) -> tuple[int | None, ...]:
    """The window in the layers that ``layer_types`` calls sliding; null means that there is none.

    Raises:
        CheckpointError: no integer, or a list of another length or of other kinds of layers.
    """
    kinds = keys.values.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in LAYER_KINDS for kind in kinds):
        raise keys.error("layer_types", f"{num_layers} entries of {' or '.join(LAYER_KINDS)}")
    windows = window_everywhere(keys, num_layers, None)
    return tuple(window if kind == "sliding_attention" else None for kind, window in zip(kinds, windows, strict=True))


def _every(keys: Keys, period: int) -> list[str]:
    """Kinds of layers of which every ``period``-th sees everything."""
    count = keys.integer("num_hidden_layers", maximum=MAX_LAYERS)
    return ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(count)]


def _states_base(keys: Keys) -> bool:
    places = (keys.values, keys.values.get("rope_parameters"), keys.values.get("rope_scaling"))
    return any(isinstance(place, dict) and place.get("rope_theta") is not None for place in places)


def _first(*values: object) -> object:
    """The first value that is not null."""
    return next(value for value in values if value is not None)


def _by_kind(values: dict[str, object], full_theta: object, sliding_theta: object, scaled: tuple[str, ...]) -> dict[str, object]:
    """``rope_parameters`` by kind of layer, from ``rope_theta``, ``rope_local_base_freq`` and ``rope_scaling``.

    Args:
        values: of the config.
        full_theta: base of layers that see everything, where the config doesn't say.
        sliding_theta: of the others.
        scaled: kinds that ``rope_scaling`` is about.
    """
    stated, scaling = values.get("rope_parameters"), values.get("rope_scaling") or {}
    if isinstance(stated, dict) and any(isinstance(value, dict) for value in stated.values()):
        return values
    flat = {**(stated if isinstance(stated, dict) else {}), **(scaling if isinstance(scaling, dict) else {})}
    theta = _first(flat.pop("rope_theta", None), values.get("rope_theta"), full_theta)
    bases = {"full_attention": theta, "sliding_attention": _first(values.get("rope_local_base_freq"), sliding_theta)}
    ropes = {kind: {**(flat if kind in scaled else {}), "rope_theta": base} for kind, base in bases.items()}
    rest = {key: value for key, value in values.items() if key not in ("rope_theta", "rope_scaling", "rope_local_base_freq")}
    return {**rest, "rope_parameters": ropes}


def mistral4_keys(keys: Keys) -> Keys:
    """Mistral Small 4's config without ``partial_rotary_factor`` of its RoPE: the share of a head that ``qk_rope_head_dim`` says.

    Raises:
        CheckpointError: another share.
    """
    name = "rope_parameters" if keys.present("rope_parameters") else "rope_scaling"
    rope = keys.values.get(name)
    if not isinstance(rope, dict) or rope.get("partial_rotary_factor") is None:
        return keys
    rotated = keys.integer("qk_rope_head_dim")
    share = rotated / (rotated + keys.integer("qk_nope_head_dim"))
    if rope["partial_rotary_factor"] != share:
        raise Keys(rope, f"{keys.where}: {name}").error("partial_rotary_factor", f"{share:g}, the share of qk_rope_head_dim")
    return Keys({**keys.values, name: {key: value for key, value in rope.items() if key != "partial_rotary_factor"}}, keys.where)


def minimax_keys(keys: Keys) -> Keys:
    """MiniMax-M2's config with ``partial_rotary_factor`` in place of ``rotary_dim``, and its base where none is stated.

    Raises:
        CheckpointError: a width that is none.
    """
    values = dict(keys.values)
    if keys.present("rotary_dim") and not keys.present("partial_rotary_factor"):
        values["partial_rotary_factor"] = keys.integer("rotary_dim") / keys.integer("head_dim", 128)
    if not _states_base(keys):
        values["rope_theta"] = 5000000.0
    return Keys(values, keys.where)


def gemma_keys(keys: Keys) -> Keys:
    """Gemma's config with the usual name of the activation; the first releases write "gelu" and mean the tanh approximation.

    Raises:
        CheckpointError: another activation.
    """
    values = dict(keys.values)
    name = "hidden_activation" if keys.present("hidden_activation") else "hidden_act"
    if values.get(name, "gelu") not in ("gelu", "gelu_pytorch_tanh"):
        raise keys.error(name, "gelu_pytorch_tanh")
    values["hidden_act"] = "gelu_pytorch_tanh"
    return Keys(values, keys.where)


def gemma2_keys(keys: Keys) -> Keys:
    """Gemma 2's config with ``layer_types``: every second layer sees everything.

    Raises:
        CheckpointError: another activation.
    """
    stated = {key: value for key, value in keys.values.items() if value is not None}
    defaults = {"query_pre_attn_scalar": 256, "sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    absent = {key: value for key, value in defaults.items() if key not in keys.values}
    usual = gemma_keys(Keys({**absent, **stated}, keys.where))
    if not keys.present("layer_types"):
        usual.values["layer_types"] = _every(usual, 2)
    return usual


_GEMMA3 = {
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 256, "sliding_window": 4096,
}  # fmt: skip
"""What published configs of models that see images leave to the defaults of transformers."""


def gemma3_keys(keys: Keys) -> Keys:
    """Gemma 3's config with ``layer_types`` and ``rope_parameters`` by kind of layer.

    Raises:
        CheckpointError: another activation, or attention in both directions.
    """
    stated = {key: value for key, value in keys.values.items() if value is not None}
    usual = gemma_keys(Keys({**_GEMMA3, **stated}, keys.where))
    if keys.flag("use_bidirectional_attention", False):
        raise keys.error("use_bidirectional_attention", "false")
    if not keys.present("layer_types"):
        usual.values["layer_types"] = _every(usual, keys.integer("sliding_window_pattern", 6))
    return Keys(_by_kind(usual.values, 1e6, 1e4, ("full_attention",)), keys.where)


_GEMMA4 = {
    "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6, "sliding_window": 512, "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
}  # fmt: skip
"""What transformers takes for granted."""


def gemma4_keys(keys: Keys) -> Keys:
    """Gemma 4's config with ``layer_types``, of which the last is always full attention.

    Raises:
        CheckpointError: another activation, or attention in both directions.
    """
    stated = {key: value for key, value in keys.values.items() if value is not None}
    usual = Keys({**_GEMMA4, **stated}, keys.where)
    if usual.values["hidden_activation"] != "gelu_pytorch_tanh":
        raise usual.error("hidden_activation", "gelu_pytorch_tanh")
    usual.values["hidden_act"] = "gelu_pytorch_tanh"
    if usual.values.get("use_bidirectional_attention") not in (None, False, "vision"):  # of images alone
        raise usual.error("use_bidirectional_attention", "vision or null")
    kinds = usual.values.get("layer_types", _every(usual, 6))
    if isinstance(kinds, list) and kinds:
        usual.values["layer_types"] = [*kinds[:-1], "full_attention"]
    return usual


def olmo3_keys(keys: Keys) -> Keys:
    """OLMo 3's config with ``layer_types``, and ``rope_parameters`` by kind of layer: only layers that see everything are scaled.

    Raises:
        CheckpointError: no number of layers.
    """
    values = {"sliding_window": 4096, **keys.values}
    if not keys.present("layer_types"):
        values["layer_types"] = _every(keys, 4)
    theta = _first(values.get("rope_theta"), 5e5)
    return Keys(_by_kind(values, theta, theta, ("full_attention",)), keys.where)


def exaone_keys(keys: Keys) -> Keys:
    """Exaone 4's config with ``layer_types``.

    Raises:
        CheckpointError: no number of layers, or a pattern that is none.
    """
    values = {"sliding_window": 4096, **keys.values}
    if values["sliding_window"] is None:
        values["layer_types"] = ["full_attention"] * keys.integer("num_hidden_layers", maximum=MAX_LAYERS)
    elif not keys.present("layer_types"):
        pattern = values.get("sliding_window_pattern", 4)
        if pattern == "LLLG":  # three local layers, one global
            pattern = 4
        if not is_integer(pattern) or pattern < 1:
            raise keys.error("sliding_window_pattern", "LLLG, or every how many layers one sees everything")
        values["layer_types"] = _every(keys, pattern)
    return Keys(values, keys.where)


def smollm3_keys(keys: Keys) -> Keys:
    """SmolLM3's config with ``no_rope_layers`` and ``layer_types``: with ``use_sliding_window``, layers without rotation have the window.

    Raises:
        CheckpointError: flags that are none, or not one for each layer.
    """
    count = keys.integer("num_hidden_layers", maximum=MAX_LAYERS)
    values = {**({} if _states_base(keys) else {"rope_theta": 2e6}), **keys.values}
    flags = keys.integers("no_rope_layers", f"{count} flags, 1 where a layer rotates", 0, 1)
    if not flags:
        interval = keys.integer("no_rope_layer_interval", 4)
        flags = values["no_rope_layers"] = [int((layer + 1) % interval != 0) for layer in range(count)]
    if len(flags) != count:
        raise keys.error("no_rope_layers", f"{count} flags, 1 where a layer rotates")
    if not keys.flag("use_sliding_window", False):
        values["sliding_window"] = None
    if not keys.present("layer_types"):
        windowed = values.get("sliding_window") is not None
        values["layer_types"] = ["sliding_attention" if windowed and not rotates else "full_attention" for rotates in flags]
    return Keys(values, keys.where)


def gpt_oss_keys(keys: Keys) -> Keys:
    """gpt-oss's config with ``layer_types``, where every second layer sees everything, and what transformers takes for granted.

    Raises:
        CheckpointError: no number of layers.
    """
    stated = {key: value for key, value in keys.values.items() if value is not None}
    values = {"attention_bias": True, "sliding_window": 128, **stated}
    if "sliding_window" in keys.values and keys.values["sliding_window"] is None:
        values["sliding_window"] = None
    if not keys.present("dtype") and not keys.present("torch_dtype"):
        values["dtype"] = "bfloat16"
    if not keys.present("layer_types"):
        values["layer_types"] = _every(keys, 2)
    if not _states_base(keys):
        values["rope_theta"] = 150000.0
    if not keys.present("rope_parameters") and not keys.present("rope_scaling"):
        values["rope_scaling"] = {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        }  # fmt: skip
    return Keys(values, keys.where)


def one_group_keys(keys: Keys) -> Keys:
    """The config with experts in one group where it doesn't say, as transformers takes it."""
    stated = {key: value for key, value in keys.values.items() if value is not None}
    return Keys({**keys.values, **{key: stated.get(key, 1) for key in ("n_group", "topk_group")}}, keys.where)


def qwen2_moe_keys(keys: Keys) -> Keys:
    """Qwen2-MoE's config with ``qkv_bias`` under the usual names, and ``layer_types`` where there is a window: in every second of the first
    layers, beginning with the first, as transformers has it.

    Raises:
        CheckpointError: flags that are none, or no number of layers.
    """
    values = {**keys.values, "attention_bias": keys.flag("qkv_bias", True), "attention_out_bias": False}
    if values.get("sliding_window") == 0:  # as transformers writes it where there is none
        values["sliding_window"] = None
    if keys.flag("use_sliding_window", False) and not keys.present("layer_types"):
        count, end = keys.integer("num_hidden_layers", maximum=MAX_LAYERS), keys.integer("max_window_layers", 28, minimum=0)
        values["layer_types"] = ["full_attention" if layer % 2 or layer >= end else "sliding_attention" for layer in range(count)]
    return Keys(values, keys.where)


def olmoe_keys(keys: Keys) -> Keys:
    """OLMoE's config.

    Raises:
        CheckpointError: queries, keys and values that are clipped.
    """
    if keys.present("clip_qkv"):
        raise keys.error("clip_qkv", "null: clipped queries, keys and values are not supported")
    return keys


def ernie_keys(keys: Keys) -> Keys:
    """Ernie 4.5's config with ``use_bias`` under the usual names, and its base where none is stated.

    Raises:
        CheckpointError: a flag that is none.
    """
    biased = keys.flag("use_bias", False)
    theta = {} if _states_base(keys) else {"rope_theta": 500000.0}
    return Keys({**keys.values, **theta, "attention_bias": biased, "mlp_bias": biased}, keys.where)


def glm_keys(keys: Keys) -> Keys:
    """GLM's config with the biases that transformers takes for granted.

    Raises:
        CheckpointError: a flag that is none.
    """
    return Keys({**keys.values, "attention_bias": keys.flag("attention_bias", True), "attention_out_bias": False}, keys.where)


def dots_keys(keys: Keys) -> Keys:
    """Dots 1's config with ``layer_types``: the last layers have the window.

    Raises:
        CheckpointError: no number of layers.
    """
    values = {"sliding_window": 4096, "norm_topk_prob": False, **one_group_keys(keys).values}
    if not keys.present("layer_types"):
        count, first = keys.integer("num_hidden_layers", maximum=MAX_LAYERS), keys.integer("max_window_layers", 62, minimum=0)
        windowed = values["sliding_window"] is not None
        values["layer_types"] = ["sliding_attention" if windowed and layer >= first else "full_attention" for layer in range(count)]
    return Keys(values, keys.where)


def listed_layers_rotate(keys: Keys, windows: Sequence[int | None]) -> tuple[bool, ...]:
    """Layers that ``no_rope_layers`` has a 1 for."""
    del windows
    return tuple(flag == 1 for flag in keys.values["no_rope_layers"])


def full_layers_pass(keys: Keys, windows: Sequence[int | None]) -> tuple[bool, ...]:
    """Where some layers have a window, only these rotate."""
    del keys
    return tuple(window is not None or not any(windows) for window in windows)
