"""Text and token ids: a checkpoint's tokenizer and its chat template."""

from __future__ import annotations

import codecs
import copy
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from inspect import Parameter, signature
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.checks import brief, typed
from ..errors import CheckpointError, RequestError, spell_bytes
from ..facts import read_tokenizer_config, special_token
from ..facts.files import MAX_TOKENIZER, find_file, open_file
from .call_history import check_calls, render_calls
from .hidden_texts import HiddenTexts
from .spelling import UNKNOWN, Spelling
from .time_limit import LateError, time_limit

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

logger = logging.getLogger(__name__)
FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tiktoken.model", "tekken.json", "vocab.json", "vocab.txt")
MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning")
PROBE = "PROBE1ANSWER"
"""An answer that a chat template writes as it stands."""
RENDER_SECONDS = 10.0
"""Time limit for a chat template: far above what a long conversation takes. A template is a program of the checkpoint, and may not end."""
WINDOW = 16
"""Tokens before an output that its text is read after."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, oldest first, as a prompt: the checkpoint's chat template turns them into text.

    Attributes:
        messages: ``{"role": ..., "content": ...}`` each, and ``name``, ``tool_calls``, ``tool_call_id`` or ``reasoning_content`` where the
            template reads one; checked when they are encoded. None is as good as nothing. A message with ``tool_calls`` needs no content;
            the arguments of a call are an object or its JSON text, and the template gets what it wants of the two. ``reasoning`` is another
            name of ``reasoning_content``.
        tools: descriptions of functions for the template, each ``{"type": "function", "function": {...}}``; None: none.
        options: names that the template reads in addition, such as ``enable_thinking``.
        continued: the last message is the beginning of the answer, which goes on from there; otherwise a new turn of the assistant follows.
        add_special_tokens: put the special tokens around the text that a prompt gets, in addition to those that the template writes.
        special_tokens_as_text: texts of special tokens in what is given here are text. The template sees something else in their places.
    """

    messages: Any
    tools: Sequence[Mapping[str, Any]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    continued: bool = False
    add_special_tokens: bool = False
    special_tokens_as_text: bool = False


def conversations(messages: Any) -> Conversation | list[Conversation]:
    """One conversation, a list of messages, or many, a list of such lists; the checks of :func:`check_messages` come later, one by one.

    Raises:
        RequestError: neither.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise RequestError("messages", "a list of messages, or a list of such lists", brief(messages))
    if messages and all(isinstance(entry, Sequence) and not isinstance(entry, str | bytes) for entry in messages):
        return [Conversation(entry) for entry in messages]
    return Conversation(messages)


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages of one conversation as plain dictionaries.

    Raises:
        RequestError: no list, an empty one, or a message without text in ``role`` and ``content``, or with keys that are not known.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise RequestError("messages", "a list of at least one message", brief(messages))
    return [_check_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _check_message(key: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(key, 'an object with "role" and "content"', brief(message))
    for name in message:
        if name not in MESSAGE_KEYS:
            raise RequestError(key, "keys " + ", ".join(MESSAGE_KEYS), brief(name))
    given = {name: value for name, value in message.items() if value is not None}
    if "tool_calls" in given:
        given["tool_calls"] = check_calls(f"{key}.tool_calls", given["tool_calls"])
        # Templates join it with other text.
        given.setdefault("content", "")
    for name in ("role", "content"):
        if name not in given:
            raise RequestError(f"{key}.{name}", "text", "nothing")
    for name, value in given.items():
        if name != "tool_calls":
            check_text(f"{key}.{name}", value)
    if "reasoning" in given:
        # Templates read the other name.
        given.setdefault("reasoning_content", given["reasoning"])
    return given


def check_text(key: str, text: Any) -> str:
    """``text``, which is text that UTF-8 can hold.

    Raises:
        RequestError: something else, or half of a surrogate pair.
    """
    if not isinstance(text, str):
        raise RequestError(key, "text", typed(text))
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(key, "text in UTF-8", f"the lone surrogate U+{ord(text[error.start]):04X} at character {error.start}") from error
    return str(text)


def has_tokenizer(folder: Path) -> bool:
    """Whether ``folder`` has files of a tokenizer."""
    return any((folder / name).exists() for name in FILES)


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
        self.library, self._converted = _load(folder)
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
            raise CheckpointError(str(self.folder), "tokenizer files with a chat template", _one_line(error)) from error

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
            logger.debug("the chat template writes no finished answer: %s", _one_line(error))
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
            raise CheckpointError(where, "a template that jinja takes, in its sandbox", _one_line(error)) from error
        except Exception as error:  # templates refuse conversations by exceptions of their own, and trip over unforeseen ones
            raise RequestError("messages", "a conversation that the checkpoint's chat template takes", _one_line(error)) from error

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


def _load(folder: Path) -> tuple[Library, Any]:
    """The tokenizer of a folder, and transformers' object where that had to convert it."""
    from tokenizers import Tokenizer as Library

    file, expected = folder / "tokenizer.json", "tokenizer files (or pass token ids as prompts)"
    if find_file(file):
        with open_file(file) as stream:
            data = stream.read(MAX_TOKENIZER + 1)
        if len(data) > MAX_TOKENIZER:
            raise CheckpointError(str(file), f"a json file of at most {spell_bytes(MAX_TOKENIZER)}", "a larger one")
        try:
            return Library.from_buffer(data), None
        except Exception as error:  # whatever the library raises, the file is at fault
            raise CheckpointError(str(folder), expected, _one_line(error)) from error
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        converted = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        if not converted.is_fast:
            converted = PreTrainedTokenizerFast.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        library = copy.deepcopy(converted.backend_tokenizer)
    except Exception as error:  # whatever its files make transformers raise, the files are at fault
        if (code := _own_code(folder)) is not None:
            own = "a tokenizer that transformers has; code of a checkpoint is never run"
            raise CheckpointError(f"{folder}: auto_map", own, code, "or pass token ids as prompts") from error
        raise CheckpointError(str(folder), expected, _one_line(error)) from error
    logger.warning("%s has no tokenizer.json: transformers converted its tokenizer files (%s)", folder, type(converted).__name__)
    return library, converted


def _own_code(folder: Path) -> str | None:
    """The tokenizer class that the checkpoint's own code would provide; None: its files name none."""
    for name in ("tokenizer_config.json", "config.json"):
        try:
            keys = json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        classes = keys.get("auto_map") if isinstance(keys, dict) else None
        if isinstance(classes, dict) and "AutoTokenizer" in classes:
            return str(classes["AutoTokenizer"])
    return None


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
