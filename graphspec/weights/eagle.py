"""EAGLE heads of a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import CheckpointError, ConfigError
from ..layouts import EAGLE3_LAYOUT
from ..models.llama import LlamaModel
from ..variants.eagle3 import Eagle3Draft
from .checkpoint import INTEGERS, Checkpoint, Progress, fill

if TYPE_CHECKING:
    from ..facts import Eagle3Facts


def _read_vocab_map(checkpoint: Checkpoint, facts: Eagle3Facts) -> Tensor | None:
    """Target id of each draft id, or None without a map; ``d2t`` holds offsets: target id = draft id + d2t[draft id]."""
    vocab_size, draft_vocab_size = facts.decoder.vocab_size, facts.draft_vocab_size
    if "d2t" not in checkpoint:
        if draft_vocab_size != vocab_size:
            expected = f"{draft_vocab_size} offsets into a vocabulary of {vocab_size}"
            raise CheckpointError(f"{checkpoint.path}: d2t", expected, "no such tensor")
        return None
    offset_Vd = checkpoint.read("d2t", (draft_vocab_size,), INTEGERS).long()
    token_Vd = torch.arange(draft_vocab_size) + offset_Vd
    mask_V = checkpoint.read("t2d", (vocab_size,), ("BOOL", "U8", *INTEGERS)).bool() if "t2d" in checkpoint else None

    def is_map(ids_Vd: Tensor) -> bool:
        inside = bool(((ids_Vd >= 0) & (ids_Vd < vocab_size)).all()) and bool((ids_Vd.diff() > 0).all())
        return inside and (mask_V is None or (int(mask_V.sum()) == draft_vocab_size and bool(mask_V[ids_Vd].all())))

    if is_map(token_Vd):
        return token_Vd
    hint = "d2t looks like target ids, not offsets" if is_map(offset_Vd) else ""
    expected = f"offsets: i + d2t[i] strictly ascending in [0, {vocab_size})" + ("" if mask_V is None else ", the ids that t2d marks")
    if bool(((token_Vd >= 0) & (token_Vd < vocab_size)).all()) and bool((token_Vd.diff() > 0).all()) and mask_V is not None:
        found = f"ids that differ from the {int(mask_V.sum())} marked in t2d"
    else:
        found = f"i + d2t[i] from {int(token_Vd.min())} to {int(token_Vd.max())}, {int((token_Vd.diff() <= 0).sum())} steps not ascending"
    raise CheckpointError(checkpoint.key("d2t"), expected, found, hint)


def load_eagle3(
    facts: Eagle3Facts,
    target: LlamaModel,
    max_positions: int,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress | None = None,
) -> Eagle3Draft:
    """The EAGLE-3 head of a checkpoint, in ``dtype`` on ``device``.

    The embedding is the target's unless the checkpoint has one; so is the language-model head of a full vocabulary.

    Raises:
        CheckpointError: as :func:`load_target`; also a vocabulary map that is missing, leaves the vocabulary, or holds ids, not offsets.
        ConfigError: ``dtype`` or ``device`` differ from the target's, whose embedding or head it shares.
    """
    checkpoint = Checkpoint(facts.path, EAGLE3_LAYOUT.renamed)
    full_vocabulary = facts.draft_vocab_size == facts.decoder.vocab_size
    same_width = facts.decoder.hidden_size == target.facts.hidden_size
    share_embedding = "embed_tokens.weight" not in checkpoint and same_width
    share_head = "lm_head.weight" not in checkpoint and full_vocabulary and same_width
    with torch.device("meta"):
        draft = Eagle3Draft(
            facts,
            max_positions,
            embed_tokens=target.embed_tokens if share_embedding else None,
            lm_head=target.lm_head if share_head else None,
        )
    shared = {"embed_tokens.weight"} if share_embedding else set()
    shared |= {"lm_head.weight"} if share_head else set()
    theirs, place = target.embed_tokens.weight, torch.empty(0, device=device).device
    if shared and (theirs.dtype, theirs.device) != (dtype, place):
        expected = f"{theirs.dtype} on {theirs.device}, as the target whose tensors are shared"
        raise ConfigError("dtype, device", expected, f"{dtype} on {place}")
    own = [name for name, _ in draft.named_parameters(remove_duplicate=False) if name not in shared]
    if "fc.weight" in checkpoint:  # first, for its shape tells another kind of head best
        checkpoint.read("fc.weight", (facts.decoder.hidden_size, facts.feature_size))
    token_Vd = _read_vocab_map(checkpoint, facts)
    fill(draft, checkpoint, EAGLE3_LAYOUT, own, set(), dtype, torch.device(device), progress)
    # buffers only: moving the whole module would move what it shares with the target
    draft.rotary.to(device)
    if token_Vd is not None and not full_vocabulary:  # a map of the full vocabulary is the identity
        draft.target_token_Vd = token_Vd.to(device)
    return draft.eval()
