"""torch.compile of stages: one graph per region, static shapes, nothing shared between programs.

Imports Dynamo and Inductor, which takes longer than everything an eager engine imports: only what compiles imports this.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch._dynamo import lookup_backend
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor import config
from torch._inductor.exc import CppCompileError, InvalidCxxCompiler
from torch._inductor.runtime.cache_dir_utils import cache_dir

from ..errors import ResourceError
from ..host.native_build import check_trusted
from ..plan.buffers import Views
from .compilations import Compilations
from .stages.stage import Stage

KEY, HINT = "runtime=compiled", "install g++, or choose runtime=eager"
OWN_CACHE = "set TORCHINDUCTOR_CACHE_DIR to a folder of your own"


class Region:
    """One compiled callable without arguments or results, over tensors that never move.

    The first call compiles. Later calls pass the same tensors to the compiled code without going through Dynamo: addresses and shapes
    never change, so there is nothing to guard.

    Compiled code and tensors belong to the region and die with it. Dynamo keeps every backend it was ever given, and everything it installs
    in the globals of a compiled function. So the backend refers to the region weakly, and drops the code once the region has it.

    Args:
        run: what to compile; a function with a code object and globals of its own.
        threads: of the compiled loops on a CPU; None: as many as torch has.
        compilations: counts its graph when that is compiled.

    Raises:
        ResourceError: see :func:`check_cache`.
    """

    def __init__(self, run: Callable[[], None], threads: int | None = None, compilations: Compilations | None = None) -> None:
        check_cache()
        self._settings = {} if threads is None else {"cpp.threads": threads}
        self._first: Callable[[], None] = torch.compile(run, fullgraph=True, dynamic=False, backend=_backend(weakref.ref(self)))
        self._code: Callable[..., Any] | None = None
        self._compilations = compilations or Compilations()
        self.runs = False
        """Compiling also runs the code. :meth:`compile` leaves it off, which is fine for stages: they write slots and return nothing."""
        self._tensors: tuple[Any, ...] = ()

    def take(self, code: Callable[..., Any], tensors: tuple[Any, ...]) -> None:
        """Store the compiled code and the tensors to call it with."""
        self._compilations.graphs += 1
        self._code, self._tensors = code, tensors

    @property
    def compiled(self) -> bool:
        """Its code is there."""
        return self._code is not None

    def __call__(self) -> None:
        """Run; the first time, compile.

        Raises:
            ResourceError: no C++ compiler that works.
        """
        if self._code is not None:
            self._code(*self._tensors)
            return
        self.runs = True
        self.compile()

    def compile(self) -> None:
        """Compile without running; nothing if it is compiled.

        Raises:
            ResourceError: no C++ compiler that works.
        """
        if self.compiled:
            return
        try:
            with config.patch(self._settings):
                self._first()
        except BackendCompilerFailed as error:
            inner = error.inner_exception
            if not isinstance(inner, InvalidCxxCompiler | CppCompileError):
                raise
            raise ResourceError(KEY, "a C++ compiler that torch.compile can use: $CXX, or g++", str(inner).strip()[-500:], HINT) from error


def _backend(weak: weakref.ref[Region]) -> Callable[[torch.fx.GraphModule, list[torch.Tensor]], Callable[..., Any]]:
    """Inductor, for one region. A function of its own, so that nothing but ``weak`` is closed over."""

    def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        compiled = [lookup_backend("inductor")(module, inputs)]

        def first(*tensors: Any) -> Any:
            code, region = compiled.pop(), weak()
            assert region is not None, "a region calls this itself"
            region.take(code, tensors)
            return code(*tensors) if region.runs else ()

        return first

    return backend


def check_cache() -> None:
    """Check that only this user can put code into Inductor's cache folder, whose default name in the temporary folder can be guessed.

    Raises:
        ResourceError: others can, or there is no such folder.
    """
    try:
        check_trusted(cache_dir(), "compiler cache", OWN_CACHE)
    except OSError as error:
        raise ResourceError("compiler cache", "a folder for compiled code", error, OWN_CACHE) from error


def compile_stages(stages: Sequence[Stage], views: Views, threads: int | None = None, compilations: Compilations | None = None) -> Region:
    """Compile ``stages`` over ``views`` as one region; the compilation itself happens at the first call.

    ``threads`` and ``compilations`` are those of :class:`Region`.

    The region has its own code object, because Dynamo keeps compiled graphs per code object: with one for all buckets it would search
    through all graphs, and hit the recompilation limit. It also has its own globals, into which Dynamo installs what it compiled.
    """
    ordered = tuple(stages)

    def run() -> None:
        for stage in ordered:
            stage(views)

    name = f"run_{ordered[0].name}" if len(ordered) == 1 else "run_cycle"
    own = {"__name__": __name__, "__builtins__": __builtins__}
    return Region(FunctionType(run.__code__.replace(co_name=name), own, name, None, run.__closure__), threads, compilations)
