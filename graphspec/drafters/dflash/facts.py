"""Block drafters: what their ``config.json`` says in either layout, checked against the target. Standard library only."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from ...errors import CheckpointError
from ...facts.draft import DraftFacts, DraftPass
from ...facts.families import QWEN3
from ...facts.keys import MAX_LAYERS, MAX_WIDTH, Keys, is_integer, read_architecture, read_config
from ...facts.model import ModelFacts
from ...shapes import CycleShape
from ..heads.config import (
    check_speculator,
    check_vocabulary,
    head_decoder,
    nested_keys,
    one_layer,
    other_draft,
    refuse_options,
    refuse_unknown,
)

_LOG = logging.getLogger(__name__)
_KNOWN = {
    "mask_token_id", "target_layer_ids", "block_size", "causal", "causal_head", "is_causal", "sliding_window_non_causal", "draft_shift",
    "sample_from_anchor",
    "use_aux_hidden_state",
}  # fmt: skip
"""Keys of ``dflash_config`` that are read; any other changes the computation in a way that is not supported."""
_HARMLESS = {"attention_value_scale": (1, 1.0), "output_multiplier": (1, 1.0), "use_swa": (False,), "attention_sink_bias": (False,)}
_OFF = ("mask_embedding", "lora_config", "peft_config", "final_logit_softcapping", "logits_soft_cap", "kv_lora_rank")
_OPTIONS: dict[str, tuple[object, ...]] = {**dict.fromkeys(_OFF, (False,)), **_HARMLESS}
"""See :func:`~graphspec.drafters.heads.config.refuse_options`."""
_RELATIVES = {
    "conv_kernel_size": "DFlash2", "selector_rank": "DFlash2", "markov_rank": "DSpark", "markov_head_type": "DSpark",
    "gru_hidden_dim": "Domino", "xpress_rank": "XPress", "num_jacobi_passes": "XPress", "lilicorr_candidate_topk": "LiLiCorr",
}  # fmt: skip
"""Keys of drafts on the same backbone with a further head, which is not supported, and their names."""
_NO_PROJECTOR = (None, "", "none", "dflash")
_LAYERS, _BLOCK = 5, 16  # of the published drafts
LONGEST_BLOCK = 64
"""Most rows of a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashFacts(DraftFacts):
    """A block drafter (DFlash, arXiv 2602.06036; JetSpec, arXiv 2606.18394) that was checked against its target."""

    mask_token_id: int
    """Every token of the block but the anchor has its embedding."""
    block_size: int
    """Rows of a block, anchor included."""
    from_anchor: bool
    """Each row proposes the token after its position, the anchor's too; otherwise each mask proposes the token at its own."""
    causal: tuple[bool, ...]
    """Per layer: a row of the block sees only those before it; otherwise all of them."""

    @property
    def attends(self) -> bool:
        """False: keys and values of the context are a projection of the target's features."""
        return False

    def rows(self, num_steps: int) -> int:
        """Rows of the block that are computed: all of them if a layer looks ahead, otherwise those up to the last that proposes."""
        return num_steps + (0 if self.from_anchor else 1) if all(self.causal) else self.block_size

    def slots(self, shape: CycleShape) -> int:
        """The block begins after the root's slot, which holds the context before the root."""
        return max(shape.window_width, 1 + self.rows(shape.num_steps))

    def passes(self, shape: CycleShape) -> tuple[DraftPass, ...]:
        """One pass over the block."""
        return (DraftPass("dflash", self.rows(shape.num_steps), shape.num_steps),)


def _refuse(*owners: Keys) -> None:
    for keys in owners:
        for key, name in _RELATIVES.items():
            if keys.present(key):
                raise keys.error(key, "a draft without this head", f"{name} is not supported")
        kind = keys.values.get("projector_type")
        if kind not in _NO_PROJECTOR:
            raise keys.error("projector_type", "absent or null", "a head after the block is not supported")
        refuse_options(keys, options=_OPTIONS)


def _first(owners: tuple[Keys, ...], *names: str) -> tuple[Keys, str]:
    """The first owner and name that are present; the last owner and first name if none are."""
    return next(((keys, name) for keys in owners for name in names if keys.present(name)), (owners[-1], names[0]))


def _flag(owners: tuple[Keys, ...], *names: str) -> bool:
    return any(keys.flag(name, False) for keys in owners for name in names)


def default_layers(num_layers: int, count: int) -> tuple[int, ...]:
    """Layers whose output is tapped if a config names none: ``count`` of them, evenly spaced."""
    return tuple(round(1 + i * (num_layers - 4) / max(count - 1, 1)) for i in range(count))


def _read_taps(owners: tuple[Keys, ...], depth: int, default: tuple[int, ...], speculators: bool) -> tuple[int, ...]:
    """Layers that the tapped streams enter; one past the last: its output. The original layout has the layers whose output is tapped,
    speculators those entered.

    Args:
        owners: of the key, in order of precedence.
        depth: the target's layers.
        default: layers whose output is tapped if no owner has the key.
        speculators: the layout.
    """
    owner, key = _first(owners, *(("aux_hidden_state_layer_ids",) if speculators else ("target_layer_ids",)))
    if not owner.present(key):
        taps = tuple(i + 1 for i in default)
    else:
        ids = owner.values[key]
        if not isinstance(ids, list) or not 0 < len(ids) <= MAX_LAYERS or not all(is_integer(i) for i in ids):
            raise owner.error(key, "a list of layer ids")
        # The last stream of a speculators config is the target of its training, which the draft does not read.
        ids = ids[:-1] if speculators and len(ids) > 1 and ids[-1] == depth else ids
        taps = tuple(i if speculators else i + 1 for i in ids)
    if list(taps) != sorted(set(taps)) or not taps[0] > 0 or taps[-1] > depth:
        minimum, maximum = (1, depth) if speculators else (0, depth - 1)
        expected = f"ascending, distinct ids from {minimum} to {maximum} (the target has {depth} layers)"
        raise CheckpointError(f"{owner.where}: {key}", expected, list(owner.values.get(key) or taps))
    return taps


