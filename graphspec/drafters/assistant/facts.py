"""Gemma 4's assistant: what its ``config.json`` says, checked against the target. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ...errors import CheckpointError
from ...facts.draft import DraftFacts, DraftPass
from ...facts.families import GEMMA4
from ...facts.files import plain
from ...facts.keys import MAX_VOCAB, MAX_WIDTH, Keys, read_architecture, read_config
from ...facts.model import ModelFacts, read_decoder
from ...facts.multipliers import Multipliers
from ...facts.quantisation import read_quantisation
from ...shapes import CycleShape
from ..heads.config import nested_keys, other_draft

ARCHITECTURES = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")
_PAST = 2
"""By how much the window of the reference's mask is wider than that of the target's layers, see :func:`read_assistant_facts`."""


@dataclass(frozen=True, slots=True)
class Clusters:
    """A language-model head that scores the tokens of some clusters only."""

    count: int
    """Clusters that the vocabulary is divided into, all of one size."""
    chosen: int
    """Of which the logits of a row are computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantFacts(DraftFacts):
    """An assistant that was checked against its target."""

    embedding: Multipliers
    """Of the target's embedding, which the assistant reads as the target does."""
    clusters: Clusters | None = None
    """None: the head scores every token."""

    @property
    def owns_head(self) -> bool:
        return True

    @property
    def head_share(self) -> float:
        if self.clusters is None:
            return 1.0
        centroids, tokens = self.clusters.count, self.draft_vocab_size
        return (centroids + tokens * self.clusters.chosen / centroids) / (centroids + tokens)

    def passes(self, shape: CycleShape) -> tuple[DraftPass, ...]:
        """The first pass reads the root alone: nothing is kept of the other tokens of the window."""
        return (DraftPass("draft_extend", 1, 1), *DraftFacts.passes(self, shape)[1:])


def read_assistant_facts(path: str | Path, target: ModelFacts) -> AssistantFacts:
    """Facts of an assistant of Gemma 4, checked against the target it drafts for.

    A layer reads the keys and values of the target's last layer of its kind, with a window or without, that has its own. Its queries are
    all at the position of the root, whose keys and values do not exist yet. In a layer with a window W, the reference's mask
    (``Gemma4AssistantForCausalLM.create_attention_masks`` of transformers) counts from the last committed token, W included: there a query
    at p sees positions from ``p - 1 - W`` on.

    Raises:
        CheckpointError: another kind of draft, a key that is missing, wrong or not supported, or a draft for another target. The message
            names the key, what was expected and what was found.
    """
    path = Path(path)
    keys = read_config(path)
    expected = "one of " + ", ".join(ARCHITECTURES)
    architecture = read_architecture(keys, expected)
    if architecture not in ARCHITECTURES:
        raise keys.error("architectures", expected, other_draft(keys, architecture))
    if target.family.name != GEMMA4.name:
        raise keys.error("architectures", f"a draft for {target.architecture}, the target in {target.path}", "it drafts for Gemma 4 alone")
    if not keys.present("text_config"):
        raise keys.error("text_config", "an object")
    text = nested_keys(keys, "text_config")
    _check_sizes(keys, text, target)
    clusters = _read_clusters(keys, target.vocab_size)
    read_quantisation(path)
    decoder = _read_layers(text, path, architecture)
    sources = _sources(text, decoder, target)
    return AssistantFacts(
        path=path,
        decoder=replace(decoder, sliding_window=tuple(window and window + _PAST for window in decoder.sliding_window)),
        draft_vocab_size=target.vocab_size,
        target_hidden_size=target.hidden_size,
        feature_size=target.hidden_size,
        target_layers=sources,
        embedding=target.multipliers,
        clusters=clusters,
    )


