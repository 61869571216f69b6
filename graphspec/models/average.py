"""Checkpoints in plain numbers: those that the codes of one stand for, or the mean of several of one network.

The ends of several training runs that began with the same network have a mean that often generalises better than each of them and costs
nothing more to run: stochastic weight averaging (Izmailov et al. 2018, arXiv 1803.05407), model soups (Wortsman et al. 2022, arXiv
2203.05482).
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
from ..facts.gguf_model import weights_files
from .checkpoint import Checkpoint
from .write import write_folder

NUMBERS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
"""Formats without codes."""
_OF_A_FILE = ("quantization_config", "torch_dtype", "dtype", "transformers_version", "_name_or_path")
"""Keys of ``config.json`` that say how numbers are stored and by what, not what they mean."""


@dataclass(frozen=True, slots=True)
class Averaged:
    """Result of :func:`average`.

    Attributes:
        folder: the new one.
        format: of the numbers, a key of :data:`NUMBERS`.
        models: how many.
        codes: how many weights of the first were codes.
        size: bytes of all tensors.
        distance: root mean square of the distances from the mean, relative to that of the mean's numbers.
    """

    folder: Path
    format: str
    models: int
    codes: int
    size: int
    distance: float

    @property
    def sentence(self) -> str:
        """The result in words."""
        what, rest = f"{self.codes} weights of low precision as numbers", ""
        if self.models > 1:
            what, rest = f"the mean of {self.models} checkpoints", f"; they are {self.distance:.1%} from it"
        return f"{self.folder}: {what} in {self.format}, {spell_bytes(self.size)}{rest}"


def average(models: Sequence[str | Path], out: str | Path, numbers: str) -> Averaged:
    """Write the mean of checkpoints, of targets or drafts, to a new folder, with the other files of the first. That of one has the numbers
    that its codes stand for, and its other tensors as they are stored: for programs that can't read the codes.

    Args:
        models: folders, or what else ``model=`` takes.
        out: a folder that doesn't exist yet, or is empty.
        numbers: a key of :data:`NUMBERS`. Sums are in float32.

    Raises:
        CheckpointError: a source that can't be read, is a GGUF file, or has experts of low precision in one tensor, whose layout differs in
            full precision; one without codes, if it is the only one; configs, names, shapes or whole numbers, such as the ids of a draft
            vocabulary, that differ.
        ConfigError: no checkpoint, an unknown format, or a folder that is not empty or can't be written.
    """
    if numbers not in NUMBERS:
        raise ConfigError("format", "one of " + ", ".join(NUMBERS), repr(numbers))
    if not models:
        raise ConfigError("model", "a checkpoint, or several", "none")
    sources, destination = [model_folder(str(model)) for model in models], user_path("out", str(out))
    for source in sources:
        if weights_files(source):
            raise CheckpointError(str(source), "a folder with config.json and safetensors", "GGUF, whose config has another form")
    first, *others = checkpoints = [Checkpoint(source) for source in sources]
    config = _config(first)
    for other in others:
        _check_same(first, config, other)
    codes, *_ = [_codes(checkpoint) for checkpoint in checkpoints]
    if not others and not codes:
        raise CheckpointError(str(first.path), "weights in low precision", "full precision")
    changed = total = 0.0

    def tensors() -> Iterator[tuple[str, Tensor]]:
        nonlocal changed, total
        for name in first.names():
            found = [checkpoint.raw(name) for checkpoint in checkpoints]
            if not (others or name in codes) or _is_whole(checkpoints, name, found):
                yield name, found[0].contiguous()
                continue
            mean = torch.stack([tensor.float() for tensor in found]).mean(0)
            if not mean.isfinite().all():
                raise CheckpointError(first.key(name), "finite numbers in every checkpoint", "infinity or NaN")
            total += float(mean.square().sum())
            changed += sum(float((tensor.float() - mean).square().sum()) for tensor in found) / len(found)
            yield name, mean.to(NUMBERS[numbers])

    size = write_folder(destination, first, config, tensors())
    return Averaged(destination, numbers, len(models), len(codes), size, (changed / (total or 1)) ** 0.5)


def _config(checkpoint: Checkpoint) -> dict[str, Any]:
    """``config.json`` without the codes of the weights."""
    config = read_json(checkpoint.path / "config.json", MAX_CONFIG)
    config.pop("quantization_config", None)
    return config


def _codes(checkpoint: Checkpoint) -> set[str]:
    """The weights that are codes. Reads no weights.

    Raises:
        CheckpointError: one of all experts.
    """
    codes = {name for name in checkpoint.names() if checkpoint.is_packed(name)}
    if (experts := next((name for name in sorted(codes) if not name.endswith(".weight")), None)) is not None:
        raise CheckpointError(checkpoint.key(experts), "codes of one linear layer each", "those of all experts in one tensor")
    return codes


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


def _is_whole(checkpoints: Sequence[Checkpoint], name: str, found: Sequence[Tensor]) -> bool:
    """Whether a tensor is of whole numbers, which have no mean: they must be the same everywhere."""
    first, floats = found[0], found[0].is_floating_point()
    for checkpoint, tensor in zip(checkpoints, found, strict=True):
        same = tensor.dtype == first.dtype and torch.equal(tensor, first)
        if tensor.is_floating_point() != floats or not (floats or same):
            expected = f"the same {first.dtype} numbers as in {checkpoints[0].path}"
            raise CheckpointError(checkpoint.key(name), expected, f"others ({tensor.dtype}), which have no mean with these")
    return not floats
