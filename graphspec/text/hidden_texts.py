"""Texts of special tokens in what a user wrote, which a chat template must not mix with those that it writes itself."""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any


class HiddenTexts:
    """Puts a word that nobody can guess in the place of each text, and later the text in the place of the word.

    Args:
        texts: to hide; none: everything stays as it is.
    """

    def __init__(self, texts: Collection[str]) -> None:
        longest_first = sorted(filter(None, texts), key=len, reverse=True)
        self._texts = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._nonce = f"q{secrets.token_hex(8)}x"
        self._words: dict[str, str] = {}

    def of(self, value: Any) -> Any:
        """The same with all its texts hidden, at any depth.

        Raises:
            RecursionError: it is too deep.
        """
        if self._texts is None:
            return value
        if isinstance(value, str):
            return self._texts.sub(lambda found: self._words.setdefault(found[0], f"{self._nonce}{len(self._words)}q"), value)
        if isinstance(value, Mapping):
            return {self.of(key): self.of(inner) for key, inner in value.items()}
        if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
            return [self.of(inner) for inner in value]
        return value

    def restored(self, text: str) -> tuple[str, list[tuple[int, int]]]:
        """A text with what was hidden, and where that is: first character, and the one after the last."""
        texts = {word: hidden for hidden, word in self._words.items()}
        parts, spans, length = [], [], 0
        for place, part in enumerate(re.split(f"({self._nonce}[0-9]+q)", text) if texts else [text]):
            part = texts.get(part, part)
            if place % 2:
                spans.append((length, length + len(part)))
            parts.append(part)
            length += len(part)
        return "".join(parts), spans