def _check_sizes(keys: Keys, text: Keys, target: ModelFacts) -> None:
    """Refuse an assistant that differs from the target in a size they have in common."""
    sizes = {"backbone_hidden_size": (keys, target.hidden_size, MAX_WIDTH), "vocab_size": (text, target.vocab_size, MAX_VOCAB)}
    for key, (owner, size, maximum) in sizes.items():
        default = 1536 if key == "backbone_hidden_size" else 262144  # those of transformers
        if owner.integer(key, default, maximum=maximum) != size:
            raise owner.error(key, f"{size}, as in {target.path}", "the assistant was made for another target")


def _read_clusters(keys: Keys, vocab_size: int) -> Clusters | None:
    """The clusters of an ordered head.

    Raises:
        CheckpointError: numbers that are none, or don't divide the vocabulary.
    """
    if not keys.flag("use_ordered_embeddings", False):
        return None
    count = keys.integer("num_centroids", 2048, maximum=MAX_VOCAB)
    if vocab_size % count:
        raise keys.error("num_centroids", f"a divisor of vocab_size = {vocab_size}")
    return Clusters(count, keys.integer("centroid_intermediate_top_k", 32, maximum=count))


def _read_layers(text: Keys, path: Path, architecture: str) -> ModelFacts:
    """Facts of the layers, all of which read another network's keys and values.

    Raises:
        CheckpointError: layers of another kind, or keys as of :func:`graphspec.facts.model.read_decoder`.
    """
    # transformers requires these values too.
    if text.integer("hidden_size_per_layer_input", 256, minimum=0) != 0:
        raise text.error("hidden_size_per_layer_input", "0: layers of an assistant have no inputs of their own")
    for key in ("enable_moe_block", "use_double_wide_mlp"):
        if text.flag(key, False):
            raise text.error(key, "false: layers of an assistant have one plain MLP")
    shared, layers = "num_kv_shared_layers", text.integer("num_hidden_layers", 30)
    if text.integer(shared, 0, minimum=0) not in (0, layers):  # 0 means all of them
        raise text.error(shared, f"{layers}, all layers of the assistant")
    family = replace(GEMMA4, kv_sources=None, layer_inputs=None, shared_mlp_factor=None, experts=None)
    assert GEMMA4.usual is not None, "names of its own"
    decoder = read_decoder(GEMMA4.usual(text), path, architecture, family)
    # The logits of an assistant are not capped.
    return replace(decoder, kv_sources=(-1,) * decoder.num_layers, multipliers=replace(decoder.multipliers, softcap=None))


def _sources(text: Keys, decoder: ModelFacts, target: ModelFacts) -> tuple[int, ...]:
    """By layer of the assistant, the layer of the target that it reads.

    Raises:
        CheckpointError: the target has no such layer, or one with other heads, another window or another rotation.
    """

    def refuse(key: str, layer: int, source: int, expected: object, found: object) -> CheckpointError:
        where = f"as in layer {source} of {target.path}, whose keys and values layer {layer} reads"
        return CheckpointError(f"{text.where}: {key}", f"{expected}, {where}", plain(str(found)))

    found: list[int] = []
    for layer, window in enumerate(decoder.sliding_window):
        alike = [own for own in range(target.num_layers) if target.keeps(own) and (target.sliding_window[own] is None) == (window is None)]
        if not alike:
            kind = "full_attention" if window is None else "sliding_attention"
            raise text.error("layer_types", f"no {kind}, of which {target.path} has no layer with keys and values of its own")
        source = alike[-1]
        mine, theirs = decoder.heads(layer), target.heads(source)
        keys = ("num_global_key_value_heads", "global_head_dim") if window is None else ("num_key_value_heads", "head_dim")
        for key, own, other in zip(keys, (mine.count, mine.dim), (theirs.count, theirs.dim), strict=True):
            if own != other:
                raise refuse(key, layer, source, other, own)
        if window != target.sliding_window[source]:
            raise refuse("sliding_window", layer, source, target.sliding_window[source], window)
        mine_rope, their_rope = (
            facts.layer_rope[at] if facts.layer_rope else facts.rope for facts, at in ((decoder, layer), (target, source))
        )
        if mine_rope != their_rope:
            raise refuse("rope_parameters", layer, source, their_rope, mine_rope)
        found.append(source)
    return tuple(found)
