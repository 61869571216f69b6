"""Calls of the ops of ``graphspec.kernels.attention`` in the shapes of real models, by file; their kernels are compiled ahead of time."""

from __future__ import annotations

from typing import Any

import torch
import triton

from tests.kernels.proof.calls import AotCase, aot_case

AOT: dict[str, tuple[AotCase, ...]] = {}


def _chunk_attention(name: str, tokens: int, heads: int = 32, dim: int = 128, dtype: torch.dtype = torch.bfloat16, **more: Any) -> AotCase:
    sizes, pool = {"B": 1, "T": tokens, "Q": heads, "D": dim, "P": 256}, (dtype, 32, 2, 1025, 16, 8, dim)
    return aot_case(name, "chunk_attention", sizes, query_BTQD=dtype, kv_pool=pool, layer=31, scale=dim**-0.5, **more)


AOT["chunk_attention"] = (
    _chunk_attention("llama-8b-c512", 512),
    _chunk_attention("llama-8b-c2048", 2048),
    _chunk_attention("f32-c512", 512, dtype=torch.float32),
    _chunk_attention("d64-c512", 512, dim=64),
    _chunk_attention("d256-c512", 512, heads=16, dim=256),
    _chunk_attention("gpt-oss-c512", 512, heads=64, dim=64, sink_Q=torch.float32),
    _chunk_attention("gemma-2-c512", 512, heads=16, dim=256, softcap=50.0),
    _chunk_attention("d512-c512", 512, heads=64, dim=512),
    _chunk_attention("f32-d512-c512", 512, heads=64, dim=512, dtype=torch.float32),
)


def _kv_move(name: str, lanes: int, width: int, dtype: torch.dtype = torch.bfloat16) -> AotCase:
    return aot_case(name, "kv_move", {"B": lanes, "A": width, "R": 65, "P": 128}, kv_pool=(dtype, 32, 2, 1025, 16, 8, 128))


AOT["kv_move"] = (
    _kv_move("llama-8b-b1-a6", 1, 6),
    _kv_move("llama-8b-b8-a16", 8, 16),
    _kv_move("llama-8b-b8-a128-fp32", 8, 128, torch.float32),
)


