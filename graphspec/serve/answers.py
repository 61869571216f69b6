"""Responses: turns the engine's events into the choices of a completion or a chat, in chunks or whole.

A whole response is its chunks joined, so that both have the same content.
"""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from typing import Any

from ..api.outputs import StreamEvent
from ..engine.request import TokenLogprob
from ..text.tokenizer import Tokenizer
from .channels import ChannelReader, in_channels
from .generation import Generation, reasons
from .protocol import Body, ChatBody, CompletionBody
from .tokens import CompletionLogprobs, chat_logprobs, prompt_logprobs
from .tools import CallReader, Tools

Json = dict[str, Any]


class Writer(ABC):
    """Writes the response to one request.

    Args:
        body: the request.
        model: name of the model in the response.
        tokenizer: the checkpoint's.
        generation: the source of its events.
    """

    prefix = ""
    """Prefix of the response's id."""
    whole_object = chunk_object = ""

    def __init__(self, body: Body, model: str, tokenizer: Tokenizer, generation: Generation) -> None:
        self.body, self.generation, self.tokenizer = body, generation, tokenizer
        self._head = {"id": f"{self.prefix}-{secrets.token_hex(16)}", "created": int(time.time()), "model": model}
        self._begun: set[int] = set()

    def _document(self, kind: str, choices: list[Json], *, usage: bool) -> Json:
        document: Json = {**self._head, "object": kind, "choices": choices}
        return document | ({"usage": self.generation.usage()} if usage else {})

    def _figures(self, document: Json) -> Json:
        """The document with the request's ``metrics``, if there are any."""
        speculation = self.generation.speculation()
        return document | ({"metrics": {"speculative_decoding": speculation}} if speculation is not None else {})

    def chunks(self, event: StreamEvent) -> list[Json]:
        """The chunks of a stream for an event; none for an event without content."""
        usage, choice = self.body.streaming.continuous_usage_stats, self.generation.choice(event)
        first = choice not in self._begun
        self._begun.add(choice)
        opening = self._opening(choice) if first else []
        piece = self._piece(choice, event, first=first)
        # With usage in every chunk, an event whose text is held back has content: its tokens.
        pieces = [*opening, *([piece] if self._says(piece) or usage else [])]
        return [self._document(self.chunk_object, [piece], usage=usage) for piece in pieces]

    def last_chunk(self) -> list[Json]:
        """The chunks after the last event: usage, if it was requested."""
        return [self._figures(self._document(self.chunk_object, [], usage=True))] if self.body.streaming.include_usage else []

    def whole(self, events: list[StreamEvent]) -> Json:
        """The whole response, for a request that does not stream."""
        choices: dict[int, Json] = {}
        for event in events:
            choice = self.generation.choice(event)
            piece = self._piece(choice, event, first=choice not in choices)
            choices[choice] = self._join(choices[choice], piece) if choice in choices else piece
        return self._figures(self._document(self.whole_object, [self._closed(choices[choice]) for choice in sorted(choices)], usage=True))

    def _piece(self, choice: int, event: StreamEvent, *, first: bool) -> Json:
        """The part of a choice that an event adds."""
        piece = {"index": choice, **self._content(choice, event, first=first), **reasons(event)}
        request = self.generation.request(event)
        if self.body.return_token_ids:
            piece["token_ids"] = event.token_ids
            if first:
                piece["prompt_token_ids"] = request.prompt
        if first and self.body.prompt_logprobs is not None and event.prompt_logprobs is not None:
            piece["prompt_logprobs"] = prompt_logprobs(event.prompt_logprobs, self.tokenizer)
        return piece

    def _join(self, piece: Json, more: Json) -> Json:
        """Join two pieces of one choice."""
        joined = {**piece, **{name: more[name] for name in ("finish_reason", "stop_reason")}}
        if "token_ids" in piece:
            joined["token_ids"] = piece["token_ids"] + more["token_ids"]
        logprobs, others = piece["logprobs"], more["logprobs"]
        joined["logprobs"] = logprobs and {name: logprobs[name] + others[name] for name in logprobs}
        return joined

    def _says(self, piece: Json) -> bool:
        return bool(piece["finish_reason"] or piece["logprobs"] or piece.get("token_ids") or self._text(piece))

    def _opening(self, choice: int) -> list[Json]:
        """Pieces of a stream before the first one of a choice."""
        return []

    def _closed(self, piece: Json) -> Json:
        """A choice of a whole response, from its joined pieces."""
        return piece

    @abstractmethod
    def _content(self, choice: int, event: StreamEvent, *, first: bool) -> Json:
        """Text or calls of an event, and their log-probabilities."""

    @abstractmethod
    def _text(self, piece: Json) -> bool:
        """Whether a piece has text, or calls."""


