"""Checkpoint folders read into modules, as the tables of :mod:`graphspec.layouts` say. Everything is checked before it is copied."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..errors import CheckpointError
from ..layouts import Layout
from ..models.layers import Linear

if TYPE_CHECKING:
    from pathlib import Path

Progress = Callable[[int, int], None]
"""Called with (tensors read, tensors in all) after each one."""

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = ("F64", "F32", "BF16", "F16")
INTEGERS = ("I64", "I32")


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

    def read(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...] = FLOATS) -> Tensor:
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


def fill(
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
