"""The kernels of the operators of a program that runs over fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphspec.kernels.fused.launch import NAMESPACE, Launch, recording


@dataclass(frozen=True)
class OperatorCall:
    """One call of an operator of ours.

    Attributes:
        name: without the namespace.
        launches: in order; none: a library product, which is a kernel all the same.
    """

    name: str
    launches: tuple[Launch, ...]

    @property
    def kernels(self) -> int:
        return max(len(self.launches), 1)


class _Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[OperatorCall] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with recording() as launches:
            result = func(*args, **(kwargs or {}))
        if func.namespace == NAMESPACE:
            self.found.append(OperatorCall(func._schema.name.partition("::")[2], tuple(launches)))
        return result


def operator_calls(program: Callable[[], None]) -> list[OperatorCall]:
    """The operators that ``program`` calls, over fake or ``meta`` tensors, in order."""
    with _Calls() as calls, torch.no_grad():
        program()
    return calls.found
