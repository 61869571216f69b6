"""Multi-token-prediction heads of a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ...errors import CheckpointError
from ...layouts import PREDICTION_HEADS, Layout, TensorRule
from ...models.checkpoint import Checkpoint, Progress, fill
from ...models.llama import LlamaModel
from .layout import MTP_LAYOUTS
from .network import MTPDraft

if TYPE_CHECKING:
    from .facts import MTPFacts

_REST_OF_A_MODEL = ("model.", "lm_head.")


def _numbered(layout: Layout, index: int) -> Layout:
    """The layout of one head, with ``*`` replaced by its number."""

    def number(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name.replace("*", str(index)) for name in names)

    return replace(
        layout,
        rules=tuple(TensorRule(rule.ours, number(rule.sources)) for rule in layout.rules),
        ignored=number(layout.ignored),
    )


def _check_copies(checkpoint: Checkpoint, prefix: str, facts: MTPFacts) -> None:
    """Check the shapes of a head's copies of the target's embedding and language-model head, which some checkpoints have."""
    shape = (facts.decoder.vocab_size, facts.decoder.hidden_size)
    for name in (prefix + "embed_tokens.weight", prefix + "shared_head.head.weight"):
        if name in checkpoint and checkpoint.shape(name) != shape:
            raise CheckpointError(checkpoint.key(name), f"shape {list(shape)}", f"shape {list(checkpoint.shape(name))}")


def load_mtp(
    facts: MTPFacts,
    target: LlamaModel,
    max_positions: int,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress | None = None,
) -> MTPDraft:
    """The prediction heads of a checkpoint, in ``dtype`` on ``device``; embedding and language-model head are the target's.

    Other tensors of the model that contains the heads are not read. The copies of the target's embedding and head that some checkpoints
    store with each head are checked and not used, as in SGLang: the network is trained with one shared matrix.

    Raises:
        CheckpointError: a tensor of a head that is missing, superfluous, or of another shape or dtype; a damaged file.
    """
    checkpoint = Checkpoint(facts.path)
    with torch.device("meta"):
        draft = MTPDraft(facts, max_positions, target.embed_tokens, target.lm_head)
    for number, head in enumerate(draft.heads):
        index = facts.first_index + number
        own = [name for name, _ in head.named_parameters()]
        layer = f"model.layers.{index}."
        prefixes = (layer,) if facts.layout == "deepseek" else PREDICTION_HEADS
        others = tuple(f"model.mtp_layers.{other}." for other in range(facts.num_heads) if other != index)
        rest = {name for name in checkpoint.names() if name.startswith(_REST_OF_A_MODEL) and not name.startswith(prefixes)}
        rest |= {name for name in checkpoint.names() if name.startswith(others)}
        _check_copies(checkpoint, layer, facts)

        def report(done: int, total: int, before: int = number) -> None:
            if progress is not None:
                progress(before * total + done, facts.num_heads * total)

        fill(head, checkpoint, _numbered(MTP_LAYOUTS[facts.layout], index), own, rest, dtype, torch.device(device), report)
    draft.rotary.to(device)  # alone: moving the whole module would move what it shares with the target
    return draft.eval()
