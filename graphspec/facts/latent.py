"""Multi-head latent attention, as ``config.json`` describes it. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from .keys import MAX_HEAD_DIM, MAX_HEADS, MAX_WIDTH, Keys
from .rope import RopeFacts, magnitude


@dataclass(frozen=True, slots=True)
class LatentFacts:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): a layer keeps one row per token, shared by all heads."""

    query_rank: int | None
    """Width of the compressed query; None: queries are projected directly."""
    rank: int
    """L: width of the compressed keys and values."""
    nope_dim: int
    """Part of a query and key head without position."""
    rope_dim: int
    """R: part of a query head that is rotated, and width of the one rotated key of all heads."""
    value_dim: int
    interleaved: bool
    """RoPE pairs are channels (2i, 2i + 1), not (i, i + R/2)."""
    scale: float
    """Multiplies the scores."""
    norm_eps: float = 1e-6
    """Epsilon of the norms of compressed queries, keys and values. DeepSeek's code takes no other, whatever ``rms_norm_eps`` says; heads
    take their own."""

    @property
    def row_dim(self) -> int:
        """E = L + R: what is kept of a token."""
        return self.rank + self.rope_dim


def rope_dim(keys: Keys) -> int:
    """The rotated part of a head.

    Raises:
        CheckpointError: missing, or odd.
    """
    size = keys.integer("qk_rope_head_dim", minimum=2, maximum=MAX_HEAD_DIM)
    if size % 2:
        raise keys.error("qk_rope_head_dim", "an even number (RoPE rotates pairs)")
    return size


def read_latent(keys: Keys, num_heads: int, rope: RopeFacts, *, interleaved_only: bool) -> LatentFacts:
    """Facts of latent attention.

    Scores are scaled by ``(nope_dim + rope_dim)^-1/2``, times the square of YaRN's magnitude for ``mscale_all_dim`` where RoPE is scaled:
    cos and sin have lost that factor.

    Args:
        keys: of the decoder.
        num_heads: query heads.
        rope: of the decoder.
        interleaved_only: ``rope_interleave`` must not be false.

    Raises:
        CheckpointError: a key that is missing, wrong or not supported.
    """
    if keys.integer("num_key_value_heads", num_heads, maximum=MAX_HEADS) != num_heads:
        raise keys.error("num_key_value_heads", f"num_attention_heads = {num_heads}, or no such key: all heads share one latent row")
    interleaved = keys.flag("rope_interleave", True)
    if not interleaved and interleaved_only:
        raise keys.error("rope_interleave", "true, or no such key")
    if "q_lora_rank" not in keys.values:
        raise keys.error("q_lora_rank", "an integer >= 1, or null where queries are not compressed")
    nope, rotated = keys.integer("qk_nope_head_dim", maximum=MAX_HEAD_DIM), rope_dim(keys)
    correction = magnitude(rope.factor, rope.mscale_all_dim) if rope.mscale_all_dim else 1.0
    return LatentFacts(
        query_rank=keys.integer("q_lora_rank", maximum=MAX_WIDTH) if keys.present("q_lora_rank") else None,
        rank=keys.integer("kv_lora_rank", maximum=MAX_WIDTH),
        nope_dim=nope,
        rope_dim=rotated,
        value_dim=keys.integer("v_head_dim", maximum=MAX_HEAD_DIM),
        interleaved=interleaved,
        scale=(nope + rotated) ** -0.5 * correction * correction,
    )
