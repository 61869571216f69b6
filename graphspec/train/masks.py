"""Shared by networks that draft all depths in one pass: the choice of a mask token, and of the rows at which blocks begin."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..config.checks import in_range
from ..errors import ConfigError
from .drafter import Drafter, NetworkConfig


@dataclass
class MaskConfig(NetworkConfig):
    """Settings of a network that reads masks for the tokens it drafts."""

    mask_token_id: int | None = None
    """Token whose embedding is used for unknown tokens; null: the rarest one in the text."""
    anchors: int = 64
    """Most blocks per sequence of a training step. A block has as many rows as it drafts, so a long sequence can't have one at every
    token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range("train.network.mask_token_id", self.mask_token_id or 0, 0)
        in_range("train.network.anchors", self.anchors, 1)

    def mask_of(self, target: PreTrainedModel, counts_V: Tensor | None) -> int:
        """The mask token: the configured one, or the one with the smallest count (ties: the largest id) that does not end a text.

        Raises:
            ConfigError: it is outside the vocabulary.
        """
        vocab = target.config.vocab_size
        if self.mask_token_id is not None:
            if self.mask_token_id >= vocab:
                raise ConfigError("train.network.mask_token_id", f"a token of the target's vocabulary of {vocab}", self.mask_token_id)
            return self.mask_token_id
        if counts_V is None:
            return 0
        counts_V = counts_V.clone()
        ends = target.config.eos_token_id
        counts_V[ends if isinstance(ends, list) else [] if ends is None else [ends]] = torch.iinfo(torch.int64).max
        return vocab - 1 - int(counts_V.flip(0).argmin())


class MaskDrafter(Drafter):
    """A network that drafts all depths in one pass over masks, from some rows of a sequence in each step."""

    mask_id: Tensor

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network)
        self.register_buffer("mask_id", torch.zeros((), dtype=torch.int64))

    def start_mask(self, target: PreTrainedModel, counts_V: Tensor | None) -> None:
        """Choose the mask token, see :meth:`MaskConfig.mask_of`."""
        self.mask_id.fill_(self.config.mask_of(target, counts_V))

    def anchors(self, rows: int, turn: int) -> Tensor:
        return spread(rows, self.config.anchors, turn)


def spread(rows: int, count: int, turn: int) -> Tensor:
    """At most ``count`` of ``rows`` rows, evenly spaced; the first one advances by one with every turn. int64, ascending."""
    stride = -(-rows // count)
    return torch.arange(turn % stride, rows, stride)
