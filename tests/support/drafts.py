"""Tiny targets of every family, and drafting one token at a time as the reference for everything that drafts many rows at once."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from graphspec.config.train_options import TrainConfig
from graphspec.train.draft import Recipe
from graphspec.train.drafter import Drafter, network_of

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
HYBRID = "qwen3_5"
"""Its drafts are those with ``reads_hybrids``."""
_NETS = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}


SMALL = {
    "eagle": {"bias": True, "intermediate_size": 40},
    "eagle3": {"draft_vocab_size": 48, "tap_layers": [1, 2]},
    "mtp": {},
    "standalone": {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1},
}
"""Network settings that fit :func:`tiny_target`."""
PARALLEL = {
    "dflash": {"num_hidden_layers": 2, "intermediate_size": 40, "tap_layers": [1, 2], "block_size": 5},
    "p_eagle": {"num_hidden_layers": 2, "draft_vocab_size": 48, "tap_layers": [1, 2]},
}
"""The same of networks that draft all depths in one pass."""


def tiny_target(family: str = "llama", seed: int = 0, **changes: object) -> PreTrainedModel:
    """A random target: vocabulary 96, hidden 32, 3 layers, 4 query heads over 2; of :data:`HYBRID` three nets and an attention."""
    torch.manual_seed(seed)
    config, model = (Qwen3_5TextConfig, Qwen3_5ForCausalLM) if family == HYBRID else FAMILIES[family]
    settings = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    settings |= {"num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 0, "head_dim": 8}
    settings |= {"initializer_range": 0.3, "tie_word_embeddings": True, **(_NETS if family == HYBRID else {}), **changes}
    built = model(config(**settings))
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            # Norms and biases that differ from one and zero, so that forgetting them shows.
            if "norm" in name:
                # A hybrid's weights are stored minus 1, but for those after its nets.
                offset = 1.0 if family == HYBRID and "linear_attn" not in name else 0.0
                parameter.uniform_(0.5 - offset, 1.5 - offset)
            elif name.endswith("bias"):
                parameter.normal_(std=0.5)
    return built.requires_grad_(False).eval()


def load_draft(recipe: Recipe, model: PreTrainedModel, file: Path) -> Drafter:
    """The network of a checkpoint that training left in its work folder."""
    drafter = network_of(recipe.variant).build(model, recipe.network(), None)
    drafter.load_state_dict(torch.load(file, weights_only=True)["model"])
    return drafter.eval()


def round_to_bfloat16(drafter: Drafter) -> None:
    """Round every parameter in place to bfloat16, as in a checkpoint; its dtype stays."""
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(parameter.bfloat16())


def recipe(variant: str, **settings: object) -> Recipe:
    """A recipe of four unrolled steps; ``settings`` are those of ``train``."""
    return Recipe(variant, TrainConfig(**{"unroll": 4, **settings}))


def build(variant: str, target=None, **network: object) -> Drafter:
    """A random drafter in which every parameter affects the output."""
    target = target or tiny_target()
    settings = recipe(variant, network={**(SMALL | PARALLEL)[variant], **network}, unroll=network.get("num_heads", 4)).network()
    torch.manual_seed(5)
    drafter = network_of(variant).build(target, settings, torch.arange(96).flip(0))
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
            elif name != "lm_head.weight":
                parameter.normal_(std=0.2)
    return drafter.eval()


def random_text(rows: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, 96, (rows, length), generator=torch.Generator().manual_seed(seed))


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of the last rows over everything, by torch's own function: ``[B, T, Q * D]``."""
    batch, groups, repeat, rows, _ = q.shape
    length = k.shape[2]
    mask = torch.ones(rows, length, dtype=torch.bool).tril(length - rows)
    keys, values = (x[:, :, None].expand(-1, -1, repeat, -1, -1) for x in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
    return out.reshape(batch, groups * repeat, rows, -1).transpose(1, 2).flatten(2)


@torch.no_grad()
def draft_logits(drafter: Drafter, features: Tensor, tokens: Tensor, row: int, path: list[int]) -> Tensor:
    """Logits ``[Vd]`` after drafting ``path`` from ``row``, whose root is at ``row + 1``; one sequence, nothing shared between rows."""
    known = torch.cat((tokens[:, : row + 2], torch.tensor([path], dtype=torch.int64)), 1)
    hidden = drafter.start(features[:, : row + 1])
    prefix = torch.arange(row + 1)
    if drafter.num_heads > 1:
        for step in range(len(path) + 1):
            consumed = known[:, 1 + step : 2 + step + row]
            hidden = drafter.step(step, consumed, hidden, prefix, lambda layer, q, k, v: dense(q, k, v))
        return drafter.logits(hidden)[0, -1]
    cache: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer in cache:
            k, v = torch.cat((cache[layer][0], k), 2), torch.cat((cache[layer][1], v), 2)
        cache[layer] = k, v
        return dense(q, k, v)

    hidden = drafter.step(0, known[:, 1 : row + 2], hidden, prefix, attend)[:, -1:]
    for step in range(1, len(path) + 1):
        hidden = drafter.step(step, known[:, row + 1 + step : row + 2 + step], hidden, torch.tensor([row + step]), attend)
    return drafter.logits(hidden)[0, 0]


@torch.no_grad()
def block_logits(drafter: Drafter, features: Tensor, tokens: Tensor, row: int, steps: int) -> Tensor:
    """Logits ``[steps, Vd]`` that a block begun at ``row`` drafts, whose root is at ``row + 1``; nothing after the root is shown to it."""
    blank = torch.zeros(1, steps, dtype=torch.int64), torch.zeros(1, steps, features.shape[-1])
    known, seen = torch.cat((tokens[:, : row + 2], blank[0]), 1)[:, : row + 1 + steps], torch.cat((features[:, : row + 1], blank[1]), 1)
    return torch.stack([drafter.logits(hidden)[0, 0] for hidden in drafter.drafts(seen, known, steps, torch.tensor([row]))])
