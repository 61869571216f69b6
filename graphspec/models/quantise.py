"""A checkpoint in another precision: linear layers rounded to the nearest codes, as compressed-tensors stores them, or codes as numbers."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..config.paths import new_folder, unwritable, user_path
from ..errors import CheckpointError, ConfigError, spell_bytes
from ..facts.files import MAX_CONFIG, read_json
from ..facts.folders import model_folder
from ..facts.gguf_model import weights_files
from ..facts.quantisation import SIDECAR, read_quantisation
from ..kernels.linear.packed import Packed, dequantise
from ..weights.rounding import GROUPS, MINMAX, OBSERVERS, ROUNDED, Rounded, quantization_config, round_to, stored
from .checkpoint import FLOATS, Checkpoint

LAYERS, EXPERTS = "layers", "experts"
PROJECTION = re.compile(r"\w+_proj(_with_mqa|_qkvz?|_z)?")
"""Linear layers of decoder layers by the last part of their names. Gates and steps of recurrent layers (``in_proj_ba``) are small, and
published checkpoints keep them."""
_HEAD, _EMBEDDING = "lm_head", "embed_tokens"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf", ".safetensors.index.json", ".bin.index.json")
SHARD = 5 * 10**9
"""Bytes of tensors in a file; a larger tensor has a file of its own."""
NUMBERS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
"""Formats without codes (:func:`expand`)."""


@dataclass(frozen=True, slots=True)
class Quantised:
    """Result of :func:`quantise`.

    Attributes:
        folder: the new one.
        format: of the codes.
        group: channels that share a scale; 0: all of a row.
        layers: their number.
        before, after: bytes of all tensors.
        error: root mean square of what rounding changed, relative to that of the weights.
    """

    folder: Path
    format: str
    group: int
    layers: int
    before: int
    after: int
    error: float

    @property
    def sentence(self) -> str:
        """The result in words."""
        groups = f"groups of {self.group} channels" if self.group else "a scale for each row"
        size = f"{spell_bytes(self.after)} of {spell_bytes(self.before)}"
        return f"{self.folder}: {self.layers} linear layers in {self.format}, {groups}; {size}; relative rounding error {self.error:.2%}"


@dataclass(frozen=True, slots=True)
class Expanded:
    """Result of :func:`expand`.

    Attributes:
        folder: the new one.
        format: of the numbers, a key of :data:`NUMBERS`.
        weights: how many were codes.
        before, after: bytes of all tensors.
    """

    folder: Path
    format: str
    weights: int
    before: int
    after: int

    @property
    def sentence(self) -> str:
        """The result in words."""
        size = f"{spell_bytes(self.after)}, from {spell_bytes(self.before)}"
        return f"{self.folder}: {self.weights} weights of low precision as numbers in {self.format}; {size}"


def quantise(
    model: str | Path,
    out: str | Path,
    code: str,
    modules: Sequence[str] = (LAYERS,),
    group: int | None = None,
    observer: str = MINMAX,
) -> Quantised:
    """Write a checkpoint, of a target or a draft, with linear layers in low precision to a new folder.

    Args:
        model: folder of the checkpoint, or what else ``model=`` takes.
        out: a folder that doesn't exist yet, or is empty.
        code: a key of :data:`graphspec.weights.rounding.ROUNDED`.
        modules: which linear layers, by the last part of their names, such as ``lm_head`` or ``fc``; ``layers``: the projections of all
            decoder layers but those of routed experts; ``experts``: these, where the checkpoint stores them one by one.
        group: channels that share a scale; None: the largest of 128, 64 and 32 that divides all of these layers.
        observer: how scales are chosen, one of :data:`graphspec.weights.rounding.OBSERVERS`.

    Raises:
        CheckpointError: a source that can't be read, has low precision already, or is not finite.
        ConfigError: an unknown format or module, a group that doesn't divide a layer, or a folder that is not empty or can't be written.
    """
    if code not in ROUNDED:
        raise ConfigError("format", "one of " + ", ".join(ROUNDED), repr(code))
    row = ROUNDED[code]
    observers = (MINMAX,) if row.as_gguf else OBSERVERS
    if observer not in observers:
        raise ConfigError("observer", f"{' or '.join(observers)} with format={code}", repr(observer))
    source, destination = model_folder(str(model)), user_path("out", str(out))
    checkpoint = Checkpoint(source)
    if (packed := next(filter(checkpoint.is_packed, checkpoint.names()), None)) is not None or read_quantisation(source) is not None:
        raise CheckpointError(checkpoint.key(packed) if packed else str(source), "weights in full precision", "low precision")
    chosen = _chosen(checkpoint, modules)
    group = _group(checkpoint, chosen, row, group)
    config = read_json(source / "config.json", MAX_CONFIG)
    ignore = [name.removesuffix(".weight") for name in checkpoint.names() if _linear(checkpoint, name) and name not in chosen]
    # A tied head is a layer without a tensor.
    ignore += [] if any(name.split(".")[-2:-1] == [_HEAD] for name in chosen) or _HEAD in ignore else [_HEAD]
    config["quantization_config"] = quantization_config(row, group, ignore)
    work = _Work(checkpoint, row, group, chosen, observer)
    after = write_folder(destination, checkpoint, config, work.tensors())
    return Quantised(destination, code, group, len(chosen), work.before, after, math.sqrt(work.changed / (work.all or 1)))


def expand(model: str | Path, out: str | Path, numbers: str) -> Expanded:
    """Write a checkpoint, of a target or a draft, with the numbers that its codes stand for to a new folder: for programs that can't read
    the codes. Other tensors stay as they are stored.

    Args:
        model: folder of the checkpoint, or what else ``model=`` takes.
        out: a folder that doesn't exist yet, or is empty.
        numbers: a key of :data:`NUMBERS`. float32 has every number as it is, the others may round.

    Raises:
        CheckpointError: a source that can't be read, is a GGUF file, has no codes, or has experts in one tensor, whose layout differs in
            full precision.
        ConfigError: an unknown format, or a folder that is not empty or can't be written.
    """
    if numbers not in NUMBERS:
        raise ConfigError("format", "one of " + ", ".join(NUMBERS), repr(numbers))
    source, destination = model_folder(str(model)), user_path("out", str(out))
    refuse_gguf(source)
    checkpoint = Checkpoint(source)
    packed = [name for name in checkpoint.names() if checkpoint.is_packed(name)]
    if not packed:
        raise CheckpointError(str(source), "weights in low precision", "full precision")
    if (experts := next((name for name in packed if len(checkpoint.shape(name)) != 2), None)) is not None:
        raise CheckpointError(checkpoint.key(experts), "weights of one linear layer each", f"shape {list(checkpoint.shape(experts))}")
    config = read_json(source / "config.json", MAX_CONFIG)
    config.pop("quantization_config", None)
    before = 0

    def tensors() -> Iterator[tuple[str, Tensor]]:
        nonlocal before
        for name in checkpoint.names():
            before += sum(part.nbytes for part in checkpoint.stored(name).values())
            tensor = checkpoint.raw(name)
            yield name, (tensor.to(NUMBERS[numbers]) if checkpoint.is_packed(name) else tensor).contiguous()

    after = write_folder(destination, checkpoint, config, tensors())
    return Expanded(destination, numbers, len(packed), before, after)


def refuse_gguf(source: Path) -> None:
    """Raises CheckpointError for a folder whose weights are a GGUF file."""
    if weights_files(source):
        raise CheckpointError(str(source), "a folder with config.json and safetensors", "GGUF, whose config has another form")


def _linear(checkpoint: Checkpoint, name: str) -> bool:
    """Whether a tensor is the weight of a linear layer."""
    return name.endswith(".weight") and len(checkpoint.shape(name)) == 2 and not name.endswith(f"{_EMBEDDING}.weight")


def _chosen(checkpoint: Checkpoint, modules: Sequence[str]) -> set[str]:
    linear = [name for name in checkpoint.names() if _linear(checkpoint, name)]
    experts = {name for name in linear if ".experts." in name}
    leaves = {name: name.split(".")[-2] for name in linear if name not in experts}
    chosen: set[str] = set()
    for module in modules:
        found = {name for name, leaf in leaves.items() if leaf == module or (module == LAYERS and PROJECTION.fullmatch(leaf))}
        found = experts if module == EXPERTS else found
        if not found:
            known = f"{LAYERS}, {EXPERTS} where they are stored one by one, or names of linear layers: "
            raise ConfigError("modules", known + ", ".join(sorted(set(leaves.values()))), repr(module))
        chosen |= found
    return chosen


def _group(checkpoint: Checkpoint, chosen: Iterable[str], row: Rounded, group: int | None) -> int:
    if row.group is not None and group not in (None, row.group):
        raise ConfigError("group", f"{row.group or 'none'}, as the format fixes it", group)
    if row.group == 0:
        return 0
    asked = row.group or group
    if asked is not None and (asked < 8 or asked % 8):
        raise ConfigError("group", "a multiple of 8", asked)
    sizes = GROUPS if asked is None else (asked,)
    odd = [next((name for name in chosen if checkpoint.shape(name)[1] % size), None) for size in sizes]
    if (last := odd[-1]) is not None:
        found = asked or "none of " + ", ".join(map(str, GROUPS))
        raise ConfigError("group", f"a divisor of the {checkpoint.shape(last)[1]} channels of {last}", found)
    return sizes[odd.index(None)]


class _Work:
    """Rounds tensor by tensor, and adds up what that changes."""

    def __init__(self, checkpoint: Checkpoint, row: Rounded, group: int, chosen: set[str], observer: str) -> None:
        self._checkpoint, self._row, self._group, self._chosen, self._observer = checkpoint, row, group, chosen, observer
        self.changed = self.all = 0.0
        self.before = 0

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields names and tensors in the order of the source."""
        for name in self._checkpoint.names():
            tensor = self._checkpoint.raw(name)
            self.before += tensor.nbytes
            if name not in self._chosen:
                yield name, tensor.contiguous()
                continue
            self._checkpoint.check(name, tuple(tensor.shape), FLOATS)
            packed = self._rounded(name, tensor)
            for part, value in stored(packed, self._row).items():
                yield name.removesuffix("weight") + part, value

    def _rounded(self, name: str, tensor: Tensor) -> Packed:
        if not tensor.isfinite().all():
            raise CheckpointError(self._checkpoint.key(name), "finite numbers", "infinity or NaN")
        packed = round_to(tensor, self._row, self._group or tensor.shape[1], self._observer)
        numbers = tensor.float()
        self.all += float(numbers.square().sum())
        self.changed += float((numbers - dequantise(packed, numbers.dtype)).square().sum())
        return packed