class CompletionWriter(Writer):
    """``text_completion``."""

    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"
    body: CompletionBody

    def __init__(self, body: CompletionBody, model: str, tokenizer: Tokenizer, generation: Generation) -> None:
        super().__init__(body, model, tokenizer, generation)
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def _content(self, choice: int, event: StreamEvent, *, first: bool) -> Json:
        if event.logprobs is None:
            return {"text": event.text, "logprobs": None}
        if first:
            request = self.generation.request(event)
            self._logprobs[choice] = CompletionLogprobs(self.tokenizer, request.params, request.prompt)
        tokens = list(event.token_ids)
        entries: list[TokenLogprob | None] = [*event.logprobs]
        if first and self.body.echo and event.prompt_logprobs is not None:
            tokens, entries = [*self.generation.request(event).prompt, *tokens], [*event.prompt_logprobs, *entries]
        return {"text": event.text, "logprobs": self._logprobs[choice].of(tokens, entries)}

    def _text(self, piece: Json) -> bool:
        return bool(piece["text"])

    def _join(self, piece: Json, more: Json) -> Json:
        return super()._join(piece, more) | {"text": piece["text"] + more["text"]}


class ChatWriter(Writer):
    """``chat.completion`` and its chunks."""

    prefix = "chatcmpl"
    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"
    body: ChatBody

    def __init__(self, body: ChatBody, model: str, tokenizer: Tokenizer, generation: Generation, *, tools: Tools) -> None:
        super().__init__(body, model, tokenizer, generation)
        self._tools = tools
        self._channels = in_channels(tokenizer.special_tokens)
        self._readers: dict[int, CallReader] = {}
        self._channel_readers: dict[int, ChannelReader] = {}
        self._calls: dict[int, int] = {}

    def _opening(self, choice: int) -> list[Json]:
        nothing = {"logprobs": None, "finish_reason": None, "stop_reason": None}
        return [{"index": choice, "delta": {"role": "assistant", "content": ""}, **nothing}]

    def _content(self, choice: int, event: StreamEvent, *, first: bool) -> Json:
        delta: Json = {"content": event.text}
        if self._channels or self._tools.read:
            if self._channels:
                channels = self._channel_readers.setdefault(choice, ChannelReader(calls=self._tools.read))
                reasoning, said, calls = channels.push(event.text, last=event.finished)
            else:
                reader = self._readers.setdefault(choice, CallReader())
                reasoning, (said, calls) = "", reader.push(event.text, last=event.finished)
            begin = self._calls.get(choice, 0)
            self._calls[choice] = begin + len(calls)
            delta = {"content": said} if said or not (calls or reasoning) else {}
            if reasoning:
                delta["reasoning_content"] = reasoning
            if calls:
                delta["tool_calls"] = [call.spelled(index) for index, call in enumerate(calls, begin)]
        count = self.body.alternatives
        logprobs = chat_logprobs(event.logprobs, self.tokenizer, count) if event.logprobs is not None and count is not None else None
        return {"delta": delta, "logprobs": logprobs}

    def _piece(self, choice: int, event: StreamEvent, *, first: bool) -> Json:
        piece = super()._piece(choice, event, first=first)
        if self._calls.get(choice) and piece["finish_reason"] == "stop":
            piece["finish_reason"] = "tool_calls"
        return piece

    def _text(self, piece: Json) -> bool:
        return any(piece["delta"].get(name) for name in ("content", "reasoning_content", "tool_calls"))

    def _join(self, piece: Json, more: Json) -> Json:
        before, after = piece["delta"], more["delta"]
        joined = {name: before.get(name, "") + after.get(name, "") for name in ("content", "reasoning_content")}
        calls = [*before.get("tool_calls", ()), *after.get("tool_calls", ())]
        return super()._join(piece, more) | {"delta": joined | {"tool_calls": calls}}

    def _closed(self, piece: Json) -> Json:
        delta = piece.pop("delta")
        calls = [{name: value for name, value in call.items() if name != "index"} for call in delta.get("tool_calls", ())]
        message = {"role": "assistant", "content": delta.get("content") or (None if calls else "")}
        if reasoning := delta.get("reasoning_content"):
            message["reasoning_content"] = reasoning
        return {**piece, "message": message | ({"tool_calls": calls} if calls else {})}


def spell(document: Json) -> bytes:
    """A document as JSON, on one line."""
    return json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def sse(document: Json) -> bytes:
    """A document as a server-sent event."""
    return b"data: " + spell(document) + b"\n\n"


DONE = b"data: [DONE]\n\n"
