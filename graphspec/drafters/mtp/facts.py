"""Multi-token-prediction heads: facts from config and tensor names, checked against the target. Standard library only."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from ...config.checks import LONG, brief
from ...errors import CheckpointError
from ...facts.draft import DraftFacts, DraftPass
from ...facts.families import QWEN2, find_family, target_architectures
from ...facts.family import Family
from ...facts.files import find_file, open_file, parse_json, plain, read_shards
from ...facts.keys import MAX_LAYERS, Keys, read_architecture, read_config
from ...facts.layouts import PREDICTION_HEADS
from ...facts.model import ModelFacts, read_decoder
from ...facts.quantisation import WORDS
from ...shapes import CycleShape
from ..heads.config import nested_keys
from .layout import LAYERS, MTP_LAYOUTS

COUNT_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
"""Keys for the number of heads in configs of DeepSeek and MiMo, of Qwen3.5, and of transformers."""
_MIMO = ("MiMoForCausalLM", "MiMoMTP", "MiMoMTPModel")
_LATENT = re.compile(r"kv_a_proj_with_mqa|kv_b_proj|q_a_proj")
_MIXTURE = re.compile(r"mlp\.(experts|gate|shared_experts?|shared_expert_gate)\.")
_NUMBER = r"(\d{1,4})"
_LARGEST_HEADER = 100_000_000  # the limit of safetensors itself


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPFacts(DraftFacts):
    """Prediction heads of one decoder layer each, which share the target's embedding and language-model head."""

    layout: str
    """Key of :data:`graphspec.drafters.mtp.layout.MTP_LAYOUTS`."""
    first_index: int
    """Number in the tensor names of the first head, or of the last layer of Nemotron-H's only one."""

    @property
    def hidden_first(self) -> bool:
        """The projection reads ``[hidden; embedding]`` (MiMo); elsewhere ``[embedding; hidden]``."""
        return self.layout == "mimo"

    def passes(self, shape: CycleShape) -> tuple[DraftPass, ...]:
        """With one head per step, every head reads the whole window and the lookback."""
        if self.num_heads == 1:
            return DraftFacts.passes(self, shape)
        rows = shape.accept_width + self.num_heads - 1
        return tuple(DraftPass("head_steps", rows, 1, head) for head in range(shape.num_steps))


def read_tensor_names(path: Path) -> list[str]:
    """Names in a folder's ``model.safetensors``, or in its index; no tensor is read.

    Raises:
        CheckpointError: neither file is there, or one is damaged.
    """
    file, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if not find_file(file):
        if not find_file(index):
            raise CheckpointError(str(path), f"{file.name} or {index.name}", "neither")
        return list(read_shards(index))
    with open_file(file) as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = stream.read(length) if length <= _LARGEST_HEADER else b""
    if not header or len(header) < length:
        raise CheckpointError(str(file), "a complete safetensors file", "no header")
    try:
        return [name for name in parse_json(header, str(file)) if name != "__metadata__"]
    except CheckpointError as error:
        raise CheckpointError(str(file), "a complete safetensors file", error.found) from error


def _find_heads(path: Path) -> tuple[str, list[int], list[str]]:
    """Layout, numbers of the heads in ascending order, and all tensor names; the layout is empty if there are no heads."""
    names = read_tensor_names(path)
    for layout, table in MTP_LAYOUTS.items():
        source = next(rule.sources[0] for rule in table.rules if rule.ours == "projection.weight")
        layer = re.escape(source.removesuffix("weight")).replace(r"\*", _NUMBER)
        pattern = re.compile(layer + "(?:weight|" + "|".join(WORDS) + ")")
        matches = [match for name in names if (match := pattern.fullmatch(name))]
        if matches:
            return layout, sorted(int(match[1]) if pattern.groups else 0 for match in matches), names
    return "", [], names


