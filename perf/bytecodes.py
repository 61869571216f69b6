"""How many Python bytecodes a call executes inside one package: a measure of host work that no other load on the machine changes.

The count is the same on every machine for one minor version of Python and another for the next, since the compiler changes. Only functions
of the package count, so versions of torch and numpy do not. Imports no torch.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any


def count_bytecodes(run: Callable[[], object], package: str) -> int:
    """Bytecodes that ``run`` executes in this thread, in functions of ``package`` and its subpackages, those it calls included.

    A function belongs to the module whose globals it runs in, which holds for what ``dataclass`` generates as well. Warm ``run`` up first:
    what is cached or imported at the first call counts there. Garbage is not collected meanwhile: finalizers of other objects would count.
    """
    collects = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        return _by_monitoring(run, package) if sys.version_info >= (3, 12) else _by_tracing(run, package)
    finally:
        if collects:
            gc.enable()


def _belongs(frame: FrameType, package: str) -> bool:
    module = frame.f_globals.get("__name__") or ""
    return module == package or module.startswith(f"{package}.")


def _by_tracing(run: Callable[[], object], package: str) -> int:
    """Python 3.11: a trace function that asks for opcode events."""
    count = 0

    def inside(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "opcode"
        return inside

    def entered(frame: FrameType, event: str, arg: Any) -> Any:
        if not _belongs(frame, package):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return inside

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


def _by_monitoring(run: Callable[[], object], package: str) -> int:
    """Python 3.12 and later: instruction events of :mod:`sys.monitoring`."""
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore]
    tool = next((number for number in range(6) if monitoring.get_tool(number) is None), None)
    if tool is None:
        raise RuntimeError("sys.monitoring: expected a free tool number, found all six in use")
    count = 0
    # The code object is kept with the answer: a number of a dead one may be given to another.
    known: dict[int, tuple[CodeType, bool]] = {}

    def executed(code: CodeType, offset: int) -> Any:
        nonlocal count
        if id(code) not in known:
            known[id(code)] = code, _belongs(sys._getframe(1), package)  # noqa: SLF001
        if not known[id(code)][1]:
            return monitoring.DISABLE
        count += 1
        return None

    monitoring.use_tool_id(tool, "graphspec bytecodes")
    monitoring.register_callback(tool, monitoring.events.INSTRUCTION, executed)
    monitoring.restart_events()
    try:
        monitoring.set_events(tool, monitoring.events.INSTRUCTION)
        run()
    finally:
        monitoring.set_events(tool, 0)
        monitoring.register_callback(tool, monitoring.events.INSTRUCTION, None)
        monitoring.free_tool_id(tool)
    return count
