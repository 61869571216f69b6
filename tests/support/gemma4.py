"""Small random Gemma-4 checkpoints of all three kinds, written by transformers."""

from __future__ import annotations

import copy
import types
from typing import Any
from unittest import mock

import torch
from transformers import DynamicCache, Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4ForCausalLM, Gemma4TextConfig

from tests.support.checkpoints import VOCAB_SIZE

KINDS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]
ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 500.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 36, "intermediate_size": 20, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "bos_token_id": 1, "eos_token_id": VOCAB_SIZE - 1, "pad_token_id": None, "sliding_window": 6, "layer_types": KINDS,
    "final_logit_softcapping": 4.0, "rope_parameters": ROPES, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": VOCAB_SIZE,
    "attn_implementation": "eager", "experts_implementation": "eager",
}  # fmt: skip
DENSE: dict[str, Any] = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
EXPERTS: dict[str, Any] = {**DENSE, "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 12}
INPUTS: dict[str, Any] = {
    "hidden_size_per_layer_input": 6, "num_hidden_layers": 7, "num_kv_shared_layers": 3, "use_double_wide_mlp": True,
    "layer_types": [*KINDS, "sliding_attention", "full_attention"],
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {"dense": DENSE, "experts": EXPERTS, "inputs": INPUTS}
"""As the 31B, the 26B-A4B and the E models."""


def randomise(model: Any, seed: int) -> Any:
    """Weights of which each has an effect: norms and scales around 1, of queries and keys around 1 / 2, since nothing else tames scores."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [*model.named_parameters(), *(pair for pair in model.named_buffers() if pair[0].endswith("layer_scalar"))]
    with torch.no_grad():
        for key, tensor in tensors:
            noise = torch.randn(tensor.shape, generator=generator)
            around_1 = "norm" in key or key.endswith(("scale", "layer_scalar"))
            tensor.copy_((1 + 0.2 * noise) * (0.5 if key.endswith(("q_norm.weight", "k_norm.weight")) else 1) if around_1 else 0.2 * noise)
    return model.eval()


def build_gemma4(kind: str = "dense", *, seed: int = 0, **overrides: Any) -> Any:
    """A random model of a kind of :data:`SHAPES`."""
    # transformers writes into what it is given.
    return randomise(Gemma4ForCausalLM(Gemma4TextConfig(**copy.deepcopy({**BASE, **SHAPES[kind], **overrides}))), seed)


def in_float64(model: Any) -> Any:
    """The same model with every matmul and norm in float64; transformers' own norm stays in float32 otherwise."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return normed * self.weight if self.with_scale else normed

    wide = copy.deepcopy(model).double()
    for module in wide.modules():
        if type(module).__name__ == "Gemma4RMSNorm":
            module.forward = types.MethodType(forward, module)
    return wide


ASSISTANT: dict[str, Any] = {
    "hidden_size": 20, "intermediate_size": 28, "num_attention_heads": 8, "num_hidden_layers": 3, "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 3, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "final_logit_softcapping": None,
}  # fmt: skip
"""What the text part of an assistant has in place of :data:`BASE`: twice the target's query heads, over its keys and values."""
CLUSTERS: dict[str, Any] = {"use_ordered_embeddings": True, "num_centroids": 8, "centroid_intermediate_top_k": 3}
KV_KEYS = ("num_key_value_heads", "head_dim", "global_head_dim", "attention_k_eq_v", "num_global_key_value_heads", "sliding_window")


def build_assistant(target: dict[str, Any], *, seed: int = 0, text: dict[str, Any] | None = None, **overrides: Any) -> Any:
    """A random assistant.

    Args:
        target: keys of the target's text configuration, as :func:`target_keys` gives them.
        seed: of its weights.
        text: changes of its own text configuration.
        overrides: of the outer configuration.
    """
    own = {
        **BASE,
        **{key: target[key] for key in KV_KEYS if key in target},
        "vocab_size": target["vocab_size"],
        **ASSISTANT,
        **(text or {}),
    }
    config = Gemma4AssistantConfig(
        text_config={**copy.deepcopy(own), "model_type": "gemma4_text"}, backbone_hidden_size=target["hidden_size"], **overrides
    )
    # transformers 5.23 refuses a network all of whose layers share, which is what its own class for assistants is made of.
    with mock.patch.object(Gemma4TextConfig, "kv_sharing_modes", property(lambda self: ["reuse"] * self.num_hidden_layers)):
        model = randomise(Gemma4AssistantForCausalLM(config), seed)
    if model.masked_embedding is not None:
        order = torch.randperm(target["vocab_size"], generator=torch.Generator().manual_seed(seed))
        model.masked_embedding.token_ordering.copy_(order)
    return model


def target_keys(kind: str = "dense", **overrides: Any) -> dict[str, Any]:
    """The configuration of :func:`build_gemma4`."""
    return {**BASE, **SHAPES[kind], **overrides}


def assisted_sizes(vocab_size: int) -> dict[str, Any]:
    """Keys of a target of :func:`build_assisted` with that many tokens, none of which ends a text."""
    sizes = dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), vocab_size)
    return {**sizes, "eos_token_id": None, "tie_word_embeddings": False, "final_logit_softcapping": 20.0}


