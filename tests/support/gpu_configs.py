"""Configs of the GPU bench, in sizes that a CPU runs."""

from __future__ import annotations

from typing import Any

from perf.gpu.bench import JETSPEC_8B, QWEN3_8B

SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


def small_jetspec(sizes: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Target and block drafter of :data:`perf.gpu.latency.PARALLEL` with these ``sizes`` of the target; the block is as long."""
    target, layers = {**QWEN3_8B, **sizes, "head_dim": 8}, sizes["num_hidden_layers"]
    own = {**JETSPEC_8B["dflash_config"], "mask_token_id": sizes["vocab_size"] - 1, "target_layer_ids": [1, layers - 2]}
    names = {"architectures": JETSPEC_8B["architectures"], "num_hidden_layers": 2, "num_target_layers": layers}
    return target, {**JETSPEC_8B, **target, **names, "dflash_config": own}
