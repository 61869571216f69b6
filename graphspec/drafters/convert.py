"""Rewrites a draft from any published layout into another: names and config keys change, the weights stay bit for bit.

A draft that the layout can't express is an error. Before the new folder gets its name, it is read back and compared with its source.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..config.catalog import all_variants, load_object
from ..config.paths import new_folder, unwritable, user_path
from ..errors import CheckpointError, ConfigError, spell_bytes
from ..facts import ModelFacts, read_model_facts
from ..models.checkpoint import Checkpoint
from .heads.tensors import looks_like
from .heads.written import Head, Kind, Stored, meaning


@dataclass(frozen=True, slots=True)
class Converted:
    """Result of :func:`convert`.

    Attributes:
        folder: the new one.
        kind: of the draft, in words.
        layout: of its files.
        tensors: their number.
        size: bytes of all tensors.
    """

    folder: Path
    kind: str
    layout: str
    tensors: int
    size: int

    @property
    def sentence(self) -> str:
        """The result in words."""
        found = f"{self.tensors} tensors, {spell_bytes(self.size)}, read back and equal to the bit"
        return f"{self.folder}: {self.kind} in the layout {self.layout}; config.json, model.safetensors with {found}"


def _same_bits(left: Stored, right: Stored) -> bool:
    def same(one: Tensor, other: Tensor) -> bool:
        alike = (one.dtype, one.shape) == (other.dtype, other.shape)
        return alike and torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))

    return left.keys() == right.keys() and all(same(left[name], right[name]) for name in left)


def _kind(source: Path) -> Kind:
    """The kind of a draft, by the names of its tensors."""
    checkpoint = Checkpoint(source)
    kinds: list[Kind] = [load_object(variant.conversion) for variant in all_variants() if variant.conversion]
    found = next((kind for kind in kinds if kind.fits(checkpoint.names())), None)
    if found is None:
        *others, last = (kind.called for kind in kinds)
        raise CheckpointError(str(source), f"{', '.join(others)} or {last}", f"this looks like {looks_like(checkpoint)}")
    return found


def _check(source: Head, folder: Path, layout: str, kind: Kind, target: ModelFacts | None) -> None:
    found = kind.read(folder, target)
    before, after = (meaning(head.facts) for head in (source, found))
    dropped = {"t2d", "embed_tokens.weight"}
    same = {
        name: name in found.tensors and _same_bits(found.tensors[name], tensors)
        for name, tensors in source.tensors.items()
        if name not in dropped or name in found.tensors
    }
    taps = source.facts.tap_layers == found.facts.tap_layers or layout == "safeailab"
    if before != after or not taps or not all(same.values()):
        wrong = [name for name, equal in same.items() if not equal]
        raise CheckpointError(f"{source.facts.path}: layout {layout}", f"a draft that reads back as {before}", f"{after}, {wrong}")


def convert(source: str | Path, destination: str | Path, layout: str, target: str | Path | None = None) -> Converted:
    """Write the draft in ``source`` to the new folder ``destination``: ``config.json`` and ``model.safetensors``.

    Args:
        source: folder of the draft, in any layout that loads.
        destination: a folder that doesn't exist yet, or is empty.
        layout: for EAGLE-3 ``safeailab``, ``sglang``, ``speculators`` or ``modelopt``; for P-EAGLE ``sglang`` or ``speculators``; for
            EAGLE-1/2 ``safeailab``, ``hass`` or ``speculators-old``; for block drafters ``z-lab``, ``jetspec`` or ``speculators``.
        target: folder of the target model. It decides whether tapped layers are the default ones, and speculators names it as the verifier.
            Block drafters need it.

    Returns:
        What was written.

    Raises:
        CheckpointError: a source that can't be read, or that the layout can't express.
        ConfigError: an unknown layout, no target although one is needed, or a destination that is not empty or can't be written.
    """
    source, destination = user_path("SRC", str(source)), user_path("DST", str(destination))
    kind = _kind(source)
    if layout not in kind.layouts:
        raise ConfigError("layout", f"one of {', '.join(kind.layouts)} for {kind.called}", repr(layout))
    facts = read_model_facts(user_path("target", str(target))) if target is not None else None
    head = kind.read(source, facts)
    config, tensors = kind.write(head, layout, facts)
    stored = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    with new_folder("DST", destination) as folder:
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        try:
            save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
        except SafetensorError as error:
            raise unwritable("DST", destination, error) from error
        _check(head, folder, layout, kind, facts)
    size = sum(tensor.nbytes for tensor in stored.values())
    return Converted(destination, kind.name, layout, len(stored), size)


def from_words(words: Sequence[str]) -> Converted:
    """:func:`convert` with the arguments of the command line: ``SRC DST layout=NAME [target=FOLDER]``.

    Raises:
        ConfigError: other arguments.
    """
    options = dict(word.split("=", 1) for word in words if word.startswith(("layout=", "target=")))
    folders = [word for word in words if not word.startswith(("layout=", "target="))]
    if len(folders) != 2 or "layout" not in options:
        raise ConfigError("convert", "SRC DST layout=NAME [target=FOLDER]", " ".join(words) or "nothing")
    return convert(folders[0], folders[1], options["layout"], options.get("target"))
