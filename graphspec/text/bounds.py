"""The fewest tokens that a text can have, without encoding it, so that a text that can't fit is refused at once.

The bound is the bytes of the text over those of the longest token. It holds only for a tokenizer that drops no text and has no token for
unknown text of any length; ``tokenizer.json`` says so. There is no bound for other tokenizers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..errors import RequestError
from .tokenizer import BYTE_LETTERS

NFC_SHRINKS = 4
"""Bytes of a text are at most this multiple of those of its form NFC: a character of two bytes has at most three components, of two or
three bytes each, and one of three bytes at most four."""
KEEPERS = ("ByteLevel", "Digits", "Metaspace", "Punctuation", "Split")
"""Pre-tokenizers that keep all text unless their ``behavior`` is to remove it."""


def fewest_tokens(text: str, folder: Path) -> int:
    """The fewest tokens that a checkpoint's tokenizer can make of a text; 0: unknown."""
    path = folder / "tokenizer.json"
    try:
        state = path.stat()
    except OSError:
        return 0
    longest = _longest(path, state.st_mtime_ns, state.st_size)
    return 0 if longest is None else -(-len(text.encode("utf-8", "replace")) // longest)


def check_fits(key: str, text: str, folder: Path, max_context: int) -> None:
    """Check that a text may fit the context.

    Raises:
        RequestError: it can't.
    """
    if (fewest := fewest_tokens(text, folder)) >= max_context:
        expected = f"at most {max_context - 1} tokens (max_context {max_context}, one of them new)"
        raise RequestError(key, expected, f"at least {fewest} tokens")


@lru_cache(maxsize=16)
def _longest(path: Path, _changed: int, _size: int) -> int | None:
    """The most bytes of text that one token stands for; None: unknown."""
    try:
        return longest_token(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError, AttributeError, TypeError, KeyError):
        # Whoever encodes with it says what is wrong.
        return None


def longest_token(document: Mapping[str, Any]) -> int | None:
    """The same from a ``tokenizer.json``."""
    model, added = document["model"], document.get("added_tokens") or []
    shrinks = _shrinks(document.get("normalizer"))
    # Added tokens may take the blanks next to them.
    if shrinks is None or document.get("truncation") or any(token.get("lstrip") or token.get("rstrip") for token in added):
        return None
    splitters = list(_parts(document.get("pre_tokenizer"), "pretokenizers"))
    if not all(part["type"] in KEEPERS and str(part.get("behavior", "")).lower() != "removed" for part in splitters):
        return None
    vocab = model["vocab"]
    tokens = list(vocab) if isinstance(vocab, Mapping) else [token for token, _ in vocab]
    by_byte = any(part["type"] == "ByteLevel" for part in [*splitters, *_parts(document.get("normalizer"), "normalizers")])
    if by_byte and model["type"] == "BPE":
        # Without a character for each of the 256 bytes, text could be dropped.
        if not BYTE_LETTERS.keys() <= set(tokens):
            return None
        sizes = [len(token) for token in tokens]
    elif model["type"] in ("BPE", "Unigram") and model.get("byte_fallback"):
        if not {f"<0x{byte:02X}>" for byte in range(256)}.issubset(tokens):
            return None
        sizes = [len(token.encode()) for token in tokens]
    else:
        return None
    return shrinks * max([*sizes, *(len(token["content"].encode()) for token in added)])


def _shrinks(normalizer: Mapping[str, Any] | None) -> int | None:
    """The most bytes of a text for each byte of its normalised form; None: unknown."""
    maximum = 1
    for part in _parts(normalizer, "normalizers"):
        if part["type"] == "NFC":
            maximum *= NFC_SHRINKS
        elif part["type"] == "Replace":
            pattern = part["pattern"].get("String")
            if pattern is None or len(part["content"].encode()) < len(pattern.encode()):
                return None
        elif part["type"] not in ("Prepend", "ByteLevel"):
            return None
    return maximum


def _parts(step: Mapping[str, Any] | None, name: str) -> Iterable[Mapping[str, Any]]:
    if step is None:
        return
    if step["type"] == "Sequence":
        for part in step[name]:
            yield from _parts(part, name)
    else:
        yield step
