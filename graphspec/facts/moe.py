"""Mixtures of experts, as ``config.json`` describes them. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .keys import MAX_EXPERTS, MAX_LAYERS, MAX_WIDTH, Keys


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFacts:
    """Layers whose MLP is a mixture of experts; routing as in :func:`graphspec.kernels.linear.moe_route.moe_route`."""

    layers: tuple[bool, ...]
    """Per layer: whether its MLP is a mixture."""
    num_experts: int
    topk: int
    """Experts of a token."""
    intermediate_size: int
    """F: width of one expert."""
    latent_size: int = 0
    """L: width of the compressed stream that chosen experts read and write; 0: they do the residual stream itself."""
    shared_size: int = 0
    """Width of the experts that every token goes to, side by side; 0: there are none."""
    shared_gate: bool = False
    """Their result is scaled by the sigmoid of one more projection of the token."""
    groups: int = 1
    topk_groups: int = 1
    """A token's experts come from this many of the groups."""
    group_best: int = 1
    """A group is worth the sum of this many of its best experts."""
    sigmoid: bool = False
    """Scores are sigmoids; otherwise a softmax."""
    corrected: bool = False
    """Scores are ranked after a correction was added."""
    normalize: bool = False
    """The weights of a token's experts sum to 1, before scaling."""
    scaling: float = 1.0
    float32_router: bool = False
    """Router weights and logits are float32, whatever the dtype of the model."""
    beside_dense: bool = False
    """Each mixture stands next to a dense MLP. Both have norms of their own, and the router reads the residual stream through one without
    weights, times a stored vector; stored numbers scale the experts (Gemma 4)."""
    biases: bool = False
    """Router and experts have biases."""
    alpha: float = 1.0
    limit: float = 0.0
    """Parameters of clamped SwiGLU, see :func:`graphspec.kernels.linear.moe_mlp.moe_mlp`; a limit of 0: not clamped."""


def _read_count(keys: Keys, name: str, num_layers: int) -> int:
    experts = keys.integer(name, maximum=MAX_EXPERTS)
    if experts * num_layers > MAX_EXPERTS:
        raise keys.error(name, f"at most {MAX_EXPERTS} experts in the {num_layers} layers together")
    return experts


def _read_topk(keys: Keys, experts: int, default: int | None = None) -> int:
    topk = keys.integer("num_experts_per_tok") if default is None else keys.integer("num_experts_per_tok", default)
    if topk > experts:
        raise keys.error("num_experts_per_tok", f"at most the {experts} experts")
    return topk


def read_qwen3_experts(keys: Keys, num_layers: int) -> ExpertFacts:
    """Qwen3-MoE (arXiv 2505.09388): softmax, no groups, no shared experts.

    Raises:
        CheckpointError: a key that is missing, wrong or not supported.
    """
    name = "num_experts" if keys.present("num_experts") else "num_local_experts"  # transformers 5 writes the second
    experts = _read_count(keys, name, num_layers)
    step = keys.integer("decoder_sparse_step", 1)
    dense = keys.integers("mlp_only_layers", "a list of layer numbers", 0, MAX_LAYERS)
    return ExpertFacts(
        layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)),
        num_experts=experts,
        topk=_read_topk(keys, experts, 8),
        intermediate_size=keys.integer("moe_intermediate_size", 768, maximum=MAX_WIDTH),
        normalize=keys.flag("norm_topk_prob", False),
    )


def read_qwen3_next_experts(keys: Keys, num_layers: int) -> ExpertFacts:
    """Qwen3-Next: as Qwen3-MoE, with a gated shared expert, and other defaults.

    Raises:
        CheckpointError: a key that is missing, wrong or not supported.
    """
    defaults = {"num_experts_per_tok": 10, "moe_intermediate_size": 512, "norm_topk_prob": True}
    stated = {key: value for key, value in keys.values.items() if value is not None}
    facts = read_qwen3_experts(Keys({**defaults, **stated}, keys.where), num_layers)
    return replace(facts, shared_size=keys.integer("shared_expert_intermediate_size", 512, maximum=MAX_WIDTH), shared_gate=True)


def read_qwen3_5_experts(keys: Keys, num_layers: int) -> ExpertFacts:
    """Qwen3.5: as Qwen3-Next, with another default. Every layer is a mixture with normalised weights, whatever keys of Qwen3-Next say.

    Raises:
        CheckpointError: a key that is missing, wrong or not supported.
    """
    stated = {key: value for key, value in keys.values.items() if value is not None}
    fixed = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return read_qwen3_next_experts(Keys({"num_experts_per_tok": 8, **stated, **fixed}, keys.where), num_layers)


