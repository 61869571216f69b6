"""What a call returns: outputs, stream events and metrics; and the text of an output, up to where it stops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from itertools import compress

from ..config.checks import brief
from ..engine.request import Request, RequestMetrics, SamplingParams, TokenLogprob
from ..plan.buffers import Status
from ..plan.plan import Plan
from ..text.tokenizer import Detokenizer, Tokenizer


@dataclass(frozen=True, slots=True)
class Metrics:
    """Figures of one request, or of all requests of a call.

    Attributes:
        cycles: cycles run; a cycle over a batch counts once per row.
        acceptance_length: mean new tokens per cycle, bonus token included. Leaves out the first token, cycles cut short by a stop or by
            ``max_tokens``, and, if some cycles drafted, those that did not.
        accepted_per_position: share of these cycles that accepted the draft at depth 1, 2, ... S, among those that drafted that deep.
        prefill_seconds: arrival to first token; the longest of a call.
        decode_seconds: first token to last; of a call, wall time from its first token to its end.
        tokens_per_second: tokens after the first one of each request, per decode second.
        cached_tokens: prompt tokens taken from pages of other requests (``runtime.prefix_cache``).
        lossy: the acceptance rule changes the target's distribution.
        synthetic: accepted lengths were forced. Only the times mean anything.
        numerics: of the target, ``batch_invariant``, ``cycle_invariant`` or ``fast``: what ``kernels.numerics=auto`` meant
            (docs/numerics.md).
        activations: ``kernels.activations``.
    """

    cycles: int
    acceptance_length: float
    accepted_per_position: list[float]
    prefill_seconds: float
    decode_seconds: float
    tokens_per_second: float
    cached_tokens: int = 0
    lossy: bool = False
    synthetic: bool = False
    numerics: str = "fast"
    activations: str = "full"


@dataclass(frozen=True, slots=True, repr=False)
class Output:
    """Result of one request. Its ``repr`` is short: part of the text, and how many tokens there are.

    Attributes:
        index: position in the call's prompts.
        token_ids: new tokens. The last one is the stop id, or the token that completed a stop string, if one ended the request.
        text: their text, without the stop string unless the request keeps it.
        finish_reason: ``stop``, ``length``, ``memory`` (page pool too small), ``deadline``, ``abort`` or ``error``.
        error: the message when ``finish_reason`` is ``error``.
        seed: the seed used; ``SamplingParams(seed=...)`` with it reproduces these tokens.
        logprobs: one per token if requested, else None.
        sample: number of this output among the prompt's ``n``, which are adjacent in the call's outputs.
        stop_reason: the stop string, or the id in ``stop_token_ids``, that ended the request; else None.
        prompt_logprobs: one per prompt token if requested; None for the first token.
        timing: when its tokens arrived, cycle by cycle.
    """

    index: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    error: str | None
    metrics: Metrics
    seed: int
    logprobs: list[TokenLogprob] | None = None
    sample: int = 0
    stop_reason: str | int | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    timing: RequestMetrics = field(default_factory=RequestMetrics)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens taken from pages of other requests."""
        return self.metrics.cached_tokens

    def __repr__(self) -> str:
        said = {"index": str(self.index)} | ({"sample": str(self.sample)} if self.sample else {})
        said |= {"text": brief(self.text), "tokens": str(len(self.token_ids)), "finish_reason": repr(self.finish_reason)}
        said |= {"acceptance_length": f"{self.metrics.acceptance_length:.2f}"} if self.error is None else {"error": repr(self.error)}
        return f"Output({', '.join(f'{name}={value}' for name, value in said.items())})"


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """New tokens of one request, as soon as they are accepted.

    Attributes:
        text: the new text that is final. The end is held back while it may belong to an unfinished character or stop string.
        error: the message when ``finish_reason`` is ``error``.
        seed, sample, stop_reason: as in :class:`Output`.
        prompt_logprobs: as in :class:`Output`, in the request's first event.
    """

    index: int
    text: str
    token_ids: list[int]
    finished: bool
    finish_reason: str | None = None
    logprobs: list[TokenLogprob] | None = None
    error: str | None = None
    seed: int | None = None
    sample: int = 0
    stop_reason: str | int | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """Everything a request has generated so far, with the field names of vLLM's ``CompletionOutput``.

    Attributes:
        index: number of this output among the prompt's ``n``.
        logprobs: one per token if requested, else None.
        finish_reason, stop_reason: as in :class:`Output`; None while the request is running.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class _SoFar:
    """What the events of a request had, put together; it only grows."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RequestOutput(StreamEvent):
    """A :class:`StreamEvent` that also has everything so far, like vLLM's ``RequestOutput``.

    Attributes:
        request_id: id of the call.
        prompt_token_ids: ids of the prompt.
    """

    request_id: str = ""
    prompt_token_ids: list[int] = field(default_factory=list)
    _so_far: _SoFar = field(default_factory=_SoFar, repr=False, compare=False)
    _texts: int = field(default=0, repr=False, compare=False)
    _tokens: int = field(default=0, repr=False, compare=False)

    @property
    def outputs(self) -> list[Completion]:
        """One entry: everything up to this event."""
        so_far, tokens = self._so_far, self._tokens
        text, logprobs = "".join(so_far.texts[: self._texts]), so_far.logprobs[:tokens] if self.logprobs is not None else None
        return [Completion(self.sample, text, so_far.token_ids[:tokens], logprobs, self.finish_reason, self.stop_reason)]


