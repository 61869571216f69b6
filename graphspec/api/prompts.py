"""Turns the arguments of a call into requests: prompts in every accepted form, one ``SamplingParams`` for each, and their checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Number
from typing import Any, NotRequired, TypedDict

from ..config.checks import brief, check_text, in_range, integers, is_array, real, typed, whole
from ..engine.request import Request, ResolvedParams, SamplingParams, check_names
from ..errors import CheckpointError, GraphspecError, RequestError
from ..plan.plan import Plan
from ..shapes import SamplingClass
from ..text.bounds import check_fits
from ..text.conversation import Conversation
from ..text.tokenizer import Tokenizer
from .grammar import Grammars
from .outputs import NothingNew, OutputText, StopCheck


class TextPrompt(TypedDict):
    """A prompt as vLLM spells it. ``add_special_tokens=False``: the text has its special tokens, as a formatted conversation does.
    ``special_tokens_as_text=True``: the texts of special tokens in it are text.
    """

    prompt: str
    add_special_tokens: NotRequired[bool]
    special_tokens_as_text: NotRequired[bool]


class TokensPrompt(TypedDict):
    """A tokenised prompt as vLLM spells it."""

    prompt_token_ids: Sequence[int]


def _no_tokenizer() -> Tokenizer:
    raise CheckpointError("tokenizer", "one", "none")


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | Conversation
Encode = Callable[..., list[int]]
"""Makes token ids of a text or a conversation; of a text, with the options of :class:`TextPrompt` that are not at their defaults."""
Param = SamplingParams | Mapping[str, Any]
Params = Param | Sequence[Param] | None
"""Parameters of a call, one for all prompts or one for each; a mapping has fields of :class:`SamplingParams`."""

LONGEST = 2**24
"""Most token ids of a prompt, or prompts of a call, that are read one by one; ranges and views can claim any length."""
SPELLINGS = "a text, a list of token ids, {'prompt': text} or {'prompt_token_ids': ids}"
_BYTES = bytes | bytearray | memoryview


def split_prompts(prompts: object) -> tuple[bool, list[object]]:
    """Whether a call's ``prompts`` are a single one, and the prompts, not read yet.

    A text, a mapping, a conversation, integers in a list and a one-dimensional array are one prompt; a list of prompts and a
    two-dimensional array are several.

    Raises:
        RequestError: none of these, or a list that mixes token ids with prompts.
    """
    if isinstance(prompts, str | Mapping | range | Conversation):
        return True, [prompts]
    array = is_array(prompts)
    if not array and (not isinstance(prompts, Sequence) or isinstance(prompts, _BYTES)):
        raise RequestError("prompts", f"{SPELLINGS}, or a list of these", typed(prompts))
    try:
        if array and len(prompts.shape) == 1:  # type: ignore[attr-defined]
            return True, [prompts]
        if len(prompts) > LONGEST:  # type: ignore[arg-type]
            raise RequestError("prompts", f"at most {LONGEST} of them", len(prompts))  # type: ignore[arg-type]
        entries = list(prompts)  # type: ignore[call-overload]
    except RequestError:
        raise
    except Exception as reason:
        found = f"{type(prompts).__name__} that can't be read: {type(reason).__name__}: {brief(str(reason))}"
        raise RequestError("prompts", f"{SPELLINGS}, or a list of these", found) from reason
    numbers = [type(entry) is int or isinstance(entry, Number) for entry in entries]
    if entries and all(numbers):
        return True, [entries]
    if any(numbers):
        place = numbers.index(True) or numbers.index(False)
        found = f"prompts[0] = {typed(entries[0])}, prompts[{place}] = {typed(entries[place])}"
        raise RequestError("prompts", "prompts alone or token ids alone", f"a list that mixes them: {found}")
    return False, entries


def read_prompt(prompt: object, encode: Encode) -> list[int]:
    """Token ids of one prompt; whether the vocabulary has them is :func:`~graphspec.api.prompts.check_prompt`'s question.

    Args:
        prompt: in one of the spellings.
        encode: the tokenizer's, of texts and conversations.

    Raises:
        RequestError: no such spelling, an id that is no integer, or text that is no Unicode or that the tokenizer refuses.
        CheckpointError: text, and there is no tokenizer.
    """
    if isinstance(prompt, Conversation):
        return encode(prompt)
    options: dict[str, bool] = {}
    if isinstance(prompt, Mapping):
        prompt, options = _unwrap(prompt)
    if isinstance(prompt, str):
        try:
            return list(encode(prompt, **options))
        except GraphspecError:
            raise
        except Exception as reason:
            found = f"{brief(prompt)}: {type(reason).__name__}: {brief(str(reason))}"
            raise RequestError("prompt", "text that the tokenizer reads", found) from reason
    if isinstance(prompt, _BYTES) or not (isinstance(prompt, Sequence) or is_array(prompt)):
        raise RequestError("prompt", SPELLINGS, typed(prompt))
    return integers("prompt", prompt, RequestError, maximum=LONGEST, expected="a token id")


def _unwrap(prompt: Mapping[object, object]) -> tuple[object, dict[str, bool]]:
    """The text or the ids of a mapping, and how the text is encoded.

    Raises:
        RequestError: other keys than one of the two, or a value of the other's type.
    """
    try:
        items = dict(prompt.items())
    except Exception as reason:
        raise RequestError("prompt", SPELLINGS, f"{type(prompt).__name__} that can't be read") from reason
    defaults = {"add_special_tokens": True, "special_tokens_as_text": False} if "prompt" in items else {}
    options = {name: items.pop(name, default) for name, default in defaults.items()}
    if set(items) == {"prompt"}:
        text = items["prompt"]
        if not isinstance(text, str):
            raise RequestError("prompt['prompt']", "a text (token ids are 'prompt_token_ids')", typed(text))
        for name, value in options.items():
            if not isinstance(value, bool):
                raise RequestError(f"prompt['{name}']", "true or false", typed(value))
        return text, {name: bool(value) for name, value in options.items() if value is not defaults[name]}
    if set(items) == {"prompt_token_ids"}:
        ids = items["prompt_token_ids"]
        if isinstance(ids, str | Mapping):
            raise RequestError("prompt['prompt_token_ids']", "a list of token ids", typed(ids))
        return ids, {}
    others = [brief(key) for key in items if key not in ("prompt", "prompt_token_ids")]
    found = "both" if not others and items else "other keys: " + ", ".join(others) if others else "no key"
    hint = "messages go to LLM.chat" if "role" in items or "messages" in items else ""
    raise RequestError("prompt", "a mapping with 'prompt' or 'prompt_token_ids' and nothing else (text only)", found, hint)


def read_params(params: object, count: int) -> list[SamplingParams]:
    """One ``SamplingParams`` for each of ``count`` prompts.

    Raises:
        RequestError: something else was given, a mapping with an unknown key or a bad value, or not one for each prompt.
    """
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams | Mapping):
        return [_read_param("params", params)] * count
    if not isinstance(params, list | tuple):
        raise RequestError("params", "a SamplingParams, a mapping of its fields, or a list with one for each prompt", typed(params))
    found = [_read_param(f"params[{place}]", param) for place, param in enumerate(params)]
    if len(found) != count:
        raise RequestError("params", f"one SamplingParams, or one for each of the {count} prompts", f"{len(found)} of them")
    return found


def _read_param(key: str, param: object) -> SamplingParams:
    if isinstance(param, SamplingParams):
        return param
    if not isinstance(param, Mapping):
        raise RequestError(key, "a SamplingParams, or a mapping of its fields", typed(param))
    try:
        given = dict(param.items())
    except Exception as reason:
        raise RequestError(key, "a mapping of the fields of SamplingParams", f"{type(param).__name__} that can't be read") from reason
    check_names(given)
    return SamplingParams(**given)


def one_of_params(params: Params, sampling_params: Params) -> Params:
    """The parameters of a call, by either of their names.

    Raises:
        RequestError: both were given.
    """
    if params is not None and sampling_params is not None:
        raise RequestError("sampling_params", "nothing next to params, which it is another name of", typed(sampling_params))
    return params if sampling_params is None else sampling_params


def make_requests(
    prompts: object,
    params: object,
    plan: Plan,
    encode: Encode,
    *,
    one: bool = False,
    tokenizer: Callable[[], Tokenizer] = _no_tokenizer,
    grammars: Grammars | None = None,
) -> list[Request]:
    """Checked requests, ``n`` of them for each prompt, one after the other. One that can't be served has a ``finish_reason`` and an
    ``error``; the others are served.

    Args:
        prompts: of the call.
        params: of the call.
        plan: of the engine that is to serve them.
        encode: the tokenizer's.
        one: there must be exactly one prompt.
        tokenizer: of the checkpoint, for requests with texts in their parameters.
        grammars: compiles those of the requests; None: grammars of this call are compiled for it alone.

    Raises:
        RequestError: the arguments are no prompts or no parameters, or the call's single prompt can't be served.
        CheckpointError: the single prompt is a text, and there is no tokenizer.
    """
    single, many = split_prompts(prompts)
    encode = _bounded(encode, plan, tokenizer)
    grammars = grammars or Grammars(plan)
    if one and len(many) != 1:
        raise RequestError("prompt", "one prompt", f"{len(many)} of them")
    requests = []
    chosen = read_params(params, len(many))
    # One object often serves many prompts.
    resolved = {id(given): _resolve(given, plan) for given in chosen}
    for index, (prompt, given) in enumerate(zip(many, chosen, strict=True)):
        param, wrong = resolved[id(given)]
        request = Request(index=index, prompt=[], params=param.sample(0), stop_ids=(), budget=0)
        try:
            if wrong is not None:
                raise wrong
            request.prompt = read_prompt(prompt, encode)
            request.stop_ids = check_params(param, plan, plan.target.eos_token_ids)
            check_prompt(request.prompt, plan)
            # A request without new tokens has a budget all the same: what the last chunk of its prompt gives is dropped.
            room = plan.max_context - len(request.prompt)
            request.budget = room if param.max_tokens is None else min(max(param.max_tokens, 1), room)
            _add_texts(request, plan, tokenizer)
            if param.max_tokens == 0:
                request.stops = NothingNew()
            if param.structured is not None:
                request.grammar = grammars.grammar(param, request.stop_ids, tokenizer)
        except (RequestError, CheckpointError) as error:
            if single or one:
                raise
            request.finish_reason, request.error, request.refusal = "error", str(error), error.with_traceback(None)
        requests.append(request)
        requests += [_another(request, param, sample) for sample in range(1, param.n)]
    return requests


def _bounded(encode: Encode, plan: Plan, tokenizer: Callable[[], Tokenizer]) -> Encode:
    """``encode``, which refuses a text that is too long for the context before it encodes it, where its length alone says so."""

    def encode_if_it_fits(prompt: str | Conversation, **options: bool) -> list[int]:
        if isinstance(prompt, str) and len(prompt) >= plan.max_context:
            check_fits("prompt", prompt, tokenizer().folder, plan.max_context)
        return encode(prompt, **options)

    return encode_if_it_fits


def _resolve(given: SamplingParams, plan: Plan) -> tuple[ResolvedParams, RequestError | None]:
    """Parameters with the checkpoint's defaults, and what is wrong with them then."""
    try:
        return given.resolve(plan.sampling_defaults), None
    except RequestError as error:
        return replace(given, n=1).resolve(plan.sampling_defaults), error


