"""Reads text files as token streams: the training text of a target or draft, and the held-out text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..config.train_options import DataSource, TrainConfig
from ..errors import ConfigError
from ..text.tokenizer import Tokenizer
from .checkpoint import write_json, write_whole
from .loop import Watch, unwatched


def read_documents(paths: Sequence[str | Path], key: str = "train.data") -> dict[str, str]:
    """Every text under ``paths`` (files, or folders searched for files), by absolute path, in a fixed order.

    Files in folders are skipped if they are hidden, empty or not UTF-8 text; a file that is named must be text.

    Args:
        paths: files and folders.
        key: the setting that the paths come from, for messages.

    Raises:
        ConfigError: a path that does not exist, a named file that is not text, or no text at all.
    """
    documents: dict[str, str] = {}
    # Absolute, so that a file is one document, however its path is written.
    for path in (Path(path).resolve() for path in paths):
        if path.is_file():
            text = read_text(path)
            if text is None:
                raise ConfigError(key, "UTF-8 text files", str(path))
            documents[str(path)] = text
        elif path.is_dir():
            for file in sorted(path.rglob("*")):
                hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
                text = None if hidden or not file.is_file() else read_text(file)
                if text and text.strip():
                    documents[str(file)] = text
        else:
            raise ConfigError(key, "files or folders that exist", str(path))
    if not documents:
        raise ConfigError(key, "at least one text file", [str(path) for path in paths])
    return documents


def read_text(file: Path) -> str | None:
    """The file's text, None if it is not UTF-8 text."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


def split_documents(documents: dict[str, str], share: float) -> tuple[dict[str, str], dict[str, str]]:
    """``(train, held_out)``: whole documents, chosen by the hash of their text, until about ``share`` of the characters are held out.

    A single document, or one that is most of the text, is split, and its end held out.
    """
    total = sum(len(text) for text in documents.values())
    held_out: dict[str, str] = {}
    taken = 0
    for name in sorted(documents, key=lambda name: hashlib.sha256(documents[name].encode()).digest()):
        size = len(documents[name])
        # A document may exceed the share a little; one that would double it stays in training.
        if taken < share * total and taken + size <= 2 * share * total:
            held_out[name] = documents[name]
            taken += size
    train = {name: text for name, text in documents.items() if name not in held_out}
    if not held_out:
        name = max(train, key=lambda name: len(train[name]))
        cut = len(train[name]) - max(1, round(share * total))
        held_out, train = {name: train[name][cut:]}, {**train, name: train[name][:cut]}
    return train, held_out


def encode_stream(tokenizer: Tokenizer, texts: Sequence[str], end: int | None, watch: Watch = unwatched) -> np.ndarray:
    """One stream, int32 ``[tokens]``: every text without special tokens, followed by ``end`` unless that is None."""
    parts: list[np.ndarray] = []
    # One at a time: a tokenizer's batching keeps every encoding in memory, many times the size of the ids.
    for number, text in enumerate(texts):
        if number % 64 == 0:
            watch("data", number, len(texts))
        ids = tokenizer.words(text)
        parts.append(np.asarray(ids if end is None else [*ids, end], dtype=np.int32))
    watch("data", len(texts), len(texts))
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)


@dataclass(frozen=True)
class Documents:
    """The texts of one run, by absolute path."""

    train: dict[str, str]
    held_out: dict[str, str]

    @classmethod
    def read(cls, config: TrainConfig) -> Documents:
        """Read the texts among ``train.data`` and ``train.held_out``; without the latter, a share of the former is held out.

        Raises:
            ConfigError: no text in the data, or paths without text.
        """
        named = [source.path for source in config.sources if source.is_text]
        if not named:
            raise ConfigError("train.data", "text files, or folders of them", "none", "train.data=[folder,file.txt]")
        documents = read_documents(named)
        held_out_texts = [name for name in config.held_out if DataSource(name).is_text]
        if not held_out_texts:
            return cls(*split_documents(documents, config.held_out_share))
        held_out = read_documents(held_out_texts, "train.held_out")
        train = {name: text for name, text in documents.items() if name not in held_out}
        if not train:
            raise ConfigError("train.data", "text that is not held out", "none")
        return cls(train, held_out)


@dataclass(frozen=True)
class Streams:
    """The texts in a target's ids.

    Attributes:
        train, held_out: int32 ``[tokens]``, every text followed by ``end``; memory-mapped.
        end: the id that ends a text; None: there is none.
        facts: counts, for records.
    """

    train: np.ndarray
    held_out: np.ndarray
    end: int | None
    facts: dict[str, Any]


def encode(
    documents: Documents,
    tokenizer: Tokenizer,
    end: int | None,
    vocab_size: int,
    source: dict[str, Any],
    work: Path,
    watch: Watch,
) -> Streams:
    """Encode the texts into ``work``; a later run reads these files, if they are from the same texts and for the same target.

    Args:
        documents: the texts; without any, nothing is written.
        tokenizer: the target's.
        end: id that ends a text.
        vocab_size: of the target.
        source: further values that the ids depend on, by the key of their setting.
        work: folder of the files.
        watch: called with progress.

    Raises:
        ConfigError: the files are from other texts or for another target, or an id is outside the target's vocabulary.
    """
    if not documents.train:
        return Streams(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int32), end, {})
    sides = {"held_out": list(documents.held_out.values()), "train": list(documents.train.values())}
    keys = {"held_out": "train.held_out", "train": "train.data"}
    made_from = source | {keys[side]: _digest(texts) for side, texts in sides.items()}
    file = work / "data.json"
    if file.exists():
        stored = json.loads(file.read_text(encoding="utf-8"))
        for key, value in made_from.items():
            if stored["made_from"].get(key) != value:
                hint = "the run in train.work read other texts: use another folder, or start again with train.resume=false"
                raise ConfigError(f"{file}: {key}", value, stored["made_from"].get(key), hint)
    else:
        facts: dict[str, Any] = {"made_from": made_from, "end": end}
        for side, texts in sides.items():
            stream = encode_stream(tokenizer, texts, end, watch)
            highest = int(stream.max(initial=0))
            if highest >= vocab_size:
                raise ConfigError("model.path", f"a tokenizer with ids below the model's vocab_size = {vocab_size}", highest)
            write_whole(work / f"{side}.npy", lambda out, stream=stream: np.save(out, stream))  # type: ignore[misc]
            size = sum(len(text.encode()) for text in texts)
            facts.update({f"{side}_documents": len(texts), f"{side}_bytes": size, f"{side}_tokens": len(stream)})
        write_json(file, facts)
        stored = facts
    counts = {key: value for key, value in stored.items() if key not in ("made_from", "end")}
    train, held_out = (np.load(work / f"{side}.npy", mmap_mode="r") for side in ("train", "held_out"))
    return Streams(train, held_out, stored["end"], counts)


def _digest(texts: Sequence[str]) -> str:
    hashed = hashlib.sha256()
    for text in texts:
        data = text.encode()
        hashed.update(len(data).to_bytes(8, "little") + data)
    return hashed.hexdigest()
