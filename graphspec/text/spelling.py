"""What each token of a vocabulary adds to a text, as bytes.

A decoder of the ``tokenizers`` library turns a list of tokens into text. With nearly all of them the text is the bytes of the tokens one
after the other, of which only the first may differ: it loses the space that SentencePiece puts in front of a text, or lacks the one that
joins words. The bytes are those that the decoder itself writes for the token after another one; where it can't write them, since the token
is a part of a character, the token's name spells them.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

UNKNOWN = "\ufffd"
"""What decoders write for bytes that are no text."""
BYTE_ERRORS = "graphspec.each_byte"
"""Error handler of codecs: :data:`UNKNOWN` for each byte, as a decoder with byte fallback writes them."""
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


def _each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return UNKNOWN * (error.end - error.start), error.end


codecs.register_error(BYTE_ERRORS, _each_byte)


def _byte_letters() -> dict[str, int]:
    """The byte of each letter in names of byte-level tokens. Source: ``bytes_to_unicode`` of GPT-2."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTE_LETTERS = _byte_letters()


class Spelling:
    """Bytes of tokens.

    Args:
        library: the tokenizer.

    Attributes:
        separable: the text of a list is the bytes of its tokens one after the other. False: only whole lists can be decoded.
        errors: how bytes that are no text are written, as an error handler of codecs.
    """

    def __init__(self, library: Library) -> None:
        self._library = library
        steps = _steps(library.decoder)
        self._kinds = {step["type"] for step in steps}
        self._before = self._find_before()
        self._before_text = library.decode([self._before]) if self._before is not None else ""
        self.separable = self._before is not None and _is_separable(steps)
        self.errors = BYTE_ERRORS if "ByteFallback" in self._kinds else "replace"
        self._bytes: dict[int, bytes] = {}

    def bytes_of(self, token: int) -> bytes:
        """What a token adds to a text that it doesn't begin; empty: the vocabulary has no such token."""
        if token not in self._bytes:
            self._bytes[token] = self._spell(token)
        return self._bytes[token]

    def first_bytes_of(self, token: int) -> bytes:
        """What a token is at the beginning of a text."""
        text = self._decode([token])
        return self.bytes_of(token) if UNKNOWN in text else text.encode()

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._library.decode(tokens, skip_special_tokens=False))

    def _spell(self, token: int) -> bytes:
        name = self._library.id_to_token(token)
        if name is None:
            return b""
        if "ByteFallback" in self._kinds and (found := _BYTE.fullmatch(name)):
            return bytes((int(found[1], 16),))
        before = [] if self._before is None else [self._before]
        text = self._decode([*before, token]).removeprefix(self._before_text)
        if "ByteLevel" in self._kinds and UNKNOWN in text and all(letter in BYTE_LETTERS for letter in name):
            return bytes(BYTE_LETTERS[letter] for letter in name)
        return text.encode()

    def _find_before(self) -> int | None:
        """A token that others can follow: a word or a part of one, in ASCII. None: there is none."""
        added = self._library.get_added_tokens_decoder()
        for token in range(self._library.get_vocab_size()):
            name = self._library.id_to_token(token)
            if name is not None and token not in added and not _BYTE.fullmatch(name):
                text = self._decode([token])
                if text.isascii() and text.isalnum():
                    return token
        return None


def _steps(decoder: Any) -> list[dict[str, Any]]:
    """The decoders of a sequence, in order; none: the tokenizer has no decoder."""

    def flat(step: dict[str, Any]) -> list[dict[str, Any]]:
        return [inner for one in step["decoders"] for inner in flat(one)] if step["type"] == "Sequence" else [step]

    return flat(json.loads(decoder.__getstate__())) if decoder is not None else []


def _is_separable(steps: Sequence[dict[str, Any]]) -> bool:
    """What the decoder writes for a token depends on nothing but whether it is the first."""
    joined = False
    for step in steps:
        match step["type"]:
            case "ByteLevel" | "Fuse":
                joined = True
            case "ByteFallback" | "Metaspace" | "WordPiece":
                # These look at tokens one by one.
                if joined:
                    return False
            case "Replace":
                if joined and len(step["pattern"].get("String", "")) != 1:
                    return False
            case "Strip":
                if not joined or step["start"] > 1 or step["stop"] > 0:
                    return False
            case _:
                return False
    return True