def _add_texts(request: Request, plan: Plan, tokenizer: Callable[[], Tokenizer]) -> None:
    """What a request's parameters say in text.

    Raises:
        RequestError: there is no tokenizer, or bad words that the engine can't serve.
    """
    params = request.params
    for name in ("stop", "bad_words", "echo"):
        if getattr(params, name):
            try:
                tokenizer()
            except CheckpointError as error:
                raise RequestError(f"sampling.{name}", "a checkpoint with a tokenizer", str(error)) from error
    if params.bad_words:
        request.bad_words = encode_bad_words(params, plan, tokenizer())
        check_bans(params, request.bad_words, plan)
    if params.stop and not plan.accept.synthetic:
        request.stops = StopCheck(lambda: OutputText(tokenizer(), params, request.prompt))


def _another(first: Request, params: ResolvedParams, sample: int) -> Request:
    """One more output of the same prompt."""
    stops = first.stops.again() if first.stops is not None else None
    another = Request(first.index, first.prompt, params.sample(sample), first.stop_ids, first.budget)
    another.sample, another.bad_words, another.stops = sample, first.bad_words, stops
    another.grammar = first.grammar.again() if first.grammar is not None else None
    another.priority, another.deadline = first.priority, first.deadline
    another.finish_reason, another.error = first.finish_reason, first.error
    return another


