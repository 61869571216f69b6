"""Tokens and their log-probabilities in the format of responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..engine.request import TokenLogprob
from ..engine.text import Detokenizer, Tokenizer

LEAST_LOGPROB = -9999.0
"""Log-probability of an impossible token in JSON, which has no infinity."""


TokenTexts = Callable[[int], str]
"""The text of a single token."""


def finite(logprob: float) -> float:
    """A log-probability for JSON: at least :data:`LEAST_LOGPROB`."""
    return max(logprob, LEAST_LOGPROB)


def chat_logprobs(entries: Sequence[TokenLogprob], texts: TokenTexts, count: int) -> dict[str, Any]:
    """``logprobs`` of a chat completion.

    Args:
        entries: one for each token.
        texts: of tokens.
        count: requested alternatives per token.
    """

    def spelled(token: int, logprob: float) -> dict[str, Any]:
        text = texts(token)
        return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode())}

    return {
        "content": [
            spelled(entry.token_id, entry.logprob)
            | {"top_logprobs": [spelled(token, logprob) for token, logprob in list(entry.top.items())[:count]]}
            for entry in entries
        ]
    }


class CompletionLogprobs:
    """``logprobs`` of a completion, piece by piece. Offsets are characters of the output's text.

    Args:
        tokenizer: the checkpoint's.
        texts: of tokens.
        skip_special_tokens: whether the text leaves special tokens out.
    """

    def __init__(self, tokenizer: Tokenizer, texts: TokenTexts, *, skip_special_tokens: bool) -> None:
        self._texts, self._offset = texts, 0
        self._pieces = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)

    def of(self, tokens: Sequence[int], entries: Sequence[TokenLogprob | None]) -> dict[str, list[Any]]:
        """``logprobs`` of the next tokens; the first token of a prompt has no log-probability."""
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, entry in zip(tokens, entries, strict=True):
            found["tokens"].append(self._texts(token))
            found["token_logprobs"].append(None if entry is None else finite(entry.logprob))
            found["top_logprobs"].append(None if entry is None else self._top(entry))
            found["text_offset"].append(self._offset)
            self._offset += len(self._pieces.push(token))
        return found

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """Alternatives by text: the most likely of the tokens with one text, and the token itself in any case."""
        top: dict[str, float] = {}
        for token, logprob in (*entry.top.items(), (entry.token_id, entry.logprob)):
            top.setdefault(self._texts(token), finite(logprob))
        return top


def prompt_logprobs(entries: Sequence[TokenLogprob | None], texts: TokenTexts) -> list[dict[str, Any] | None]:
    """``prompt_logprobs`` of vLLM: for each token, itself and its alternatives by id."""
    found: list[dict[str, Any] | None] = []
    for entry in entries:
        if entry is None:
            found.append(None)
            continue
        ranked = {**entry.top, entry.token_id: entry.logprob}
        found.append({str(token): {"logprob": finite(value), "decoded_token": texts(token)} for token, value in ranked.items()})
    return found
