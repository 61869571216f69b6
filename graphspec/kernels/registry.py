"""Which implementation of each op a cycle runs: chosen once, by name, before anything is built. Never falls back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class KernelSet:
    """One callable per op of the catalog (:data:`graphspec.kernels.OPS`); signatures stand in the op's own file."""

    rope_kv_write: Callable[..., Tensor]
    tree_attention: Callable[..., Tensor]
    chunk_attention: Callable[..., Tensor]
    draft_topk: Callable[..., tuple[Tensor, Tensor]]
    tree_build: Callable[..., None]
    chain_layout: Callable[..., None]
    tree_walk: Callable[..., None]
    kv_move: Callable[..., None]
    commit_rows: Callable[..., None]
    gumbel_noise: Callable[..., Tensor]
    linear: Callable[..., Tensor]
    ngram_match: Callable[..., None]
    mail_apply: Callable[..., None]
    draft_window: Callable[..., tuple[Tensor, ...]]
    draft_level: Callable[..., None]
    take_last: Callable[..., None]
    filter_logits: Callable[..., Tensor]
    sample_tokens: Callable[..., tuple[Tensor, Tensor]]
    latent_attention: Callable[..., Tensor]
    latent_chunk_attention: Callable[..., Tensor]
    latent_kv_write: Callable[..., Tensor]
    moe_route: Callable[..., tuple[Tensor, Tensor]]
    moe_mlp: Callable[..., Tensor]
