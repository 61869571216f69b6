"""Text and token ids: a checkpoint's tokenizer, its chat template, and what each of its tokens adds to a text, as bytes."""

from __future__ import annotations

import codecs
import copy
import json
import logging
import re
from collections.abc import Sequence
from functools import cached_property
from inspect import Parameter, signature
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.checks import brief, check_text
from ..errors import CheckpointError, RequestError
from ..facts import read_tokenizer_config, special_token
from .call_history import render_calls
from .conversation import Conversation, check_messages
from .hidden_texts import HiddenTexts
from .time_limit import LateError, time_limit
from .tokenizer_files import load_tokenizer, one_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

logger = logging.getLogger(__name__)
PROBE = "PROBE1ANSWER"
"""An answer that a chat template writes as it stands."""
RENDER_SECONDS = 10.0
"""Time limit for a chat template: far above what a long conversation takes. A template is a program of the checkpoint, and may not end."""
WINDOW = 16
"""Tokens before an output that its text is read after."""


class Tokenizer:
    """The tokenizer of a checkpoint: ids and texts are those of its ``tokenizer.json``, whatever its other files say of a class.

    Any number of threads may use it, at the same time.

    Args:
        folder: of the checkpoint. No code in it is ever run. Without a ``tokenizer.json``, transformers converts what is there.

    Attributes:
        library: the tokenizer in the ``tokenizers`` library.
        special_tokens: id of each special token, by its text.
        special_ids: their ids.

    Raises:
        CheckpointError: no tokenizer, a damaged one, or one that is code of the checkpoint's own.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.library, self._converted = load_tokenizer(folder)
        # A file may keep how its last texts were cut and filled up.
        self.library.no_truncation()
        self.library.no_padding()
        self._config = read_tokenizer_config(folder)
        added = self.library.get_added_tokens_decoder()
        self.special_tokens = {str(token.content): number for number, token in added.items() if token.special}
        self.special_ids = frozenset(self.special_tokens.values())

    @cached_property
    def spelling(self) -> Spelling:
        """What each token adds to a text."""
        return Spelling(self.library)

    @cached_property
    def has_chat_template(self) -> bool:
        """The checkpoint says how conversations are written."""
        stated = self._converted is not None or self._config.get("chat_template") is not None
        files = stated or (self.folder / "chat_template.jinja").exists() or (self.folder / "additional_chat_templates").exists()
        return files and bool(self._renderer.chat_template)

    @cached_property
    def _renderer(self) -> Any:
        """An object of transformers that has the chat templates, and the special tokens that they write."""
        if self._converted is not None:
            return self._converted
        from tokenizers import Tokenizer as Library
        from tokenizers import models
        from transformers import PreTrainedTokenizerFast

        try:
            return PreTrainedTokenizerFast.from_pretrained(
                self.folder, tokenizer_object=Library(models.BPE()), trust_remote_code=False, local_files_only=True
            )
        except Exception as error:  # whatever the files make transformers raise, the files are at fault
            raise CheckpointError(str(self.folder), "tokenizer files with a chat template", one_line(error)) from error

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's end of text; None: it names none, or none of its tokens."""
        name = special_token(self._config, "eos_token") if self._converted is None else self._converted.eos_token
        token: int | None = self.library.token_to_id(str(name)) if name is not None else None
        return token

    @cached_property
    def ends(self) -> dict[int, str]:
        """Tokens that end a text, and what says so: the tokenizer's end of text, or its chat template, which writes one after an answer."""
        found = {} if self.eos_token_id is None else {self.eos_token_id: "eos_token of the tokenizer"}
        if (end := self._turn_end()) is not None:
            found.setdefault(end, "chat template")
        return found

    def _turn_end(self) -> int | None:
        """The special token that the chat template writes after each answer, in front of the next turn and where none follows; None: it
        writes none, or takes no such conversation.
        """
        turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": PROBE}]
        try:
            with time_limit(RENDER_SECONDS):
                text = self._renderer.apply_chat_template(turns * 2, tokenize=False) if self.has_chat_template else ""
        except (Exception, LateError) as error:  # noqa: BLE001  what a template raises is said when a conversation needs it
            logger.debug("the chat template writes no finished answer: %s", one_line(error))
            return None
        found = {self._special_at(after.lstrip()) for after in text.split(PROBE)[1:]}
        name = found.pop() if len(found) == 1 else None
        # A token that begins texts ends none.
        return None if name is None or name == special_token(self._config, "bos_token") else self.special_tokens[name]

    def _special_at(self, text: str) -> str | None:
        """The longest special token that ``text`` begins with."""
        return max((name for name in self.special_tokens if name and text.startswith(name)), key=len, default=None)

    @cached_property
    def _plain(self) -> Library:
        """The same tokenizer, to which the texts of special tokens are text."""
        library = copy.deepcopy(self.library)
        library.encode_special_tokens = True
        return library

    def encode(self, text: str, *, special_tokens_as_text: bool = False) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer puts around every text.

        Args:
            text: the text.
            special_tokens_as_text: where it has the text of a special token, that is text.

        Raises:
            RequestError: text that UTF-8 can't hold.
        """
        return self._encode(check_text("prompt", text), special=True, plain=special_tokens_as_text)

    def words(self, text: str, *, special_tokens_as_text: bool = False) -> list[int]:
        """Token ids of a piece of text, without special tokens around it."""
        return self._encode(text, special=False, plain=special_tokens_as_text)

    def inside(self, text: str) -> list[int]:
        """Token ids of a piece of text in the middle of another: without the space that some tokenizers put in front of a text."""
        line, whole = self.words("\n"), self.words("\n" + text)
        return whole[len(line) :] if whole[: len(line)] == line else self.words(text)

    def _encode(self, text: str, *, special: bool, plain: bool = False) -> list[int]:
        library = self._plain if plain else self.library
        # Of the library's methods, only those for batches let other threads run.
        [encoding] = library.encode_batch_fast([text], add_special_tokens=special)
        return list(encoding.ids)

    def _encode_hidden(self, text: str, hidden: HiddenTexts, *, special: bool) -> list[int]:
        """Token ids of a template's text. Special tokens where texts were hidden from it are spelled in other tokens."""
        text, spans = hidden.restored(text)
        if not spans:
            return self._encode(text, special=special)
        [encoding] = self.library.encode_batch([text], add_special_tokens=special)
        found: list[int] = []
        for token, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
            own = token in self.special_ids and any(begin < last and first < end for first, last in spans)
            found += self._encode(text[begin:end], special=False, plain=True) if own else [token]
        return found

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of token ids that the engine emitted or accepted, as they spell it: no space is tidied away."""
        [text] = self.library.decode_batch([list(tokens)], skip_special_tokens=skip_special_tokens)
        return str(text)

    def token_bytes(self, token: int, *, first: bool = False) -> bytes:
        """What a token adds to a text: the bytes of all tokens one after the other are the text in UTF-8.

        Args:
            token: its id.
            first: the text begins with it, so that it may lack a space.
        """
        return self.spelling.first_bytes_of(token) if first else self.spelling.bytes_of(token)

    def token_text(self, token: int, *, first: bool = False) -> str:
        """:meth:`token_bytes` as text, with U+FFFD where the token is a part of a character."""
        return self.token_bytes(token, first=first).decode("utf-8", "replace")

    def hidden(self, *, skip_special_tokens: bool, kept: Sequence[str] = ()) -> frozenset[int]:
        """Ids of tokens that are no text: none, or the special ones except those whose texts are ``kept``."""
        if not skip_special_tokens:
            return frozenset()
        return self.special_ids - {self.special_tokens[name] for name in kept if name in self.special_tokens}

    def chat(self, conversation: Conversation) -> list[int]:
        """Token ids of a conversation by the checkpoint's chat template, up to where the assistant's answer begins.

        The template writes every special token; none is put around the text in addition.

        Raises:
            CheckpointError: no chat template, or a broken one.
            RequestError: messages that are no conversation, or that the template does not take.
        """
        from jinja2.exceptions import SecurityError, TemplateSyntaxError

        hidden = HiddenTexts(self.special_tokens if conversation.special_tokens_as_text else ())
        messages = check_messages(hidden.of(conversation.messages))
        where = f"{self.folder}: chat_template"
        if not self.has_chat_template:
            hint = "a base model has none: send it prompts, without chat"
            raise CheckpointError(where, "the checkpoint's chat template", "none", hint)
        for name in conversation.options:
            if name in self._reserved or name.startswith("_"):
                raise RequestError("chat_template_kwargs", "names that only the template reads", brief(name))

        def render(spelled: list[dict[str, Any]]) -> str:
            return str(
                self._renderer.apply_chat_template(
                    spelled,
                    tools=hidden.of(conversation.tools),
                    add_generation_prompt=not conversation.continued,
                    continue_final_message=conversation.continued,
                    tokenize=False,
                    **hidden.of(dict(conversation.options)),
                )
            )

        try:
            with time_limit(RENDER_SECONDS):
                text = render_calls(messages, render)
            return self._encode_hidden(text, hidden, special=conversation.add_special_tokens)
        except RequestError:
            raise
        except LateError as error:
            expected = f"a conversation that the checkpoint's chat template writes in {RENDER_SECONDS:g} s"
            raise RequestError("messages", expected, "one that takes longer") from error
        except (TemplateSyntaxError, SecurityError) as error:
            raise CheckpointError(where, "a template that jinja takes, in its sandbox", one_line(error)) from error
        except Exception as error:  # templates refuse conversations by exceptions of their own, and trip over unforeseen ones
            raise RequestError("messages", "a conversation that the checkpoint's chat template takes", one_line(error)) from error

    @cached_property
    def _reserved(self) -> frozenset[str]:
        """Names that transformers does not pass on to the template as they are."""
        from transformers.utils.chat_template_utils import render_jinja_template

        own = (self._renderer.apply_chat_template, render_jinja_template)
        kinds = (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)
        return frozenset({"messages", *(p.name for each in own for p in signature(each).parameters.values() if p.kind not in kinds)})


class Detokenizer:
    """Text of a growing token list: text that was returned never changes later. A character that spans tokens is held until it is whole.

    The text continues that of the tokens before it: both together are the text of all tokens decoded at once. A character that the tokens
    before leave incomplete is part of this text. Where bytes are no text, what they spoil after the fact stays as it was returned.

    Args:
        tokenizer: the checkpoint's.
        skip_special_tokens: they are not part of the text.
        kept_special_tokens: texts of special tokens that are part of it all the same.
        prompt: the tokens before.

    Attributes:
        hidden: ids of the tokens that are not part of the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        kept_special_tokens: Sequence[str] = (),
        prompt: Sequence[int] = (),
    ) -> None:
        self.hidden = tokenizer.hidden(skip_special_tokens=skip_special_tokens, kept=kept_special_tokens)
        # How a text goes on is said by its end.
        recent = list(islice((token for token in reversed(prompt) if token not in self.hidden), WINDOW))[::-1]
        self._pieces = _Bytes(tokenizer.spelling, recent) if tokenizer.spelling.separable else _Lists(tokenizer, recent)

    @property
    def empty(self) -> bool:
        """Neither the prompt nor the tokens so far are text."""
        return self._pieces.empty

    def push(self, token: int) -> str:
        """Append a token; returns the text that is final now."""
        return "" if token in self.hidden else self._pieces.push(token)

    def rest(self) -> str:
        """The text that is left when no token follows."""
        return self._pieces.rest()


