"""Text files in, token streams out: what a draft of any target is trained on, and what is held out of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from graphspec.errors import ConfigError


def read_documents(paths: Sequence[str | Path], key: str = "data") -> dict[str, str]:
    """Every text under ``paths`` (files, or folders searched for files), by absolute path, in a fixed order.

    A file found in a folder is passed over when it is hidden, empty or not UTF-8 text; a file named itself must be text.

    Args:
        paths: files and folders.
        key: the setting the paths come from, for messages.

    Raises:
        ConfigError: a path that does not exist, a named file that is not text, or no text at all.
    """
    documents: dict[str, str] = {}
    # Absolute, so that a file is the same document however it was named.
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
    """``(train, held_out)``: whole documents, drawn by the hash of their text, until about ``share`` of the characters are held out.

    A single document, and one that alone is most of the text, is cut: its end is held out.
    """
    total = sum(len(text) for text in documents.values())
    held_out: dict[str, str] = {}
    taken = 0
    for name in sorted(documents, key=lambda name: hashlib.sha256(documents[name].encode()).digest()):
        size = len(documents[name])
        # A document may overshoot the share a little; one that would double it stays in training.
        if taken < share * total and taken + size <= 2 * share * total:
            held_out[name] = documents[name]
            taken += size
    train = {name: text for name, text in documents.items() if name not in held_out}
    if not held_out:
        name = max(train, key=lambda name: len(train[name]))
        cut = len(train[name]) - max(1, round(share * total))
        held_out, train = {name: train[name][cut:]}, {**train, name: train[name][:cut]}
    return train, held_out


def encode_stream(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], end: int | None) -> np.ndarray:
    """One stream ``[tokens]`` int64: every text without special tokens, followed by ``end`` where there is one."""
    stream: list[int] = []
    # One at a time: a tokenizer's own batching holds every encoding at once, many times the size of the ids.
    for text in texts:
        stream.extend(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        if end is not None:
            stream.append(end)
    return np.asarray(stream, dtype=np.int64)
