"""Requests: sampling parameters and their checks, and the engine's state of each request."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import reduce, wraps
from itertools import islice
from operator import or_
from typing import Any, Final, NoReturn, Protocol, TypeVar

from ..config.checks import INT32_MAX, brief, check_fields, check_sampling, cut, in_range, usable_temperature
from ..config.hints import hint_for_sampling
from ..config.schema import SamplingConfig
from ..errors import GraphspecError, RequestError
from ..graphs.grammar import Grammar
from ..shapes import GREEDY, NEUTRAL, SamplingClass, SamplingDefaults, drawing_class
from ..text.structured import Structured
from .lookup import RepeatIndex

Made = TypeVar("Made")


class LogitBias(dict[int, float]):
    """An immutable mapping, so that it can't change after it was checked."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("logit_bias can't be changed; dataclasses.replace makes other parameters")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[type[LogitBias], tuple[dict[int, float]]]:
        return LogitBias, (dict(self),)


def check_names(given: Mapping[Any, object]) -> None:
    """Check the names of sampling parameters.

    Raises:
        RequestError: one is no field; the hint has ours for it.
    """
    known = [f.name for f in fields(SamplingParams)]
    for name, value in given.items():
        if name not in known:
            key = cut(name) if isinstance(name, str) else brief(name)
            hint = hint_for_sampling(key, known)
            raise RequestError(f"sampling.{key}", known, f"{key}={brief(value)}", hint)


def _names_checked(kind: type[Made]) -> type[Made]:
    """The class, whose constructor refuses unknown keywords with a hint; its signature stays."""
    made = kind.__init__

    @wraps(made)
    def init(self: Made, *positional: Any, **given: Any) -> None:
        check_names(given)
        made(self, *positional, **given)

    kind.__init__ = init  # type: ignore[method-assign,assignment]
    return kind