def _count(keys: Keys, layout: str, heads: list[int], names: list[str]) -> int:
    """The number of heads, on which config and tensors must agree."""
    key = next((key for key in COUNT_KEYS if key in keys.values), COUNT_KEYS[1 if layout == "qwen" else 0])
    declared = keys.integer(key, 0, minimum=0, maximum=MAX_LAYERS)
    if not heads:
        expected = "a checkpoint with multi-token-prediction heads"
        if declared:
            stray = next((name for name in names if name.startswith(PREDICTION_HEADS)), None)
            found = f"no eh_proj, mtp.fc or input_proj among {len(names)} tensors" + (f" ({plain(stray)} is there)" if stray else "")
            raise CheckpointError(f"{keys.where}: {key} = {declared}", "tensors of as many prediction heads", found)
        found = f"neither {COUNT_KEYS[0]} nor tensors of such heads"
        raise CheckpointError(keys.where, expected, found, "a whole model, or another kind of draft")
    if not declared:
        raise keys.error(key, f"{len(heads)}, for the checkpoint has the tensors of as many prediction heads")
    if declared != len(heads) or heads != list(range(heads[0], heads[0] + len(heads))):
        raise keys.error(key, f"the number of heads in the checkpoint, which are numbered {brief(heads, LONG)}")
    if layout in ("qwen", "nemotron") and declared != 1:
        raise keys.error(key, "1")
    return declared


def _family(keys: Keys, layout: str, architecture: str) -> Family:
    """The family of the heads' layers."""
    if layout == "qwen":
        family = find_family(architecture)
        if family is not None and family.recurrent is not None and family.attention_gate:
            return replace(family, recurrent=None)  # the layer of the head attends
        raise keys.error("architectures", "a Qwen3Next or Qwen3_5 architecture, whose heads are named mtp.fc")
    if layout == "mimo":
        if architecture in _MIMO:
            return QWEN2
        raise keys.error("architectures", "one of " + ", ".join(_MIMO) + ", whose heads are named model.mtp_layers")
    family = find_family(architecture.removesuffix("NextN"))
    if family is None or family.refused or family.recurrent is not None:
        raise keys.error("architectures", "one of " + ", ".join(target_architectures()) + ", or one of them followed by NextN")
    return family


def _settle_experts(decoder: ModelFacts, prefixes: tuple[str, ...], names: list[str]) -> ModelFacts:
    """The facts with a mixture of experts in the heads that have its tensors; a model's rule for its layers need not apply to the heads.

    Args:
        decoder: of all heads.
        prefixes: of the tensors of each head's layer.
        names: of those tensors.

    Raises:
        CheckpointError: a tensor of latent attention or of a mixture that layers of this architecture don't have.
    """
    for name in names:
        for pattern, there, what in (
            (_LATENT, decoder.latent is not None, "attention over keys and values"),
            (_MIXTURE, decoder.experts is not None, "a dense MLP"),
        ):
            if pattern.search(name) and not there:
                raise CheckpointError(f"{decoder.path}: {plain(name)}", f"a head of {decoder.architecture} with {what}", "this tensor")
    if decoder.experts is None:
        return decoder
    mixtures = tuple(f"{prefix}mlp.gate.weight" in names for prefix in prefixes)
    return replace(decoder, experts=replace(decoder.experts, layers=mixtures))


def _mixed_layers(keys: Keys, path: Path, architecture: str) -> ModelFacts:
    """The layers of Nemotron-H's head, by ``mtp_layers_block_type`` or ``mtp_hybrid_override_pattern``; neither: attention, then experts.

    Raises:
        CheckpointError: another architecture, or layers other than one that attends next to MLPs and mixtures of experts.
    """
    family = find_family(architecture)
    if family is None or family.mixers is None:
        raise keys.error("architectures", "a NemotronH architecture, whose heads are named mtp.layers.0.eh_proj")
    listed, pattern = "mtp_layers_block_type", "mtp_hybrid_override_pattern"
    key = listed if keys.present(listed) else pattern
    own = {
        name: value for name, value in keys.values.items() if name not in ("layers_block_type", "layer_types", "hybrid_override_pattern")
    }
    stated = keys.values[key] if keys.present(key) else "*E"
    own["layers_block_type" if key == listed else "hybrid_override_pattern"] = stated
    assert family.usual is not None, "names of its own"
    layers = family.usual(Keys(own, keys.where))
    mixers = family.mixers(layers, layers.integer("num_hidden_layers"))
    if mixers.count("attention") != 1 or "recurrent" in mixers:
        raise keys.error(key, "one layer that attends, and no recurrent one")
    return read_decoder(layers, path, architecture, replace(family, recurrent=None))


def _language_model(keys: Keys) -> Keys:
    """The keys of the language model, which models that also see images nest."""
    return nested_keys(keys, "text_config") if keys.present("text_config") else keys