class _Bytes:
    """Text of tokens whose bytes follow each other."""

    def __init__(self, spelling: Spelling, before: Sequence[int]) -> None:
        self._spelling, self.empty = spelling, True
        self._decoder = codecs.getincrementaldecoder("utf-8")(spelling.errors)
        for token in before:
            self.push(token)

    def push(self, token: int) -> str:
        data = self._spelling.bytes_of(token)
        if self.empty and data:
            self.empty, data = False, self._spelling.first_bytes_of(token)
        return self._decoder.decode(data)

    def rest(self) -> str:
        return self._decoder.decode(b"", final=True)


class _Lists:
    """Text of tokens that only lists of them can be decoded to: of each new one, the list of the last few."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
        self._tokenizer, self._tokens = tokenizer, list(before)
        self._shown = len(self._text().rstrip(UNKNOWN))
        """Characters of their text that were returned."""
        self._read = len(before)
        """How many of the tokens had been read then."""

    @property
    def empty(self) -> bool:
        return not self._tokens

    def _text(self) -> str:
        return self._tokenizer.decode(self._tokens, skip_special_tokens=False)

    def push(self, token: int) -> str:
        self._tokens.append(token)
        text = self._text()
        if text.endswith(UNKNOWN) or len(text) <= self._shown:
            return ""
        fresh = text[self._shown :]
        self._tokens = self._tokens[self._read :]
        self._read, self._shown = len(self._tokens), len(self._text())
        return fresh

    def rest(self) -> str:
        text = self._text()
        fresh, self._shown = text[self._shown :], max(self._shown, len(text))
        return fresh


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
    """What each token of a vocabulary adds to a text, as bytes.

    A decoder of the ``tokenizers`` library turns a list of tokens into text. With nearly all of them the text is the bytes of the tokens
    one after the other, of which only the first may differ: it loses the space that SentencePiece puts in front of a text, or lacks the one
    that joins words. The bytes are those that the decoder itself writes for the token after another one; where it can't write them, since
    the token is a part of a character, the token's name spells them.

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
