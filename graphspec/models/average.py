"""The mean of several checkpoints of one network, such as the ends of several training runs that began with the same one.

It often generalises better than each of them and costs nothing more to run: stochastic weight averaging (Izmailov et al. 2018, arXiv
1803.05407), model soups (Wortsman et al. 2022, arXiv 2203.05482).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config.checks import brief
from ..config.paths import user_path
from ..errors import CheckpointError, ConfigError, spell_bytes
from ..facts.files import MAX_CONFIG, read_json
from ..facts.folders import model_folder
from .checkpoint import Checkpoint
from .quantise import NUMBERS, refuse_gguf, write_folder

_OF_A_FILE = ("quantization_config", "torch_dtype", "dtype", "transformers_version", "_name_or_path")
"""Keys of ``config.json`` that say how numbers are stored and by what, not what they mean."""


@dataclass(frozen=True, slots=True)
class Averaged:
    """Result of :func:`average`.

    Attributes:
        folder: the new one.
        format: of the numbers, a key of :data:`graphspec.models.quantise.NUMBERS`.
        models: how many.
        size: bytes of all tensors.
        distance: root mean square of the distances from the mean, relative to that of the mean's numbers.
    """

    folder: Path
    format: str
    models: int
    size: int
    distance: float

    @property
    def sentence(self) -> str:
        """The result in words."""
        numbers = f"the mean of {self.models} checkpoints in {self.format}, {spell_bytes(self.size)}"
        return f"{self.folder}: {numbers}; they are {self.distance:.1%} from it"


def average(models: Sequence[str | Path], out: str | Path, numbers: str) -> Averaged:
    """Write the mean of checkpoints, of targets or drafts, to a new folder, with the other files of the first.

    Args:
        models: two or more folders, or what else ``model=`` takes. Codes count as the numbers that they stand for.
        out: a folder that doesn't exist yet, or is empty.
        numbers: a key of :data:`graphspec.models.quantise.NUMBERS`. Sums are in float32.

    Raises:
        CheckpointError: a source that can't be read or is a GGUF file; configs, names or shapes that differ, or whole numbers, such as
            the ids of a draft vocabulary.
        ConfigError: fewer than two, an unknown format, or a folder that is not empty or can't be written.
    """
    if numbers not in NUMBERS:
        raise ConfigError("format", "one of " + ", ".join(NUMBERS) + " for a mean", repr(numbers))
    if len(models) < 2:
        raise ConfigError("model", "two or more checkpoints", len(models))
    sources, destination = [model_folder(str(model)) for model in models], user_path("out", str(out))
    for source in sources:
        refuse_gguf(source)
    first, *others = checkpoints = [Checkpoint(source) for source in sources]
    config = _config(first)
    for other in others:
        _check_same(first, config, other)
    changed = total = 0.0

    def tensors() -> Iterator[tuple[str, Tensor]]:
        nonlocal changed, total
        for name in first.names():
            found = [checkpoint.raw(name) for checkpoint in checkpoints]
            if not found[0].is_floating_point():
                _check_equal(checkpoints, name, found)
                yield name, found[0].contiguous()
                continue
            mean = torch.stack([tensor.float() for tensor in found]).mean(0)
            if not mean.isfinite().all():
                raise CheckpointError(first.key(name), "finite numbers in every checkpoint", "infinity or NaN")
            total += float(mean.square().sum())
            changed += sum(float((tensor.float() - mean).square().sum()) for tensor in found) / len(found)
            yield name, mean.to(NUMBERS[numbers])

    size = write_folder(destination, first, config, tensors())
    return Averaged(destination, numbers, len(models), size, (changed / (total or 1)) ** 0.5)


def _config(checkpoint: Checkpoint) -> dict[str, Any]:
    """``config.json`` without the codes of the weights."""
    config = read_json(checkpoint.path / "config.json", MAX_CONFIG)
    config.pop("quantization_config", None)
    return config


def _check_same(first: Checkpoint, config: dict[str, Any], other: Checkpoint) -> None:
    """Check that two checkpoints are of one network. Reads no weights."""
    found = _config(other)
    for key in sorted(config.keys() | found.keys()):
        if key not in _OF_A_FILE and config.get(key) != found.get(key):
            expected = f"{brief(config.get(key))}, as {first.path} has it"
            raise CheckpointError(f"{other.path / 'config.json'}: {key}", expected, brief(found.get(key)))
    if odd := sorted(set(first.names()) ^ set(other.names())):
        without = other if odd[0] in first else first
        raise CheckpointError(f"{without.path}: {odd[0]}", "the same tensors in every checkpoint", "no such tensor")
    for name in first.names():
        if other.shape(name) != first.shape(name):
            raise CheckpointError(other.key(name), f"shape {list(first.shape(name))}, as {first.path} has it", list(other.shape(name)))


def _check_equal(checkpoints: Sequence[Checkpoint], name: str, found: Sequence[Tensor]) -> None:
    for checkpoint, tensor in zip(checkpoints, found, strict=True):
        if not torch.equal(tensor, found[0]):
            expected = f"the same {found[0].dtype} numbers as in {checkpoints[0].path}"
            raise CheckpointError(checkpoint.key(name), expected, "others, which have no mean with these")


def from_words(words: Sequence[str]) -> Averaged:
    """:func:`average` with the arguments of the command line, ``model=FOLDER model=FOLDER ... out=FOLDER format=NAME``.

    Raises:
        ConfigError: other arguments.
    """
    pairs = [word.split("=", 1) for word in words if "=" in word]
    models = [value for key, value in pairs if key == "model"]
    options = {key: value for key, value in pairs if key != "model"}
    if len(pairs) != len(words) or len(pairs) != len(models) + len(options) or options.keys() != {"out", "format"}:
        raise ConfigError("convert", "model=FOLDER model=FOLDER ... out=FOLDER format=" + "|".join(NUMBERS), " ".join(words))
    return average(models, options["out"], options["format"])
