"""Tokens and their log-probabilities in the format of responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..engine.request import SamplingParams, TokenLogprob
from ..text.tokenizer import Detokenizer, Tokenizer

MIN_LOGPROB = -9999.0
"""Log-probability of an impossible token in JSON, which has no infinity."""


def finite(logprob: float) -> float:
    """A log-probability for JSON: at least :data:`MIN_LOGPROB`."""
    return max(logprob, MIN_LOGPROB)


def chat_logprobs(entries: Sequence[TokenLogprob], tokenizer: Tokenizer, count: int) -> dict[str, Any]:
    """``logprobs`` of a chat completion.

    Args:
        entries: one for each token.
        tokenizer: the checkpoint's.
        count: requested alternatives per token.
    """

    def spelled(token: int, logprob: float) -> dict[str, Any]:
        return {"token": tokenizer.token_text(token), "logprob": finite(logprob), "bytes": list(tokenizer.token_bytes(token))}

    return {
        "content": [
            spelled(entry.token_id, entry.logprob)
            | {"top_logprobs": [spelled(token, logprob) for token, logprob in list(entry.top.items())[:count]]}
            for entry in entries
        ]
    }


def key_of(data: bytes) -> str:
    r"""The text of a token's bytes; where they are none, ``bytes:`` and the bytes, with ``\xf0`` for one that isn't printable ASCII."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        plain = range(0x20, 0x7F)
        return "bytes:" + "".join(chr(byte) if byte in plain and byte != ord("\\") else f"\\x{byte:02x}" for byte in data)


class CompletionLogprobs:
    """``logprobs`` of a completion, piece by piece. Offsets are characters of the output's text.

    Args:
        tokenizer: the checkpoint's.
        params: of the request.
        prompt: of the request.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt: Sequence[int]) -> None:
        self._tokenizer, self._offset = tokenizer, 0
        self._pieces = Detokenizer(
            tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            kept_special_tokens=params.kept_special_tokens,
            prompt=() if params.echo else prompt,
        )

    def of(self, tokens: Sequence[int], entries: Sequence[TokenLogprob | None]) -> dict[str, list[Any]]:
        """``logprobs`` of the next tokens; the first token of a prompt has no log-probability."""
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, entry in zip(tokens, entries, strict=True):
            first = self._pieces.empty
            found["tokens"].append(self._key(token, first=first))
            found["token_logprobs"].append(None if entry is None else finite(entry.logprob))
            found["top_logprobs"].append(None if entry is None else self._top(entry, first=first))
            found["text_offset"].append(self._offset)
            self._offset += len(self._pieces.push(token))
        return found

    def _key(self, token: int, *, first: bool) -> str:
        return key_of(self._tokenizer.token_bytes(token, first=first))

    def _top(self, entry: TokenLogprob, *, first: bool) -> dict[str, float]:
        """Alternatives by text, and the token itself in any case. Of several tokens with one text, the others are ``token_id:<id>``."""
        own = self._key(entry.token_id, first=first)
        top: dict[str, float] = {}
        for token, logprob in entry.top.items():
            key = self._key(token, first=first)
            if key in top or (key == own and token != entry.token_id):
                key = f"token_id:{token}"
            top[key] = finite(logprob)
        return top if entry.token_id in entry.top else top | {own: finite(entry.logprob)}


def prompt_logprobs(entries: Sequence[TokenLogprob | None], tokenizer: Tokenizer) -> list[dict[str, Any] | None]:
    """``prompt_logprobs`` of vLLM: for each token, itself and its alternatives by id."""
    found: list[dict[str, Any] | None] = []
    for entry in entries:
        if entry is None:
            found.append(None)
            continue
        ranked = {**entry.top, entry.token_id: entry.logprob}
        texts = {token: tokenizer.token_text(token) for token in ranked}
        found.append({str(token): {"logprob": finite(value), "decoded_token": texts[token]} for token, value in ranked.items()})
    return found
