"""A target that prefers few tokens wherever it is, and parallel drafts that know them: right now and then at every depth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tests.support.checkpoints import VOCAB_SIZE, build_hf, eagle3_tensors, publish_eagle3, write_hf
from tests.support.engines import Pair

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

HIDDEN, CONST, TAPS, MASK, THETA = 48, 2.0, (1, 3), 60, 500.0
FAVOURITES = (5, 17, 23, 41)


def favouring_target(path: Path) -> Pair:
    """After each favourite the next one is likely; channel 0 of the residual stream is a constant, through which they are favoured at all."""
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
    # Independent numbers, so that neither stands for the other.
    tensors["mask_hidden"] = 0.3 * torch.randn(1, len(TAPS) * HIDDEN, generator=torch.Generator().manual_seed(9))
    tensors["mask_hidden"][0, 0] = CONST
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "fc.weight")):
            tensor[0] = 0
    tensors["fc.weight"][0, 0] = 1.0
    head = pair.hf.lm_head.weight.detach()
    if not reduced:
        del tensors["d2t"], tensors["t2d"], tensors["lm_head.weight"]
        return tensors
    kept = torch.tensor(sorted({*FAVOURITES, *range(0, VOCAB_SIZE, 3)}))
    tensors["d2t"], tensors["t2d"] = kept - torch.arange(len(kept)), torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    tensors["t2d"][kept] = True
    return {**tensors, "lm_head.weight": head[kept].clone()}


def write_p_eagle(path: Path, tensors: dict[str, Tensor], layout: str = "sglang", **config: Any) -> Path:
    """The head as its publishers write it; ``config`` adds or overrides keys."""
    keys: dict[str, Any] = {"mask_token_id": MASK, "architectures": ["PEagleLlamaForCausalLM"]}
    if layout == "speculators":
        keys = {"mask_token_id": MASK, "architectures": ["PEagleDraftModel"], "speculators_model_type": "peagle"}
    return publish_eagle3(path, tensors, layout, taps=TAPS, layer={"max_position_embeddings": 96}, **{**keys, **config})
