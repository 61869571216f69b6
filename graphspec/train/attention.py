"""Attention of draft networks in training: whole sequences at once, keys and values in memory with their gradients.

It takes the place of paged attention in the networks of inference (:class:`graphspec.models.attention.Attention`). Query tokens are A
blocks of M; a block sees a part of a prefix that all share, and the tokens of its own block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.formulas import apply_rope, rms_norm
from ..models.attention import SOFTMAX, HeadTransform, Weighing

KeyValues = dict[int, tuple[Tensor, Tensor]]
"""Keys and values of each layer."""


class SequenceAttention:
    """Attention of ``T = A * M`` tokens at the positions ``position_T``.

    Args:
        position_T: int64.
        seen_AR: bool, the rows of the prefix that each block sees.
        prefix: ``[B, R, G, D]`` of each layer; None: these tokens are the prefix, R = A and M = 1.
        own: ``[B, A, N, G, D]`` of each layer, the tokens that each block had before, to which these are appended.
        causal: a token sees those of its block up to itself; otherwise all of them.
    """

    recurrence = None

    def __init__(
        self, position_T: Tensor, seen_AR: Tensor, prefix: KeyValues | None = None, own: KeyValues | None = None, *, causal: bool = True
    ) -> None:
        self.position_BT = position_T[None]
        self.rope_length_BT = self.position_BT + 1
        self.valid_BT = torch.ones_like(self.position_BT, dtype=torch.bool)
        self.seen_AR, self.causal = seen_AR, causal
        self.is_prefix = prefix is None
        self.prefix: KeyValues = {} if prefix is None else prefix
        self.own: KeyValues = {} if own is None else own

    def write(self, layer: int, query_BTQD: Tensor, key_BTGD: Tensor, value_BTGD: Tensor, heads: HeadTransform) -> Tensor:
        """See :class:`graphspec.models.attention.Attention`."""
        cos_BTD, sin_BTD = heads.rotation.cos_sin(torch.float32)
        if heads.query_norm is not None and heads.key_norm is not None:
            query_BTQD = rms_norm(query_BTQD, heads.query_norm, heads.norm_eps, heads.norm_offset)
            key_BTGD = rms_norm(key_BTGD, heads.key_norm, heads.norm_eps, heads.norm_offset)
        key_BTGD = apply_rope(key_BTGD, cos_BTD, sin_BTD)
        if self.is_prefix:
            self.prefix[layer] = key_BTGD, value_BTGD
        else:
            key_BANGD, value_BANGD = (x.unflatten(1, (len(self.seen_AR), -1)) for x in (key_BTGD, value_BTGD))
            if layer in self.own:
                before = self.own[layer]
                key_BANGD, value_BANGD = torch.cat((before[0], key_BANGD), 2), torch.cat((before[1], value_BANGD), 2)
            self.own[layer] = key_BANGD, value_BANGD
        return apply_rope(query_BTQD, cos_BTD, sin_BTD)

    def __call__(
        self, layer: int, query_BTQD: Tensor, key_BTGD: Tensor, value_BTGD: Tensor, heads: HeadTransform, scale: float,
        window_left: int | None,
        weighing: Weighing = SOFTMAX,
    ) -> Tensor:  # fmt: skip
        """See :class:`graphspec.models.attention.Attention`."""
        return self.read(layer, self.write(layer, query_BTQD, key_BTGD, value_BTGD, heads), scale, window_left, weighing)

    def read(self, layer: int, query_BTQD: Tensor, scale: float, window_left: int | None, weighing: Weighing = SOFTMAX) -> Tensor:
        """See :class:`graphspec.models.attention.Attention`."""
        assert window_left is None and weighing == SOFTMAX, "a draft in training sees its whole prefix, by a softmax"
        key_BRGD, value_BRGD = self.prefix[layer]
        query = query_BTQD.unflatten(2, (key_BRGD.shape[2], -1)).unflatten(1, (len(self.seen_AR), -1)) * scale
        scores = torch.einsum("bamghd,brgd->bamghr", query, key_BRGD).masked_fill(~self.seen_AR[:, None, None, None], float("-inf"))
        if self.is_prefix:
            out = torch.einsum("bamghr,brgd->bamghd", scores.softmax(-1), value_BRGD)
        else:
            key_BANGD, value_BANGD = self.own[layer]
            own = torch.einsum("bamghd,bangd->bamghn", query, key_BANGD)
            tokens, known = query.shape[2], key_BANGD.shape[2]
            if self.causal:
                seen_MN = torch.ones(tokens, known, dtype=torch.bool, device=own.device).tril(known - tokens)
                own = own.masked_fill(~seen_MN[:, None, None], float("-inf"))
            weights, own_weights = torch.cat((scores, own), -1).softmax(-1).split((scores.shape[-1], known), -1)
            out = torch.einsum("bamghr,brgd->bamghd", weights, value_BRGD) + torch.einsum("bamghn,bangd->bamghd", own_weights, value_BANGD)
        return out.flatten(1, 2).flatten(2, 3)

    def over(self, pool: int) -> SequenceAttention:
        """Drafts whose layers have heads of several shapes are not trained."""
        raise NotImplementedError

    def latent(self, *arguments: object) -> Tensor:
        """Latent attention is not trained."""
        raise NotImplementedError

    def write_latent(self, *arguments: object) -> Tensor:
        """Latent attention is not trained."""
        raise NotImplementedError
