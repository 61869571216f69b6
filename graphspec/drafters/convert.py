"""Rewrite an EAGLE head from any published layout into another: names and config keys change, the weights stay bit for bit.

What a layout can't express is an error. Before anything is left on disk the result is read back and compared with its source.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..errors import CheckpointError, ConfigError, spell_bytes
from ..facts import ModelFacts, read_model_facts
from ..models.checkpoint import Checkpoint
from ..paths import check_writable, make_folder, unwritable, user_path
from .eagle.facts import EagleFacts, read_eagle_config
from .eagle.loading import EAGLE_NORMS, EAGLE_WRITTEN, eagle_checkpoint
from .eagle3.facts import DEFAULT_TAPS, TAP_KEY, Eagle3Facts, default_taps, read_eagle3_config
from .eagle3.loading import EAGLE3_WRITTEN, eagle3_checkpoint, read_vocab_map
from .head_tensors import looks_like

_OF_A_LAYOUT = {
    "architectures", "auto_map", "bias", "draft_vocab_size", "eagle_config", "fc_norm", "fusion_bias", "layernorms", "norm_before_fc",
    "norm_before_residual", "norm_output", "num_aux_hidden_states", "speculators_config", "speculators_model_type", "speculators_version",
    "target_hidden_size", "use_aux_norm", TAP_KEY,
}  # fmt: skip

_EAGLE3_EXPRESSES: dict[str, set[str]] = {
    "safeailab": {"target_hidden_size", "embed_tokens"},
    "sglang": {
        "target_hidden_size", "embed_tokens", "num_hidden_layers", "norm_before_fc", "fc_norm", "norm_output", "fc bias", "no lm_head",
        TAP_KEY,
    },
    "speculators": {
        "target_hidden_size", "embed_tokens", "num_hidden_layers", "norm_before_fc", "fc_norm", "norm_output", "norm_before_residual",
        "no lm_head", TAP_KEY, "attention_bias", "mlp_bias", "query and key norms", "sliding_window",
    },
    "modelopt": {"num_hidden_layers", "no lm_head", TAP_KEY, "attention_bias", "mlp_bias"},
}  # fmt: skip
_EAGLE_EXPRESSES: dict[str, set[str]] = {
    "safeailab": {"q, k, v biases"},
    "hass": {"q, k, v biases", "layer norms"},
    "speculators-old": {"all three layer norms", "attention_bias", "mlp_bias"},
}


@dataclass(frozen=True, slots=True)
class _Head:
    """A head read from its files, in names of no layout's own."""

    facts: Eagle3Facts | EagleFacts
    config: dict[str, Any]
    """Keys of its decoder layers."""
    tensors: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Converted:
    """Result of :func:`convert`.

    Attributes:
        folder: the new one.
        kind: of the head, ``EAGLE-3`` or ``EAGLE-1/2``.
        layout: of its files.
        tensors: how many.
        size: bytes of all tensors.
    """

    folder: Path
    kind: str
    layout: str
    tensors: int
    size: int

    @property
    def sentence(self) -> str:
        """In words."""
        found = f"{self.tensors} tensors, {spell_bytes(self.size)}, read back and equal to the bit"
        return f"{self.folder}: {self.kind} head in the layout {self.layout}; config.json, model.safetensors with {found}"


def _refuse(path: Path, layout: str, can: set[str], needs: dict[str, bool]) -> None:
    for what, needed in needs.items():
        if needed and what not in can:
            raise CheckpointError(f"{path}: {what}", f"a head that the layout {layout} can express", f"one with {what}")


def _decoder_needs(decoder: ModelFacts) -> dict[str, bool]:
    both = decoder.attention_bias and decoder.output_bias
    return {
        "attention_bias": both,
        "q, k, v biases": decoder.attention_bias and not both,
        "o_proj bias": decoder.output_bias and not both,
        "mlp_bias": decoder.mlp_bias,
        "query and key norms": decoder.qk_norm,
        "sliding_window": any(decoder.sliding_window),
    }


def _decoder_config(keys: dict[str, Any], decoder: ModelFacts) -> dict[str, Any]:
    kept = {key: value for key, value in keys.items() if key not in _OF_A_LAYOUT}
    sizes = {"num_hidden_layers": decoder.num_layers, "num_key_value_heads": decoder.num_kv_heads, "head_dim": decoder.head_dim}
    biases = {"attention_bias": decoder.attention_bias and decoder.output_bias, "mlp_bias": decoder.mlp_bias}
    return kept | {"model_type": "qwen3" if decoder.qk_norm else "llama"} | sizes | biases


def _speculators(kind: str, architecture: str, target: ModelFacts | None) -> dict[str, Any]:
    method = {"proposal_type": "greedy", "speculative_tokens": 3, "accept_tolerance": 0.0, "verifier_accept_k": 1}
    verifier = {"name_or_path": str(target.path) if target else None, "architectures": [target.architecture] if target else []}
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": verifier,
        },
    }


