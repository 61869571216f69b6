"""A tiny target and drafter, with random weights and no checkpoint, and a plan for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from graphspec.config import Config, KernelsConfig, ModelConfig, RuntimeConfig, VariantConfig
from graphspec.facts import Eagle3Facts, ModelFacts, RopeFacts
from graphspec.models.llama import LlamaModel
from graphspec.plan import Plan, make_plan
from graphspec.shapes import CycleShape
from graphspec.variants.eagle3 import Eagle3Draft

SHAPES = {
    "none": CycleShape(0, 1, 1),
    "chain": CycleShape(4, 1, 5),
    "tree": CycleShape(5, 4, 16),
    "two-words": CycleShape(3, 6, 70),
}
"""One shape of each structure a cycle can have; the last needs more than one ancestor word."""


def model_facts(num_layers: int = 3) -> ModelFacts:
    """Three query heads over one key/value head; the last layer has a sliding window."""
    return ModelFacts(
        path=Path("tiny"), architecture="LlamaForCausalLM", vocab_size=61, hidden_size=48, intermediate_size=40, num_layers=num_layers,
        num_heads=3, num_kv_heads=1, head_dim=16, rms_norm_eps=1e-5, max_position_embeddings=192, tie_word_embeddings=False,
        attention_bias=False, output_bias=False, mlp_bias=False, qk_norm=False, sliding_window=(*[None] * (num_layers - 1), 24),
        rope=RopeFacts(10000.0), bos_token_id=1, eos_token_ids=(2,), dtype="float32",
    )  # fmt: skip


def draft_facts() -> Eagle3Facts:
    """A draft vocabulary of 23 of the 61 tokens."""
    return Eagle3Facts(
        path=Path("tiny-draft"), decoder=model_facts(1), draft_vocab_size=23, tap_layers=(0, 1, 2), target_hidden_size=48, feature_size=144
    )


def tiny_plan(shape: CycleShape, *, device: str, runtime: str, mode: str = "reference", run_ahead: int = 0, **runtime_keys: object) -> Plan:
    """A plan for the tiny pair; a shape of depth 0 has no drafter."""
    speculates = shape.num_steps > 0
    keys = {"num_steps": shape.num_steps, "topk": shape.topk, "num_draft_tokens": shape.num_draft_tokens} if speculates else {}
    config = Config(
        variant=VariantConfig(name="eagle3" if speculates else "none", **keys),
        model=ModelConfig(path="tiny", max_context=96),
        runtime=RuntimeConfig(name=runtime, page_size=8, prefill_chunks=[8, 16], run_ahead=run_ahead, **runtime_keys),  # type: ignore[arg-type]
        kernels=KernelsConfig(mode=mode, attention="reference"),
    )
    return make_plan(config, model_facts(), draft_facts() if speculates else None, device=device)


@dataclass(frozen=True)
class Networks:
    """Target and drafter, the latter None without speculation."""

    target: LlamaModel
    draft: Eagle3Draft | None


def tiny_networks(plan: Plan) -> Networks:
    """Networks on the CPU whose weights are random, and the same for every plan."""
    target = LlamaModel(plan.target, plan.tap_layers, plan.max_positions)
    draft = Eagle3Draft(plan.draft, plan.max_positions) if plan.draft is not None else None
    generator = torch.Generator().manual_seed(0)
    for module in (target, draft):
        for name, parameter in module.named_parameters() if module is not None else ():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_(1 + 0.2 * noise if "norm" in name else 0.2 * noise)
    if draft is not None:
        draft.target_token_Vd.copy_(
            torch.randperm(plan.target.vocab_size, generator=generator)[: draft.facts.draft_vocab_size].sort().values
        )
    return Networks(target.eval(), draft.eval() if draft is not None else None)


def move(module: nn.Module | None, device: str) -> None:
    """``module.to(device)``, for fake tensors too, which can't be swapped in place."""
    for child in module.modules() if module is not None else ():
        for name, parameter in child._parameters.items():
            if parameter is not None:
                child._parameters[name] = nn.Parameter(parameter.to(device), requires_grad=False)
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = buffer.to(device)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal to the bit; NaN equals a NaN of the same bits."""
    if left.dtype.is_floating_point:
        word = {2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
        left, right = left.contiguous().view(word), right.contiguous().view(word)
    return torch.equal(left, right)
