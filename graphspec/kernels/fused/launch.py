"""Launches fused kernels, and registers launchers as operators."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_map_only

from ...errors import CaptureError
from ..op import KernelOp, Signature
from ..registry import op_of
from .hopper import MULTIPROCESSORS

NAMESPACE = "graphspec"
MAX_PROGRAMS = 65535
"""Largest extent of a grid in its second and third dimension."""

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, on CPU tensors. Decided when Triton is imported (``TRITON_INTERPRET=1``)."""


def _accept_tensor_bounds() -> None:
    """Make loops with a loaded bound work in the interpreter, whose scalars are arrays of one element, which numpy 2.4 refuses."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    name = "_patch_lang_tensor"
    original = getattr(interpreter, name)

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    setattr(interpreter, name, patch)


def _sum_dots_in_one_order() -> None:
    """Make the interpreter's ``tl.dot`` sum pairwise, and accept bfloat16.

    The interpreter calls BLAS, which on some processors sums a row in an order that depends on the number of rows. A GPU's matrix
    instruction does not, and the kernels' fixed order of summation relies on that. It also multiplies bfloat16 as integers.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")

    def widened(factor: Any, dtype: Any) -> Any:
        if factor.dtype.is_bf16():
            return (factor.data.astype("uint32") << 16).view("float32").astype(dtype)
        if factor.dtype.is_fp8():
            raise CaptureError("tl.dot in the interpreter", "factors of 16 bits or more", str(factor.dtype))
        return factor.data.astype(dtype)

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        dtype = d.data.dtype
        terms = widened(a, dtype)[..., :, :, None] * widened(b, dtype)[..., None, :, :]  # [..., M, K, N]
        while (half := terms.shape[-2] // 2) > 0:  # K is a power of two, as every extent of a tile
            terms = terms[..., :half, :] + terms[..., half:, :]
        return interpreter.TensorHandle(terms[..., 0, :] + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


def _convert_bfloat16() -> None:
    """Make the interpreter round float32 to the nearest bfloat16, ties to even, and keep subnormals, as a GPU does. It cuts bits off."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    builder = interpreter.InterpreterBuilder
    original = builder.cast_impl

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if src.dtype.scalar.is_fp32() and dst_type.scalar.is_bf16():
            rounded = torch.from_numpy(src.data.copy()).bfloat16().view(torch.int16).numpy()
            return interpreter.TensorHandle(rounded.view("uint16"), dst_type.scalar)
        if src.dtype.scalar.is_bf16() and dst_type.scalar.is_fp32():
            return interpreter.TensorHandle((src.data.astype("uint32") << 16).view("float32"), dst_type.scalar)
        return original(self, src, dst_type)

    builder.cast_impl = cast_impl


if INTERPRETED:
    _accept_tensor_bounds()
    _sum_dots_in_one_order()
    _convert_bfloat16()


@dataclass(frozen=True, slots=True)
class Launch:
    """One recorded launch, without data: what ahead-of-time compilation needs."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constexprs: dict[str, Any]
    num_warps: int
    num_stages: int

    @property
    def values(self) -> dict[str, Any]:
        """Arguments and compile-time constants by name."""
        return {**dict(zip(self.kernel.arg_names, self.args, strict=False)), **self.constexprs}

    @property
    def programs(self) -> int:
        """All of the grid."""
        return math.prod(self.grid)


@dataclass(slots=True)
class _Recorder:
    launches: list[Launch] = field(default_factory=list)


_recorder: ContextVar[_Recorder | None] = ContextVar("recorder", default=None)
_observer: ContextVar[Callable[[Sequence[Launch]], None] | None] = ContextVar("observer", default=None)


@dataclass(slots=True)
class LaunchState:
    """What the launches of one engine share. Engines launch and replay at the same time, on any stream, so none may have another's.

    Attributes:
        programmatic: kernels start while their predecessor drains (programmatic dependent launch, sm_90 and later).
        counters: see :func:`semaphores`.
    """

    programmatic: bool = False
    counters: dict[torch.device, Tensor] = field(default_factory=dict)


_state: ContextVar[LaunchState] = ContextVar("launch state", default=LaunchState())  # noqa: B039 - of launches outside of any engine


@contextmanager
def launching(state: LaunchState) -> Iterator[None]:
    """A context whose launches, captured ones too, share ``state``."""
    token = _state.set(state)
    try:
        yield
    finally:
        _state.reset(token)


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """A context in which :func:`launch` records instead of running; operators over fake and ``meta`` tensors record their launches too."""
    recorder = _Recorder()
    token = _recorder.set(recorder)
    try:
        yield recorder.launches
    finally:
        _recorder.reset(token)


@contextmanager
def observing(observer: Callable[[Sequence[Launch]], None]) -> Iterator[None]:
    """A context that shows ``observer`` the launches of every operator that is traced. Launches that really run are not shown."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def launch(kernel: Any, grid: Sequence[int], *args: Any, num_warps: int = 4, num_stages: int = 2, **constexprs: Any) -> None:
    """Run ``kernel`` over ``grid``.

    A kernel that supports programmatic launch has a constexpr ``PDL``, which is filled in here. With it set, the kernel must call
    ``gdc_wait`` before its first access to memory that another kernel writes.

    Args:
        kernel: a ``triton.jit`` function.
        grid: one to three extents.
        args: positional arguments, tensors and numbers.
        num_warps, num_stages: of the compiled kernel.
        constexprs: compile-time arguments by name.

    Raises:
        CaptureError: the grid is larger than CUDA allows.
    """
    if any(extent > MAX_PROGRAMS for extent in grid[1:]):
        raise CaptureError(f"grid of {kernel.fn.__name__}", f"at most {MAX_PROGRAMS} in its last two dimensions", tuple(grid))
    pdl = "PDL" in kernel.arg_names
    if pdl:
        constexprs["PDL"] = programmatic = _state.get().programmatic and not INTERPRETED
    recorder = _recorder.get()
    if recorder is not None:
        recorder.launches.append(Launch(kernel, tuple(grid), args, constexprs, num_warps, num_stages))
        return
    extra = {"launch_pdl": True} if pdl and programmatic else {}
    # Triton launches on the current device, whichever the tensors are on.
    with torch.cuda.device_of(next(value for value in args if isinstance(value, Tensor))):
        kernel[tuple(grid)](*args, **constexprs, num_warps=num_warps, num_stages=num_stages, **extra)


def _without_data(value: Any) -> Any:
    """``value`` with ``meta`` tensors in place of tensors."""

    def empty(tensor: Tensor) -> Tensor:
        # With its storage offset: Triton compiles another kernel if that is no multiple of 16 bytes.
        whole = torch.empty(tensor.untyped_storage().nbytes() // tensor.element_size(), dtype=tensor.dtype, device="meta")
        return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    return tree_map_only(Tensor, empty, value)


def dry_call(launcher: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call a launcher without running anything, and return its results as ``meta`` tensors. A :func:`recording` around it has the launches.

    Args:
        launcher: returns fresh tensors, never its arguments.
        arguments, named: of the call; only shape, strides, dtype and storage offset of tensors are used.
    """
    outer = _recorder.get()
    with unset_fake_temporarily(), recording() as launches:
        arguments, named = _without_data((arguments, named))
        result = launcher(*arguments, **named)
    if outer is not None:
        outer.launches += launches
    if (observer := _observer.get()) is not None:
        observer(launches)
    return result


def like_first(first: Tensor, *rest: object) -> Tensor:
    """Fake implementation of an operator whose result has the shape and dtype of its first argument."""
    return first.new_empty(first.shape)


def operator(
    name: str, function: Callable[..., Any], signature: Signature | None = None, fake: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Register ``function`` as operator ``graphspec::name``, opaque to the compiler, with a fake implementation.

    Args:
        name: of the operator.
        function: annotated with plain types and groups of them; returns fresh tensors, never its arguments.
        signature: of the operator; default: that of the function.
        fake: results for fake tensors, from the flat arguments; default: ``function`` itself with its launches disabled.

    Returns:
        A function with the signature, defaults included. The operator itself takes flat arguments without defaults: torch does not pass
        arguments that have their default, and 2.11 then misses those that are written.
    """
    border = Signature(function) if signature is None else signature
    kernel = border.taking_flat(function)

    def empty_results(*flat: Any) -> Any:
        device = next(value.device for value in flat if isinstance(value, Tensor))
        result = dry_call(kernel, *flat)
        return tree_map_only(Tensor, lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device), result)

    made = torch.library.custom_op(f"{NAMESPACE}::{name}", kernel, mutates_args=border.written, schema=border.schema)
    made.register_fake(empty_results if fake is None else fake)
    return border.giving_flat(made)


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]


STORED: Any = torch.library.custom_op(f"{NAMESPACE}::stored", _copies, mutates_args=(), schema="(Tensor[] tensors) -> Tensor[]")
"""Copies, opaque to the compiler; see :attr:`graphspec.kernels.registry.KernelSet.stored`."""
STORED.register_fake(_copies)


def launcher(op: KernelOp, numerics: str = "fast") -> Callable[..., Any]:
    """The launcher of an op under these numerics: the function of the op's name in the file of its implementation, or its reference."""
    name = op.fused_name(numerics)
    if name == "reference":
        return op.reference
    found: Callable[..., Any] = getattr(importlib.import_module(op.implementations[name].partition(":")[0]), op.name)
    return found


def register(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """Register the launcher of the op of its name, with the op's signature; see :func:`operator`."""
    return operator(launcher.__name__, launcher, op_of(launcher.__name__).signature)


def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of ``device``; without a GPU, that of an H200."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else MULTIPROCESSORS


SEMAPHORES = 1 << 16


def semaphores(device: torch.device, count: int) -> Tensor:
    """Zeroed int32 counters by which programs of one launch synchronise; the last program of a group resets its counter to 0.

    There is one buffer per :class:`LaunchState` and device, shared by all kernels: the launches of one engine are ordered.

    Raises:
        CaptureError: ``count`` is too large, or the buffer would be allocated during a capture.
    """
    counters = _state.get().counters
    if count > SEMAPHORES:
        raise CaptureError("semaphores", f"at most {SEMAPHORES}", count)
    if device not in counters:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise CaptureError("semaphores", "a warm-up before the capture", "the first launch, captured")
        counters[device] = torch.zeros(SEMAPHORES, dtype=torch.int32, device=device)
    return counters[device]