def check_progress(progress: object, error: type[GraphspecError] = RequestError) -> None:
    """Check a progress callback.

    Raises:
        GraphspecError: of class ``error``: neither None, a bool nor callable.
    """
    if progress is not None and not isinstance(progress, bool) and not callable(progress):
        raise error("progress", "a function, False for no progress, or None", typed(progress))


def check_warm_up(requests: object, sampling: object, plan: Plan) -> int:
    """Check what an engine is to be warmed up for; returns the number of requests.

    Raises:
        RequestError: no number of requests, or no class that a request of this engine can have.
    """
    count = whole("requests", requests, RequestError)
    in_range("requests", count, 1, error=RequestError)
    if not isinstance(sampling, SamplingClass):
        raise RequestError("sampling", "a SamplingClass", typed(sampling))
    in_range("sampling.logprobs", whole("sampling.logprobs", sampling.logprobs, RequestError), -1, plan.max_logprobs, error=RequestError)
    return count


def check_cycles(cycles: object, plan: Plan) -> int:
    """Check how many cycles a request is to run; every one commits a token, so the context bounds them.

    Raises:
        RequestError: no integer, below 1, or more than the context holds.
    """
    count = whole("cycles", cycles, RequestError)
    in_range("cycles", count, 1, max(1, plan.max_context - 2), error=RequestError)
    return count


