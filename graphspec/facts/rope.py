"""Rotary embeddings as ``config.json`` describes them, in both spellings in circulation. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..config.checks import LONG, brief
from ..errors import CheckpointError
from .keys import MAX_POSITIONS, MAX_THETA, Keys, is_number

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "proportional")
NO_ROPE = "none"
"""Kind of a model without positions: one pair of channels turns by nothing, which is the identity to the bit."""
LAYER_KINDS = ("full_attention", "sliding_attention")
"""Kinds of layers that rotate queries and keys, as ``layer_types`` spells them."""


@dataclass(frozen=True, slots=True)
class RopeFacts:
    """Rotary embedding, every derived default resolved; fields a kind doesn't use keep theirs.

    Sources: RoFormer (arXiv 2104.09864); linear and dynamic NTK scaling; YaRN (arXiv 2309.00071); Llama 3 (arXiv 2407.21783);
    proportional (Gemma 4): the frequencies of a whole head, of which only the first turn.
    """

    theta: float
    kind: str = "default"
    """One of :data:`ROPE_KINDS`, or :data:`NO_ROPE`."""
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    """Context before scaling: yarn, llama3; for dynamic the length from which on the base grows."""
    attention_factor: float = 1.0
    """Multiplies cos and sin (yarn)."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    partial_rotary_factor: float = 1.0
    """Part of the head that is rotated, from its first element on; the rest passes. Proportional: the share of pairs of the whole head that
    turn, the fastest ones."""
    query_beta: float = 0.0
    """Queries at position p are multiplied by ``1 + beta * log(1 + floor(p / original_max_position_embeddings))`` (Ministral 3)."""
    mscale_all_dim: float = 0.0
    """By which latent attention corrects its scale, see :func:`graphspec.facts.latent.read_latent`; 0: not at all."""

    @property
    def query_growth(self) -> tuple[float, int] | None:
        """``beta`` and ``context`` of :func:`graphspec.kernels.formulas.grown`; None: queries don't grow."""
        return (self.query_beta, self.original_max_position_embeddings) if self.query_beta else None

    def context(self, max_position_embeddings: int) -> int:
        """Positions that a model whose config states ``max_position_embeddings`` was made for, scaling included.

        A config to which YaRN is added by hand, as model cards advise, keeps the number of before.
        """
        if self.kind == "yarn":
            return max(max_position_embeddings, int(self.factor * self.original_max_position_embeddings))
        return int(max_position_embeddings * (self.factor if self.kind == "dynamic" else 1))

    def rotary_dim(self, head_dim: int) -> int:
        """Elements of a head of ``head_dim`` that are rotated, if only by nothing."""
        if self.kind == "proportional":
            return head_dim
        return 2 if self.kind == NO_ROPE else int(head_dim * self.partial_rotary_factor)


def distinct_ropes(layers: Sequence[RopeFacts], head_dim: int) -> tuple[RopeFacts, ...]:
    """The kinds of rotation among the layers, one that rotates first. All tables have the width of that one.

    Raises:
        ValueError: rotated parts of different widths, or a length-dependent kind among several.
    """
    found = sorted(dict.fromkeys(layers), key=lambda rope: rope.kind == NO_ROPE)
    rotating = [rope for rope in found if rope.kind != NO_ROPE]
    if len({rope.rotary_dim(head_dim) for rope in rotating}) > 1:
        raise ValueError("the same number of rotated elements in every layer")
    if len(found) > 1 and any(rope.kind == "dynamic" for rope in found):
        raise ValueError("no dynamic scaling where layers are rotated differently")
    return tuple(found)


