"""A small language model of a checkpoint, as drafter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...models.checkpoint import Progress
from ...models.target import load_target
from .network import StandaloneDraft

if TYPE_CHECKING:
    import torch

    from ...models.llama import LlamaModel
    from .facts import StandaloneFacts


def load_standalone(
    facts: StandaloneFacts,
    target: LlamaModel,
    max_positions: int,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress | None = None,
) -> StandaloneDraft:
    """The language model of a draft checkpoint, in ``dtype`` on ``device``; it shares nothing with the target.

    Raises:
        CheckpointError: as :func:`load_target`.
    """
    del target
    model = load_target(facts.decoder, (), max_positions, dtype, device, progress)
    return StandaloneDraft(facts, max_positions, model).eval()
