"""The kernels of the operators of a cycle: each call's launcher, run on ``meta`` tensors of the call's shapes, strides and numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

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


def on_meta(value: Any) -> Any:
    """``value`` with ``meta`` tensors of the same shapes and strides in place of tensors."""
    return tree_map_only(torch.Tensor, lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"), value)


class _Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, Callable[..., Any], Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == NAMESPACE:
            launcher = OPDEFS[func._schema.name]._init_fn
            self.found.append((func._schema.name.partition("::")[2], launcher, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def operator_calls(program: Callable[[], None]) -> list[OperatorCall]:
    """The operators that ``program`` calls, over fake tensors, in order."""
    with _Calls() as calls, torch.no_grad():
        program()
    made = []
    for name, launcher, args, kwargs in calls.found:
        with torch._subclasses.fake_tensor.unset_fake_temporarily(), recording() as launches:
            launcher(*on_meta(args), **on_meta(kwargs))
        made.append(OperatorCall(name, tuple(launches)))
    return made
