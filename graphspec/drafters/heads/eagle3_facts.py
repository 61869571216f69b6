"""EAGLE-3 heads: what their ``config.json`` says in each published layout, checked against the target. Standard library only."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, TypeVar

from ...errors import CheckpointError
from ...facts.draft import DraftFacts
from ...facts.keys import MAX_LAYERS, MAX_WIDTH, Keys, is_integer, read_architecture, read_config
from ...facts.model import ModelFacts
from .config import (  # fmt: skip
    check_vocabulary,
    head_decoder,
    head_family,
    log_default,
    nested_keys,
    one_layer,
    other_draft,
    refuse_options,
    refuse_unknown,
    speculators_keys,
)

TAP_KEY = "eagle_aux_hidden_state_layer_ids"
DEFAULT_TAPS = 3
_USUAL_VOCABULARY = 32000  # of most published heads
_MODELOPT_KEYS = (
    "use_input_layernorm_in_first_layer", "use_last_layernorm", "use_mtp_layernorm", "next_layer_regular", "parallel_draft_step",
    "parallel_draft_heads_num_layers",
)  # fmt: skip
_EAGLE_KEYS = {
    *_MODELOPT_KEYS, TAP_KEY, "use_aux_hidden_state", "norm_before_residual", "norm_before_fc", "fc_norm", "use_aux_norm", "norm_output",
    "return_hidden_post_norm", "eh_proj_before_attn",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Facts(DraftFacts):
    """An EAGLE-3 head (arXiv 2503.01840) that was checked against its target."""

    layout: str = "safeailab"
    """Key of :data:`graphspec.drafters.heads.eagle3_loading.EAGLE3_WRITTEN`: the checkpoint's tensor names and config keys."""
    reads_taps: bool = True
    """Otherwise it reads the target's hidden state after the final norm alone."""
    has_fc: bool = True
    """A projection of what it reads; without taps the tensors decide."""
    norm_before_residual: bool = False
    """The first layer's residual is the normed hidden state, not the one before the norm."""
    norm_output: bool = False
    """EAGLE-3.1: the next step gets the hidden state after the final norm, not the one before it."""
    norm_before_fc: bool | None = None
    """One RMSNorm over the feature; None if the config doesn't state it: the tensors decide."""
    fc_norm: bool | None = None
    """EAGLE-3.1: an RMSNorm for each tapped layer; likewise."""
    fc_bias: bool | None = None
    """Likewise."""
    attention_inputs: ClassVar[int] = 2