def read_dflash_facts(path: str | Path, target: ModelFacts) -> DFlashFacts:
    """See :func:`read_dflash_config`."""
    return read_dflash_config(path, target)[0]


def read_dflash_config(path: str | Path, target: ModelFacts) -> tuple[DFlashFacts, Keys]:
    """Facts of a block drafter, checked against the target it drafts for, and the keys of its layers.

    Read are the layouts of z-lab (DFlash, JetSpec) and of speculators (nested ``transformer_layer_config``).

    Raises:
        CheckpointError: as :func:`graphspec.facts.model.read_model_facts`; also another kind of draft, a further head after the block, no
            block size or mask token, a mask outside the vocabulary, tapped layers that the target doesn't have, or another size.
    """
    path = Path(path)
    keys = read_config(path)
    own = nested_keys(keys, "dflash_config")
    speculators = keys.present("speculators_model_type")
    _refuse(keys, own)
    refuse_unknown(own, _KNOWN, *_HARMLESS, "projector_type")
    if speculators:
        check_speculator(keys, "dflash")
        architecture, layers = "DFlashSpeculator", nested_keys(keys, "transformer_layer_config")
    else:
        expected = "a block drafter (DFlashDraftModel)"
        architecture = read_architecture(keys, expected)
        if "dflash" not in architecture.lower():
            raise keys.error("architectures", expected, other_draft(keys, architecture))
        layers = keys
    owners = (own, keys, layers)
    if not all(owner.flag("use_aux_hidden_state", True) for owner in owners):
        raise keys.error("use_aux_hidden_state", "true (the draft reads intermediate layers of its target)")
    layers.integer("num_hidden_layers", maximum=MAX_LAYERS)  # without a default, unlike that of other heads
    decoder = head_decoder(layers, path, architecture, QWEN3)
    check_vocabulary(layers, decoder, target)
    width = keys.integer("target_hidden_size", decoder.hidden_size, maximum=MAX_WIDTH)
    if decoder.hidden_size != target.hidden_size or width != target.hidden_size:
        raise layers.error("hidden_size", f"{target.hidden_size}, as in {target.path}", "the draft reads the target's embedding")
    depth = keys.integer("num_target_layers", target.num_layers, maximum=MAX_LAYERS)
    if depth != target.num_layers:
        _LOG.warning("%s: num_target_layers is %d, but %s has %d layers", keys.where, depth, target.path, target.num_layers)
    block_owner, block_key = _first((own, keys), "block_size")
    block = block_owner.integer(block_key, minimum=2, maximum=LONGEST_BLOCK)
    mask_owner, mask_key = _first((own, keys), "mask_token_id")
    mask = mask_owner.integer(mask_key, minimum=0)
    if mask >= target.vocab_size:
        raise mask_owner.error(mask_key, f"a token of the vocabulary of {target.vocab_size}")
    everywhere = _flag(owners, "causal", "causal_head", "is_causal")
    # As in vLLM: the causality of dflash_config applies to every layer, sliding ones too.
    in_sliding = not _flag(owners, "sliding_window_non_causal") and own.flag("causal", True)
    taps = _read_taps((own, keys), target.num_layers, default_layers(depth, decoder.num_layers), speculators)
    from_anchor = _flag((own, keys), "sample_from_anchor", "draft_shift")
    facts = DFlashFacts(
        path=path,
        decoder=decoder,
        draft_vocab_size=keys.integer("draft_vocab_size", decoder.vocab_size, maximum=decoder.vocab_size),
        target_hidden_size=target.hidden_size,
        feature_size=len(taps) * target.hidden_size,
        tap_layers=taps,
        max_steps=block if from_anchor else block - 1,
        mask_token_id=mask,
        block_size=block,
        from_anchor=from_anchor,
        causal=tuple(everywhere or (in_sliding and window is not None) for window in decoder.sliding_window),
    )
    return facts, layers


def assumed_facts(folder: Path, target: ModelFacts) -> tuple[DFlashFacts, str]:
    """See :attr:`graphspec.config.catalog.Variant.assumed`."""
    count = min(_LAYERS, max(1, target.num_layers - 3))
    taps = tuple(sorted({i + 1 for i in default_layers(target.num_layers, count) if 0 <= i < target.num_layers - 1}))
    decoder = replace(one_layer(target), num_layers=count, sliding_window=(None,) * count, family=QWEN3, qk_norm=True)
    facts = DFlashFacts(
        path=folder,
        decoder=decoder,
        draft_vocab_size=target.vocab_size,
        target_hidden_size=target.hidden_size,
        feature_size=len(taps) * target.hidden_size,
        tap_layers=taps,
        max_steps=_BLOCK - 1,
        mask_token_id=0,
        block_size=_BLOCK,
        from_anchor=False,
        causal=(False,) * count,
    )
    return facts, f"{count} layers over {len(taps)} tapped ones, blocks of {_BLOCK}"
