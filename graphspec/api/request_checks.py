"""Checks of a request that need the plan: the vocabulary, the context and the engine's own limits."""

from __future__ import annotations

from collections.abc import Sequence

from ..config.checks import brief
from ..engine.request import SamplingParams
from ..errors import RequestError
from ..plan.plan import Plan
from ..text.tokenizer import Tokenizer


def check_params(params: SamplingParams, plan: Plan, eos_ids: Sequence[int]) -> tuple[int, ...]:
    """Check ``params`` against the plan; returns the ids that stop the request.

    Raises:
        RequestError: names the field.
    """
    vocab = plan.target.vocab_size
    stops = tuple(dict.fromkeys([*params.stop_token_ids, *([] if params.ignore_eos else eos_ids)]))
    for stop in stops:
        if not 0 <= stop < vocab:
            raise RequestError("sampling.stop_token_ids", f"ids from 0 to {vocab - 1}", stop)
    if len(stops) > plan.max_stop_ids:
        raise RequestError(
            "sampling.stop_token_ids", f"at most runtime.max_stop_ids = {plan.max_stop_ids}, end-of-text ids included", len(stops)
        )
    bias = params.logit_bias or {}
    if len(bias) > plan.max_logit_bias:
        raise RequestError("sampling.logit_bias", f"at most runtime.max_logit_bias = {plan.max_logit_bias} tokens", len(bias))
    for token in bias:
        if token >= vocab:
            raise RequestError("sampling.logit_bias", f"token ids from 0 to {vocab - 1}", token)
    for name in ("logprobs", "prompt_logprobs"):
        if (count := getattr(params, name)) is not None and count > plan.max_logprobs:
            raise RequestError(f"sampling.{name}", f"None, or 0 to runtime.max_logprobs = {plan.max_logprobs}", count)
    if params.num_steps is not None and params.num_steps > plan.shape.num_steps:
        raise RequestError("sampling.num_steps", f"None, or 0 to variant.num_steps = {plan.shape.num_steps}", params.num_steps)
    allowed = set(params.allowed_token_ids or ())
    if allowed and max(allowed) >= vocab:
        raise RequestError("sampling.allowed_token_ids", f"token ids from 0 to {vocab - 1}", max(allowed))
    if allowed and params.min_tokens and allowed.issubset(stops):
        raise RequestError("sampling.allowed_token_ids", "a token that ends nothing, for min_tokens of them", sorted(allowed))
    # A synthetic run ends at its budget: its tokens are meaningless, stop ids included.
    return () if plan.accept.synthetic else stops


def check_prompt(prompt: Sequence[int], plan: Plan) -> None:
    """Check a tokenised prompt.

    Raises:
        RequestError: empty, too long for the context or the page pool, or with an id outside the vocabulary.
    """
    if not prompt:
        raise RequestError("prompt", "at least one token", "an empty prompt")
    if len(prompt) >= plan.max_context:
        raise RequestError(
            "prompt", f"at most {plan.max_context - 1} tokens (max_context {plan.max_context}, one of them new)", f"{len(prompt)} tokens"
        )
    for position, token in enumerate(prompt):
        if not 0 <= token < plan.target.vocab_size:
            raise RequestError(f"prompt[{position}]", f"a token id from 0 to {plan.target.vocab_size - 1}", brief(token))
    needed, available = plan.pages_for(len(prompt) + plan.tokens_in_flight), plan.num_pages - 1
    if needed > available:
        raise RequestError(
            "runtime.num_pages",
            f"{needed} pages of {plan.page_size} for a prompt of {len(prompt)} tokens and the window after it",
            available,
        )


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
                maximum = f"a word of 1 to runtime.max_bad_word_tokens = {plan.max_bad_word_tokens} tokens"
                raise RequestError(f"sampling.bad_words[{place}]", maximum, f"{len(tokens)} of them")
            found[tokens] = None
    if len(found) > plan.max_bad_words:
        maximum = f"at most runtime.max_bad_words = {plan.max_bad_words} token sequences (a word has one or two)"
        raise RequestError("sampling.bad_words", maximum, len(found))
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
