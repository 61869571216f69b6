"""Copies of tiny checkpoints to damage, an engine over each, and a canary that shows whether anything in them was run."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from graphspec import LLM, SamplingParams
from graphspec.api.outputs import Output
from graphspec.facts import check_tokenizer
from tests.support.engines import add_tokenizer, mirror_pair

from ._harness import Case

CANARY = "ran"
TARGET, DRAFT, SMALL, MAP = "target", "eagle3", "small", "map"
"""The folders of a case: a target, an EAGLE-3 head for it, a copy of the target as standalone draft, and an empty one for token maps."""

Mutate = Callable[[Path], object]
Use = Callable[[Path], object]


class CodeRanError(Exception):
    """Something in a checkpoint was executed."""


class Bench:
    """Makes cases: each damages its own copies, and builds an engine that generates four tokens."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.good = folder, folder / "good"
        mirror_pair(self.good, noise=1.0, max_positions=512)
        shutil.copytree(self.good / TARGET, self.good / SMALL)
        (self.good / MAP).mkdir()
        self.words = folder / "words"
        add_tokenizer(self.words)
        self.tensors = load_file(self.good / TARGET / "model.safetensors")

    def case(
        self, name: str, mutate: Mutate, which: str = TARGET, *, wrong: bool = False, use: Use | None = None, answer: str | None = None
    ) -> Case:
        """``mutate`` damages the folder ``which``, then ``use`` uses them all; ``answer`` is the user's input at a prompt."""
        uses: dict[str, Use] = {SMALL: standalone, MAP: token_map}
        return Case(f"{which}: {name}", lambda: self._run(mutate, which, use or uses.get(which, eagle3), answer), wrong)

    def _run(self, mutate: Mutate, which: str, use: Use, answer: str | None) -> object:
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        try:
            shutil.copytree(self.good, folder, dirs_exist_ok=True)
            if use in SPEAKING:
                for speaker in (TARGET, SMALL):
                    shutil.copytree(self.words, folder / speaker, dirs_exist_ok=True)
            mutate(folder / which)
            with patch("sys.stdin", io.StringIO(answer or "")):
                return use(folder)
        finally:
            ran = (folder / CANARY).exists()
            shutil.rmtree(folder)
            if ran:
                raise CodeRanError(which)


PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)


def _engine(folder: Path, **settings: Any) -> LLM:
    shape = {"num_steps": 2, "topk": 1, "num_draft_tokens": 3, "buckets": [1], "max_rows": 1, "prefill_chunks": [16]}
    return LLM(folder / TARGET, runtime="eager", **shape, **settings)


def _generate(folder: Path, prompt: Any = (5, 6, 7), **settings: Any) -> object:
    return _told(_engine(folder, **settings).generate(prompt if isinstance(prompt, str) else list(prompt), PARAMS))


def _told(outputs: list[Output]) -> object:
    return [(output.finish_reason, output.token_ids, output.text, output.error) for output in outputs]


def eagle3(folder: Path) -> object:
    return _generate(folder, draft=folder / DRAFT)


def text(folder: Path) -> object:
    return _generate(folder, "w5 w6 w7", draft=folder / DRAFT)


def standalone(folder: Path) -> object:
    return _generate(folder, variant="standalone", draft=folder / SMALL)


def vocabularies(folder: Path) -> object:
    """No engine: do both drafts speak of the target's tokens?"""
    return [check_tokenizer(folder / draft, folder / TARGET) for draft in (DRAFT, SMALL)]


def talk(folder: Path) -> object:
    """A conversation, which the chat template turns into text."""
    return _told(_engine(folder, draft=folder / DRAFT).chat([{"role": "user", "content": "w5 w6 w7"}], PARAMS))


def ids(folder: Path) -> object:
    """Token ids as prompt, and a target with a tokenizer, which then writes the output's text."""
    return _generate(folder, draft=folder / DRAFT)


def token_map(folder: Path) -> object:
    (file,) = (folder / MAP).iterdir()
    return _generate(folder, variant="standalone", draft=folder / SMALL, token_map=str(file))


SPEAKING: tuple[Use, ...] = (text, talk, ids, vocabularies)
"""Uses for which target and small draft get tokenizers."""


class Evil:
    """When unpickled, calls a function that touches the canary of the case's folder."""

    def __init__(self, folder: Path) -> None:
        self.command = command(folder)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def command(folder: Path) -> str:
    return f"touch {folder.parent / CANARY}"


def keys(changes: dict[str, Any], file: str = "config.json", *removed: str) -> Mutate:
    """Sets and removes top-level keys."""

    def mutate(folder: Path) -> None:
        values = json.loads((folder / file).read_text()) | changes
        for key in removed:
            del values[key]
        (folder / file).write_text(json.dumps(values))

    return mutate


def write(content: bytes | str, file: str = "config.json") -> Mutate:
    return lambda folder: (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())


def raw(change: Callable[[bytes], bytes], file: str = "model.safetensors") -> Mutate:
    return lambda folder: (folder / file).write_bytes(change((folder / file).read_bytes()))


def tensors(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Mutate:
    def mutate(folder: Path) -> None:
        file = folder / "model.safetensors"
        save_file(change({name: value.clone() for name, value in load_file(file).items()}), file, metadata={"format": "pt"})

    return mutate


def header(change: Callable[[dict[str, Any]], object]) -> Mutate:
    """Changes the header of the safetensors file in place."""

    def rewrite(data: bytes) -> bytes:
        (length,) = struct.unpack("<Q", data[:8])
        values = json.loads(data[8 : 8 + length])
        change(values)
        text = json.dumps(values).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + length :]

    return raw(rewrite)


def instead(file: str, make: Callable[[Path], object]) -> Mutate:
    """Something else under the name of a file."""

    def mutate(folder: Path) -> None:
        (folder / file).unlink()
        make(folder / file)

    return mutate


def sharded(name: str, content: Callable[[dict[str, Tensor]], object] | None = None, place: str | None = None) -> Mutate:
    """An index all of whose entries say ``name``; the weights lie in ``place``, or are what ``content`` makes of them."""

    def mutate(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        if place is not None:
            (folder / place).parent.mkdir(exist_ok=True)
            (folder / "model.safetensors").rename(folder / place)
        else:
            (folder / "model.safetensors").unlink()
        if content is not None:
            torch.save(content(weights), folder / name)
        kind = "pytorch_model.bin" if name.endswith(".bin") and content is not None else "model.safetensors"
        (folder / f"{kind}.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(weights, name)}))

    return mutate


def pickled(make: Callable[[dict[str, Tensor], Path], object], *, legacy: bool = False, plain: bool = False) -> Mutate:
    """``pytorch_model.bin`` in place of safetensors; ``plain``: a bare pickle."""

    def mutate(folder: Path) -> None:
        content = make(load_file(folder / "model.safetensors"), folder)
        (folder / "model.safetensors").unlink()
        file = folder / "pytorch_model.bin"
        if plain:
            file.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content))
        else:
            torch.save(content, file, _use_new_zipfile_serialization=not legacy)

    return mutate


def mapped(make: Callable[[Path], object], *, plain: bool = False) -> Mutate:
    """A token map."""

    def mutate(folder: Path) -> None:
        content = make(folder)
        if plain:
            (folder / "map.pt").write_bytes(content if isinstance(content, bytes) else pickle.dumps(content))
        else:
            torch.save(content, folder / "map.pt")

    return mutate
