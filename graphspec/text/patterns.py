r"""Regular expressions as Python and ECMA 262 both read them, written so that xgrammar reads them the same way.

xgrammar ignores parts of an expression (``(?=a)``, an anchor in the middle), reads some classes more widely than both definitions (``\S``
has the no-break space), and writes a quote or a line break into a JSON string without an escape. So the expression is parsed here and
written anew, in classes of characters without escapes. Where the two definitions differ, the smaller language is taken: what matches the
new expression matches the old one by both.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from ..config.checks import brief
from ..errors import RequestError

Ranges = tuple[tuple[int, int], ...]
"""A set of characters: first and last code point of each run, in ascending order."""
MAX = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)
NOT_AS_IT_IS: Ranges = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
"""What JSON writes as an escape: control characters, the quote and the backslash."""
LARGEST = 2000
"""Most characters of an expression with its repetitions written out; xgrammar takes seconds for more."""
DEEPEST = 50
"""Groups in groups, far above real use."""
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_HEX = frozenset("0123456789abcdefABCDEF")
_SPECIAL = frozenset("\\^$.|?*+()[]{}/-")
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_DIGIT: Ranges = ((0x30, 0x39),)
_SPACE: Ranges = ((9, 13), (0x20, 0x20))
_ANY_SPACE: Ranges = (
    (9, 13), (0x1C, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F),
    (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
)  # fmt: skip
_LINE_ENDS: Ranges = ((10, 10), (13, 13), (0x2028, 0x2029))
_BEYOND_ASCII = (0x80, MAX)


def _union(*sets: Iterable[tuple[int, int]]) -> Ranges:
    found: list[tuple[int, int]] = []
    for first, last in sorted(run for runs in sets for run in runs):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return tuple(found)


def _without(*sets: Iterable[tuple[int, int]]) -> Ranges:
    """All characters but these; surrogates are none."""
    edges = [(-1, -1), *_union(*sets, (SURROGATES,)), (MAX + 1, MAX + 1)]
    return tuple((one[1] + 1, other[0] - 1) for one, other in pairwise(edges) if one[1] + 1 < other[0])


def _minus(ranges: Ranges, others: Ranges) -> Ranges:
    return _without(_without(ranges), others)


@cache
def _any_digit() -> Ranges:
    r"""Python's ``\d``."""
    return _union((code, code) for code in range(MAX + 1) if unicodedata.category(chr(code)) == "Nd")


def _escaped_class(letter: str) -> tuple[Ranges, Ranges] | None:
    r"""What ``\d``, ``\s``, ``\w`` and their negations match by every definition, and by any; None: no such class."""
    match letter.lower():
        case "d":
            inner, outer = _DIGIT, _any_digit()
        case "s":
            inner, outer = _SPACE, _ANY_SPACE
        case "w":
            inner, outer = _WORD, _union(_WORD, (_BEYOND_ASCII,))
        case _:
            return None
    return (inner, outer) if letter.islower() else (_without(outer), _without(inner))


def _folded(ranges: Ranges, *, any_definition: bool) -> Ranges:
    """A set and the other case of its letters: of ASCII by every definition, or by any."""
    other = [
        (ord(chr(code).swapcase()),) * 2
        for code in (*range(0x41, 0x5B), *range(0x61, 0x7B))
        if any(first <= code <= last for first, last in ranges)
    ]
    beyond = any_definition and bool(_minus(ranges, ((0, 0x7F),)))
    # Some letters fold to ASCII, and these back to them.
    known = _union(ranges, other, ((_BEYOND_ASCII, (0x4B, 0x4B), (0x53, 0x53), (0x6B, 0x6B), (0x73, 0x73)) if beyond else ()))
    kelvin = [(0x212A, 0x212A), (0x17F, 0x17F)] if any_definition else []
    return _union(known, kelvin)


@dataclass(frozen=True, slots=True)
class _Written:
    """A part of an expression.

    Attributes:
        text: as it is written anew.
        size: characters, repetitions written out.
        never: what it would need that can't be written, so that nothing matches; empty: it can be.
        anchors: it is empty but for anchors.
        opens: a ``^`` must stand at its beginning.
        closes: a ``$`` must stand at its end.
    """

    text: str
    size: int = 0
    never: str = ""
    anchors: bool = False
    opens: bool = False
    closes: bool = False


def written(key: str, pattern: str, *, json: bool) -> str:
    """An expression for xgrammar whose matches all match ``pattern``, from their beginning to their end.

    Args:
        key: of the expression in errors.
        pattern: the expression.
        json: matches stand in a JSON string, without escapes.

    Raises:
        RequestError: no expression, or one with parts that xgrammar has not, that Python and ECMA 262 read differently, or that need a
            character that can't stand in a JSON string as it is.
    """
    return _Parser(key, pattern, NOT_AS_IT_IS if json else ()).whole()


