"""What a request biases and must not sample, as tables of its row: biased tokens, allowed ones as bits, bad words as token sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import RequestError
from ..plan.plan import Plan
from ..shapes import WORD_BITS
from ..text.tokenizer import Tokenizer
from .request import Request, SamplingParams

Table = np.ndarray[tuple[int, ...], np.dtype[Any]]
GROUPS = frozenset(("bias", "allowed", "bad_words"))
"""Fields of :class:`~graphspec.shapes.SamplingClass` whose rows the host writes, since a message has no room for them."""


def encode_bad_words(params: SamplingParams, plan: Plan, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Token sequences of a request's bad words: of each word as it stands, and with a space in front of it.

    Source: ``SamplingParams.update_from_tokenizer`` of vLLM, which takes the second only if it has as many tokens as the first.

    Raises:
        RequestError: a word of too many tokens, or too many sequences.
    """
    found: dict[tuple[int, ...], None] = {}
    for place, word in enumerate(params.bad_words or ()):
        plain, spaced = (tuple(tokenizer.inside(space + word.lstrip())) for space in ("", " "))
        # Where the space is a token of its own, the rest is the word as it stands.
        for tokens in (plain,) if spaced[-len(plain) :] == plain else (plain, spaced):
            if not 1 <= len(tokens) <= plan.max_bad_word_tokens:
                most = f"a word of 1 to runtime.max_bad_word_tokens = {plan.max_bad_word_tokens} tokens"
                raise RequestError(f"sampling.bad_words[{place}]", most, f"{len(tokens)} of them")
            found[tokens] = None
    if len(found) > plan.max_bad_words:
        most = f"at most runtime.max_bad_words = {plan.max_bad_words} token sequences (a word has one or two)"
        raise RequestError("sampling.bad_words", most, len(found))
    return tuple(found)


def check_bans(params: SamplingParams, bad_words: Sequence[Sequence[int]], plan: Plan) -> None:
    """Check that something is left to sample.

    Raises:
        RequestError: every allowed token is a bad word.
    """
    banned = {words[0] for words in bad_words if len(words) == 1}
    allowed = range(plan.target.vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids
    if banned and banned.issuperset(allowed):
        raise RequestError("sampling.bad_words", "words that leave a token to sample", "a ban of every allowed token")


def row_tables(request: Request, tokens: Sequence[int], plan: Plan) -> dict[str, Table]:
    """What the slots of the request's row hold, by their names; empty if it asks for nothing of this kind.

    Args:
        request: takes the row.
        tokens: that its prefill reads.
        plan: of the engine.
    """
    tables: dict[str, Table] = {}
    if request.params.sampling_class.bias:
        bias = request.params.logit_bias or {}
        unused = plan.max_logit_bias - len(bias)
        tables["bias_id_RI"] = np.asarray([*bias, *[-1] * unused], dtype=np.int64)
        tables["bias_value_RI"] = np.asarray([*bias.values(), *[0.0] * unused], dtype=np.float32)
        # The first position at which a stop id may be sampled.
        tables["stop_from_R"] = np.asarray(len(request.prompt) + request.params.min_tokens)
    if request.params.allowed_token_ids is not None:
        words = -(-plan.target.vocab_size // WORD_BITS)
        bits = np.zeros(words * WORD_BITS, dtype=np.uint8)
        bits[list(request.params.allowed_token_ids)] = 1
        tables["allowed_RU"] = np.packbits(bits, bitorder="little").view("<i8").astype(np.int64)
    if request.bad_words:
        sequences = np.full((plan.max_bad_words, plan.max_bad_word_tokens), -1, dtype=np.int64)
        for place, sequence in enumerate(request.bad_words):
            sequences[place, -len(sequence) :] = sequence
        recent = np.full(plan.max_bad_word_tokens, -1, dtype=np.int64)
        last = tokens[-plan.max_bad_word_tokens :]
        recent[-len(last) :] = last
        tables |= {"bad_word_RBwBt": sequences, "recent_token_RBt": recent}
    return tables
