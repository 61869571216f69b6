"""Which of the conversations that a target wrote are worth training on. Standard library only."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Collection, Iterable, Sequence

SHORTEST = 12
"""Fewest characters of a prompt."""
FEWEST_WORDS = 3
REPEATED = 0.2
"""Most of a prompt's runs of four words that may have come before in it."""
LOOPED = 0.5
"""The same of an answer's runs of sixteen tokens: a target loops now and then, and a draft has to follow; a text that only loops teaches
nothing."""
OF_SCRIPT = 0.9
"""Least share of the letters that are of the wanted writing systems."""
REFUSALS = (
    "i'm sorry", "i am sorry", "sorry,", "i apologize", "i can't", "i cannot", "i'm unable", "i am unable", "i'm not able", "as an ai",
    "i'm just an ai", "i'm an ai", "unfortunately, i",
)  # fmt: skip
"""Beginnings of answers that refuse, in lower case. A prompt that begins so is an answer in the wrong place."""
_HASHES, _BAND, _SHINGLE = 16, 4, 3


def words_of(text: str) -> list[str]:
    """The words of a text in lower case; each character of a script without spaces is one."""
    return re.findall(r"[぀-ヿ㐀-鿿]|[^\W_]+", text.lower())


def repetition(texts: Iterable[Sequence[object]], width: int = 16) -> float:
    """Share of the runs of ``width`` tokens that occurred earlier in the same text: a measure of loops."""
    seen_again = total = 0
    for row in texts:
        seen: set[tuple[object, ...]] = set()
        for i in range(len(row) - width + 1):
            run = tuple(row[i : i + width])
            seen_again += run in seen
            total += 1
            seen.add(run)
    return seen_again / max(1, total)


def refuses(text: str) -> bool:
    """Whether a text begins as a refusal does."""
    return text.lstrip(" \"'*").lower().replace("\u2019", "'").startswith(REFUSALS)


def of_scripts(text: str, scripts: Collection[str]) -> bool:
    """Whether the letters of a text, with few exceptions, are of these writing systems; a text without letters is of none."""
    names = [unicodedata.name(character, "").split(" ")[0] for character in text if character.isalpha()]
    return not scripts or (bool(names) and sum(name in scripts for name in names) >= OF_SCRIPT * len(names))


def sensible_prompt(text: str, scripts: Collection[str]) -> bool:
    """Whether a text can be what a user asks: long enough, readable, of the wanted writing systems, no loop and no refusal."""
    words = words_of(text)
    readable = all(character.isprintable() or character in "\n\t" for character in text) and "�" not in text
    long_enough = len(text) >= SHORTEST and len(words) >= FEWEST_WORDS
    return readable and long_enough and repetition([words], 4) <= REPEATED and of_scripts(text, scripts) and not refuses(text)


def sensible_answer(text: str, tokens: Sequence[int]) -> bool:
    """Whether an answer says something: no refusal, and no text that only repeats itself."""
    return bool(text.strip()) and not refuses(text) and repetition([tokens]) <= LOOPED


class Known:
    """The prompts so far, of which near-duplicates are found: MinHash over runs of three words, in bands (Broder 1997; Leskovec et al.,
    *Mining of Massive Datasets*, 3.4). Of texts that share 80 % of their runs 9 in 10 are found, of those that share 30 % 1 in 30.
    """

    def __init__(self) -> None:
        self._bands: set[tuple[int, ...]] = set()

    def copy(self) -> Known:
        """The same texts, to which others can be added."""
        made = Known()
        made._bands = set(self._bands)
        return made

    def add(self, text: str) -> bool:
        """Whether a text is like none before; then it is known from here on."""
        words = words_of(text) or [text]
        runs = {" ".join(words[i : i + _SHINGLE]) for i in range(max(1, len(words) - _SHINGLE + 1))}
        digests = [hashlib.blake2b(run.encode(), digest_size=4 * _HASHES).digest() for run in sorted(runs)]
        lowest = [min(int.from_bytes(d[4 * i : 4 * i + 4], "little") for d in digests) for i in range(_HASHES)]
        bands = {(i, *lowest[i : i + _BAND]) for i in range(0, _HASHES, _BAND)}
        if bands & self._bands:
            return False
        self._bands |= bands
        return True
