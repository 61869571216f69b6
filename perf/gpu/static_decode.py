"""Plain decoding as the shortest loop around a compiled model with a dense static KV cache: what a user would write without an engine.

The style is that of gpt-fast: one row, ``scaled_dot_product_attention`` over the whole cache under a mask, ``torch.compile`` with CUDA
graphs. It shares the network classes, so weights and shapes are those of the engine it is compared with.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo import mark_static_address
from torch._dynamo.utils import counters

from graphspec.errors import CaptureError
from graphspec.kernels.formulas import apply_rope, rms_norm
from graphspec.kernels.linear.linear import linear
from graphspec.models.attention import SOFTMAX, HeadTransform, Weighing
from graphspec.models.decoder import Decoder
from graphspec.models.layers import Linear


class DenseCache:
    """The :class:`~graphspec.models.attention.Attention` of one token over a dense cache ``[layers, 2, 1, G, L, D]``."""

    def __init__(self, model: Decoder, length: int, device: torch.device, dtype: torch.dtype) -> None:
        facts = model.facts
        self.cache = torch.zeros(facts.num_layers, 2, 1, facts.num_kv_heads, length, facts.head_dim, device=device, dtype=dtype)
        self.slot_L = torch.arange(length, device=device)
        self.position_BT = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self.valid_BT = torch.ones(1, 1, dtype=torch.bool, device=device)

    @property
    def rope_length_BT(self) -> Tensor:
        return self.position_BT + 1

    def __call__(
        self,
        layer: int,
        query_BTQD: Tensor,
        key_BTGD: Tensor,
        value_BTGD: Tensor,
        heads: HeadTransform,
        scale: float,
        window_left: int | None,
        weighing: Weighing = SOFTMAX,
    ) -> Tensor:
        assert weighing == SOFTMAX, "a model whose scores are only normalised"
        del window_left
        if heads.query_norm is not None and heads.key_norm is not None:
            query_BTQD = rms_norm(query_BTQD, heads.query_norm, heads.norm_eps, heads.norm_offset)
            key_BTGD = rms_norm(key_BTGD, heads.key_norm, heads.norm_eps, heads.norm_offset)
        query, key = (apply_rope(x, *heads.rotation.cos_sin(x.dtype)).transpose(1, 2) for x in (query_BTQD, key_BTGD))
        keys, values = self.cache[layer]
        keys.index_copy_(2, self.position_BT[0], key)
        values.index_copy_(2, self.position_BT[0], value_BTGD.transpose(1, 2))
        seen = (self.slot_L <= self.position_BT[0])[None, None, None]
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=seen, scale=scale, enable_gqa=True)
        return out.transpose(1, 2)


def compiled_step(model: Decoder, length: int) -> tuple[Any, DenseCache, Tensor]:
    """``(step, cache, token)``: each call of ``step()`` replaces ``token[0, 0]`` by the next greedy one and advances the position."""
    weight = model.embed_tokens.weight
    cache = DenseCache(model, length, weight.device, weight.dtype)
    token = torch.ones(1, 1, dtype=torch.int64, device=weight.device)

    def step() -> None:
        hidden = model(token, cache)[0]
        token.copy_(model.logits(hidden).argmax(-1))
        cache.position_BT.add_(1)

    for module in model.modules():
        if isinstance(module, Linear):
            module.multiply = linear
    # Tensors that a step writes in place must be marked as static, or the compiler makes no CUDA graph.
    for tensor in (cache.cache, cache.position_BT, token):
        mark_static_address(tensor)
    on_gpu = weight.device.type == "cuda"
    return torch.compile(step, fullgraph=True, dynamic=False, mode="reduce-overhead" if on_gpu else None), cache, token


def skipped_graphs() -> int:
    """Number of programs of this process that Inductor compiled without the requested CUDA graph."""
    return int(counters["inductor"]["cudagraph_skips"])


def require_graph(before: int) -> None:
    """Check that a compiled loop is a CUDA graph.

    Inductor may skip graphs with only a warning, for example because a buffer may move; then single launches would be measured, which are
    no baseline.

    Args:
        before: :func:`skipped_graphs` before the loop was compiled.

    Raises:
        CaptureError: Inductor skipped graphs, or recorded none.
    """
    from torch._inductor.cudagraph_trees import get_manager

    key, expected = "compiled static cache", "a step that is one CUDA graph"
    if skipped := skipped_graphs() - before:
        hint = "TORCH_LOGS=cudagraphs says why"
        raise CaptureError(key, expected, f"{skipped} programs that Inductor compiled without their graph", hint)
    manager = get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    if manager is None or not manager.roots:
        raise CaptureError(key, expected, "none recorded")