class _Parser:
    def __init__(self, key: str, pattern: str, excluded: Ranges) -> None:
        self._key, self._pattern, self._excluded = key, pattern, excluded
        self._place = 0
        self._depth = 0
        self._any_case = self._dot_all = False

    def whole(self) -> str:
        if self._ahead("(?") and (end := self._pattern.find(")")) > 2 and set(self._pattern[2:end]) <= set("is"):
            self._any_case, self._dot_all = "i" in self._pattern[2:end], "s" in self._pattern[2:end]
            self._place = end + 1
        found = self._choice()
        if self._place < len(self._pattern):
            raise self._refused("an opening parenthesis for each closing one", ")")
        if found.never:
            raise self._refused("characters that a JSON string holds without an escape", found.never)
        if found.size > LARGEST:
            raise self._refused(f"at most {LARGEST} characters, repetitions written out", found.size)
        return found.text

    def _refused(self, expected: str, found: object) -> RequestError:
        return RequestError(self._key, expected, f"{found} in {brief(self._pattern)}")

    def _ahead(self, text: str) -> bool:
        return self._pattern.startswith(text, self._place)

    def _take(self, what: str = "more") -> str:
        if self._place == len(self._pattern):
            raise self._refused(what, "its end")
        self._place += 1
        return self._pattern[self._place - 1]

    def _choice(self) -> _Written:
        branches = [self._sequence()]
        while self._ahead("|"):
            self._place += 1
            branches.append(self._sequence())
        able = [branch for branch in branches if not branch.never]
        if not able:
            return branches[0]
        return _Written(
            "|".join(branch.text for branch in able),
            sum(branch.size for branch in able),
            anchors=all(branch.anchors for branch in branches),
            opens=any(branch.opens for branch in branches),
            closes=any(branch.closes for branch in branches),
        )

    def _sequence(self) -> _Written:
        parts: list[_Written] = []
        while self._place < len(self._pattern) and not self._ahead("|") and not self._ahead(")"):
            parts.append(self._repeated())
        for place, part in enumerate(parts):
            if part.opens and not all(before.anchors for before in parts[:place]):
                raise self._refused("^ at the beginning only", "^ elsewhere")
            if part.closes and not all(after.anchors for after in parts[place + 1 :]):
                raise self._refused("$ at the end only", "$ elsewhere")
        return _Written(
            "".join(part.text for part in parts),
            sum(part.size for part in parts),
            next((part.never for part in parts if part.never), ""),
            anchors=all(part.anchors for part in parts),
            opens=any(part.opens for part in parts),
            closes=any(part.closes for part in parts),
        )

    def _repeated(self) -> _Written:
        part = self._atom()
        minimum, maximum, text = self._quantifier()
        if not text:
            return part
        if part.opens or part.closes:
            raise self._refused("no repetition of an anchor", text)
        if self._place < len(self._pattern) and (self._pattern[self._place] in "*+?" or self._quantifier()[2]):
            raise self._refused("one repetition of a part", "two of them")
        if part.never:
            return part if minimum else _Written("", anchors=True)
        if not part.text:
            return part
        size = part.size * max(1, minimum, maximum or 0)
        if size > LARGEST:
            raise self._refused(f"at most {LARGEST} characters, repetitions written out", size)
        return _Written(part.text + text, size)

    def _quantifier(self) -> tuple[int, int | None, str]:
        """Least and most repetitions, None: any number, and how they are written; no text: there is none."""
        if self._place == len(self._pattern):
            return 1, 1, ""
        begin, character = self._place, self._pattern[self._place]
        if character in "*+?":
            self._place += 1
            minimum, maximum = {"*": (0, None), "+": (1, None), "?": (0, 1)}[character]
            found: tuple[int, int | None, str] = (minimum, maximum, character)
        elif character == "{":
            inside, closed, _ = self._pattern[begin + 1 :].partition("}")
            min_text, comma, max_text = inside.partition(",")
            numbers = all(text.isascii() and text.isdigit() and len(text) < 7 for text in (min_text, max_text or "0"))
            if not closed or not numbers:
                if inside[:1].isdigit() or inside[:1] == ",":
                    raise self._refused("{n}, {n,} or {n,m}, or \\{", brief("{" + inside))
                return 1, 1, ""
            self._place = begin + len(inside) + 2
            upper = int(max_text) if max_text else None if comma else int(min_text)
            if upper is not None and upper < int(min_text):
                raise self._refused("repetitions in ascending order", "{" + inside + "}")
            found = (int(min_text), upper, "{" + inside + "}")
        else:
            return 1, 1, ""
        if self._ahead("?"):
            # Lazy or not, the same texts match.
            self._place += 1
        return found

    def _atom(self) -> _Written:
        match character := self._take():
            case "^":
                return _Written("", anchors=True, opens=True)
            case "$":
                return _Written("", anchors=True, closes=True)
            case ".":
                return self._set(_without() if self._dot_all else _without(_LINE_ENDS), "any character")
            case "[":
                return self._class()
            case "(":
                return self._group()
            case "*" | "+" | "?":
                raise self._refused(f"something to repeat before {character}", "nothing")
            case "\\":
                inner, _, name = self._escape(in_class=False)
                return self._set(inner, name)
            case _:
                return self._set(((ord(character),) * 2,), character)

    def _set(self, ranges: Ranges, name: str) -> _Written:
        return self._able(_folded(ranges, any_definition=False) if self._any_case else ranges, name)

    def _able(self, ranges: Ranges, name: str) -> _Written:
        """A set without what can't be written."""
        able = _minus(ranges, self._excluded)
        if not able:
            return _Written("", never=brief(name))
        if len(able) == 1 and able[0][0] == able[0][1]:
            return _Written(_spelled(able[0][0]), 1)
        return _Written("[" + "".join(_spelled(first) + (f"-{_spelled(last)}" if last > first else "") for first, last in able) + "]", 1)

    def _group(self) -> _Written:
        if self._ahead("?"):
            end = self._pattern.find(">", self._place)
            if self._ahead("?:"):
                self._place += 2
            elif (self._ahead("?<") or self._ahead("?P<")) and not (self._ahead("?<=") or self._ahead("?<!")) and end > 0:
                self._place = end + 1
            else:
                raise self._refused("groups that only match: ( ), (?: ), (?<name> )", f"({self._pattern[self._place : self._place + 3]}")
        self._depth += 1
        if self._depth > DEEPEST:
            raise self._refused(f"at most {DEEPEST} groups in groups", "more")
        found = self._choice()
        self._depth -= 1
        if not self._ahead(")"):
            raise self._refused("a closing parenthesis for each opening one", "its end")
        self._place += 1
        if found.never or not found.text:
            return found
        return _Written(f"({found.text})", found.size, opens=found.opens, closes=found.closes)

    def _escape(self, *, in_class: bool) -> tuple[Ranges, Ranges, str]:
        """The characters of an escape by every definition and by any, and how it is written."""
        letter = self._take("a character after \\")
        name = "\\" + letter
        if (both := _escaped_class(letter)) is not None:
            return *both, name
        if letter in _CONTROLS:
            code = _CONTROLS[letter]
        elif letter == "b" and in_class:
            code = 8
        elif letter == "0" and not self._pattern[self._place : self._place + 1].isdigit():
            code = 0
        elif letter in "xu":
            code = self._hex(2 if letter == "x" else 4)
            if 0xD800 <= code < 0xDC00 and self._ahead("\\u"):
                self._place += 2
                code = 0x10000 + (code - 0xD800) * 0x400 + self._hex(4) - 0xDC00
        elif letter.isascii() and (letter.isalnum() or letter == "\n"):
            raise self._refused("escapes that Python and ECMA 262 share", name)
        else:
            code = ord(letter)
        one = () if SURROGATES[0] <= code <= SURROGATES[1] else ((code, code),)
        return one, one, name

    def _hex(self, digits: int) -> int:
        text, length = self._pattern[self._place : self._place + digits], digits
        if digits == 4 and text.startswith("{"):
            text, closed, _ = self._pattern[self._place + 1 :].partition("}")
            length = len(text) if closed else 0
            self._place += 2
        self._place += len(text)
        if not 0 < len(text) == length < 8 or not _HEX.issuperset(text) or int(text, 16) > MAX:
            raise self._refused("hexadecimal digits after \\x or \\u", brief(text))
        return int(text, 16)

    def _class(self) -> _Written:
        begin = self._place - 1
        negated = self._ahead("^")
        self._place += negated
        if self._ahead("]"):
            raise self._refused("a class of at least one character (a bracket is \\])", self._pattern[begin : self._place + 1])
        inner: list[Ranges] = []
        outer: list[Ranges] = []
        while not self._ahead("]"):
            members = self._member()
            if self._ahead("-") and not self._ahead("-]") and members[2]:
                start = self._place
                self._place += 1
                last = self._member()
                if last[2]:
                    first_code, last_code = members[0][0][0], last[0][0][0]
                    if last_code < first_code:
                        raise self._refused("ranges in ascending order", self._pattern[start - 1 : self._place])
                    run = _minus(((first_code, last_code),), (SURROGATES,))
                    members = (run, run, False)
                else:
                    # A class ends no range, so the hyphen is a character.
                    self._place = start
            inner.append(members[0])
            outer.append(members[1])
        self._place += 1
        name = self._pattern[begin : self._place]
        if not negated:
            return self._set(_union(*inner), name)
        known = _union(*outer)
        return self._able(_without(_folded(known, any_definition=True) if self._any_case else known), name)

    def _member(self) -> tuple[Ranges, Ranges, bool]:
        """A member of a class by every definition and by any, and whether it is a single character."""
        character = self._take("a closing bracket")
        if character == "\\":
            inner, outer, name = self._escape(in_class=True)
            return inner, outer, name[1] not in "dDsSwW" and bool(inner)
        one = () if SURROGATES[0] <= ord(character) <= SURROGATES[1] else ((ord(character),) * 2,)
        return one, one, bool(one)


def _spelled(code: int) -> str:
    if code < 0x20:
        return f"\\x{code:02x}"
    return ("\\" if chr(code) in _SPECIAL else "") + chr(code)


def first_match(patterns: Sequence[str], text: str) -> str | None:
    """The first of the expressions that Python finds in a text, or can't read."""
    for pattern in patterns:
        try:
            if re.search(pattern, text):
                return pattern
        except re.error:
            return pattern
    return None