def build_assisted(kind: str, sizes: dict[str, Any], text: dict[str, Any], outer: dict[str, Any], damp: float = 0.35) -> tuple[Any, Any]:
    """A target that mostly says the next token of a fixed cycle, and an assistant that mostly knows it. ``damp``: of all that makes them
    err."""
    target, assistant = build_gemma4(kind, **sizes), build_assistant(target_keys(kind, **sizes), seed=3, text=text, **outer)
    generator = torch.Generator().manual_seed(5)
    order = torch.randperm(sizes["vocab_size"], generator=generator)
    before = torch.empty_like(order).scatter_(0, order, order.roll(1))
    with torch.no_grad():
        for name, parameter in (*target.named_parameters(), *assistant.named_parameters()):
            if name.endswith(("layernorm.weight", "layernorm_1.weight", "layernorm_2.weight", "input_norm.weight")) and ".post_" in name:
                parameter.mul_(damp)
        embedding = target.get_input_embeddings().weight
        width = embedding.shape[1]
        target.lm_head.weight.copy_(embedding[before] * 2)
        projection = torch.randn(assistant.config.text_config.hidden_size, width, generator=generator) / width**0.5
        assistant.pre_projection.weight[:, :width] = projection
        assistant.pre_projection.weight[:, width:].mul_(damp)
        assistant.lm_head.weight.copy_(embedding[before] @ projection.T * 4)
        if assistant.masked_embedding is not None:
            rows = assistant.lm_head.weight[assistant.masked_embedding.token_ordering]
            assistant.masked_embedding.centroids.weight.copy_(rows.unflatten(0, (outer["num_centroids"], -1)).mean(1))
    return target, assistant


@torch.no_grad()
def committed_states(model: Any, token_BT: torch.Tensor) -> tuple[torch.Tensor, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """What transformers' assistant reads of its target after these tokens: the last hidden state ``[B, 1, H]``, and by kind of layer keys
    and values ``[B, G, T, D]`` of the last layer that has its own. transformers returns these for targets whose layers share alone.
    """
    config, found = model.config, {}
    first = config.num_hidden_layers - config.num_kv_shared_layers
    cache = DynamicCache()  # without a configuration: no layer forgets
    out = model.model(input_ids=token_BT, past_key_values=cache)
    for layer, kind in enumerate(config.layer_types[:first]):
        found[kind] = (cache.layers[layer].keys, cache.layers[layer].values)
    return out.last_hidden_state[:, -1:], found


@torch.no_grad()
def draft_by_transformers(assistant: Any, model: Any, tokens: list[int], steps: int, path: list[int] | None = None) -> torch.Tensor:
    """Logits ``[S, V]`` of S steps after these tokens, the last of which the target has not read, as transformers'
    ``SinglePositionMultiTokenCandidateGenerator`` computes them.

    ``path``: tokens that the steps after the first consume; None: the best of each step.
    """
    hidden_B1H, shared = committed_states(model, torch.tensor([tokens[:-1]]))
    token, found = torch.tensor([tokens[-1:]]), []
    for step in range(steps):
        inputs = torch.cat((model.get_input_embeddings()(token), hidden_B1H), -1)
        position = torch.tensor([[len(tokens) - 1]])
        mask = torch.ones(1, len(tokens), dtype=torch.long)
        out = assistant(inputs_embeds=inputs, attention_mask=mask, position_ids=position, shared_kv_states=shared, use_cache=False)
        found.append(out.logits[0, -1])
        token = out.logits.argmax(-1) if path is None or step == steps - 1 else torch.tensor([[path[step]]])
        hidden_B1H = out.last_hidden_state
    return torch.stack(found)
