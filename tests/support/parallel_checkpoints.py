"""A target that prefers a few tokens at every position, and parallel drafts that prefer the same, so that some drafts are right."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from graphspec.api.llm import LLM
from tests.support.checkpoints import VOCAB_SIZE, build_hf, eagle3_tensors, llama_config, publish_eagle3, write_folder, write_hf
from tests.support.engines import SMALL, Pair

if TYPE_CHECKING:
    from torch import Tensor

HIDDEN, CONST, TAPS, MASK, THETA = 48, 2.0, (1, 3), 60, 500.0
FAVOURITES = (5, 17, 23, 41)
BLOCK, WINDOW = 6, 7
SLIDING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": WINDOW}
DFLASH_KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dflash": ({}, {}),
    "sliding": ({"num_layers": 3}, {"layer": SLIDING}),
    "looking_ahead": ({"num_layers": 3}, {"layer": SLIDING, "sliding_window_non_causal": True}),
    "jetspec": ({}, {"causal_head": True}),
    "speculators": ({"reduced": True}, {"speculators": True, "sample_from_anchor": True}),
}
"""Options of the tensors, options of the config."""
P_EAGLE_KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "reduced": ({"num_layers": 2, "extras": ("fc_norm",)}, "speculators"),
    "full": ({"num_layers": 1, "reduced": False, "extras": ("fc_norm",)}, "sglang"),
}
"""Options of the tensors, layout: two layers and a draft vocabulary; one layer, and the target's output layer."""


@dataclass(frozen=True)
class ParallelDraft:
    """A draft of one pass, for a target of :func:`favouring_target`."""

    variant: str
    folder: Path
    tensors: dict[str, Tensor]

    def llm(self, pair: Pair, **overrides: Any) -> LLM:
        return LLM(pair.target, variant=self.variant, draft=self.folder, **{**SMALL, **overrides})


def parallel_drafts(pair: Pair, path: Path) -> dict[str, ParallelDraft]:
    """One of every kind, by name."""
    made = {}
    for name, (options, config) in DFLASH_KINDS.items():
        tensors = dflash_tensors(pair, **options)
        made[name] = ParallelDraft("dflash", write_dflash(path / name, tensors, block=BLOCK, **config), tensors)
    for name, (options, layout) in P_EAGLE_KINDS.items():
        tensors = p_eagle_tensors(pair, **options)
        made[name] = ParallelDraft("p_eagle", write_p_eagle(path / name, tensors, layout), tensors)
    return made


def favouring_target(path: Path) -> Pair:
    """A target in which each preferred token makes the next one likely: a constant in channel 0 of the residual stream favours them."""
    model = build_hf("llama", num_hidden_layers=4, num_key_value_heads=1, eos_token_id=VOCAB_SIZE - 2, max_position_embeddings=96)
    after = (*FAVOURITES[1:], FAVOURITES[0])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(0.25)[0] = 0
        embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        embedding[:, 0] = CONST
        head[list(after)] += 1.0 * torch.nn.functional.normalize(embedding[list(FAVOURITES)], dim=-1)
        head[:, 0] = 0
        head[list(FAVOURITES), 0] = 1.0
    return Pair(write_hf(model, path / "target"), path / "none", model)


def p_eagle_tensors(pair: Pair, *, num_layers: int = 2, reduced: bool = True, extras: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """A random P-EAGLE head whose hidden states carry the constant too, with the output layer of the target."""
    tensors = eagle3_tensors(num_taps=len(TAPS), num_layers=num_layers, extras=extras)
    # Independent random numbers, so that neither can replace the other unnoticed.
    tensors["mask_hidden"] = 0.3 * torch.randn(1, len(TAPS) * HIDDEN, generator=torch.Generator().manual_seed(9))
    tensors["mask_hidden"][0, 0] = CONST
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "fc.weight")):
            tensor[0] = 0
    tensors["fc.weight"][0, 0] = 1.0
    del tensors["d2t"], tensors["t2d"], tensors["lm_head.weight"]
    return {**tensors, **reduced_head(pair)} if reduced else tensors


