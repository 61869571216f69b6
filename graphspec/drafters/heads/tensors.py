"""Helpers for loading draft heads. Where config and tensors disagree, the tensors decide, since they are what was trained."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ...facts.layouts import PREDICTION_HEADS, Layout
from ...models.checkpoint import Checkpoint, Progress, fill
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
