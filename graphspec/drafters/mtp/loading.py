"""Multi-token-prediction heads of a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch

from ...facts.layouts import PREDICTION_HEADS, Layout, TensorRule
from ...models.checkpoint import Checkpoint, Progress, fill
from ...models.decoder import Decoder
from ...models.vocabulary import token_embedding, vocabulary_head
from ..heads.tensors import TargetVocabulary
from .layout import MTP_LAYOUTS
from .network import MTPDraft, MTPHead

if TYPE_CHECKING:
    from pathlib import Path

    from ...models.layers import Embedding, Linear
    from .facts import MTPFacts

_REST_OF_A_MODEL = ("model.", "lm_head.")


def numbered(layout: Layout, index: int) -> Layout:
    """The layout of one head, with ``*`` replaced by its number; where a parameter has a ``*`` too, it stays."""

    def number(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name.replace("*", str(index)) for name in names)

    return replace(
        layout,
        rules=tuple(rule if "*" in rule.ours else replace(rule, sources=number(rule.sources)) for rule in layout.rules),
        ignored=number(layout.ignored),
    )


def _own_tensors(checkpoint: Checkpoint, layer: str, facts: MTPFacts, target: Path, vocabulary: TargetVocabulary) -> dict[str, str]:
    """Names of a head's embedding and language-model head, as far as they are not the target's.

    Some checkpoints store copies in the layer of each head; a folder of its own may hold those of the model that the heads were made for.
    """
    shape = (facts.decoder.vocab_size, facts.decoder.hidden_size)
    whole = {"embed_tokens": ["model.embed_tokens.weight"], "lm_head": ["lm_head.weight"]}
    if facts.decoder.tie_word_embeddings:
        whole["lm_head"] += whole["embed_tokens"]
    found = {}
    for part, copy in (("embed_tokens", "embed_tokens.weight"), ("lm_head", "shared_head.head.weight")):
        names = [layer + copy, *(whole[part] if facts.path != target else ())]
        if (name := next((name for name in names if name in checkpoint), None)) is None:
            continue
        checkpoint.check(name, shape)
        if vocabulary.differs(checkpoint, name, part):
            found[part] = name
    return found


def load_mtp(
    facts: MTPFacts,
    target: Decoder,
    max_positions: int,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress | None = None,
) -> MTPDraft:
    """The prediction heads of a checkpoint, in ``dtype`` on ``device``.

    Embedding and language-model head are the target's, unless the checkpoint has others. Other tensors of the model that contains the heads
    are not read.

    Raises:
        CheckpointError: a tensor of a head that is missing, superfluous, or of another shape or dtype; a damaged file.
    """
    checkpoint = Checkpoint(facts.path, facts.decoder.family.layout.renamed)
    vocabulary = TargetVocabulary(target.facts, device)
    spread = replace(facts.decoder, vocabulary=target.facts.vocabulary)  # as what it stands in for
    own_modules: dict[tuple[str, str], Embedding | Linear] = {}
    with torch.device("meta"):
        draft = MTPDraft(facts, max_positions, target.embed_tokens, target.lm_head)
    heads = cast("list[MTPHead]", draft.heads)
    for number, head in enumerate(heads):
        index = facts.first_index + number
        own = [name for name, _ in head.named_parameters()]
        layer, layout = f"model.layers.{index}.", numbered(MTP_LAYOUTS[facts.layout], index)
        for part, name in _own_tensors(checkpoint, layer, facts, target.facts.path, vocabulary).items():
            if (part, name) not in own_modules:
                own.append(f"{part}.weight")
                with torch.device("meta"):
                    own_modules[part, name] = (token_embedding if part == "embed_tokens" else vocabulary_head)(spread)
            setattr(head, part, own_modules[part, name])
            layout = replace(layout, rules=(*layout.rules, TensorRule(f"{part}.weight", (name,))))
        prefixes = (layer,) if facts.layout == "deepseek" else PREDICTION_HEADS
        others = tuple(f"model.mtp_layers.{other}." for other in range(facts.num_heads) if other != index)
        rest = {name for name in checkpoint.names() if name.startswith(_REST_OF_A_MODEL) and not name.startswith(prefixes)}
        rest |= {name for name in checkpoint.names() if name.startswith(others)}

        def report(done: int, total: int, before: int = number) -> None:
            if progress is not None:
                progress(before * total + done, facts.num_heads * total)

        fill(head, checkpoint, layout, own, rest, dtype, torch.device(device), report)
    for module in own_modules.values():
        module.to(device)
    if all(head.lm_head is not None for head in heads):  # the target's is read by none
        draft.lm_head = cast("Linear", heads[0].lm_head)
    draft.rotary.to(device)  # alone: moving the whole module would move what it shares with the target
    return draft.eval()
