"""Request bodies: their fields, and the :class:`~graphspec.engine.request.SamplingParams` that follow from them.

Field names are OpenAI's, and vLLM's where OpenAI has none. A field that is null counts as absent. Unknown fields are refused, all of them
in one error, except those without an effect: :data:`NO_BEARING`, and :data:`NEUTRAL` at these values. A value of another type is never
converted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from ..api.prompts import Prompt, TextPrompt
from ..config.checks import brief, typed
from ..config.hints import hint_for_sampling
from ..engine.request import SamplingParams
from ..errors import RequestError
from ..shapes import SamplingDefaults
from ..text.structured import Structured
from .errors import ApiError

Kind = TypeVar("Kind", bound="Fields")
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


WORDS = {
    "int_type": "an integer", "float_type": "a number", "finite_number": "a finite number", "bool_type": "true or false",
    "string_type": "text", "list_type": "a list", "dict_type": "an object", "model_type": "an object",
}  # fmt: skip
"""What pydantic's errors expect."""
UNQUOTED = {
    "prompt": "a text, a list of texts, token ids, or a list of these",
    "messages": "a list of at least one message",
}
"""What is expected of fields whose values no error shows."""


def _listed(given: object) -> object:
    return [given] if isinstance(given, str) else given


def _prompts(given: object) -> object:
    return [given] if isinstance(given, str) or (isinstance(given, list) and given and type(given[0]) is int) else given


class AtFirst(FailFast):
    """A list is refused at its first wrong entry: errors cost more than entries. Hashable, as unions need it."""

    __hash__ = object.__hash__


Ids = Annotated[list[int], AtFirst()]
Texts = Annotated[list[str], AtFirst(), BeforeValidator(_listed)]
Prompts = Annotated[list[str | Ids], AtFirst(), Field(min_length=1), BeforeValidator(_prompts)]


class Fields(BaseModel):
    """Fields of a JSON object."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    prefix: ClassVar[str] = ""
    """Prefix of its fields' names in errors."""

    @model_validator(mode="before")
    @classmethod
    def _only_known(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        given = {name: value for name, value in data.items() if value is not None}
        others = [name for name in given if name not in cls.model_fields and name not in NO_BEARING]
        refused = [name for name in others if name not in NEUTRAL or given[name] not in NEUTRAL[name]]
        if refused:
            spelled = {name: brief(cls.prefix + name, 200).strip("'") for name in refused}
            hints = {name: hint for name in refused if (hint := hint_for_sampling(name, cls.model_fields))}
            hint = "; ".join(f"{spelled[name]}: {text}" for name, text in hints.items())
            message = f"unsupported: {', '.join(spelled.values())}" + f" ({hint})" * bool(hint)
            raise ApiError(400, message, spelled[refused[0]], "unsupported_field")
        return given


class StreamOptions(Fields):
    """Where a stream reports usage.

    Attributes:
        include_usage: in a last chunk without choices.
        continuous_usage_stats: in every chunk.
    """

    prefix = "stream_options."
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Body(Fields, ABC):
    """Fields of both kinds of requests. Absent ones are None or have their default."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int = 1
    seed: int | None = None
    stop: Texts | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Ids | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: Ids | None = None
    bad_words: Texts | None = None
    prompt_logprobs: int | None = None
    speculate: bool | None = None
    num_steps: int | None = None
    priority: int = 0
    cache_salt: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    echo: bool = False
    structured_outputs: dict[str, Any] | None = None
    response_format: Any = None
    add_special_tokens: bool | None = None
    return_token_ids: bool = False

    @model_validator(mode="after")
    def _only_in_streams(self) -> Body:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options", "nothing without stream", brief(self.stream_options.model_dump(exclude_unset=True)))
        return self

    @property
    def streaming(self) -> StreamOptions:
        """Its stream options, or the default."""
        return self.stream_options or StreamOptions()

    @property
    @abstractmethod
    def alternatives(self) -> int | None:
        """Number of alternatives with log-probabilities for each new token; None: no log-probabilities."""

    @property
    def scored_prompt(self) -> int | None:
        """The same for the prompt's tokens."""
        return self.prompt_logprobs

    @abstractmethod
    def new_tokens(self, maximum: int) -> int:
        """The most new tokens of each output; ``maximum``: the server's limit."""

    def params(
        self, maximum: int, defaults: SamplingDefaults, structured: Structured | None = None, kept: Sequence[str] = ()
    ) -> SamplingParams:
        """Sampling parameters of the request.

        Where it says nothing they are the checkpoint's, but a temperature only if the checkpoint is sampled: else that is OpenAI's default.

        Args:
            maximum: the server's limit of new tokens.
            defaults: of the checkpoint.
            structured: format of its output; None: free.
            kept: special tokens that stay in its text.

        Raises:
            RequestError: a value out of range.
        """
        new = self.new_tokens(maximum)
        if new > maximum:
            raise RequestError("max_tokens", f"at most {maximum}", new)
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


class CompletionBody(Body):
    """``/v1/completions``."""

    prompt: Prompts
    logprobs: int | None = None

    @property
    def scored_prompt(self) -> int | None:
        return self.prompt_logprobs if self.prompt_logprobs is not None or not self.echo else self.logprobs

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    def new_tokens(self, maximum: int) -> int:
        return min(COMPLETION_TOKENS, maximum) if self.max_tokens is None else self.max_tokens

    def prompts(self, *, special_tokens_as_text: bool) -> list[Prompt]:
        """Its prompts, one or several.

        Args:
            special_tokens_as_text: texts of special tokens in them are text.
        """
        around = self.add_special_tokens is not False
        return [
            TextPrompt(prompt=entry, add_special_tokens=around, special_tokens_as_text=special_tokens_as_text)
            if isinstance(entry, str)
            else entry
            for entry in self.prompt
        ]


class ChatBody(Body):
    """``/v1/chat/completions``."""

    messages: Annotated[list[Any], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs", "nothing without logprobs", self.top_logprobs)
        if self.add_generation_prompt is self.continue_final_message:
            expected = "true, or false with continue_final_message"
            raise RequestError("add_generation_prompt", expected, self.add_generation_prompt)
        if self.echo:
            raise RequestError("echo", "false in chat", True)
        return self

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def new_tokens(self, maximum: int) -> int:
        wanted = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return maximum if wanted is None else wanted


class TextBody(Fields):
    """``/tokenize`` of a text."""

    model: str | None = None
    prompt: Any = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokensBody(Fields):
    """``/detokenize``."""

    model: str | None = None
    tokens: Ids


def parse(kind: type[Kind], data: Mapping[str, Any]) -> Kind:
    """Read the fields of a JSON object.

    Raises:
        ApiError: 400, naming every field that is not supported.
        RequestError: a value of another type, or one that contradicts another.
    """
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False)[0]) from error


def _refusal(error: ErrorDetails) -> RequestError:
    raised = error.get("ctx", {}).get("error")
    if isinstance(raised, RequestError):
        return raised
    name = str(error["loc"][0])
    missing = error["type"] == "missing"
    if name in UNQUOTED:
        return RequestError(name, UNQUOTED[name], "nothing" if missing else "something else")
    key = name + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"][1:])
    return RequestError(key, WORDS.get(error["type"], error["msg"]), "nothing" if missing else typed(error["input"]))


def check_model(requested: str | None, served: str) -> None:
    """Check the model that a request names.

    Raises:
        ApiError: 404, the server has another one.
    """
    if requested is not None and requested != served:
        raise ApiError(404, f"expected model {served!r}, found {brief(requested)}", "model", "model_not_found")