@_names_checked
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled and when it ends. Values are checked on construction.

    ``temperature``, ``top_k``, ``top_p``, ``min_p`` and ``repetition_penalty`` default to None, which means the checkpoint's
    ``generation_config.json`` (``model.generation_config``); where that sets nothing, they have no effect.

    Attributes:
        max_tokens: maximum number of new tokens, at least 1 (0 is allowed with ``echo`` or ``prompt_logprobs``). None: until the context
            is full.
        temperature: 0 is greedy; at most 1e5. Values below the smallest normal float32 (1.2e-38) mean 0.
        seed: 64 bits, signed or unsigned. The same seed and prompt give the same output. None: a random seed, reported by the output.
        n: outputs per prompt; more than one needs a temperature above 0. Output i is a request with the seed ``seed + i``.
        stop_token_ids: ids that end the request, in addition to the checkpoint's end-of-text ids. The id is part of the output.
        ignore_eos: do not stop at the checkpoint's end-of-text ids.
        stop: stop strings. Text from the first match on is dropped, as are tokens after the one that completed it. A single string means a
            list of one.
        include_stop_str_in_output: keep the stop string in the text.
        top_k: sample from the k most likely tokens; -1 or 0: all. Tokens tied with the k-th stay in.
        top_p: then from the smallest set of most likely tokens whose probability reaches this, 0 < top_p <= 1 (at least 1.2e-38).
        min_p: then from tokens at least this fraction as likely as the most likely one, 0 <= min_p <= 1.
        repetition_penalty: 0.01 to 100. Divides positive logits, and multiplies negative logits, of tokens in the prompt or the output.
        presence_penalty: -2 to 2. Subtracted from the logit of each token in the output.
        frequency_penalty: -2 to 2. Subtracted once per occurrence in the output.
        logit_bias: token id to a value added to its logit, -100 to 100.
        allowed_token_ids: sample only these; any number of them. None: all.
        bad_words: texts that never occur in the output: the last token of a word is banned where the tokens before it match, which may
            begin in the prompt. A word is banned with and without a leading space.
        min_tokens: no end-of-text id, stop id or stop string before this many tokens.
        speculate: False: decode this request plainly, one token per cycle, in the same batch as others.
        num_steps: maximum number of drafts accepted per cycle. None: the engine's depth, which is also the upper bound.
        skip_special_tokens: leave special tokens out of the text. Stop strings still match them.
        kept_special_tokens: special tokens to keep in the text even if ``skip_special_tokens`` is true. Strings that are no special token
            of the checkpoint have no effect.
        detokenize: False: return token ids only.
        echo: start the text with the prompt. ``token_ids`` and ``logprobs`` still cover new tokens only.
        prompt_logprobs: like ``logprobs``, for the tokens of the prompt.
        logprobs: report the log-probability of each token and of this many most likely tokens, from the target's own logits, before any of
            the changes above. None: neither.
        structured: a grammar for the whole output. The request ends with an end-of-text id, at the latest when nothing else may follow.

    Filters (top_k, top_p, min_p) need a temperature above 0; everything else also works at 0.

    Raises:
        RequestError: a wrong type, a value out of range or not finite; the key is ``sampling.<field>``.
    """

    max_tokens: int | None = 128
    temperature: float | None = None
    seed: int | None = None
    n: int = 1
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    stop: Sequence[str] | None = ()
    include_stop_str_in_output: bool = False
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = ()
    min_tokens: int = 0
    speculate: bool = True
    num_steps: int | None = None
    skip_special_tokens: bool = True
    kept_special_tokens: Sequence[str] = ()
    detokenize: bool = True
    echo: bool = False
    prompt_logprobs: int | None = None
    logprobs: int | None = None
    structured: Structured | None = None

    def __post_init__(self) -> None:
        check_fields(self, "sampling", error=RequestError)
        object.__setattr__(self, "temperature", usable_temperature(self.temperature))
        check_sampling(self, RequestError)
        for name in ("num_steps", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                in_range(f"sampling.{name}", value, 0, INT32_MAX, error=RequestError)
        if self.structured is not None and self.min_tokens:
            raise RequestError("sampling.min_tokens", "0 with sampling.structured, whose text may be complete before", self.min_tokens)
        for name in ("stop", "echo", "kept_special_tokens"):
            if getattr(self, name) and not self.detokenize:
                raise RequestError("sampling.detokenize", f"true with sampling.{name}, which is about text", False)
        for name in ("stop", "bad_words"):
            # Unset in the words of other engines.
            object.__setattr__(self, name, tuple(getattr(self, name) or ()))
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", LogitBias(self.logit_bias))

    def resolve(self, defaults: SamplingDefaults = NEUTRAL) -> ResolvedParams:
        """These parameters, with ``defaults`` in place of None.

        Raises:
            RequestError: more than one output at a temperature of 0 that was not stated.
        """
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return ResolvedParams(**values | {name: value for name, value in asdict(defaults).items() if values[name] is None})

    @property
    def depth(self) -> int | None:
        """Maximum number of drafts accepted per cycle; None: the engine's depth."""
        return self.num_steps if self.speculate else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedParams(SamplingParams):
    """Parameters with all defaults filled in. The engine takes only these."""

    temperature: float = NEUTRAL.temperature
    top_k: int = NEUTRAL.top_k
    top_p: float = NEUTRAL.top_p
    min_p: float = NEUTRAL.min_p
    repetition_penalty: float = NEUTRAL.repetition_penalty

    def resolve(self, defaults: SamplingDefaults = NEUTRAL) -> ResolvedParams:
        """Themselves."""
        return self

    @property
    def sampling_class(self) -> SamplingClass:
        """What this request asks of the sampler."""
        return drawing_class(self) | SamplingClass(
            penalties=(self.presence_penalty, self.frequency_penalty) != (0, 0),
            bias=bool(self.logit_bias) or self.min_tokens > 0,
            logprobs=-1 if self.logprobs is None else self.logprobs,
            allowed=self.allowed_token_ids is not None,
            bad_words=bool(self.bad_words),
            prompt_logprobs=self.prompt_logprobs is not None,
            grammar=self.structured is not None,
        )

    def sample(self, number: int) -> ResolvedParams:
        """The parameters of one of the ``n`` outputs."""
        if self.n == 1:
            return self
        seed = self.seed + number if self.seed is not None else None
        # 64 bits, which a seed may fill with and without a sign.
        return replace(self, n=1, seed=seed - 2**64 if seed is not None and seed >= 2**64 else seed)


CLASS_FIELDS = {
    "noise": "temperature",
    "truncate": "top_k, top_p, min_p",
    "penalties": "repetition_penalty, presence_penalty, frequency_penalty",
    "bias": "logit_bias, min_tokens",
    "logprobs": "logprobs",
    "allowed": "allowed_token_ids",
    "bad_words": "bad_words",
    "prompt_logprobs": "prompt_logprobs",
    "grammar": "structured",
}
"""Fields of :class:`SamplingParams`, by the part of the class that they ask for."""


def check_covered(need: SamplingClass, whole: SamplingClass) -> None:
    """Check that ``whole``, which covers every class that an engine has programs of, covers ``need``.

    Raises:
        RequestError: it does not.
    """
    for part, fields_ in CLASS_FIELDS.items():
        if getattr(need, part) > getattr(whole, part):
            raise RequestError(
                f"sampling.{fields_}", f"the default, since no class of runtime.sampling_classes has {part}", "another value"
            )


def configured_params(config: SamplingConfig, **changes: Any) -> SamplingParams:
    """Request parameters from the ``sampling`` group of the configuration, with ``changes`` applied."""
    return SamplingParams(**({f.name: getattr(config, f.name) for f in fields(config)} | changes))