def magnitude(factor: float, mscale: float) -> float:
    """YaRN's growth of scores with the context (arXiv 2309.00071, section 3.3), ``0.1 * mscale * ln(factor) + 1``."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _read_partial(keys: Keys, rope: Keys, head_dim: int, default: float | None) -> float:
    key = "partial_rotary_factor"
    owner = rope if rope.present(key) else keys
    if default is None:
        if owner.present(key) and not (is_number(owner.values[key]) and owner.values[key] == 1):
            raise CheckpointError(f"{keys.where}: {key}", "1.0 (all of the head is rotated)", brief(owner.values[key], LONG))
        return 1.0
    partial = owner.number(key, default)
    if partial > 1 or int(head_dim * partial) < 2 or int(head_dim * partial) % 2:
        raise owner.error(key, f"at most 1, and an even number of rotated elements in a head of {head_dim}")
    return partial


def _read_theta(keys: Keys, rope: Keys) -> float:
    """The base, from either place; above 1, for its logarithm divides."""
    stated = [owner.number("rope_theta", above=1.0, maximum=MAX_THETA) for owner in (rope, keys) if owner.present("rope_theta")]
    if len(stated) == 2 and stated[0] != stated[1]:
        raise rope.error("rope_theta", f"{stated[1]:g}, as the other rope_theta says")
    return stated[0] if stated else 10000.0


def _number_or(rope: Keys, key: str, default: float) -> float:
    """Null and 0 mean the default, as in transformers."""
    zero = is_number(rope.values.get(key)) and rope.values[key] == 0
    return default if zero else rope.number(key, default)


def read_position_embedding(keys: Keys, family_has: bool | None) -> bool:
    """Whether queries and keys are rotated: always, never, or (None) as ``position_embedding_type`` says.

    Raises:
        CheckpointError: a type that is not known.
    """
    if family_has is not None:
        return family_has
    stated = keys.values.get("position_embedding_type")
    if stated not in (None, "rope", "nope"):
        raise keys.error("position_embedding_type", "rope, nope or null")
    return stated == "rope"


def rotating_kinds(keys: Keys, windows: Sequence[int | None]) -> tuple[str, ...]:
    """Kinds of layers that rotate, by which ``rope_parameters`` may be nested: those in ``layer_types``, else as the windows tell."""
    listed = keys.values.get("layer_types")
    if isinstance(listed, list):
        return tuple(kind for kind in LAYER_KINDS if kind in listed)
    return tuple(kind for kind, has in zip(LAYER_KINDS, (None in windows, any(windows)), strict=True) if has)


def read_rope(
    keys: Keys,
    max_position_embeddings: int,
    head_dim: int,
    kinds: tuple[str, ...] = ROPE_KINDS,
    partial_rotary: float | None = None,
    layer_kinds: tuple[str, ...] = LAYER_KINDS[:1],
    dims: Mapping[str, int] | None = None,
) -> dict[str, RopeFacts]:
    """RoPE parameters in either spelling, by kind of layer.

    Args:
        keys: of the decoder.
        max_position_embeddings: its context.
        head_dim: elements of a head.
        kinds: of :data:`ROPE_KINDS` that are known of the model.
        partial_rotary: rotated part of a head where the config doesn't say; None: all of it, whatever the config says.
        layer_kinds: of :data:`LAYER_KINDS` that the model has.
        dims: elements of a head by kind of layer, where it is not ``head_dim`` in all.

    Raises:
        CheckpointError: a kind or key that is missing, wrong or not supported.
    """
    name = "rope_scaling" if keys.values.get("rope_scaling") not in (None, {}) else "rope_parameters"
    raw = keys.values.get(name)
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        raise keys.error(name, "an object or null")
    where = f"{keys.where}: {name}"
    nested = {key: value for key, value in raw.items() if isinstance(value, dict)}
    if not nested:
        for width in (*(dims or {}).values(), head_dim):  # one result, checked for each
            rope = _read_one(keys, Keys(raw, where), max_position_embeddings, width, kinds, partial_rotary)
        return dict.fromkeys(layer_kinds or LAYER_KINDS, rope)
    if any(value is not None for key, value in raw.items() if key not in nested):
        raise keys.error(name, "parameters, or an object of them for each kind of layer, not both")
    found: dict[str, RopeFacts] = {}
    for kind in layer_kinds or tuple(nested):
        if kind not in nested:
            raise Keys(raw, where).error(kind, "the parameters of this kind of layer, which the model has")
        own = Keys(nested[kind], f"{where}: {kind}")
        found[kind] = _read_one(keys, own, max_position_embeddings, (dims or {}).get(kind, head_dim), kinds, partial_rotary)
    return found


def _read_one(
    keys: Keys, rope: Keys, max_position_embeddings: int, head_dim: int, kinds: tuple[str, ...], partial_rotary: float | None
) -> RopeFacts:
    raw = rope.values
    kind = raw.get("rope_type", raw.get("type", "default"))
    kind = "default" if kind == "mrope" else kind  # the three positions of a token of text are one (Qwen2-VL, arXiv 2409.12191)
    if kind not in kinds:
        raise rope.error("rope_type" if "rope_type" in raw else "type", "one of " + ", ".join(kinds))
    if kind == "proportional":
        share = "partial_rotary_factor"
        partial = (rope if rope.present(share) else keys).number(share, 1.0, maximum=1.0)
        return RopeFacts(_read_theta(keys, rope), kind, rope.number("factor", 1.0), partial_rotary_factor=partial)
    partial = _read_partial(keys, rope, head_dim, partial_rotary)
    theta = _read_theta(keys, rope)
    beta = _number_or(rope, "llama_4_scaling_beta", 0.0)
    if beta and kind != "yarn":
        raise rope.error("llama_4_scaling_beta", "0 without yarn")
    if kind == "default":
        return RopeFacts(theta, partial_rotary_factor=partial)
    from_lengths = kind == "yarn" and "factor" in raw and raw["factor"] is None  # null: the ratio of the two context lengths, below
    mscale, mscale_all_dim = _number_or(rope, "mscale", 0.0), _number_or(rope, "mscale_all_dim", 0.0)
    stretch = 0.0 if from_lengths else rope.number("factor")
    if not from_lengths and stretch < 1:
        raise rope.error("factor", "a number >= 1")
    facts = RopeFacts(theta, kind, stretch, partial_rotary_factor=partial, mscale_all_dim=mscale_all_dim)
    if kind == "linear":
        return facts
    if kind == "dynamic":
        if facts.rotary_dim(head_dim) < 4:
            raise CheckpointError(f"{keys.where}: head_dim", "at least 4 rotated elements with dynamic scaling", head_dim)
        return replace(facts, original_max_position_embeddings=max_position_embeddings)
    outer = "original_max_position_embeddings"
    original = (keys if keys.present(outer) else rope).integer(outer, max_position_embeddings, maximum=MAX_POSITIONS)
    facts = replace(facts, original_max_position_embeddings=original)
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if high <= low:
            raise rope.error("high_freq_factor", f"more than low_freq_factor = {low}")
        return replace(facts, low_freq_factor=low, high_freq_factor=high)
    factor = max_position_embeddings / original if from_lengths else facts.factor
    return _read_yarn(rope, replace(facts, factor=factor, query_beta=beta), mscale)


def _read_yarn(rope: Keys, facts: RopeFacts, mscale: float) -> RopeFacts:
    """What YaRN has in addition to a factor and the context that it stretches; ``mscale``: 0 where it is not given."""
    if rope.present("attention_factor"):
        attention_factor = rope.number("attention_factor")
    elif mscale and facts.mscale_all_dim:
        attention_factor = magnitude(facts.factor, mscale) / magnitude(facts.factor, facts.mscale_all_dim)
    else:
        attention_factor = magnitude(facts.factor, 1.0)
    fast, slow = _number_or(rope, "beta_fast", 32.0), _number_or(rope, "beta_slow", 1.0)
    if fast < slow:
        raise rope.error("beta_fast", f"at least beta_slow = {slow:g}")
    truncate = rope.flag("truncate", True)
    return replace(facts, attention_factor=attention_factor, beta_fast=fast, beta_slow=slow, truncate=truncate)
