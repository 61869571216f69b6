"""Records a tape by running a program once.

A tape holds native ops only. Views and allocations need not be repeated, and copies are done by a native op. If any other op runs, there is
no tape, and the caller has to compile the program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .call import copy
from .tape import Calls, noting

ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
NAMESPACE = "graphspec_native"


class _Watch(TorchDispatchMode):
    """Watches all operators, and records the first that a tape cannot repeat."""

    refused: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].dtype == args[1].dtype:
            copy(*args[:2])
            return args[0]
        if not (func.namespace == NAMESPACE or func.is_view or func.overloadpacket.__name__ in ALLOCATIONS):
            self.refused = self.refused or str(func)
        return func(*args, **kwargs or {})


def record(run: Callable[[], None]) -> Calls | str:
    """Call ``run``. Returns its native calls or, if it also ran other operators, the name of the first."""
    calls, watch = Calls(), _Watch()  # type: ignore[no-untyped-call]
    with noting(calls), watch:
        run()
    return calls if watch.refused is None else watch.refused
