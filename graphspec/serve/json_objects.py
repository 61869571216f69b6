"""Finds the end of a JSON object in text that comes in pieces."""

from __future__ import annotations

import re

SPACE = " \t\n\r"
DEEPEST = 200
"""Most objects and arrays around a value; far above real use."""
LONGEST_SCALAR = 400
"""Characters of a number; far above real use."""
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_BARE = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_HEX = frozenset("0123456789abcdefABCDEF")


class NotAnObjectError(Exception):
    """The text can't be a JSON object, whatever follows."""


class ObjectScanner:
    """Follows one JSON object, white space in front of it included, and refuses it at the first character that can't belong to it.

    A character is read once, whatever the sizes of the pieces.
    """

    def __init__(self) -> None:
        self._expects = "object"
        self._closers: list[str] = []
        """The objects and arrays that are open, the innermost last."""
        self._after_string = ""
        self._hex = 0
        self._bare = ""

    def read(self, text: str, place: int) -> int | None:
        """Read on in ``text`` from ``place``; returns where the object has ended, None: not in this text.

        Raises:
            NotAnObjectError: a character that can't belong to an object.
        """
        while place < len(text):
            match self._expects:
                case "string":
                    place = self._in_string(text, place)
                case "escape" | "hex":
                    self._escaped(text[place])
                    place += 1
                case "bare":
                    place = self._in_bare(text, place)
                case _:
                    if text[place] in SPACE:
                        place += 1
                        continue
                    place = self._between(text, place)
                    if not self._closers:
                        return place
        return None

    def _in_string(self, text: str, place: int) -> int:
        run = _PLAIN.match(text, place)
        assert run is not None
        if run.end() == len(text):
            return run.end()
        match text[run.end()]:
            case '"':
                self._expects = self._after_string
            case "\\":
                self._expects = "escape"
            case _:
                raise NotAnObjectError
        return run.end() + 1

    def _escaped(self, character: str) -> None:
        if self._expects == "hex":
            if character not in _HEX:
                raise NotAnObjectError
            self._hex -= 1
            self._expects = "hex" if self._hex else "string"
        elif character == "u":
            self._expects, self._hex = "hex", 4
        elif character in '"\\/bfnrt':
            self._expects = "string"
        else:
            raise NotAnObjectError

    def _in_bare(self, text: str, place: int) -> int:
        run = _BARE.match(text, place)
        assert run is not None
        self._bare += run.group()
        if len(self._bare) > LONGEST_SCALAR:
            raise NotAnObjectError
        if run.end() < len(text):
            if _SCALAR.fullmatch(self._bare) is None:
                raise NotAnObjectError
            self._expects = "next"
        return run.end()

    def _between(self, text: str, place: int) -> int:
        """Read a character outside strings, numbers and words."""
        character, expects = text[place], self._expects
        if expects == "object":
            self._open(character, only="{")
        elif character == '"' and expects in ("key", "first key"):
            self._expects, self._after_string = "string", "colon"
        elif character == ":" and expects == "colon":
            self._expects = "value"
        elif character == "," and expects == "next":
            self._expects = "key" if self._closers[-1] == "}" else "value"
        elif character == self._closers[-1] and expects in ("next", "first key", "first value"):
            self._closers.pop()
            self._expects = "next"
        elif expects not in ("value", "first value"):
            raise NotAnObjectError
        elif character == '"':
            self._expects, self._after_string = "string", "next"
        elif _BARE.fullmatch(character):
            self._expects, self._bare = "bare", ""
            return place
        else:
            self._open(character, only="{[")
        return place + 1

    def _open(self, character: str, *, only: str) -> None:
        if character not in only or len(self._closers) == DEEPEST:
            raise NotAnObjectError
        self._closers.append("}" if character == "{" else "]")
        self._expects = "first key" if character == "{" else "first value"
