"""A checkpoint in low precision: linear layers rounded to the nearest codes, as compressed-tensors stores them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ..config.paths import user_path
from ..errors import CheckpointError, ConfigError, spell_bytes
from ..facts.files import MAX_CONFIG, read_json
from ..facts.folders import model_folder
from ..facts.quantisation import read_quantisation
from ..kernels.linear.packed import Packed, dequantise
from ..weights.rounded_layers import LAYERS, chosen_layers, group_size
from ..weights.rounding import MINMAX, OBSERVERS, ROUNDED, Rounded, quantization_config, round_to, stored
from .average import NUMBERS, Averaged, average
from .checkpoint import FLOATS, Checkpoint
from .write import write_folder

_HEAD, _EMBEDDING = "lm_head", "embed_tokens"


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
    linear = [name for name in checkpoint.names() if _linear(checkpoint, name)]
    experts = {name for name in linear if ".experts." in name}
    chosen = chosen_layers("modules", modules, {name: name.split(".")[-2] for name in linear if name not in experts}, experts)
    group = group_size("group", row, group, {name: checkpoint.shape(name)[1] for name in linear if name in chosen})
    config = read_json(source / "config.json", MAX_CONFIG)
    ignore = [name.removesuffix(".weight") for name in linear if name not in chosen]
    # A tied head is a layer without a tensor.
    ignore += [] if any(name.split(".")[-2:-1] == [_HEAD] for name in chosen) or _HEAD in ignore else [_HEAD]
    config["quantization_config"] = quantization_config(row, group, ignore)
    work = _Work(checkpoint, row, group, chosen, observer)
    after = write_folder(destination, checkpoint, config, work.tensors())
    return Quantised(destination, code, group, len(chosen), work.before, after, math.sqrt(work.changed / (work.all or 1)))


def _linear(checkpoint: Checkpoint, name: str) -> bool:
    """Whether a tensor is the weight of a linear layer."""
    return name.endswith(".weight") and len(checkpoint.shape(name)) == 2 and not name.endswith(f"{_EMBEDDING}.weight")


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


def from_words(words: Sequence[str]) -> Quantised | Averaged:
    """:func:`quantise` or :func:`graphspec.models.average.average`, by the format, with the arguments of the command line.

    Raises:
        ConfigError: other arguments.
    """
    pairs = [word.split("=", 1) for word in words if "=" in word]
    models = [value for key, value in pairs if key == "model"]
    options = {key: value for key, value in pairs if key != "model"}
    known = {"out", "format"}
    all_named = models and len(words) == len(models) + len(options)
    if not all_named or not known <= options.keys() <= known | {"modules", "group", "observer"}:
        expected = "model=FOLDER [model=FOLDER ...] out=FOLDER format=NAME [modules=NAME,NAME] [group=SIZE] [observer=NAME]"
        raise ConfigError("convert", expected, " ".join(words))
    code = options["format"]
    if code not in (known_formats := (*ROUNDED, *NUMBERS)):
        raise ConfigError("format", "one of " + ", ".join(known_formats), repr(code))
    if code in NUMBERS:
        if others := sorted(options.keys() - known):
            raise ConfigError(others[0], f"nothing with format={code}, which has no codes", repr(options[others[0]]))
        return average(models, options["out"], code)
    if len(models) > 1:
        raise ConfigError("format", "one of " + ", ".join(NUMBERS) + " for the mean of several models", repr(code))
    size = options.get("group")
    if size is not None and not size.isdecimal():
        raise ConfigError("group", "a multiple of 8", repr(size))
    modules = options.get("modules", LAYERS).split(",")
    return quantise(models[0], options["out"], code, modules, None if size is None else int(size), options.get("observer", MINMAX))
