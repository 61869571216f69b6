"""Requests of the command line: prompts from an argument, a file or standard input, checked before any model is loaded. No torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from ..config.checks import brief, check_text, conform, cut
from ..config.command_options import LaunchConfig
from ..config.hints import hint_for_sampling
from ..config.paths import read_json, read_text
from ..config.schema import SamplingConfig
from ..engine.request import SamplingParams, configured_params
from ..errors import ConfigError, RequestError
from ..text.conversation import Conversation, check_messages

DEMO_PROMPT = 'def read_lines(path):\n    """'
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """One request.

    Attributes:
        prompt: text, or a conversation.
        params: how it is sampled; None if ``error`` says what is wrong.
        error: why it can't be served; None: nothing is known against it.
    """

    prompt: str | Conversation
    params: SamplingParams | None
    error: str | None = None

    @property
    def headline(self) -> str:
        """First line of the prompt, of a conversation that of the last message."""
        text = self.prompt if isinstance(self.prompt, str) else self.prompt.messages[-1]["content"]
        return next(iter(text.splitlines()), "")


@dataclass(frozen=True, slots=True)
class _Line:
    """A prompt, and the sampling keys that its line of a ``.jsonl`` file overrides."""

    prompt: str | Conversation
    sampling: dict[str, Any]


def read_requests(config: LaunchConfig) -> list[PromptRequest]:
    """The requests of ``prompt``, else of ``prompt_file``, else of standard input when it is not a terminal.

    One whose values are out of range carries its error, so that the others can be served.

    Raises:
        ConfigError: none of the three holds one, bytes that are no UTF-8, or a line of a ``.jsonl`` file that is no request.
    """
    return [_request(config, line) for line in _lines(config)]


def read_prompt(config: LaunchConfig) -> str:
    """The single prompt of ``prompt`` or ``prompt_file``; default: the demo's.

    Raises:
        ConfigError: several, a conversation, or one that can't be read.
        RequestError: one that can't be served.
    """
    if config.chat:
        raise ConfigError("chat", "false: only graphspec generate applies a chat template", True)
    given = config.prompt or config.prompt_file is not None
    lines = _lines(config) if given else [_Line(DEMO_PROMPT, {})]
    if len(lines) > 1:
        raise ConfigError("prompt", "one prompt", f"{len(lines)}")
    prompt = lines[0].prompt
    if not isinstance(prompt, str):
        raise ConfigError("prompt_file", "a prompt: only graphspec generate applies a chat template", "messages")
    return check_text("prompt", prompt)


def _request(config: LaunchConfig, line: _Line) -> PromptRequest:
    prompt = line.prompt
    try:
        if isinstance(prompt, str):
            check_text("prompt", prompt)
            if config.chat:
                system = [{"role": "system", "content": check_text("system", config.system)}] if config.system is not None else []
                prompt = Conversation([*system, {"role": "user", "content": prompt}])
        return PromptRequest(prompt, configured_params(config.sampling, **line.sampling))
    except RequestError as error:
        return PromptRequest(prompt, None, str(error))


def _lines(config: LaunchConfig) -> list[_Line]:
    if config.prompt:
        return [_Line(prompt, {}) for prompt in config.prompt]
    if config.prompt_file is not None:
        text = read_text("prompt_file", config.prompt_file)
        if config.prompt_file.endswith(".jsonl"):
            # Only "\n" ends a line of JSON: its strings may hold the other line ends of Unicode.
            lines = [_parse(f"{config.prompt_file}:{n}", line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
        else:
            lines = [_Line(text, {})] if text else []
        if not lines:
            raise ConfigError("prompt_file", "at least one prompt", f"none in {config.prompt_file}")
        return lines
    text = _standard_input()
    if not text:
        raise ConfigError("prompt", "prompt=TEXT, prompt_file=PATH, or text on standard input", "none of them")
    return [_Line(text, {})]


def _standard_input() -> str:
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
        return ""
    try:
        return sys.stdin.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("standard input", f"text in {sys.stdin.encoding or 'UTF-8'}", "something else", str(error)) from error


def _parse(where: str, line: str) -> _Line:
    row = read_json(where, line)
    if isinstance(row, str):
        return _Line(row, {})
    if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
        raise ConfigError(where, 'a string, or an object with "prompt" or "messages"', line[:_SHOWN])
    prompt = _messages(where, row["messages"]) if "messages" in row else row["prompt"]
    if not isinstance(prompt, str | Conversation):
        raise ConfigError(where, 'a string, or an object with text as "prompt"', line[:_SHOWN])
    hints = get_type_hints(SamplingConfig)
    sampling = {key: value for key, value in row.items() if key not in ("prompt", "messages")}
    for key, value in sampling.items():
        if key not in hints:
            known = ["prompt", "messages", *hints]
            raise ConfigError(f"{where}: {cut(key)}", known, f"{cut(key)} = {brief(value)}", hint_for_sampling(key, known))
        given = _parse_bias(f"{where}: {key}", value) if key == "logit_bias" and isinstance(value, dict) else value
        sampling[key] = conform(f"{where}: {key}", given, hints[key], ConfigError)
    return _Line(prompt, sampling)


def _messages(where: str, messages: object) -> Conversation:
    try:
        return Conversation(check_messages(messages))
    except RequestError as error:
        raise ConfigError(f"{where}: {error.key}", str(error.expected), error.found, error.hint) from error


def _parse_bias(where: str, bias: dict[str, Any]) -> dict[int, float]:
    """JSON has no integer keys."""
    for token, value in bias.items():
        if not (token.isascii() and token.isdigit() and len(token) < 20) or type(value) not in (int, float):
            raise ConfigError(where, "an object of token ids and numbers", f"{token[:_SHOWN]!r}: {repr(value)[:_SHOWN]}")
    return {int(token): value for token, value in bias.items()}


def failures(errors: Sequence[str | None]) -> list[str]:
    """A sentence for each request that failed."""
    alone = len(errors) == 1
    return [error if alone else f"request {index}: {error}" for index, error in enumerate(errors) if error is not None]