def _read_eagle3(path: Path) -> _Head:
    facts, keys = read_eagle3_config(path)
    checkpoint, facts = eagle3_checkpoint(facts)
    read_vocab_map(checkpoint, facts.decoder.vocab_size, facts.draft_vocab_size)
    return _Head(facts, keys.values, {name: checkpoint.raw(name) for name in checkpoint.names()})


def _read_eagle(path: Path) -> _Head:
    facts, keys = read_eagle_config(path)
    checkpoint, facts, _ = eagle_checkpoint(facts)
    return _Head(facts, keys.values, {name: checkpoint.raw(name) for name in checkpoint.names()})


def _write_eagle3(head: _Head, layout: str, target: ModelFacts | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    facts, tensors = head.facts, dict(head.tensors)
    assert isinstance(facts, Eagle3Facts)
    decoder, taps = facts.decoder, facts.tap_layers
    if taps and layout == "safeailab" and target is not None and taps == default_taps(target.num_layers):
        taps = ()
    elif taps and layout == "safeailab":
        expected = "the default layers, the only ones this layout knows"
        raise CheckpointError(f"{facts.path}: {TAP_KEY}", expected, f"layers {taps}", "target=FOLDER tells whether they are the default")
    own_head = "lm_head.weight" in tensors
    needs = {
        "num_hidden_layers": decoder.num_layers > 1,
        "target_hidden_size": facts.target_hidden_size != decoder.hidden_size,
        "norm_before_residual": facts.norm_before_residual,
        "norm_before_fc": bool(facts.norm_before_fc),
        "fc_norm": bool(facts.fc_norm),
        "norm_output": facts.norm_output,
        "fc bias": bool(facts.fc_bias),
        "no lm_head": not own_head,
        "embed_tokens": "embed_tokens.weight" in tensors,
        TAP_KEY: bool(taps),
    }
    _refuse(facts.path, layout, _EAGLE3_EXPRESSES[layout], needs | _decoder_needs(decoder))
    if layout == "modelopt":
        tensors.pop("t2d", None)
    elif "d2t" in tensors and "t2d" not in tensors:
        tensors["t2d"] = torch.zeros(decoder.vocab_size, dtype=torch.bool)
        tensors["t2d"][tensors["d2t"] + torch.arange(facts.draft_vocab_size)] = True
    config = _decoder_config(head.config, decoder)
    sizes: dict[str, Any] = {"draft_vocab_size": facts.draft_vocab_size}
    if needs["target_hidden_size"]:
        sizes["target_hidden_size"] = facts.target_hidden_size
    outputs = [i - 1 for i in taps] or None  # by the layer whose output is tapped
    if layout == "safeailab":
        return config | sizes | {"architectures": ["LlamaForCausalLM"]}, tensors
    if layout == "speculators":
        flags = {key: bool(getattr(facts, key)) for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")}
        outer = _speculators("eagle3", "Eagle3Speculator", target) | sizes | flags | {TAP_KEY: list(taps) or None}
        return outer | {"transformer_layer_config": config}, tensors
    flat = config | sizes | {"architectures": ["LlamaForCausalLMEagle3"]}
    if layout == "modelopt":
        eagle: dict[str, Any] = {
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
            "next_layer_regular": True,
            "parallel_draft_step": 1,
            "parallel_draft_heads_num_layers": None,
        }
    else:
        eagle = {"norm_before_fc": True} if facts.norm_before_fc else {}
        flat |= {"fc_norm": bool(facts.fc_norm), "norm_output": facts.norm_output, "bias": bool(facts.fc_bias)}
        flat |= {"num_aux_hidden_states": len(taps) or DEFAULT_TAPS}
        if not own_head and not decoder.tie_word_embeddings:
            flat["draft_vocab_size"] = None  # the head is the target's
    return flat | {"eagle_config": {TAP_KEY: outputs, "use_aux_hidden_state": True} | eagle}, tensors


def _write_eagle(head: _Head, layout: str, target: ModelFacts | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    facts, tensors = head.facts, dict(head.tensors)
    assert isinstance(facts, EagleFacts)
    decoder, norms = facts.decoder, [name for name in EAGLE_NORMS if f"{name}.weight" in head.tensors]
    can = _EAGLE_EXPRESSES[layout]
    together = len(norms) == len(EAGLE_NORMS) and "layer norms" not in can
    needs = {"all three layer norms": together, "layer norms": bool(norms) and not together}
    _refuse(facts.path, layout, can, needs | _decoder_needs(decoder))
    config = _decoder_config(head.config, decoder)
    if layout == "speculators-old":
        tensors.pop("embed_tokens.weight", None)  # the target's copy, which this layout never stores
        outer = _speculators("eagle", "EagleSpeculator", target)
        outer |= {"transformer_layer_architecture": "LlamaDecoderLayer", "layernorms": bool(norms), "fusion_bias": bool(facts.fc_bias)}
        return outer | {"transformer_layer_config": config}, tensors
    architecture = "Qwen2ForCausalLMEagle" if decoder.attention_bias else "LlamaForCausalLM"
    return config | {"architectures": [architecture], "bias": bool(facts.fc_bias)}, tensors


def _renamed(name: str, patterns: tuple[tuple[str, str], ...]) -> str:
    for pattern, theirs in patterns:
        if re.match(pattern, name):
            return re.sub(f"^(?:{pattern})", theirs, name)
    return name


def _meaning(head: _Head) -> Any:
    """The part of a head that a conversion must not change: everything but names."""
    facts, decoder = head.facts, replace(head.facts.decoder, path=Path(), architecture="", eos_token_ids=())
    meaning = replace(facts, path=Path(), layout="", decoder=decoder, tap_layers=())
    # Norms of EAGLE-1/2 are known by their tensors; flags that the config left open are settled by now.
    return replace(meaning, layernorms=None) if isinstance(meaning, EagleFacts) else meaning, facts.tap_layers


def _same_bits(left: Tensor, right: Tensor) -> bool:
    same = (left.dtype, left.shape) == (right.dtype, right.shape)
    return same and torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def _check(source: _Head, folder: Path, layout: str, read: Any) -> None:
    found = read(folder)
    before, taps = _meaning(source)
    after, taps_after = _meaning(found)
    dropped = {"t2d", "embed_tokens.weight"}
    same = {
        name: name in found.tensors and _same_bits(found.tensors[name], tensor)
        for name, tensor in source.tensors.items()
        if name not in dropped or name in found.tensors
    }
    if before != after or (taps != taps_after and layout != "safeailab") or not all(same.values()):
        wrong = [name for name, equal in same.items() if not equal]
        raise CheckpointError(f"{source.facts.path}: layout {layout}", f"a head that reads back as {before}", f"{after}, {wrong}")


def convert(source: str | Path, destination: str | Path, layout: str, target: str | Path | None = None) -> Converted:
    """Write the EAGLE or EAGLE-3 head in ``source`` to the new folder ``destination``: ``config.json`` and ``model.safetensors``.

    Args:
        source: folder of the head, in any layout that loads.
        destination: a folder that doesn't exist yet, or is empty.
        layout: for EAGLE-3 ``safeailab``, ``sglang``, ``speculators`` or ``modelopt``; for EAGLE-1/2 ``safeailab``, ``hass`` or
            ``speculators-old``.
        target: folder of the target model; tells default tapped layers from others, and names the verifier for speculators.

    Returns:
        What was written.

    Raises:
        CheckpointError: a source that can't be read, or that the layout can't express.
        ConfigError: an unknown layout, or a destination that holds something or can't be written.
    """
    source, destination = user_path("SRC", str(source)), user_path("DST", str(destination))
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ConfigError("DST", "a folder that doesn't exist yet, or is empty", str(destination))
    check_writable("DST", str(destination), folder=True)
    names = Checkpoint(source).names()
    third = any(name.endswith("hidden_norm.weight") for name in names)
    if not third and not {"fc.weight", "fusion_fc.weight"} & set(names):
        raise CheckpointError(str(source), "an EAGLE or EAGLE-3 head", f"this looks like {looks_like(Checkpoint(source))}")
    written = EAGLE3_WRITTEN if third else EAGLE_WRITTEN
    if layout not in written:
        kind = "EAGLE-3" if third else "EAGLE-1/2"
        raise ConfigError("layout", f"one of {', '.join(written)} for an {kind} head", repr(layout))
    read, write = (_read_eagle3, _write_eagle3) if third else (_read_eagle, _write_eagle)
    head = read(source)
    config, tensors = write(head, layout, read_model_facts(user_path("target", str(target))) if target is not None else None)
    stored = {_renamed(name, written[layout]): tensor.contiguous().clone() for name, tensor in tensors.items()}
    make_folder("DST", destination.parent)
    folder: Path | None = None
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
        folder.chmod(0o755)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
        _check(head, folder, layout, read)
        if destination.exists():
            destination.rmdir()
        os.rename(folder, destination)  # noqa: PTH104
    except (OSError, SafetensorError) as error:
        raise unwritable("DST", destination, error) from error
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    size = sum(tensor.nbytes for tensor in stored.values())
    return Converted(destination, "EAGLE-3" if third else "EAGLE-1/2", layout, len(stored), size)


def from_words(words: Sequence[str]) -> Converted:
    """:func:`convert` with the words of the command line: ``SRC DST layout=NAME [target=FOLDER]``.

    Raises:
        ConfigError: other words.
    """
    options = dict(word.split("=", 1) for word in words if word.startswith(("layout=", "target=")))
    folders = [word for word in words if not word.startswith(("layout=", "target="))]
    if len(folders) != 2 or "layout" not in options:
        raise ConfigError("convert", "SRC DST layout=NAME [target=FOLDER]", " ".join(words) or "nothing")
    return convert(folders[0], folders[1], options["layout"], options.get("target"))
