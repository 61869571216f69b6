"""Safetensors checkpoints into our modules, as the tables of :mod:`graphspec.layouts` say. Everything is checked before it is copied."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from .errors import CheckpointError, ConfigError
from .layouts import EAGLE3_LAYOUT, LLAMA_LAYOUT, Layout
from .models.layers import Linear
from .models.llama import LlamaModel
from .variants.eagle3 import Eagle3Draft

if TYPE_CHECKING:
    from pathlib import Path

    from .facts import Eagle3Facts, ModelFacts

Progress = Callable[[int, int], None]
"""Called with (tensors read, tensors in all) after each one."""

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "BF16", "F16")
_INTEGERS = ("I64", "I32")


class Checkpoint:
    """The tensors of a folder: ``model.safetensors``, or the shards ``model.safetensors.index.json`` lists.

    Raises:
        CheckpointError: no such file, a damaged file, an index that is no index, a shard that is missing or lacks a tensor.
    """

    def __init__(self, path: Path, renamed: tuple[tuple[str, str], ...] = ()) -> None:
        self.path = path
        self._files: dict[Path, Any] = {}
        self._tensors: dict[str, tuple[Path, str]] = {}
        for stored, file in self._stored().items():
            name = stored
            for theirs, ours in renamed:
                name = ours + stored.removeprefix(theirs) if stored.startswith(theirs) else name
            if name in self._tensors:
                raise CheckpointError(f"{file}: {stored}", f"{name} under one name", f"{self._tensors[name][1]} as well")
            self._tensors[name] = (file, stored)

    def _stored(self) -> dict[str, Path]:
        single, index = self.path / _SINGLE, self.path / _INDEX
        if single.is_file():
            return dict.fromkeys(self._open(single).keys(), single)
        if not index.is_file():
            others = sorted(file.name for file in self.path.glob("*.bin"))
            hint = "convert it to safetensors first" if others else ""
            raise CheckpointError(str(self.path), f"{_SINGLE} or {_INDEX}", ", ".join(others) or "neither", hint)
        try:
            table = json.loads(index.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise CheckpointError(str(index), "a readable json file", f"{type(error).__name__}: {error}") from error
        shards = table.get("weight_map") if isinstance(table, dict) else None
        if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
            raise CheckpointError(f"{index}: weight_map", "an object of tensor name: file name", repr(shards)[:80])
        for file in dict.fromkeys(shards.values()):
            if not (self.path / file).is_file():
                raise CheckpointError(str(self.path / file), f"a shard listed in {_INDEX}", "no such file")
            present = set(self._open(self.path / file).keys())
            for name in (name for name, owner in shards.items() if owner == file and name not in present):
                raise CheckpointError(f"{self.path / file}: {name}", f"a tensor, as {_INDEX} says", "no such tensor")
        return {name: self.path / file for name, file in shards.items()}

    def _open(self, file: Path) -> Any:
        if file not in self._files:
            try:
                self._files[file] = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(str(file), "a complete safetensors file", f"{error}, {file.stat().st_size} bytes") from error
        return self._files[file]

    def names(self) -> list[str]:
        """Tensor names, prefixes already renamed."""
        return list(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def key(self, name: str) -> str:
        """File and stored name, for messages."""
        file, stored = self._tensors.get(name, (self.path, name))
        return f"{file}: {stored}"

    def read(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...] = _FLOATS) -> Tensor:
        """One tensor on the CPU, in the dtype it is stored in.

        Raises:
            CheckpointError: it isn't there, or has another shape or dtype.
        """
        if name not in self._tensors:
            raise CheckpointError(f"{self.path}: {name}", f"a tensor of shape {list(shape)}", "no such tensor")
        file, stored = self._tensors[name]
        view = self._open(file).get_slice(stored)
        if tuple(view.get_shape()) != shape:
            raise CheckpointError(self.key(name), f"shape {list(shape)}", f"shape {list(view.get_shape())}")
        if view.get_dtype() not in dtypes:
            raise CheckpointError(self.key(name), "dtype " + " or ".join(dtypes), view.get_dtype())
        tensor: Tensor = self._open(file).get_tensor(stored)
        return tensor


def _sources(layout: Layout, ours: str) -> tuple[str, ...]:
    generic, index = re.sub(r"\.\d+\.", ".*.", ours), re.search(r"\.(\d+)\.", ours)
    for rule in layout.rules:
        if rule.ours == generic:
            return tuple(source.replace("*", index[1] if index else "*") for source in rule.sources)
    raise KeyError(f"the layout has no rule for {ours}")


def _fill(
    module: nn.Module,
    checkpoint: Checkpoint,
    layout: Layout,
    own: list[str],
    ignored: set[str],
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None,
) -> None:
    """Replace the parameters named in ``own`` by the checkpoint's tensors; refuse tensors that nothing uses."""
    wanted = {name: _sources(layout, name) for name in own}
    used = {source for sources in wanted.values() for source in sources}
    patterns = [re.escape(pattern).replace(r"\*", r"\d+") for pattern in layout.ignored]
    for name in checkpoint.names():
        if name not in used and name not in ignored and not any(re.fullmatch(pattern, name) for pattern in patterns):
            # a missing tensor says more about a wrong checkpoint than a superfluous one
            missing = next((source for source in sorted(used) if source not in checkpoint), None)
            hint = f"missing: {missing}" if missing else ""
            raise CheckpointError(checkpoint.key(name), "no such tensor", "one this model doesn't use", hint)
    done = 0
    for name, sources in wanted.items():
        owner_name, _, leaf = name.rpartition(".")
        owner = module.get_submodule(owner_name)
        shape = tuple(owner.get_parameter(leaf).shape)
        rows = owner.parts if isinstance(owner, Linear) else (shape[0],)
        value = torch.empty(shape, dtype=dtype, device=device)
        for part, source, count in zip(torch.split(value, list(rows)), sources, rows, strict=True):
            part.copy_(checkpoint.read(source, (count, *shape[1:])))
            done += 1
            if progress is not None:
                progress(done, len(used))
        setattr(owner, leaf, nn.Parameter(value, requires_grad=False))


