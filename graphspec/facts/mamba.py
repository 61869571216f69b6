"""Hybrids of attention and Mamba-2 (arXiv 2405.21060) as ``config.json`` describes them. Standard library only."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, cast

from .keys import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Keys
from .moe import ExpertFacts, read_deepseek_experts, read_qwen3_experts
from .recurrent import MAX_CONVOLUTION, RecurrentFacts, SsmFacts

Mixer = Literal["recurrent", "attention", "mlp"]
"""What a layer holds, where it holds one of them; an MLP may be a mixture of experts."""
_MIXERS: dict[str, Mixer] = {"linear_attention": "recurrent", "full_attention": "attention", "mlp": "mlp", "moe": "mlp"}
_PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_OLDER = {"mamba": "linear_attention", "attention": "full_attention"}
_NO_LIMIT: tuple[object, ...] = (None, float("inf"), {"__float__": "Infinity"})
"""Upper limits that are none: infinity has two spellings in json."""


def _list_layers(keys: Keys, key: str, kinds: tuple[str, ...]) -> list[str]:
    """The kinds of the layers under their newer names, one recurrent or attending layer at least."""
    value = keys.values.get(key)
    layers = [_OLDER.get(kind, kind) if isinstance(kind, str) else kind for kind in value] if isinstance(value, list) else None
    if not layers or len(layers) > MAX_LAYERS or not all(kind in kinds for kind in layers):
        raise keys.error(key, f"a list of {' or '.join(kinds)}")
    if "full_attention" not in layers:
        raise keys.error(key, "at least one layer that attends")
    return layers


def nemotron_keys(keys: Keys) -> Keys:
    """Nemotron-H's config with the usual keys: ``layer_types``, their number, the norms' epsilon, the width of a head.

    Raises:
        CheckpointError: layers that can't be read, or another activation.
    """
    values = dict(keys.values)
    pattern, listed = "hybrid_override_pattern", next((key for key in ("layers_block_type", "layer_types") if keys.present(key)), None)
    if listed is None:
        written = values.get(pattern)
        if not isinstance(written, str) or not written or len(written) > MAX_LAYERS or not set(written) <= set(_PATTERN):
            raise keys.error(pattern, f"layers_block_type, or one of {' '.join(_PATTERN)} for each layer")
        if "*" not in written:
            raise keys.error(pattern, "at least one layer that attends (*)")
        values["layer_types"] = [_PATTERN[letter] for letter in written]
    else:
        values["layer_types"] = _list_layers(keys, listed, tuple(_MIXERS))
    for key, expected in (("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")):
        if values.get(key, expected) != expected:
            raise keys.error(key, repr(expected))
    values["num_hidden_layers"] = len(values["layer_types"])
    for theirs, ours in (("layer_norm_epsilon", "rms_norm_eps"), ("attention_head_dim", "head_dim")):
        if not keys.present(ours) and keys.present(theirs):
            values[ours] = values[theirs]
    return Keys(values, keys.where)


def granite_keys(keys: Keys) -> Keys:
    """Granite 4's config with the usual keys: the MLP that every token goes to has ``intermediate_size`` where there are no experts.

    Raises:
        CheckpointError: layers that can't be read.
    """
    values = dict(keys.values)
    listed = next((key for key in ("layer_types", "layers_block_type") if keys.present(key)), None)
    if listed is None:
        raise keys.error("layer_types", "the kinds of all layers")
    values["layer_types"] = _list_layers(keys, listed, ("linear_attention", "full_attention"))
    values["moe_intermediate_size"] = values.get("intermediate_size")
    values["intermediate_size"] = keys.integer("shared_intermediate_size", 1024, maximum=MAX_WIDTH)
    return Keys(values, keys.where)


def bamba_keys(keys: Keys) -> Keys:
    """Bamba's config with ``layer_types`` from the layers that it says attend.

    Raises:
        CheckpointError: no list of layers, or none that attends.
    """
    count = keys.integer("num_hidden_layers", maximum=MAX_LAYERS)
    attending = keys.integers("attn_layer_indices", f"a list of layers from 0 to {count - 1}", 0, count - 1)
    if not attending:
        raise keys.error("attn_layer_indices", "at least one layer that attends")
    kinds = ["full_attention" if layer in attending else "linear_attention" for layer in range(count)]
    return Keys({**keys.values, "layer_types": kinds}, keys.where)


def read_mixers(keys: Keys, num_layers: int) -> tuple[Mixer, ...]:
    """What each layer holds, from a list that was read before."""
    kinds = cast("list[str]", keys.values["layer_types"])
    assert len(kinds) == num_layers, "counted from this list"
    return tuple(_MIXERS[kind] for kind in kinds)


def read_nemotron_ssm(keys: Keys, num_layers: int) -> RecurrentFacts | None:
    """Nemotron-H's recurrent layers; None where there are none.

    Raises:
        CheckpointError: a key that is missing, wrong or not supported.
    """
    layers = tuple(mixer == "recurrent" for mixer in read_mixers(keys, num_layers))
    names = ("mamba_num_heads", "n_groups", "ssm_state_size", "mamba_head_dim", "conv_kernel", "use_conv_bias", "use_bias")
    return _read_ssm(keys, layers, *names)


def read_granite_ssm(keys: Keys, num_layers: int) -> RecurrentFacts | None:
    """Recurrent layers of Granite 4 and Bamba; None where there are none.

    Raises:
        CheckpointError: a key that is missing, wrong or not supported.
    """
    kinds = cast("list[str]", keys.values["layer_types"])
    if len(kinds) != num_layers:
        raise keys.error("layer_types", f"{num_layers} entries")
    layers = tuple(kind == "linear_attention" for kind in kinds)
    if keys.values.get("mamba_d_head") in (None, "auto"):
        width = keys.integer("mamba_expand", 2) * keys.integer("hidden_size", maximum=MAX_WIDTH)
        heads = keys.integer("mamba_n_heads", 128, maximum=MAX_HEADS)
        keys = Keys({**keys.values, "mamba_d_head": width // heads}, keys.where)
    names = ("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv", "mamba_conv_bias", "mamba_proj_bias")
    return _read_ssm(keys, layers, *names)


def read_falcon_ssm(keys: Keys, num_layers: int) -> RecurrentFacts | None:
    """Falcon-H1's recurrent nets, one in every layer.

    Raises:
        CheckpointError: a key that is missing, wrong or not supported.
    """
    for key in ("mamba_proj_bias", "projectors_bias"):
        if keys.flag(key, False):
            raise keys.error(key, "false (a multiplier of the input would not be one of the output)")
    normed = keys.flag("mamba_rms_norm", False)
    if normed and keys.flag("mamba_norm_before_gate", True):
        raise keys.error("mamba_norm_before_gate", "false (a norm before the output gate is not supported)")
    if keys.values.get("mamba_d_ssm", 1024) is not None:
        width = keys.integer("mamba_d_ssm", 1024, maximum=MAX_WIDTH)
        heads = keys.integer("mamba_n_heads", 128, maximum=MAX_HEADS)
        if width % heads or keys.values.get("mamba_d_head") not in (None, "auto", width // heads):
            raise keys.error("mamba_d_ssm", f"mamba_n_heads = {heads} times mamba_d_head")
        keys = Keys({**keys.values, "mamba_d_head": width // heads}, keys.where)
    facts = read_granite_ssm(Keys({**keys.values, "layer_types": ["linear_attention"] * num_layers}, keys.where), num_layers)
    assert facts is not None and facts.ssm is not None, "every layer has such a net"
    return replace(facts, ssm=replace(facts.ssm, norm=normed))


def _read_ssm(
    keys: Keys, layers: tuple[bool, ...], heads: str, groups: str, state: str, head_dim: str, taps: str, conv_bias: str, bias: str
) -> RecurrentFacts | None:
    """Reads Mamba-2 sizes from the keys that a family uses for them.

    Steps are not clamped, neither in prompts nor in decoding. transformers clamps those of Nemotron-H's prompts from below, by
    ``time_step_min``, and of no decoded token: with one rule a prompt leaves what decoding it would leave.
    """
    if not any(layers):
        return None
    limit = keys.values.get("time_step_limit")
    if limit is not None and (not isinstance(limit, list) or len(limit) != 2 or limit[0] != 0 or limit[1] not in _NO_LIMIT):
        raise keys.error("time_step_limit", "[0.0, Infinity] (steps that are clamped are not supported)")
    value_heads, key_heads = keys.integer(heads, maximum=MAX_HEADS), keys.integer(groups, maximum=MAX_HEADS)
    if value_heads % key_heads:
        raise keys.error(heads, f"a multiple of {groups} = {key_heads}")
    return RecurrentFacts(
        layers=layers,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=keys.integer(state, maximum=MAX_HEAD_DIM),
        value_dim=keys.integer(head_dim, maximum=MAX_HEAD_DIM),
        taps=keys.integer(taps, 4, minimum=2, maximum=MAX_CONVOLUTION),
        ssm=SsmFacts(keys.flag(conv_bias, True), keys.flag(bias, False)),
    )


def read_nemotron_experts(keys: Keys, num_layers: int) -> ExpertFacts | None:
    """Nemotron-H's mixtures, routed as DeepSeek-V3's; in Nemotron 3 Super over a compressed stream. None where no layer is one.

    Raises:
        CheckpointError: a key that is missing, wrong or not supported.
    """
    layers = tuple(kind == "moe" for kind in cast("list[str]", keys.values["layer_types"]))
    if not any(layers):
        return None
    latent = keys.integer("moe_latent_size", maximum=MAX_WIDTH) if keys.present("moe_latent_size") else 0
    facts = read_deepseek_experts(Keys({**keys.values, "n_shared_experts": 0}, keys.where), num_layers, sigmoid=True)
    shared = keys.integer("moe_shared_expert_intermediate_size", maximum=MAX_WIDTH)
    return replace(facts, layers=layers, latent_size=latent, shared_size=shared)


def read_granite_experts(keys: Keys, num_layers: int) -> ExpertFacts | None:
    """Granite 4's mixtures: the softmax of the chosen experts' logits, and an MLP that every token goes to; None: there are no experts.

    Raises:
        CheckpointError: a key that is missing, wrong or not supported.
    """
    if not keys.integer("num_local_experts", 0, minimum=0):
        return None
    usual = {"num_experts": keys.values["num_local_experts"], "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": None}
    facts = read_qwen3_experts(Keys({**keys.values, **usual}, keys.where), num_layers)
    return replace(facts, layers=(True,) * num_layers, shared_size=keys.integer("intermediate_size", maximum=MAX_WIDTH))
