"""Which implementation of each op a cycle runs: chosen once, by name, before anything is built. Never falls back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class KernelSet:
    """One callable per op of the catalog (:data:`graphspec.kernels.OPS`); signatures stand in the op's own file."""

    paged_kv_write: Callable[..., None]
    tree_attention: Callable[..., Tensor]
    chunk_attention: Callable[..., Tensor]
    draft_topk: Callable[..., tuple[Tensor, Tensor]]
    tree_build: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
    tree_walk: Callable[..., tuple[Tensor, Tensor, Tensor]]
    kv_move: Callable[..., None]
    gumbel_noise: Callable[..., Tensor]
    linear: Callable[[Tensor, Tensor], Tensor]
    ngram_match: Callable[..., tuple[Tensor, Tensor, Tensor]]
    filter_logits: Callable[..., Tensor]