def latent_attention_case(
    name: str, tokens: int, heads: int, slots: int, lanes: int = 1, words: int = 1, page_size: int = 64, numerics: str = "fast"
) -> AotCase:
    sizes = {"B": lanes, "T": tokens, "Q": heads, "R": 64, "P": slots // page_size, "X": words}
    chunk = "chunk" in name
    return aot_case(
        name, "latent_chunk_attention" if chunk else "latent_attention", sizes, numerics,
        # The strides of a batched product per head, viewed as tokens x heads.
        query_latent_BTQL=torch.empty(heads, lanes * tokens, 512, dtype=torch.bfloat16, device="meta")
        .permute(1, 0, 2).unflatten(0, (lanes, tokens)),
        query_rope_BTQR=torch.bfloat16, latent_pool=(torch.bfloat16, 61, 1, 1 + 131072 // page_size, page_size, 1, 576),
        layer=3, scale=192**-0.5,
    )  # fmt: skip


AOT["latent_attention"] = (
    latent_attention_case("deepseek-v3-t4", 4, 128, 8192),
    latent_attention_case("deepseek-v3-t12-two-groups", 12, 128, 32768),
    latent_attention_case("deepseek-v2-lite-t100-two-groups", 100, 16, 32768, words=2),
    latent_attention_case("deepseek-v3-t1-one-split", 1, 128, 256),
    latent_attention_case("deepseek-v2-lite-t1", 1, 16, 8192),
    latent_attention_case("deepseek-v2-lite-b8-t4", 4, 16, 8192, lanes=8),
    latent_attention_case("deepseek-v2-lite-page1", 4, 16, 8192, page_size=1),
    latent_attention_case("deepseek-v2-lite-page16", 4, 16, 8192, page_size=16),
    latent_attention_case("deepseek-v3-chunk256", 256, 128, 8192),
    latent_attention_case("deepseek-v3-chunk2048", 2048, 128, 8192),
    latent_attention_case("deepseek-v2-lite-chunk256", 256, 16, 8192),
)

AOT["latent_position_attention"] = tuple(
    latent_attention_case(name, tokens, heads, slots, words=words, page_size=page, numerics="batch_invariant")
    for name, tokens, heads, slots, words, page in (
        ("deepseek-v3-t8", 8, 128, 8192, 1, 64),
        ("deepseek-v3-t1-one-split", 1, 128, 256, 1, 64),
        ("deepseek-v2-lite-t10-two-words", 10, 16, 8192, 2, 16),
        ("deepseek-v2-lite-page1", 4, 16, 8192, 1, 1),
        ("deepseek-v3-chunk8", 8, 128, 8192, 1, 64),
    )
)


def _latent_kv_write(name: str, lanes: int, tokens: int, heads: int, interleaved: bool) -> AotCase:
    query = torch.empty(lanes, tokens, heads, 192, dtype=torch.bfloat16, device="meta")[..., 128:]
    sizes, pool = {"B": lanes, "T": tokens, "E": 576, "L": 512, "P": 256}, (torch.bfloat16, 61, 1, 2049, 64, 1, 576)
    return aot_case(
        name, "latent_kv_write", sizes, latent_pool=pool, layer=3, latent_BTE=torch.bfloat16, query_rope_BTQR=query,
        norm_weight_L=torch.bfloat16, rope_LD=(torch.float32, 4096, 64), eps=1e-6, interleaved=interleaved,
    )  # fmt: skip


AOT["latent_kv_write"] = (
    _latent_kv_write("deepseek-v3-t4", 1, 4, 128, True),
    _latent_kv_write("deepseek-v3-b8-t61", 8, 61, 128, True),
    _latent_kv_write("deepseek-v2-lite-t1", 1, 1, 16, True),
    _latent_kv_write("halves-t4", 1, 4, 128, False),
)


def _page_feature_write(name: str, lanes: int, tokens: int, width: int | None) -> AotCase:
    """Without a width, a prompt chunk."""
    sizes = {"B": lanes, "T": tokens, "F": 3 * 4096, "P": 128, "R": lanes if width is None else 65} | (
        {} if width is None else {"A": width}
    )
    pool = (torch.bfloat16, 1, 1, 1025, 1, 1, 3 * 4096)
    given = {"page_feature": pool, "feature_BTF": torch.bfloat16, "page_size": 16}
    return aot_case(name, "page_feature_write", sizes, **given, **({"lane_row_B": None} if width is None else {}))


AOT["page_feature_write"] = (
    _page_feature_write("eagle3-b1-n8", 1, 8, 6),
    _page_feature_write("eagle3-b8-n64", 8, 64, 6),
    _page_feature_write("eagle3-prompt-c512", 1, 512, None),
)


def _rope_kv_write(name: str, lanes: int, tokens: int, groups: int = 8, dim: int = 128, **norm: Any) -> AotCase:
    projected = torch.empty(lanes, tokens, 32 + 2 * groups, dim, dtype=torch.bfloat16, device="meta")
    query, key, value = projected.split((32, groups, groups), 2)
    return aot_case(
        name, "rope_kv_write", {"B": lanes, "T": tokens, "P": 128}, query_BTQD=query, key_BTGD=key, value_BTGD=value,
        rope_LD=(torch.float32, 4096, dim), kv_pool=(torch.bfloat16, 32, 2, 1025, 16, groups, dim), layer=5, **norm,
    )  # fmt: skip


HEAD_NORM = (torch.bfloat16, 128)

AOT["rope_kv_write"] = (
    _rope_kv_write("llama-8b-t8", 1, 8),
    _rope_kv_write("qwen3-8b-b8-t64", 8, 64, query_norm=HEAD_NORM, key_norm=HEAD_NORM, norm_eps=1e-6),
    _rope_kv_write("d512-t8", 1, 8, groups=4, dim=512),
)


def _tree_attention(
    name: str, lanes: int, tokens: int, heads: int = 32, dim: int = 128, dtype: torch.dtype = torch.bfloat16, **more: Any
) -> AotCase:
    sizes = {"B": lanes, "T": tokens, "Q": heads, "D": dim, "P": 256, "X": triton.cdiv(tokens, 64)}
    pool = (dtype, 32, 2, 1025, 16, 8, dim)
    return aot_case(name, "tree_attention", sizes, query_BTQD=dtype, kv_pool=pool, layer=31, scale=dim**-0.5, **more)


AOT["tree_attention"] = (
    _tree_attention("llama-8b-t1", 1, 1),
    _tree_attention("llama-8b-t8", 1, 8),
    _tree_attention("llama-8b-t64", 1, 64),
    _tree_attention("llama-8b-t65", 1, 65),
    _tree_attention("llama-8b-t128", 1, 128),
    _tree_attention("llama-8b-b8-t32", 8, 32),
    _tree_attention("d64-t8", 1, 8, dim=64),
    _tree_attention("d80-t8", 1, 8, dim=80),
    _tree_attention("d256-t8", 1, 8, heads=16, dim=256),
    _tree_attention("gpt-oss-t8", 1, 8, heads=64, dim=64, sink_Q=torch.float32),
    _tree_attention("gemma-2-t8", 1, 8, heads=16, dim=256, softcap=50.0),
    _tree_attention("f32-t8", 1, 8, dtype=torch.float32),
    _tree_attention("f32-d256-t8", 1, 8, heads=16, dim=256, dtype=torch.float32),
    _tree_attention("d512-t8", 1, 8, heads=64, dim=512),
    _tree_attention("d512-t65", 1, 65, heads=64, dim=512),
    _tree_attention("f32-d512-t8", 1, 8, heads=64, dim=512, dtype=torch.float32),
)

AOT["position_attention"] = (
    _tree_attention("llama-8b-t1", 1, 1, numerics="batch_invariant"),
    _tree_attention("llama-8b-t8", 1, 8, numerics="batch_invariant"),
    _chunk_attention("llama-8b-c100", 100, numerics="batch_invariant"),
    _tree_attention("d512-t8", 1, 8, heads=64, dim=512, numerics="batch_invariant"),
)
