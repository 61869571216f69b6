"""The P-EAGLE draft network: that of EAGLE-3, and a learned feature for tokens whose feature the target has not computed yet."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from ...errors import CheckpointError
from ...facts.layouts import TensorRule
from ...models.checkpoint import Checkpoint, Progress
from ...models.decoder import Decoder
from ...models.layers import Embedding, Linear, make_parameter
from ..heads.eagle3_loading import EAGLE3_LAYOUT, load_head
from ..heads.eagle3_network import Eagle3Draft
from ..heads.tensors import check_kind

if TYPE_CHECKING:
    from .facts import PEagleFacts

P_EAGLE_LAYOUT = replace(EAGLE3_LAYOUT, rules=(*EAGLE3_LAYOUT.rules, TensorRule("mask_hidden", ("mask_hidden",))))


class PEagleDraft(Eagle3Draft):
    """An EAGLE-3 head with ``mask_hidden``, which is the feature of every mask.

    Args:
        facts, max_positions, embed_tokens, lm_head: of :class:`~graphspec.drafters.heads.eagle3_network.Eagle3Draft`.
        mask_shape: shape of ``mask_hidden`` in the file, ``[F]`` after any number of leading ones; None: ``[1, F]``.
    """

    def __init__(
        self,
        facts: PEagleFacts,
        max_positions: int,
        embed_tokens: Embedding | None = None,
        lm_head: Linear | None = None,
        mask_shape: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(facts, max_positions, embed_tokens, lm_head)
        self.mask_token_id = facts.mask_token_id
        self.mask_hidden = make_parameter(*(mask_shape or (1, facts.feature_size)))


def load_p_eagle(
    facts: PEagleFacts,
    target: Decoder,
    max_positions: int,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress | None = None,
) -> PEagleDraft:
    """The P-EAGLE head of a checkpoint, in ``dtype`` on ``device``.

    Raises:
        CheckpointError: as :func:`graphspec.drafters.heads.eagle3_loading.load_head`; also no ``mask_hidden``, or one of another size.
    """
    checkpoint = Checkpoint(facts.path)
    check_kind(checkpoint, f"a P-EAGLE head, with mask_hidden [1, {facts.feature_size}]", "mask_hidden")
    shape = checkpoint.shape("mask_hidden")
    if shape not in [(1,) * front + (facts.feature_size,) for front in range(3)]:  # trainers keep dimensions of batch and length
        raise CheckpointError(checkpoint.key("mask_hidden"), f"shape [1, {facts.feature_size}]", f"shape {list(shape)}")
    return load_head(partial(PEagleDraft, mask_shape=shape), P_EAGLE_LAYOUT, facts, target, max_positions, dtype, device, progress)