def load_target(
    facts: ModelFacts,
    tap_layers: tuple[int, ...],
    max_positions: int,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress | None = None,
) -> LlamaModel:
    """The target of a checkpoint, in ``dtype`` on ``device``.

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
    checkpoint = Checkpoint(facts.path)
    with torch.device("meta"):
        model = LlamaModel(facts, tap_layers, max_positions)
    own = [name for name, _ in model.named_parameters()]  # a tied head is no parameter of its own
    ignored = {"lm_head.weight"} if facts.tie_word_embeddings else set()  # some files store the tied copy
    _fill(model, checkpoint, LLAMA_LAYOUT, own, ignored, dtype, torch.device(device), progress)
    if facts.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    return model.to(device).eval()


def _read_vocab_map(checkpoint: Checkpoint, facts: Eagle3Facts) -> Tensor | None:
    """Target id of each draft id, or None without a map; ``d2t`` holds offsets: target id = draft id + d2t[draft id]."""
    vocab_size, draft_vocab_size = facts.decoder.vocab_size, facts.draft_vocab_size
    if "d2t" not in checkpoint:
        if draft_vocab_size != vocab_size:
            expected = f"{draft_vocab_size} offsets into a vocabulary of {vocab_size}"
            raise CheckpointError(f"{checkpoint.path}: d2t", expected, "no such tensor")
        return None
    offset_Vd = checkpoint.read("d2t", (draft_vocab_size,), _INTEGERS).long()
    token_Vd = torch.arange(draft_vocab_size) + offset_Vd
    mask_V = checkpoint.read("t2d", (vocab_size,), ("BOOL", "U8", *_INTEGERS)).bool() if "t2d" in checkpoint else None

    def is_map(ids_Vd: Tensor) -> bool:
        inside = bool(((ids_Vd >= 0) & (ids_Vd < vocab_size)).all()) and bool((ids_Vd.diff() > 0).all())
        return inside and (mask_V is None or (int(mask_V.sum()) == draft_vocab_size and bool(mask_V[ids_Vd].all())))

    if is_map(token_Vd):
        return token_Vd
    hint = "d2t looks like target ids, not offsets" if is_map(offset_Vd) else ""
    expected = f"offsets: i + d2t[i] strictly ascending in [0, {vocab_size})" + ("" if mask_V is None else ", the ids that t2d marks")
    if bool(((token_Vd >= 0) & (token_Vd < vocab_size)).all()) and bool((token_Vd.diff() > 0).all()) and mask_V is not None:
        found = f"ids that differ from the {int(mask_V.sum())} marked in t2d"
    else:
        found = f"i + d2t[i] from {int(token_Vd.min())} to {int(token_Vd.max())}, {int((token_Vd.diff() <= 0).sum())} steps not ascending"
    raise CheckpointError(checkpoint.key("d2t"), expected, found, hint)


def load_eagle3(
    facts: Eagle3Facts,
    target: LlamaModel,
    max_positions: int,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress | None = None,
) -> Eagle3Draft:
    """The EAGLE-3 head of a checkpoint, in ``dtype`` on ``device``.

    The embedding is the target's unless the checkpoint has one; so is the language-model head of a full vocabulary.

    Raises:
        CheckpointError: as :func:`load_target`; also a vocabulary map that is missing, leaves the vocabulary, or holds ids, not offsets.
        ConfigError: ``dtype`` or ``device`` differ from the target's, whose embedding or head it shares.
    """
    checkpoint = Checkpoint(facts.path, EAGLE3_LAYOUT.renamed)
    full_vocabulary = facts.draft_vocab_size == facts.decoder.vocab_size
    same_width = facts.decoder.hidden_size == target.facts.hidden_size
    share_embedding = "embed_tokens.weight" not in checkpoint and same_width
    share_head = "lm_head.weight" not in checkpoint and full_vocabulary and same_width
    with torch.device("meta"):
        draft = Eagle3Draft(
            facts,
            max_positions,
            embed_tokens=target.embed_tokens if share_embedding else None,
            lm_head=target.lm_head if share_head else None,
        )
    shared = {"embed_tokens.weight"} if share_embedding else set()
    shared |= {"lm_head.weight"} if share_head else set()
    theirs, place = target.embed_tokens.weight, torch.empty(0, device=device).device
    if shared and (theirs.dtype, theirs.device) != (dtype, place):
        expected = f"{theirs.dtype} on {theirs.device}, as the target whose tensors are shared"
        raise ConfigError("dtype, device", expected, f"{dtype} on {place}")
    own = [name for name, _ in draft.named_parameters(remove_duplicate=False) if name not in shared]
    if "fc.weight" in checkpoint:  # first, for its shape tells another kind of head best
        checkpoint.read("fc.weight", (facts.decoder.hidden_size, facts.feature_size))
    token_Vd = _read_vocab_map(checkpoint, facts)
    _fill(draft, checkpoint, EAGLE3_LAYOUT, own, set(), dtype, torch.device(device), progress)
    # buffers only: moving the whole module would move what it shares with the target
    draft.rotary.to(device)
    if token_Vd is not None and not full_vocabulary:  # a map of the full vocabulary is the identity
        draft.target_token_Vd = token_Vd.to(device)
    return draft.eval()
