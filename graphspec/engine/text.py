"""Text and token ids: a checkpoint's tokenizer and its chat template."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from ..checks import brief, typed
from ..errors import CheckpointError, RequestError
from .call_history import check_calls, render_calls

FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning")


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
    """

    messages: Any
    tools: Sequence[Mapping[str, Any]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    continued: bool = False
    add_special_tokens: bool = False


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
    """The tokenizer of a checkpoint. Any number of threads may use it; they take turns, since transformers' tokenizers are not thread-safe.

    Args:
        folder: of the checkpoint. No code in it is ever run.

    Attributes:
        hf: transformers' own object.

    Raises:
        CheckpointError: no tokenizer, a damaged one, or one that is code of the checkpoint's own.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hf = _load(folder)
        self._lock = threading.Lock()

    @property
    def has_chat_template(self) -> bool:
        """The checkpoint says how conversations are written."""
        return bool(getattr(self.hf, "chat_template", None))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer puts around every text.

        Raises:
            RequestError: text that UTF-8 can't hold.
        """
        check_text("prompt", text)
        with self._lock:
            return list(self.hf.encode(text))

    def words(self, text: str) -> list[int]:
        """Token ids of a piece of text, without special tokens around it."""
        with self._lock:
            return list(self.hf.encode(text, add_special_tokens=False))

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of token ids that the engine emitted or accepted, as they spell it: no space is tidied away."""
        with self._lock:
            return str(self.hf.decode(list(tokens), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False))

    def step(self, stream: Any, token: int) -> str:
        """The text that one more token of a ``tokenizers.decoders.DecodeStream`` completes.

        Raises:
            Exception: what the stream raises where it loses its place.
        """
        with self._lock:
            return stream.step(self.hf.backend_tokenizer, token) or ""

    def chat(self, conversation: Conversation) -> list[int]:
        """Token ids of a conversation by the checkpoint's chat template, up to where the assistant's answer begins.

        The template writes every special token; none is put around the text in addition.

        Raises:
            CheckpointError: no chat template, or a broken one.
            RequestError: messages that are no conversation, or that the template does not take.
        """
        from jinja2.exceptions import SecurityError, TemplateSyntaxError

        messages = check_messages(conversation.messages)
        where = f"{self.folder}: chat_template"
        if not self.has_chat_template:
            hint = "a base model has none: send it prompts, without chat"
            raise CheckpointError(where, "the checkpoint's chat template", "none", hint)
        for name in conversation.options:
            if name in self._reserved or name.startswith("_"):
                raise RequestError("chat_template_kwargs", "names that only the template reads", brief(name))

        def render(spelled: list[dict[str, Any]]) -> str:
            return str(
                self.hf.apply_chat_template(
                    spelled,
                    tools=conversation.tools,
                    add_generation_prompt=not conversation.continued,
                    continue_final_message=conversation.continued,
                    tokenize=False,
                    **conversation.options,
                )
            )

        try:
            with self._lock:
                text = render_calls(messages, render)
                return list(self.hf.encode(text, add_special_tokens=conversation.add_special_tokens))
        except RequestError:
            raise
        except (TemplateSyntaxError, SecurityError) as error:
            raise CheckpointError(where, "a template that jinja takes, in its sandbox", _one_line(error)) from error
        except Exception as error:  # templates refuse conversations by exceptions of their own, and trip over unforeseen ones
            raise RequestError("messages", "a conversation that the checkpoint's chat template takes", _one_line(error)) from error

    @cached_property
    def _reserved(self) -> frozenset[str]:
        """Names that transformers does not pass on to the template as they are."""
        from transformers.utils.chat_template_utils import render_jinja_template

        own = (self.hf.apply_chat_template, render_jinja_template)
        kinds = (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)
        return frozenset({"messages", *(p.name for each in own for p in signature(each).parameters.values() if p.kind not in kinds)})


class Detokenizer:
    """Text of a growing token list: text that was returned never changes later. A character that spans tokens is held until it is whole.

    Tokenizers of the ``tokenizers`` library decode one token after the other; the others decode all of them again at each.

    Args:
        tokenizer: the checkpoint's.
        skip_special_tokens: they are not part of the text.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens) if tokenizer.hf.is_fast else None
        self._tokens: list[int] = []
        self._length = 0

    def push(self, token: int) -> str:
        """Append a token; returns the text that is final now."""
        self._tokens.append(token)
        if self._stream is not None:
            try:
                text = self._tokenizer.step(self._stream, token)
            except Exception:  # noqa: BLE001  bytes that are no text; what the whole list says is still right
                self._stream = None
            else:
                self._length += len(text)
                return text
        whole = self._whole()
        return "" if whole.endswith("\ufffd") else self._beyond(whole)

    def rest(self) -> str:
        """The text that is left when no token follows."""
        return self._beyond(self._whole())

    def _whole(self) -> str:
        return self._tokenizer.decode(self._tokens, skip_special_tokens=self._skip)

    def _beyond(self, whole: str) -> str:
        fresh = whole[self._length :]
        self._length += len(fresh)
        return fresh


def _load(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # whatever its files make transformers raise, the files are at fault
        if (code := _own_code(folder)) is not None:
            expected = "a tokenizer that transformers has; code of a checkpoint is never run"
            raise CheckpointError(f"{folder}: auto_map", expected, code, "or pass token ids as prompts") from error
        raise CheckpointError(str(folder), "tokenizer files (or pass token ids as prompts)", _one_line(error)) from error
    # transformers compares the length of every text with this value, as read from the file.
    if not isinstance(longest := tokenizer.model_max_length, int | float):
        raise CheckpointError(f"{folder / 'tokenizer_config.json'}: model_max_length", "a number", brief(longest))
    return tokenizer


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


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
