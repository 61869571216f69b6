"""Priorities, deadlines and cache salts: arguments of a call, one for all of its prompts or one for each."""

from __future__ import annotations

from collections.abc import Sequence

from ..config.checks import in_range, real, typed, whole
from ..engine.request import Request
from ..errors import RequestError
from ..text.tokenizer import check_text

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