def read_mtp_facts(path: str | Path, target: ModelFacts) -> MTPFacts:
    """Facts of the prediction heads in a folder: the target's own, or one next to it.

    The layout follows from the names of the tensors, the kind of layer from ``architectures``.

    Raises:
        CheckpointError: as :func:`read_model_facts`; also no heads, another kind of draft, config and tensors that disagree on the number
            of heads, tensors that layers of this architecture don't have, or sizes that don't fit the target.
    """
    path = Path(path)
    keys = read_config(path)
    architecture = read_architecture(keys, "a model with multi-token-prediction heads")
    if "eagle" in architecture.lower() or keys.present("draft_vocab_size") or keys.present("eagle_config"):
        raise keys.error("architectures", "a model with multi-token-prediction heads", "an EAGLE head belongs to another variant")
    keys = _language_model(keys)
    layout, heads, names = _find_heads(path)
    num_heads = _count(keys, layout, heads, names)
    if layout == "nemotron":
        decoder = _mixed_layers(keys, path, architecture)
        return _facts(keys, path, target, decoder, num_heads, layout, decoder.num_layers - 1)
    prefixes = tuple(LAYERS[layout].replace("*", str(head)) for head in heads)
    names = [name for name in names if name.startswith(prefixes)]
    family = _family(keys, layout, architecture)
    if not any(map(_MIXTURE.search, names)):
        family = replace(family, experts=None)
    if keys.flag("mtp_use_dedicated_embeddings", False):
        raise keys.error("mtp_use_dedicated_embeddings", "absent or false", "heads share the target's embedding")
    num_layers = keys.integer("num_hidden_layers", maximum=MAX_LAYERS)
    if layout == "deepseek" and heads[0] not in (0, num_layers, target.num_layers):
        expected = f"heads numbered from {num_layers} (num_hidden_layers) or from 0"
        raise CheckpointError(f"{path}: model.layers.{heads[0]}.eh_proj.weight", expected, f"from {heads[0]}")
    first_layer = heads[0] if layout == "deepseek" else num_layers  # its index in the stack, which decides on its sliding window
    layers = Keys({**keys.values, "num_hidden_layers": first_layer + num_heads}, keys.where)
    layers = layers if family.usual is None else family.usual(layers)
    decoder = read_decoder(layers, path, architecture, family).layers_from(first_layer).rotated_alike(keys.where)
    decoder = _settle_experts(decoder, prefixes, names)
    return _facts(keys, path, target, decoder, num_heads, layout, heads[0])


def _facts(keys: Keys, path: Path, target: ModelFacts, decoder: ModelFacts, num_heads: int, layout: str, first: int) -> MTPFacts:
    for key, theirs in {"hidden_size": decoder.hidden_size, "vocab_size": decoder.vocab_size}.items():
        if theirs != getattr(target, key):
            raise keys.error(key, f"{getattr(target, key)}, as in {target.path}", "heads share the target's embedding and output head")
    return MTPFacts(
        path=path,
        decoder=decoder,
        draft_vocab_size=target.vocab_size,
        target_hidden_size=target.hidden_size,
        feature_size=target.hidden_size,
        num_heads=num_heads,
        layout=layout,
        first_index=first,
    )


def counted_facts(folder: Path, target: ModelFacts) -> tuple[MTPFacts, str]:
    """Facts of as many prediction heads as a config states, as layers after the last; see ``assumed``."""
    keys = read_config(folder)
    architecture = read_architecture(keys, "a model with multi-token-prediction heads")
    keys, own = _language_model(keys), find_family(architecture)
    count = keys.integer(next((key for key in COUNT_KEYS if keys.present(key)), COUNT_KEYS[0]))
    if own is not None and own.mixers is not None:
        decoder = _mixed_layers(keys, folder, architecture)
        facts = _facts(keys, folder, target, decoder, count, "nemotron", decoder.num_layers - 1)
        return facts, f"{count} prediction head(s) of {architecture}, as config.json counts them"
    layout = "mimo" if architecture == _MIMO[0] else "qwen" if own is not None and own.attention_gate else "deepseek"
    family = _family(keys, layout, architecture)
    layers = keys.integer("num_hidden_layers")
    whole = Keys({**keys.values, "num_hidden_layers": layers + count}, keys.where)
    whole = whole if family.usual is None else family.usual(whole)
    decoder = read_decoder(whole, folder, architecture, family).layers_from(layers).rotated_alike(keys.where)
    facts = _facts(keys, folder, target, decoder, count, layout, layers)
    return facts, f"{count} prediction head(s) of {facts.decoder.architecture}, as config.json counts them"
