"""Limits of the server: requests at once, sizes of fields, and API keys."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..config.checks import LONGEST_FIELD
from ..config.paths import reason
from ..errors import ConfigError
from ..plan.plan import Plan
from .errors import ApiError, bad_field, busy

Result = TypeVar("Result")
RETRY_SECONDS = 1


@dataclass(frozen=True, slots=True)
class Bound:
    """The most that a field of a body may hold. It is checked by length alone, before anything else is done with the field.

    Attributes:
        field: of the body.
        why: what the bound saves.
        entries: of a list or an object; None: the field is one text.
        characters: of a text, of each text in a list, and of each key and text in an object.
        option: of ``runtime``, by which ``entries`` may be more.
    """

    field: str
    why: str
    entries: int | None = None
    characters: int | None = None
    option: str = ""

    @property
    def limit(self) -> str:
        """The bound in words."""
        entries = f"{self.entries:,} entries" if self.entries is not None else ""
        more = f", or `runtime.{self.option}` if that is more" if self.option else ""
        characters = f"{self.characters:,} characters" if self.characters is not None else ""
        return "; ".join(part for part in (entries + more, characters + " each" if entries and characters else characters) if part)


BOUNDS = (
    Bound("stop", "an automaton is built of them; OpenAI takes 4", 32, 1024),
    Bound("stop_token_ids", "they have places in a row's parameters", 64, option="max_stop_ids"),
    Bound("bad_words", "every one is encoded twice", 128, 256, "max_bad_words"),
    Bound("logit_bias", "OpenAI's limit; a key is a token id", 300, 20, "max_logit_bias"),
    Bound("allowed_token_ids", "they are sorted and packed for the row", LONGEST_FIELD),
    Bound("messages", "the template runs once for each", 2048),
    Bound("tools", "the template, and a grammar, have each of them", 128),
    Bound("chat_template_kwargs", "the template has them", 64),
    Bound("metadata", "OpenAI's limits; it is not read", 16, 512),
    Bound("user", "it is not read", None, 512),
    Bound("safety_identifier", "it is not read", None, 512),
    Bound("prompt_cache_key", "it is not read", None, 512),
    Bound("request_id", "it is not read", None, 512),
    Bound("cache_salt", "it is hashed for every request", None, 512),
    Bound("model", "it is compared with the model's name", None, 512),
)
"""Bounds of fields, for every route that has them."""


def check_bounds(data: Mapping[str, Any], plan: Plan) -> None:
    """Check the sizes of a body's fields; their types are checked later.

    Raises:
        ApiError: 400, one of :data:`BOUNDS` is exceeded.
    """
    for bound in BOUNDS:
        value = data.get(bound.field)
        texts: Sequence[Any] = ()
        if isinstance(value, str):
            texts = (value,)
        elif isinstance(value, list | dict):
            maximum = max(bound.entries or 0, getattr(plan, bound.option) if bound.option else 0)
            if len(value) > maximum:
                raise bad_field(bound.field, f"at most {maximum} entries", len(value))
            texts = [*value, *value.values()] if isinstance(value, dict) else value
        if bound.characters is not None:
            longest = max((len(text) for text in texts if isinstance(text, str)), default=0)
            if longest > bound.characters:
                raise bad_field(bound.field, f"at most {bound.characters} characters in a text", longest)


def check_prompt_sizes(prompt: object, plan: Plan, slots: int) -> None:
    """Check the lengths of the lists in ``prompt``.

    Raises:
        ApiError: 400, more prompts than the server has slots, or more token ids than fit the context.
    """
    if not isinstance(prompt, list) or not prompt:
        return
    lists = [prompt] if type(prompt[0]) is int else prompt
    if len(lists) > slots:
        raise bad_field("prompt", f"at most {slots} prompts", len(lists))
    longest = max((len(entry) for entry in lists if isinstance(entry, list)), default=0)
    if longest >= plan.max_context:
        expected = f"at most {plan.max_context - 1} tokens (max_context {plan.max_context}, one of them new)"
        raise bad_field("prompt", expected, f"{longest} tokens")


class ClientGone(Exception):  # noqa: N818 - not an error
    """The client disconnected before its response."""


class Slots:
    """Slots for requests that run or wait.

    Args:
        maximum: number of slots.
    """

    def __init__(self, maximum: int) -> None:
        self.maximum, self.taken = maximum, 0

    @contextmanager
    def take(self, count: int) -> Iterator[None]:
        """A context that holds ``count`` slots.

        Raises:
            ApiError: 503, fewer are free now; 400, there are fewer in all.
        """
        if count > self.maximum:
            raise ApiError(400, f"expected at most {self.maximum} outputs in one request, found {count}", "n")
        if self.taken + count > self.maximum:
            raise busy(RETRY_SECONDS)
        self.taken += count
        try:
            yield
        finally:
            self.taken -= count


class Keys:
    """The API keys that are accepted.

    Args:
        keys: a request needs one of them; empty: it needs none.
    """

    def __init__(self, keys: Sequence[str] = ()) -> None:
        self._keys = [key.encode() for key in keys]

    @classmethod
    def read(cls, file: Path) -> Keys:
        """Keys from a file, one per line.

        Raises:
            ConfigError: it can't be read, or has none.
        """
        try:
            keys = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("server.api_key_file", "a file of keys, one per line", f"{file}: {reason(error)}") from error
        if not keys:
            raise ConfigError("server.api_key_file", "at least one key", f"none in {file}")
        return cls(keys)

    def check(self, header: str | None) -> None:
        """Check the ``Authorization`` header, in a time that does not depend on how many characters are right.

        Raises:
            ApiError: 401.
        """
        if not self._keys:
            return
        scheme, _, token = (header or "").partition(" ")
        # Header values are bytes, which Starlette shows as Latin-1; keys are UTF-8.
        given = token.strip().encode("latin-1", "replace")
        # All keys are compared, so that the time does not reveal which one nearly matched.
        if not sum(hmac.compare_digest(given, key) for key in self._keys) or scheme.lower() != "bearer":
            raise ApiError(401, "expected a valid API key as Authorization: Bearer KEY", code="invalid_api_key")


async def unless_gone(receive: Callable[[], Awaitable[Any]], work: Awaitable[Result]) -> Result:
    """The result of ``work``, which is cancelled if the client disconnects.

    Args:
        receive: of a request whose body has been read.
        work: that makes the response.

    Raises:
        ClientGone: the client disconnected first.
    """

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(watch())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