def cumulative(request_id: str, requests: Sequence[Request]) -> Callable[[StreamEvent], RequestOutput]:
    """A function that makes each event of these requests, in order, one with all so far."""
    prompts = {(request.index, request.sample): request.prompt for request in requests}
    known: dict[tuple[int, int], _SoFar] = {}

    def add(event: StreamEvent) -> RequestOutput:
        place = event.index, event.sample
        so_far = known.setdefault(place, _SoFar())
        so_far.texts.append(event.text)
        so_far.token_ids += event.token_ids
        so_far.logprobs += event.logprobs or []
        said = {name.name: getattr(event, name.name) for name in fields(StreamEvent)}
        return RequestOutput(**said, request_id=request_id, prompt_token_ids=prompts[place], _so_far=so_far, _texts=len(so_far.texts),
                             _tokens=len(so_far.token_ids))  # fmt: skip

    return add


@dataclass(frozen=True, slots=True)
class TreeSnapshot:
    """One cycle's draft tree as it was verified, for display."""

    token_N: list[int]
    parent_N: list[int]
    depth_N: list[int]
    accepted: list[bool]
    text_N: list[str] = field(default_factory=list)


def summarise(requests: Sequence[Request], plan: Plan) -> Metrics:
    """Metrics over ``requests``, which ran under ``plan``."""
    depth = plan.shape.num_steps
    drafted = [cycle for r in requests for cycle in r.metrics.drafted_cycles()]
    runs = [tokens for tokens, _ in drafted] or [tokens for r in requests for tokens in r.metrics.whole_cycles()]
    deep_enough = [[tokens for tokens, deep in drafted if deep >= d] for d in range(1, depth + 1)]
    positions = [sum(tokens > d for tokens in some) / max(1, len(some)) for d, some in enumerate(deep_enough, 1)]
    started = [r.metrics.first_token for r in requests if r.metrics.first_token is not None]
    finished = [r.metrics.finished for r in requests if r.metrics.first_token is not None and r.metrics.finished is not None]
    decode = max(finished) - min(started) if started and finished else 0.0
    prefill = max((r.metrics.first_token - r.metrics.arrived for r in requests if r.metrics.first_token is not None), default=0.0)
    later = sum(max(0, len(r.output) - 1) for r in requests)
    return Metrics(
        cycles=sum(r.metrics.cycles for r in requests),
        acceptance_length=sum(runs) / len(runs) if runs else 0.0,
        accepted_per_position=positions,
        prefill_seconds=prefill,
        decode_seconds=decode,
        tokens_per_second=later / decode if decode > 0 else 0.0,
        cached_tokens=sum(r.metrics.cached_tokens for r in requests),
        lossy=plan.accept.lossy,
        synthetic=plan.accept.synthetic,
        numerics=plan.numerics,
        activations=plan.activations,
    )


def make_output(request: Request, text: OutputText | None, plan: Plan) -> Output:
    """What a call returns for a request that has ended.

    Args:
        request: has ended.
        text: its text, nothing pushed yet; None: it has none.
        plan: it ran under.
    """
    return Output(
        index=request.index,
        prompt_token_ids=request.prompt,
        token_ids=request.output,
        text=text.push(request.output, last=True) if text is not None else "",
        finish_reason=request.finish_reason or "error",
        error=request.error,
        metrics=summarise([request], plan),
        seed=request.seed,
        logprobs=request.logprobs if request.params.logprobs is not None else None,
        sample=request.sample,
        stop_reason=request.stop_reason(text.stop if text is not None else None),
        prompt_logprobs=request.scored_prompt,
        timing=request.metrics,
    )


ENDS = (Status.STOPPED, Status.LENGTH, Status.FAILED)


