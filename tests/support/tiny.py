"""A tiny target and drafter, with random weights and no checkpoint, and a plan for them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from graphspec.config.schema import AcceptConfig, AdaptiveConfig, Config, KernelsConfig, ModelConfig, RuntimeConfig, VariantConfig
from graphspec.drafters.assistant.facts import AssistantFacts, Clusters
from graphspec.drafters.assistant.network import AssistantDraft
from graphspec.drafters.dflash.facts import DFlashFacts
from graphspec.drafters.dflash.network import DFlashDraft
from graphspec.drafters.eagle.facts import EagleFacts
from graphspec.drafters.eagle.network import EagleDraft
from graphspec.drafters.heads.eagle3_facts import Eagle3Facts
from graphspec.drafters.heads.eagle3_network import Eagle3Draft
from graphspec.drafters.mtp.facts import MTPFacts
from graphspec.drafters.mtp.network import MTPDraft
from graphspec.drafters.p_eagle.facts import PEagleFacts
from graphspec.drafters.p_eagle.network import PEagleDraft
from graphspec.drafters.standalone.facts import StandaloneFacts
from graphspec.drafters.standalone.network import StandaloneDraft
from graphspec.facts import DraftFacts, ExpertFacts, LatentFacts, ModelFacts, RecurrentFacts, RopeFacts
from graphspec.facts.hybrid_families import NEMOTRON_H, QWEN3_5
from graphspec.facts.mamba import Mixer
from graphspec.facts.multipliers import NO_MULTIPLIERS
from graphspec.facts.recurrent import SsmFacts
from graphspec.facts.rope import NO_ROPE
from graphspec.graphs.cycle import Cycle
from graphspec.models.decoder import Decoder
from graphspec.plan.plan import Plan, make_plan
from graphspec.shapes import CycleShape

SHAPES = {
    "none": CycleShape(0, 1, 1),
    "chain": CycleShape(4, 1, 5),
    "tree": CycleShape(5, 4, 16),
    "two-words": CycleShape(3, 6, 70),
}
"""One shape of each structure a cycle can have with an EAGLE-3 head; the last needs more than one ancestor word."""

OTHERS: dict[str, dict[str, Any]] = {
    "hidden-feature": {"name": "eagle", "num_steps": 3, "topk": 3, "num_draft_tokens": 10},
    "static-tree": {"name": "eagle", "tree_choices": [[0], [1], [3], [0, 0], [0, 2], [1, 0], [0, 0, 1]]},
    "masks": {"name": "p_eagle", "num_steps": 4, "topk": 3, "num_draft_tokens": 12},
    "block": {"name": "dflash", "num_steps": 4, "topk": 3, "num_draft_tokens": 10},
    "no-feature": {"name": "standalone", "num_steps": 3, "topk": 2, "num_draft_tokens": 8},
    "one-head": {"name": "mtp", "num_steps": 3, "topk": 1, "num_draft_tokens": 4},
    "head-per-step": {"name": "mtp", "num_steps": 3, "topk": 1, "num_draft_tokens": 4},
    "latent-experts": {"name": "mtp", "num_steps": 3, "topk": 2, "num_draft_tokens": 6},
    "target-kv": {"name": "assistant", "num_steps": 3, "topk": 3, "num_draft_tokens": 10},
    "own-history": {"name": "ngram", "num_steps": 4, "topk": 3, "num_draft_tokens": 9},
    "host-tree": {"name": "ngram_trie", "num_steps": 4, "topk": 3, "num_draft_tokens": 9},
}
"""Structures of other variants: keys of their :class:`VariantConfig`."""
HYBRIDS: dict[str, dict[str, Any]] = {
    "hybrid-chain": {"name": "mtp", "num_steps": 3, "topk": 1, "num_draft_tokens": 4},
    "hybrid-tree": {"name": "ngram", "num_steps": 4, "topk": 3, "num_draft_tokens": 9},
    "mamba-tree": {"name": "ngram", "num_steps": 4, "topk": 3, "num_draft_tokens": 9},
}
"""Recurrent layers in the target."""
STRUCTURES = (*SHAPES, *OTHERS)


def model_facts(num_layers: int = 3) -> ModelFacts:
    """Three query heads over one key/value head; the last layer has a sliding window."""
    return ModelFacts(
        path=Path("tiny"), architecture="LlamaForCausalLM", vocab_size=61, hidden_size=48, intermediate_size=40, num_layers=num_layers,
        num_heads=3, num_kv_heads=1, head_dim=16, rms_norm_eps=1e-5, max_position_embeddings=192, tie_word_embeddings=False,
        attention_bias=False, output_bias=False, mlp_bias=False, qk_norm=False, sliding_window=(*[None] * (num_layers - 1), 24),
        rope=RopeFacts(10000.0), bos_token_id=1, eos_token_ids=(2,), dtype="float32",
    )  # fmt: skip


def latent_facts(num_layers: int = 3) -> ModelFacts:
    """Latent attention and mixtures of experts as DeepSeek-V3 has them; a model's first layer is dense, a head's is not."""
    latent = LatentFacts(query_rank=20, rank=24, nope_dim=8, rope_dim=16, value_dim=10, interleaved=True, scale=0.2)
    experts = ExpertFacts(
        layers=(num_layers == 1, *[True] * (num_layers - 1)), num_experts=8, topk=3, intermediate_size=12, shared_size=24, groups=4,
        topk_groups=2, group_best=2, sigmoid=True, normalize=True, scaling=2.5, float32_router=True,
    )  # fmt: skip
    facts = replace(model_facts(num_layers), architecture="DeepseekV3ForCausalLM", latent=latent, experts=experts)
    return replace(facts, sliding_window=(None,) * num_layers)


def hybrid_facts() -> ModelFacts:
    """Two gated delta nets around one attention layer."""
    recurrent = RecurrentFacts(layers=(True, False, True), key_heads=2, value_heads=4, key_dim=8, value_dim=6, taps=4)
    return replace(model_facts(), family=QWEN3_5, sliding_window=(None,) * 3, recurrent=recurrent)


def mamba_facts() -> ModelFacts:
    """One net per layer, without positions: Mamba-2, attention, an MLP with squared ReLU."""
    ssm = SsmFacts(conv_bias=True, projection_bias=False)
    recurrent = RecurrentFacts(layers=(True, False, False), key_heads=2, value_heads=4, key_dim=8, value_dim=6, taps=4, ssm=ssm)
    mixers: tuple[Mixer, ...] = ("recurrent", "attention", "mlp")
    return replace(
        model_facts(), family=NEMOTRON_H, sliding_window=(None,) * 3, recurrent=recurrent, mixers=mixers, rope=RopeFacts(0.0, NO_ROPE)
    )


def target_facts(structure: str) -> ModelFacts:
    """Facts of the target of a structure."""
    if structure == "mamba-tree":
        return mamba_facts()
    if structure in HYBRIDS:
        return hybrid_facts()
    return latent_facts() if structure == "latent-experts" else model_facts()


def draft_facts() -> Eagle3Facts:
    """A draft vocabulary of 23 of the 61 tokens."""
    return Eagle3Facts(
        path=Path("tiny-draft"), decoder=model_facts(1), draft_vocab_size=23, tap_layers=(0, 1, 2), target_hidden_size=48, feature_size=144
    )


def other_draft_facts(structure: str) -> DraftFacts | None:
    """Facts of the draft of a structure of :data:`OTHERS`."""
    common = {"path": Path("tiny-draft"), "draft_vocab_size": 61, "target_hidden_size": 48}
    if structure in ("hidden-feature", "static-tree"):
        return EagleFacts(**common, decoder=model_facts(1), feature_size=48, fc_bias=True, layernorms=False)
    tapped = {**common, "feature_size": 96, "tap_layers": (1, 2)}
    if structure == "masks":
        return PEagleFacts(**{**tapped, "draft_vocab_size": 23}, decoder=model_facts(2), mask_token_id=60)
    if structure == "block":
        # One layer in which rows look ahead, one in which they don't.
        decoder, rows = (
            replace(model_facts(2), qk_norm=True),
            {"block_size": 6, "max_steps": 5, "from_anchor": False, "causal": (False, True)},
        )
        return DFlashFacts(**tapped, **rows, decoder=decoder, mask_token_id=60)
    if structure == "target-kv":
        # A layer of each kind, over the target's last two; 7 of as many clusters as there are tokens.
        decoder = replace(model_facts(2), sliding_window=(None, 26), kv_sources=(-1, -1))
        own = {"target_layers": (1, 2), "embedding": NO_MULTIPLIERS, "clusters": Clusters(61, 7)}
        return AssistantFacts(**common, decoder=decoder, feature_size=48, **own)
    if structure == "no-feature":
        return StandaloneFacts(**common, decoder=model_facts(2))
    if structure in ("one-head", "head-per-step", "latent-experts", "hybrid-chain"):
        heads = 3 if structure == "head-per-step" else 1
        decoder = latent_facts(heads) if structure == "latent-experts" else model_facts(heads)
        return MTPFacts(**common, decoder=decoder, feature_size=48, num_heads=heads, layout="deepseek", first_index=0)
    return None


def tiny_plan(
    shape: CycleShape, *, device: str, runtime: str, mode: str = "reference", cycles_in_flight: int = 1, rule: str = "match",
    adaptive: AdaptiveConfig | None = None, **runtime_keys: object,
) -> Plan:  # fmt: skip
    """A plan for the tiny pair; a shape of depth 0 has no drafter."""
    speculates = shape.num_steps > 0
    keys = {"num_steps": shape.num_steps, "topk": shape.topk, "num_draft_tokens": shape.num_draft_tokens} if speculates else {}
    variant = VariantConfig(name="eagle3" if speculates else "none", **keys)
    draft = draft_facts() if speculates else None
    return _plan(variant, draft, device, runtime, mode, cycles_in_flight, runtime_keys, rule, adaptive=adaptive)


def structure_plan(
    structure: str, *, device: str, runtime: str, mode: str = "reference", cycles_in_flight: int = 1, rule: str = "match",
    adaptive: AdaptiveConfig | None = None, **keys: Any,
) -> Plan:  # fmt: skip
    """A plan of one of :data:`STRUCTURES` or :data:`HYBRIDS`."""
    if structure in SHAPES:
        shared = {"runtime": runtime, "mode": mode, "cycles_in_flight": cycles_in_flight, "rule": rule, "adaptive": adaptive, **keys}
        return tiny_plan(SHAPES[structure], device=device, **shared)
    draft, target = other_draft_facts(structure), target_facts(structure)
    return _plan(
        VariantConfig(**{**OTHERS, **HYBRIDS}[structure]), draft, device, runtime, mode, cycles_in_flight, keys, rule, target, adaptive
    )


def _plan(
    variant: VariantConfig, draft: DraftFacts | None, device: str, runtime: str, mode: str, cycles_in_flight: int,
    runtime_keys: dict[str, Any], rule: str = "match", target: ModelFacts | None = None, adaptive: AdaptiveConfig | None = None,
) -> Plan:  # fmt: skip
    config = Config(
        variant=variant,
        model=ModelConfig(path="tiny", max_context=96),
        runtime=RuntimeConfig(
            **{
                "page_size": 8,
                "prefill_chunks": [8, 16],
                "prefill_lanes": 2,
                **runtime_keys,
                "name": runtime,
                "cycles_in_flight": cycles_in_flight,
            }
        ),
        kernels=KernelsConfig(mode=mode, attention="auto" if mode == "fused" else "reference"),
        accept=AcceptConfig(rule=rule, synthetic_length=1.5 if rule == "synthetic" else None),
        adaptive=adaptive or AdaptiveConfig(),
    )
    return make_plan(config, target or model_facts(), draft, device=device)


@dataclass(frozen=True)
class Networks:
    """Target and drafter, the latter None without a draft network."""

    target: Decoder
    draft: Any


NETWORKS = {
    Eagle3Facts: Eagle3Draft,
    EagleFacts: EagleDraft,
    StandaloneFacts: StandaloneDraft,
    MTPFacts: MTPDraft,
    PEagleFacts: PEagleDraft,
    DFlashFacts: DFlashDraft,
}


def _draft(plan: Plan, target: Decoder) -> Any:
    if isinstance(plan.draft, AssistantFacts):
        return AssistantDraft(plan.draft, plan.target, plan.max_positions, target.embed_tokens)
    return NETWORKS[type(plan.draft)](plan.draft, plan.max_positions)


def tiny_networks(plan: Plan) -> Networks:
    """Networks on the CPU whose weights are random, and the same for every plan."""
    target = Decoder(plan.target, plan.tap_layers, plan.max_positions)
    draft = _draft(plan, target) if plan.draft is not None else None
    generator = torch.Generator().manual_seed(0)
    for module in (target, draft):
        for name, parameter in module.named_parameters() if module is not None else ():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_(1 + 0.2 * noise if "norm" in name else 0.2 * noise)
    if draft is not None and draft.target_token_Vd is not None:
        draft.target_token_Vd.copy_(
            torch.randperm(plan.target.vocab_size, generator=generator)[: draft.facts.draft_vocab_size].sort().values
        )
    return Networks(target.eval(), draft.eval() if draft is not None else None)


def make_fake(module: nn.Module | None, mode: FakeTensorMode) -> nn.Module | None:
    """The module, its parameters and buffers replaced by fake tensors."""
    for child in module.modules() if module is not None else ():
        for named in (child._parameters, child._buffers):
            for name, tensor in named.items():
                if tensor is not None and not isinstance(tensor, FakeTensor):
                    fake = mode.from_tensor(tensor.detach())
                    named[name] = nn.Parameter(fake, requires_grad=False) if named is child._parameters else fake
    return module


def move(module: nn.Module | None, device: str) -> None:
    """``module.to(device)``, for fake tensors too, which can't be swapped in place."""

    def moved(tensor: Tensor) -> Tensor:
        # A fake tensor made from numbers keeps these, and copying it would copy them to a device that does not exist.
        return torch.empty_like(tensor, device=device) if isinstance(tensor, FakeTensor) else tensor.to(device)

    for child in module.modules() if module is not None else ():
        for name, parameter in child._parameters.items():
            if parameter is not None:
                child._parameters[name] = nn.Parameter(moved(parameter), requires_grad=False)
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = moved(buffer)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are bitwise equal, NaN included."""
    if left.dtype.is_floating_point:
        word = {2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
        left, right = left.contiguous().view(word), right.contiguous().view(word)
    return torch.equal(left, right)


def assert_same_state(one: Cycle, other: Cycle) -> None:
    """What two cycles of one plan keep is bitwise equal, but for page 0 and the last row, where suppressed writes go."""
    found = other.arena.snapshot(("state", "kv"))
    for name, tensor in one.arena.snapshot(("state", "kv")).items():
        expected = found[name]
        if name.endswith("_kv"):
            tensor, expected = tensor[:, :, 1:], expected[:, :, 1:]
        elif len(tensor) == one.plan.max_rows + 1:
            tensor, expected = tensor[:-1], expected[:-1]
        assert same_bits(tensor, expected), name
