"""What an op of the catalog is: its contract, its reference, its other implementations, and small inputs to compare them on."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import ConfigError

Case = dict[str, Any]
"""Keyword arguments of one call."""


@dataclass(frozen=True, slots=True)
class KernelOp:
    """One op: the reference is the specification, every other implementation is measured against it.

    ``implementations`` maps a name to ``"module:attribute"``; nothing is imported, compiled or built before :meth:`implementation` is asked
    for it.
    """

    name: str
    contract: str
    """Shapes, dtypes and meaning; the docstring of the reference."""
    reference: Callable[..., Any]
    cases: Callable[[torch.Generator], list[Case]]
    """Small example inputs, odd sizes included; drawn on the CPU."""
    implementations: Mapping[str, str] = field(default_factory=dict)
    mutates: tuple[str, ...] = ()
    """Arguments the op writes in place; every other argument is read only."""
    exact: bool = True
    """True: implementations agree bit for bit. False: a float op, held to an fp64 oracle."""

    @property
    def names(self) -> tuple[str, ...]:
        """Every implementation there is, the reference first."""
        return ("reference", *self.implementations)

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