def read_qwen2_experts(keys: Keys, num_layers: int) -> ExpertFacts:
    """Qwen2-MoE (arXiv 2407.10671): as Qwen3-MoE, with a gated shared expert, and other defaults.

    Raises:
        CheckpointError: a key that is missing, wrong or not supported.
    """
    stated = {key: value for key, value in keys.values.items() if value is not None}
    defaults = {"num_experts_per_tok": 4, "moe_intermediate_size": 1408}
    facts = read_qwen3_experts(Keys({**defaults, **stated}, keys.where), num_layers)
    return replace(facts, shared_size=keys.integer("shared_expert_intermediate_size", 5632, maximum=MAX_WIDTH), shared_gate=True)


def read_olmoe_experts(keys: Keys, num_layers: int) -> ExpertFacts:
    """OLMoE (arXiv 2409.02060): softmax; every layer is a mixture of experts as wide as ``intermediate_size`` says.

    Raises:
        CheckpointError: a key that is missing, wrong or not supported.
    """
    fixed = {"moe_intermediate_size": keys.integer("intermediate_size", maximum=MAX_WIDTH), "decoder_sparse_step": 1, "mlp_only_layers": []}
    return read_qwen3_experts(Keys({**keys.values, **fixed}, keys.where), num_layers)


def read_ernie_experts(keys: Keys, num_layers: int) -> ExpertFacts:
    """Ernie 4.5: softmax and correction, weights that sum to 1, shared experts; mixtures in every ``moe_layer_interval``-th layer.

    Raises:
        CheckpointError: a key that is missing, wrong or not supported.
    """
    if keys.flag("use_bias", False):
        raise keys.error("use_bias", "false where layers have experts")
    experts = _read_count(keys, "moe_num_experts", num_layers)
    topk = keys.integer("moe_k", 6)
    if topk > experts:
        raise keys.error("moe_k", f"at most the {experts} experts")
    first, step = keys.integer("moe_layer_start_index", 1, minimum=0), keys.integer("moe_layer_interval", 1)
    stated = keys.integer("moe_layer_end_index", -1, minimum=-1)
    last = num_layers - 1 if stated == -1 else stated
    size = keys.integer("moe_intermediate_size", 1536, maximum=MAX_WIDTH)
    return ExpertFacts(
        layers=tuple((layer + 1) % step == 0 and first <= layer <= last for layer in range(num_layers)),
        num_experts=experts,
        topk=topk,
        intermediate_size=size,
        shared_size=size * keys.integer("moe_num_shared_experts", 2, minimum=0, maximum=MAX_WIDTH // size),
        corrected=True,
        normalize=True,
        float32_router=True,
    )


def read_gpt_oss_experts(keys: Keys, num_layers: int) -> ExpertFacts:
    """gpt-oss (arXiv 2508.10925): softmax over the chosen experts, biases, clamped SwiGLU; every layer is a mixture.

    Raises:
        CheckpointError: a key that is missing, wrong or not supported.
    """
    name = "num_experts" if keys.present("num_experts") else "num_local_experts"
    experts = _read_count(keys, name, num_layers)
    return ExpertFacts(
        layers=(True,) * num_layers,
        num_experts=experts,
        topk=_read_topk(keys, experts, 4),
        intermediate_size=keys.integer("intermediate_size", maximum=MAX_WIDTH),
        normalize=True,
        biases=True,
        alpha=keys.number("swiglu_alpha", 1.702),
        limit=keys.number("swiglu_limit", 7.0),
    )


def read_gemma4_experts(keys: Keys, num_layers: int) -> ExpertFacts | None:
    """Gemma 4: softmax, normalised, next to a dense MLP in every layer; ``enable_moe_block`` says whether there are any.

    Raises:
        CheckpointError: a key that is missing, wrong or not supported.
    """
    if not keys.flag("enable_moe_block", False):
        return None
    experts, topk = _read_count(keys, "num_experts", num_layers), keys.integer("top_k_experts")
    if topk > experts:
        raise keys.error("top_k_experts", f"at most the {experts} experts")
    return ExpertFacts(
        layers=(True,) * num_layers,
        num_experts=experts,
        topk=topk,
        intermediate_size=keys.integer("moe_intermediate_size", maximum=MAX_WIDTH),
        normalize=True,
        beside_dense=True,
    )


def read_mistral_experts(keys: Keys, num_layers: int) -> ExpertFacts:
    """Mistral Small 4: DeepSeek-V2's shared experts and softmax, with weights that sum to 1, and one group.

    Raises:
        CheckpointError: a key that is missing, wrong or not supported.
    """
    stated = {key: value for key, value in keys.values.items() if value is not None}
    if stated.get("n_group", 1) != stated.get("topk_group", 1):
        raise keys.error("topk_group", "n_group, with a softmax: experts of all groups")
    one = {"n_shared_experts": 1, "num_experts_per_tok": 4, **stated, "norm_topk_prob": False, "topk_method": "greedy"}
    facts = read_deepseek_experts(Keys(one, keys.where), num_layers, sigmoid=False)
    return replace(facts, normalize=keys.flag("norm_topk_prob", True), float32_router=False)


def read_mixtral_experts(keys: Keys, num_layers: int, *, sigmoid: bool) -> ExpertFacts:
    """Mixtral (arXiv 2401.04088): softmax; MiniMax-M2: sigmoid and correction. Every layer is a mixture, weights sum to 1.

    Raises:
        CheckpointError: a key that is missing, wrong or not supported.
    """
    name = "num_local_experts" if keys.present("num_local_experts") else "num_experts"
    experts = _read_count(keys, name, num_layers)
    _one_of(keys, "scoring_func", "sigmoid" if sigmoid else "softmax")
    return ExpertFacts(
        layers=(True,) * num_layers,
        num_experts=experts,
        topk=_read_topk(keys, experts, 8 if sigmoid else 2),
        intermediate_size=keys.integer("intermediate_size", maximum=MAX_WIDTH),
        sigmoid=sigmoid,
        corrected=sigmoid,
        normalize=True,
    )


def _one_of(keys: Keys, key: str, *allowed: str) -> str:
    """One of these values; absent or null means the first."""
    value = keys.values[key] if keys.present(key) else allowed[0]
    if value not in allowed:
        raise keys.error(key, "one of " + ", ".join(allowed))
    return str(value)


def _read_groups(keys: Keys, experts: int, topk: int, best: int) -> tuple[int, int]:
    groups, chosen = keys.integer("n_group"), keys.integer("topk_group")
    if experts % groups:
        raise keys.error("n_group", f"a divisor of n_routed_experts = {experts}")
    if chosen > groups or chosen * (experts // groups) < topk:
        raise keys.error("topk_group", f"at most n_group = {groups}, with num_experts_per_tok = {topk} experts in that many groups")
    if chosen < groups and experts // groups < best:
        raise keys.error("n_group", f"groups of at least {best} experts, the sum of whose scores ranks them")
    return groups, chosen


def read_listed_experts(keys: Keys, num_layers: int) -> ExpertFacts:
    """DeepSeek-V3's, in the layers that ``mlp_layer_types`` calls sparse (GLM-4.7-Flash); absent: in all but the first. Prediction heads,
    which the list need not name, have them.

    Raises:
        CheckpointError: a key that is missing, wrong or not supported.
    """
    name, kinds = "mlp_layer_types", ("dense", "sparse")
    listed = keys.values[name] if keys.present(name) else ["dense"] + ["sparse"] * (num_layers - 1)
    heads = keys.integer("num_nextn_predict_layers", 0, minimum=0, maximum=MAX_LAYERS)
    if isinstance(listed, list) and len(listed) == num_layers - heads:
        listed = [*listed, *["sparse"] * heads]
    if not isinstance(listed, list) or len(listed) != num_layers or not all(kind in kinds for kind in listed):
        raise keys.error(name, f"{num_layers} entries of {' or '.join(kinds)}")
    facts = read_deepseek_experts(keys, num_layers, sigmoid=True)
    return replace(facts, layers=tuple(kind == "sparse" for kind in listed))


def read_deepseek_experts(keys: Keys, num_layers: int, *, sigmoid: bool) -> ExpertFacts:
    """DeepSeek-V2 (arXiv 2405.04434, section 2.2): softmax; DeepSeek-V3 (arXiv 2412.19437, section 2.1.2): sigmoid and correction.

    Raises:
        CheckpointError: a key that is missing, wrong or not supported.
    """
    experts = _read_count(keys, "n_routed_experts", num_layers)
    topk, first, step = _read_topk(keys, experts), keys.integer("first_k_dense_replace", 0, minimum=0), keys.integer("moe_layer_freq", 1)
    if sigmoid:
        _one_of(keys, "scoring_func", "sigmoid")
        _one_of(keys, "topk_method", "noaux_tc")
        normalize = keys.flag("norm_topk_prob", True)
        groups, chosen = _read_groups(keys, experts, topk, 2)
    else:
        _one_of(keys, "scoring_func", "softmax")
        method = _one_of(keys, "topk_method", "greedy", "group_limited_greedy")
        normalize = keys.flag("norm_topk_prob", False)
        if normalize:
            raise keys.error("norm_topk_prob", "false, as in published checkpoints of this family")
        groups, chosen = _read_groups(keys, experts, topk, 1) if method != "greedy" else (1, 1)
    if keys.flag("mlp_bias", False):
        raise keys.error("mlp_bias", "false")
    size = keys.integer("moe_intermediate_size", maximum=MAX_WIDTH)
    return ExpertFacts(
        layers=tuple(layer >= first and layer % step == 0 for layer in range(num_layers)),
        num_experts=experts,
        topk=topk,
        intermediate_size=size,
        shared_size=size * keys.integer("n_shared_experts", 0, minimum=0, maximum=MAX_WIDTH // size),
        groups=groups,
        topk_groups=chosen,
        group_best=2 if sigmoid and chosen < groups else 1,
        sigmoid=sigmoid,
        corrected=sigmoid,
        normalize=normalize,
        scaling=keys.number("routed_scaling_factor", 1.0),
        float32_router=True,
    )
