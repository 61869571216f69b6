"""Helpers for loading draft heads. Where config and tensors disagree, the tensors decide, since they are what was trained."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...facts.layouts import PREDICTION_HEADS, Layout
from ...models.checkpoint import INTEGERS, Checkpoint, Progress, fill
from ...models.target import target_checkpoint, vocabulary_tensors

if TYPE_CHECKING:
    from collections.abc import Collection

    from ...facts import ModelFacts
    from .network import DraftNetwork

_LOG = logging.getLogger(__name__)


def looks_like(checkpoint: Checkpoint) -> str:
    """The kind of checkpoint that the names of its tensors suggest, for messages."""
    names = checkpoint.names()
    if any("eh_proj." in name or name.startswith(PREDICTION_HEADS) for name in names):
        return "multi-token-prediction heads: variant=mtp"
    if any(name.startswith("mask_") for name in names):
        return "a P-EAGLE head: variant=p_eagle"
    if "hidden_norm.weight" in names:
        return "a block drafter: variant=dflash"
    if any(name.endswith("hidden_norm.weight") for name in names) or "d2t" in names:
        return "an EAGLE-3 head: variant=eagle3"
    if "fc.weight" in names:
        return "an EAGLE-1/2 head: variant=eagle"
    if any(name.startswith("model.") for name in names):
        return "a whole language model: variant=standalone"
    return "another kind of checkpoint"


def check_kind(checkpoint: Checkpoint, expected: str, *names: str) -> None:
    """Check that tensors which tell this kind of checkpoint from others are there.

    Raises:
        CheckpointError: one is missing.
    """
    for name in names:
        if name not in checkpoint:
            raise CheckpointError(f"{checkpoint.path}: {name}", expected, "no such tensor", f"this looks like {looks_like(checkpoint)}")


def settle(checkpoint: Checkpoint, key: str, stated: bool | None, tensor: str) -> bool:
    """Whether the checkpoint has an optional part: the tensor decides; a config that states otherwise is logged."""
    there = tensor in checkpoint
    if stated is not None and stated != there:
        state = "is" if there else "is not"
        _LOG.warning("%s: config.json means %s = %s, but %s %s there; the tensors decide", checkpoint.path, key, stated, tensor, state)
    return there


def settle_decoder(checkpoint: Checkpoint, decoder: ModelFacts) -> ModelFacts:
    """The facts with biases and query / key norms as the tensors of the first layer have them; differences to the config are logged."""
    first = "layers.0."
    query = "q_proj" if decoder.latent is None else "kv_a_proj_with_mqa"
    return replace(
        decoder,
        attention_bias=settle(checkpoint, "attention_bias", decoder.attention_bias, f"{first}self_attn.{query}.bias"),
        output_bias=settle(checkpoint, "a bias of o_proj", decoder.output_bias, f"{first}self_attn.o_proj.bias"),
        mlp_bias=settle(checkpoint, "mlp_bias", decoder.mlp_bias, f"{first}mlp.gate_proj.bias"),
        qk_norm=settle(checkpoint, "query and key norms", decoder.qk_norm, f"{first}self_attn.q_norm.weight"),
    )


def read_vocab_map(checkpoint: Checkpoint, vocab_size: int, draft_vocab_size: int) -> Tensor | None:
    """Target id of each draft id, or None without a map; ``d2t`` holds offsets: target id = draft id + d2t[draft id].

    Raises:
        CheckpointError: a map that is needed and missing, leaves the vocabulary, holds ids instead of offsets, or disagrees with ``t2d``.
    """
    mask_V = checkpoint.read("t2d", (vocab_size,), ("BOOL", "U8", *INTEGERS)).bool() if "t2d" in checkpoint else None
    if "d2t" not in checkpoint:
        if draft_vocab_size != vocab_size or (mask_V is not None and not mask_V.all()):
            expected = f"{draft_vocab_size} offsets into a vocabulary of {vocab_size}"
            raise CheckpointError(f"{checkpoint.path}: d2t", expected, "no such tensor")
        return None
    offset_Vd = checkpoint.read("d2t", (draft_vocab_size,), INTEGERS).long()
    token_Vd = torch.arange(draft_vocab_size) + offset_Vd

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


def renamed(name: str, patterns: tuple[tuple[str, str], ...]) -> str:
    """The name of a tensor in a layout: the first pattern that matches its beginning is replaced."""
    for pattern, theirs in patterns:
        if re.match(pattern, name):
            return re.sub(f"^(?:{pattern})", theirs, name)
    return name


class TargetVocabulary:
    """Embedding and language-model head in the target's files, to which a draft's copies of them are compared.

    Without tensors of the target, for a plan, every copy passes for one. On the device ``meta`` nothing is logged.
    """

    def __init__(self, target: ModelFacts, device: torch.device | str) -> None:
        self._logs = torch.device(device).type != "meta"
        self._checkpoint = target_checkpoint(target) if Checkpoint.is_there(target.path) else None
        self._names: dict[str, str] = {}
        if self._checkpoint is not None:
            names = dict(zip(("embed_tokens", "lm_head"), vocabulary_tensors(target, self._checkpoint), strict=True))
            there = [name for name in names.values() if name in self._checkpoint]
            # A target that ties them may have only one.
            self._names = {part: name if name in there else there[0] for part, name in names.items() if there}

    def differs(self, checkpoint: Checkpoint, name: str, part: str) -> bool:
        """Whether an existing tensor of a draft is another matrix than the target's ``part``, its dtype aside; it is logged then."""
        if self._checkpoint is None or part not in self._names:
            return False
        theirs = self._names[part]
        if checkpoint.equals(name, self._checkpoint, theirs, rounded=True):
            return False
        if self._logs:
            _LOG.warning("%s differs from the target's %s; the draft keeps its own", checkpoint.key(name), self._checkpoint.key(theirs))
        return True


def fill_head(
    draft: DraftNetwork,
    checkpoint: Checkpoint,
    layout: Layout,
    shared: Collection[str],
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress | None,
    copies: Collection[str] = (),
) -> None:
    """Load every parameter but the ``shared`` ones, which the target has loaded, and move the RoPE table to ``device``.

    ``copies``: tensors that may be there and were found to be the target's.

    Raises:
        CheckpointError: a tensor that is missing, superfluous, or of another shape or dtype; a damaged file.
    """
    own = [name for name, _ in draft.named_parameters(remove_duplicate=False) if name not in shared]
    fill(draft, checkpoint, layout, own, set(copies), dtype, torch.device(device), progress)
    draft.rotary.to(device)  # alone: moving the whole module would move what it shares with the target
