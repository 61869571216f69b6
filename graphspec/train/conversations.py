"""Conversations as training text: read from files, spelled by the chat template, and packed into sequences.

Only the answers are trained on: a draft continues answers. Its loss counts where the token that it predicts is marked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..config.checks import brief, check_text
from ..config.paths import read_json, read_text
from ..errors import ConfigError, RequestError
from ..text.conversation import Conversation, check_messages
from ..text.tokenizer import Tokenizer

ANSWERS = "assistant"
"""Role of the answers."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Token ids of one conversation, and the ``[begin, end)`` of each answer in them, its end of turn included."""

    tokens: list[int]
    answers: list[tuple[int, int]]

    def marks(self) -> np.ndarray:
        """``[tokens]`` bool: the tokens of answers."""
        marked = np.zeros(len(self.tokens), dtype=bool)
        for begin, end in self.answers:
            marked[begin:end] = True
        return marked


def read_conversations(name: str, key: str = "train.data") -> list[list[dict[str, Any]]]:
    """The conversations of a JSONL file: the ``messages`` of each line, or its ``prompt`` as the message of a user.

    Further keys of a line, such as an id, are left alone.

    Raises:
        ConfigError: a file that can't be read, without a conversation, or with a line that is none; names the line.
    """
    found = []
    for number, line in enumerate(read_text(key, name).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{key}: {name}:{number}"
        record = read_json(where, line)
        if not isinstance(record, dict) or ("messages" in record) == ("prompt" in record):
            raise ConfigError(where, 'an object with "messages" or with "prompt"', brief(record))
        try:
            given = [{"role": "user", "content": check_text("prompt", record["prompt"])}] if "prompt" in record else record["messages"]
            found.append(check_messages(given))
        except RequestError as error:
            raise ConfigError(f"{where}: {error.key}", error.expected, error.found) from error
    if not found:
        raise ConfigError(key, "at least one conversation", name)
    return found


def has_answer(messages: Sequence[dict[str, Any]]) -> bool:
    """Whether a conversation ends with an answer; else the target writes one."""
    return bool(messages[-1]["role"] == ANSWERS)


def turn_end(tokenizer: Tokenizer) -> int | None:
    """The token that ends an answer: what the chat template writes after one, else the tokenizer's end of text."""
    return next(reversed(tokenizer.ends), None)


def spell(tokenizer: Tokenizer, messages: Sequence[dict[str, Any]]) -> list[Sample]:
    """A conversation with answers as the engine meets it: each answer after the prompt that asks for it.

    Several answers are one sample where the template writes an earlier one as it was generated, and else one each.

    Raises:
        RequestError: messages that the template does not take.
        CheckpointError: no chat template, or a broken one.
    """
    end = turn_end(tokenizer)
    found: list[Sample] = []
    for place, message in enumerate(messages):
        if message["role"] != ANSWERS or not message["content"]:
            continue
        prompt = tokenizer.chat(Conversation(messages[:place])) if place else []
        tokens = [*prompt, *tokenizer.inside(message["content"]), *([] if end is None else [end])]
        answers = [(len(prompt), len(tokens))]
        if found and prompt[: len(found[-1].tokens)] == found[-1].tokens:
            answers = [*found.pop().answers, *answers]
        found.append(Sample(tokens, answers))
    return found


def pack(samples: Iterable[Sample], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Sequences of ``length`` tokens: int32 ``[N, length]``, and a mark at each token of an answer, bool ``[N, length]``.

    A conversation begins where there is the least room that holds it, the longest first; what is left of a sequence is 0 and not marked.
    One that is longer than a sequence is cut.
    """
    parts = []
    for sample in samples:
        tokens, marks = np.asarray(sample.tokens, dtype=np.int32), sample.marks()
        cuts = range(0, len(tokens), length)
        parts += [(tokens[cut : cut + length], marks[cut : cut + length]) for cut in cuts if marks[cut : cut + length].any()]
    parts.sort(key=lambda part: -len(part[0]))
    rows: list[list[tuple[np.ndarray, np.ndarray]]] = []
    free: list[list[int]] = [[] for _ in range(length + 1)]
    for part in parts:
        size = len(part[0])
        room = next((room for room in range(size, length + 1) if free[room]), None)
        if room is None:
            rows.append([])
            row, room = len(rows) - 1, length
        else:
            row = free[room].pop()
        rows[row].append(part)
        free[room - size].append(row)
    tokens_NL, marks_NL = np.zeros((len(rows), length), dtype=np.int32), np.zeros((len(rows), length), dtype=bool)
    for row, inside in enumerate(rows):
        joined = np.concatenate([tokens for tokens, _ in inside])
        tokens_NL[row, : len(joined)] = joined
        marks_NL[row, : len(joined)] = np.concatenate([marks for _, marks in inside])
    return tokens_NL, marks_NL


def split(samples: Sequence[Sample], share: float) -> tuple[list[Sample], list[Sample]]:
    """``(train, held_out)``: about ``share`` of the conversations, spread evenly, are held out; at least one, and at most half."""
    every = max(2, round(1 / share))
    apart = set(range(every - 1, len(samples), every)) or {len(samples) - 1}
    train = [sample for place, sample in enumerate(samples) if place not in apart]
    return train, [samples[place] for place in sorted(apart)]
