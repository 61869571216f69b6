"""An op of the catalog: its reference and its other implementations.

The reference's annotated signature is the only source: the operator's schema, the arguments it writes, their dtypes and the inputs of
ahead-of-time compilation are derived from it. A parameter may be a *group*, a NamedTuple of tensors. An operator of torch takes flat
arguments, so its arguments are the fields of groups.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from ..errors import ConfigError

Case = dict[str, Any]
"""Arguments of one call by name; those of groups by the names of their fields."""

_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., Any])
_WRITTEN = "written"
Written = Annotated[_T, _WRITTEN]
"""A parameter, tensor or group, that the op writes in place; every other argument is read only."""
Bool = Annotated[Tensor, torch.bool]
Int8 = Annotated[Tensor, torch.int8]
Int32 = Annotated[Tensor, torch.int32]
Int64 = Annotated[Tensor, torch.int64]
"""Tensors of one dtype. A plain ``Tensor`` is of floating point."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One flat argument of an op.

    Attributes:
        name: unique in the op.
        kind: its type: a tensor, a number, or an optional one.
        dtype: of a tensor, as annotated; float32 stands for any floating point. None: it is no tensor.
        written: whether the op writes it in place.
        default: ``inspect.Parameter.empty``: none.
        group: the parameter of which it is a field; empty: none.
    """

    name: str
    kind: Any
    dtype: torch.dtype | None
    written: bool
    default: Any
    group: str = ""


class Signature:
    """A function's signature with flattened groups. Fields of a group that occurs several times have its parameter's name in front.

    Attributes:
        arguments: flat, in order.
        result: the annotated type of the result.
    """

    def __init__(self, function: Callable[..., Any], **instead: Any) -> None:
        """``instead``: types of parameters that the function takes as well as those it is annotated with."""
        hints = get_type_hints(function, include_extras=True) | instead
        result = hints.pop("return")
        self.result = None if result is type(None) else result
        self.arguments: list[Argument] = []
        self._prefixes: dict[str, str] = {}
        self._parameters: list[tuple[str, Any, Any]] = []
        groups = [group for hint in hints.values() if (group := _group(hint)) is not None]
        for name, parameter in inspect.signature(function).parameters.items():
            kind, dtype, written = _bare(hints[name])
            options, group = get_args(kind) or (kind,), _group(hints[name])
            self._parameters.append((name, group, parameter.default))
            self._prefixes[name] = f"{name}_" if groups.count(group) > 1 else ""
            if group is None:
                self.arguments.append(Argument(name, kind, dtype, written, parameter.default))
                continue
            for part, hint in get_type_hints(group, include_extras=True).items():
                part_kind, part_dtype, part_written = _bare(hint)
                if type(None) in options:
                    part_kind = part_kind | None
                flat = self._prefixes[name] + part
                self.arguments.append(Argument(flat, part_kind, part_dtype, written or part_written, parameter.default, name))

    @property
    def written(self) -> tuple[str, ...]:
        """Arguments that are written in place."""
        return tuple(argument.name for argument in self.arguments if argument.written)

    @property
    def schema(self) -> str:
        """Arguments and results as torch writes them, without a name and without defaults."""

        def flat() -> None:
            """A function for the flat signature."""

        ordered = [inspect.Parameter(one.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=one.kind) for one in self.arguments]
        flat.__signature__ = inspect.Signature(ordered, return_annotation=self.result)  # type: ignore[attr-defined]
        return torch.library.infer_schema(flat, mutates_args=self.written)

    def taking_flat(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` as an operator calls it: with all flat arguments, in order. It has the parameters of this signature."""
        names = [name for name, _, _ in self._parameters]
        assert list(inspect.signature(function).parameters) == names, f"{function} takes other parameters than {names}"
        if not any(group for _, group, _ in self._parameters):
            return function
        spans, begin = [], 0
        for _, group, _ in self._parameters:
            spans.append((begin, begin + (1 if group is None else len(group._fields)), group))
            begin = spans[-1][1]

        def kernel(*flat: Any) -> Any:
            made: list[Any] = []
            for begin, end, group in spans:
                parts = flat[begin:end]
                if group is None:
                    made.append(parts[0])
                else:
                    made.append(None if all(part is None for part in parts) else group._make(parts))
            return function(*made)

        return kernel

    def giving_flat(self, operator: Callable[..., Any]) -> Callable[..., Any]:
        """A function of this signature that calls ``operator``, which takes flat arguments."""
        if all(group is None and default is inspect.Parameter.empty for _, group, default in self._parameters):
            return operator
        return lambda *arguments, **named: operator(*self.flatten(arguments, named))

    def flatten(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
        """The flat arguments of a call of the function, defaults filled in.

        Raises:
            TypeError: an argument is missing, or one too many.
        """
        if len(arguments) > len(self._parameters) or named.keys() - {name for name, _, _ in self._parameters[len(arguments) :]}:
            raise TypeError(f"expected {[name for name, _, _ in self._parameters]}, found {len(arguments)} and {list(named)}")
        flat: list[Any] = []
        for place, (name, group, default) in enumerate(self._parameters):
            value = arguments[place] if place < len(arguments) else named.get(name, default)
            if value is inspect.Parameter.empty:
                raise TypeError(f"missing argument {name}")
            if group is None:
                flat.append(value)
            else:
                flat.extend((None,) * len(group._fields) if value is None else value)
        return flat

    def gather(self, flat: Mapping[str, Any]) -> dict[str, Any]:
        """The function's arguments by name, from flat ones. An optional group is None if none of its fields is given."""
        made: dict[str, Any] = {}
        for name, group, default in self._parameters:
            if group is None:
                if name in flat:
                    made[name] = flat[name]
                continue
            parts = [flat.get(self._prefixes[name] + part) for part in group._fields]
            made[name] = default if default is None and all(part is None for part in parts) else group(*parts)
        return made


def _group(hint: Any) -> Any:
    """The NamedTuple that a parameter of this type is, or None."""
    kind = _bare(hint)[0]
    kinds = [option for option in get_args(kind) or (kind,) if option is not type(None)]
    return kinds[0] if len(kinds) == 1 and hasattr(kinds[0], "_fields") else None


def _bare(hint: Any) -> tuple[Any, torch.dtype | None, bool]:
    """A type without its annotations, the dtype of a tensor, and whether it, or its part other than None, is written."""
    if get_origin(hint) is Annotated:
        kind, dtype, written = _bare(get_args(hint)[0])
        dtypes = [note for note in hint.__metadata__ if isinstance(note, torch.dtype)]
        return kind, dtypes[0] if dtypes else dtype, written or _WRITTEN in hint.__metadata__
    options = [_bare(option) for option in get_args(hint)] if type(None) in get_args(hint) else []
    if not options:
        return hint, torch.float32 if hint is Tensor else None, False
    kind = options[0][0]
    for option, _, _ in options[1:]:
        kind = kind | option
    return kind, next((dtype for _, dtype, _ in options if dtype is not None), None), any(written for _, _, written in options)


@dataclass(frozen=True)
class KernelOp:
    """One op: the reference is the specification, with which every other implementation is compared.

    Nothing is imported, compiled or built before :meth:`implementation` is called.

    Attributes:
        reference: its docstring is the contract: shapes, dtypes and meaning.
        name: empty: the reference's.
        native: module of :mod:`graphspec.kernels` that has a function of the op's name; None: the CPU has no native kernel.
        fused: ``file:attribute`` of the operator in the folder ``fused`` next to the reference; empty: ``OP`` in the file of the op's name.
            None: a fused cycle runs the reference, which the compiler fuses with what is around it.
        invariant: the same of the operator that ``cycle_invariant`` and ``batch_invariant`` numerics have in its place; empty: the same
            one.
        exact: implementations agree bit for bit; otherwise it is a float op, which is compared with an fp64 oracle.
        prompts: no cycle runs it.
    """

    reference: Callable[..., Any]
    name: str = ""
    native: str | None = None
    fused: str | None = ""
    invariant: str = ""
    exact: bool = True
    prompts: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or self.reference.__name__)

    @cached_property
    def implementations(self) -> Mapping[str, str]:
        """``"module:attribute"`` by name, without the reference."""
        package, topic = __name__.rpartition(".")[0], self.reference.__module__.rpartition(".")[0]
        native = {} if self.native is None else {"native": f"{package}.{self.native}:{self.name}"}
        fused = {} if self.fused is None else {"fused": f"{topic}.fused.{self.fused or f'{self.name}:OP'}"}
        invariant = {"invariant": f"{topic}.fused.{self.invariant}"} if self.invariant else {}
        return native | fused | invariant

    @property
    def contract(self) -> str:
        """The docstring of the reference."""
        return self.reference.__doc__ or ""

    @cached_property
    def signature(self) -> Signature:
        """The signature of the reference."""
        return Signature(self.reference)

    @cached_property
    def mutates(self) -> tuple[str, ...]:
        """Arguments the op writes in place; every other argument is read only."""
        return self.signature.written

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all implementations, the reference first."""
        return ("reference", *self.implementations)

    @property
    def fused_names(self) -> tuple[str, ...]:
        """Names of the implementations by fused kernels, for all numerics."""
        return tuple(name for name in ("fused", "invariant") if name in self.implementations)

    def fused_name(self, numerics: str) -> str:
        """Name of the implementation that a fused cycle runs under these numerics."""
        lawful = numerics == "batch_invariant" or (numerics == "cycle_invariant" and not self.prompts)
        if lawful and "invariant" in self.implementations:
            return "invariant"
        return "fused" if "fused" in self.implementations else "reference"

    def implementation(self, name: str) -> Callable[..., Any]:
        """The callable of one implementation.

        Raises:
            ConfigError: there is no implementation of that name.
        """
        if name == "reference":
            return self.reference
        if name not in self.implementations:
            raise ConfigError(f"kernels.{self.name}", "one of " + ", ".join(self.names), repr(name))
        module, _, attribute = self.implementations[name].partition(":")
        function: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
        return function

    def call(self, function: Callable[..., Any], case: Case) -> Any:
        """The result of an implementation for a case."""
        return function(**self.signature.gather(case))

    def without_data(self, sizes: Mapping[str, int], **given: Any) -> Case:
        """A case of ``meta`` tensors of given sizes.

        A tensor's shape follows from its name: ``window_token_RAc`` is ``[R, Ac]``. Its dtype is the annotated one. An optional one is
        None if a size is missing.

        Args:
            sizes: by letter, as :mod:`graphspec.shapes` has them.
            given: other arguments by name. A dtype is that of the tensor, a tuple its dtype and its shape; None stands for a whole group.

        Raises:
            KeyError: a size of an argument that is not optional, or a number, is missing.
        """
        made: Case = {}
        for one in self.signature.arguments:
            value = given[one.group] if one.group in given else given.get(one.name, one.default if one.dtype is None else one.dtype)
            if isinstance(value, torch.dtype):
                letters = re.findall("[A-Z][a-z]?|1", one.name.rpartition("_")[2])
                known = bool(letters) and sizes.keys() | {"1"} >= set(letters)
                value = (value, *((1 if letter == "1" else sizes[letter]) for letter in letters)) if known else one.default
                value = None if value is inspect.Parameter.empty and one.kind is not Tensor else value
            if value is inspect.Parameter.empty:
                raise KeyError(one.name)
            made[one.name] = torch.empty(value[1:], dtype=value[0], device="meta") if isinstance(value, tuple) else value
        return made


def kernel_op(
    *, name: str = "", native: str | None = None, fused: str | None = "", invariant: str = "", exact: bool = True, prompts: bool = False
) -> Callable[[_F], _F]:
    """Declare that a function is the reference of an op; :class:`KernelOp` says what the arguments mean.

    An op needs no other entry: :data:`graphspec.kernels.OPS` has every function so declared in the modules of its rooms.
    """

    def declare(reference: _F) -> _F:
        vars(reference)["kernel_op"] = KernelOp(reference, name, native, fused, invariant, exact, prompts)
        return reference

    return declare
