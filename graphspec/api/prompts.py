"""Turns the arguments of a call into requests: prompts in every accepted form, and one ``SamplingParams`` for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Number
from typing import Any, NotRequired, TypedDict

from ..config.checks import brief, integers, is_array, typed
from ..engine.request import Request, ResolvedParams, SamplingParams, check_names
from ..errors import CheckpointError, GraphspecError, RequestError
from ..plan.plan import Plan
from ..text.bounds import check_fits
from ..text.tokenizer import Conversation, Tokenizer
from .grammar import Grammars
from .request_checks import check_bans, check_params, check_prompt, encode_bad_words
from .stops import NothingNew, OutputText, StopCheck


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
    """Token ids of one prompt; whether the vocabulary has them is :func:`~graphspec.api.request_checks.check_prompt`'s question.

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