def measured_params(config: SamplingConfig, **changes: Any) -> ResolvedParams:
    """The same for one request that is measured or compared: the checkpoint's defaults have no say.

    Raises:
        ConfigError: more than one output.
    """
    return configured_params(config.stated(), **changes).resolve()


def sampling_class(params: Iterable[SamplingParams], defaults: SamplingDefaults = NEUTRAL) -> SamplingClass:
    """The class that serves all of these requests at once; ``defaults``: of the engine that is to serve them."""
    return reduce(or_, (param.resolve(defaults).sampling_class for param in params), GREEDY)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """An emitted token as the target saw it: natural logarithms of ``softmax(logits)``, without temperature, penalties or filters.

    Attributes:
        token_id: the token.
        logprob: its log-probability.
        top: the most likely tokens and their log-probabilities, most likely first.
    """

    token_id: int
    logprob: float
    top: dict[int, float]


@dataclass(slots=True)
class RequestMetrics:
    """What one request cost.

    Attributes:
        cycles: cycles that emitted tokens of this request.
        cycle_tokens: tokens per cycle, in order; the prefill's token is not counted.
        cycle_depths: draft depth of each of those cycles; 0 decoded plainly.
        cut: the last cycle's run was cut by a stop id or the budget.
        cached_tokens: of the prompt, found in pages of other requests (``runtime.prefix_cache``) and not computed.
        bursts: when tokens became known and how many, the prefill's first; seconds of :func:`time.perf_counter`, as are those below.
        admitted: when it got its first row; None: it waits, or ended while waiting.
    """

    cycles: int = 0
    cycle_tokens: list[int] = field(default_factory=list)
    cycle_depths: list[int] = field(default_factory=list)
    cut: bool = False
    cached_tokens: int = 0
    bursts: list[tuple[float, int]] = field(default_factory=list)
    arrived: float = field(default_factory=time.perf_counter)
    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None

    def whole_cycles(self) -> list[int]:
        """Tokens of each cycle that was not cut; acceptance is measured on these."""
        return self.cycle_tokens[:-1] if self.cut and len(self.cycle_tokens) > 1 else self.cycle_tokens

    def drafted_cycles(self) -> list[tuple[int, int]]:
        """``(tokens, depth)`` of each whole cycle that drafted."""
        return [(tokens, depth) for tokens, depth in zip(self.whole_cycles(), self.cycle_depths, strict=False) if depth]


class Stops(Protocol):
    """Looks for a request's stop texts (:class:`graphspec.api.outputs.StopCheck`)."""

    def cut(self, output: Sequence[int], tokens: list[int], status: int) -> tuple[list[int], int]: ...

    def again(self) -> Stops: ...


class OutputGrammar(Grammar, Protocol):
    """The grammar of a request, and its state after the output so far (:class:`graphspec.api.grammar.RowGrammar`)."""

    def follow(self, output: Sequence[int]) -> bool: ...

    def again(self) -> OutputGrammar: ...


@dataclass(slots=True, eq=False)
class RowState:
    """What exists only while a request holds a row. A request that leaves its row drops this, and gets a new one with its next row."""

    index: int
    """The row of the device's tables."""
    pages: list[int]
    """Pages of the KV pools, in order of position."""
    scoring: bool
    """The prompt's tokens are scored while the row is filled."""
    ready: bool = False
    """Its prefill has been launched to the end."""
    prefilled: int = 0
    """Tokens that the prefill launches so far read, those of shared pages included."""
    shared: int = 0
    """Its first pages that other requests had filled."""
    shared_tokens: int = 0
    """Tokens in those pages."""
    mapped: int = 0
    """Pages that messages have put into the page table."""
    published: int = 0
    """How many of its first pages are published, or were taken over from other requests: nothing writes into them."""
    publish_at: float = 0
    """Length of the output from which one more page can be (:meth:`graphspec.engine.pages.PrefixCache.publish_output`)."""
    last_ticket: int = -1
    """Number of the last launch that contains the row."""
    queued_cycles: int = 0
    """Cycles that were launched and not read."""
    window_bound: int = 1
    """Most entries its window can have on the device after all launches so far; counted only if plain cycles let it grow."""
    repeats: RepeatIndex | None = None
    """Where its text repeats; made when a depth is chosen by it."""

    @property
    def begins(self) -> bool:
        """The row has read nothing yet."""
        return self.prefilled == self.shared_tokens


class _NoRow(RowState):
    """Has no state: reading or writing any of it raises AttributeError."""

    __slots__ = ()

    def __init__(self) -> None:
        pass

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} of a request without a row")


NO_ROW: Final = _NoRow()
"""The row of a request that holds none."""


