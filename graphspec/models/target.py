"""The target network of a checkpoint."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch

from ..errors import CheckpointError
from ..facts import read_model_facts
from ..facts.layouts import PREDICTION_HEADS, TensorRule
from ..plan.own_modules import check_own_modules
from .checkpoint import Checkpoint, Progress, fill, tensor_sources
from .decoder import Decoder
from .vocabulary import set_weight

if TYPE_CHECKING:
    from pathlib import Path

    from ..config.schema import Config
    from ..facts import ModelFacts


_LOG = logging.getLogger(__name__)


def target_checkpoint(facts: ModelFacts) -> Checkpoint:
    """The tensors of a target, under the names of its family's layout."""
    return Checkpoint(facts.path, facts.family.layout.renamed)


def vocabulary_tensors(facts: ModelFacts, checkpoint: Checkpoint) -> tuple[str, str]:
    """Names of the tensors of embedding and language-model head, which need not be there."""
    embedding, head = (tensor_sources(facts.family.layout, f"{part}.weight", checkpoint)[0] for part in ("embed_tokens", "lm_head"))
    return embedding, head


def settle_head(facts: ModelFacts, checkpoint: Checkpoint) -> ModelFacts:
    """The facts with ``tie_word_embeddings`` as the tensors have it: a head that equals the embedding, or isn't there, is tied.

    Raises:
        CheckpointError: no head, although the config means that the model has one of its own; a head of another shape or dtype.
    """
    embedding, head = vocabulary_tensors(facts, checkpoint)
    if not facts.tie_word_embeddings:
        if head not in checkpoint and embedding in checkpoint:
            why = "tie_word_embeddings is not true in config.json" if facts.family.ties else f"every {facts.architecture} has one"
            raise CheckpointError(f"{checkpoint.path}: {head}", f"a head of its own, as {why}", "no such tensor")
        return facts
    if head not in checkpoint or embedding not in checkpoint:
        return facts
    for name in (embedding, head):
        checkpoint.check(name, (facts.vocab_size, facts.hidden_size))
    return replace(facts, tie_word_embeddings=checkpoint.equals(head, checkpoint, embedding))


def _prediction_heads(checkpoint: Checkpoint, num_layers: int) -> set[str]:
    """Tensors of prediction heads, which are no part of the model: a layer past the last one is such a head if it has an ``eh_proj``."""
    names = checkpoint.names()
    found = {re.fullmatch(r"(model\.layers\.(\d{1,4})\.)eh_proj\.weight", name) for name in names}
    layers = tuple(match[1] for match in found if match and int(match[2]) >= num_layers)
    return {name for name in names if name.startswith((*PREDICTION_HEADS, *layers))}


def unread_projections(facts: ModelFacts) -> set[str]:
    """Keys and values of layers that read another layer's: files may have them, and nothing uses them."""
    layers = [layer for layer in range(facts.num_layers) if facts.attends(layer) and not facts.keeps(layer)]
    parts = ("k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias", "k_norm.weight", "v_norm.weight")
    return {f"model.layers.{layer}.self_attn.{part}" for layer in layers for part in parts}


def read_target_facts(config: Config, folder: Path) -> ModelFacts:
    """Facts of the target of an engine, as ``model.family`` asks for it.

    Args:
        config: of the engine.
        folder: of the checkpoint.

    Raises:
        ConfigError: something that can't be done with ``model.family=transformers``.
        CheckpointError: as :func:`graphspec.facts.read_model_facts`, or a model that transformers' modules can't serve here.
    """
    if config.model.family == "auto":
        return read_model_facts(folder)
    check_own_modules(config)
    from .own_modules import read_own_facts

    _LOG.warning("model.family=transformers: %s runs by the modules of transformers, op by op: slower than a family of graphspec", folder)
    return read_own_facts(folder)


def load_target(
    facts: ModelFacts,
    tap_layers: tuple[int, ...],
    max_positions: int,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress | None = None,
) -> Decoder:
    """The target of a checkpoint, in ``dtype`` on ``device``. Multi-token-prediction heads in the same files are left unread.

    Args:
        facts: from :func:`graphspec.facts.read_model_facts`.
        tap_layers: layers whose entering residual stream the drafter reads, ascending.
        max_positions: positions the RoPE table covers.
        dtype: of the weights.
        device: of the weights.
        progress: called after each tensor.

    Raises:
        CheckpointError: a file or tensor that is missing, damaged, superfluous or of another shape or dtype.
    """
    if facts.family.own_modules:
        from .own_modules import load_own_modules

        # A drafter that would ask more of it than stages do is refused before.
        return cast("Decoder", load_own_modules(facts, dtype, torch.device(device)))
    layout, checkpoint = facts.family.layout, target_checkpoint(facts)
    embedding, head = vocabulary_tensors(facts, checkpoint)
    if facts.stored_vocab_size is not None:
        for name in (embedding, head):
            if name in checkpoint:
                checkpoint.check(name, (facts.stored_vocab_size, facts.hidden_size))
                checkpoint.trim(name, facts.vocab_size)
    settled = settle_head(facts, checkpoint)
    if settled.tie_word_embeddings != facts.tie_word_embeddings and torch.device(device).type != "meta":
        message = "%s: config.json says tie_word_embeddings = true, but %s differs from %s; the tensors decide: the head is its own"
        _LOG.warning(message, checkpoint.path, head, embedding)
    tied = settled.tie_word_embeddings
    if tied and embedding not in checkpoint:  # one matrix, stored under the other name
        layout = replace(layout, rules=(TensorRule("embed_tokens.weight", (head,)), *layout.rules))
    with torch.device("meta"):
        model = Decoder(settled, tap_layers, max_positions)
    own = [name for name, _ in model.named_parameters()]  # a tied head is no parameter of its own
    ignored = {head} if tied else set()  # a copy of the embedding, as was seen
    ignored |= _prediction_heads(checkpoint, facts.num_layers) | unread_projections(facts)
    fill(model, checkpoint, layout, own, ignored, dtype, torch.device(device), progress)
    if tied:
        set_weight(model.lm_head, model.embed_tokens.weight, model.embed_tokens.stored)
    if facts.recurrent is not None:
        model.stacked_convolution()
    return model.to(device).eval()
