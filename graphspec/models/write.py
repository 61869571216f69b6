"""New folders of checkpoints: tensors in safetensors files, next to the other files of the checkpoint that they were made from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..config.paths import new_folder, unwritable
from ..facts.quantisation import SIDECAR
from .checkpoint import Checkpoint

SHARD = 5 * 10**9
"""Bytes of tensors in a file; a larger tensor has a file of its own."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf", ".safetensors.index.json", ".bin.index.json")


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