def reduced_head(pair: Pair) -> dict[str, Tensor]:
    """A head over every third token and the favourites, and the maps of that vocabulary."""
    kept = torch.tensor(sorted({*FAVOURITES, *range(0, VOCAB_SIZE, 3)}))
    mask = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill(0, kept, True)
    return {"d2t": kept - torch.arange(len(kept)), "t2d": mask, "lm_head.weight": pair.hf.lm_head.weight.detach()[kept].clone()}


def over_targets(raw: dict[str, Tensor], own_SVd: Tensor) -> Tensor:
    """Log-probabilities over the draft's vocabulary as those over the target's, float64."""
    if "d2t" not in raw:
        return own_SVd
    target_Vd = torch.arange(len(raw["d2t"])) + raw["d2t"]
    return torch.full((len(own_SVd), VOCAB_SIZE), -torch.inf, dtype=torch.float64).index_copy(1, target_Vd, own_SVd)


def write_p_eagle(path: Path, tensors: dict[str, Tensor], layout: str = "sglang", **config: Any) -> Path:
    """The head in its published layout; ``config`` adds or overrides keys."""
    keys: dict[str, Any] = {"mask_token_id": MASK, "architectures": ["PEagleLlamaForCausalLM"]}
    if layout == "speculators":
        keys = {"mask_token_id": MASK, "architectures": ["PEagleDraftModel"], "speculators_model_type": "peagle"}
    return publish_eagle3(path, tensors, layout, taps=TAPS, layer={"max_position_embeddings": 96}, **{**keys, **config})


def dflash_tensors(pair: Pair, *, num_layers: int = 2, reduced: bool = False, seed: int = 3) -> dict[str, Tensor]:
    """A random block drafter over the taps of :data:`TAPS`, in published names; ``reduced``: with a draft vocabulary and a head."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return 0.15 * torch.randn(shape, generator=generator)

    tensors = {"fc.weight": normal(HIDDEN, len(TAPS) * HIDDEN), "hidden_norm.weight": 1 + normal(HIDDEN), "norm.weight": 1 + normal(HIDDEN)}
    for layer in range(num_layers):
        at = f"layers.{layer}."
        tensors |= {f"{at}{name}.weight": 1 + normal(HIDDEN) for name in ("input_layernorm", "post_attention_layernorm")}
        tensors |= {f"{at}self_attn.{name}_norm.weight": 1 + normal(16) for name in "qk"}
        sizes = {"q": (64, HIDDEN), "k": (32, HIDDEN), "v": (32, HIDDEN), "o": (HIDDEN, 64)}
        tensors |= {f"{at}self_attn.{name}_proj.weight": 2 * normal(*size) for name, size in sizes.items()}
        sizes = {"gate": (56, HIDDEN), "up": (56, HIDDEN), "down": (HIDDEN, 56)}
        tensors |= {f"{at}mlp.{name}_proj.weight": normal(*size) for name, size in sizes.items()}
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            tensors[f"{at}{name}.weight"].mul_(0.4)[0] = 0
    return {**tensors, **reduced_head(pair)} if reduced else tensors


def write_dflash(
    path: Path, tensors: dict[str, Tensor], *, block: int = 6, layer: dict[str, Any] | None = None, speculators: bool = False, **config: Any
) -> Path:
    """The draft in the layout of z-lab or speculators; ``layer`` overrides keys of its layers, ``config`` those of ``dflash_config``."""
    keys = llama_config(tensors, num_hidden_layers=sum(name.endswith("q_norm.weight") for name in tensors), model_type="qwen3")
    keys |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96, **(layer or {})}
    if speculators:
        top = {"speculators_model_type": "dflash", "architectures": ["DFlashSpeculator"], "block_size": block, "mask_token_id": MASK}
        top |= {"aux_hidden_state_layer_ids": [*TAPS, 4], "draft_vocab_size": len(tensors.get("d2t", range(VOCAB_SIZE)))}
        return write_folder(path, tensors, {**top, "transformer_layer_config": keys, **config})
    own = {"mask_token_id": MASK, "target_layer_ids": [i - 1 for i in TAPS], "block_size": block, **config}
    return write_folder(path, tensors, {**keys, "architectures": ["DFlashDraftModel"], "num_target_layers": 4, "dflash_config": own})