Priority = int | Sequence[int]
"""Requests with a lower value get a row earlier and are preempted later when pages run out; among equals the earlier arrival goes first."""
Deadline = float | Sequence[float | None] | None
"""Seconds after its arrival at which a request ends with the tokens it has, ``finish_reason="deadline"``; None: never."""

CacheSalt = str | Sequence[str | None] | None
"""Requests share pages of common beginnings only with requests of the same salt. A salt that others don't know keeps them from finding
out, by the time to the first token, which prompts were served before. None: shared with all others without one."""


def set_call_options(requests: Sequence[Request], priority: object, deadline: object, cache_salt: object = None) -> None:
    """Check the arguments and store them in a call's requests.

    Raises:
        RequestError: a value of another type or out of range, or not one for each prompt.
    """
    count = max((request.index for request in requests), default=-1) + 1
    priorities, deadlines = _each("priority", priority, count), _each("deadline", deadline, count)
    salts = _each("cache_salt", cache_salt, count)
    for request in requests:
        its_priority, its_deadline, its_salt = priorities[request.index], deadlines[request.index], salts[request.index]
        request.priority = whole("priority", its_priority, RequestError)
        if its_deadline is not None:
            request.deadline = real("deadline", its_deadline, RequestError)
            in_range("deadline", request.deadline, 0, error=RequestError)
        if its_salt is not None:
            request.cache_salt = check_text("cache_salt", its_salt)
            if not its_salt:
                raise RequestError("cache_salt", "a text of at least one character", "''")


def _each(key: str, value: object, count: int) -> list[object]:
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise RequestError(key, f"one value, or one for each of the {count} prompts", typed(value))
    return list(value)


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
