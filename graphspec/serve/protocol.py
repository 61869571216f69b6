"""Request bodies: their fields, and the :class:`~graphspec.engine.request.SamplingParams` that follow from them.

Field names are OpenAI's, and vLLM's where OpenAI has none. A field that is null counts as absent. Unknown fields are refused, all of them
in one error, except those without an effect: :data:`NO_BEARING`, and :data:`NEUTRAL` at these values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from ..api.prompts import Prompt, TextPrompt
from ..config.checks import brief, check_fields
from ..config.hints import hint_for_sampling
from ..engine.request import SamplingParams
from ..errors import RequestError
from ..shapes import SamplingDefaults
from ..text.structured import Structured
from .errors import ApiError

Kind = TypeVar("Kind")
NO_BEARING = frozenset({"user", "safety_identifier", "prompt_cache_key", "metadata", "request_id"})
"""Fields that only the client's records use."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "spaces_between_special_tokens": (True,),
    "functions": ([],),
    "modalities": (["text"],),
    "verbosity": ("medium",),
}
"""Fields that are accepted only at these values, where they have no effect."""
COMPLETION_TOKENS = 16
"""OpenAI's default of new tokens for a completion."""
TEMPERATURE = 1.0
"""OpenAI's default."""
PASSED_ON = (
    "top_p", "seed", "stop", "presence_penalty", "frequency_penalty", "top_k", "min_p", "repetition_penalty", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens", "allowed_token_ids", "bad_words", "speculate",
    "num_steps",
)  # fmt: skip
"""Fields that :class:`SamplingParams` has under the same name, with the same meaning."""


@dataclass(kw_only=True)
class StreamOptions:
    """Where a stream reports usage.

    Attributes:
        include_usage: in a last chunk without choices.
        continuous_usage_stats: in every chunk.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "stream_options", error=RequestError)


@dataclass(kw_only=True)
class Body(ABC):
    """Fields of both kinds of requests. Absent ones are None or have their default."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int = 1
    seed: int | None = None
    stop: Sequence[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[str, float] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    prompt_logprobs: int | None = None
    speculate: bool | None = None
    num_steps: int | None = None
    priority: int = 0
    cache_salt: str | None = None
    stream: bool = False
    stream_options: Mapping[str, Any] | None = None
    echo: bool = False
    structured_outputs: Mapping[str, Any] | None = None
    response_format: Any = None
    add_special_tokens: bool | None = None
    return_token_ids: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "", error=RequestError)
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options", "nothing without stream", brief(dict(self.stream_options)))
        self.streaming = parse(StreamOptions, self.stream_options or {}, "stream_options.")

    @property
    @abstractmethod
    def alternatives(self) -> int | None:
        """Number of alternatives with log-probabilities for each new token; None: no log-probabilities."""

    @property
    def scored_prompt(self) -> int | None:
        """The same for the prompt's tokens."""
        return self.prompt_logprobs

    @abstractmethod
    def new_tokens(self, most: int) -> int:
        """The most new tokens of each output; ``most``: the server's limit."""

    def params(
        self, most: int, defaults: SamplingDefaults, structured: Structured | None = None, kept: Sequence[str] = ()
    ) -> SamplingParams:
        """Sampling parameters of the request.

        Where it says nothing they are the checkpoint's, but a temperature only if the checkpoint is sampled: else that is OpenAI's default.

        Args:
            most: the server's limit of new tokens.
            defaults: of the checkpoint.
            structured: format of its output; None: free.
            kept: special tokens that stay in its text.

        Raises:
            RequestError: a value out of range.
        """
        new = self.new_tokens(most)
        if new > most:
            raise RequestError("max_tokens", f"at most {most}", new)
        given: dict[str, Any] = {name: value for name in PASSED_ON if (value := getattr(self, name)) is not None}
        given |= {
            "logprobs": self.alternatives,
            "prompt_logprobs": self.scored_prompt,
            "logit_bias": self._bias(),
            "kept_special_tokens": kept,
        }
        temperature = TEMPERATURE if self.temperature is None and defaults.temperature == 0 else self.temperature
        return SamplingParams(max_tokens=new, temperature=temperature, n=self.n, echo=self.echo, structured=structured, **given)

    def _bias(self) -> dict[int, float] | None:
        if self.logit_bias is None:
            return None
        for token in self.logit_bias:
            if not token.isascii() or not token.isdigit():
                raise RequestError("logit_bias", "token ids", brief(token))
        return {int(token): value for token, value in self.logit_bias.items()}


