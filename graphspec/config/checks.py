"""Checks of user input: exact types, finite numbers, ranges. Standard library only.

A bool is no integer, a float is no integer, an integer is a number; numpy's numbers count as what they are. Values are
returned in their plain Python types; errors have the given class and name key, expected and found.
"""

from __future__ import annotations

import difflib
import functools
import operator
import os
import reprlib
import types
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import pairwise
from numbers import Integral, Real
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from ..errors import ConfigError, GraphspecError, RequestError

Errors = type[GraphspecError]
Temperature = TypeVar("Temperature", float, float | None)

INT32_MAX, INT64_MAX = 2**31 - 1, 2**63 - 1
FLOAT32_MIN = 2.0**-126
"""The smallest float32 above 0 that is not denormal; CPUs flush smaller ones to 0."""
SHOWN, LONG = 60, 200
"""Characters of a value that an error message shows, and of a path, a name or a word."""
LONGEST_FIELD = 65536
"""Most integers of a field; a range can claim any length."""
MAX_SIZES = 1024
"""Most entries of a list of sizes."""

_SYNONYMS = {"gpu": "cuda", "half": "float16", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
"""Words that other programs have for a choice of ours."""
_SINGULAR = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
_PLURAL = {int: "integers", float: "numbers", bool: "truth values", str: "texts"}


def cut(text: str, maximum: int = LONG) -> str:
    """``text``, or the beginning of a longer one."""
    return text if len(text) <= maximum else text[:maximum] + "..."


def brief(value: object, maximum: int = SHOWN) -> str:
    """A short text of ``value``, on one line, however deeply it is nested, even if its own ``repr`` fails."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = maximum
    try:
        return cut(" ".join(short.repr(value).split()), 2 * LONG)
    except Exception:  # noqa: BLE001  a repr that fails, or an integer of too many digits
        return "a value that can't be shown"


def typed(value: object) -> str:
    """:func:`brief`, and the type where the text alone may not tell it."""
    return "None" if value is None else f"{brief(value)} ({type(value).__name__})"


def whole(key: str, value: object, error: Errors = ConfigError, expected: str = "an integer") -> int:
    """``value`` as an int.

    Raises:
        GraphspecError: of class ``error``: anything but an integer; bools and floats are none.
    """
    if type(value) is int:
        return value
    if type(value) is not bool and isinstance(value, Integral):
        try:
            return operator.index(value)
        except Exception as reason:
            raise error(key, expected, typed(value)) from reason
    raise error(key, expected, typed(value))


def real(key: str, value: object, error: Errors = ConfigError) -> float:
    """``value`` as a float.

    Raises:
        GraphspecError: of class ``error``: anything but a number, or one that is not finite as a float.
    """
    if type(value) is bool or not isinstance(value, Real):
        raise error(key, "a number", typed(value))
    try:
        number = float(value)
    except Exception as reason:
        raise error(key, "a finite number", typed(value)) from reason
    if number - number != 0:
        raise error(key, "a finite number", number)
    return number


def integers(
    key: str, value: object, error: Errors = ConfigError, *, maximum: int | None = None, expected: str = "an integer"
) -> list[int]:
    """A list, tuple, range, other sequence or one-dimensional integer array as a list of ints.

    Args:
        key: of the whole; an entry's is ``key[place]``.
        value: what was given.
        error: class of the error.
        maximum: longest that is read.
        expected: what an entry should be.

    Raises:
        GraphspecError: of class ``error``: something else, too long, or an entry that is no integer.
    """
    kind = "a list of integers"
    try:
        if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview):
            length = len(value)
        elif is_array(value) and len(value.shape) == 1:  # type: ignore[attr-defined]
            length = int(value.shape[0])  # type: ignore[attr-defined]
        else:
            raise error(key, f"{kind}, or a one-dimensional array of them", typed(value))
        if maximum is not None and length > maximum:
            raise error(key, f"at most {maximum} entries", length)
        entries = list(value) if isinstance(value, Sequence) else value.tolist()  # type: ignore[attr-defined]
    except GraphspecError:
        raise
    except Exception as reason:
        raise error(key, kind, f"{type(value).__name__} that can't be read: {type(reason).__name__}: {brief(str(reason))}") from reason
    if all(type(entry) is int for entry in entries):
        return entries
    return [whole(f"{key}[{place}]", entry, error, expected) for place, entry in enumerate(entries)]


def is_array(value: object) -> bool:
    """Whether ``value`` is an array or a tensor, judged by its attributes; imports no array library."""
    return all(hasattr(type(value), name) for name in ("shape", "dtype", "tolist", "__len__"))


def check(key: str, ok: bool, expected: str, found: object) -> None:
    """Check a condition.

    Raises:
        ConfigError: it does not hold.
    """
    if not ok:
        raise ConfigError(key, expected, found)


def in_range(
    key: str, value: float | None, minimum: float, maximum: float | None = None, *, above: bool = False, error: Errors = ConfigError
) -> None:
    """Check a number of the right type.

    Args:
        key: of the number.
        value: the number; None: it is not set, which passes.
        minimum: lower bound.
        maximum: upper bound; None: there is none.
        above: ``minimum`` itself is out.
        error: class of the error.

    Raises:
        GraphspecError: of class ``error``: out of range.
    """
    if value is not None and (value < minimum or (above and value == minimum) or (maximum is not None and value > maximum)):
        kind = "an integer" if isinstance(value, int) else "a number"
        lower = f"above {spell(minimum)}" if above else f">= {spell(minimum)}"
        raise error(key, f"{kind} {lower}" + ("" if maximum is None else f", at most {spell(maximum)}"), brief(value))


def usable_temperature(temperature: Temperature) -> Temperature:
    """The temperature, or 0 for one below the smallest normal float32: devices flush it to 0."""
    return 0.0 if temperature is not None and 0 < temperature < FLOAT32_MIN else temperature


def spell(number: float) -> str:
    """Integers in full, other numbers without trailing zeros, the largest integers as powers."""
    powers = {INT32_MAX: "2^31 - 1", INT64_MAX: "2^63 - 1", -(2**63): "-2^63"}
    return powers.get(number, str(number)) if isinstance(number, int) else f"{number:g}"


def one_of(key: str, value: str, allowed: Collection[str]) -> None:
    """Check a choice.

    Raises:
        ConfigError: ``value`` is none of ``allowed``.
    """
    if value not in allowed:
        raise ConfigError(key, list(allowed), brief(value), closest(_SYNONYMS.get(value, value), allowed))


def closest(word: str, known: Collection[str]) -> str:
    """A hint with the word of ``known`` that is nearest to ``word``; empty where none is near."""
    matches = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {matches[0]}?" if matches else ""


def ascending(key: str, sizes: Sequence[int], minimum: int, maximum: int, *, empty: bool = False) -> None:
    """Check a list of sizes.

    Args:
        key: of the list.
        sizes: the list.
        minimum, maximum: bounds of a size.
        empty: the list may have none.

    Raises:
        ConfigError: empty, too long, not ascending, or a size out of range.
    """
    ordered = all(before < after for before, after in pairwise(sizes))
    if not (sizes or empty) or not ordered or len(sizes) > MAX_SIZES or (sizes and not minimum <= sizes[0] <= sizes[-1] <= maximum):
        positive = "positive sizes" if minimum == 1 else f"numbers >= {minimum}"
        kind = ("an" if empty else "a non-empty") + f" ascending list of {positive}, at most {maximum}"
        raise ConfigError(key, kind, brief(list(sizes)) if len(sizes) <= MAX_SIZES else f"{len(sizes)} of them")


def path(key: str, value: object, error: Errors = ConfigError) -> str:
    """A path as text.

    Raises:
        GraphspecError: of class ``error``: neither text nor a path, empty, or with a character no file system takes.
    """
    if not isinstance(value, str | os.PathLike):
        raise error(key, "a path", typed(value))
    try:
        text = os.fspath(value)
        bad = not isinstance(text, str) or not text or b"\0" in os.fsencode(text)
    except Exception as reason:
        raise error(key, "a path", typed(value)) from reason
    if bad:
        raise error(key, "a path, not empty and without null characters", brief(text))
    return str(text)


def check_fields(instance: Any, group: str, *, paths: Collection[str] = (), error: Errors = ConfigError) -> None:
    """Check every field of a dataclass against its annotation, and put plain Python values in the fields' places.

    Understood are int, float, bool, str, ``Any`` and dataclasses; optional ones; lists, sequences (made tuples) and mappings of them.
    A single string is accepted where a sequence of strings is expected.

    Args:
        instance: of the dataclass; call this first in its ``__post_init__``.
        group: prefix of the keys; empty: none.
        paths: fields of text that are paths, or lists of them.
        error: class of the errors.

    Raises:
        GraphspecError: of class ``error``: a value of another type, or a number that is not finite.
    """
    kind: type = type(instance)
    hints = _hints(kind)
    for field in fields(instance):
        key = f"{group}.{field.name}" if group else field.name
        value = conform(key, getattr(instance, field.name), hints[field.name], error, is_path=field.name in paths)
        object.__setattr__(instance, field.name, value)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def conform(key: str, value: Any, wanted: Any, error: Errors, *, is_path: bool = False) -> Any:
    """``value`` converted to the type of an annotation; see :func:`check_fields`."""
    origin, args = get_origin(wanted), get_args(wanted)
    if origin in (Union, types.UnionType):
        [inner] = [arg for arg in args if arg is not types.NoneType]
        return None if value is None else conform(key, value, inner, error, is_path=is_path)
    if wanted is Any:
        return value
    if wanted is int:
        return whole(key, value, error)
    if wanted is float:
        return real(key, value, error)
    if wanted is str and is_path:
        return path(key, value, error)
    if origin is list and isinstance(value, list | tuple):
        return [conform(f"{key}[{place}]", entry, args[0], error, is_path=is_path) for place, entry in enumerate(value)]
    if origin is Sequence and args == (int,):
        return tuple(integers(key, value, error, maximum=LONGEST_FIELD))
    if origin is Sequence and args == (str,) and isinstance(value, str | list | tuple):
        return tuple(
            conform(f"{key}[{place}]", entry, str, error) for place, entry in enumerate([value] if isinstance(value, str) else value)
        )
    if origin in (dict, Mapping) and isinstance(value, Mapping):
        return _entries(key, value, args, error)
    if isinstance(wanted, type) and origin is None and isinstance(value, wanted) and (wanted is not bool or type(value) is bool):
        return value
    raise error(key, spell_type(wanted), typed(value))


def _entries(key: str, value: Mapping[Any, Any], args: tuple[Any, ...], error: Errors) -> dict[Any, Any]:
    try:
        pairs = list(value.items())
    except Exception as reason:
        raise error(key, "a mapping", f"{type(value).__name__} that can't be read") from reason
    return {conform(key, entry, args[0], error): conform(f"{key}[{brief(entry)}]", inner, args[1], error) for entry, inner in pairs}


def spell_type(wanted: Any, *, many: bool = False) -> str:
    """An annotation in words: ``a list of integers``; the plural with ``many``."""
    origin, args = get_origin(wanted), get_args(wanted)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if arg is types.NoneType else spell_type(arg, many=many) for arg in args)
    if origin in (list, Sequence):
        return ("lists" if many else "a list") + f" of {spell_type(args[0], many=True)}"
    if origin in (dict, Mapping):
        keys, values = (spell_type(arg, many=True) for arg in args)
        return ("mappings" if many else "a mapping") + f" of {keys} to {values}"
    if is_dataclass(wanted):
        return f"an object of class {getattr(wanted, '__name__', wanted)}"
    return (_PLURAL if many else _SINGULAR).get(wanted, str(wanted))


MAX_SAMPLES = 65536
"""Most outputs of one prompt. Far above real use, to catch typing errors."""
TEMPERATURES = (0, 1e5)
"""Bounds of a temperature; noise multiplied by the largest stays finite in float32."""
REPETITIONS = (0.01, 100.0)
"""Bounds of the repetition penalty: what it makes of a logit is finite in float32 up to logits of 3e36."""
PENALTY_LIMIT = 2.0
BIAS_LIMIT = 100.0
SEEDS = (-(2**63), 2**64 - 1)


def check_defaults(params: Any, prefix: str, error: Errors) -> None:
    """Check the bounds of the fields of :class:`SamplingDefaults`; their types are checked already. None passes: it says nothing.

    Raises:
        GraphspecError: of class ``error``; names ``prefix`` and the field.
    """
    in_range(f"{prefix}temperature", params.temperature, *TEMPERATURES, error=error)
    in_range(f"{prefix}top_k", params.top_k, -1, INT64_MAX, error=error)
    in_range(f"{prefix}repetition_penalty", params.repetition_penalty, *REPETITIONS, error=error)
    if params.top_p is not None and not FLOAT32_MIN <= params.top_p <= 1:
        raise error(f"{prefix}top_p", f"a number above 0 ({FLOAT32_MIN:.0e} or more), at most 1", params.top_p)
    if params.min_p and not FLOAT32_MIN <= params.min_p <= 1:
        raise error(f"{prefix}min_p", f"0, or a number of {FLOAT32_MIN:.0e} or more, at most 1", params.min_p)


def check_sampling(params: Any, error: Errors) -> None:
    """Check the bounds of :class:`SamplingConfig` and ``SamplingParams`` that depend on no engine; their types are checked already.

    Raises:
        GraphspecError: of class ``error``; names ``sampling.<field>``.
    """
    check_defaults(params, "sampling.", error)
    # Without a new token there is still a prompt to return.
    scores = getattr(params, "echo", False) or getattr(params, "prompt_logprobs", None) is not None
    limits: dict[str, tuple[float, float]] = {
        "max_tokens": (0 if scores else 1, INT64_MAX),
        "presence_penalty": (-PENALTY_LIMIT, PENALTY_LIMIT),
        "frequency_penalty": (-PENALTY_LIMIT, PENALTY_LIMIT),
    }
    for name, (minimum, maximum) in limits.items():
        in_range(f"sampling.{name}", getattr(params, name), minimum, maximum, error=error)
    if params.seed is not None and not SEEDS[0] <= params.seed <= SEEDS[1]:
        raise error("sampling.seed", "null, or a 64-bit integer", brief(params.seed))
    in_range("sampling.n", params.n, 1, MAX_SAMPLES, error=error)
    if params.n > 1 and params.temperature == 0:
        raise error("sampling.n", "1 at temperature 0, where all outputs would be the same", params.n)
    longest = INT64_MAX if params.max_tokens is None else params.max_tokens
    maximum = min(longest, INT32_MAX)
    if not 0 <= params.min_tokens <= maximum:
        whose = " = max_tokens" if maximum == longest else ""
        raise error("sampling.min_tokens", f"an integer >= 0, at most {maximum}{whose}", brief(params.min_tokens))
    in_range("sampling.logprobs", params.logprobs, 0, INT32_MAX, error=error)
    for name in ("stop_token_ids", "allowed_token_ids"):
        for place, token in enumerate(getattr(params, name) or ()):
            in_range(f"sampling.{name}[{place}]", token, 0, INT64_MAX, error=error)
    if params.allowed_token_ids is not None and not params.allowed_token_ids:
        raise error("sampling.allowed_token_ids", "null, or at least one token id", [])
    for name in ("stop", "bad_words"):
        for place, text in enumerate(getattr(params, name) or ()):
            if not text.strip() if name == "bad_words" else not text:
                raise error(f"sampling.{name}[{place}]", "text that is not empty", repr(text))
    for token, value in (params.logit_bias or {}).items():
        in_range("sampling.logit_bias", token, 0, INT64_MAX, error=error)
        in_range(f"sampling.logit_bias[{token}]", value, -BIAS_LIMIT, BIAS_LIMIT, error=error)


def check_text(key: str, text: Any) -> str:
    """``text``, which is text that UTF-8 can hold.

    Raises:
        RequestError: something else, or half of a surrogate pair.
    """
    if not isinstance(text, str):
        raise RequestError(key, "text", typed(text))
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(key, "text in UTF-8", f"the lone surrogate U+{ord(text[error.start]):04X} at character {error.start}") from error
    return str(text)
