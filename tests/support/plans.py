"""Plans without a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from graphspec.config.schema import Config, ModelConfig, RuntimeConfig, VariantConfig
from graphspec.drafters.eagle3.facts import Eagle3Facts
from graphspec.facts import ModelFacts, RopeFacts
from graphspec.plan.plan import Plan, make_plan


def model_facts(**overrides: Any) -> ModelFacts:
    """Facts of a small Llama."""
    values: dict[str, Any] = {
        "path": Path("target"),
        "architecture": "LlamaForCausalLM",
        "vocab_size": 50,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "output_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
        "sliding_window": (None, None),
        "rope": RopeFacts(theta=10000.0),
        "bos_token_id": 0,
        "eos_token_ids": (1,),
        "dtype": "bfloat16",
        **overrides,
    }
    return ModelFacts(**values)


def draft_facts(**overrides: Any) -> Eagle3Facts:
    """Facts of an EAGLE-3 head over two taps."""
    decoder = model_facts(path=Path("draft"), num_layers=1, sliding_window=(None,), **overrides)
    return Eagle3Facts(path=Path("draft"), decoder=decoder, draft_vocab_size=30, tap_layers=(0, 1), target_hidden_size=16, feature_size=32)


def plan(
    variant: str = "eagle3",
    *,
    shape: tuple[int, int, int] | None = None,
    device: str = "cpu",
    target: ModelFacts | None = None,
    max_context: int | None = None,
    runtime: dict[str, Any] | None = None,
) -> Plan:
    """A plan for the small Llama."""
    steps, topk, nodes = shape or (None, None, None)
    config = Config(
        variant=VariantConfig(name=variant, num_steps=steps, topk=topk, num_draft_tokens=nodes),
        model=ModelConfig(path="target", max_context=max_context),
        runtime=RuntimeConfig(**(runtime or {})),
    )
    return make_plan(config, target or model_facts(), draft_facts() if variant == "eagle3" else None, device=device)