@dataclass(kw_only=True)
class CompletionBody(Body):
    """``/v1/completions``."""

    prompt: Any = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt is None:
            raise RequestError("prompt", "a text, a list of texts, token ids, or a list of these", "nothing")

    @property
    def scored_prompt(self) -> int | None:
        return self.prompt_logprobs if self.prompt_logprobs is not None or not self.echo else self.logprobs

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    def new_tokens(self, most: int) -> int:
        return min(COMPLETION_TOKENS, most) if self.max_tokens is None else self.max_tokens

    def prompts(self, *, special_tokens_as_text: bool) -> list[Prompt]:
        """Its prompts, one or several.

        Args:
            special_tokens_as_text: texts of special tokens in them are text.

        Raises:
            RequestError: neither texts nor token ids, or an empty list.
        """
        given = self.prompt
        if isinstance(given, str) or (isinstance(given, list) and given and all(type(entry) is int for entry in given)):
            given = [given]
        fine = isinstance(given, list) and given
        if not fine or not all(isinstance(p, str) or (isinstance(p, list) and all(type(entry) is int for entry in p)) for p in given):
            raise RequestError("prompt", "a text, a list of texts, token ids, or a list of these", "something else")
        around = self.add_special_tokens is not False
        return [
            TextPrompt(prompt=entry, add_special_tokens=around, special_tokens_as_text=special_tokens_as_text)
            if isinstance(entry, str)
            else entry
            for entry in given
        ]


@dataclass(kw_only=True)
class ChatBody(Body):
    """``/v1/chat/completions``."""

    messages: Any = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: Mapping[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.messages, list) or not self.messages:
            raise RequestError("messages", "a list of at least one message", "something else")
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs", "nothing without logprobs", self.top_logprobs)
        if self.add_generation_prompt is self.continue_final_message:
            expected = "true, or false with continue_final_message"
            raise RequestError("add_generation_prompt", expected, self.add_generation_prompt)
        if self.echo:
            raise RequestError("echo", "false in chat", True)

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def new_tokens(self, most: int) -> int:
        wanted = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return most if wanted is None else wanted


def parse(kind: type[Kind], data: Mapping[str, Any], prefix: str = "") -> Kind:
    """Make a dataclass from the fields of a JSON object.

    Raises:
        ApiError: 400, naming every field that is not supported.
        RequestError: a value of another type.
    """
    given = {name: value for name, value in data.items() if value is not None}
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    others = [name for name in given if name not in known and name not in NO_BEARING]
    refused = [name for name in others if name not in NEUTRAL or given[name] not in NEUTRAL[name]]
    if refused:
        spelled = {name: brief(prefix + name, 200).strip("'") for name in refused}
        hints = {name: hint for name in refused if (hint := hint_for_sampling(name, known))}
        hint = "; ".join(f"{spelled[name]}: {text}" for name, text in hints.items())
        message = f"unsupported: {', '.join(spelled.values())}" + f" ({hint})" * bool(hint)
        raise ApiError(400, message, spelled[refused[0]], "unsupported_field")
    return kind(**{name: value for name, value in given.items() if name in known})


def check_model(requested: str | None, served: str) -> None:
    """Check the model that a request names.

    Raises:
        ApiError: 404, the server has another one.
    """
    if requested is not None and requested != served:
        raise ApiError(404, f"expected model {served!r}, found {brief(requested)}", "model", "model_not_found")