@dataclass(slots=True, eq=False)
class Request:
    """One request inside the engine: what its caller asked, and what came out."""

    index: int
    prompt: list[int]
    params: ResolvedParams
    """Made from others with the neutral values where they say nothing."""
    stop_ids: tuple[int, ...]
    budget: int
    priority: int = 0
    """Lower ones are served first."""
    deadline: float | None = None
    """Seconds after its arrival at which it ends with the tokens it has."""
    cache_salt: str | None = None
    """It shares pages only with requests that have the same."""
    sample: int = 0
    """Its place among the ``n`` outputs of its prompt."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not appear in the output."""
    stops: Stops | None = None
    """Searches the output for stop texts; None: there are none."""
    grammar: OutputGrammar | None = None
    """The grammar its output must follow; None: any output is allowed."""
    seed: int = field(init=False)
    """The seed of the parameters, or 64 random bits if they have none."""
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Log-probabilities of the prompt's tokens after the first, as far as they are known."""
    finish_reason: str | None = None
    error: str | None = None
    refusal: GraphspecError | None = None
    """The error of a request that can't be served."""
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    row: RowState = NO_ROW
    """Its row; :data:`NO_ROW`: it waits for one, or has ended and left it."""
    arrival: int = 0
    """Place in the order of arrival; set by the scheduler."""
    overtaken: int = 0
    """Later requests that were admitted while it has been waiting."""
    preempted: int = 0
    sampling: SamplingClass = GREEDY
    """What it asks of the sampler; set by the scheduler."""
    page_keys: list[bytes] = field(default_factory=list)
    """Keys of its first full pages (:mod:`graphspec.engine.pages`), computed from its tokens."""
    pending_end: tuple[int, int] | None = None
    """``(output length, status)`` of the run that ends it, written before the run's tokens, in case an error strikes in between."""

    def precedence(self) -> tuple[int, int]:
        """Sort key: requests with lower ones are served first, and preempted last."""
        return self.priority, self.arrival

    def known(self, start: int, end: int) -> list[int]:
        """Tokens ``[start, end)`` of prompt and output."""
        prompt = len(self.prompt)
        return [*self.prompt[start:end], *self.output[max(0, start - prompt) : max(0, end - prompt)]]

    def __post_init__(self) -> None:
        self.params = self.params.resolve()
        self.seed = secrets.randbits(64) if self.params.seed is None else self.params.seed

    def begin(self, index: int, pages: list[int]) -> None:
        """Take a row and pages. The row must be prefilled before the request continues."""
        self.row = RowState(index, pages, self.scores_prompt)
        self.metrics.admitted = self.metrics.admitted or time.perf_counter()
        if self.row.scoring:
            # Drop those of an unfinished prefill.
            self.prompt_logprobs = []

    @property
    def scores_prompt(self) -> bool:
        """It asked for log-probabilities of its prompt, and some are still missing."""
        return self.sampling.prompt_logprobs and len(self.prompt_logprobs) < len(self.prompt) - 1

    def note_logprobs(self, tokens: Iterable[int], logprobs: Iterable[tuple[float, dict[int, float]]]) -> None:
        """Append the log-probabilities of a run, if it asked for them. The run may have more alternatives, and more tokens, than needed."""
        if self.params.logprobs is not None:
            self.logprobs += _shortened(tokens, logprobs, self.params.logprobs)

    def note_prompt_logprobs(self, logprobs: Iterable[tuple[float, dict[int, float]]]) -> None:
        """Append the log-probabilities of the next tokens of its prompt, if it asked for them and still lacks some."""
        if self.params.prompt_logprobs is not None and self.finish_reason is None:
            left = self.prompt[len(self.prompt_logprobs) + 1 :]
            self.prompt_logprobs += _shortened(left, logprobs, self.params.prompt_logprobs)

    @property
    def scored_prompt(self) -> list[TokenLogprob | None] | None:
        """Log-probabilities of the prompt's tokens, None for the first; None if it did not ask for them."""
        return [None, *self.prompt_logprobs] if self.params.prompt_logprobs is not None else None

    def stop_reason(self, text: str | None) -> str | int | None:
        """The stop text, given as ``text``, or the stop id of its parameters that ended it; None: something else ended it."""
        if text is not None or self.finish_reason != "stop":
            return text
        return self.output[-1] if self.output[-1] in self.params.stop_token_ids else None

    def depth_of(self, depth: int) -> int:
        """Most drafted tokens that this request accepts from a cycle of this depth."""
        return depth if self.params.depth is None else min(depth, self.params.depth)

    @property
    def committed(self) -> int:
        """Tokens that have target KV, counting the results read so far."""
        return len(self.prompt) + max(0, len(self.output) - 1)


def _shortened(tokens: Iterable[int], logprobs: Iterable[tuple[float, dict[int, float]]], maximum: int) -> Iterator[TokenLogprob]:
    for token, (logprob, top) in zip(tokens, logprobs, strict=False):
        yield TokenLogprob(token, logprob, dict(islice(top.items(), maximum)))