class StopTexts:
    """Stop texts in a growing text, found in a time per character that does not depend on how many there are.

    The automaton of Aho and Corasick (Communications of the ACM 18(6), 1975). A state is the longest end of the text that a stop text
    begins with; 0 is the empty one.

    Args:
        stops: the texts, none of them empty.

    Attributes:
        ends: by state, the longest stop text that ends there; empty: none does.
        held: by state, the most characters at the end with which a stop text begins, not all of it.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.ends, self.held, self._fail = [""], [0], [0]
        self._children: list[dict[str, int]] = [{}]
        for stop in stops:
            state = 0
            for character in stop:
                found = self._children[state].setdefault(character, len(self.ends))
                if found == len(self.ends):
                    self.ends.append("")
                    self.held.append(0)
                    self._fail.append(0)
                    self._children.append({})
                state = found
            self.ends[state] = stop
        # By depth: what a state falls back to is shorter.
        level, depth = [0], 0
        while level:
            below = []
            for state in level:
                fail = self._fail[state]
                self.ends[state] = self.ends[state] or self.ends[fail]
                self.held[state] = depth if self._children[state] else self.held[fail]
                for character, child in self._children[state].items():
                    self._fail[child] = self.step(fail, character) if state else 0
                    below.append(child)
            level, depth = below, depth + 1

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        while state and character not in self._children[state]:
            state = self._fail[state]
        return self._children[state].get(character, 0)


automaton = lru_cache(maxsize=4)(StopTexts)
"""The automaton of a tuple of stop texts, cached: a request asks several times for its own."""


class OutputText:
    """Text of one request's output, token by token: what was returned is final, and what might begin a stop text is held back.

    A stop text may begin and end inside tokens, and inside the run of a cycle. It is looked for after each token, in the text with its
    special tokens, also where the text that is returned leaves them out. Tokens after the one in which it ended never become part of the
    output.

    Args:
        tokenizer: the checkpoint's.
        params: of the request. Its seed does not matter.
        prompt: of the request; the output's text continues the prompt's, which comes first if the request wants an echo.

    Attributes:
        count: tokens so far, at most up to the one in which a stop text ended.
        stop: that stop text; None: none was found.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt: Sequence[int] = ()) -> None:
        self._tokenizer, self._params = tokenizer, params
        self._stops = automaton(tuple(params.stop)) if params.stop else None
        self._state = 0
        self._pieces = Detokenizer(
            tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            kept_special_tokens=params.kept_special_tokens,
            prompt=() if params.echo else prompt,
        )
        self._held = ""
        self._seen: list[bool] = []
        """Whether each character that is held is part of the text."""
        self._echo = "".join(map(self._pieces.push, prompt)) if params.echo else ""
        self.count = 0
        self.stop: str | None = None

    def push(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """Append tokens of the output; returns the text that is final now.

        Args:
            tokens: read up to the one in which a stop text ends.
            last: none follow, so nothing is held back any more.
        """
        text, self._echo = self._echo, ""
        for token in tokens:
            if self.stop is not None:
                break
            self.count += 1
            if token in self._pieces.hidden:
                text += self._search(self._tokenizer.token_text(token), seen=False) if self._stops else ""
            else:
                text += self._search(self._pieces.push(token))
        if last and self.stop is None:
            text += self._search(self._pieces.rest())
            text, self._held, self._seen = text + "".join(compress(self._held, self._seen)), "", []
        return text

    def _search(self, fresh: str, *, seen: bool = True) -> str:
        """The part of the held text and the fresh one that is final; notes a stop text that ends in the fresh one.

        Args:
            fresh: follows the held text.
            seen: it is part of the text that is returned.
        """
        if self._stops is None:
            return fresh
        text, known = self._held + fresh, len(self._held)
        self._seen += [seen] * len(fresh)
        wanted = self.count > self._params.min_tokens
        for place, character in enumerate(fresh, known + 1):
            self._state = self._stops.step(self._state, character)
            if wanted and (stop := self._stops.ends[self._state]):
                self.stop, self._held, begin = stop, "", place - len(stop)
                return "".join(compress(text[:begin], self._seen)) + (stop if self._params.include_stop_str_in_output else "")
        final = len(text) - self._stops.held[self._state]
        shown = "".join(compress(text[:final], self._seen))
        self._held, self._seen = text[final:], self._seen[final:]
        return shown


class StopCheck:
    """Looks for a request's stop texts where its tokens come in.

    Args:
        make: its text from the beginning.
    """

    def __init__(self, make: Callable[[], OutputText]) -> None:
        self._make = make
        self._text = make()

    def again(self) -> StopCheck:
        """The same for another output."""
        return StopCheck(self._make)

    def cut(self, output: Sequence[int], tokens: list[int], status: int) -> tuple[list[int], int]:
        """The tokens of a run up to the end of a stop text, and the row's status: ``Status.STOPPED`` if there is one.

        Args:
            output: of the request before the run.
            tokens: of the run.
            status: of the row after it.
        """
        before = len(output)
        if self._text.count != before:
            # An interrupt came between this and the output.
            self._text = self._make()
            self._text.push(output)
        self._text.push(tokens, last=status in ENDS)
        return (tokens, status) if self._text.stop is None else (tokens[: self._text.count - before], Status.STOPPED)


class NothingNew:
    """Ends a request that wants no new token where its prompt has been read."""

    def again(self) -> NothingNew:
        """The same for another output."""
        return self

    def cut(self, output: Sequence[int], tokens: list[int], status: int) -> tuple[list[int], int]:
        """No token, and the row's status: ``Status.LENGTH`` unless the row failed or lives."""
        return [], Status.LENGTH if status == Status.STOPPED else status


def overlap(text: str, stop: str) -> int:
    """Characters at the end of ``text`` with which ``stop`` begins, not all of it."""
    return next((length for length in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:length])), 0)