def write_folder(out: Path, checkpoint: Checkpoint, config: dict[str, Any], tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Write a new folder with these tensors, and with the files of a checkpoint that are no weights; returns the bytes of the tensors."""
    with new_folder("out", out) as folder:
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for file in checkpoint.path.iterdir():
            if file.is_file() and not file.name.endswith(_WEIGHTS) and file.name not in ("config.json", SIDECAR):
                shutil.copyfile(file, folder / file.name)
        try:
            size = _write(folder, tensors)
        except SafetensorError as error:
            raise unwritable("out", out, error) from error
        found = Checkpoint(folder)
        assert {name: found.shape(name) for name in found.names()} == {name: checkpoint.shape(name) for name in checkpoint.names()}
    return size


def _write(folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Write one file, or several and their index; returns the bytes of the tensors."""
    files: list[list[str]] = []
    part: dict[str, Tensor] = {}
    total = size = 0

    def save() -> None:
        files.append(list(part))
        save_file(part, folder / f"{len(files)}.safetensors", metadata={"format": "pt"})
        part.clear()

    for name, tensor in tensors:
        if part and size + tensor.nbytes > SHARD:
            save()
            size = 0
        part[name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
    save()
    if len(files) == 1:
        (folder / "1.safetensors").rename(folder / "model.safetensors")
        return total
    places: dict[str, Any] = {}
    for number, names in enumerate(files, 1):
        called = f"model-{number:05}-of-{len(files):05}.safetensors"
        (folder / f"{number}.safetensors").rename(folder / called)
        places |= dict.fromkeys(names, called)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return total


def from_words(words: Sequence[str]) -> Quantised | Expanded:
    """:func:`quantise` with the arguments of the command line, ``model=FOLDER out=FOLDER format=NAME [modules=NAMES] [group=SIZE]
    [observer=NAME]``, or :func:`expand` with the first three.

    Raises:
        ConfigError: other arguments.
    """
    options = dict(word.split("=", 1) for word in words if "=" in word)
    known = {"model", "out", "format"}
    if len(options) != len(words) or not known <= options.keys() <= known | {"modules", "group", "observer"}:
        expected = "model=FOLDER out=FOLDER format=NAME [modules=NAME,NAME] [group=SIZE] [observer=NAME]"
        raise ConfigError("convert", expected, " ".join(words))
    if options["format"] not in (known_formats := (*ROUNDED, *NUMBERS)):
        raise ConfigError("format", "one of " + ", ".join(known_formats), repr(options["format"]))
    if options["format"] in NUMBERS:
        if others := sorted(options.keys() - known):
            raise ConfigError(others[0], f"nothing with format={options['format']}, which has no codes", repr(options[others[0]]))
        return expand(options["model"], options["out"], options["format"])
    size = options.get("group")
    if size is not None and not size.isdecimal():
        raise ConfigError("group", "a multiple of 8", repr(size))
    modules = options.get("modules", LAYERS).split(",")
    return quantise(
        options["model"], options["out"], options["format"], modules, None if size is None else int(size), options.get("observer", MINMAX)
    )