Facts = TypeVar("Facts", bound=Eagle3Facts)


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Layers whose input residual stream is tapped if a config names none: those of the first published heads."""
    return (2, num_layers // 2, num_layers - 3)


def _read_taps(owner: Keys, entering: bool) -> tuple[int, ...] | None:
    """The layers that the tapped streams enter, one past the last of them for its output; None: the default."""
    if owner.values.get(TAP_KEY) in (None, []):
        return None
    ids = owner.values[TAP_KEY]
    if not isinstance(ids, list) or not 0 < len(ids) <= MAX_LAYERS or not all(is_integer(i) and abs(i) <= MAX_LAYERS for i in ids):
        raise owner.error(TAP_KEY, "a list of layer ids")
    taps = tuple(i if entering else i + 1 for i in ids)
    if list(taps) != sorted(set(taps)) or taps[0] < 0:
        raise owner.error(TAP_KEY, f"ascending, distinct ids from {0 if entering else -1} on")
    return taps


def _check_taps(facts: Eagle3Facts, keys: Keys, num_layers: int) -> tuple[int, ...]:
    if not facts.reads_taps:
        return ()
    if not facts.tap_layers:
        taps = default_taps(num_layers)
        if list(taps) != sorted(set(taps)) or taps[0] < 0:
            raise CheckpointError(
                f"{keys.where}: eagle_config.{TAP_KEY}",
                "explicit layer ids",
                f"none, and the default layers {taps} collide in a target of {num_layers} layers",
            )
        return taps
    if facts.tap_layers[-1] > num_layers:
        shift = 0 if facts.layout == "speculators" else 1
        raise CheckpointError(
            f"{keys.where}: {TAP_KEY}",
            f"ascending, distinct ids from {-shift} to {num_layers - shift} (the target has {num_layers} layers)",
            [i - shift for i in facts.tap_layers],
        )
    return facts.tap_layers


def _norm_flag(owners: tuple[Keys, ...], *names: str) -> bool | None:
    for owner in owners:
        for name in names:
            if owner.present(name):
                return owner.flag(name, False)
    return None


def _residual_flag(owners: tuple[Keys, ...], layout: str) -> bool:
    stated = _norm_flag(owners, "norm_before_residual")
    if stated is not None:
        return stated
    if layout == "speculators":
        log_default(
            owners[0], "norm_before_residual", True, "as vLLM reads this layout; if drafts are never accepted, try false", logging.WARNING
        )
        return True
    log_default(owners[0], "norm_before_residual", False, f"heads in the layout {layout} are trained so")
    return False


def eagle3_config(path: Path, keys: Keys) -> tuple[Eagle3Facts, Keys]:
    """Facts of a head from its config alone, and the keys of its decoder layers. Empty ``tap_layers``, if it reads any: the default of
    the target.

    Raises:
        CheckpointError: as :func:`read_eagle3_facts`, except for what concerns the target.
    """
    eagle = nested_keys(keys, "eagle_config")
    refuse_unknown(eagle, _EAGLE_KEYS)
    refuse_options(keys, eagle)
    if keys.present("speculators_model_type"):
        decoder_keys, family = speculators_keys(keys, "eagle3")
        refuse_options(decoder_keys)
        layout, architecture = "speculators", "Eagle3Speculator"
        taps = _read_taps(keys, entering=True)
    else:
        expected = "an EAGLE-3 head (LlamaForCausalLMEagle3, or LlamaForCausalLM with a draft_vocab_size)"
        architecture = read_architecture(keys, expected)
        if "eagle3" not in architecture.lower() and not (architecture == "LlamaForCausalLM" and keys.present("draft_vocab_size")):
            raise keys.error("architectures", expected, other_draft(keys, architecture))
        family, decoder_keys = head_family(keys, architecture), keys
        layout = "sglang" if "eagle3" in architecture.lower() else "safeailab"
        layout = "modelopt" if any(key in eagle.values for key in _MODELOPT_KEYS) else layout
        # here an id means the layer whose output is tapped, that is, the stream entering the next one
        taps = _read_taps(eagle if eagle.present(TAP_KEY) else keys, entering=False)
    reads_taps = all(owner.flag("use_aux_hidden_state", True) for owner in (eagle, keys))
    if not reads_taps and taps:
        hint = "with layer ids it reads those, without them the hidden state after the final norm"
        raise CheckpointError(f"{keys.where}: use_aux_hidden_state", f"true next to {TAP_KEY}", False, hint)
    decoder = head_decoder(decoder_keys, path, architecture, family)
    count = "num_aux_hidden_states"
    if reads_taps and keys.present(count) and keys.integer(count) != len(taps or ()) and (taps or keys.integer(count) != DEFAULT_TAPS):
        wanted = f"{len(taps)}, the number of tapped layers {taps}" if taps else f"{DEFAULT_TAPS}, or explicit {TAP_KEY}"
        raise keys.error(count, wanted)
    owners = (keys, eagle)
    norm_before_fc, fc_norm = _norm_flag(owners, "norm_before_fc"), _norm_flag(owners, "fc_norm", "use_aux_norm")
    if norm_before_fc and fc_norm:
        raise CheckpointError(f"{keys.where}: norm_before_fc", "false next to fc_norm: one or the other", True)
    norm_output = bool(_norm_flag(owners, "norm_output", "return_hidden_post_norm"))  # the second in TensorRT-LLM's eagle_config
    if norm_output and not fc_norm and layout in ("safeailab", "sglang"):
        log_default(keys, "fc_norm", False, "norm_output without it: SpecForge wrote that for plain EAGLE-3 once", logging.WARNING)
    draft_vocab_size = keys.integer("draft_vocab_size", decoder.vocab_size)
    if draft_vocab_size > decoder.vocab_size:
        raise keys.error("draft_vocab_size", f"at most vocab_size = {decoder.vocab_size}")
    target_hidden_size = keys.integer("target_hidden_size", decoder.hidden_size, maximum=MAX_WIDTH)
    facts = Eagle3Facts(
        path=path,
        decoder=decoder,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=target_hidden_size,
        feature_size=(len(taps or (0,) * DEFAULT_TAPS) if reads_taps else 1) * target_hidden_size,
        tap_layers=taps or (),
        reads_taps=reads_taps,
        layout=layout,
        norm_before_residual=_residual_flag(owners, layout),
        norm_output=norm_output,
        norm_before_fc=norm_before_fc,
        fc_norm=fc_norm,
        fc_bias=keys.flag("bias", False) if keys.present("bias") else None,
    )
    return facts, decoder_keys


def read_eagle3_facts(path: str | Path, target: ModelFacts) -> Eagle3Facts:
    """Facts of an EAGLE-3 head, checked against the target it drafts for.

    Read are the layouts of SafeAILab, SGLang / SpecForge, ModelOpt (nested ``eagle_config``) and speculators (nested
    ``transformer_layer_config``). RoPE parameters come from the head's config only: without a ``rope_theta`` it was trained with 10000,
    whatever the target uses. An option that a config does not state is settled by its layout, or later by the tensors, and logged.

    Raises:
        CheckpointError: as :func:`read_model_facts`; also another kind of draft, one that doesn't fit the target (hidden size, vocabulary,
            tapped layers), or an option that isn't supported.
    """
    keys = read_config(Path(path))
    return check_target(*eagle3_config(Path(path), keys), keys, target)


def check_target(facts: Facts, decoder_keys: Keys, keys: Keys, target: ModelFacts) -> Facts:
    """Check the facts against the target; returns them with their tapped layers. Raises as :func:`read_eagle3_facts`."""
    check_vocabulary(decoder_keys, facts.decoder, target)
    if facts.target_hidden_size != target.hidden_size:
        owner = keys if keys.present("target_hidden_size") else decoder_keys
        width = "target_hidden_size" if keys.present("target_hidden_size") else "hidden_size"
        raise owner.error(width, f"{target.hidden_size}, as in {target.path}")
    return replace(facts, tap_layers=_check_taps(facts, keys, target.num_layers))


def assumed_facts(folder: Path, target: ModelFacts) -> tuple[Eagle3Facts, str]:
    """See :attr:`graphspec.config.catalog.Variant.assumed`."""
    taps = default_taps(target.num_layers)
    if list(taps) != sorted(set(taps)) or taps[0] < 0:
        taps = tuple(range(min(3, target.num_layers)))
    facts = Eagle3Facts(
        path=folder,
        decoder=one_layer(target),
        draft_vocab_size=min(_USUAL_VOCABULARY, target.vocab_size),
        target_hidden_size=target.hidden_size,
        feature_size=len(taps) * target.hidden_size,
        tap_layers=taps,
    )
    return facts, f"one layer over {len(taps)} tapped ones, {facts.draft_vocab_size} tokens"
