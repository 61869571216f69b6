"""EAGLE heads: what their ``config.json`` says, checked against the target. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError
from .draft import DraftFacts
from .keys import Keys, read_architecture, read_config
from .model import ModelFacts, read_decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Facts(DraftFacts):
    """An EAGLE-3 head (arXiv 2503.01840) that was checked against its target."""


_EAGLE3_OPTIONS = ("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc")


def _read_tap_layers(keys: Keys, eagle: Keys, num_layers: int) -> tuple[int, ...]:
    key = "eagle_aux_hidden_state_layer_ids"
    owner = eagle if eagle.present(key) else keys
    if owner.present(key):
        ids = owner.values[key]
        if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise owner.error(key, "a list of layer ids")
        taps = tuple(i + 1 for i in ids)  # the config counts by the layer whose output is meant
        if list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] >= num_layers:
            raise owner.error(key, f"ascending, distinct ids from -1 to {num_layers - 2} (the target has {num_layers} layers)")
    else:
        taps = (2, num_layers // 2, num_layers - 3)
        if list(taps) != sorted(set(taps)):
            raise CheckpointError(
                f"{keys.where}: eagle_config.{key}",
                "explicit layer ids",
                f"none, and the default layers {taps} collide in a target of {num_layers} layers",
            )
    if keys.present("num_aux_hidden_states") and keys.integer("num_aux_hidden_states") != len(taps):
        raise keys.error("num_aux_hidden_states", f"{len(taps)}, the number of tapped layers {taps}")
    return taps


def read_eagle3_facts(path: str | Path, target: ModelFacts) -> Eagle3Facts:
    """Facts of an EAGLE-3 head, checked against the target it drafts for.

    A head calls itself by an architecture with "Eagle3" in its name, or ``LlamaForCausalLM`` with a ``draft_vocab_size`` (the first
    published heads). RoPE parameters come from the head's config only: without a ``rope_theta`` it was trained with 10000, whatever the
    target uses.

    Raises:
        CheckpointError: as :func:`read_model_facts`; also another kind of draft, one that doesn't fit the target (hidden size, vocabulary,
            tapped layers), or an option that isn't supported.
    """
    path = Path(path)
    keys = read_config(path)
    expected = "an EAGLE-3 head (LlamaForCausalLMEagle3, or LlamaForCausalLM with a draft_vocab_size)"
    architecture = read_architecture(keys, expected)
    if "eagle3" not in architecture.lower() and not (architecture == "LlamaForCausalLM" and keys.present("draft_vocab_size")):
        raise keys.error("architectures", expected, "a whole language model or an EAGLE-1/2 head belongs to another variant")
    nested = keys.values.get("eagle_config")
    if nested is not None and not isinstance(nested, dict):
        raise keys.error("eagle_config", "an object")
    eagle = Keys(nested or {}, f"{keys.where}: eagle_config")
    for owner in (keys, eagle):
        for option in _EAGLE3_OPTIONS:
            if owner.values.get(option):
                raise owner.error(option, "absent or false", "this option is not supported")
    if not eagle.flag("use_aux_hidden_state", True):
        raise eagle.error("use_aux_hidden_state", "true (EAGLE-3 reads intermediate layers of its target)")
    if keys.integer("num_hidden_layers", 1) != 1:
        raise keys.error("num_hidden_layers", "1")
    keys.values.setdefault("num_hidden_layers", 1)
    decoder = read_decoder(keys, path, architecture, "LlamaForCausalLM")
    if decoder.vocab_size != target.vocab_size:
        raise keys.error("vocab_size", f"{target.vocab_size}, as in {target.path}", "head and target must share one vocabulary")
    width = "target_hidden_size" if keys.present("target_hidden_size") else "hidden_size"
    if keys.integer(width) != target.hidden_size:
        raise keys.error(width, f"{target.hidden_size}, as in {target.path}")
    draft_vocab_size = keys.integer("draft_vocab_size", decoder.vocab_size)
    if draft_vocab_size > decoder.vocab_size:
        raise keys.error("draft_vocab_size", f"at most vocab_size = {decoder.vocab_size}")
    taps = _read_tap_layers(keys, eagle, target.num_layers)
    return Eagle3Facts(
        path=path,
        decoder=decoder,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=target.hidden_size,
        feature_size=len(taps) * target.hidden_size,
        tap_layers=taps,
    )
